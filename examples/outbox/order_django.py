"""Writes an order and its event in one transaction, with Django.

    pip install django 'psycopg[binary]'
    python3 order_django.py postgres://localhost/shop 7 1999
"""

import json
import sys
from urllib.parse import unquote, urlsplit

import django
from django.conf import settings
from django.db import connection, models, transaction


def configure(url):
    """A Django project in one file; yours has settings.py."""
    parts = urlsplit(url)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
    }
    settings.configure(DATABASES={"default": database}, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField")
    django.setup()


def order_model():
    """The model of an order."""

    class Order(models.Model):
        id = models.BigIntegerField(primary_key=True)
        cents = models.BigIntegerField()

        class Meta:
            app_label = "shop"
            db_table = "orders"

    return Order


def enqueue(topic, key, body):
    """Writes an event in the transaction of Django's connection; returns its id."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT hapax.enqueue(%s, %s, %s::jsonb)::text", [topic, key, json.dumps(body)])
        return cursor.fetchone()[0]


def place(orders, order, cents):
    """Places an order; returns the id of its event."""
    with transaction.atomic():
        orders.objects.create(id=order, cents=cents)
        return enqueue("orders.placed", f"order-{order}", {"order": order, "cents": cents})


if __name__ == "__main__":
    url, order, cents = sys.argv[1:]
    configure(url)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, cents bigint)")
    print(place(order_model(), int(order), int(cents)))

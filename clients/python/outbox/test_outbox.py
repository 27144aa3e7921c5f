"""examples/outbox: an order and its event in one transaction, from each library; a relay publishes exactly the committed ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from migrated import migrated

EXAMPLE = Path(__file__).parents[3] / "examples/outbox"
sys.path.insert(0, str(EXAMPLE))

import order_django  # noqa: E402
import order_psycopg  # noqa: E402
import order_sqlalchemy  # noqa: E402


@pytest.fixture(scope="module")
def url():
    url = migrated()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE orders (id bigint PRIMARY KEY, cents bigint)")
    order_django.configure(url)
    return url


def events(url):
    """The events that wait, by order."""
    listing = [os.environ["HAPAX_BIN"], "outbox", "list", "--from", url, "--json"]
    listed = json.loads(subprocess.run(listing, check=True, capture_output=True, timeout=60).stdout)
    return {json.loads(event["body"])["order"]: event for event in listed}


def check(url, order, event):
    found = events(url)[order]
    assert (found["id"], found["key"], found["topic"]) == (event, f"order-{order}", "orders.placed")


def test_psycopg(url):
    with psycopg.connect(url, autocommit=True) as db:
        check(url, 1, order_psycopg.place(db, 1, 1999))
        with pytest.raises(psycopg.errors.UniqueViolation):
            order_psycopg.place(db, 1, 1999)
        with pytest.raises(ZeroDivisionError), db.transaction():
            order_psycopg.place(db, 10, 1)
            1 / 0
    assert 10 not in events(url)


def test_sqlalchemy(url):
    engine = create_engine(url.replace("postgres://", "postgresql+psycopg://", 1))
    with Session(engine) as session, session.begin():
        event = order_sqlalchemy.place(session, 2, 1999)
    check(url, 2, event)
    with Session(engine) as session:
        order_sqlalchemy.place(session, 20, 1)
        session.rollback()
    assert 20 not in events(url)
    engine.dispose()


def test_django(url):
    from django.db import transaction

    orders = order_django.order_model()
    check(url, 3, order_django.place(orders, 3, 1999))
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        order_django.place(orders, 30, 1)
        1 / 0
    assert 30 not in events(url)


def test_psql(url):
    psql = ["psql", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-v", "order=4", "-v", "cents=1999"]
    subprocess.run([*psql, "-f", str(EXAMPLE / "order.sql"), url], check=True, capture_output=True, timeout=60)
    assert events(url)[4]["key"] == "order-4"


@pytest.mark.parametrize("program, order", [("order_psycopg.py", 5), ("order_sqlalchemy.py", 6), ("order_django.py", 7)])
def test_programs_run_as_printed(url, program, order):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / program), url, str(order), "1999"], check=True, capture_output=True, timeout=60, text=True
    )
    check(url, order, ran.stdout.strip())

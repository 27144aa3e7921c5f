"""Writes an order and its event in one transaction, with psycopg 3.

    pip install 'psycopg[binary]'
    python3 order_psycopg.py postgres://localhost/shop 7 1999
"""

import json
import sys

import psycopg


def place(db, order, cents):
    """Places an order; returns the id of its event. Both are there after the commit, or neither."""
    with db.transaction():
        db.execute("INSERT INTO orders (id, cents) VALUES (%s, %s)", (order, cents))
        body = json.dumps({"order": order, "cents": cents})
        enqueue = "SELECT hapax.enqueue('orders.placed', %s, %s::text)::text"
        return db.execute(enqueue, (f"order-{order}", body)).fetchone()[0]


if __name__ == "__main__":
    url, order, cents = sys.argv[1:]
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, cents bigint)")
        print(place(db, int(order), int(cents)))

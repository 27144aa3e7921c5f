"""Charges an order once, from Python: `hapax.enter` and `hapax.record` inside of your own transaction, with psycopg 3.

    pip install 'psycopg[binary]'
    hapax migrate --store postgres://localhost/shop
    python3 charge.py postgres://localhost/shop order-7 1999
"""

import hashlib
import json
import sys
import time

import psycopg

SCOPE = "shop/charge"
TRIES_MAX = 60


class InProgress(Exception):
    """Another transaction works on the same key."""


def charge(db, order, cents):
    """The outcome of the charge, whether it was made now or before. Raises InProgress: try again."""
    fingerprint = hashlib.sha256(json.dumps([order, cents]).encode()).hexdigest()
    with db.transaction():  # commits at its end, rolls back on an exception
        enter = "SELECT state, outcome, failed FROM hapax.enter(%s, %s, %s)"
        state, outcome, failed = db.execute(enter, (SCOPE, order, fingerprint)).fetchone()
        if state == "fresh":
            db.execute("INSERT INTO charges (order_id, cents) VALUES (%s, %s)", (order, cents))
            outcome = json.dumps({"charged": cents})
            db.execute("SELECT hapax.record(%s, %s, %s)", (SCOPE, order, outcome))
        elif state == "in-progress":
            raise InProgress(order)
        elif state == "mismatch":
            raise ValueError(f"{order} was used for another request")
        elif state == "in-doubt":
            raise RuntimeError(f"{order} is in doubt: hapax ledger resolve {SCOPE} {order}")
        elif failed:
            raise RuntimeError(f"{order} has failed: {outcome}")
    return json.loads(outcome) if outcome is not None else None


def charge_patiently(db, order, cents):
    """Tries again while another transaction works on the order. `hapax.enter` has waited for a second each time."""
    for _ in range(TRIES_MAX):
        try:
            return charge(db, order, cents)
        except InProgress:
            time.sleep(0.05)
    raise TimeoutError(f"{order} is still in progress")


if __name__ == "__main__":
    url, order, cents = sys.argv[1:]
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE IF NOT EXISTS charges (order_id text, cents bigint)")
        print(charge_patiently(db, order, int(cents)))

"""examples/transactional/charge.py: `hapax.enter` and `hapax.record` in transactions of psycopg."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from migrated import migrated

EXAMPLE = Path(__file__).parents[3] / "examples/transactional"
sys.path.insert(0, str(EXAMPLE))

from charge import SCOPE, InProgress, charge, charge_patiently  # noqa: E402


@pytest.fixture(scope="module")
def url():
    return migrated()


@pytest.fixture
def connect(url):
    """Makes connections, which are closed after the test."""
    opened = []

    def open_one():
        opened.append(psycopg.connect(url, autocommit=True))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def db(connect):
    return connect()


def charges(db, order):
    return db.execute("SELECT count(*) FROM charges WHERE order_id = %s", (order,)).fetchone()[0]


def state(db, order):
    return db.execute("SELECT state FROM hapax.enter(%s, %s, NULL, 100)", (SCOPE, order)).fetchone()[0]


def test_a_fresh_key_has_its_effect_and_a_duplicate_gets_its_outcome(db, connect, name):
    assert charge(db, name, 1999) == {"charged": 1999}
    assert charge(connect(), name, 1999) == {"charged": 1999}
    assert charges(db, name) == 1


def test_a_rollback_leaves_neither_effect_nor_entry(db, name):
    with pytest.raises(ZeroDivisionError):
        with db.transaction():
            charge(db, name, 1)
            1 / 0
    assert charges(db, name) == 0
    charge(db, name, 1)
    assert charges(db, name) == 1


def test_a_key_of_an_open_transaction_is_in_progress_for_others(db, connect, name):
    other = connect()
    with db.transaction():
        charge(db, name, 1)
        with pytest.raises(InProgress):
            charge(other, name, 1)
        assert state(other, name) == "in-progress"
    assert charge(other, name, 1) == {"charged": 1}
    assert charges(other, name) == 1


def test_another_request_with_the_same_key_is_refused(db, name):
    charge(db, name, 1)
    with pytest.raises(ValueError, match="another request"):
        charge(db, name, 2)
    assert charges(db, name) == 1


def test_a_commit_without_an_outcome_is_refused(db, name):
    with pytest.raises(psycopg.Error, match="recorded no outcome"):
        with db.transaction():
            assert state(db, name) == "fresh"
            db.execute("INSERT INTO charges VALUES (%s, 1)", (name,))
    assert charges(db, name) == 0


def test_fifty_concurrent_duplicates_have_one_effect(db, connect, name):
    connections = [connect() for _ in range(50)]
    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(lambda each: charge_patiently(each, name, 5), connections))
    assert outcomes == [{"charged": 5}] * 50
    assert charges(db, name) == 1


def test_the_example_runs_as_it_is(db, url, name):
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE / "charge.py"), url, name, "7"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.strip() == "{'charged': 7}"
    assert charges(db, name) == 1

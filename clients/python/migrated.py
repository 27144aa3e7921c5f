"""Makes a database with the schema `hapax` and a table of charges on the PostgreSQL server HAPAX_TEST_POSTGRES.

As a program, `python migrated.py COMMAND...`, it runs a command that finds the database's URL in DATABASE_URL.
"""

import os
import subprocess
import sys
import uuid


def migrated():
    """The URL of a new database."""
    server = os.environ.get("HAPAX_TEST_POSTGRES")
    assert server, "HAPAX_TEST_POSTGRES must be the URL of a PostgreSQL server; `cargo xtask test clients` sets it"
    url = f"{server}/clients_{uuid.uuid4().hex}"
    psql = ["psql", "--no-psqlrc", "--quiet"]
    subprocess.run([*psql, f"{server}/postgres", "-c", f"CREATE DATABASE {url.rsplit('/', 1)[1]}"], check=True, timeout=60)
    subprocess.run([os.environ["HAPAX_BIN"], "migrate", "--store", url], check=True, timeout=60)
    subprocess.run([*psql, url, "-c", "CREATE TABLE charges (order_id text, cents bigint)"], check=True, timeout=60)
    return url


if __name__ == "__main__":
    ended = subprocess.run(sys.argv[1:], env={**os.environ, "DATABASE_URL": migrated()}, check=False)
    sys.exit(ended.returncode)

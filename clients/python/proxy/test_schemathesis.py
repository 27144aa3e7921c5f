"""Schemathesis against `hapax proxy` before a service: whatever it sends, answers are as described, and no key makes
two orders."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture
def service():
    process = subprocess.Popen([sys.executable, str(HERE / "upstream.py")], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def proxy(service, tmp_path):
    command = [os.environ["HAPAX_BIN"], "proxy", "--listen", "127.0.0.1:0", "--upstream", service, "--key-required"]
    command += ["--ledger", f"embedded:{tmp_path / 'ledger'}", "--log-level", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        for line in process.stdout:
            assert time.monotonic() < deadline
            if line.startswith("  Proxy "):
                yield line.split()[1]
                break
    finally:
        process.terminate()
        process.wait(30)


def log(service):
    with urllib.request.urlopen(f"{service}/log", timeout=30) as answer:
        return json.load(answer)


def test_answers_are_as_described_and_no_key_makes_two_orders(service, proxy, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(HERE / "openapi.json"), "--url", proxy]
    command += ["--checks", CHECKS, "--max-examples", "200", "--seed", "7", "--request-timeout", "30"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    orders = log(service)
    keys = Counter(order["key"] for order in orders)
    # Ten keys, and those of ill-formed requests: some orders were made, none twice.
    assert keys and max(keys.values()) == 1, keys
    assert all(order["key"].startswith('"hapax-') and order["fence"].isdigit() for order in orders)


def test_the_same_order_is_replayed(service, proxy):
    request = urllib.request.Request(
        f"{proxy}/orders",
        data=b'{"item":"tea","cents":250}',
        headers={"Content-Type": "application/json", "Idempotency-Key": '"k1"'},
    )
    answers = []
    for _ in range(2):
        with urllib.request.urlopen(request, timeout=30) as answer:
            answers.append((answer.status, answer.headers.get("Idempotent-Replayed"), answer.read()))
    assert [(status, replayed) for status, replayed, _ in answers] == [(201, None), (201, "true")]
    assert answers[0][2] == answers[1][2]
    assert len(log(service)) == 1

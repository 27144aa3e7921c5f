"""examples/claims/worker.py against the real binary: duplicates, and consumers that are killed in the middle."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3
import pytest

WORKER = Path(__file__).parents[3] / "examples/claims/worker.py"
PATIENCE_S = 60


class Bank:
    """Counts calls and charges. It honours idempotency keys if told so, and hangs after a charge if told so."""

    def __init__(self, honours_keys=False, hangs=()):
        self.honours_keys, self.hangs = honours_keys, set(hangs)
        self.calls, self.charges, self.fences = [], [], []
        self.lock, self.reached = threading.Lock(), threading.Event()
        bank = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not bank.charge(order["id"], self.headers):
                    return
                body = json.dumps({"charge": f"ch-{order['id']}"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.over = threading.Event()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def charge(self, order, headers):
        with self.lock:
            self.calls.append(order)
            self.fences.append(int(headers["Hapax-Fence"]))
            if not (self.honours_keys and headers["Idempotency-Key"] in self.charges):
                self.charges.append(order)
            hang = order in self.hangs
            self.hangs.discard(order)
        if hang:  # the money is gone; the answer never comes
            self.reached.set()
            self.over.wait(PATIENCE_S)
        return not hang

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


class Shop:
    """A server with a queue of orders, workers and a bank."""

    def __init__(self, server, name):
        self.server, self.name, self.workers, self.banks = server, name, [], []
        self.sqs = boto3.client(
            "sqs", "us-east-1", endpoint_url=server.endpoint, aws_access_key_id="x", aws_secret_access_key="x"
        )
        self.url = self.sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "1"})["QueueUrl"]

    def bank(self, **how):
        self.banks.append(Bank(**how))
        return self.banks[-1]

    def order(self, *ids):
        for id in ids:
            self.sqs.send_message(QueueUrl=self.url, MessageBody=json.dumps({"id": id, "cents": 1999}))

    def worker(self, bank, **env):
        env = {"HAPAX_ENDPOINT": self.server.endpoint, "QUEUE": self.name, "BANK": bank.url, **env}
        process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = []
        threading.Thread(target=lambda: said.extend(process.stdout), daemon=True).start()
        self.workers.append(process)
        return process, said

    def left(self):
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        counts = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return sum(int(counts[name]) for name in names)

    def api(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.endpoint}/v1/claims{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def entry(self, id):
        try:
            return self.api("GET", f"/queue%2F{self.name}/{id}")["state"]
        except urllib.error.HTTPError as error:
            return json.load(error)["code"]

    def in_doubt(self):
        return [entry["key"] for entry in self.api("GET", "?state=in_doubt")["entries"]]

    def close(self):
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait(PATIENCE_S)
        for bank in self.banks:
            bank.close()


@pytest.fixture
def shop(own_server, name):
    shop = Shop(own_server, name)
    yield shop
    shop.close()


def until(holds, what, *said):
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what}; the workers said {said}"
        time.sleep(0.05)


def test_duplicates_are_charged_once_and_get_the_same_answer(shop):
    bank, orders = shop.bank(), [f"order-{n}" for n in range(15)]
    shop.order(*orders, *orders, *orders)
    said = [shop.worker(bank)[1] for _ in range(3)]
    until(lambda: shop.left() == 0, "orders are left over", said)
    assert sorted(bank.calls) == sorted(orders)
    for worker in shop.workers:
        worker.kill()
        worker.wait(PATIENCE_S)
    lines = [line.split(" ", 2) for worker in said for line in worker]
    replayed = [line for line in lines if line[1] == "completed" and line[2].strip()]
    assert all(outcome.strip() == str({"charge": f"ch-{id}"}) for id, _, outcome in replayed), replayed
    assert len(replayed) == 30, "two of three are told the result of the first"


def test_after_a_kill_between_claim_and_complete_park_charges_once_and_lists_the_doubt(shop):
    bank = shop.bank(hangs=["order-1"])
    shop.order("order-1", "order-2")
    first, _ = shop.worker(bank, LEASE_MS="3000")
    assert bank.reached.wait(PATIENCE_S)
    first.kill()  # charged, and not recorded
    _, said = shop.worker(bank, LEASE_MS="3000")
    until(lambda: shop.in_doubt() == ["order-1"], "the doubt is not listed", said)
    until(lambda: sum("order-1 in_doubt" in line for line in said) >= 2, "it does not come back", said)
    assert sorted(bank.charges) == ["order-1", "order-2"], "one of them twice"
    assert shop.left() == 1, "the message in doubt waits"
    # Someone asks the bank, and decides.
    outcome = {"charge": "ch-order-1"}
    shop.api("POST", f"/queue%2F{shop.name}/order-1/resolve", {"as": "completed", "outcome": outcome, "by": "ann"})
    until(lambda: shop.left() == 0, "the message does not go", said)
    until(lambda: any(line.strip() == f"order-1 completed {outcome}" for line in said), "it is not replayed", said)
    assert sorted(bank.calls) == ["order-1", "order-2"]


def test_what_someone_else_is_at_is_left_alone_and_replayed_when_it_is_done(shop):
    bank, key = shop.bank(), f"/queue%2F{shop.name}/order-1"
    grant = shop.api("PUT", key, {"lease_ms": 600_000})
    shop.order("order-1")
    _, said = shop.worker(bank)
    until(lambda: sum("order-1 in_progress" in line for line in said) >= 2, "it does not come back", said)
    assert shop.left() == 1
    shop.api("POST", f"{key}/complete", {"token": grant["token"], "outcome": "by another"})
    until(lambda: shop.left() == 0, "the message does not go", said)
    until(lambda: "order-1 completed by another\n" in said, "it is not replayed", said)
    assert bank.calls == []


@pytest.mark.parametrize("honours_keys", [True, False], ids=["a bank that honours keys", "a bank that does not"])
def test_after_a_kill_retry_calls_again_under_a_larger_fence(shop, honours_keys):
    bank = shop.bank(hangs=["order-1"], honours_keys=honours_keys)
    shop.order("order-1")
    first, _ = shop.worker(bank, LEASE_MS="2000", ON_DOUBT="retry")
    assert bank.reached.wait(PATIENCE_S)
    first.kill()
    _, said = shop.worker(bank, LEASE_MS="2000", ON_DOUBT="retry")
    until(lambda: shop.left() == 0, "the order is left over", said)
    assert bank.calls == ["order-1", "order-1"]
    assert bank.fences[0] < bank.fences[1]
    # What `retry` is worth depends on the bank: that is why the example parks.
    assert len(bank.charges) == (1 if honours_keys else 2)
    assert shop.entry("order-1") == "completed"


def test_a_worker_killed_before_its_claim_and_one_killed_after_completing_change_nothing(shop):
    bank = shop.bank()
    shop.order("order-1")
    message = shop.sqs.receive_message(QueueUrl=shop.url, VisibilityTimeout=1)["Messages"][0]
    assert json.loads(message["Body"])["id"] == "order-1"
    # Its consumer is gone; the message returns. The next one completes, and "dies" before it deletes:
    key = f"/queue%2F{shop.name}/order-1"
    grant = shop.api("PUT", key, {"lease_ms": 30_000})
    shop.api("POST", f"{key}/complete", {"token": grant["token"], "outcome": {"charge": "ch-order-1"}})
    _, said = shop.worker(bank)
    until(lambda: shop.left() == 0, "the order is left over", said)
    assert bank.calls == []

"""Celery with its SQS transport: a worker process and this producer."""

import os
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

PATIENCE_S = 40


@pytest.fixture
def celery(server, name, tmp_path, monkeypatch):
    """A producer with its worker: returns the module of jobs and a function that waits for traces."""
    traces = tmp_path / "traces"
    traces.touch()
    monkeypatch.setenv("HAPAX_ADDRESS", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("CELERY_QUEUE", name)
    monkeypatch.setenv("TRACES", str(traces))
    monkeypatch.setenv("VISIBILITY_TIMEOUT", "30")
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    folder = Path(__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    import jobs

    log = (tmp_path / "worker.log").open("w")
    command = [sys.executable, "-m", "celery", "-A", "jobs", "worker", "--pool", "solo", "--loglevel", "INFO"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    worker = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))

    def wait_for(count, settle=0):
        end = time.monotonic() + PATIENCE_S
        while len(found := traces.read_text().splitlines()) < count:
            told = (tmp_path / "worker.log").read_text()
            assert time.monotonic() < end and worker.poll() is None, f"{found}\n{told}"
            time.sleep(0.05)
        time.sleep(settle)
        found = [line.rsplit(" ", 1) for line in traces.read_text().splitlines()]
        return [(what, float(at)) for what, at in found]

    yield jobs, wait_for
    worker.terminate()
    try:
        worker.wait(20)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait(20)
    log.close()


def empty(server, name):
    import boto3

    client = boto3.client(
        "sqs", endpoint_url=server.endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    url = client.get_queue_url(QueueName=name)["QueueUrl"]
    names = ["", "NotVisible", "Delayed"]
    end = time.monotonic() + 20
    while True:
        found = client.get_queue_attributes(
            QueueUrl=url, AttributeNames=[f"ApproximateNumberOfMessages{name}" for name in names]
        )["Attributes"]
        if all(count == "0" for count in found.values()):
            return True
        assert time.monotonic() < end, found
        time.sleep(0.1)


def test_tasks_run_once_each(celery, server, name):
    jobs, wait_for = celery
    for n in range(20):
        jobs.add.delay(n, 0)
    found = [what for what, _ in wait_for(20, settle=1)]
    assert sorted(found) == sorted(f"add {n}" for n in range(20))
    assert empty(server, name)


def test_a_task_that_fails_is_retried_until_it_works(celery, server, name):
    jobs, wait_for = celery
    jobs.flaky.delay()
    found = wait_for(3, settle=1)
    assert [what for what, _ in found] == ["flaky 0", "flaky 1", "flaky 2"]
    assert found[1][1] - found[0][1] >= 0.9
    assert empty(server, name)


def test_a_task_with_a_countdown_and_one_with_an_eta_run_once_and_not_before(celery, server, name):
    jobs, wait_for = celery
    asked = time.time()
    jobs.later.apply_async(("countdown",), countdown=3)
    jobs.later.apply_async(("eta",), eta=datetime.now(timezone.utc) + timedelta(seconds=2))
    jobs.later.delay("now")
    found = dict(wait_for(3, settle=2))
    assert sorted(found) == ["later countdown", "later eta", "later now"]
    assert found["later countdown"] - asked >= 2.9 and found["later eta"] - asked >= 1.9
    assert len(wait_for(3)) == 3
    assert empty(server, name)

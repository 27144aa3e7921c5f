"""A Celery application as a user would write it, with its tasks' traces in a file."""

import os
import time
from pathlib import Path

from celery import Celery

TRACES = Path(os.environ["TRACES"])
QUEUE = os.environ["CELERY_QUEUE"]

app = Celery("jobs", broker=f"sqs://test:test@{os.environ['HAPAX_ADDRESS']}//")
app.conf.update(
    task_default_queue=QUEUE,
    broker_transport_options={
        "is_secure": False,
        "region": "us-east-1",
        "visibility_timeout": int(os.environ.get("VISIBILITY_TIMEOUT", "3600")),
        "polling_interval": 0.1,
        "wait_time_seconds": 2,
    },
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
)


def trace(line):
    with TRACES.open("a") as file:
        file.write(f"{line} {time.time()}\n")


@app.task
def add(a, b):
    trace(f"add {a + b}")


@app.task(bind=True, max_retries=5)
def flaky(self):
    trace(f"flaky {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=1)


@app.task
def later(name):
    trace(f"later {name}")

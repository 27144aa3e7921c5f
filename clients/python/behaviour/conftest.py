from pathlib import Path

import boto3
import botocore
import pytest
from botocore.config import Config

from hapax_server import POSTGRES, REDIS
from sqs import Queue

# AWS JSON since 1.31.81; before, SQS's model spoke the Query protocol.
PROTOCOL = "query" if tuple(map(int, botocore.__version__.split(".")[:2])) < (1, 31) else "json"

# What is sent by hand needs only one run.
BY_HAND = {"json": ["test_json_wire.py"], "query": ["test_query_wire.py", "test_query_by_get.py"]}
collect_ignore = BY_HAND["json" if PROTOCOL == "query" else "query"]


# Tests that do not pass on another store yet, each with its reason. Some depend on timing, so one that passes is no failure.
NOT_ON_OTHERS = {"not_on_postgres.txt": POSTGRES, "not_on_redis.txt": REDIS}


def pytest_collection_modifyitems(items):
    lists = [Path(__file__).with_name(name) for name, url in NOT_ON_OTHERS.items() if url]
    if not lists:
        return
    lines = [line for line in lists[0].read_text().splitlines() if line and not line.startswith("#")]
    declared = dict(line.split(": ", 1) for line in lines)
    for item in items:
        # Without the parameters and the folder: `test_fifo.py::test_x`.
        name = item.nodeid.split("/")[-1].split("[")[0]
        if name in declared:
            item.add_marker(pytest.mark.xfail(reason=declared[name], strict=False))


def client_for(endpoint, key="test", secret="test", region="us-east-1"):
    # Refused values must reach the server, so botocore does not look at them; and no retry hides an error.
    config = Config(
        parameter_validation=False, retries={"max_attempts": 0}, max_pool_connections=50, read_timeout=40
    )
    return boto3.session.Session().client(
        "sqs",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=config,
    )


@pytest.fixture(scope="session")
def sqs(server):
    client = client_for(server.endpoint)
    assert client.meta.service_model.metadata["protocol"] == PROTOCOL
    return client


@pytest.fixture
def make(sqs, name):
    """Creates queues: `make()`, `make("-dead")`, `make(fifo=True)`, `make(VisibilityTimeout=1)`."""

    def make(suffix="", fifo=False, **attributes):
        return Queue.create(sqs, f"{name}{suffix}", fifo, **attributes)

    return make


@pytest.fixture
def queue(make):
    return make()


@pytest.fixture
def fifo(make):
    return make(fifo=True)

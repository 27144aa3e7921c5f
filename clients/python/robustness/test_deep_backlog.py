"""A backlog of more than 100,000 messages: receives take as long as ever, up to the most that may be in flight."""

import statistics
import threading
import time

import pytest
from hapax_server import Folder
from load import Connection, create

IN_FLIGHT_MAX = 120_000
DEPTH, THREADS, SAMPLES, RATIO_MAX = IN_FLIGHT_MAX + 1_200, 6, 300, 3


def in_parallel(call):
    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)


@pytest.fixture(scope="module")
def deep():
    """A server and the URL of a queue with a backlog."""
    with Folder() as server:
        url = create(server, "deep", VisibilityTimeout=43200)
        entries = [{"Id": str(n), "MessageBody": "x" * 64} for n in range(10)]

        def fill():
            connection = Connection(server)
            for _ in range(DEPTH // 10 // THREADS):
                assert len(connection.call("SendMessageBatch", QueueUrl=url, Entries=entries)["Successful"]) == 10
            connection.close()

        in_parallel(fill)
        assert count(server, url, "") == DEPTH
        yield server, url


def count(server, url, which):
    name = f"ApproximateNumberOfMessages{which}"
    answer = Connection(server).call("GetQueueAttributes", QueueUrl=url, AttributeNames=[name])
    return int(answer["Attributes"][name])


def timed_receive(connection, url):
    start = time.monotonic()
    messages = connection.call("ReceiveMessage", QueueUrl=url)["Messages"]
    took = time.monotonic() - start
    connection.call("DeleteMessage", QueueUrl=url, ReceiptHandle=messages[0]["ReceiptHandle"])
    return took


def test_receive_latency_does_not_depend_on_the_depth(deep):
    server, url = deep
    shallow = create(server, "shallow")
    connection = Connection(server)
    # Another program may disturb one comparison; a receive that depends on the depth fails all of them.
    for _ in range(3):
        at_depth, at_zero = [], []
        for _ in range(SAMPLES):
            connection.call("SendMessage", QueueUrl=shallow, MessageBody="x" * 64)
            at_zero.append(timed_receive(connection, shallow))
            at_depth.append(timed_receive(connection, url))
        zero_ms, deep_ms = statistics.median(at_zero) * 1000, statistics.median(at_depth) * 1000
        print(f"receive: {zero_ms:.2f} ms at depth 0, {deep_ms:.2f} ms at depth {DEPTH}")
        if deep_ms <= RATIO_MAX * zero_ms + 1:
            return
    raise AssertionError(f"a receive takes {deep_ms:.2f} ms at depth {DEPTH}, {zero_ms:.2f} ms at depth 0")


def test_a_standard_queue_has_at_most_120000_messages_in_flight(deep):
    server, url = deep
    refusals = []

    def receive():
        connection = Connection(server)
        while not refusals:
            try:
                connection.call("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10)
            except AssertionError as refusal:
                refusals.append(str(refusal))
        connection.close()

    in_parallel(receive)
    assert refusals and all("403" in refusal and "OverLimit" in refusal for refusal in refusals), refusals
    assert count(server, url, "NotVisible") == IN_FLIGHT_MAX

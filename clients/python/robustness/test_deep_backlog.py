"""A backlog of 100,000 messages: a receive takes as long as from an empty queue."""

import statistics
import threading
import time

from load import Connection, create

DEPTH, SENDERS, SAMPLES, RATIO_MAX = 100_000, 6, 300, 3


def fill(server, url, batches):
    connection = Connection(server)
    entries = [{"Id": str(n), "MessageBody": "x" * 64} for n in range(10)]
    for _ in range(batches):
        assert len(connection.call("SendMessageBatch", QueueUrl=url, Entries=entries)["Successful"]) == 10
    connection.close()


def timed_receive(connection, url):
    start = time.monotonic()
    messages = connection.call("ReceiveMessage", QueueUrl=url)["Messages"]
    took = time.monotonic() - start
    connection.call("DeleteMessage", QueueUrl=url, ReceiptHandle=messages[0]["ReceiptHandle"])
    return took


def test_receive_latency_does_not_depend_on_the_depth(own_server):
    deep, shallow = create(own_server, "deep"), create(own_server, "shallow")
    senders = [
        threading.Thread(target=fill, args=(own_server, deep, DEPTH // 10 // SENDERS + 1)) for _ in range(SENDERS)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(300)
    connection = Connection(own_server)
    depth = connection.call("GetQueueAttributes", QueueUrl=deep, AttributeNames=["ApproximateNumberOfMessages"])
    assert int(depth["Attributes"]["ApproximateNumberOfMessages"]) >= DEPTH
    at_depth, at_zero = [], []
    for _ in range(SAMPLES):
        connection.call("SendMessage", QueueUrl=shallow, MessageBody="x" * 64)
        at_zero.append(timed_receive(connection, shallow))
        at_depth.append(timed_receive(connection, deep))
    zero, deep_ms = statistics.median(at_zero) * 1000, statistics.median(at_depth) * 1000
    print(f"receive: {zero:.2f} ms at depth 0, {deep_ms:.2f} ms at depth {DEPTH}")
    assert deep_ms <= RATIO_MAX * zero + 1

"""What a restart keeps, whether the server was asked to stop or killed."""

import threading
import time
from contextlib import suppress

import pytest
from botocore.exceptions import BotoCoreError

from conftest import client_for
from hapax_server import Folder
from sqs import Queue, eventually, fails


@pytest.fixture(params=["stop", "kill"])
def restart(request, own_server):
    """Ends the server, softly or hard, and starts it again; returns a new client."""

    def restart():
        code = getattr(own_server, request.param)()
        assert request.param == "kill" or code == 0
        own_server.start()
        return client_for(own_server.endpoint)

    return restart


@pytest.fixture
def own(own_server):
    return client_for(own_server.endpoint)


def test_messages_survive(own, restart):
    queue = Queue.create(own, "q")
    sent = [queue.send(f"{n}", MessageAttributes={"n": {"DataType": "Number", "StringValue": f"{n}"}}) for n in range(5)]
    queue.client = restart()
    messages = queue.receive(10, MessageAttributeNames=["All"])
    assert [m["MessageId"] for m in messages] == [s["MessageId"] for s in sent]
    assert [m["MessageAttributes"]["n"]["StringValue"] for m in messages] == list("01234")


def test_deleted_messages_stay_deleted(own, restart):
    queue = Queue.create(own, "q")
    queue.send_batch("a", "b", "c")
    for message in queue.receive(10):
        if message["Body"] != "b":
            queue.delete(message)
    queue.client = restart()
    eventually(lambda: queue.counts() == (0, 1, 0))


def test_messages_in_flight_stay_hidden_and_their_receipts_good(own, restart):
    queue = Queue.create(own, "q")
    queue.send()
    held = queue.one(VisibilityTimeout=600)
    queue.client = restart()
    assert queue.receive() == [] and queue.counts() == (0, 1, 0)
    queue.change(held, 300)
    queue.delete(held)
    assert queue.counts() == (0, 0, 0)


def test_a_lease_goes_on_and_the_receive_count_with_it(own, restart):
    queue = Queue.create(own, "q")
    queue.send()
    queue.one(VisibilityTimeout=2)
    queue.client = restart()
    again = queue.one(wait=10, AttributeNames=["All"])
    assert again["Attributes"]["ApproximateReceiveCount"] == "2"


def test_delays_go_on(own, restart):
    queue = Queue.create(own, "q")
    queue.send("soon", DelaySeconds=2)
    queue.send("much later", DelaySeconds=900)
    queue.client = restart()
    assert queue.one(wait=10)["Body"] == "soon"
    assert queue.counts() == (0, 1, 1)


def test_deduplication_is_remembered(own, restart):
    fifo = Queue.create(own, "q", fifo=True)
    first = fifo.send(MessageDeduplicationId="same")
    fifo.delete(fifo.one())
    fifo.client = restart()
    assert fifo.send(MessageDeduplicationId="same")["MessageId"] == first["MessageId"]
    assert fifo.receive() == []


def test_a_fifo_group_stays_blocked_and_in_order(own, restart):
    fifo = Queue.create(own, "q", fifo=True)
    for body in "abc":
        fifo.send(body)
    held = fifo.one(VisibilityTimeout=600)
    number = fifo.send("d")["SequenceNumber"]
    fifo.client = restart()
    assert fifo.receive(10) == []
    fifo.delete(held)
    assert fifo.send("e")["SequenceNumber"] > number
    assert fifo.bodies() == list("bcde")


def test_queues_their_attributes_and_tags_survive(own, restart):
    queue = Queue.create(own, "q", tags={"team": "red"}, VisibilityTimeout=7)
    queue.set(DelaySeconds=5)
    Queue.create(own, "gone")
    own.delete_queue(QueueUrl=queue.url.replace("/q", "/gone"))
    before = queue.attributes()
    queue.client = restart()
    assert queue.attributes() == before
    assert queue.client.list_queue_tags(QueueUrl=queue.url)["Tags"] == {"team": "red"}
    assert queue.client.list_queues()["QueueUrls"] == [queue.url]


def test_a_purge_survives(own, restart):
    queue = Queue.create(own, "q")
    queue.send_batch("a", "b")
    own.purge_queue(QueueUrl=queue.url)
    queue.client = restart()
    assert queue.counts() == (0, 0, 0)


def test_a_soft_stop_answers_the_long_polls_under_way(own, own_server):
    queue = Queue.create(own, "q")
    # On a busy machine the poll may arrive only after the stop.
    for pause in (0.5, 3, 8):
        answers = []

        def poll():
            with suppress(BotoCoreError):
                answers.append(queue.receive(wait=20))

        poller = threading.Thread(target=poll)
        poller.start()
        time.sleep(pause)
        start = time.monotonic()
        assert own_server.stop() == 0
        took = time.monotonic() - start
        poller.join(60)
        if answers == [[]] and took < 15:
            return
        own_server.start()
        queue.client = client_for(own_server.endpoint)
    raise AssertionError(f"the poll was not answered by the stop: {answers}, {took:.1f} s")


def test_the_60_second_rules_can_be_switched_on():
    config = "[sqs]\npurge_interval_ms = 60000\nrecreate_interval_ms = 60000\n"
    with Folder(config) as server:
        client = client_for(server.endpoint)
        queue = Queue.create(client, "q")
        client.purge_queue(QueueUrl=queue.url)
        with fails("AWS.SimpleQueueService.PurgeQueueInProgress", status=403):
            client.purge_queue(QueueUrl=queue.url)
        client.delete_queue(QueueUrl=queue.url)
        with fails("AWS.SimpleQueueService.QueueDeletedRecently"):
            Queue.create(client, "q")


def test_account_and_region_can_be_configured():
    with Folder('[sqs]\naccount = "123456789012"\nregion = "eu-west-3"\n') as server:
        queue = Queue.create(client_for(server.endpoint), "q")
        assert queue.url == f"{server.endpoint}/123456789012/q"
        assert queue.arn == "arn:aws:sqs:eu-west-3:123456789012:q"

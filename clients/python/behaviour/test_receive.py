"""ReceiveMessage: how many, for how long, and long polls."""

import http.client
import threading
import time
import urllib.parse

import pytest

from sqs import GONE, PATIENCE_S, Queue, fails


# A long poll of 20 s that is not woken takes longer; one that is woken does not, even on a busy machine.
WOKEN_S = 15


def timed(call):
    start = time.monotonic()
    answer = call()
    return answer, time.monotonic() - start


def later(seconds, call):
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def test_an_empty_queue_answers_without_messages(sqs, queue):
    assert "Messages" not in sqs.receive_message(QueueUrl=queue.url)


def test_one_message_comes_unless_more_are_asked_for(sqs, queue):
    queue.send_batch("a", "b", "c")
    assert len(sqs.receive_message(QueueUrl=queue.url)["Messages"]) == 1


def test_ten_messages_come_at_most(queue):
    queue.send_batch(*"abcdefghij")
    queue.send_batch(*"klmno")
    assert (len(queue.receive(10)), len(queue.receive(10)), len(queue.receive(10))) == (10, 5, 0)


@pytest.mark.parametrize("count", [0, -1, 11])
def test_a_number_of_messages_out_of_bounds_is_refused(queue, count):
    with fails("InvalidParameterValue", "MaxNumberOfMessages", 400):
        queue.receive(count)


@pytest.mark.parametrize("seconds", [-1, 21])
def test_a_wait_out_of_bounds_is_refused(queue, seconds):
    with fails("InvalidParameterValue", "WaitTimeSeconds"):
        queue.receive(wait=seconds)


@pytest.mark.parametrize("seconds", [-1, 43201])
def test_a_visibility_timeout_out_of_bounds_is_refused(queue, seconds):
    queue.send()
    with fails("InvalidParameterValue", "VisibilityTimeout"):
        queue.receive(VisibilityTimeout=seconds)
    assert queue.counts() == (1, 0, 0)


def test_receive_from_no_queue(sqs, server, name):
    with fails(GONE):
        Queue(sqs, f"{server.endpoint}/000000000000/{name}").receive(wait=5)


def test_a_received_message_is_hidden(queue):
    queue.send()
    assert len(queue.receive()) == 1
    assert queue.receive() == []


def test_a_message_returns_after_the_timeout_of_the_queue(make):
    queue = make(VisibilityTimeout=1)
    sent = queue.send()["MessageId"]
    assert queue.one()["MessageId"] == sent
    again, took = timed(lambda: queue.one(wait=20))
    assert again["MessageId"] == sent and took < WOKEN_S


def test_a_message_returns_after_the_timeout_of_the_receive(queue):
    queue.send()
    start = time.monotonic()
    queue.one(VisibilityTimeout=3)
    messages = queue.receive()
    # On a slow machine it may be back already.
    assert messages == [] or time.monotonic() - start >= 2.9
    _, took = (messages, 0) if messages else timed(lambda: queue.one(wait=20))
    assert time.monotonic() - start >= 2.9 and took < WOKEN_S


def test_a_timeout_of_zero_hides_nothing(queue):
    queue.send()
    first = queue.one(VisibilityTimeout=0)
    assert queue.one()["MessageId"] == first["MessageId"]


def test_a_changed_timeout_of_the_queue_applies_to_later_receives(make):
    queue = make(VisibilityTimeout=1)
    queue.send()
    queue.set(VisibilityTimeout=600)
    queue.one()
    time.sleep(1.3)
    assert queue.receive() == []


def test_a_standard_queue_hands_out_in_about_the_order_of_sending(queue):
    for n in range(5):
        queue.send(str(n))
    assert queue.bodies() == ["0", "1", "2", "3", "4"]


def test_a_short_poll_answers_at_once(queue):
    _, took = timed(queue.receive)
    assert took < WOKEN_S


def test_a_long_poll_waits_its_time_when_nothing_comes(queue):
    messages, took = timed(lambda: queue.receive(wait=1))
    assert messages == [] and 0.9 <= took < WOKEN_S


def test_a_long_poll_answers_at_once_when_there_is_something(queue):
    queue.send()
    _, took = timed(lambda: queue.one(wait=20))
    assert took < WOKEN_S


def test_a_long_poll_wakes_on_a_send(queue):
    timer = later(0.5, queue.send)
    _, took = timed(lambda: queue.one(wait=20))
    timer.join()
    assert took < WOKEN_S


def test_a_long_poll_wakes_on_the_end_of_a_delay(queue):
    queue.send(DelaySeconds=1)
    _, took = timed(lambda: queue.one(wait=20))
    assert took < WOKEN_S


def test_a_long_poll_wakes_on_a_visibility_change(queue):
    queue.send()
    held = queue.one()
    timer = later(0.5, lambda: queue.change(held, 0))
    _, took = timed(lambda: queue.one(wait=20))
    timer.join()
    assert took < WOKEN_S


def test_a_long_poll_wakes_on_the_end_of_a_shortened_lease(queue):
    queue.send()
    start = time.monotonic()
    queue.change(queue.one(VisibilityTimeout=600), 1)
    _, took = timed(lambda: queue.one(wait=20))
    assert time.monotonic() - start >= 0.9 and took < WOKEN_S


def test_a_long_poll_wakes_when_a_fifo_group_is_free_again(fifo):
    fifo.send("first")
    held = fifo.one()
    fifo.send("second")
    assert fifo.receive() == []
    timer = later(0.5, lambda: fifo.delete(held))
    message, took = timed(lambda: fifo.one(wait=20))
    timer.join()
    assert message["Body"] == "second" and took < WOKEN_S


def test_the_wait_of_the_queue_applies_when_the_receive_gives_none(sqs, make):
    queue = make(ReceiveMessageWaitTimeSeconds=20)
    timer = later(0.5, queue.send)
    answer, took = timed(lambda: sqs.receive_message(QueueUrl=queue.url))
    timer.join()
    assert len(answer["Messages"]) == 1 and took < WOKEN_S


def test_the_wait_of_the_receive_goes_before_that_of_the_queue(make):
    queue = make(ReceiveMessageWaitTimeSeconds=20)
    _, took = timed(lambda: queue.receive(wait=0))
    assert took < WOKEN_S


def test_one_message_wakes_one_of_several_long_polls(queue):
    found = []
    pollers = [threading.Thread(target=lambda: found.append(queue.receive(wait=6))) for _ in range(5)]
    for poller in pollers:
        poller.start()
    time.sleep(0.4)
    queue.send()
    for poller in pollers:
        poller.join(30)
    assert sorted(len(messages) for messages in found) == [0, 0, 0, 0, 1]


def test_each_message_goes_to_one_of_several_consumers(queue):
    for batch in range(5):
        queue.send_batch(*[f"{batch}-{n}" for n in range(10)])
    found = []
    end = time.monotonic() + PATIENCE_S

    def consume():
        while len(found) < 50 and time.monotonic() < end:
            found.extend(queue.drain(10, within=0.1))

    consumers = [threading.Thread(target=consume) for _ in range(5)]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join()
    bodies = [message["Body"] for message in found]
    assert len(bodies) == len(set(bodies)) == 50


def test_a_client_that_hangs_up_takes_no_message_with_it(server, queue):
    form = urllib.parse.urlencode({"Action": "ReceiveMessage", "QueueUrl": queue.url, "WaitTimeSeconds": 20})
    # A busy server may need longer to notice that the client is gone.
    for pause in (0.3, 2, 5):
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.endpoint).netloc)
        connection.request("POST", "/", form, {"Content-Type": "application/x-www-form-urlencoded"})
        time.sleep(pause)
        connection.close()
        time.sleep(pause)
        queue.send()
        messages = queue.receive(1, wait=5, AttributeNames=["All"])
        if [message["Attributes"]["ApproximateReceiveCount"] for message in messages] == ["1"]:
            return
        queue.client.purge_queue(QueueUrl=queue.url)
    raise AssertionError("a client that hung up took a message with it")


def test_the_names_of_system_attributes_may_come_in_either_list(sqs, queue):
    queue.send()
    operation = sqs.meta.service_model.operation_model("ReceiveMessage")
    members = operation.input_shape.members
    lists = [name for name in ("AttributeNames", "MessageSystemAttributeNames") if name in members]
    for wanted in lists:
        message = queue.one(VisibilityTimeout=0, **{wanted: ["SentTimestamp"]})
        assert list(message["Attributes"]) == ["SentTimestamp"], wanted

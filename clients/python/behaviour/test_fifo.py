"""FIFO queues: order, groups, deduplication, receive attempts."""

import time

import pytest

from sqs import eventually, fails


def ids(messages):
    return [message["MessageId"] for message in messages]


def test_messages_of_a_group_come_in_order(fifo):
    for n in range(12):
        fifo.send(str(n))
    assert [message["Body"] for message in fifo.drain(12)] == [str(n) for n in range(12)]


def test_several_messages_of_a_group_come_in_one_receive(fifo):
    for n in range(5):
        fifo.send(str(n))
    assert fifo.bodies() == ["0", "1", "2", "3", "4"]


def test_a_group_is_blocked_while_one_of_its_messages_is_in_flight(fifo):
    fifo.send("first")
    fifo.send("second")
    held = fifo.one()
    assert fifo.receive(10) == []
    fifo.delete(held)
    assert fifo.bodies() == ["second"]


def test_a_blocked_group_does_not_block_others(fifo):
    fifo.send("a1", MessageGroupId="a")
    fifo.send("a2", MessageGroupId="a")
    fifo.one()
    fifo.send("b1", MessageGroupId="b")
    assert fifo.bodies() == ["b1"]


def test_a_message_that_returns_comes_before_those_behind_it(fifo):
    fifo.send("first")
    fifo.send("second")
    fifo.change(fifo.one(), 0)
    assert fifo.bodies() == ["first", "second"]


def test_order_holds_when_a_lease_runs_out(make):
    fifo = make(fifo=True)
    for body in "abc":
        fifo.send(body)
    assert fifo.bodies(2, VisibilityTimeout=2) == ["a", "b"]
    assert [message["Body"] for message in fifo.drain(3)] == ["a", "b", "c"]


def test_messages_of_one_receive_may_be_deleted_in_any_order(fifo):
    for body in "abc":
        fifo.send(body)
    messages = fifo.receive(10)
    for message in reversed(messages):
        fifo.delete(message)
    assert fifo.counts() == (0, 0, 0)


def test_sequence_numbers_have_20_digits_and_grow(fifo):
    numbers = [fifo.send(MessageGroupId=group)["SequenceNumber"] for group in "abab"]
    assert all(len(number) == 20 and number.isdigit() for number in numbers)
    assert numbers == sorted(set(numbers))
    message = fifo.one(AttributeNames=["SequenceNumber"])
    assert message["Attributes"] == {"SequenceNumber": numbers[0]}


def test_group_and_deduplication_id_come_with_the_message(fifo):
    fifo.send(MessageGroupId="g-1", MessageDeduplicationId="d-1")
    found = fifo.one(AttributeNames=["All"])["Attributes"]
    assert (found["MessageGroupId"], found["MessageDeduplicationId"]) == ("g-1", "d-1")


def test_a_duplicate_is_answered_as_the_first_and_not_sent(fifo):
    first = fifo.send("one", MessageDeduplicationId="same")
    second = fifo.send("two", MessageDeduplicationId="same")
    assert (second["MessageId"], second["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
    assert fifo.bodies() == ["one"]


def test_deduplication_survives_the_delete(fifo):
    first = fifo.send("one", MessageDeduplicationId="same")
    fifo.delete(fifo.one())
    assert fifo.send("two", MessageDeduplicationId="same")["MessageId"] == first["MessageId"]
    assert fifo.receive() == []


def test_deduplication_is_per_queue_across_groups(fifo):
    first = fifo.send(MessageGroupId="a", MessageDeduplicationId="same")
    assert fifo.send(MessageGroupId="b", MessageDeduplicationId="same")["MessageId"] == first["MessageId"]
    assert fifo.counts() == (1, 0, 0)


def test_deduplication_may_be_per_group(make):
    fifo = make(fifo=True, DeduplicationScope="messageGroup")
    fifo.send("a", MessageGroupId="a", MessageDeduplicationId="same")
    fifo.send("b", MessageGroupId="b", MessageDeduplicationId="same")
    fifo.send("a again", MessageGroupId="a", MessageDeduplicationId="same")
    assert sorted(fifo.bodies()) == ["a", "b"]


def test_two_queues_do_not_share_deduplication(make):
    first, second = make("-a", fifo=True), make("-b", fifo=True)
    first.send(MessageDeduplicationId="same")
    second.send(MessageDeduplicationId="same")
    assert second.counts() == (1, 0, 0)


def test_content_based_deduplication_looks_at_the_body(make):
    fifo = make(fifo=True, ContentBasedDeduplication="true")
    for body in ("same", "other", "same"):
        fifo.send(body, MessageDeduplicationId=None)
    assert fifo.bodies() == ["same", "other"]


def test_content_based_deduplication_does_not_look_at_attributes(make):
    fifo = make(fifo=True, ContentBasedDeduplication="true")
    for value in ("1", "2"):
        attribute = {"DataType": "String", "StringValue": value}
        fifo.send("same", MessageDeduplicationId=None, MessageAttributes={"a": attribute})
    assert fifo.counts() == (1, 0, 0)


def test_a_given_deduplication_id_goes_before_the_content(make):
    fifo = make(fifo=True, ContentBasedDeduplication="true")
    fifo.send("same", MessageDeduplicationId="1")
    fifo.send("same", MessageDeduplicationId="2")
    assert fifo.bodies() == ["same", "same"]


def test_a_content_based_id_is_the_sha256_of_the_body(make):
    fifo = make(fifo=True, ContentBasedDeduplication="true")
    fifo.send("hello", MessageDeduplicationId=None)
    found = fifo.one(AttributeNames=["MessageDeduplicationId"])["Attributes"]["MessageDeduplicationId"]
    assert found == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def test_a_group_is_needed(fifo):
    with fails("MissingParameter", "MessageGroupId", 400):
        fifo.send(MessageGroupId=None)


def test_a_deduplication_id_is_needed_without_content_based_deduplication(fifo):
    with fails("InvalidParameterValue", "ContentBasedDeduplication"):
        fifo.send(MessageDeduplicationId=None)


@pytest.mark.parametrize("parameter", ["MessageGroupId", "MessageDeduplicationId"])
@pytest.mark.parametrize("bad", ["x" * 129, "with space", "ü"])
def test_an_id_that_sqs_does_not_allow_is_refused(fifo, parameter, bad):
    with fails("InvalidParameterValue", parameter):
        fifo.send(**{parameter: bad})


def test_ids_may_have_128_characters_and_punctuation(fifo):
    odd = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~".ljust(128, "x")
    fifo.send(MessageGroupId=odd, MessageDeduplicationId=odd)
    found = fifo.one(AttributeNames=["All"])["Attributes"]
    assert found["MessageGroupId"] == found["MessageDeduplicationId"] == odd


def test_a_delay_per_message_is_refused(fifo):
    with fails("InvalidParameterValue", "DelaySeconds"):
        fifo.send(DelaySeconds=1)


def test_the_delay_of_the_queue_applies(make):
    fifo = make(fifo=True, DelaySeconds=1)
    fifo.send()
    assert fifo.receive() == []
    fifo.one(wait=10)


def test_a_batch_keeps_its_order(fifo):
    entries = [{"MessageBody": str(n), "MessageGroupId": "g", "MessageDeduplicationId": f"b{n}"} for n in range(10)]
    answer = fifo.send_batch(*entries)
    numbers = [entry["SequenceNumber"] for entry in answer["Successful"]]
    assert numbers == sorted(numbers)
    assert fifo.bodies() == [str(n) for n in range(10)]


def test_duplicates_within_a_batch_are_sent_once(fifo):
    entry = {"MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "same"}
    answer = fifo.send_batch(entry, entry)
    assert len({sent["MessageId"] for sent in answer["Successful"]}) == 1
    assert fifo.counts() == (1, 0, 0)


def test_groups_share_a_receive(fifo):
    for group in "abc":
        fifo.send(group, MessageGroupId=group)
    assert sorted(fifo.bodies()) == ["a", "b", "c"]


def test_a_receive_attempt_asked_again_gives_the_same_messages_and_handles(fifo):
    for body in "abc":
        fifo.send(body)
    first = fifo.receive(10, ReceiveRequestAttemptId="try-1")
    again = fifo.receive(10, ReceiveRequestAttemptId="try-1")
    assert len(first) == 3 and ids(again) == ids(first)
    assert [m["ReceiptHandle"] for m in again] == [m["ReceiptHandle"] for m in first]
    for message in again:
        fifo.delete(message)
    assert fifo.counts() == (0, 0, 0)


def test_another_receive_attempt_gives_nothing_of_a_blocked_group(fifo):
    fifo.send()
    assert len(fifo.receive(ReceiveRequestAttemptId="try-1")) == 1
    assert fifo.receive(ReceiveRequestAttemptId="try-2") == []


def test_a_receive_attempt_asked_again_starts_the_lease_anew(make):
    for _ in range(5):
        fifo = make(fifo=True)
        fifo.send()
        asked = time.monotonic()
        first = fifo.receive(VisibilityTimeout=6, ReceiveRequestAttemptId="try-1")
        time.sleep(3.5)
        asked_again = time.monotonic()
        again = fifo.receive(VisibilityTimeout=6, ReceiveRequestAttemptId="try-1")
        in_time = time.monotonic() - asked < 5.9
        time.sleep(3.5)
        counts = fifo.counts()
        # A machine that stood still for seconds may have lost a lease: then once more.
        if in_time and time.monotonic() - asked_again < 5.9:
            assert ids(again) == ids(first)
            assert counts == (0, 1, 0)
            return
    raise AssertionError("this machine is too slow for a lease of six seconds")


def test_a_receive_attempt_is_for_fifo_queues(queue):
    with fails("InvalidParameterValue", "ReceiveRequestAttemptId"):
        queue.receive(ReceiveRequestAttemptId="try-1")


@pytest.mark.parametrize("bad", ["x" * 129, "with space"])
def test_a_receive_attempt_id_that_sqs_does_not_allow_is_refused(fifo, bad):
    with fails("InvalidParameterValue", "ReceiveRequestAttemptId"):
        fifo.receive(ReceiveRequestAttemptId=bad)


def test_a_purge_frees_a_blocked_group(sqs, fifo):
    fifo.send("old")
    fifo.one()
    sqs.purge_queue(QueueUrl=fifo.url)
    fifo.send("new")
    eventually(lambda: fifo.bodies() == ["new"])

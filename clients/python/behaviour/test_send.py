"""SendMessage and SendMessageBatch: content, sizes, delays, partial failure."""

import time
import uuid

import pytest

from sqs import GONE, Queue, fails, md5_of_text

MIB = 1024 * 1024


def test_send_answers_with_the_md5_of_the_body_and_an_id(queue):
    answer = queue.send("hello")
    assert answer["MD5OfMessageBody"] == "5d41402abc4b2a76b9719d911017c592"
    assert str(uuid.UUID(answer["MessageId"])) == answer["MessageId"]
    message = queue.one()
    assert message["MessageId"] == answer["MessageId"] and message["MD5OfBody"] == answer["MD5OfMessageBody"]


def test_a_standard_queue_tells_no_sequence_number(queue):
    assert "SequenceNumber" not in queue.send()


@pytest.mark.parametrize(
    "body",
    [
        "größe 日本語 🎉 \U0010ffff",
        "<a href=\"x\">&amp; 'quoted'</a> ]]>",
        "  spaces at both ends  ",
        "line one\nline two\r\nthird\ttabbed",
        "100% + a=b&c=d;é",
        '{"json": [1, 2, {"a": null}], "esc": "\\u0041 \\\\ \\""}',
        "\u0085\u2028\ud7ff\ue000\ufffd",
        " ",
    ],
    ids=["unicode", "markup", "spaces", "lines", "form", "json", "edges of xml", "one space"],
)
def test_a_body_comes_back_as_it_was_sent(queue, body):
    assert queue.send(body)["MD5OfMessageBody"] == md5_of_text(body)
    message = queue.one()
    assert message["Body"] == body and message["MD5OfBody"] == md5_of_text(body)


@pytest.mark.parametrize("code", [0x0, 0x1, 0x8, 0xB, 0x1F, 0xFFFE, 0xFFFF], ids=hex)
def test_a_character_that_xml_does_not_allow_is_refused(queue, code):
    with fails("InvalidMessageContents", status=400):
        queue.send(f"bad: {chr(code)}")
    assert queue.counts() == (0, 0, 0)


def test_an_empty_body_is_refused(queue):
    with fails("MissingParameter", "MessageBody"):
        queue.send("")


def test_a_message_of_one_mebibyte_goes_through(queue):
    body = "x" * MIB
    assert queue.send(body)["MD5OfMessageBody"] == md5_of_text(body)
    assert queue.one()["Body"] == body


def test_a_message_of_one_byte_more_is_refused(queue):
    with fails("InvalidParameterValue", "1048576", 400):
        queue.send("x" * (MIB + 1))


def test_size_is_counted_in_bytes_not_characters(queue):
    queue.send("é" * (MIB // 2))
    with fails("InvalidParameterValue"):
        queue.send("é" * (MIB // 2) + "x")


def test_size_includes_names_types_and_values_of_attributes(queue):
    attributes = {"name": {"DataType": "String", "StringValue": "value"}}
    queue.send("x" * (MIB - 15), MessageAttributes=attributes)
    with fails("InvalidParameterValue"):
        queue.send("x" * (MIB - 14), MessageAttributes=attributes)


def test_a_large_body_that_grows_when_escaped_goes_through(queue):
    body = "\"<&\n" * (MIB // 4)
    queue.send(body)
    assert queue.one()["Body"] == body


def test_a_queue_may_allow_less(make):
    queue = make(MaximumMessageSize=1024)
    queue.send("x" * 1024)
    with fails("InvalidParameterValue", "1024"):
        queue.send("x" * 1025)


def test_send_to_no_queue(sqs, server, name):
    with fails(GONE, "does not exist"):
        Queue(sqs, f"{server.endpoint}/000000000000/{name}").send()


def test_a_delayed_message_comes_after_its_delay(queue):
    start = time.monotonic()
    queue.send("late", DelaySeconds=3)
    assert queue.receive() == []
    assert queue.one(wait=20)["Body"] == "late"
    assert time.monotonic() - start >= 2.9


def test_the_delay_of_the_queue_applies(make):
    queue = make(DelaySeconds=3)
    queue.send()
    assert queue.receive() == [] and queue.counts() == (0, 0, 1)
    queue.one(wait=10)


def test_the_delay_of_a_message_goes_before_that_of_the_queue(make):
    queue = make(DelaySeconds=900)
    queue.send("now", DelaySeconds=0)
    assert queue.bodies() == ["now"]


def test_a_delayed_message_does_not_hold_up_others(queue):
    queue.send("late", DelaySeconds=900)
    queue.send("now")
    assert queue.bodies() == ["now"]


def test_a_changed_queue_delay_leaves_waiting_messages_as_they_are(make):
    queue = make(DelaySeconds=900)
    queue.send("old")
    queue.set(DelaySeconds=0)
    queue.send("new")
    assert queue.bodies() == ["new"] and queue.counts() == (0, 1, 1)


@pytest.mark.parametrize("delay", [-1, 901])
def test_a_delay_out_of_bounds_is_refused(queue, delay):
    with fails("InvalidParameterValue", "DelaySeconds"):
        queue.send(DelaySeconds=delay)


def test_a_deduplication_id_is_for_fifo_queues(queue):
    with fails("InvalidParameterValue", "MessageDeduplicationId"):
        queue.send(MessageDeduplicationId="1")


def test_a_batch_of_ten_is_sent_with_ids_and_digests(queue):
    answer = queue.send_batch(*[f"body {n}" for n in range(10)])
    assert "Failed" not in answer
    digests = {entry["Id"]: entry["MD5OfMessageBody"] for entry in answer["Successful"]}
    assert digests == {str(n): md5_of_text(f"body {n}") for n in range(10)}
    assert len({entry["MessageId"] for entry in answer["Successful"]}) == 10
    assert sorted(queue.bodies()) == [f"body {n}" for n in range(10)]


def test_the_good_entries_of_a_batch_are_sent_and_the_bad_ones_told(queue):
    answer = queue.send_batch("good", "bad \x01", {"MessageBody": "worse", "DelaySeconds": 901}, "also good")
    assert [entry["Id"] for entry in answer["Successful"]] == ["0", "3"]
    failed = {entry["Id"]: entry for entry in answer["Failed"]}
    assert failed["1"]["Code"] == "InvalidMessageContents" and failed["1"]["SenderFault"] is True
    assert failed["2"]["Code"] == "InvalidParameterValue" and "DelaySeconds" in failed["2"]["Message"]
    assert sorted(queue.bodies()) == ["also good", "good"]


def test_an_entry_beyond_the_limit_of_its_queue_fails_alone(make):
    queue = make(MaximumMessageSize=1024)
    answer = queue.send_batch("x" * 1025, "y")
    assert [entry["Id"] for entry in answer["Successful"]] == ["1"]
    assert answer["Failed"][0]["Code"] == "InvalidParameterValue"


def test_each_entry_of_a_batch_has_its_own_delay(queue):
    queue.send_batch({"MessageBody": "late", "DelaySeconds": 900}, "now")
    assert queue.counts() == (1, 0, 1)


def test_each_entry_of_a_batch_has_its_own_attributes(queue):
    attributes = {"a": {"DataType": "String", "StringValue": "1"}}
    answer = queue.send_batch({"MessageBody": "with", "MessageAttributes": attributes}, "without")
    assert ["MD5OfMessageAttributes" in entry for entry in answer["Successful"]] == [True, False]


def test_an_empty_batch_is_refused(sqs, queue):
    with fails("AWS.SimpleQueueService.EmptyBatchRequest", status=400):
        sqs.send_message_batch(QueueUrl=queue.url, Entries=[])


def test_a_batch_of_eleven_is_refused(queue):
    with fails("AWS.SimpleQueueService.TooManyEntriesInBatchRequest", "10"):
        queue.send_batch(*"abcdefghijk")
    assert queue.counts() == (0, 0, 0)


def test_entry_ids_must_differ(queue):
    with fails("AWS.SimpleQueueService.BatchEntryIdsNotDistinct"):
        queue.send_batch({"Id": "a", "MessageBody": "1"}, {"Id": "a", "MessageBody": "2"})
    assert queue.counts() == (0, 0, 0)


@pytest.mark.parametrize("entry_id", ["with space", "dot.ted", "x" * 81, "ü"])
def test_an_entry_id_that_sqs_does_not_allow_is_refused(queue, entry_id):
    with fails("AWS.SimpleQueueService.InvalidBatchEntryId"):
        queue.send_batch({"Id": entry_id, "MessageBody": "1"})


def test_an_entry_id_may_have_80_characters(queue):
    answer = queue.send_batch({"Id": "aZ09_-".ljust(80, "x"), "MessageBody": "1"})
    assert len(answer["Successful"]) == 1


def test_a_batch_of_one_mebibyte_in_all_goes_through(queue):
    answer = queue.send_batch("x" * (MIB // 2), "y" * (MIB // 2))
    assert len(answer["Successful"]) == 2


def test_a_batch_of_one_byte_more_in_all_is_refused(queue):
    with fails("AWS.SimpleQueueService.BatchRequestTooLong", "1048576"):
        queue.send_batch("x" * (MIB // 2), "y" * (MIB // 2 + 1))
    assert queue.counts() == (0, 0, 0)

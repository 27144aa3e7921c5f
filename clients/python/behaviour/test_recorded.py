"""What AWS was seen to answer where its documentation is silent, vague or wrong. One case for each recorded fact."""

import base64
import json
import uuid

import pytest

import wire
from conftest import PROTOCOL
from sqs import GONE, Queue, eventually, fails
from test_move_tasks import Tasks, pair  # noqa: F401  (fixtures)

TRACE = "Root=1-5759e988-bd862e3fe1be46a994272793;Parent=53995c3f42cd8ad8;Sampled=1"


@pytest.fixture
def tasks(sqs, server):
    return Tasks(sqs, server.endpoint)


@pytest.mark.parametrize("yes, no", [("true", "false"), ("True", "False"), ("TRUE", "FALSE")])
def test_booleans_are_taken_in_any_case(sqs, name, yes, no):
    attributes = {"FifoQueue": yes, "ContentBasedDeduplication": yes, "SqsManagedSseEnabled": no}
    url = sqs.create_queue(QueueName=f"{name}.fifo", Attributes=attributes)["QueueUrl"]
    queue = Queue(sqs, url, fifo=True)
    # They are told in lower case, and creating again with any of the forms changes nothing.
    wanted = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "SqsManagedSseEnabled": "false"}
    assert queue.attributes(*wanted) == wanted
    again = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "SqsManagedSseEnabled": "false"}
    assert sqs.create_queue(QueueName=f"{name}.fifo", Attributes=again)["QueueUrl"] == url
    queue.set(ContentBasedDeduplication=no)
    assert queue.attributes("ContentBasedDeduplication") == {"ContentBasedDeduplication": "false"}


@pytest.mark.parametrize("value", ["", "yes", "1", " true"])
def test_other_words_are_no_booleans(make, queue, value):
    with fails("InvalidAttributeValue", "SqsManagedSseEnabled"):
        queue.set(SqsManagedSseEnabled=value)
    with fails("InvalidAttributeValue", "ContentBasedDeduplication"):
        make("-b", fifo=True, ContentBasedDeduplication=value)


ENCRYPTION = ("SqsManagedSseEnabled", "KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds")


def test_managed_encryption_is_on_by_default_and_a_kms_key_turns_it_off(queue):
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "true"}
    queue.set(KmsMasterKeyId="alias/key")
    # With a key, the reuse period is told too, by default 5 minutes.
    expected = {"SqsManagedSseEnabled": "false", "KmsMasterKeyId": "alias/key", "KmsDataKeyReusePeriodSeconds": "300"}
    assert queue.attributes(*ENCRYPTION) == expected
    queue.set(KmsDataKeyReusePeriodSeconds=6000)
    assert queue.attributes(*ENCRYPTION) == {**expected, "KmsDataKeyReusePeriodSeconds": "6000"}
    # Without the key, the period is not told; and managed encryption stays off.
    queue.set(KmsMasterKeyId="", KmsDataKeyReusePeriodSeconds=300)
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "false"}
    queue.set(SqsManagedSseEnabled="true")
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "true"}


def test_a_reuse_period_without_a_key_is_not_told(make):
    queue = make(KmsDataKeyReusePeriodSeconds=600)
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "true"}


ONE_TYPE = "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or SQS SSE."


def test_two_kinds_of_encryption_at_once_are_refused(make, queue):
    both = {"KmsMasterKeyId": "alias/key", "SqsManagedSseEnabled": "true"}
    with fails("InvalidAttributeName", ONE_TYPE, 400):
        queue.set(**both)
    with fails("InvalidAttributeName", ONE_TYPE):
        make("-both", **both)
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "true"}


def test_managed_encryption_needs_the_kms_key_to_go(queue):
    queue.set(KmsMasterKeyId="alias/key")
    with fails("InvalidAttributeName", ONE_TYPE):
        queue.set(SqsManagedSseEnabled="true")
    queue.set(SqsManagedSseEnabled="true", KmsMasterKeyId="")
    assert queue.attributes(*ENCRYPTION) == {"SqsManagedSseEnabled": "true"}


def test_the_trace_header_of_http_becomes_a_system_attribute(server, sqs, queue):
    if PROTOCOL == "json":
        sent = wire.post_json(
            server.endpoint, "SendMessage", {"QueueUrl": queue.url, "MessageBody": "x"}, headers={"X-Amzn-Trace-Id": TRACE}
        )
        assert "MD5OfMessageSystemAttributes" not in sent.json
        batch = {"QueueUrl": queue.url, "Entries": [{"Id": "a", "MessageBody": "y"}]}
        wire.post_json(server.endpoint, "SendMessageBatch", batch, headers={"X-Amzn-Trace-Id": TRACE})
    else:
        form = {"Action": "SendMessage", "QueueUrl": queue.url, "MessageBody": "x"}
        sent = wire.post_form(server.endpoint, form, headers={"X-Amzn-Trace-Id": TRACE})
        assert sent.text("SendMessageResult", "MD5OfMessageSystemAttributes") is None
        entry = "SendMessageBatchRequestEntry.1"
        form = {"Action": "SendMessageBatch", "QueueUrl": queue.url, f"{entry}.Id": "a", f"{entry}.MessageBody": "y"}
        wire.post_form(server.endpoint, form, headers={"X-Amzn-Trace-Id": TRACE})
    for message in queue.receive(10, AttributeNames=["AWSTraceHeader"]):
        assert message["Attributes"] == {"AWSTraceHeader": TRACE}
    assert queue.counts() == (0, 2, 0)


def test_the_trace_header_of_the_message_goes_before_that_of_http(sqs, queue):
    own = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-own"}}

    def add(request, **_):
        request.headers["X-Amzn-Trace-Id"] = TRACE

    sqs.meta.events.register("before-send.sqs.SendMessage", add)
    try:
        assert "MD5OfMessageSystemAttributes" in queue.send(MessageSystemAttributes=own)
    finally:
        sqs.meta.events.unregister("before-send.sqs.SendMessage", add)
    assert queue.one(AttributeNames=["AWSTraceHeader"])["Attributes"] == {"AWSTraceHeader": "Root=1-own"}


@pytest.mark.parametrize("header", ["x" * 1025, "\t", "Root=\u00e9".encode().decode("latin-1")])
def test_a_trace_header_of_http_that_makes_no_sense_is_left_out(server, queue, header):
    form = {"Action": "SendMessage", "QueueUrl": queue.url, "MessageBody": "x"}
    assert wire.post_form(server.endpoint, form, headers={"X-Amzn-Trace-Id": header}).status == 200
    assert "Attributes" not in queue.one(AttributeNames=["AWSTraceHeader"])


def test_the_trace_header_of_http_takes_no_room(server, make):
    queue = make(MaximumMessageSize=1024)
    form = {"Action": "SendMessage", "QueueUrl": queue.url, "MessageBody": "x" * 1024}
    assert wire.post_form(server.endpoint, form, headers={"X-Amzn-Trace-Id": TRACE}).status == 200
    assert queue.one(AttributeNames=["AWSTraceHeader"])["Attributes"] == {"AWSTraceHeader": TRACE}


def test_a_purge_forgets_deduplication_ids(sqs, fifo):
    fifo.send("first", MessageDeduplicationId="d")
    sqs.purge_queue(QueueUrl=fifo.url)
    fifo.send("second", MessageDeduplicationId="d")
    assert fifo.bodies() == ["second"]
    # And the id counts again from there.
    fifo.send("third", MessageDeduplicationId="d", MessageGroupId="other")
    assert fifo.bodies() == []


def test_a_late_visibility_change_on_a_standard_queue_hides_the_message_again(queue):
    queue.send()
    message = queue.one(VisibilityTimeout=1)
    eventually(lambda: queue.counts() == (1, 0, 0))
    queue.change(message, 600)
    assert queue.counts() == (0, 1, 0) and queue.receive() == []
    # The handle holds the message as before.
    queue.change(message, 0)
    assert queue.one()["Body"] == "hello"


def test_a_late_visibility_change_to_zero_leaves_the_message_visible(queue):
    queue.send()
    message = queue.one(VisibilityTimeout=0)
    queue.change(message, 0)
    assert queue.counts() == (1, 0, 0)
    assert queue.one(AttributeNames=["ApproximateReceiveCount"])["Attributes"] == {"ApproximateReceiveCount": "2"}


def test_a_late_visibility_change_on_a_fifo_queue_is_refused(fifo):
    fifo.send()
    message = fifo.one(VisibilityTimeout=1)
    eventually(lambda: fifo.counts() == (1, 0, 0))
    with fails("InvalidParameterValue"):
        fifo.change(message, 600)
    assert fifo.counts() == (1, 0, 0)


@pytest.mark.parametrize("extended, again", [(0, []), (1, ["a"]), (2, ["a", "b"])])
def test_an_extended_fifo_message_stays_hidden_and_with_it_those_behind_it(fifo, extended, again):
    for body in ("a", "b", "c"):
        fifo.send(body)
    batch = fifo.receive(10, VisibilityTimeout=6)
    assert [message["Body"] for message in batch] == ["a", "b", "c"]
    fifo.change(batch[extended], 600)
    # The others are visible again as far as the counts go, and those behind the extended one stay blocked by it.
    eventually(lambda: fifo.counts() == (2, 1, 0))
    assert [message["Body"] for message in fifo.receive(10)] == again


def test_a_shortened_fifo_message_comes_again_while_its_followers_are_in_flight(fifo):
    fifo.send("a")
    fifo.send("b")
    batch = fifo.receive(10, VisibilityTimeout=600)
    fifo.change(batch[0], 1)
    eventually(lambda: fifo.counts() == (1, 1, 0))
    assert [message["Body"] for message in fifo.receive(10)] == ["a"]


def test_the_handle_of_a_move_task_holds_a_uuid(tasks, pair):
    _, dead = pair
    handle = tasks.start(dead, MaxNumberOfMessagesPerSecond=1)
    held = json.loads(base64.b64decode(handle))
    assert str(uuid.UUID(held["taskId"])) == held["taskId"] and held["sourceArn"] == dead.arn
    tasks.cancel(handle)


def test_cancelling_an_unknown_task_or_source_finds_no_resource(tasks, queue):
    def made_up(arn, task="10f57157-fc38-4da9-a113-4de7e12d05dd"):
        return base64.b64encode(json.dumps({"taskId": task, "sourceArn": arn}).encode()).decode()

    with fails("ResourceNotFoundException", "Task does not exist.", 404):
        tasks.cancel(made_up(queue.arn))
    with fails("ResourceNotFoundException", "specified for the SourceArn parameter doesn't exist", 404):
        tasks.cancel(made_up(f"{queue.arn}-none"))
    for garbage in [made_up(queue.arn, 7), made_up(queue.arn, "not-a-uuid"), made_up("no arn")]:
        with fails("InvalidParameterValue", status=400):
            tasks.cancel(garbage)


def test_a_move_task_without_its_destination_fails_with_the_code_of_a_missing_queue(sqs, tasks, pair, make):
    _, dead = pair
    other = make("-other")
    tasks.start(dead, DestinationArn=other.arn, MaxNumberOfMessagesPerSecond=1)
    sqs.delete_queue(QueueUrl=other.url)
    assert tasks.end(dead, "FAILED")["FailureReason"] == GONE


def test_an_attribute_name_may_have_letters_of_any_script(queue):
    attributes = {"attr.1øßä-名": {"DataType": "String", "StringValue": "x"}}
    queue.send(MessageAttributes=attributes)
    assert queue.one(MessageAttributeNames=["All"])["MessageAttributes"] == attributes


@pytest.mark.parametrize("sign", list('!"§(?/ '))
def test_an_attribute_name_may_have_no_other_signs(queue, sign):
    with fails("InvalidParameterValue"):
        queue.send(MessageAttributes={f"a{sign}b": {"DataType": "String", "StringValue": "x"}})


def test_sequence_numbers_have_20_digits_that_do_not_begin_with_zero(fifo):
    number = fifo.send()["SequenceNumber"]
    assert len(number) == 20 and number[0] != "0"
    assert fifo.one(AttributeNames=["All"])["Attributes"]["SequenceNumber"] == number

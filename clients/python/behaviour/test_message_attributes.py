"""Message attributes: types, digests, filters, limits; and the system attributes."""

import time

import pytest

from sqs import fails, md5_of_attributes


def text(value, kind="String"):
    return {"DataType": kind, "StringValue": value}


def binary(value, kind="Binary"):
    return {"DataType": kind, "BinaryValue": value}


ALL = {
    "name": text("größe <&> \"1\"\n"),
    "count": text("-12.5e3", "Number"),
    "blob": binary(bytes(range(256))),
    "Custom.Text-1_x": text("red", "String.colour"),
    "custom.number": text("7", "Number.int"),
    "png": binary(b"\x89PNG\r\n", "Binary.png"),
}


def test_attributes_of_every_type_come_back_as_they_were_sent(queue):
    queue.send(MessageAttributes=ALL)
    assert queue.one(MessageAttributeNames=["All"])["MessageAttributes"] == ALL


def test_the_digest_of_attributes_is_right_on_both_sides(queue):
    digest = md5_of_attributes(ALL)
    assert queue.send(MessageAttributes=ALL)["MD5OfMessageAttributes"] == digest
    assert queue.one(MessageAttributeNames=["All"])["MD5OfMessageAttributes"] == digest


def test_no_attributes_no_digest(queue):
    assert "MD5OfMessageAttributes" not in queue.send()
    message = queue.one(MessageAttributeNames=["All"])
    assert "MD5OfMessageAttributes" not in message and "MessageAttributes" not in message


def test_attributes_come_only_when_asked_for(queue):
    queue.send(MessageAttributes=ALL)
    message = queue.one()
    assert "MessageAttributes" not in message and "MD5OfMessageAttributes" not in message


@pytest.mark.parametrize(
    "wanted, found",
    [
        (["name"], ["name"]),
        (["name", "count", "absent"], ["count", "name"]),
        (["Custom.*"], ["Custom.Text-1_x"]),
        (["custom.*", "png"], ["custom.number", "png"]),
        ([".*"], sorted(ALL)),
        (["absent"], []),
    ],
    ids=["one", "some", "prefix", "prefix and name", "all by prefix", "none"],
)
def test_attributes_are_selected_by_name_and_prefix(queue, wanted, found):
    queue.send(MessageAttributes=ALL)
    message = queue.one(MessageAttributeNames=wanted)
    attributes = message.get("MessageAttributes", {})
    assert sorted(attributes) == found
    # The digest covers what was returned.
    expected = md5_of_attributes({name: ALL[name] for name in found}) if found else None
    assert message.get("MD5OfMessageAttributes") == expected


def test_ten_attributes_are_allowed(queue):
    queue.send(MessageAttributes={f"a{n}": text("1") for n in range(10)})
    assert len(queue.one(MessageAttributeNames=["All"])["MessageAttributes"]) == 10


def test_eleven_attributes_are_refused(queue):
    with fails("InvalidParameterValue", "[11]"):
        queue.send(MessageAttributes={f"a{n}": text("1") for n in range(11)})


@pytest.mark.parametrize("bad", ["", "AWS.x", "aws.x", "Amazon.x", ".x", "x.", "a..b", "a b", "x" * 257])
def test_an_attribute_name_that_sqs_does_not_allow_is_refused(queue, bad):
    with fails("InvalidParameterValue"):
        queue.send(MessageAttributes={bad: text("1")})


def test_an_attribute_name_may_have_256_characters(queue):
    queue.send(MessageAttributes={"x" * 256: text("1")})


@pytest.mark.parametrize(
    "attribute",
    [
        text(""),
        binary(b""),
        text("one", "Number"),
        text("1" * 39, "Number"),
        text("1", "Boolean"),
        text("1", ""),
        text("1", "string"),
        {"DataType": "String"},
        {"DataType": "Binary"},
    ],
    ids=["empty", "no bytes", "no number", "39 digits", "type", "no type", "case", "no text", "no binary"],
)
def test_an_attribute_that_makes_no_sense_is_refused(queue, attribute):
    with fails("InvalidParameterValue", status=400):
        queue.send(MessageAttributes={"a": attribute})


@pytest.mark.parametrize("number", ["0", "-1", "+5", "3.14", "1e10", "-2.5E-3", "1" * 38])
def test_numbers_in_all_their_forms_are_kept_as_text(queue, number):
    queue.send(MessageAttributes={"n": text(number, "Number")})
    assert queue.one(MessageAttributeNames=["n"])["MessageAttributes"]["n"] == text(number, "Number")


def test_an_attribute_with_a_character_that_xml_does_not_allow_is_refused(queue):
    with fails("InvalidParameterValue"):
        queue.send(MessageAttributes={"a": text("bad \x02")})


def test_list_values_are_refused(queue):
    with fails("AWS.SimpleQueueService.UnsupportedOperation"):
        queue.send(MessageAttributes={"a": {"DataType": "String", "StringListValues": ["x"]}})


def test_the_trace_header_travels_as_a_system_attribute(queue):
    trace = {"AWSTraceHeader": text("Root=1-5759e988-bd862e3fe1be46a994272793")}
    answer = queue.send(MessageSystemAttributes=trace, MessageAttributes={"a": text("1")})
    assert answer["MD5OfMessageSystemAttributes"] == md5_of_attributes(trace)
    message = queue.one(AttributeNames=["AWSTraceHeader"], MessageAttributeNames=["All"])
    assert message["Attributes"] == {"AWSTraceHeader": trace["AWSTraceHeader"]["StringValue"]}
    assert sorted(message["MessageAttributes"]) == ["a"]


def test_no_other_system_attribute_can_be_sent(queue):
    with fails("InvalidParameterValue"):
        queue.send(MessageSystemAttributes={"Other": text("1")})


def test_system_attributes_come_only_when_asked_for(queue):
    queue.send()
    assert "Attributes" not in queue.one()


def test_system_attributes_tell_sender_times_and_count(queue):
    queue.send()
    first = queue.one(AttributeNames=["All"])["Attributes"]
    assert sorted(first) == [
        "ApproximateFirstReceiveTimestamp",
        "ApproximateReceiveCount",
        "SenderId",
        "SentTimestamp",
    ]
    now_ms = time.time() * 1000
    assert abs(int(first["SentTimestamp"]) - now_ms) < 30_000
    assert int(first["SentTimestamp"]) <= int(first["ApproximateFirstReceiveTimestamp"]) < now_ms + 30_000
    assert first["ApproximateReceiveCount"] == "1"


def test_system_attributes_come_by_name(queue):
    queue.send()
    message = queue.one(AttributeNames=["ApproximateReceiveCount"])
    assert message["Attributes"] == {"ApproximateReceiveCount": "1"}


def test_the_receive_count_grows_and_the_first_time_stays(make):
    queue = make(VisibilityTimeout=0)
    queue.send()
    seen = [queue.one(AttributeNames=["All"])["Attributes"] for _ in range(3)]
    assert [attributes["ApproximateReceiveCount"] for attributes in seen] == ["1", "2", "3"]
    assert len({attributes["ApproximateFirstReceiveTimestamp"] for attributes in seen}) == 1

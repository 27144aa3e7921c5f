"""The Query protocol by hand: forms in, XML out."""

import urllib.parse

import pytest

import wire


@pytest.fixture
def call(server, queue):
    def call(action, path="/", **parameters):
        return wire.post_form(server.endpoint, {"Action": action, **parameters}, path)

    return call


@pytest.fixture
def path(queue):
    return urllib.parse.urlsplit(queue.url).path


def test_an_answer_is_xml_with_a_request_id(call, queue):
    answer = call("GetQueueUrl", QueueName=queue.name)
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/xml")
    assert answer.xml.tag == wire.NAMESPACE + "GetQueueUrlResponse"
    assert answer.text("GetQueueUrlResult", "QueueUrl") == queue.url
    request_id = answer.text("ResponseMetadata", "RequestId")
    assert request_id and answer.headers["x-amzn-RequestId"] == request_id


def test_an_action_without_a_result_answers_with_its_request_id(call, queue):
    answer = call("PurgeQueue", QueueUrl=queue.url)
    assert answer.xml.tag == wire.NAMESPACE + "PurgeQueueResponse"
    assert answer.text("ResponseMetadata", "RequestId")


def test_an_error_has_the_shape_of_sqs(call, queue):
    answer = call("GetQueueUrl", QueueName=f"{queue.name}-none")
    assert answer.status == 400 and answer.xml.tag == wire.NAMESPACE + "ErrorResponse"
    assert answer.text("Error", "Type") == "Sender"
    assert answer.text("Error", "Code") == "AWS.SimpleQueueService.NonExistentQueue"
    assert answer.text("Error", "Message") and answer.text("RequestId")
    assert answer.xml.find(f"{wire.NAMESPACE}Error/{wire.NAMESPACE}Detail") is not None


def test_the_path_names_the_queue_when_the_form_does_not(call, queue, path):
    answer = call("SendMessage", path, MessageBody="by path")
    assert answer.status == 200 and queue.bodies() == ["by path"]


def test_the_form_goes_before_the_path(call, make):
    named, addressed = make("-a"), make("-b")
    call("SendMessage", urllib.parse.urlsplit(addressed.url).path, QueueUrl=named.url, MessageBody="x")
    assert named.counts() == (1, 0, 0) and addressed.counts() == (0, 0, 0)


def test_a_get_request_with_parameters_works(server, queue, path):
    sent = wire.get_form(server.endpoint, {"Action": "SendMessage", "MessageBody": "a b+c&ü"}, path)
    assert sent.status == 200 and sent.text("SendMessageResult", "MessageId")
    found = wire.get_form(server.endpoint, {"Action": "ReceiveMessage", "QueueUrl": queue.url})
    assert found.text("ReceiveMessageResult", "Message", "Body") == "a b+c&ü"


def test_parameters_may_stand_in_query_and_body(server, queue, path):
    answer = wire.post_form(server.endpoint, {"MessageBody": "split"}, f"{path}?Action=SendMessage")
    assert answer.status == 200 and queue.bodies() == ["split"]


def test_an_unknown_action_is_told(call):
    answer = call("FlyToTheMoon")
    assert (answer.status, answer.text("Error", "Code")) == (400, "InvalidAction")
    assert "FlyToTheMoon" in answer.text("Error", "Message")


def test_a_missing_action_is_told(server):
    answer = wire.post_form(server.endpoint, {"QueueName": "x"})
    assert (answer.status, answer.text("Error", "Code")) == (400, "MissingAction")


def test_a_missing_queue_is_told(call):
    answer = call("SendMessage", MessageBody="x")
    assert (answer.status, answer.text("Error", "Code")) == (400, "MissingParameter")
    assert "QueueUrl" in answer.text("Error", "Message")


def test_a_number_that_is_none_is_told(call, queue):
    answer = call("ReceiveMessage", QueueUrl=queue.url, MaxNumberOfMessages="ten")
    assert (answer.status, answer.text("Error", "Code")) == (400, "InvalidParameterValue")


def test_the_api_version_is_of_no_matter(call, queue):
    assert call("GetQueueUrl", QueueName=queue.name, Version="2009-02-01").status == 200


def test_lists_may_be_numbered_from_anywhere(call, queue):
    answer = call(
        "SendMessageBatch",
        QueueUrl=queue.url,
        **{
            "SendMessageBatchRequestEntry.12.Id": "b",
            "SendMessageBatchRequestEntry.12.MessageBody": "second",
            "SendMessageBatchRequestEntry.3.Id": "a",
            "SendMessageBatchRequestEntry.3.MessageBody": "first",
        },
    )
    ids = answer.texts("SendMessageBatchResult", "SendMessageBatchResultEntry", "Id")
    assert ids == ["a", "b"] and queue.bodies() == ["first", "second"]


def test_a_list_of_one_needs_no_number(call, queue):
    queue.send(MessageAttributes={"a": {"DataType": "String", "StringValue": "1"}})
    answer = call("ReceiveMessage", QueueUrl=queue.url, AttributeName="SentTimestamp", MessageAttributeName="All")
    message = ("ReceiveMessageResult", "Message")
    assert answer.text(*message, "Attribute", "Name") == "SentTimestamp"
    assert answer.text(*message, "MessageAttribute", "Name") == "a"


def test_a_batch_tells_what_failed(call, queue):
    answer = call(
        "DeleteMessageBatch",
        QueueUrl=queue.url,
        **{
            "DeleteMessageBatchRequestEntry.1.Id": "bad",
            "DeleteMessageBatchRequestEntry.1.ReceiptHandle": "garbage",
        },
    )
    entry = ("DeleteMessageBatchResult", "BatchResultErrorEntry")
    assert answer.status == 200
    assert answer.text(*entry, "Id") == "bad" and answer.text(*entry, "SenderFault") == "true"
    assert answer.text(*entry, "Code") == "ReceiptHandleIsInvalid"


def test_attributes_are_name_and_value(call, queue):
    answer = call("GetQueueAttributes", QueueUrl=queue.url, **{"AttributeName.1": "DelaySeconds"})
    at = ("GetQueueAttributesResult", "Attribute")
    assert (answer.text(*at, "Name"), answer.text(*at, "Value")) == ("DelaySeconds", "0")


def test_markup_in_a_body_is_escaped(call, queue):
    queue.send("</Body><Injected/>")
    answer = call("ReceiveMessage", QueueUrl=queue.url)
    assert answer.text("ReceiveMessageResult", "Message", "Body") == "</Body><Injected/>"


def test_a_carriage_return_survives_xml(call, queue):
    queue.send("a\r\nb\rc")
    assert b"&#xD;" in call("ReceiveMessage", QueueUrl=queue.url).body.replace(b"&#13;", b"&#xD;").replace(
        b"&#xd;", b"&#xD;"
    )


def test_a_form_that_is_not_utf_8_is_told(server, queue):
    body = b"Action=SendMessage&QueueUrl=" + queue.url.encode() + b"&MessageBody=%FF%FE"
    answer = wire.request(server.endpoint, "POST", "/", body, {"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert answer.text("Error", "Type") == "Sender"


def test_a_flood_of_parameters_is_refused(server):
    form = {f"Attribute.{n}.Name": "x" for n in range(5000)}
    answer = wire.post_form(server.endpoint, {"Action": "ListQueues", **form})
    assert (answer.status, answer.text("Error", "Code")) == (400, "InvalidParameterValue")


def test_a_body_beyond_the_bound_is_refused(server, queue):
    answer = wire.post_form(server.endpoint, {"Action": "SendMessage", "MessageBody": "x" * (7 << 20)})
    assert answer.status == 413 and answer.text("Error", "Type") == "Sender"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(server, path, method):
    answer = wire.request(server.endpoint, method, path)
    assert 400 <= answer.status < 500

"""AWS JSON 1.0 by hand, and what is the same in both protocols: health, browsers, hosts."""

import json
import urllib.parse

import pytest

import wire


@pytest.fixture
def call(server):
    def call(action, parameters=None, path="/", **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return wire.post_json(server.endpoint, action, {} if parameters is None else parameters, path, headers)

    return call


def test_an_answer_is_json_with_a_request_id(call, queue):
    answer = call("GetQueueUrl", {"QueueName": queue.name})
    assert answer.status == 200 and answer.json == {"QueueUrl": queue.url}
    assert answer.headers["Content-Type"] == "application/x-amz-json-1.0"
    assert answer.headers["x-amzn-RequestId"]


def test_an_action_without_a_result_answers_an_empty_object(call, queue):
    assert call("PurgeQueue", {"QueueUrl": queue.url}).json == {}


@pytest.mark.parametrize(
    "action, parameters, shape, code",
    [
        ("GetQueueUrl", {"QueueName": "none"}, "QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"),
        ("ListQueues", {"MaxResults": 0}, "InvalidParameterValueException", "InvalidParameterValue"),
        ("CreateQueue", {}, "MissingRequiredParameterException", "MissingParameter"),
        (
            "SendMessageBatch",
            {"Entries": []},
            "EmptyBatchRequest",
            "AWS.SimpleQueueService.EmptyBatchRequest",
        ),
        ("DeleteMessage", {"ReceiptHandle": "x"}, "ReceiptHandleIsInvalid", "ReceiptHandleIsInvalid"),
        ("GetQueueAttributes", {"AttributeNames": ["x"]}, "InvalidAttributeName", "InvalidAttributeName"),
        ("SendMessage", {"MessageBody": "\x01"}, "InvalidMessageContents", "InvalidMessageContents"),
        ("FlyToTheMoon", {}, "UnknownOperationException", "InvalidAction"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_has_its_shape_and_its_query_code(call, queue, action, parameters, shape, code):
    on_queue = action not in ("GetQueueUrl", "ListQueues", "CreateQueue", "FlyToTheMoon")
    parameters = {**parameters, "QueueUrl": queue.url} if on_queue else parameters
    answer = call(action, parameters)
    assert 400 <= answer.status < 500
    assert answer.json["__type"].split("#")[1] == shape
    assert answer.headers["x-amzn-query-error"] == f"{code};Sender"
    assert answer.json["message"]


def test_create_again_with_other_attributes_has_its_own_names(call, queue):
    answer = call("CreateQueue", {"QueueName": queue.name, "Attributes": {"DelaySeconds": "5"}})
    assert answer.json["__type"].endswith("#QueueNameExists")
    assert answer.headers["x-amzn-query-error"] == "QueueAlreadyExists;Sender"


def test_the_path_names_the_queue_when_the_body_does_not(call, queue):
    path = urllib.parse.urlsplit(queue.url).path
    assert call("SendMessage", {"MessageBody": "by path"}, path).status == 200
    assert queue.bodies() == ["by path"]


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "1", '"x"', "{'a': 1}", '{"QueueName": 5}'])
def test_a_body_that_makes_no_sense_is_told(call, body):
    answer = call("GetQueueUrl", body)
    assert answer.status == 400
    assert answer.json["__type"].split("#")[1] in (
        "SerializationException",
        "MissingRequiredParameterException",
    )


def test_a_deeply_nested_body_is_told(call):
    answer = call("GetQueueUrl", '{"QueueName": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert answer.status == 400


def test_unknown_members_are_ignored(call, queue):
    assert call("GetQueueUrl", {"QueueName": queue.name, "FromTheFuture": {"x": [1]}}).status == 200


def test_null_members_are_as_absent(call, queue):
    answer = call("SendMessage", {"QueueUrl": queue.url, "MessageBody": "x", "DelaySeconds": None})
    assert answer.status == 200


def test_queue_attributes_may_be_numbers_and_booleans(call, name):
    attributes = {"FifoQueue": True, "VisibilityTimeout": 7}
    assert call("CreateQueue", {"QueueName": f"{name}.fifo", "Attributes": attributes}).status == 200


def test_binary_attributes_are_base64(call, queue):
    attribute = {"DataType": "Binary", "BinaryValue": "AAECAw=="}
    call("SendMessage", {"QueueUrl": queue.url, "MessageBody": "x", "MessageAttributes": {"b": attribute}})
    found = call("ReceiveMessage", {"QueueUrl": queue.url, "MessageAttributeNames": ["All"]}).json
    assert found["Messages"][0]["MessageAttributes"] == {"b": attribute}


def test_bytes_that_are_not_base64_are_refused(call, queue):
    attribute = {"DataType": "Binary", "BinaryValue": "not base64!"}
    answer = call("SendMessage", {"QueueUrl": queue.url, "MessageBody": "x", "MessageAttributes": {"b": attribute}})
    assert answer.status == 400


def test_escapes_in_json_are_read(call, queue):
    body = f'{{"QueueUrl": "{queue.url}", "MessageBody": "\\u00e9\\ud83c\\udf89\\n\\/"}}'
    assert call("SendMessage", body).status == 200
    assert queue.bodies() == ["é🎉\n/"]


def test_half_a_surrogate_pair_is_refused(call, queue):
    body = f'{{"QueueUrl": "{queue.url}", "MessageBody": "\\ud83c"}}'
    assert call("SendMessage", body).status == 400
    assert queue.counts() == (0, 0, 0)


def test_a_target_of_another_service_is_refused(server):
    answer = wire.request(server.endpoint, "POST", "/", "{}", {"X-Amz-Target": "DynamoDB_20120810.ListTables"})
    assert answer.status == 400 and answer.json["__type"].endswith("UnknownOperationException")


def test_a_body_beyond_the_bound_is_refused(call, queue):
    answer = call("SendMessage", json.dumps({"QueueUrl": queue.url, "MessageBody": "x" * (7 << 20)}))
    assert answer.status == 413


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1",
        "http://127.0.0.1/",
        "https://sqs.us-east-1.amazonaws.com",
        "http://127.0.0.1/000000000000/",
        "http://127.0.0.1/000000000000/a b",
        "no/such/queue",
        "not a url",
        "ftp://?#",
        "x" * 2000,
    ],
)
@pytest.mark.parametrize("action", ["SendMessage", "ReceiveMessage", "GetQueueAttributes", "DeleteQueue"])
def test_a_url_that_names_no_queue_is_a_queue_that_does_not_exist(call, action, url):
    answer = call(action, {"QueueUrl": url, "MessageBody": "x"})
    assert answer.status == 400 and answer.json["__type"].endswith("#QueueDoesNotExist")
    assert answer.headers["x-amzn-query-error"] == "AWS.SimpleQueueService.NonExistentQueue;Sender"


def test_a_queue_url_has_the_host_of_the_request(server, queue):
    port = server.port
    answer = wire.post_json(
        server.endpoint, "GetQueueUrl", {"QueueName": queue.name}, headers={"Host": f"localhost:{port}"}
    )
    assert answer.json == {"QueueUrl": f"http://localhost:{port}/000000000000/{queue.name}"}


def test_a_foreign_host_header_is_refused(call):
    assert call("ListQueues", Host="attacker.example").status == 403


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://attacker.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}]
)
def test_a_web_page_of_another_site_is_refused(call, headers):
    assert call("ListQueues", **headers).status == 403


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_told(server, path):
    assert wire.request(server.endpoint, "GET", path).status == 200

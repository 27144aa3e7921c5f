"""The Query protocol by GET, as AWS answers it: on a queue's URL, and in JSON when asked for."""

import urllib.parse

import pytest

import wire

JSON = {"Accept": "application/json"}


@pytest.fixture
def path(queue):
    return urllib.parse.urlsplit(queue.url).path


@pytest.fixture
def get(server, path):
    def get(_path=path, _headers=None, **parameters):
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        return wire.request(server.endpoint, "GET", f"{_path}{query}", headers=_headers)

    return get


def test_an_empty_result_is_an_empty_element(get):
    for action in ["ReceiveMessage", "ListQueueTags", "GetQueueAttributes"]:
        answer = get(Action=action)
        assert answer.status == 200 and f"<{action}Result/>".encode() in answer.body, answer.body


@pytest.mark.parametrize("headers", [None, JSON])
def test_the_url_of_a_queue_without_an_action_is_an_unknown_operation(get, headers):
    answer = get(_headers=headers)
    assert answer.status == 404 and b"<UnknownOperationException" in answer.body
    assert answer.headers["Content-Type"].startswith("text/xml") and answer.headers["x-amzn-RequestId"]


@pytest.mark.parametrize("action", ["CreateQueue", "ListQueues"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_action_that_has_no_queue_is_not_valid_on_one(server, sqs, get, path, name, action, method):
    parameters = {"Action": action, "QueueName": f"{name}-new"}
    if method == "GET":
        answer = get(**parameters)
    else:
        answer = wire.post_form(server.endpoint, parameters, path)
    assert (answer.status, answer.text("Error", "Code")) == (400, "InvalidAction")
    assert answer.text("Error", "Message") == f"The action {action} is not valid for this endpoint."
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix=f"{name}-new")


def test_accept_json_gives_json(get, queue):
    listed = get("/", JSON, Action="ListQueues", QueueNamePrefix=queue.name)
    assert listed.status == 200 and listed.headers["Content-Type"].startswith("application/json")
    body = listed.json["ListQueuesResponse"]
    assert body["ListQueuesResult"]["queueUrls"] == [queue.url]
    assert body["ResponseMetadata"]["RequestId"] == listed.headers["x-amzn-RequestId"]


def test_messages_in_json_are_a_list(get, queue):
    body = '{"quoted": "a\\r\\"b\\"", "entity": "&quot;"}\r<&>'
    queue.send(body, MessageAttributes={"n": {"DataType": "Number", "StringValue": "1"}})
    answer = get("/", JSON, Action="ReceiveMessage", QueueUrl=queue.url, MessageAttributeName="All")
    messages = answer.json["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]
    assert [message["Body"] for message in messages] == [body]
    empty = get(_headers=JSON, Action="ReceiveMessage")
    assert not empty.json["ReceiveMessageResponse"]["ReceiveMessageResult"]["messages"]


def test_queue_attributes_in_json_are_pairs(get, queue):
    answer = get(_headers=JSON, Action="GetQueueAttributes", **{"AttributeName.1": "QueueArn"})
    result = answer.json["GetQueueAttributesResponse"]["GetQueueAttributesResult"]
    assert result["Attributes"] == [{"Name": "QueueArn", "Value": queue.arn}]


def test_errors_come_in_json_too(get):
    answer = get(_headers=JSON, Action="ListQueues")
    error = answer.json["Error"]
    assert (answer.status, error["Code"], error["Type"]) == (400, "InvalidAction", "Sender")
    assert error["Message"] == "The action ListQueues is not valid for this endpoint."
    assert answer.json["RequestId"]


def test_xml_is_the_answer_unless_json_is_asked_for(server, get, path):
    for accept in ["*/*", "text/xml", "application/xml, application/json;q=0.5"]:
        answer = get(_headers={"Accept": accept}, Action="ReceiveMessage")
        assert answer.headers["Content-Type"].startswith("text/xml"), accept
    # A form is answered in XML, as SDKs of the Query protocol need.
    answer = wire.post_form(server.endpoint, {"Action": "ReceiveMessage"}, path, JSON)
    assert answer.headers["Content-Type"].startswith("text/xml")


@pytest.mark.parametrize("url", ["http://localhost", "http://localhost/", "not a url", "ftp://?#", "x" * 2000])
@pytest.mark.parametrize("action", ["ReceiveMessage", "DeleteQueue"])
def test_a_url_that_names_no_queue_is_a_queue_that_does_not_exist(get, url, action):
    answer = get("/", Action=action, QueueUrl=url)
    assert (answer.status, answer.text("Error", "Code")) == (400, "AWS.SimpleQueueService.NonExistentQueue")

"""SigV4: who may call, and AWS's own error for everyone else."""

import datetime
import urllib.parse

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

import wire
from conftest import PROTOCOL, client_for
from hapax_server import Folder
from sqs import Queue, fails

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
CONFIG = f"""
[[auth.keys]]
id = "AKIAADMIN"
secret = "{SECRET}"

[[auth.keys]]
id = "AKIASENDER"
secret_env = "SENDER_SECRET"
queues = ["orders-*"]
actions = ["SendMessage", "GetQueueUrl", "ListQueues"]
"""


@pytest.fixture(scope="module")
def guarded():
    with Folder(CONFIG, {"SENDER_SECRET": SECRET}) as server:
        yield server


@pytest.fixture
def admin(guarded):
    return client_for(guarded.endpoint, "AKIAADMIN", SECRET)


@pytest.fixture
def sender(guarded):
    return client_for(guarded.endpoint, "AKIASENDER", SECRET)


@pytest.fixture
def orders(admin, name):
    return Queue.create(admin, f"orders-{name}")


def shift_clock(monkeypatch, minutes):
    """Makes botocore sign as if it were earlier or later."""
    shift = datetime.timedelta(minutes=minutes)
    if hasattr(botocore.auth, "get_current_datetime"):
        real = botocore.auth.get_current_datetime
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: real(*a, **k) + shift)
        return

    class Shifted(datetime.datetime):
        @classmethod
        def utcnow(cls):
            return datetime.datetime.utcnow() + shift

    class Module:
        datetime = Shifted

    monkeypatch.setattr(botocore.auth, "datetime", Module)


def presigned(server, parameters, secret=SECRET, expires=60, path="/"):
    url = f"{server.endpoint}{path}?{urllib.parse.urlencode(parameters)}"
    request = AWSRequest("GET", url)
    credentials = Credentials("AKIAADMIN", secret)
    botocore.auth.SigV4QueryAuth(credentials, "sqs", "us-east-1", expires=expires).add_auth(request)
    parts = urllib.parse.urlsplit(request.url)
    return f"{parts.path}?{parts.query}"


def test_the_right_key_does_the_whole_round(orders):
    orders.send("größe & mehr")
    message = orders.one()
    assert message["Body"] == "größe & mehr"
    orders.delete(message)
    assert orders.counts() == (0, 0, 0)


def test_a_wrong_secret_does_not_match(guarded):
    with fails("SignatureDoesNotMatch", "signature we calculated does not match", 403):
        client_for(guarded.endpoint, "AKIAADMIN", "wrong").list_queues()


def test_an_unknown_key_is_invalid(guarded):
    with fails("InvalidClientTokenId", "security token", 403):
        client_for(guarded.endpoint, "AKIANOBODY", SECRET).list_queues()


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_date_more_than_15_minutes_off_is_expired(admin, monkeypatch, minutes):
    shift_clock(monkeypatch, minutes)
    with fails("RequestExpired", "Signature", 400):
        admin.list_queues()


@pytest.mark.parametrize("minutes", [-14, 14])
def test_a_date_less_than_15_minutes_off_is_taken(admin, monkeypatch, minutes):
    shift_clock(monkeypatch, minutes)
    admin.list_queues()


def test_a_key_without_the_right_to_an_action_is_denied(sender, orders):
    Queue(sender, orders.url).send()
    with fails("AccessDenied", "sqs:receivemessage", 403):
        Queue(sender, orders.url).receive()
    with fails("AccessDenied", status=403):
        sender.purge_queue(QueueUrl=orders.url)
    assert orders.counts() == (1, 0, 0)


def test_a_key_without_the_right_to_a_queue_is_denied(admin, sender, name):
    secret = Queue.create(admin, f"payments-{name}")
    with fails("AccessDenied", secret.name, 403):
        Queue(sender, secret.url).send()
    assert secret.counts() == (0, 0, 0)


def test_denied_is_said_before_whether_the_queue_exists(sender, guarded, name):
    with fails("AccessDenied"):
        Queue(sender, f"{guarded.endpoint}/000000000000/payments-{name}").send()


def test_a_batch_needs_the_right_to_the_single_action(sender, orders):
    answer = Queue(sender, orders.url).send_batch("a", "b")
    assert len(answer["Successful"]) == 2


def test_a_key_sees_only_its_queues(admin, sender, orders, name):
    Queue.create(admin, f"payments-{name}")
    urls = sender.list_queues().get("QueueUrls", [])
    assert orders.url in urls and all("/orders-" in url for url in urls)


def test_without_a_signature_there_is_no_entry(guarded):
    if PROTOCOL == "json":
        answer = wire.post_json(guarded.endpoint, "ListQueues", {})
        assert answer.json["__type"].endswith("#MissingAuthenticationTokenException")
        assert answer.headers["x-amzn-query-error"] == "MissingAuthenticationToken;Sender"
    else:
        answer = wire.post_form(guarded.endpoint, {"Action": "ListQueues"})
        assert answer.text("Error", "Code") == "MissingAuthenticationToken"
    assert answer.status == 403


def test_half_a_signature_is_incomplete(guarded):
    answer = wire.post_form(
        guarded.endpoint, {"Action": "ListQueues"}, headers={"Authorization": "AWS4-HMAC-SHA256 Credential=x"}
    )
    assert (answer.status, answer.text("Error", "Code")) == (400, "IncompleteSignature")


def test_a_presigned_request_works(guarded, orders):
    path = urllib.parse.urlsplit(orders.url).path
    url = presigned(guarded, {"Action": "SendMessage", "MessageBody": "presigned ü+/="}, path=path)
    assert wire.request(guarded.endpoint, "GET", url).status == 200
    assert orders.bodies() == ["presigned ü+/="]


def test_a_presigned_request_with_a_changed_parameter_does_not_match(guarded, orders):
    url = presigned(guarded, {"Action": "PurgeQueue", "QueueUrl": orders.url})
    answer = wire.request(guarded.endpoint, "GET", url.replace("PurgeQueue", "DeleteQueue"))
    assert (answer.status, answer.text("Error", "Code")) == (403, "SignatureDoesNotMatch")


def test_a_presigned_request_ends_with_its_time(guarded, monkeypatch):
    shift_clock(monkeypatch, -2)
    url = presigned(guarded, {"Action": "ListQueues"}, expires=60)
    answer = wire.request(guarded.endpoint, "GET", url)
    assert (answer.status, answer.text("Error", "Code")) == (400, "RequestExpired")


def test_a_changed_body_does_not_match(guarded, orders):
    client = client_for(guarded.endpoint, "AKIAADMIN", SECRET)

    def tamper_after_signing(request, **_):
        body = request.body.encode() if isinstance(request.body, str) else request.body
        request.body = body.replace(b"innocent", b"tampered")

    client.meta.events.register_last("before-send.sqs.*", tamper_after_signing)
    with fails("SignatureDoesNotMatch"):
        Queue(client, orders.url).send("innocent")
    assert orders.counts() == (0, 0, 0)


def test_any_region_may_sign(guarded, orders):
    client = client_for(guarded.endpoint, "AKIAADMIN", SECRET, "ap-southeast-2")
    assert client.get_queue_url(QueueName=orders.name)["QueueUrl"] == orders.url


def test_health_needs_no_key(guarded):
    assert wire.request(guarded.endpoint, "GET", "/healthz").status == 200


def test_secrets_are_not_in_the_output(guarded):
    assert not [line for line in guarded.output if SECRET in line]

"""Slow, silent and half-open connections starve nobody."""

import socket
import statistics
import time

import pytest
from hapax_server import Folder
from load import Connection, create

HEAD = "POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Amz-Target: AmazonSQS.ListQueues\r\n"


def connect(server, text=""):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(text.format(port=server.port).encode())
    return connection


def closed_within(connection, seconds):
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except socket.timeout:
        return False


def round_trips(server, url, count):
    """How long each send-receive-delete took, in seconds."""
    connection, took = Connection(server, timeout=20), []
    for _ in range(count):
        start = time.monotonic()
        connection.call("SendMessage", QueueUrl=url, MessageBody="x")
        message = connection.call("ReceiveMessage", QueueUrl=url, WaitTimeSeconds=5)["Messages"][0]
        connection.call("DeleteMessage", QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        took.append(time.monotonic() - start)
    connection.close()
    return took


@pytest.fixture
def hasty():
    """A server that waits a second for a request to arrive, and has room for 50 connections."""
    with Folder("[limits]\nread_timeout_ms = 1000\nidle_timeout_ms = 1500\nconnections_max = 50\n") as server:
        yield server


@pytest.fixture
def few_files():
    """A server that may open 200 files and not one more."""
    with Folder(files_max=200) as server:
        yield server


def test_hundreds_of_half_sent_requests_do_not_slow_others(own_server):
    url = create(own_server, "q")
    alone = statistics.median(round_trips(own_server, url, 40))
    halves = ["", "PO", HEAD, HEAD + "Content-Length: 1000\r\n\r\n{{"]
    others = [connect(own_server, halves[n % 4]) for n in range(600)]
    try:
        beside = statistics.median(round_trips(own_server, url, 40))
        print(f"round trip {alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms beside 600 half-sent requests")
        assert beside < 5 * alone + 0.5
    finally:
        for other in others:
            other.close()


@pytest.mark.parametrize("text", ["PO", HEAD, HEAD + "Content-Length: 9\r\n\r\n{{"], ids=["line", "head", "body"])
def test_a_request_that_does_not_arrive_is_given_up(hasty, text):
    assert closed_within(connect(hasty, text), 30)


def test_a_request_that_trickles_is_given_up(hasty):
    connection = connect(hasty, "POST / HTTP/1.1\r\n")
    end = time.monotonic() + 30
    try:
        while time.monotonic() < end:
            connection.sendall(b"X-A: b\r\n")
            time.sleep(0.1)
    except ConnectionError:
        return
    raise AssertionError("the server went on reading")


def test_an_idle_connection_is_closed(hasty):
    connection = connect(hasty, "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n")
    assert closed_within(connection, 30)


def test_connections_that_take_every_place_do_not_lock_others_out(hasty):
    url = create(hasty, "q")
    others = [connect(hasty, "POST /") for _ in range(120)]
    try:
        start = time.monotonic()
        while True:
            try:
                round_trips(hasty, url, 5)
                break
            except (OSError, AssertionError):
                assert time.monotonic() - start < 30
                time.sleep(0.1)
        assert time.monotonic() - start < 30
    finally:
        for other in others:
            other.close()


def test_connections_never_take_the_last_file(few_files):
    url = create(few_files, "q")
    # More than there can be: each new one takes the place of one that says nothing.
    others = [connect(few_files, "POST /") for _ in range(400)]
    try:
        assert statistics.median(round_trips(few_files, url, 10)) < 5
    finally:
        for other in others:
            other.close()


def test_a_client_that_does_not_read_its_answers_holds_up_nobody(own_server):
    url = create(own_server, "large")
    sender = Connection(own_server)
    for _ in range(4):
        sender.call("SendMessage", QueueUrl=url, MessageBody="x" * 1_000_000)
    body = f'{{"QueueUrl":"{url}","MaxNumberOfMessages":10,"VisibilityTimeout":0}}'
    request = (
        HEAD.format(port=own_server.port).replace("ListQueues", "ReceiveMessage")
        + f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    deaf = [connect(own_server) for _ in range(10)]
    try:
        for connection in deaf:
            connection.sendall(request.encode() * 5)
        other = create(own_server, "other")
        assert statistics.median(round_trips(own_server, other, 20)) < 5
    finally:
        for connection in deaf:
            connection.close()

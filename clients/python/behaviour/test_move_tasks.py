"""Message move tasks: dead letters on their way back."""

import json
import time

import pytest

import wire
from conftest import PROTOCOL
from sqs import eventually, fails


class Tasks:
    """The three actions; by hand where botocore is older than they are."""

    def __init__(self, sqs, endpoint):
        self.sqs, self.endpoint = sqs, endpoint

    def call(self, action, method, **parameters):
        if hasattr(self.sqs, method):
            return getattr(self.sqs, method)(**parameters)
        answer = wire.post_form(self.endpoint, {"Action": action, **parameters})
        result = f"{action}Result"
        if answer.status != 200:
            error = {"Code": answer.text("Error", "Code"), "Message": answer.text("Error", "Message")}
            told = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": answer.status}}
            raise self.sqs.exceptions.ClientError(told, action)
        found = answer.xml.find(wire.NAMESPACE + result)
        tasks = [as_dict(entry) for entry in found if len(entry)]
        return {"Results": tasks} if tasks or action.startswith("List") else as_dict(found)

    def start(self, source, **more):
        answer = self.call("StartMessageMoveTask", "start_message_move_task", SourceArn=source.arn, **more)
        return answer["TaskHandle"]

    def list(self, source, **more):
        return self.call("ListMessageMoveTasks", "list_message_move_tasks", SourceArn=source.arn, **more)["Results"]

    def cancel(self, handle):
        answer = self.call("CancelMessageMoveTask", "cancel_message_move_task", TaskHandle=handle)
        return int(answer["ApproximateNumberOfMessagesMoved"])

    def end(self, source, status="COMPLETED"):
        return eventually(lambda: [task for task in self.list(source) if task["Status"] == status])[0]


def as_dict(element):
    return {child.tag.removeprefix(wire.NAMESPACE): child.text for child in element}


@pytest.fixture
def tasks(sqs, server):
    return Tasks(sqs, server.endpoint)


@pytest.fixture
def pair(make):
    """A queue and its dead-letter queue with five dead letters."""
    dead = make("-dead")
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1})
    queue = make(RedrivePolicy=policy, VisibilityTimeout=0)
    queue.send_batch(*"abcde")
    eventually(lambda: [queue.receive(10)] and dead.counts()[0] == 5)
    queue.set(VisibilityTimeout=30)
    return queue, dead


def test_dead_letters_return_to_their_source(tasks, pair):
    queue, dead = pair
    tasks.start(dead)
    tasks.end(dead)
    assert sorted(queue.bodies()) == list("abcde")
    assert dead.counts() == (0, 0, 0)


def test_dead_letters_may_go_to_another_queue(tasks, pair, make):
    queue, dead = pair
    other = make("-other")
    tasks.start(dead, DestinationArn=other.arn)
    task = tasks.end(dead)
    assert task["DestinationArn"] == other.arn
    assert sorted(other.bodies()) == list("abcde") and queue.counts() == (0, 0, 0)


def test_a_redriven_message_is_a_new_one(tasks, pair):
    queue, dead = pair
    before = {message["MessageId"] for message in dead.receive(10, VisibilityTimeout=0)}
    tasks.start(dead)
    tasks.end(dead)
    messages = queue.receive(10, AttributeNames=["ApproximateReceiveCount"])
    assert before.isdisjoint(message["MessageId"] for message in messages)
    assert {message["Attributes"]["ApproximateReceiveCount"] for message in messages} == {"1"}


def test_a_task_that_has_ended_tells_its_numbers_and_no_handle(tasks, pair):
    _, dead = pair
    tasks.start(dead)
    task = tasks.end(dead)
    assert "TaskHandle" not in task and task["SourceArn"] == dead.arn
    assert int(task["ApproximateNumberOfMessagesMoved"]) == 5
    assert int(task["ApproximateNumberOfMessagesToMove"]) == 5
    assert abs(int(task["StartedTimestamp"]) / 1000 - time.time()) < 60


def test_a_running_task_is_rate_limited_and_shows_its_handle(tasks, pair):
    _, dead = pair
    handle = tasks.start(dead, MaxNumberOfMessagesPerSecond=1)
    task = tasks.list(dead)[0]
    assert task["Status"] == "RUNNING" and task["TaskHandle"] == handle
    assert int(task["MaxNumberOfMessagesPerSecond"]) == 1
    time.sleep(1.2)
    assert 1 <= dead.counts()[0] <= 4
    tasks.cancel(handle)


def test_a_cancelled_task_leaves_the_rest_where_it_is(tasks, pair):
    queue, dead = pair
    handle = tasks.start(dead, MaxNumberOfMessagesPerSecond=1)
    moved = tasks.cancel(handle)
    assert moved < 5
    tasks.end(dead, "CANCELLED")
    left = dead.counts()[0]
    assert left + queue.counts()[0] == 5 and left >= 1
    time.sleep(1.2)
    assert dead.counts()[0] == left


def test_a_queue_has_one_running_task(tasks, pair):
    _, dead = pair
    handle = tasks.start(dead, MaxNumberOfMessagesPerSecond=1)
    with fails("InvalidParameterValue", "already a task running", 400):
        tasks.start(dead)
    tasks.cancel(handle)


def test_a_task_may_follow_one_that_was_cancelled(tasks, pair):
    queue, dead = pair
    tasks.cancel(tasks.start(dead, MaxNumberOfMessagesPerSecond=1))
    tasks.end(dead, "CANCELLED")
    tasks.start(dead)
    tasks.end(dead)
    assert queue.counts()[0] == 5
    assert [task["Status"] for task in tasks.list(dead, MaxResults=10)] == ["COMPLETED", "CANCELLED"]


def test_the_last_task_alone_is_listed_unless_more_are_asked_for(tasks, pair):
    _, dead = pair
    for _ in range(2):
        tasks.start(dead)
        tasks.end(dead)
    assert len(tasks.list(dead)) == 1 and len(tasks.list(dead, MaxResults=10)) == 2


def test_a_task_that_has_ended_cannot_be_cancelled(tasks, pair):
    _, dead = pair
    handle = tasks.start(dead)
    tasks.end(dead)
    with fails("InvalidParameterValue", "active"):
        tasks.cancel(handle)


def test_the_source_must_be_a_dead_letter_queue(tasks, queue):
    with fails("InvalidParameterValue", "Dead Letter Queue"):
        tasks.start(queue)


def test_a_source_that_does_not_exist(tasks, queue):
    arn = f"{queue.arn}-none"
    with fails("ResourceNotFoundException", status=404):
        tasks.call("StartMessageMoveTask", "start_message_move_task", SourceArn=arn)
    with fails("ResourceNotFoundException", status=404):
        tasks.call("ListMessageMoveTasks", "list_message_move_tasks", SourceArn=arn)


def test_a_queue_that_is_its_own_dead_letter_queue_is_no_source(tasks, make):
    queue = make()
    queue.set(RedrivePolicy=json.dumps({"deadLetterTargetArn": queue.arn, "maxReceiveCount": 1}))
    with fails("InvalidParameterValue", "Dead Letter Queue"):
        tasks.call("StartMessageMoveTask", "start_message_move_task", SourceArn=queue.arn)


def test_a_destination_that_does_not_exist(tasks, pair):
    queue, dead = pair
    with fails("ResourceNotFoundException"):
        tasks.start(dead, DestinationArn=f"{queue.arn}-none")


@pytest.mark.parametrize("rate", [0, -1, 501])
def test_a_rate_out_of_bounds_is_refused(tasks, pair, rate):
    with fails("InvalidParameterValue", "MaxNumberOfMessagesPerSecond"):
        tasks.start(pair[1], MaxNumberOfMessagesPerSecond=rate)


@pytest.mark.parametrize("count", [0, 11])
def test_a_number_of_results_out_of_bounds_is_refused(tasks, pair, count):
    with fails("InvalidParameterValue", "MaxResults"):
        tasks.list(pair[1], MaxResults=count)


def test_an_arn_that_is_none_is_refused(tasks):
    with fails("InvalidParameterValue"):
        tasks.call("StartMessageMoveTask", "start_message_move_task", SourceArn="not an arn")


def test_a_handle_that_is_none_is_refused(tasks):
    with fails("InvalidParameterValue", "TaskHandle"):
        tasks.cancel("garbage")


def test_a_queue_without_tasks_lists_none(tasks, pair):
    assert tasks.list(pair[1]) == []


def test_the_sdk_speaks_the_protocol_under_test(sqs):
    assert hasattr(sqs, "start_message_move_task") == (PROTOCOL == "json")

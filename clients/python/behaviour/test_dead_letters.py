"""Dead letters: RedrivePolicy and RedriveAllowPolicy."""

import json

import pytest

from sqs import eventually, fails


def policy(arn, count=1):
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": count})


@pytest.fixture
def pair(make):
    """A queue whose messages die after the second receive, and where they go."""
    dead = make("-dead")
    return make(RedrivePolicy=policy(dead.arn, 2), VisibilityTimeout=0), dead


def die(queue, dead, count=1):
    """Receives until `count` messages have been given up."""
    eventually(lambda: [queue.receive(10)] and dead.counts()[0] >= count)


def test_a_message_is_given_up_after_its_last_receive(pair):
    queue, dead = pair
    queue.send("poison")
    assert queue.bodies() == ["poison"] and queue.bodies() == ["poison"]
    assert queue.bodies() == []
    eventually(lambda: dead.counts() == (1, 0, 0))
    assert queue.counts() == (0, 0, 0) and dead.bodies() == ["poison"]


def test_a_message_deleted_in_time_is_not_given_up(pair):
    queue, dead = pair
    queue.send()
    queue.one()
    queue.delete(queue.one(VisibilityTimeout=30))
    assert queue.receive() == [] and dead.counts() == (0, 0, 0)


def test_a_lease_that_runs_out_counts_too(make):
    dead = make("-dead")
    queue = make(RedrivePolicy=policy(dead.arn), VisibilityTimeout=1)
    queue.send()
    queue.one()
    eventually(lambda: [queue.receive()] and dead.counts()[0] == 1)


@pytest.mark.parametrize("fifo", [False, True])
def test_a_dead_letter_is_not_deleted_by_its_old_receipt(make, fifo):
    """AWS answers success on a standard queue, and a redrive then repeats the effect; here the caller is told."""
    dead = make("-dead", fifo=fifo)
    queue = make(fifo=fifo, RedrivePolicy=policy(dead.arn), VisibilityTimeout=1)
    queue.send("poison")
    late = queue.one()
    eventually(lambda: [queue.receive()] and dead.counts()[0] == 1)
    with fails("InvalidParameterValue", "among the dead letters"):
        queue.delete(late)
    entry = {"Id": "late", "ReceiptHandle": late["ReceiptHandle"]}
    told = queue.client.delete_message_batch(QueueUrl=queue.url, Entries=[entry])
    assert [failed["Id"] for failed in told["Failed"]] == ["late"] and not told.get("Successful")
    assert dead.bodies() == ["poison"]


def test_a_dead_letter_keeps_its_id_body_and_attributes(pair):
    queue, dead = pair
    attributes = {"a": {"DataType": "Number", "StringValue": "1"}}
    sent = queue.send("poison", MessageAttributes=attributes)["MessageId"]
    die(queue, dead)
    message = dead.one(MessageAttributeNames=["All"])
    assert (message["MessageId"], message["Body"]) == (sent, "poison")
    assert message["MessageAttributes"] == attributes


def test_a_dead_letter_tells_where_it_came_from(pair):
    queue, dead = pair
    queue.send()
    die(queue, dead)
    message = dead.one(AttributeNames=["DeadLetterQueueSourceArn"])
    assert message["Attributes"] == {"DeadLetterQueueSourceArn": queue.arn}


def test_other_messages_tell_no_source(queue):
    queue.send()
    assert "DeadLetterQueueSourceArn" not in queue.one(AttributeNames=["All"])["Attributes"]


def test_the_receive_count_goes_on_among_dead_letters(pair):
    queue, dead = pair
    queue.send()
    die(queue, dead)
    message = dead.one(AttributeNames=["ApproximateReceiveCount"])
    assert message["Attributes"] == {"ApproximateReceiveCount": "3"}


def test_a_fifo_dead_letter_frees_its_group(make):
    dead = make("-dead", fifo=True)
    queue = make(fifo=True, RedrivePolicy=policy(dead.arn), VisibilityTimeout=0)
    queue.send("poison")
    queue.send("healthy")
    assert queue.one()["Body"] == "poison"
    message = eventually(lambda: queue.receive(1, VisibilityTimeout=30))[0]
    assert message["Body"] == "healthy"
    assert dead.bodies() == ["poison"]


def test_the_policy_is_shown_as_json(pair):
    queue, dead = pair
    shown = json.loads(queue.attributes("RedrivePolicy")["RedrivePolicy"])
    assert shown == {"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2}


def test_the_count_may_be_text(make):
    dead = make("-dead")
    queue = make(RedrivePolicy=policy(dead.arn, "5"))
    assert json.loads(queue.attributes("RedrivePolicy")["RedrivePolicy"])["maxReceiveCount"] == 5


def test_an_empty_policy_removes_it(pair):
    queue, _ = pair
    queue.set(RedrivePolicy="")
    assert queue.attributes("RedrivePolicy") == {}
    queue.send()
    assert [len(queue.receive()) for _ in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("count", [0, 1001, -1, "many", 1.5])
def test_a_count_out_of_bounds_is_refused(make, queue, count):
    dead = make("-dead")
    with fails("InvalidParameterValue", "RedrivePolicy"):
        queue.set(RedrivePolicy=policy(dead.arn, count))


@pytest.mark.parametrize("text", ["not json", "[]", '{"maxReceiveCount": 1}', '{"deadLetterTargetArn": "x"}'])
def test_a_policy_that_makes_no_sense_is_refused(queue, text):
    with fails("InvalidParameterValue", "RedrivePolicy"):
        queue.set(RedrivePolicy=text)


def test_dead_letters_need_a_queue_that_exists(queue):
    with fails("InvalidParameterValue", "does not exist"):
        queue.set(RedrivePolicy=policy(f"{queue.arn}-none"))


def test_a_fifo_queue_needs_a_fifo_queue_for_its_dead_letters(make):
    standard, fifo = make("-a"), make("-b", fifo=True)
    with fails("InvalidParameterValue", "same type"):
        fifo.set(RedrivePolicy=policy(standard.arn))
    with fails("InvalidParameterValue", "same type"):
        standard.set(RedrivePolicy=policy(fifo.arn))


def test_the_sources_of_a_dead_letter_queue_are_listed(sqs, make):
    dead = make("-dead")
    sources = [make(f"-{n}", RedrivePolicy=policy(dead.arn)).url for n in range(3)]
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead.url)["queueUrls"] == sources
    pages = sqs.get_paginator("list_dead_letter_source_queues")
    pages = pages.paginate(QueueUrl=dead.url, PaginationConfig={"PageSize": 2})
    assert [len(page["queueUrls"]) for page in pages] == [2, 1]


def test_a_queue_without_sources_lists_none(sqs, queue):
    assert sqs.list_dead_letter_source_queues(QueueUrl=queue.url).get("queueUrls", []) == []


def test_a_queue_may_refuse_all_sources(make):
    dead = make("-dead", RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"}))
    with fails("InvalidParameterValue", "RedriveAllowPolicy"):
        make(RedrivePolicy=policy(dead.arn))


def test_a_queue_may_name_its_sources(make):
    friend, stranger = make("-friend"), make("-stranger")
    allow = {"redrivePermission": "byQueue", "sourceQueueArns": [friend.arn]}
    dead = make("-dead", RedriveAllowPolicy=json.dumps(allow))
    friend.set(RedrivePolicy=policy(dead.arn))
    with fails("InvalidParameterValue", "RedriveAllowPolicy"):
        stranger.set(RedrivePolicy=policy(dead.arn))
    assert json.loads(dead.attributes("RedriveAllowPolicy")["RedriveAllowPolicy"]) == allow


def test_a_queue_may_allow_all_sources_again(make):
    dead = make("-dead", RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"}))
    dead.set(RedriveAllowPolicy=json.dumps({"redrivePermission": "allowAll"}))
    make(RedrivePolicy=policy(dead.arn))


@pytest.mark.parametrize(
    "allow",
    [
        {"redrivePermission": "maybe"},
        {"redrivePermission": "byQueue"},
        {"redrivePermission": "byQueue", "sourceQueueArns": []},
        {"redrivePermission": "byQueue", "sourceQueueArns": [f"arn:aws:sqs:us-east-1:0:q{n}" for n in range(11)]},
        {"redrivePermission": "allowAll", "sourceQueueArns": ["arn:aws:sqs:us-east-1:0:q"]},
    ],
    ids=["unknown", "no list", "empty list", "eleven", "list with allowAll"],
)
def test_an_allow_policy_that_makes_no_sense_is_refused(queue, allow):
    with fails("InvalidParameterValue", "RedriveAllowPolicy"):
        queue.set(RedriveAllowPolicy=json.dumps(allow))


@pytest.mark.parametrize("kind", ["standard", "fifo"])
def test_a_queue_may_be_its_own_dead_letter_queue(sqs, make, kind):
    fifo = kind == "fifo"
    queue = make(fifo=fifo, VisibilityTimeout=0)
    own = policy(queue.arn, 2)
    queue.set(RedrivePolicy=own)
    assert json.loads(queue.attributes("RedrivePolicy")["RedrivePolicy"]) == json.loads(own)
    assert sqs.list_dead_letter_source_queues(QueueUrl=queue.url)["queueUrls"] == [queue.url]
    # Creating it again with what it has is no conflict, as with any attribute.
    again = {"RedrivePolicy": own, **({"FifoQueue": "true"} if fifo else {})}
    assert sqs.create_queue(QueueName=queue.url.rsplit("/", 1)[1], Attributes=again)["QueueUrl"] == queue.url
    groups = [{"MessageGroupId": group} for group in "ab"] if fifo else [{}, {}]
    queue.send("poison", **groups[0])
    counts = []
    for _ in range(4):
        message = queue.one(AttributeNames=["All"])
        counts.append(message["Attributes"]["ApproximateReceiveCount"])
        assert "DeadLetterQueueSourceArn" not in message["Attributes"]
    assert counts == ["1", "2", "3", "4"] and queue.counts() == (1, 0, 0)
    # A returned message goes behind what is ready, and can be deleted like any other.
    queue.send("healthy", **groups[1])
    assert queue.bodies(1) + queue.bodies(1) == ["poison", "healthy"]
    queue.delete(queue.one(VisibilityTimeout=30))
    assert queue.counts() == (1, 0, 0)
    # Another policy takes its place.
    queue.set(RedrivePolicy="")
    assert "RedrivePolicy" not in queue.attributes()
    assert sqs.list_dead_letter_source_queues(QueueUrl=queue.url).get("queueUrls", []) == []


def test_a_queue_is_its_own_dead_letter_queue_only_where_it_may_be(sqs, make, name):
    # At its creation it does not exist yet.
    account = make("-other").arn.rsplit(":", 1)[0]
    with fails("InvalidParameterValue", "does not exist"):
        sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy(f"{account}:{name}")})
    queue = make(RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"}))
    with fails("InvalidParameterValue", "RedriveAllowPolicy"):
        queue.set(RedrivePolicy=policy(queue.arn))
    queue.set(RedriveAllowPolicy="")
    queue.set(RedrivePolicy=policy(queue.arn))

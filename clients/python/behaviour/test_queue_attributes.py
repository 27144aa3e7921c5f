"""Attributes, tags and permissions of queues."""

import json
import time

import pytest

from conftest import PROTOCOL
from sqs import GONE, Queue, fails


def test_a_new_queue_has_the_defaults_of_sqs(queue):
    found = queue.attributes()
    assert {name: found[name] for name in found if not name.startswith(("Approximate", "Created", "Last"))} == {
        "QueueArn": f"arn:aws:sqs:us-east-1:000000000000:{queue.name}",
        "VisibilityTimeout": "30",
        "MaximumMessageSize": "1048576",
        "MessageRetentionPeriod": "345600",
        "DelaySeconds": "0",
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "true",
    }


def test_times_are_told_in_seconds(queue):
    found = queue.attributes("CreatedTimestamp", "LastModifiedTimestamp")
    assert abs(int(found["CreatedTimestamp"]) - time.time()) < 30
    assert found["CreatedTimestamp"] == found["LastModifiedTimestamp"]


def test_a_change_is_seen_in_last_modified(queue):
    created = int(queue.attributes("CreatedTimestamp")["CreatedTimestamp"])
    time.sleep(1.1)
    queue.set(DelaySeconds=1)
    found = queue.attributes("CreatedTimestamp", "LastModifiedTimestamp")
    assert int(found["CreatedTimestamp"]) == created < int(found["LastModifiedTimestamp"])


def test_attributes_come_by_name(queue):
    assert queue.attributes("DelaySeconds", "VisibilityTimeout") == {"DelaySeconds": "0", "VisibilityTimeout": "30"}


def test_no_names_no_attributes(sqs, queue):
    assert "Attributes" not in sqs.get_queue_attributes(QueueUrl=queue.url)


def test_an_unknown_attribute_cannot_be_asked_for(queue):
    with fails("InvalidAttributeName", "Colour", 400):
        queue.attributes("Colour")


def test_an_unknown_attribute_cannot_be_set(queue):
    with fails("InvalidAttributeName", "Colour"):
        queue.set(Colour="red")


def test_a_read_only_attribute_cannot_be_set(queue):
    with fails("InvalidAttributeName"):
        queue.set(QueueArn="arn:aws:sqs:us-east-1:000000000000:other")


BOUNDS = [
    ("VisibilityTimeout", 0, 43200),
    ("DelaySeconds", 0, 900),
    ("MessageRetentionPeriod", 60, 1209600),
    ("ReceiveMessageWaitTimeSeconds", 0, 20),
    ("MaximumMessageSize", 1024, 1048576),
]


@pytest.mark.parametrize("attribute, least, most", BOUNDS)
def test_both_bounds_of_an_attribute_are_allowed(queue, attribute, least, most):
    for value in (least, most):
        queue.set(**{attribute: value})
        assert queue.attributes(attribute) == {attribute: str(value)}


@pytest.mark.parametrize("attribute, least, most", BOUNDS)
def test_a_value_beyond_the_bounds_is_refused(queue, attribute, least, most):
    before = queue.attributes(attribute)
    for value in (least - 1, most + 1, "abc", "1.5", ""):
        with fails("InvalidAttributeValue", attribute, 400):
            queue.set(**{attribute: value})
    assert queue.attributes(attribute) == before


def test_attributes_are_set_all_or_none(queue):
    with fails("InvalidAttributeValue"):
        queue.set(DelaySeconds=5, VisibilityTimeout=99999)
    assert queue.attributes("DelaySeconds", "VisibilityTimeout") == {"DelaySeconds": "0", "VisibilityTimeout": "30"}


def test_attributes_of_no_queue(sqs, server, name):
    with fails(GONE):
        Queue(sqs, f"{server.endpoint}/000000000000/{name}").set(DelaySeconds=1)


def test_a_fifo_queue_shows_its_own_attributes(make):
    found = make(fifo=True, ContentBasedDeduplication="true").attributes()
    assert found["FifoQueue"] == "true"
    assert found["ContentBasedDeduplication"] == "true"
    assert found["DeduplicationScope"] == "queue"
    assert found["FifoThroughputLimit"] == "perQueue"


def test_a_standard_queue_shows_no_fifo_attributes(queue):
    found = queue.attributes("FifoQueue", "ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit")
    assert found == {}


def test_a_queue_stays_of_its_kind(fifo):
    with fails("InvalidAttributeValue"):
        fifo.set(FifoQueue="false")


def test_content_based_deduplication_is_for_fifo_queues(queue):
    with fails("InvalidAttributeName"):
        queue.set(ContentBasedDeduplication="true")


@pytest.mark.parametrize(
    "attribute, value", [("DeduplicationScope", "messageGroup"), ("FifoThroughputLimit", "perQueue")]
)
def test_high_throughput_is_for_fifo_queues(queue, attribute, value):
    with fails("InvalidAttributeName"):
        queue.set(**{attribute: value})


def test_throughput_per_group_needs_deduplication_per_group(fifo):
    with fails("InvalidAttributeValue", "perMessageGroupId"):
        fifo.set(FifoThroughputLimit="perMessageGroupId")
    fifo.set(FifoThroughputLimit="perMessageGroupId", DeduplicationScope="messageGroup")
    assert fifo.attributes("FifoThroughputLimit") == {"FifoThroughputLimit": "perMessageGroupId"}


def test_encryption_settings_are_kept(queue):
    queue.set(KmsMasterKeyId="alias/aws/sqs", KmsDataKeyReusePeriodSeconds=300)
    found = queue.attributes("KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds")
    assert found == {"KmsMasterKeyId": "alias/aws/sqs", "KmsDataKeyReusePeriodSeconds": "300"}


def test_a_policy_is_kept_as_it_was_given(queue):
    policy = json.dumps({"Version": "2012-10-17", "Statement": [{"Sid": "ä", "Effect": "Deny", "Action": "*"}]})
    queue.set(Policy=policy)
    assert queue.attributes("Policy") == {"Policy": policy}
    queue.set(Policy="")
    assert queue.attributes("Policy") == {}


def test_a_policy_that_is_not_json_is_refused(queue):
    with fails("InvalidAttributeValue"):
        queue.set(Policy="not json")


def test_tags_are_added_overwritten_and_removed(sqs, queue):
    sqs.tag_queue(QueueUrl=queue.url, Tags={"team": "red", "stage": "test"})
    sqs.tag_queue(QueueUrl=queue.url, Tags={"team": "blue", "größe": "ü <&> \"1\""})
    tags = {"team": "blue", "stage": "test", "größe": "ü <&> \"1\""}
    assert sqs.list_queue_tags(QueueUrl=queue.url)["Tags"] == tags
    sqs.untag_queue(QueueUrl=queue.url, TagKeys=["team", "no such key"])
    del tags["team"]
    assert sqs.list_queue_tags(QueueUrl=queue.url)["Tags"] == tags


def test_tags_can_be_given_at_creation(sqs, name):
    url = sqs.create_queue(QueueName=name, tags={"team": "red"})["QueueUrl"]
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "red"}


def test_an_untagged_queue_lists_no_tags(sqs, queue):
    assert "Tags" not in sqs.list_queue_tags(QueueUrl=queue.url)


def test_a_tag_value_may_be_empty(sqs, queue):
    sqs.tag_queue(QueueUrl=queue.url, Tags={"flag": ""})
    assert sqs.list_queue_tags(QueueUrl=queue.url)["Tags"] == {"flag": ""}


def test_a_queue_has_at_most_50_tags(sqs, queue):
    sqs.tag_queue(QueueUrl=queue.url, Tags={f"k{n}": "v" for n in range(50)})
    with fails("InvalidParameterValue", "Too many tags"):
        sqs.tag_queue(QueueUrl=queue.url, Tags={"one more": "v"})
    assert len(sqs.list_queue_tags(QueueUrl=queue.url)["Tags"]) == 50


@pytest.mark.parametrize("tags", [{"k" * 129: "v"}, {"k": "v" * 257}])
def test_a_tag_that_is_too_long_is_refused(sqs, queue, tags):
    with fails("InvalidParameterValue"):
        sqs.tag_queue(QueueUrl=queue.url, Tags=tags)


def test_tags_of_no_queue(sqs, server, name):
    with fails(GONE):
        sqs.list_queue_tags(QueueUrl=f"{server.endpoint}/000000000000/{name}")


def permit(sqs, queue, label, accounts=("123456789012",), actions=("SendMessage",)):
    sqs.add_permission(QueueUrl=queue.url, Label=label, AWSAccountIds=list(accounts), Actions=list(actions))


def test_permissions_are_written_into_the_policy(sqs, queue):
    permit(sqs, queue, "writers")
    permit(sqs, queue, "all", ["123456789012", "210987654321"], ["*"])
    policy = json.loads(queue.attributes("Policy")["Policy"])
    first, second = policy["Statement"]
    assert first["Sid"] == "writers" and first["Action"] == "SQS:SendMessage" and first["Resource"] == queue.arn
    assert first["Principal"] == {"AWS": "arn:aws:iam::123456789012:root"}
    assert len(second["Principal"]["AWS"]) == 2


def test_removing_the_last_permission_removes_the_policy(sqs, queue):
    permit(sqs, queue, "writers")
    sqs.remove_permission(QueueUrl=queue.url, Label="writers")
    assert queue.attributes("Policy") == {}


def test_a_label_is_used_once(sqs, queue):
    permit(sqs, queue, "writers")
    with fails("InvalidParameterValue", "Already exists"):
        permit(sqs, queue, "writers")


def test_a_label_that_is_not_there_cannot_be_removed(sqs, queue):
    with fails("InvalidParameterValue", "label"):
        sqs.remove_permission(QueueUrl=queue.url, Label="nobody")


@pytest.mark.parametrize(
    "wrong",
    [{"label": "no spaces"}, {"label": "x" * 81}, {"accounts": ["12345"]}, {"actions": ["DropTable"]}],
    ids=["label", "long label", "account", "action"],
)
def test_a_permission_that_makes_no_sense_is_refused(sqs, queue, wrong):
    with fails("InvalidParameterValue"):
        permit(sqs, queue, **{"label": "ok", **wrong})


def test_a_statement_has_at_most_seven_actions(sqs, queue):
    actions = ["ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "GetQueueUrl"]
    actions += ["ListDeadLetterSourceQueues", "PurgeQueue", "ReceiveMessage"]
    permit(sqs, queue, "seven", actions=actions)
    with fails("OverLimit", "8 Actions were found, maximum allowed is 7.", 403):
        permit(sqs, queue, "eight", actions=[*actions, "SendMessage"])


def test_a_policy_has_at_most_twenty_statements(sqs, queue):
    for n in range(20):
        permit(sqs, queue, f"label-{n}")
    with fails("OverLimit", status=403):
        permit(sqs, queue, "one-more")


@pytest.mark.parametrize("action", ["RemovePermission", "CreateQueue", "SetQueueAttributes", "TagQueue", "DeleteQueue"])
def test_what_only_the_owner_may_do_cannot_be_permitted(sqs, queue, action):
    reason = f"Value SQS:{action} for parameter ActionName is invalid. Reason: Only the queue owner"
    with fails("InvalidParameterValue", reason, 400):
        permit(sqs, queue, "x", actions=["SendMessage", action])
    assert queue.attributes("Policy") == {}


def test_a_permission_needs_accounts_and_actions(sqs, queue):
    with fails("MissingParameter", "Actions"):
        permit(sqs, queue, "x", actions=[])
    # The Query protocol has no empty list.
    code = "InvalidParameterValue" if PROTOCOL == "json" else "MissingParameter"
    with fails(code):
        permit(sqs, queue, "x", accounts=[])


def test_the_tags_of_a_new_queue_have_the_same_limits(sqs, name):
    for tags in [{f"k{n}": "v" for n in range(51)}, {"": "v"}, {"k" * 129: "v"}, {"k": "v" * 257}]:
        with fails("InvalidParameterValue"):
            sqs.create_queue(QueueName=name, tags=tags)
    with fails(GONE):
        sqs.get_queue_url(QueueName=name)


def test_a_tag_to_remove_needs_a_name(sqs, queue):
    with fails("InvalidParameterValue", "Tag keys must be between 1 and 128 characters in length."):
        sqs.untag_queue(QueueUrl=queue.url, TagKeys=[""])

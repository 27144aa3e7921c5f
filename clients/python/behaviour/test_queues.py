"""Queues: names, creation, URLs, listing, deletion, purge."""

import boto3
import pytest

from sqs import GONE, Queue, eventually, fails


def test_create_answers_a_url_under_the_host_that_the_client_used(server, sqs, name):
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    assert url == f"{server.endpoint}/000000000000/{name}"


def test_create_again_answers_the_same_url(sqs, queue):
    assert sqs.create_queue(QueueName=queue.name)["QueueUrl"] == queue.url


def test_create_again_with_equal_attributes_is_idempotent(sqs, make):
    queue = make(VisibilityTimeout=7, DelaySeconds=3)
    again = Queue.create(sqs, queue.name, VisibilityTimeout=7, DelaySeconds=3)
    assert again.url == queue.url


def test_create_again_with_some_of_the_attributes_is_idempotent(sqs, make):
    queue = make(VisibilityTimeout=7, DelaySeconds=3)
    assert Queue.create(sqs, queue.name, VisibilityTimeout=7).url == queue.url


def test_create_again_with_another_attribute_is_refused(sqs, make):
    queue = make(VisibilityTimeout=7)
    with fails("QueueAlreadyExists", "VisibilityTimeout", 400):
        Queue.create(sqs, queue.name, VisibilityTimeout=8)
    assert queue.attributes("VisibilityTimeout") == {"VisibilityTimeout": "7"}


def test_create_with_an_unknown_attribute_is_refused(sqs, name):
    with fails("InvalidAttributeName"):
        Queue.create(sqs, name, Colour="red")
    with fails(GONE):
        sqs.get_queue_url(QueueName=name)


def test_a_name_may_have_80_characters(sqs, name):
    long = name.ljust(80, "x")
    assert sqs.create_queue(QueueName=long)["QueueUrl"].endswith(long)


@pytest.mark.parametrize("bad", ["x" * 81, "with space", "dot.ted", "slash/ed", "käse", "a!", "only.fifo"])
def test_a_name_that_sqs_does_not_allow_is_refused(sqs, bad):
    with fails("InvalidParameterValue", status=400):
        sqs.create_queue(QueueName=bad)


def test_a_queue_needs_a_name(sqs):
    with fails("InvalidParameterValue", "1 to 80 in length"):
        sqs.create_queue(QueueName="")


def test_a_fifo_queue_needs_the_suffix(sqs, name):
    with fails("InvalidParameterValue", ".fifo"):
        sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"})


def test_get_queue_url_finds_a_queue_by_name(sqs, queue):
    assert sqs.get_queue_url(QueueName=queue.name)["QueueUrl"] == queue.url


def test_get_queue_url_takes_any_owner(sqs, queue):
    assert sqs.get_queue_url(QueueName=queue.name, QueueOwnerAWSAccountId="123456789012")["QueueUrl"] == queue.url


def test_get_queue_url_of_no_queue(sqs, name):
    with fails(GONE, "does not exist", 400):
        sqs.get_queue_url(QueueName=name)


def test_a_queue_url_with_a_foreign_host_and_account_is_accepted(sqs, queue):
    foreign = f"https://sqs.eu-central-1.amazonaws.com/123456789012/{queue.name}"
    message_id = sqs.send_message(QueueUrl=foreign, MessageBody="x")["MessageId"]
    assert queue.one()["MessageId"] == message_id


def test_queue_names_are_case_sensitive(sqs, queue):
    with fails(GONE):
        sqs.get_queue_url(QueueName=queue.name.upper())


def test_a_deleted_queue_is_gone(sqs, queue):
    sqs.delete_queue(QueueUrl=queue.url)
    with fails(GONE):
        queue.send()
    with fails(GONE):
        queue.receive()
    with fails(GONE):
        queue.attributes()


def test_deleting_no_queue_is_told(sqs, queue):
    sqs.delete_queue(QueueUrl=queue.url)
    with fails(GONE):
        sqs.delete_queue(QueueUrl=queue.url)


def test_a_queue_created_again_starts_empty(sqs, queue):
    queue.send("old")
    sqs.delete_queue(QueueUrl=queue.url)
    again = Queue.create(sqs, queue.name)
    assert again.receive() == [] and again.counts() == (0, 0, 0)


def test_a_receipt_of_a_deleted_queue_deletes_nothing_in_its_successor(sqs, queue):
    queue.send("old")
    old = queue.one()
    sqs.delete_queue(QueueUrl=queue.url)
    again = Queue.create(sqs, queue.name)
    again.send("new")
    try:
        again.delete(old)
    except sqs.exceptions.ClientError:
        pass
    assert again.one()["Body"] == "new"


def test_list_finds_queues_by_prefix(make, sqs, name):
    urls = [make(suffix).url for suffix in ("-a", "-b", "-c")]
    assert sqs.list_queues(QueueNamePrefix=name)["QueueUrls"] == urls
    assert sqs.list_queues(QueueNamePrefix=f"{name}-b")["QueueUrls"] == [urls[1]]


def test_list_of_nothing_has_no_urls(sqs, name):
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix=name)


def test_list_comes_in_pages_that_cover_everything_once(make, sqs, name):
    urls = [make(f"-{n}").url for n in range(5)]
    pages = sqs.get_paginator("list_queues").paginate(QueueNamePrefix=name, PaginationConfig={"PageSize": 2})
    pages = [page["QueueUrls"] for page in pages]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert sum(pages, []) == urls


def test_list_without_max_results_gives_no_token(make, sqs, name):
    for n in range(3):
        make(f"-{n}")
    assert "NextToken" not in sqs.list_queues(QueueNamePrefix=name)


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_list_refuses_a_page_size_out_of_bounds(sqs, count):
    with fails("InvalidParameterValue"):
        sqs.list_queues(MaxResults=count)


def test_list_refuses_a_token_that_it_did_not_make(sqs):
    with fails("InvalidParameterValue"):
        sqs.list_queues(MaxResults=1, NextToken="!!!")


def test_purge_removes_visible_in_flight_and_delayed_messages(sqs, queue):
    queue.send("visible")
    queue.send("later", DelaySeconds=900)
    queue.send("in flight")
    assert len(queue.receive(1)) == 1
    assert queue.counts() == (1, 1, 1)
    sqs.purge_queue(QueueUrl=queue.url)
    assert queue.counts() == (0, 0, 0)
    assert queue.receive() == []


def test_purge_again_at_once_is_allowed_by_default(sqs, queue):
    sqs.purge_queue(QueueUrl=queue.url)
    sqs.purge_queue(QueueUrl=queue.url)


def test_purge_leaves_other_queues_alone(sqs, make):
    purged, kept = make("-a"), make("-b")
    kept.send("kept")
    sqs.purge_queue(QueueUrl=purged.url)
    assert kept.bodies() == ["kept"]


def test_purge_of_no_queue(sqs, server, name):
    with fails(GONE):
        sqs.purge_queue(QueueUrl=f"{server.endpoint}/000000000000/{name}")


def test_a_purged_queue_takes_messages_again(sqs, queue):
    queue.send("before")
    sqs.purge_queue(QueueUrl=queue.url)
    queue.send("after")
    assert queue.bodies() == ["after"]


def test_counters_follow_a_message_through_its_life(queue):
    assert queue.counts() == (0, 0, 0)
    queue.send(DelaySeconds=1)
    assert queue.counts() == (0, 0, 1)
    message = queue.one(wait=5)
    assert queue.counts() == (0, 1, 0)
    queue.change(message, 0)
    assert queue.counts() == (1, 0, 0)
    queue.delete(queue.one())
    assert queue.counts() == (0, 0, 0)


def test_counters_see_a_lease_run_out(make):
    queue = make(VisibilityTimeout=3)
    queue.send()
    queue.one()
    assert queue.counts() == (0, 1, 0)
    eventually(lambda: queue.counts() == (1, 0, 0))


def test_one_name_space_whatever_region_signs(server, queue):
    other = boto3.session.Session().client(
        "sqs", endpoint_url=server.endpoint, region_name="ap-south-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    assert other.get_queue_url(QueueName=queue.name)["QueueUrl"] == queue.url

"""Receipt handles: DeleteMessage and ChangeMessageVisibility, single and in batches."""

import time

import pytest

from sqs import GONE, Queue, eventually, fails

NOT_IN_FLIGHT = "AWS.SimpleQueueService.MessageNotInflight"


def expired(queue):
    """A message whose lease ran out and that nobody has received since."""
    message = queue.one(VisibilityTimeout=1)
    eventually(lambda: queue.counts() == (1, 0, 0))
    return message


def test_a_deleted_message_does_not_return(queue):
    queue.send()
    queue.delete(queue.one(VisibilityTimeout=1))
    time.sleep(1.3)
    assert queue.receive() == [] and queue.counts() == (0, 0, 0)


def test_each_receive_gives_a_new_handle(queue):
    queue.send()
    handles = {queue.one(VisibilityTimeout=0)["ReceiptHandle"] for _ in range(3)}
    assert len(handles) == 3


def test_deleting_twice_is_forgiven(queue):
    queue.send()
    message = queue.one()
    queue.delete(message)
    queue.delete(message)


def test_deleting_twice_is_forgiven_on_fifo(fifo):
    fifo.send()
    message = fifo.one()
    fifo.delete(message)
    fifo.delete(message)


def test_a_late_delete_counts_while_nobody_else_holds_the_message(queue):
    queue.send()
    queue.delete(expired(queue))
    assert queue.counts() == (0, 0, 0)


def test_a_stale_handle_on_standard_answers_success_and_deletes_nothing(queue):
    queue.send()
    stale = queue.one(VisibilityTimeout=0)
    held = queue.one()
    queue.delete(stale)
    assert queue.counts() == (0, 1, 0)
    queue.change(held, 0)
    assert queue.one()["MessageId"] == held["MessageId"]


def test_an_expired_handle_on_fifo_is_refused(fifo):
    fifo.send()
    message = expired(fifo)
    with fails("InvalidParameterValue", "The receipt handle has expired", 400):
        fifo.delete(message)
    assert fifo.one()["MessageId"] == message["MessageId"]


def test_a_superseded_handle_on_fifo_is_refused(fifo):
    fifo.send()
    stale = expired(fifo)
    fifo.one()
    with fails("InvalidParameterValue", "expired"):
        fifo.delete(stale)


@pytest.mark.parametrize("garbage", ["garbage", "AQEB" + "x" * 200, "ü", "a b", "x" * 5000])
def test_garbage_is_no_receipt_handle(queue, garbage):
    with fails("ReceiptHandleIsInvalid"):
        queue.delete(garbage)
    with fails("ReceiptHandleIsInvalid"):
        queue.change(garbage, 1)


def test_a_receipt_with_a_changed_letter_is_garbage(queue):
    queue.send()
    handle = queue.one()["ReceiptHandle"]
    middle = len(handle) // 2
    other = "A" if handle[middle] != "A" else "B"
    with fails("ReceiptHandleIsInvalid"):
        queue.delete(handle[:middle] + other + handle[middle + 1 :])
    assert queue.counts() == (0, 1, 0)


def test_a_handle_of_another_queue_is_refused(make):
    mine, other = make("-a"), make("-b")
    mine.send()
    message = mine.one()
    with fails("ReceiptHandleIsInvalid"):
        other.delete(message)
    assert mine.counts() == (0, 1, 0)


def test_a_handle_is_needed(queue):
    with fails("MissingParameter", "ReceiptHandle"):
        queue.delete("")


def test_delete_in_no_queue(sqs, server, name):
    with fails(GONE):
        Queue(sqs, f"{server.endpoint}/000000000000/{name}").delete("x")


def test_visibility_changed_to_zero_returns_the_message_at_once(queue):
    queue.send()
    queue.change(queue.one(), 0)
    assert len(queue.receive()) == 1


def test_visibility_changed_to_more_hides_for_longer(queue):
    queue.send()
    queue.change(queue.one(VisibilityTimeout=1), 600)
    time.sleep(1.3)
    assert queue.receive() == []


def test_a_visibility_change_counts_from_now(queue):
    queue.send()
    queue.change(queue.one(VisibilityTimeout=600), 1)
    start = time.monotonic()
    queue.one(wait=20)
    assert time.monotonic() - start < 15


def test_a_handle_stays_good_after_a_visibility_change(queue):
    queue.send()
    message = queue.one()
    queue.change(message, 100)
    queue.change(message, 200)
    queue.delete(message)
    assert queue.counts() == (0, 0, 0)


def test_a_superseded_handle_cannot_change_visibility(queue):
    queue.send()
    stale = queue.one(VisibilityTimeout=0)
    queue.one()
    with fails(NOT_IN_FLIGHT):
        queue.change(stale, 0)
    assert queue.receive() == []


def test_the_visibility_of_a_deleted_message_cannot_be_changed(queue):
    queue.send()
    message = queue.one()
    queue.delete(message)
    with fails("InvalidParameterValue", "does not exist"):
        queue.change(message, 10)


@pytest.mark.parametrize("seconds", [-1, 43201])
def test_a_changed_visibility_out_of_bounds_is_refused(queue, seconds):
    queue.send()
    message = queue.one()
    with fails("InvalidParameterValue", "VisibilityTimeout"):
        queue.change(message, seconds)


def test_visibility_is_at_most_12_hours_since_the_receive(queue):
    queue.send()
    message = queue.one()
    time.sleep(1.1)
    with fails("InvalidParameterValue", "43200 seconds"):
        queue.change(message, 43200)
    queue.change(message, 43100)


def test_a_batch_of_ten_is_deleted(sqs, queue):
    queue.send_batch(*"abcdefghij")
    entries = [{"Id": f"e{n}", "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(queue.receive(10))]
    answer = sqs.delete_message_batch(QueueUrl=queue.url, Entries=entries)
    assert [entry["Id"] for entry in answer["Successful"]] == [f"e{n}" for n in range(10)]
    assert "Failed" not in answer and queue.counts() == (0, 0, 0)


def test_a_bad_handle_in_a_batch_of_deletes_fails_alone(sqs, queue):
    queue.send()
    entries = [{"Id": "good", "ReceiptHandle": queue.one()["ReceiptHandle"]}, {"Id": "bad", "ReceiptHandle": "x"}]
    answer = sqs.delete_message_batch(QueueUrl=queue.url, Entries=entries)
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    failed = answer["Failed"][0]
    assert (failed["Id"], failed["Code"], failed["SenderFault"]) == ("bad", "ReceiptHandleIsInvalid", True)
    assert queue.counts() == (0, 0, 0)


def test_a_batch_of_visibility_changes_gives_each_its_own(sqs, queue):
    queue.send_batch("a", "b")
    first, second = queue.receive(10)
    entries = [
        {"Id": "0", "ReceiptHandle": first["ReceiptHandle"], "VisibilityTimeout": 0},
        {"Id": "1", "ReceiptHandle": second["ReceiptHandle"], "VisibilityTimeout": 600},
    ]
    assert len(sqs.change_message_visibility_batch(QueueUrl=queue.url, Entries=entries)["Successful"]) == 2
    assert queue.bodies() == [first["Body"]]


def test_a_bad_entry_in_a_batch_of_visibility_changes_fails_alone(sqs, queue):
    queue.send_batch("a", "b")
    first, second = queue.receive(10)
    entries = [
        {"Id": "good", "ReceiptHandle": first["ReceiptHandle"], "VisibilityTimeout": 0},
        {"Id": "long", "ReceiptHandle": second["ReceiptHandle"], "VisibilityTimeout": 43201},
        {"Id": "bad", "ReceiptHandle": "x", "VisibilityTimeout": 0},
    ]
    answer = sqs.change_message_visibility_batch(QueueUrl=queue.url, Entries=entries)
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    failed = {entry["Id"]: entry["Code"] for entry in answer["Failed"]}
    assert failed == {"long": "InvalidParameterValue", "bad": "ReceiptHandleIsInvalid"}


@pytest.mark.parametrize("action", ["delete_message_batch", "change_message_visibility_batch"])
def test_the_limits_of_batches_hold_for_settling_too(sqs, queue, action):
    def call(*ids):
        entries = [{"Id": i, "ReceiptHandle": "x", "VisibilityTimeout": 0} for i in ids]
        if action == "delete_message_batch":
            entries = [{"Id": e["Id"], "ReceiptHandle": "x"} for e in entries]
        getattr(sqs, action)(QueueUrl=queue.url, Entries=entries)

    with fails("AWS.SimpleQueueService.EmptyBatchRequest"):
        call()
    with fails("AWS.SimpleQueueService.TooManyEntriesInBatchRequest"):
        call(*"abcdefghijk")
    with fails("AWS.SimpleQueueService.BatchEntryIdsNotDistinct"):
        call("a", "a")
    with fails("AWS.SimpleQueueService.InvalidBatchEntryId"):
        call("a b")

"""Fair queues: on a standard queue, a MessageGroupId names a tenant."""

from sqs import fails


def test_a_group_on_a_standard_queue_comes_back_with_the_message(queue):
    queue.send(MessageGroupId="tenant-a")
    assert queue.one(AttributeNames=["All"])["Attributes"]["MessageGroupId"] == "tenant-a"


def test_a_tenant_is_not_blocked_by_its_messages_in_flight(queue):
    for n in range(3):
        queue.send(str(n), MessageGroupId="tenant-a")
    assert queue.one()["Body"] == "0" and queue.one()["Body"] == "1" and queue.one()["Body"] == "2"


def test_a_quiet_tenant_overtakes_a_noisy_one(queue):
    for _ in range(6):
        queue.send_batch(*[{"MessageBody": "noisy", "MessageGroupId": "noisy"}] * 10)
    for _ in range(4):
        assert len(queue.receive(10)) == 10
    queue.send("quiet", MessageGroupId="quiet")
    assert queue.bodies(1) == ["quiet"]


def test_a_message_without_a_group_is_its_own_tenant(queue):
    for _ in range(6):
        queue.send_batch(*[{"MessageBody": "noisy", "MessageGroupId": "noisy"}] * 10)
    for _ in range(4):
        assert len(queue.receive(10)) == 10
    queue.send("alone")
    assert queue.bodies(1) == ["alone"]


def test_a_noisy_tenant_still_gets_its_turn(queue):
    for _ in range(5):
        queue.send_batch(*[{"MessageBody": "noisy", "MessageGroupId": "noisy"}] * 10)
    assert len(queue.drain(50, delete=False)) == 50


def test_a_group_that_sqs_does_not_allow_is_refused(queue):
    with fails("InvalidParameterValue", "MessageGroupId"):
        queue.send(MessageGroupId="x" * 129)

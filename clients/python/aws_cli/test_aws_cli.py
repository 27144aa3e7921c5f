"""aws-cli, as people type it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AWS = Path(sys.executable).parent / "aws"


@pytest.fixture
def aws(server, tmp_path):
    env = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }

    def aws(*args, fails=None):
        command = [sys.executable, AWS, "--endpoint-url", server.endpoint, "sqs", *args]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        if fails:
            assert ended.returncode != 0 and fails in ended.stderr, ended
            return None
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout) if ended.stdout.strip() else None

    return aws


def test_create_send_receive_delete(aws, name):
    url = aws("create-queue", "--queue-name", name)["QueueUrl"]
    sent = aws("send-message", "--queue-url", url, "--message-body", "hello größe")
    message = aws("receive-message", "--queue-url", url, "--wait-time-seconds", "5")["Messages"][0]
    assert (message["MessageId"], message["Body"]) == (sent["MessageId"], "hello größe")
    aws("delete-message", "--queue-url", url, "--receipt-handle", message["ReceiptHandle"])
    found = aws("get-queue-attributes", "--queue-url", url, "--attribute-names", "All")["Attributes"]
    assert found["ApproximateNumberOfMessages"] == found["ApproximateNumberOfMessagesNotVisible"] == "0"
    aws("delete-queue", "--queue-url", url)


def test_a_fifo_queue_with_dead_letters(aws, name):
    dead = aws("create-queue", "--queue-name", f"{name}-dead.fifo", "--attributes", "FifoQueue=true")["QueueUrl"]
    arn = aws("get-queue-attributes", "--queue-url", dead, "--attribute-names", "QueueArn")["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "3"})
    attributes = json.dumps({"FifoQueue": "true", "ContentBasedDeduplication": "true", "RedrivePolicy": policy})
    url = aws("create-queue", "--queue-name", f"{name}.fifo", "--attributes", attributes)["QueueUrl"]
    aws("send-message", "--queue-url", url, "--message-body", "x", "--message-group-id", "g")
    assert aws("list-dead-letter-source-queues", "--queue-url", dead)["queueUrls"] == [url]
    assert aws("list-queues", "--queue-name-prefix", name)["QueueUrls"] == [dead, url]


def test_an_error_is_told_with_its_code(aws, name):
    aws("get-queue-url", "--queue-name", name, fails="(AWS.SimpleQueueService.NonExistentQueue)")

"""A queue as tests want to talk about it, over a boto3 client."""

import struct
import time
from contextlib import contextmanager
from hashlib import md5

from botocore.exceptions import ClientError

GONE = "AWS.SimpleQueueService.NonExistentQueue"
PATIENCE_S = 15


class Queue:
    def __init__(self, client, url, fifo=False):
        self.client = client
        self.url = url
        self.fifo = fifo
        self.sent = 0

    @classmethod
    def create(cls, client, name, fifo=False, tags=None, **attributes):
        if fifo:
            attributes["FifoQueue"] = "true"
            name += ".fifo"
        more = {"tags": tags} if tags else {}
        attributes = {key: str(value) for key, value in attributes.items()}
        url = client.create_queue(QueueName=name, Attributes=attributes, **more)["QueueUrl"]
        return cls(client, url, fifo)

    @property
    def name(self):
        return self.url.rsplit("/", 1)[1]

    @property
    def arn(self):
        return self.attributes("QueueArn")["QueueArn"]

    def send(self, body="hello", **more):
        if self.fifo:
            self.sent += 1
            more = {"MessageGroupId": "g", "MessageDeduplicationId": f"{self.sent}", **more}
            more = {key: value for key, value in more.items() if value is not None}
        return self.client.send_message(QueueUrl=self.url, MessageBody=body, **more)

    def send_batch(self, *entries):
        entries = [{"Id": str(n), **(e if isinstance(e, dict) else {"MessageBody": e})} for n, e in enumerate(entries)]
        return self.client.send_message_batch(QueueUrl=self.url, Entries=entries)

    def receive(self, most=1, wait=0, **more):
        answer = self.client.receive_message(
            QueueUrl=self.url, MaxNumberOfMessages=most, WaitTimeSeconds=wait, **more
        )
        return answer.get("Messages", [])

    def one(self, wait=10, **more):
        """The next message; it must come."""
        messages = self.receive(1, wait, **more)
        assert len(messages) == 1, "no message came"
        return messages[0]

    def bodies(self, most=10, **more):
        return [message["Body"] for message in self.receive(most, **more)]

    def drain(self, count, within=PATIENCE_S, delete=True, **more):
        """Receives (and deletes) until `count` messages came or time is up."""
        messages, end = [], time.monotonic() + within
        while len(messages) < count and time.monotonic() < end:
            for message in self.receive(10, 1, **more):
                messages.append(message)
                if delete:
                    self.delete(message)
        return messages

    def delete(self, message):
        return self.client.delete_message(QueueUrl=self.url, ReceiptHandle=handle(message))

    def change(self, message, seconds):
        return self.client.change_message_visibility(
            QueueUrl=self.url, ReceiptHandle=handle(message), VisibilityTimeout=seconds
        )

    def attributes(self, *names):
        answer = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=list(names) or ["All"])
        return answer.get("Attributes", {})

    def set(self, **attributes):
        attributes = {key: str(value) for key, value in attributes.items()}
        return self.client.set_queue_attributes(QueueUrl=self.url, Attributes=attributes)

    def counts(self):
        """Visible, in flight, delayed."""
        names = ["", "NotVisible", "Delayed"]
        names = [f"ApproximateNumberOfMessages{name}" for name in names]
        found = self.attributes(*names)
        return tuple(int(found[name]) for name in names)


def handle(message):
    return message if isinstance(message, str) else message["ReceiptHandle"]


@contextmanager
def fails(code, text=None, status=None):
    """The block must end in this error."""
    try:
        yield
    except ClientError as error:
        told = error.response["Error"]
        assert told["Code"] == code, told
        assert text is None or text in told["Message"], told
        assert status is None or error.response["ResponseMetadata"]["HTTPStatusCode"] == status, error.response
        return
    raise AssertionError(f"{code} was expected, and nothing failed")


def eventually(check, within=60):
    """Asks until the answer is truthy; returns it."""
    end = time.monotonic() + within
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {within} s; the last answer was {answer!r}"
        time.sleep(0.05)


def md5_of_text(text):
    return md5(text.encode()).hexdigest()


def md5_of_attributes(attributes):
    """SQS's digest of message attributes: names in order, lengths in four bytes, 1 for text and 2 for bytes."""
    digest = md5()

    def add(piece):
        digest.update(struct.pack(">I", len(piece)) + piece)

    for name in sorted(attributes):
        attribute = attributes[name]
        add(name.encode())
        add(attribute["DataType"].encode())
        if "BinaryValue" in attribute:
            digest.update(b"\x02")
            add(attribute["BinaryValue"])
        else:
            digest.update(b"\x01")
            add(attribute["StringValue"].encode())
    return digest.hexdigest()

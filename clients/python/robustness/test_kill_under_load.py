"""kill -9 under load from several clients: what was answered holds."""

import http.client
import threading
import time

from load import Connection, create

BROKEN = (OSError, http.client.HTTPException)
PRODUCERS, CONSUMERS, KILLS, BETWEEN_KILLS_S = 4, 3, 4, 1.0


class Load:
    def __init__(self, server, url):
        self.server, self.url = server, url
        self.lock = threading.Lock()
        self.sending, self.over = True, False
        self.accepted, self.received, self.deleted = set(), set(), set()
        self.problems = []

    def produce(self, producer):
        connection, number = Connection(self.server), 0
        while self.sending:
            bodies = [f"{producer}-{number + n}" for n in range(1 if number % 3 else 5)]
            number += len(bodies)
            try:
                if len(bodies) == 1:
                    connection.call("SendMessage", QueueUrl=self.url, MessageBody=bodies[0])
                    accepted = bodies
                else:
                    entries = [{"Id": str(n), "MessageBody": body} for n, body in enumerate(bodies)]
                    answer = connection.call("SendMessageBatch", QueueUrl=self.url, Entries=entries)
                    accepted = [bodies[int(entry["Id"])] for entry in answer["Successful"]]
                with self.lock:
                    self.accepted.update(accepted)
            except BROKEN:
                time.sleep(0.02)
        connection.close()

    def consume(self):
        connection = Connection(self.server)
        while not self.over:
            try:
                # Deleted before this receive was asked for: must not come back by it.
                with self.lock:
                    deleted = set(self.deleted)
                answer = connection.call("ReceiveMessage", QueueUrl=self.url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
                messages = answer.get("Messages", [])
                with self.lock:
                    self.received.update(message["Body"] for message in messages)
                    self.problems += [m["Body"] for m in messages if m["Body"] in deleted]
                for message in messages:
                    connection.call("DeleteMessage", QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])
                    with self.lock:
                        self.deleted.add(message["Body"])
            except BROKEN:
                time.sleep(0.02)
        connection.close()


def test_every_answered_send_is_received_and_no_answered_delete_undone(own_server):
    url = create(own_server, "load", VisibilityTimeout=3)
    load = Load(own_server, url)
    producers = [threading.Thread(target=load.produce, args=(n,)) for n in range(PRODUCERS)]
    consumers = [threading.Thread(target=load.consume) for _ in range(CONSUMERS)]
    for thread in producers + consumers:
        thread.start()
    try:
        for _ in range(KILLS):
            time.sleep(BETWEEN_KILLS_S)
            own_server.kill()
            own_server.start()
        time.sleep(BETWEEN_KILLS_S)
        load.sending = False
        for thread in producers:
            thread.join(30)
        own_server.kill()
        own_server.start()
        end = time.monotonic() + 60
        while not load.accepted <= load.received and time.monotonic() < end:
            time.sleep(0.1)
        # Longer than a lease: whatever was deleted and is not would come by now.
        time.sleep(4)
    finally:
        load.sending, load.over = False, True
        for thread in producers + consumers:
            thread.join(30)
    print(f"{len(load.accepted)} accepted, {len(load.received)} received, {len(load.deleted)} deleted, {KILLS + 1} kills")
    assert len(load.accepted) > 100, "too little load to prove anything"
    assert load.accepted <= load.received, f"lost: {sorted(load.accepted - load.received)[:10]}"
    assert load.problems == [], f"came back after their delete was answered: {load.problems[:10]}"
    # Nothing is left over but what a broken delete left in doubt.
    counts = Connection(own_server).call(
        "GetQueueAttributes", QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"]
    )["Attributes"]
    assert int(counts["ApproximateNumberOfMessages"]) == 0

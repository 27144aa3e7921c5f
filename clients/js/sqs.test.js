// The AWS SDK for JavaScript and sqs-consumer against `hapax serve`, whose address is in HAPAX_ENDPOINT.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { test } from "node:test";

import {
  ChangeMessageVisibilityCommand,
  CreateQueueCommand,
  DeleteMessageBatchCommand,
  DeleteMessageCommand,
  GetQueueAttributesCommand,
  GetQueueUrlCommand,
  QueueDoesNotExist,
  ReceiptHandleIsInvalid,
  ReceiveMessageCommand,
  SendMessageBatchCommand,
  SendMessageCommand,
  SQSClient,
} from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const endpoint = process.env.HAPAX_ENDPOINT;
assert.ok(endpoint, "HAPAX_ENDPOINT is missing; `cargo xtask test clients` sets it");
const client = new SQSClient({
  endpoint,
  region: "us-east-1",
  credentials: { accessKeyId: "test", secretAccessKey: "test" },
});
const patience = { timeout: 60_000 };

async function createQueue(name, Attributes) {
  const QueueName = `${name}-${randomUUID()}${Attributes?.FifoQueue ? ".fifo" : ""}`;
  return (await client.send(new CreateQueueCommand({ QueueName, Attributes }))).QueueUrl;
}

async function receive(QueueUrl, more) {
  const answer = await client.send(
    new ReceiveMessageCommand({ QueueUrl, MaxNumberOfMessages: 10, WaitTimeSeconds: 5, ...more }),
  );
  return answer.Messages ?? [];
}

async function counts(QueueUrl) {
  const AttributeNames = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"];
  const { Attributes } = await client.send(new GetQueueAttributesCommand({ QueueUrl, AttributeNames }));
  return AttributeNames.map((name) => Number(Attributes[name]));
}

// Runs a consumer until `done` says so; the promise fails if that takes too long.
async function consume(QueueUrl, options, done) {
  const consumer = Consumer.create({ queueUrl: QueueUrl, sqs: client, waitTimeSeconds: 1, ...options });
  consumer.on("error", () => {});
  consumer.on("processing_error", () => {});
  const stopped = new Promise((resolve) => consumer.on("stopped", resolve));
  consumer.start();
  const end = Date.now() + 20_000;
  try {
    while (!(await done())) {
      assert.ok(Date.now() < end, "the consumer did not get done in time");
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  } finally {
    consumer.stop({ abort: true });
    await stopped;
  }
}

test("a message makes the whole round; the SDK checks its digests", patience, async () => {
  const QueueUrl = await createQueue("round");
  assert.ok(QueueUrl.startsWith(endpoint));
  const MessageAttributes = {
    text: { DataType: "String", StringValue: "größe <&>" },
    bytes: { DataType: "Binary", BinaryValue: Uint8Array.of(0, 127, 255) },
  };
  const sent = await client.send(
    new SendMessageCommand({ QueueUrl, MessageBody: "hello 🎉\n<&>", MessageAttributes }),
  );
  const [message] = await receive(QueueUrl, { MessageAttributeNames: ["All"] });
  assert.equal(message.MessageId, sent.MessageId);
  assert.equal(message.Body, "hello 🎉\n<&>");
  assert.equal(message.MessageAttributes.text.StringValue, "größe <&>");
  assert.deepEqual([...message.MessageAttributes.bytes.BinaryValue], [0, 127, 255]);
  assert.equal(message.MD5OfMessageAttributes, sent.MD5OfMessageAttributes);
  await client.send(new DeleteMessageCommand({ QueueUrl, ReceiptHandle: message.ReceiptHandle }));
  assert.deepEqual(await counts(QueueUrl), [0, 0]);
});

test("batches of ten are sent, received and deleted", patience, async () => {
  const QueueUrl = await createQueue("batch");
  const Entries = [...Array(10).keys()].map((n) => ({ Id: `e${n}`, MessageBody: `body ${n}` }));
  const sent = await client.send(new SendMessageBatchCommand({ QueueUrl, Entries }));
  assert.equal(sent.Successful.length, 10);
  const messages = await receive(QueueUrl);
  assert.deepEqual(messages.map((m) => m.Body).sort(), Entries.map((e) => e.MessageBody));
  const receipts = messages.map((m, n) => ({ Id: `${n}`, ReceiptHandle: m.ReceiptHandle }));
  const deleted = await client.send(new DeleteMessageBatchCommand({ QueueUrl, Entries: receipts }));
  assert.equal(deleted.Successful.length, 10);
  assert.equal(deleted.Failed, undefined);
});

test("the bad entry of a batch fails alone", patience, async () => {
  const QueueUrl = await createQueue("partial");
  const Entries = [
    { Id: "good", MessageBody: "x" },
    { Id: "bad", MessageBody: "x", DelaySeconds: 901 },
  ];
  const sent = await client.send(new SendMessageBatchCommand({ QueueUrl, Entries }));
  assert.deepEqual(sent.Successful.map((e) => e.Id), ["good"]);
  assert.deepEqual(sent.Failed.map((e) => [e.Id, e.Code]), [["bad", "InvalidParameterValue"]]);
});

test("a FIFO queue keeps the order of a group and drops duplicates", patience, async () => {
  const QueueUrl = await createQueue("order", { FifoQueue: "true", ContentBasedDeduplication: "true" });
  for (const MessageBody of ["a", "b", "a", "c"]) {
    await client.send(new SendMessageCommand({ QueueUrl, MessageBody, MessageGroupId: "g" }));
  }
  assert.deepEqual((await receive(QueueUrl)).map((m) => m.Body), ["a", "b", "c"]);
});

test("errors are of the SDK's own classes", patience, async () => {
  await assert.rejects(client.send(new GetQueueUrlCommand({ QueueName: "none" })), QueueDoesNotExist);
  const QueueUrl = await createQueue("errors");
  await assert.rejects(
    client.send(new DeleteMessageCommand({ QueueUrl, ReceiptHandle: "x" })),
    ReceiptHandleIsInvalid,
  );
});

test("a visibility change returns a message at once", patience, async () => {
  const QueueUrl = await createQueue("visibility");
  await client.send(new SendMessageCommand({ QueueUrl, MessageBody: "x" }));
  const [{ ReceiptHandle, MessageId }] = await receive(QueueUrl);
  await client.send(new ChangeMessageVisibilityCommand({ QueueUrl, ReceiptHandle, VisibilityTimeout: 0 }));
  const [again] = await receive(QueueUrl);
  assert.equal(again.MessageId, MessageId);
});

test("a consumer handles each of 50 messages once", patience, async () => {
  const QueueUrl = await createQueue("consumer");
  for (let batch = 0; batch < 5; batch++) {
    const Entries = [...Array(10).keys()].map((n) => ({ Id: `${n}`, MessageBody: `${batch * 10 + n}` }));
    await client.send(new SendMessageBatchCommand({ QueueUrl, Entries }));
  }
  const handled = [];
  const handleMessage = async (message) => {
    handled.push(Number(message.Body));
    return message; // acknowledges it
  };
  const empty = async () => handled.length >= 50 && (await counts(QueueUrl)).every((count) => count === 0);
  await consume(QueueUrl, { handleMessage, batchSize: 10 }, empty);
  assert.deepEqual(handled.sort((a, b) => a - b), [...Array(50).keys()]);
});

test("a message whose handler fails is delivered again", patience, async () => {
  const QueueUrl = await createQueue("failing", { VisibilityTimeout: "1" });
  await client.send(new SendMessageCommand({ QueueUrl, MessageBody: "x" }));
  const attempts = [];
  const handleMessage = async (message) => {
    attempts.push(message.Attributes.ApproximateReceiveCount);
    if (attempts.length < 3) throw new Error("not yet");
    return message;
  };
  const options = { handleMessage, messageSystemAttributeNames: ["ApproximateReceiveCount"] };
  const empty = async () => attempts.length >= 3 && (await counts(QueueUrl)).every((count) => count === 0);
  await consume(QueueUrl, options, empty);
  assert.deepEqual(attempts, ["1", "2", "3"]);
});

test("a consumer that gives failed messages back gets them at once", patience, async () => {
  const QueueUrl = await createQueue("giving-back", { VisibilityTimeout: "600" });
  await client.send(new SendMessageCommand({ QueueUrl, MessageBody: "x" }));
  let attempts = 0;
  const handleMessage = async (message) => {
    attempts += 1;
    if (attempts === 1) throw new Error("not yet");
    return message;
  };
  const empty = async () => attempts >= 2 && (await counts(QueueUrl)).every((count) => count === 0);
  await consume(QueueUrl, { handleMessage, terminateVisibilityTimeout: true }, empty);
  assert.equal(attempts, 2);
});

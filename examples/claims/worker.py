"""Charges every order once: boto3 for the queue, the claims API for the effect. Needs `hapax serve` and boto3.

HAPAX_ENDPOINT, HAPAX_TOKEN (ID:SECRET where the server has keys), QUEUE, BANK (a URL), LEASE_MS, ON_DOUBT (retry, park)
"""
import json, os, urllib.error, urllib.parse, urllib.request

import boto3

env = os.environ.get
HAPAX, TOKEN, QUEUE = env("HAPAX_ENDPOINT", "http://127.0.0.1:9324"), env("HAPAX_TOKEN", "x:x"), env("QUEUE", "orders")
LEASE_MS, BANK, ON_DOUBT = int(env("LEASE_MS", "30000")), env("BANK"), env("ON_DOUBT", "park")

def call(method, url, body, **headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LEASE_MS / 1000) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def claim(method, key, what="", **body):
    url = f"{HAPAX}/v1/claims/queue%2F{QUEUE}/{urllib.parse.quote(key, safe='')}{what}"
    return call(method, url, body, Authorization=f"Bearer {TOKEN}")

def charge(order, fence):  # the effect, at someone else's
    return call("POST", BANK, order, **{"Idempotency-Key": order["id"], "Hapax-Fence": str(fence)})[1] if BANK else order

def main():
    id, secret = TOKEN.split(":", 1)
    sqs = boto3.client("sqs", "us-east-1", endpoint_url=HAPAX, aws_access_key_id=id, aws_secret_access_key=secret)
    url = sqs.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    while True:
        for message in sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20).get("Messages", []):
            order = json.loads(message["Body"])
            status, answer = claim("PUT", order["id"], lease_ms=LEASE_MS, on_doubt=ON_DOUBT)
            if status == 201:  # ours: act, then record the outcome
                outcome = charge(order, answer["fence"])
                status, answer = claim("POST", order["id"], "/complete", token=answer["token"], outcome=outcome)
            print(order["id"], answer.get("state") or answer["code"], answer.get("outcome", ""), flush=True)
            if status == 200:  # done now or before: the message goes away. Otherwise it returns when its lease ends.
                sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

if __name__ == "__main__":
    main()

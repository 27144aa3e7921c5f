//! A settle over HTTP ends the delivery's claim in the same step.

mod support;

use serde_json::{Value, json};
use support::Api;

struct HeldDelivery {
    api: Api,
    receipt: Value,
    token: Value,
}

const ENTRY: &str = "/v1/claims/queue%2Fjobs/k";

/// A delivery and its claim.
async fn held() -> HeldDelivery {
    let api = Api::start().await;
    api.call("PUT", "/v1/queues/jobs", json!({"lease_ms": 10_000, "retry": {"base_ms": 0, "cap_ms": 0}}))
        .await
        .expect(201);
    let messages = json!({"messages": [{"body": "x", "idempotency_key": "k"}]});
    api.call("POST", "/v1/queues/jobs/messages", messages).await.expect(200);
    let receipt = receive(&api).await["receipt"].clone();
    let ask = json!({"lease_ms": 10_000, "on_doubt": "park", "queue": "jobs", "receipt": receipt});
    let token = api.call("PUT", ENTRY, ask).await.expect(201)["token"].clone();
    HeldDelivery { api, receipt, token }
}

async fn receive(api: &Api) -> Value {
    api.call("POST", "/v1/queues/jobs/receive", json!({})).await.expect(200)["deliveries"][0].clone()
}

async fn settle(api: &Api, item: Value) -> Value {
    let answer = api.call("POST", "/v1/queues/jobs/settle", json!({"settle": [item]})).await.expect(200);
    answer["results"][0].clone()
}

fn end(token: &Value, how: &Value) -> Value {
    let mut claim = json!({"scope": "queue/jobs", "key": "k", "token": token});
    claim.as_object_mut().unwrap().extend(how.as_object().unwrap().clone());
    claim
}

async fn state(api: &Api) -> Option<String> {
    let shown = api.call("GET", ENTRY, Value::Null).await;
    (shown.status == 200).then(|| shown.json["state"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn the_store_says_that_it_can() {
    let held = held().await;
    let status = held.api.call("GET", "/v1/status", Value::Null).await.expect(200);
    assert_eq!(status["capabilities"]["settle_ends_claims"], true);
    assert_eq!(status["ledger"]["durable"], true);
}

#[tokio::test]
async fn an_ack_completes_its_claim() {
    let HeldDelivery { api, receipt, token } = held().await;
    let claim = end(&token, &json!({"complete": {"outcome": {"n": 1}, "ttl_ms": 60_000}}));
    assert_eq!(
        settle(&api, json!({"receipt": receipt, "how": "ack", "claim": claim})).await,
        json!({"settled": "acked"})
    );
    let replayed = api.call("PUT", ENTRY, json!({"lease_ms": 1})).await.expect(200);
    assert_eq!(replayed["outcome"], json!({"n": 1}));
}

#[tokio::test]
async fn a_retry_releases_its_claim_and_a_park_leaves_it_in_doubt() {
    let HeldDelivery { api, receipt, token } = held().await;
    let item = json!({"receipt": receipt, "how": "retry", "claim": end(&token, &json!({"release": true}))});
    assert_eq!(settle(&api, item).await["settled"], "returned");
    assert_eq!(state(&api).await, None);
    let receipt = receive(&api).await["receipt"].clone();
    let ask = json!({"lease_ms": 10_000, "on_doubt": "park"});
    let token = api.call("PUT", ENTRY, ask.clone()).await.expect(201)["token"].clone();
    let claim = end(&token, &json!({"in_doubt": true}));
    let item = json!({"receipt": receipt, "how": "park", "reason": "timed out", "claim": claim});
    assert_eq!(settle(&api, item).await["settled"], "parked");
    assert_eq!(state(&api).await.as_deref(), Some("in_doubt"));
    api.call("PUT", ENTRY, ask).await.problem(409, "in-doubt");
}

#[tokio::test]
async fn a_rejection_records_a_failure() {
    let HeldDelivery { api, receipt, token } = held().await;
    let claim = end(&token, &json!({"complete": {"outcome": "no such account", "failed": true}}));
    settle(&api, json!({"receipt": receipt, "how": "reject", "reason": "no such account", "claim": claim}))
        .await;
    assert_eq!(state(&api).await.as_deref(), Some("failed"));
}

#[tokio::test]
async fn a_stale_token_keeps_the_delivery_from_being_settled() {
    let HeldDelivery { api, receipt, token } = held().await;
    api.call("POST", &format!("{ENTRY}/release"), json!({"token": token})).await.expect(200);
    api.call("PUT", ENTRY, json!({"lease_ms": 60_000})).await.expect(201);
    for stale in [token, json!("garbage"), json!("")] {
        let claim = end(&stale, &json!({"complete": {}}));
        let answer = settle(&api, json!({"receipt": receipt, "how": "ack", "claim": claim})).await;
        assert_eq!(answer["error"]["code"], "stale-token", "{answer}");
    }
    let stats = api.call("GET", "/v1/queues/jobs/stats", Value::Null).await.expect(200);
    assert_eq!(stats["in_flight"], 1);
    assert_eq!(state(&api).await.as_deref(), Some("processing"));
}

#[tokio::test]
async fn a_stale_receipt_does_not_keep_the_claim_from_being_completed() {
    let HeldDelivery { api, receipt, token } = held().await;
    api.clock.advance_ms(10_000);
    receive(&api).await;
    let claim = end(&token, &json!({"complete": {"outcome": 1}}));
    let answer = settle(&api, json!({"receipt": receipt, "how": "ack", "claim": claim})).await;
    assert_eq!(answer["error"]["code"], "stale-receipt", "{answer}");
    assert_eq!(state(&api).await.as_deref(), Some("completed"));
}

#[tokio::test]
async fn an_end_that_says_nothing_or_two_things_is_refused() {
    let HeldDelivery { api, receipt, token } = held().await;
    for how in [json!({}), json!({"release": true, "in_doubt": true}), json!({"complete": {"ttl_ms": 1}})] {
        let item = json!({"receipt": receipt, "how": "ack", "claim": end(&token, &how)});
        let reply = api.call("POST", "/v1/queues/jobs/settle", json!({"settle": [item]})).await;
        reply.problem(400, "invalid");
    }
    assert_eq!(state(&api).await.as_deref(), Some("processing"));
}

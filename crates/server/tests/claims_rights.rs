//! A key can claim, read and resolve entries in the scopes that it has a right to, and in no other.

mod support;

use hapax_server::ServerConfig;
use hapax_server::config::{AuthConfig, KeyConfig, Secret};
use serde_json::{Value, json};
use support::Api;

fn key(id: &str, queues: &[&str], actions: &[&str]) -> KeyConfig {
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
    KeyConfig {
        id: id.into(),
        secret: Some(Secret::new("s")),
        secret_file: None,
        secret_env: None,
        queues: words(queues),
        actions: words(actions),
    }
}

async fn start() -> Api {
    let keys = vec![
        key("WORKER", &["orders", "tenant-7/*"], &["ClaimKey", "ReceiveMessage", "DeleteMessage"]),
        key("OPERATOR", &["orders"], &["BrowseClaims", "ResolveClaims", "ForgetClaims"]),
        key("ROOT", &["*"], &["*"]),
    ];
    let auth = AuthConfig { keys, ..AuthConfig::default() };
    Api::start_with(ServerConfig { auth, ..ServerConfig::default() }).await
}

const ORDERS: &str = "/v1/claims/queue%2Forders/k";
const SECRETS: &str = "/v1/claims/queue%2Fsecrets/k";

#[tokio::test]
async fn a_worker_claims_in_the_scopes_of_its_queues_and_decides_nothing() {
    let api = start().await;
    let worker =
        async |method: &str, path: &str, body: Value| api.call_as(method, path, body, Some("WORKER:s")).await;
    let lease = json!({"lease_ms": 1_000});
    for path in [ORDERS, "/v1/claims/orders/k", "/v1/claims/tenant-7%2Fcharges/k"] {
        let grant = worker("PUT", path, lease.clone()).await.expect(201);
        let (token, lease_ms) = (&grant["token"], 1_000);
        worker("POST", &format!("{path}/renew"), json!({"token": token, "lease_ms": lease_ms}))
            .await
            .expect(200);
        worker("POST", &format!("{path}/complete"), json!({"token": token})).await.expect(200);
    }
    for path in [SECRETS, "/v1/claims/secrets/k", "/v1/claims/tenant-8%2Fcharges/k", "/v1/claims/queue%2F/k"]
    {
        let detail = worker("PUT", path, lease.clone()).await.problem(403, "forbidden");
        assert!(detail.contains("ClaimKey on scope"), "{detail}");
        for what in ["complete", "renew", "release"] {
            let body = json!({"token": "t", "lease_ms": 1});
            let body = if what == "renew" { body } else { json!({"token": "t"}) };
            worker("POST", &format!("{path}/{what}"), body).await.problem(403, "forbidden");
        }
    }
    // A delivery of a queue that the key has no right to.
    let stray = json!({"lease_ms": 1_000, "queue": "secrets", "receipt": "r"});
    worker("PUT", "/v1/claims/queue%2Forders/other", stray).await.problem(403, "forbidden");
    worker("POST", &format!("{ORDERS}/resolve"), json!({"as": "absent"})).await.problem(403, "forbidden");
    worker("DELETE", ORDERS, Value::Null).await.problem(403, "forbidden");
    worker("GET", ORDERS, Value::Null).await.problem(403, "forbidden");
    worker("GET", "/v1/claims", Value::Null).await.problem(403, "forbidden");
    worker("GET", "/v1/ledger", Value::Null).await.problem(403, "forbidden");
}

#[tokio::test]
async fn a_settle_ends_no_claim_that_its_key_has_no_right_to() {
    let api = start().await;
    let root =
        async |method: &str, path: &str, body: Value| api.call_as(method, path, body, Some("ROOT:s")).await;
    root("PUT", "/v1/queues/orders", Value::Null).await.expect(201);
    let messages = json!({"messages": [{"body": "x"}]});
    root("POST", "/v1/queues/orders/messages", messages).await.expect(200);
    let got = api.call_as("POST", "/v1/queues/orders/receive", json!({}), Some("WORKER:s")).await.expect(200);
    let grant = root("PUT", SECRETS, json!({"lease_ms": 1_000})).await.expect(201);
    let claim = json!({"scope": "queue/secrets", "key": "k", "token": grant["token"], "complete": {}});
    let settle =
        json!({"settle": [{"receipt": got["deliveries"][0]["receipt"], "how": "ack", "claim": claim}]});
    let refused = api.call_as("POST", "/v1/queues/orders/settle", settle, Some("WORKER:s")).await;
    refused.problem(403, "forbidden");
    assert_eq!(root("GET", SECRETS, Value::Null).await.expect(200)["state"], "processing");
    let stats = root("GET", "/v1/queues/orders/stats", Value::Null).await.expect(200);
    assert_eq!(stats["in_flight"], 1, "the delivery was not settled either");
}

#[tokio::test]
async fn an_operator_sees_and_decides_for_its_queues_and_claims_nothing() {
    let api = start().await;
    for path in [ORDERS, SECRETS] {
        api.call_as("PUT", path, json!({"lease_ms": 1_000}), Some("ROOT:s")).await.expect(201);
    }
    api.clock.advance_ms(1_000);
    let operator = async |method: &str, path: &str, body: Value| {
        api.call_as(method, path, body, Some("OPERATOR:s")).await
    };
    let listed = operator("GET", "/v1/claims?state=in_doubt", Value::Null).await.expect(200);
    let scopes: Vec<_> =
        listed["entries"].as_array().unwrap().iter().map(|entry| entry["scope"].as_str().unwrap()).collect();
    assert_eq!(scopes, ["queue/orders"]);
    operator("GET", "/v1/claims?scope=queue%2Fsecrets", Value::Null).await.problem(403, "forbidden");
    operator("GET", SECRETS, Value::Null).await.problem(403, "forbidden");
    operator("PUT", ORDERS, json!({"lease_ms": 1_000})).await.problem(403, "forbidden");
    operator("DELETE", SECRETS, Value::Null).await.problem(403, "forbidden");
    operator("POST", &format!("{SECRETS}/resolve"), json!({"as": "absent"})).await.problem(403, "forbidden");
    operator("POST", &format!("{ORDERS}/resolve"), json!({"as": "completed"})).await.expect(200);
    operator("DELETE", ORDERS, Value::Null).await.expect(204);
    api.call("PUT", ORDERS, json!({"lease_ms": 1_000})).await.problem(401, "unauthenticated");
}

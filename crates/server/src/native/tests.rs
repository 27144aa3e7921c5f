use std::collections::BTreeSet;

use axum::body::Body;
use hapax_core::QueueStore as _;
use hapax_embedded::{Embedded, Options};
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tower_service::Service as _;

use super::*;
use crate::auth::{Authenticator, Identity};
use crate::config::{AuthConfig, KeyConfig, Secret};

struct Fixture {
    folder: tempfile::TempDir,
    store: Arc<Embedded>,
    native: Native,
    router: Router,
    identity: Option<Identity>,
    shutdown: watch::Sender<bool>,
}

fn identity(queues: &[&str], actions: &[&str]) -> Identity {
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
    let key = KeyConfig {
        id: "AK".into(),
        secret: Some(Secret::new("secret")),
        secret_file: None,
        secret_env: None,
        queues: words(queues),
        actions: words(actions),
    };
    let mut headers = http::HeaderMap::new();
    headers.insert(http::header::AUTHORIZATION, HeaderValue::from_static("Bearer AK:secret"));
    let auth = Authenticator::new(&AuthConfig { keys: vec![key], ..AuthConfig::default() }).unwrap();
    auth.bearer(&headers).unwrap()
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store"), Options::default()).unwrap());
    let (shutdown, requested) = watch::channel(false);
    let copied = store.clone();
    let backup: Backup = Arc::new(move |to| copied.backup(to).map_err(|error| error.to_string()));
    let backups = Backups { folder: folder.path().join("backups"), setting: "backup_folder", write: backup };
    let native = Native::new(store.clone(), requested.into(), Some(backups));
    let router = native.router();
    let identity =
        Some(Authenticator::new(&AuthConfig::default()).unwrap().bearer(&http::HeaderMap::new()).unwrap());
    Fixture { folder, store, native, router, identity, shutdown }
}

impl Fixture {
    async fn raw(&self, method: &str, path: &str, body: impl Into<Body>) -> Response<Body> {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(identity) = &self.identity {
            request = request.extension(identity.clone());
        }
        self.router.clone().call(request.body(body.into()).unwrap()).await.unwrap()
    }

    /// Returns the status and the JSON of a response.
    async fn call(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        let response = self.raw(method, path, body).await;
        let status = response.status();
        let kind = response.headers().get(CONTENT_TYPE).cloned();
        if status.is_client_error() || status.is_server_error() {
            assert_eq!(kind.unwrap(), "application/problem+json");
        }
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let json = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
        (status.as_u16(), json)
    }

    async fn refused(&self, method: &str, path: &str, body: Value, status: u16, code: &str) -> String {
        let (got, problem) = self.call(method, path, body).await;
        assert_eq!((got, problem["code"].as_str()), (status, Some(code)), "{method} {path}: {problem}");
        assert_eq!(problem["status"], status);
        problem["detail"].as_str().unwrap().to_owned()
    }
}

fn described() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

/// OpenAPI has no syntax for a parameter that may contain slashes.
fn described_path(path: &str) -> String {
    format!("/v1{}", path.replace("{*", "{"))
}

#[test]
fn every_route_is_described_and_every_description_has_a_route() {
    let all = || OPERATOR_ROUTES.iter().chain(ROUTES);
    let routes: BTreeSet<(String, String)> =
        all().map(|(method, path, _)| (described_path(path), (*method).to_owned())).collect();
    assert_eq!(routes.len(), all().count(), "no route twice");
    let document = described();
    let mut operations = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            operations.insert((path.clone(), method.clone()));
            assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{operation}");
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let in_path = parameters.iter().filter(|p| p["in"] == "path" || p["$ref"].is_string()).count();
            assert_eq!(in_path, path.matches('{').count(), "{method} {path} describes its path");
        }
    }
    assert_eq!(operations, routes);
}

/// Each route's method in the table is the one that the router accepts.
#[tokio::test]
async fn every_route_answers_its_method() {
    let f = fixture();
    for (method, path, _) in OPERATOR_ROUTES.iter().chain(ROUTES) {
        let path = path
            .replace("{queue}", "q")
            .replace("{group}", "g")
            .replace("{id}", "1")
            .replace("{cancel_id}", "c")
            .replace("{scope}", "s")
            .replace("{key}", "k")
            .replace("{*name}", "d");
        let response = f.raw(&method.to_uppercase(), &format!("/v1{path}"), "{\"no\":1}").await;
        assert_ne!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
    }
}

#[test]
fn every_reference_of_the_description_leads_somewhere() {
    fn walk(value: &Value, document: &Value) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(to)) = fields.get("$ref") {
                    let pointer = to.strip_prefix('#').unwrap();
                    assert!(document.pointer(pointer).is_some(), "{to}");
                }
                fields.values().for_each(|value| walk(value, document));
            }
            Value::Array(items) => items.iter().for_each(|item| walk(item, document)),
            _ => {}
        }
    }
    let document = described();
    assert_eq!(document["openapi"], "3.1.0");
    walk(&document, &document);
}

/// The reverse direction is tested by `every_reference_of_the_description_leads_somewhere` and the contract's tests.
#[test]
fn the_described_ledger_is_the_real_one() {
    let described = described();
    let schemas = &described["components"]["schemas"];
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let stats = serde_json::to_value(hapax_core::LedgerStats::default()).unwrap();
    assert_eq!(names(&schemas["Ledger"]["properties"]["stats"]["properties"]), names(&stats));
    let body: hapax_client::wire::ClaimBody = serde_json::from_value(json!({
        "owner": "o", "fingerprint": "f", "lease_ms": 1, "wait_ms": 1, "on_doubt": "park", "queue": "q", "receipt": "r"
    }))
    .unwrap();
    assert_eq!(names(&schemas["Claim"]["properties"]), names(&serde_json::to_value(body).unwrap()));
    let entry = serde_json::from_value::<hapax_core::EntryView>(json!({
        "scope": "s", "key": "k", "state": "failed", "fence": 1, "owner": "o", "fingerprint": "f", "claimed_ms": 1,
        "takeovers": 0, "lease_ms": 0, "ended_ms": 1, "prune_ms": 2, "outcome": {"value": null, "failed": true}
    }));
    let entry = serde_json::to_value(entry.unwrap()).unwrap();
    assert_eq!(names(&schemas["Entry"]["properties"]), names(&entry));
    assert_eq!(entry["outcome"], json!({"value": null, "failed": true}));
}

/// A field that exists only in the code or only in the description is misleading.
#[test]
fn the_described_configuration_is_the_real_one() {
    let real = serde_json::to_value(hapax_core::QueueConfig::default()).unwrap();
    let described = described();
    let fields = described["components"]["schemas"]["QueueConfig"]["properties"].as_object().unwrap();
    let names = |fields: &serde_json::Map<String, Value>| fields.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(fields), names(real.as_object().unwrap()));
    for part in ["retry", "dedup", "quota"] {
        let inner = fields[part]["properties"].as_object().unwrap();
        assert_eq!(names(inner), names(real[part].as_object().unwrap()), "{part}");
    }
}

#[tokio::test]
async fn a_message_goes_through_its_life() {
    let f = fixture();
    let (status, queue) =
        f.call("PUT", "/v1/queues/jobs", json!({"key_pointer": "/order/id", "lease_ms": 60_000})).await;
    assert_eq!(
        (status, &queue["created"], &queue["config"]["lease_ms"]),
        (201, &json!(true), &json!(60_000))
    );
    let messages = json!({"messages": [
        {"body": "{\"order\":{\"id\":42}}", "attributes": {"a": "text", "b": {"type": "Binary", "base64": "AAE="}}},
        {"body_base64": "/wA=", "idempotency_key": "k-1", "priority": 3},
    ]});
    let (status, sent) = f.call("POST", "/v1/queues/jobs/messages", messages).await;
    assert_eq!((status, &sent["failed"]), (200, &json!(0)));
    let (_, got) = f.call("POST", "/v1/queues/jobs/receive", json!({"max": 10, "consumer": "me"})).await;
    let (binary, text) = (&got["deliveries"][0], &got["deliveries"][1]);
    assert_eq!((&binary["key"], &binary["key_source"]), (&json!("k-1"), &json!("attribute")));
    assert_eq!((&binary["body_base64"], &binary["priority"]), (&json!("/wA="), &json!(3)));
    assert_eq!((&text["key"], &text["key_source"]), (&json!("42"), &json!("body")));
    assert_eq!(text["attributes"], json!({"a": "text", "b": {"type": "Binary", "base64": "AAE="}}));
    assert!(text["fence"].is_u64() && text["attempt"] == 1 && text.get("body_base64").is_none());

    let receipt = |delivery: &Value| delivery["receipt"].clone();
    let (_, extended) = f
        .call(
            "POST",
            "/v1/queues/jobs/extend",
            json!({"extend": [{"receipt": receipt(text), "lease_ms": 90_000}]}),
        )
        .await;
    assert!(extended["results"][0]["lease_ms"].as_u64().unwrap() > 60_000);
    let settle = json!({"settle": [
        {"receipt": receipt(text), "how": "ack"},
        {"receipt": "garbage", "how": "ack"},
        {"receipt": receipt(binary), "how": "reject", "reason": "no"},
    ]});
    let (_, settled) = f.call("POST", "/v1/queues/jobs/settle", settle).await;
    assert_eq!(settled["failed"], 1);
    assert_eq!(settled["results"][0], json!({"settled": "acked"}));
    assert_eq!(settled["results"][1]["error"]["code"], "malformed-receipt");
    assert_eq!(settled["results"][2], json!({"settled": "parked"}));

    let (_, page) = f.call("GET", "/v1/queues/jobs/messages?state=parked", Value::Null).await;
    let parked = &page["messages"][0];
    assert_eq!((&parked["parked"]["error"], &parked["history"][0]["consumer"]), (&json!("no"), &json!("me")));
    let ids = json!({"ids": [parked["id"]]});
    assert_eq!(f.call("POST", "/v1/queues/jobs/release", ids.clone()).await, (200, json!({"count": 1})));
    assert_eq!(f.call("POST", "/v1/queues/jobs/discard", ids).await, (200, json!({"count": 1})));
    assert_eq!(f.call("DELETE", "/v1/queues/jobs", Value::Null).await, (204, Value::Null));
}

#[tokio::test]
async fn one_bad_message_fails_alone() {
    let f = fixture();
    f.call("PUT", "/v1/queues/jobs", Value::Null).await;
    let messages =
        json!({"messages": [{"body": "a"}, {"body": "b", "group": "with space"}, {}, {"body": "c"}]});
    let (status, sent) = f.call("POST", "/v1/queues/jobs/messages", messages).await;
    assert_eq!((status, &sent["failed"]), (200, &json!(2)));
    assert_eq!(sent["results"][1]["error"]["code"], "invalid");
    assert!(sent["results"][0]["id"].is_string() && sent["results"][3]["id"].is_string());
}

#[tokio::test]
async fn errors_have_their_status_and_code() {
    let f = fixture();
    f.refused("POST", "/v1/queues/gone/receive", json!({}), 404, "no-such-queue").await;
    f.refused("POST", "/v1/queues/a%20b/receive", json!({}), 400, "invalid").await;
    f.refused("GET", "/v1/nothing", Value::Null, 404, "no-such-path").await;
    f.refused("PUT", "/v1/queues", Value::Null, 405, "method-not-allowed").await;
    f.refused("PUT", "/v1/queues/jobs", json!({"lease_ms": 43_200_001}), 422, "config").await;
    f.call("PUT", "/v1/queues/jobs", json!({})).await;
    assert_eq!(f.call("PUT", "/v1/queues/jobs", json!({})).await.0, 200);
    f.refused("PUT", "/v1/queues/jobs", json!({"delay_ms": 7}), 409, "queue-exists").await;
    f.refused("POST", "/v1/queues/jobs/receive", json!({"max": 0}), 400, "invalid").await;
    f.refused("POST", "/v1/queues/jobs/receive", json!({"max": -1}), 400, "invalid").await;
    f.refused("DELETE", "/v1/redrives/99", Value::Null, 404, "not-found").await;
    f.refused("GET", "/v1/redrives", Value::Null, 400, "invalid").await;
    f.refused("DELETE", "/v1/queues/jobs/receives/x", Value::Null, 404, "no-such-receive").await;
    let stray = json!({"settle": [{"receipt": "r", "how": "ack", "reason": "x"}]});
    f.refused("POST", "/v1/queues/jobs/settle", stray, 400, "invalid").await;
    let many = json!({"messages": vec![json!({"body": ""}); hapax_core::validate::BATCH_MAX + 1]});
    f.refused("POST", "/v1/queues/jobs/messages", many, 400, "invalid").await;
    let large = json!({"token": "t", "outcome": "x".repeat(BODY_BYTES_MAX)});
    f.refused("POST", "/v1/claims/s/k/complete", large, 413, "request-too-large").await;
    let large = json!({"messages": [{"body": "x".repeat(BODY_BYTES_MAX)}]});
    f.refused("POST", "/v1/queues/jobs/messages", large, 413, "request-too-large").await;
    f.store.close();
    f.refused("GET", "/v1/queues/jobs", Value::Null, 503, "unavailable").await;
    // Claims are refused while the store is closed, so that no caller acts without a claim.
    f.refused("PUT", "/v1/claims/s/k", json!({"lease_ms": 1_000}), 503, "unavailable").await;
    f.refused("POST", "/v1/claims/s/k/complete", json!({"token": "t"}), 503, "unavailable").await;
    f.refused("GET", "/v1/claims", Value::Null, 503, "unavailable").await;
}

#[tokio::test]
async fn unknown_fields_are_refused_with_the_one_that_was_meant() {
    let f = fixture();
    f.call("PUT", "/v1/queues/jobs", Value::Null).await;
    for (method, path, body, meant) in [
        ("POST", "/v1/queues/jobs/messages", json!({"messages": [{"boddy": "x"}]}), "`body`?"),
        ("POST", "/v1/queues/jobs/receive", json!({"maxx": 1}), "`max`?"),
        ("POST", "/v1/queues/jobs/settle", json!({"settle": [{"receipt": "r", "how": "akc"}]}), "`ack`?"),
        ("PUT", "/v1/queues/other", json!({"lease": 1, "retentoin_ms": 60_000}), "`lease_ms`?"),
        ("PATCH", "/v1/queues/jobs", json!({"retry": {"bsae_ms": 1}}), "`base_ms`?"),
        ("GET", "/v1/queues/jobs/messages?limt=1", Value::Null, "`limit`?"),
    ] {
        let detail = f.refused(method, path, body, 400, "invalid").await;
        assert!(detail.ends_with(meant), "{detail}");
    }
}

#[tokio::test]
async fn a_patch_changes_what_it_names_and_null_is_the_default() {
    let f = fixture();
    f.call("PUT", "/v1/queues/jobs", json!({"delay_ms": 5, "tags": {"a": "1", "b": "2"}})).await;
    let patch = json!({"delay_ms": null, "lease_ms": 1_000, "tags": {"a": null, "c": "3"}});
    let (status, queue) = f.call("PATCH", "/v1/queues/jobs", patch).await;
    let config = &queue["config"];
    assert_eq!((status, &config["delay_ms"], &config["lease_ms"]), (200, &json!(0), &json!(1_000)));
    assert_eq!(config["tags"], json!({"b": "2", "c": "3"}));
    let (_, queue) = f.call("PUT", "/v1/queues/jobs/config", json!({"delay_ms": 9})).await;
    assert_eq!((&queue["config"]["delay_ms"], &queue["config"]["tags"]), (&json!(9), &json!({})));
}

#[tokio::test]
async fn a_changed_key_pointer_affects_new_messages_only() {
    let f = fixture();
    f.call("PUT", "/v1/queues/jobs", json!({"lease_ms": 0, "retry": {"base_ms": 0}, "key_pointer": "/a"}))
        .await;
    let send = async || {
        let message = json!({"messages": [{"body": "{\"a\":\"1\",\"b\":\"2\"}"}]});
        f.call("POST", "/v1/queues/jobs/messages", message).await;
    };
    send().await;
    let key = async || {
        f.call("POST", "/v1/queues/jobs/receive", Value::Null).await.1["deliveries"][0]["key"].clone()
    };
    assert_eq!(key().await, "1");
    f.call("PATCH", "/v1/queues/jobs", json!({"key_pointer": "/b"})).await;
    assert_eq!(key().await, "1");
    f.call("POST", "/v1/queues/jobs/purge", Value::Null).await;
    send().await;
    assert_eq!(key().await, "2");
    // A queue that is created again has its own pointer.
    f.call("DELETE", "/v1/queues/jobs", Value::Null).await;
    f.call("PUT", "/v1/queues/jobs", json!({"lease_ms": 0, "retry": {"base_ms": 0}, "key_pointer": "/a"}))
        .await;
    send().await;
    assert_eq!(key().await, "1");
}

#[tokio::test]
async fn a_key_for_some_queues_reaches_no_other() {
    let mut f = fixture();
    f.call("PUT", "/v1/queues/secrets", Value::Null).await;
    f.identity = Some(identity(&["orders*"], &["*"]));
    f.refused("POST", "/v1/backup", json!({"to": "/tmp/x"}), 403, "forbidden").await;
    f.refused("POST", "/v1/resume", json!({}), 403, "forbidden").await;
    // Dead letters of a queue arrive in its dead-letter queue, so they need the right to send there.
    let dead = json!({"dead_letter": {"queue": "secrets"}});
    f.refused("PUT", "/v1/queues/orders", dead.clone(), 403, "forbidden").await;
    assert_eq!(f.call("PUT", "/v1/queues/orders", Value::Null).await.0, 201);
    f.refused("PATCH", "/v1/queues/orders", dead.clone(), 403, "forbidden").await;
    f.refused("PUT", "/v1/queues/orders/config", dead, 403, "forbidden").await;
}

#[tokio::test]
async fn a_key_does_what_it_may_and_no_more() {
    let mut f = fixture();
    for queue in ["orders", "secrets"] {
        f.call("PUT", &format!("/v1/queues/{queue}"), Value::Null).await;
    }
    f.identity = Some(identity(&["orders*"], &["SendMessage", "ListQueues"]));
    let message = json!({"messages": [{"body": "x"}]});
    assert_eq!(f.call("POST", "/v1/queues/orders/messages", message.clone()).await.0, 200);
    for (method, path, body) in [
        ("POST", "/v1/queues/secrets/messages", message),
        ("POST", "/v1/queues/orders/receive", json!({})),
        ("POST", "/v1/queues/orders/settle", json!({"settle": []})),
        ("POST", "/v1/queues/orders/extend", json!({"extend": []})),
        ("GET", "/v1/queues/orders/messages", Value::Null),
        ("PATCH", "/v1/queues/orders", json!({})),
        ("DELETE", "/v1/queues/orders", Value::Null),
        ("POST", "/v1/queues/orders/purge", Value::Null),
        ("POST", "/v1/redrives", json!({"from": "orders"})),
        ("DELETE", "/v1/redrives/1", Value::Null),
        ("POST", "/v1/resume", Value::Null),
        ("POST", "/v1/backup", json!({"to": "/tmp/x"})),
    ] {
        f.refused(method, path, body, 403, "forbidden").await;
    }
    let (_, listed) = f.call("GET", "/v1/queues", Value::Null).await;
    assert_eq!(listed["queues"].as_array().unwrap().len(), 1, "{listed}");
    f.identity = None;
    f.refused("GET", "/v1/queues", Value::Null, 401, "unauthenticated").await;
}

#[tokio::test]
async fn a_redrive_is_in_the_books_under_the_key() {
    let mut f = fixture();
    f.call("PUT", "/v1/queues/dead", Value::Null).await;
    f.identity = Some(identity(&["*"], &["*"]));
    let (status, task) = f.call("POST", "/v1/redrives", json!({"from": "dead", "by": "ann"})).await;
    assert_eq!((status, &task["by"]), (201, &json!("AK: ann")));
    let (_, all) = f.call("GET", "/v1/redrives?from=dead", Value::Null).await;
    assert_eq!(all["redrives"][0]["id"], task["id"]);
}

#[tokio::test]
async fn a_shutdown_and_a_cancel_answer_a_long_poll_empty() {
    let f = Arc::new(fixture());
    f.call("PUT", "/v1/queues/jobs", Value::Null).await;
    for end in ["cancel", "shutdown"] {
        let waiting = tokio::spawn({
            let f = f.clone();
            async move {
                f.call("POST", "/v1/queues/jobs/receive", json!({"wait_ms": 20_000, "cancel_id": "mine"}))
                    .await
            }
        });
        while f.native.waiting_calls() == 0 {
            tokio::task::yield_now().await;
        }
        if end == "cancel" {
            assert_eq!(f.call("DELETE", "/v1/queues/jobs/receives/mine", Value::Null).await.0, 204);
        } else {
            f.shutdown.send_replace(true);
        }
        assert_eq!(waiting.await.unwrap(), (200, json!({"deliveries": []})), "{end}");
    }
    assert_eq!(f.native.waiting_calls(), 0);
    let jobs = hapax_core::QueueName::new("jobs").unwrap();
    let sent = f.store.send(&jobs, vec![hapax_core::NewMessage::new("x")]).await.unwrap();
    assert!(sent[0].is_ok());
}

#[tokio::test]
async fn a_backup_is_written_once_and_only_where_it_can_be() {
    let mut f = fixture();
    let file = f.folder.path().join("backups/copy.db");
    let to = json!({"to": "copy.db"});
    assert_eq!(f.call("POST", "/v1/backup", to.clone()).await, (200, json!({"path": file})));
    assert!(file.exists());
    let again = f.refused("POST", "/v1/backup", to.clone(), 409, "refused").await;
    assert!(again.contains("exists"), "{again}");
    for outside in ["../copy.db", "/copy.db", "a/copy.db", "copy2.db/", "./copy2.db", "", ".", ".."] {
        f.refused("POST", "/v1/backup", json!({"to": outside}), 400, "invalid").await;
    }
    let (_, requested) = watch::channel(false);
    f.router = router(f.store.clone(), requested.into(), None);
    f.refused("POST", "/v1/backup", to, 501, "not-supported").await;
}

async fn metrics_page(f: &Fixture) -> String {
    let response = f.raw("GET", "/metrics", Body::empty()).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()[CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn has(page: &str, line: &str) -> bool {
    page.lines().any(|other| other == line)
}

#[tokio::test]
async fn metrics_show_store_queues_ledger_and_process() {
    let f = fixture();
    for queue in ["mine", "theirs"] {
        f.call("PUT", &format!("/v1/queues/{queue}"), json!({})).await;
        let body = json!({"messages": [{"body": "x"}]});
        assert_eq!(f.call("POST", &format!("/v1/queues/{queue}/messages"), body).await.0, 200);
    }
    let process = hapax_http::Counters { replayed: 7, ..hapax_http::Counters::default() };
    f.native.add_samples(move || hapax_core::metrics::Metrics::samples(&process, &["shop"]));
    let page = metrics_page(&f).await;
    for line in [
        "hapax_server_store_reachable 1",
        "hapax_store_messages 2",
        "hapax_queue_ready{queue=\"mine\"} 1",
        "hapax_queue_sent_total{queue=\"theirs\"} 1",
        "hapax_ledger_granted_total 0",
        "hapax_http_replayed_total{service=\"shop\"} 7",
    ] {
        assert!(has(&page, line), "{line} is missing in\n{page}");
    }
    assert_eq!(f.raw("POST", "/metrics", Body::empty()).await.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn metrics_show_a_key_only_its_queues() {
    let mut f = fixture();
    for queue in ["mine", "theirs"] {
        f.call("PUT", &format!("/v1/queues/{queue}"), json!({})).await;
    }
    f.native
        .add_samples(|| hapax_core::metrics::Metrics::samples(&hapax_http::Counters::default(), &["shop"]));
    f.identity = Some(identity(&["mine"], &["*"]));
    let page = metrics_page(&f).await;
    assert!(has(&page, "hapax_queue_ready{queue=\"mine\"} 0"), "{page}");
    for hidden in ["theirs", "hapax_store_", "hapax_ledger_", "hapax_http_"] {
        assert!(!page.contains(hidden), "{hidden} is shown in\n{page}");
    }
    f.identity = Some(identity(&["*"], &["SendMessage"]));
    assert_eq!(f.raw("GET", "/metrics", Body::empty()).await.status(), StatusCode::FORBIDDEN);
    f.identity = None;
    assert_eq!(f.raw("GET", "/metrics", Body::empty()).await.status(), StatusCode::UNAUTHORIZED);
}

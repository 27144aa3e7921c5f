//! A key limited to some queues cannot reach another queue by any call, and sees neither its name nor figures that
//! include it.

mod support;

use hapax_server::ServerConfig;
use hapax_server::config::{AuthConfig, KeyConfig, Secret};
use serde_json::{Value, json};
use support::Api;

fn key(id: &str, queues: &[&str]) -> KeyConfig {
    KeyConfig {
        id: id.into(),
        secret: Some(Secret::new("s")),
        secret_file: None,
        secret_env: None,
        queues: queues.iter().map(|queue| (*queue).to_owned()).collect(),
        actions: vec!["*".into()],
    }
}

const ROOT: Option<&str> = Some("ROOT:s");
/// May call every action, but only on the queues `mine` and `mine-dead`.
const SOME: Option<&str> = Some("SOME:s");

/// `theirs` and `mine` both use `mine-dead` as their dead-letter queue; each has one dead letter there.
async fn start(theirs_dies_here: bool) -> Api {
    let keys = vec![key("ROOT", &["*"]), key("SOME", &["mine", "mine-*"])];
    let auth = AuthConfig { keys, ..AuthConfig::default() };
    let api = Api::start_with(ServerConfig { auth, ..ServerConfig::default() }).await;
    let root = async |method: &str, path: &str, body: Value| api.call_as(method, path, body, ROOT).await;
    for queue in ["mine-dead", "theirs-dead"] {
        root("PUT", &format!("/v1/queues/{queue}"), json!({})).await.expect(201);
    }
    let queues: &[&str] = if theirs_dies_here { &["mine", "theirs"] } else { &["mine"] };
    for queue in queues {
        let config = json!({"dead_letter": {"queue": "mine-dead"}});
        root("PUT", &format!("/v1/queues/{queue}"), config).await.expect(201);
        let messages = json!({"messages": [{"body": format!("of {queue}")}]});
        root("POST", &format!("/v1/queues/{queue}/messages"), messages).await.expect(200);
        let got = root("POST", &format!("/v1/queues/{queue}/receive"), json!({})).await.expect(200);
        let settle = json!({"settle": [
            {"receipt": got["deliveries"][0]["receipt"], "how": "reject", "reason": "bad"}
        ]});
        root("POST", &format!("/v1/queues/{queue}/settle"), settle).await.expect(200);
    }
    if !theirs_dies_here {
        root("PUT", "/v1/queues/theirs", json!({})).await.expect(201);
    }
    api
}

#[tokio::test]
async fn every_call_on_another_queue_is_refused() {
    let api = start(true).await;
    let ids = json!({"ids": []});
    let calls: Vec<(&str, &str, Value)> = vec![
        ("POST", "/v1/queues/theirs/messages", json!({"messages": [{"body": "x"}]})),
        ("POST", "/v1/queues/theirs/receive", json!({})),
        ("DELETE", "/v1/queues/theirs/receives/x", Value::Null),
        ("POST", "/v1/queues/theirs/settle", json!({"settle": []})),
        ("POST", "/v1/queues/theirs/extend", json!({"extend": []})),
        ("PUT", "/v1/queues/theirs", json!({})),
        ("GET", "/v1/queues/theirs", Value::Null),
        ("PATCH", "/v1/queues/theirs", json!({"delay_ms": 1})),
        ("DELETE", "/v1/queues/theirs", Value::Null),
        ("PUT", "/v1/queues/theirs/config", json!({})),
        ("GET", "/v1/queues/theirs/stats", Value::Null),
        ("POST", "/v1/queues/theirs/purge", json!({})),
        ("POST", "/v1/queues/theirs/pause", json!({})),
        ("POST", "/v1/queues/theirs/resume", json!({})),
        ("GET", "/v1/queues/theirs/messages", Value::Null),
        ("POST", "/v1/queues/theirs/discard", ids.clone()),
        ("POST", "/v1/queues/theirs/release", ids),
        ("GET", "/v1/queues/theirs/messages/0190a3c2-7b1e-8def-8000-0000000000ff/story", Value::Null),
        ("GET", "/v1/queues/theirs/keys/k/stories", Value::Null),
        ("GET", "/v1/queues/theirs/observed", Value::Null),
        ("GET", "/v1/queues/theirs/halted", Value::Null),
        ("POST", "/v1/queues/theirs/halted/g/release", Value::Null),
        ("POST", "/v1/redrives", json!({"from": "theirs-dead"})),
        ("POST", "/v1/redrives", json!({"from": "mine-dead", "to": "theirs"})),
        ("POST", "/v1/redrives", json!({"from": "mine-dead", "filter": {"source": "theirs"}})),
        ("POST", "/v1/redrives", json!({"from": "mine-dead"})),
        ("GET", "/v1/redrives?from=theirs-dead", Value::Null),
        ("PATCH", "/v1/queues/mine", json!({"dead_letter": {"queue": "theirs-dead"}})),
        ("PUT", "/v1/queues/mine/config", json!({"dead_letter": {"queue": "theirs-dead"}})),
        ("PUT", "/v1/queues/mine-new", json!({"dead_letter": {"queue": "theirs-dead"}})),
        ("PUT", "/v1/claims/queue%2Ftheirs/k", json!({"lease_ms": 1_000})),
        // These concern the whole store.
        ("GET", "/v1/ledger", Value::Null),
        ("POST", "/v1/resume", json!({})),
        ("POST", "/v1/backup", json!({"to": "/tmp/x"})),
        ("GET", "/v1/transfer", Value::Null),
        ("POST", "/v1/transfer/fence", json!({"fence": 1})),
        ("GET", "/v1/transfer/copy", Value::Null),
        ("POST", "/v1/transfer/copy", json!({"queue": "theirs"})),
        ("GET", "/v1/transfer/items?queue=theirs", Value::Null),
        ("POST", "/v1/transfer/items", json!({"items": []})),
        ("GET", "/v1/documents", Value::Null),
        ("GET", "/v1/documents/a", Value::Null),
        ("PUT", "/v1/documents/a", json!(1)),
        ("DELETE", "/v1/documents/a", Value::Null),
    ];
    for (method, path, body) in calls {
        println!("{method} {path} {body}");
        api.call_as(method, path, body, SOME).await.problem(403, "forbidden");
    }
    let stats = api.call_as("GET", "/v1/queues/mine-dead/stats", Value::Null, ROOT).await.expect(200);
    assert_eq!(stats["ready"], 2, "nothing was moved");
}

#[tokio::test]
async fn the_figures_of_all_queues_are_those_of_the_keys_own() {
    let api = start(true).await;
    let shown = async |key| {
        let all = api.call_as("GET", "/v1/stats", Value::Null, key).await.expect(200);
        let mut names = Vec::new();
        for queue in all["queues"].as_array().unwrap() {
            let name = queue["name"].as_str().unwrap().to_owned();
            for part in ["stats", "observed"] {
                let path = format!("/v1/queues/{name}/{part}");
                let alone = api.call_as("GET", &path, Value::Null, key).await.expect(200);
                assert_eq!(queue[part], alone, "{path}");
            }
            names.push(name);
        }
        names
    };
    assert_eq!(shown(ROOT).await, ["mine", "mine-dead", "theirs", "theirs-dead"]);
    assert_eq!(shown(SOME).await, ["mine", "mine-dead"]);
}

#[tokio::test]
async fn a_redrive_home_moves_only_what_may_go_home() {
    // A dead letter of `theirs` is in `mine-dead`, although `theirs` now uses another dead-letter queue.
    let api = start(true).await;
    let elsewhere = json!({"dead_letter": {"queue": "theirs-dead"}});
    api.call_as("PATCH", "/v1/queues/theirs", elsewhere, ROOT).await.expect(200);
    api.call_as("POST", "/v1/redrives", json!({"from": "mine-dead"}), SOME).await.expect(201);
    let ready = async |queue: &str| {
        let path = format!("/v1/queues/{queue}/stats");
        api.call_as("GET", &path, Value::Null, ROOT).await.expect(200)["ready"].as_u64().unwrap()
    };
    let start = std::time::Instant::now();
    while ready("mine").await == 0 {
        assert!(start.elapsed() < std::time::Duration::from_mins(1), "the redrive does not move");
        api.clock.advance_ms(1_000);
    }
    loop {
        let tasks = api.call_as("GET", "/v1/redrives?from=mine-dead", Value::Null, SOME).await.expect(200);
        if tasks["redrives"][0]["state"] == "completed" {
            assert_eq!(
                (&tasks["redrives"][0]["moved"], &tasks["redrives"][0]["left"]),
                (&json!(1), &json!(1))
            );
            break;
        }
        assert!(start.elapsed() < std::time::Duration::from_mins(1), "the redrive does not end");
        api.clock.advance_ms(1_000);
    }
    assert_eq!((ready("mine").await, ready("theirs").await, ready("mine-dead").await), (1, 0, 1));
}

#[tokio::test]
async fn listings_name_no_other_queue() {
    let api = start(false).await;
    let queues = api.call_as("GET", "/v1/queues", Value::Null, SOME).await.expect(200);
    let names: Vec<_> = queues["queues"].as_array().unwrap().iter().map(|queue| &queue["name"]).collect();
    assert_eq!(names, ["mine", "mine-dead"]);
    // A redrive started by the root key, into a queue that the other key has no right to.
    let redrive = json!({"from": "mine-dead", "to": "theirs", "per_second": 1});
    let task = api.call_as("POST", "/v1/redrives", redrive, ROOT).await.expect(201);
    let tasks = api.call_as("GET", "/v1/redrives?from=mine-dead", Value::Null, SOME).await.expect(200);
    assert_eq!(tasks["redrives"], json!([]));
    let path = format!("/v1/redrives/{}", task["id"]);
    api.call_as("DELETE", &path, Value::Null, SOME).await.problem(404, "not-found");
}

#[tokio::test]
async fn figures_of_the_whole_store_are_for_keys_of_all_queues() {
    let api = start(true).await;
    let mine = api.call_as("GET", "/v1/status", Value::Null, SOME).await.expect(200);
    let keys: Vec<_> = mine["status"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["paused", "stopped"]);
    assert_eq!(mine["withheld"], true, "a client can tell what was left out from what is not so");
    assert!(mine["capabilities"].is_object(), "a client has to know what the store can do");
    let all = api.call_as("GET", "/v1/status", Value::Null, ROOT).await.expect(200);
    assert_eq!(all["status"]["messages"], 2);
    assert!(all["withheld"].is_null(), "{all}");
    api.call_as("GET", "/v1/ledger", Value::Null, ROOT).await.expect(200);
}

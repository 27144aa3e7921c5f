//! `hapax ledger` against a running server: entries in doubt are listed, shown and resolved.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use common::Server;
use serde_json::{Value, json};

/// One request to the claims API, as any language would send it.
fn call(server: &Server, method: &str, path: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let body = body.to_string();
    let head = format!("{method} /v1/claims/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// Claims a key and ends the claim in doubt.
fn doubt(server: &Server, path: &str) {
    let grant = call(server, "PUT", path, &json!({"lease_ms": 60_000, "owner": "w-1"}));
    let given_up = json!({"token": grant["token"], "in_doubt": true});
    assert_eq!(call(server, "POST", &format!("{path}/release"), &given_up)["state"], "in_doubt");
}

#[test]
fn entries_in_doubt_are_listed_shown_and_resolved() {
    let server = Server::start();
    doubt(&server, "queue%2Fpayments/order-7");
    doubt(&server, "queue%2Fpayments/order-8");
    call(&server, "PUT", "tenant%201%2Fcharges/order-9", &json!({"lease_ms": 60_000}));

    let lines = server.run(&["ledger", "list", "--state", "in_doubt"]).ok();
    let keys: Vec<_> = lines.lines().map(|line| line.split('\t').take(3).collect::<Vec<_>>()).collect();
    assert_eq!(
        keys,
        [["queue/payments", "order-7", "in_doubt"], ["queue/payments", "order-8", "in_doubt"]],
        "{lines}"
    );
    assert_eq!(server.run(&["ledger", "list", "--queue", "payments"]).ok().lines().count(), 2);
    assert_eq!(server.run(&["ledger", "list", "--limit", "1"]).ok().lines().count(), 1);
    let other = server.run(&["ledger", "list", "--scope", "tenant 1/charges", "--json"]).json();
    assert_eq!((&other[0]["key"], &other[0]["state"]), (&json!("order-9"), &json!("processing")));

    let shown = server.run(&["ledger", "show", "--queue", "payments", "order-7"]);
    assert!(
        shown.stderr.contains("hapax ledger resolve --as completed|absent --endpoint http://"),
        "{shown:?}"
    );
    assert!(shown.stderr.trim_end().ends_with(" 'queue/payments' 'order-7'"), "{shown:?}");
    let shown = shown.ok();
    assert!(shown.contains("state\tin_doubt") && shown.contains("owner\tw-1"), "{shown}");

    let outcome = r#"{"charge":"ch_1"}"#;
    let resolve =
        ["ledger", "resolve", "queue/payments", "order-7", "--as", "completed", "--outcome", outcome];
    assert_eq!(server.run(&resolve).ok(), "queue/payments order-7 is completed\n");
    let replayed = call(&server, "PUT", "queue%2Fpayments/order-7", &json!({"lease_ms": 1}));
    assert_eq!(replayed["outcome"], json!({"charge": "ch_1"}));
    let again = server.run(&resolve).failed(1);
    assert!(again.contains("not in doubt"), "{again}");
    let absent =
        ["ledger", "resolve", "--queue", "payments", "order-8", "--as", "absent", "--by", "ann", "--json"];
    assert_eq!(server.run(&absent).json()["state"], "absent");
    assert!(server.run(&["ledger", "show", "--queue", "payments", "order-8"]).failed(1).contains("no entry"));
    assert_eq!(server.run(&["ledger", "list", "--state", "in_doubt"]).ok(), "");
}

#[test]
fn forgetting_asks_first_and_spares_what_someone_works_on() {
    let server = Server::start();
    doubt(&server, "queue%2Fpayments/order-7");
    call(&server, "PUT", "queue%2Fpayments/order-8", &json!({"lease_ms": 60_000}));
    let asked = server.run(&["ledger", "forget", "--queue", "payments", "order-7"]).failed(2);
    assert!(asked.contains("--yes"), "{asked}");
    let forgotten = server.run(&["ledger", "forget", "--queue", "payments", "order-7", "--yes"]).ok();
    assert_eq!(forgotten, "queue/payments order-7 is forgotten\n");
    let gone = server.run(&["ledger", "forget", "--queue", "payments", "order-7", "--yes"]).failed(1);
    assert!(gone.contains("there is no entry queue/payments order-7"), "{gone}");
    let held = server.run(&["ledger", "forget", "queue/payments", "order-8", "--yes"]).failed(1);
    assert!(held.contains("being worked on"), "{held}");
}

#[test]
fn a_store_without_a_server_is_looked_after_too() {
    let server = Server::start();
    doubt(&server, "queue%2Fpayments/order-7");
    let folder = server.stop();
    let local = |args: &[&str]| {
        let endpoint = ["--endpoint", "embedded:hapax-data"];
        common::run(&folder, &[&["ledger"], args, &endpoint].concat())
    };
    assert!(local(&["list"]).ok().starts_with("queue/payments\torder-7\tin_doubt"));
    local(&["resolve", "--queue", "payments", "order-7", "--as", "completed", "--failed"]).ok();
    assert!(local(&["list"]).ok().starts_with("queue/payments\torder-7\tfailed"));
}

#[test]
fn wrong_usage_says_what_is_right() {
    let server = Server::start();
    for (args, said) in [
        (&["ledger", "show", "order-7"][..], "--queue NAME KEY"),
        (&["ledger", "show", "--queue", "payments", "a", "b"], "takes the place of SCOPE"),
        (&["ledger", "resolve", "s", "k", "--as", "absent", "--outcome", "1"], "go with --as completed"),
        (&["ledger", "resolve", "s", "k", "--as", "completed", "--outcome", "{"], "write JSON"),
    ] {
        let error = server.run(args).failed(2);
        assert!(error.contains(said), "{error}");
    }
    let state = server.run(&["ledger", "list", "--state", "lost"]);
    assert!(state.code == Some(2) && state.stderr.contains("in_doubt"), "{state:?}");
}

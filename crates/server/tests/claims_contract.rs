//! The claims API over a real socket: each status, and the exact fields of each response.

mod support;

use serde_json::{Value, json};
use support::{Api, START_MS};

const PATH: &str = "/v1/claims/charges/order-7";

async fn claim(api: &Api, body: Value) -> support::Reply {
    api.call("PUT", PATH, body).await
}

/// The token of a granted claim.
async fn token(api: &Api, body: Value) -> String {
    claim(api, body).await.expect(201)["token"].as_str().unwrap().to_owned()
}

async fn post(api: &Api, what: &str, body: Value) -> support::Reply {
    api.call("POST", &format!("{PATH}/{what}"), body).await
}

#[tokio::test]
async fn a_claim_that_is_given_has_a_token_a_fence_and_a_lease() {
    let api = Api::start().await;
    let reply = claim(&api, json!({"lease_ms": 30_000})).await;
    assert_eq!(reply.keys(), ["fence", "lease_ms", "takeover", "token"]);
    let grant = reply.expect(201);
    assert!(grant["fence"].is_u64() && grant["token"].is_string(), "{grant}");
    assert_eq!((&grant["lease_ms"], &grant["takeover"]), (&json!(30_000), &json!(false)));
}

#[tokio::test]
async fn a_duplicate_gets_what_was_recorded() {
    let api = Api::start().await;
    let token = token(&api, json!({"lease_ms": 30_000})).await;
    let outcome = json!({"charge": "ch_1", "cents": [1, 2.5, null]});
    let done = json!({"token": token, "outcome": outcome, "ttl_ms": 60_000});
    assert_eq!(post(&api, "complete", done.clone()).await.expect(200), json!({"state": "completed"}));
    api.clock.advance_ms(1_500);
    let reply = claim(&api, json!({"lease_ms": 30_000, "on_doubt": "park"})).await;
    assert_eq!(reply.keys(), ["completed_at", "outcome", "state"]);
    let completed = reply.expect(200);
    assert_eq!(completed["state"], "completed");
    assert_eq!(completed["outcome"], outcome);
    assert_eq!(completed["completed_at"], "2027-01-15T08:00:00.000Z");
    // The first response may have been lost: the same completion again is no error, a different outcome is.
    post(&api, "complete", done).await.expect(200);
    let other = post(&api, "complete", json!({"token": token, "outcome": 2})).await;
    other.problem(409, "claim-ended");
    post(&api, "renew", json!({"token": token, "lease_ms": 1})).await.problem(409, "claim-ended");
    post(&api, "release", json!({"token": token})).await.problem(409, "claim-ended");
    // The entry expires.
    api.clock.advance_ms(60_000);
    claim(&api, json!({"lease_ms": 30_000})).await.expect(201);
}

#[tokio::test]
async fn an_outcome_is_given_back_as_it_was_written() {
    let api = Api::start().await;
    let text = r#"{"big" : 123456789012345678901234567890, "small":1.10,"zero":0e5}"#;
    let token = token(&api, json!({"lease_ms": 30_000})).await;
    let body = format!(r#"{{"token": "{token}", "outcome": {text}}}"#);
    let head = format!("POST {PATH}/complete HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    let stream = tokio::net::TcpStream::connect(api.address).await.unwrap();
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    assert_eq!(support::exchange(stream, &request).await.status, 200);
    let replayed = claim(&api, json!({"lease_ms": 1})).await.text;
    assert!(replayed.contains(&format!("\"outcome\":{text}")), "{replayed}");
}

#[tokio::test]
async fn outcomes_without_a_value_or_without_success_are_marked() {
    let api = Api::start().await;
    let key = |n: usize| format!("/v1/claims/s/{n}");
    let large = "x".repeat(hapax_core::ledger::OUTCOME_BYTES_MAX);
    let bodies = [
        (json!({}), json!("completed"), json!(null), json!(null)),
        (json!({"outcome": null}), json!("completed"), json!(null), json!(null)),
        (json!({"outcome": "no", "failed": true}), json!("failed"), json!("no"), json!(null)),
        (json!({"outcome": large}), json!("completed"), json!(null), json!(large.len() + 2)),
        (json!({"omitted_bytes": 99_000_000}), json!("completed"), json!(null), json!(99_000_000)),
    ];
    for (n, (mut body, state, outcome, omitted)) in bodies.into_iter().enumerate() {
        let grant = api.call("PUT", &key(n), json!({"lease_ms": 1_000})).await.expect(201);
        body["token"] = grant["token"].clone();
        let done = api.call("POST", &format!("{}/complete", key(n)), body.clone()).await.expect(200);
        assert_eq!(done, json!({"state": state}));
        let again = api.call("PUT", &key(n), json!({"lease_ms": 1_000})).await;
        let keys = again.keys().len();
        let again = again.expect(200);
        assert_eq!((&again["state"], &again["outcome"]), (&state, &outcome), "{n}");
        assert_eq!((&again["omitted_bytes"], keys), (&omitted, 3 + usize::from(!omitted.is_null())), "{n}");
        // A repetition returns the same.
        api.call("POST", &format!("{}/complete", key(n)), body).await.expect(200);
    }
}

#[tokio::test]
async fn a_key_that_someone_holds_says_when_to_come_back() {
    let api = Api::start().await;
    token(&api, json!({"lease_ms": 30_000})).await;
    api.clock.advance_ms(9_500);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let reply = claim(&api, json!({"lease_ms": 30_000})).await;
        assert_eq!(reply.keys(), ["code", "detail", "retry_after_ms", "retryable", "state", "status"]);
        seen.insert(reply.header("retry-after").unwrap().parse::<u64>().unwrap());
        let problem = reply.expect(409);
        assert_eq!((&problem["state"], &problem["code"]), (&json!("in_progress"), &json!("in-progress")));
        assert_eq!(problem["retry_after_ms"], 20_500);
    }
    assert!(*seen.first().unwrap() >= 21 && *seen.last().unwrap() <= 26 && seen.len() > 1, "{seen:?}");
}

#[tokio::test]
async fn the_same_owner_gets_the_same_claim_again() {
    let api = Api::start().await;
    let ask = json!({"owner": "worker-1.4711", "lease_ms": 10_000});
    let first = claim(&api, ask.clone()).await.expect(201);
    api.clock.advance_ms(4_000);
    let second = claim(&api, ask.clone()).await.expect(201);
    assert_eq!((&second["token"], &second["fence"]), (&first["token"], &first["fence"]));
    claim(&api, json!({"owner": "worker-2", "lease_ms": 10_000})).await.problem(409, "in-progress");
    // A claim without an owner never counts as a repetition of an earlier one.
    claim(&api, json!({"lease_ms": 10_000})).await.problem(409, "in-progress");
}

#[tokio::test]
async fn a_lapsed_claim_is_taken_over_or_parked_and_its_token_is_stale() {
    let api = Api::start().await;
    let first = claim(&api, json!({"lease_ms": 10_000})).await.expect(201);
    api.clock.advance_ms(10_000);
    let reply = claim(&api, json!({"lease_ms": 10_000, "on_doubt": "park"})).await;
    assert_eq!(reply.keys(), ["code", "detail", "retryable", "since_ms", "state", "status"]);
    assert_eq!(reply.header("retry-after"), None, "time alone does not help");
    let parked = reply.expect(409);
    assert_eq!((&parked["state"], &parked["since_ms"]), (&json!("in_doubt"), &json!(START_MS + 10_000)));

    let second = claim(&api, json!({"lease_ms": 10_000})).await.expect(201);
    assert_eq!(second["takeover"], true);
    assert!(second["fence"].as_u64() > first["fence"].as_u64());
    let stale = &first["token"];
    post(&api, "complete", json!({"token": stale, "outcome": 1})).await.problem(409, "stale-token");
    post(&api, "renew", json!({"token": stale, "lease_ms": 1_000})).await.problem(409, "stale-token");
    post(&api, "release", json!({"token": stale})).await.problem(409, "stale-token");
    post(&api, "release", json!({"token": stale, "in_doubt": true})).await.problem(409, "stale-token");
    post(&api, "complete", json!({"token": second["token"], "outcome": 2})).await.expect(200);
    assert_eq!(claim(&api, json!({"lease_ms": 1})).await.expect(200)["outcome"], 2);
}

#[tokio::test]
async fn a_late_completion_counts_if_the_claim_was_not_taken_over() {
    let api = Api::start().await;
    let token = token(&api, json!({"lease_ms": 1_000, "on_doubt": "park"})).await;
    api.clock.advance_ms(60_000);
    post(&api, "complete", json!({"token": token, "outcome": "late"})).await.expect(200);
    assert_eq!(claim(&api, json!({"lease_ms": 1})).await.expect(200)["outcome"], "late");
}

#[tokio::test]
async fn another_request_under_the_same_key_is_a_mismatch_in_every_state() {
    let api = Api::start().await;
    let ask = |print: &str| json!({"fingerprint": print, "lease_ms": 1_000});
    let token = token(&api, ask("a")).await;
    claim(&api, ask("b")).await.problem(422, "fingerprint-mismatch");
    api.clock.advance_ms(1_000);
    claim(&api, ask("b")).await.problem(422, "fingerprint-mismatch");
    post(&api, "complete", json!({"token": token})).await.expect(200);
    claim(&api, ask("b")).await.problem(422, "fingerprint-mismatch");
    claim(&api, json!({"lease_ms": 1})).await.problem(422, "fingerprint-mismatch");
    claim(&api, ask("a")).await.expect(200);
}

#[tokio::test]
async fn a_renewal_answers_what_is_left_and_a_release_frees_the_key() {
    let api = Api::start().await;
    let first = token(&api, json!({"lease_ms": 1_000})).await;
    api.clock.advance_ms(900);
    let renewed = post(&api, "renew", json!({"token": first, "lease_ms": 5_000})).await.expect(200);
    assert_eq!(renewed, json!({"lease_ms": 5_000}));
    api.clock.advance_ms(4_000);
    claim(&api, json!({"lease_ms": 1_000})).await.problem(409, "in-progress");
    assert_eq!(post(&api, "release", json!({"token": first})).await.expect(200), json!({"state": "absent"}));
    post(&api, "complete", json!({"token": first})).await.problem(409, "claim-gone");
    let second = claim(&api, json!({"lease_ms": 1_000})).await.expect(201);
    assert_eq!(second["takeover"], false, "nothing had happened");
    let doubt = json!({"token": second["token"], "in_doubt": true});
    assert_eq!(post(&api, "release", doubt).await.expect(200), json!({"state": "in_doubt"}));
    claim(&api, json!({"lease_ms": 1_000, "on_doubt": "park"})).await.problem(409, "in-doubt");
    assert_eq!(claim(&api, json!({"lease_ms": 1_000})).await.expect(201)["takeover"], true);
}

#[tokio::test]
async fn an_unknown_token_is_stale() {
    let api = Api::start().await;
    token(&api, json!({"lease_ms": 1_000})).await;
    for garbage in ["", "x", "gr\u{fc}n", "a b", &"t".repeat(300), "t1", "AAAA"] {
        for (what, body) in [
            ("complete", json!({"token": garbage})),
            ("renew", json!({"token": garbage, "lease_ms": 1_000})),
            ("release", json!({"token": garbage})),
        ] {
            post(&api, what, body).await.problem(409, "stale-token");
        }
    }
    claim(&api, json!({"lease_ms": 1_000})).await.problem(409, "in-progress");
}

#[tokio::test]
async fn operators_see_decide_and_forget() {
    let api = Api::start().await;
    let see = async || api.call("GET", PATH, Value::Null).await;
    let resolve = async |body: Value| post(&api, "resolve", body).await;
    let forget = async || api.call("DELETE", &format!("{PATH}?by=ann"), Value::Null).await;
    see().await.problem(404, "no-such-entry");
    resolve(json!({"as": "absent"})).await.problem(404, "no-such-entry");
    forget().await.problem(404, "no-such-entry");

    let token = token(&api, json!({"lease_ms": 5_000, "owner": "w", "on_doubt": "park"})).await;
    let shown = see().await;
    assert!(!shown.text.contains(&token), "a token is for its holder: {}", shown.text);
    let fields = ["claimed_ms", "ended_ms", "fence", "fingerprint", "key", "lease_ms", "outcome", "owner"];
    assert_eq!(shown.keys(), [&fields[..], &["prune_ms", "scope", "state", "takeovers"]].concat());
    let shown = shown.expect(200);
    assert_eq!(
        (&shown["state"], &shown["scope"], &shown["key"]),
        (&json!("processing"), &json!("charges"), &json!("order-7"))
    );
    let busy = resolve(json!({"as": "absent"})).await;
    assert!(busy.header("retry-after").is_some());
    assert_eq!(busy.expect(409)["state"], "in_progress");
    forget().await.problem(409, "in-progress");

    api.clock.advance_ms(5_000);
    assert_eq!(see().await.expect(200)["state"], "in_doubt");
    let decided = resolve(json!({"as": "completed", "outcome": 7, "ttl_ms": 5_000, "by": "ann"})).await;
    assert_eq!(decided.expect(200), json!({"state": "completed"}));
    assert_eq!(claim(&api, json!({"lease_ms": 1})).await.expect(200)["outcome"], 7);
    post(&api, "complete", json!({"token": token})).await.problem(409, "stale-token");
    resolve(json!({"as": "absent"})).await.problem(409, "not-in-doubt");
    assert_eq!(forget().await.expect(204), Value::Null);
    see().await.problem(404, "no-such-entry");

    claim(&api, json!({"lease_ms": 5_000})).await.expect(201);
    api.clock.advance_ms(5_000);
    assert_eq!(resolve(json!({"as": "absent"})).await.expect(200), json!({"state": "absent"}));
    assert_eq!(claim(&api, json!({"lease_ms": 1})).await.expect(201)["takeover"], false);
}

/// Duplicates of an HTTP request get a stored response, so an operator must resolve with a response.
#[tokio::test]
async fn a_doubt_about_an_http_request_is_resolved_with_a_response() {
    let api = Api::start().await;
    let path = "/v1/claims/http%2Fshop%2Fanyone%2FPOST%20%2Forders/order-7";
    api.call("PUT", path, json!({"lease_ms": 5_000, "on_doubt": "park"})).await.expect(201);
    api.clock.advance_ms(5_000);
    let resolve = async |body: Value| api.call("POST", &format!("{path}/resolve"), body).await;
    for refused in [json!({"as": "completed"}), json!({"as": "completed", "outcome": {"status": 201}})] {
        let detail = resolve(refused).await.problem(400, "invalid");
        assert!(detail.contains("http_response"), "{detail}");
    }
    let answer = json!({"http_response": {"status": 201, "body": {"json": {"charge": "ch_1"}}}});
    resolve(json!({"as": "completed", "outcome": answer})).await.expect(200);
}

#[tokio::test]
async fn entries_are_listed_by_scope_and_state_page_by_page() {
    let api = Api::start().await;
    for n in 0..5 {
        let path = format!("/v1/claims/{}/k{n}", if n == 4 { "other" } else { "charges" });
        let grant = api.call("PUT", &path, json!({"lease_ms": 1_000 + n})).await.expect(201);
        if n == 0 {
            api.call("POST", &format!("{path}/complete"), json!({"token": grant["token"]})).await.expect(200);
        }
        api.clock.advance_ms(1);
    }
    let list =
        async |query: &str| api.call("GET", &format!("/v1/claims?{query}"), Value::Null).await.expect(200);
    let keys = |page: &Value| -> Vec<String> {
        let entries = page["entries"].as_array().unwrap();
        entries.iter().map(|entry| entry["key"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(keys(&list("").await), ["k0", "k1", "k2", "k3", "k4"]);
    assert_eq!(keys(&list("scope=other").await), ["k4"]);
    assert_eq!(keys(&list("state=completed").await), ["k0"]);
    assert_eq!(keys(&list("state=processing&scope=charges").await), ["k1", "k2", "k3"]);
    let first = list("scope=charges&limit=3").await;
    assert_eq!(keys(&first), ["k0", "k1", "k2"]);
    let second = list(&format!("scope=charges&limit=3&after={}", first["next"])).await;
    assert_eq!((keys(&second), second.get("next")), (vec!["k3".to_owned()], None));
    api.clock.advance_ms(2_000);
    assert_eq!(keys(&list("state=in_doubt").await), ["k1", "k2", "k3", "k4"]);
    let ledger = api.call("GET", "/v1/ledger", Value::Null).await.expect(200);
    assert_eq!((&ledger["stats"]["entries"], &ledger["stats"]["granted"]), (&json!(5), &json!(5)));
    assert_eq!(ledger["capabilities"]["durable"], true);
}

#[tokio::test]
async fn a_scope_and_a_key_may_hold_anything_but_control_characters() {
    let api = Api::start().await;
    let path = "/v1/claims/tenant%2F%C3%A4%3F/a%2Fb%20c%23%25";
    let grant = api.call("PUT", path, json!({"lease_ms": 1_000})).await.expect(201);
    let shown = api.call("GET", path, Value::Null).await.expect(200);
    assert_eq!((&shown["scope"], &shown["key"]), (&json!("tenant/ä?"), &json!("a/b c#%")));
    let done = json!({"token": grant["token"], "outcome": "x"});
    api.call("POST", &format!("{path}/complete"), done).await.expect(200);
    let listed = api.call("GET", "/v1/claims?scope=tenant%2F%C3%A4%3F", Value::Null).await.expect(200);
    assert_eq!(listed["entries"][0]["key"], "a/b c#%");
    // An unencoded slash makes a different path.
    api.call("PUT", "/v1/claims/tenant/a/b", json!({"lease_ms": 1})).await.problem(404, "no-such-path");

    let long = "k".repeat(256);
    for (path, rule) in [
        (format!("/v1/claims/s/{long}"), "1 to 255 bytes"),
        (format!("/v1/claims/{long}/k"), "1 to 255 bytes"),
        ("/v1/claims/s/a%0Ab".to_owned(), "without control characters"),
        ("/v1/claims/a%00b/k".to_owned(), "without control characters"),
        ("/v1/claims/s/%FF".to_owned(), "UTF-8"),
    ] {
        let detail = api.call("PUT", &path, json!({"lease_ms": 1})).await.problem(400, "invalid");
        assert!(detail.contains(rule), "{path}: {detail}");
    }
    api.call("PUT", &format!("/v1/claims/s/{}", "k".repeat(255)), json!({"lease_ms": 1})).await.expect(201);
}

#[tokio::test]
async fn values_out_of_range_and_unknown_fields_are_refused_by_name() {
    let api = Api::start().await;
    let held = token(&api, json!({"lease_ms": 5_000})).await;
    for (what, body, named) in [
        ("", json!({}), "lease_ms"),
        ("", json!({"lease_ms": 0}), "lease_ms"),
        ("", json!({"lease_ms": 43_200_001}), "lease_ms"),
        ("", json!({"lease_ms": 1, "wait_ms": 20_001}), "wait_ms"),
        ("", json!({"lease_ms": -1}), "invalid value"),
        ("", json!({"lease_ms": 1, "on_doubt": "prak"}), "did you mean `park`?"),
        ("", json!({"lease": 1}), "did you mean `lease_ms`?"),
        ("", json!({"lease_ms": 1, "owner": "a b"}), "owner"),
        ("", json!({"lease_ms": 1, "fingerprint": ""}), "fingerprint"),
        ("", json!({"lease_ms": 1, "queue": "jobs"}), "receipt"),
        ("", json!({"lease_ms": 1, "queue": "jo bs", "receipt": "r"}), "queue name"),
        ("/complete", json!({"outcome": 1}), "token"),
        ("/complete", json!({"token": held, "ttl_ms": 999}), "ttl_ms"),
        ("/complete", json!({"token": held, "ttl_ms": 31_622_400_001_u64}), "ttl_ms"),
        ("/complete", json!({"token": held, "outcome": 1, "omitted_bytes": 1}), "omitted_bytes"),
        ("/complete", json!({"token": held, "outcom": 1}), "did you mean `outcome`?"),
        ("/renew", json!({"token": held, "lease_ms": 0}), "lease_ms"),
        ("/renew", json!({"token": held, "lease_ms": 43_200_001}), "lease_ms"),
        ("/release", json!({"token": held, "indoubt": true}), "did you mean `in_doubt`?"),
        ("/resolve", json!({"as": "done"}), "unknown variant"),
        ("/resolve", json!({"as": "absent", "outcome": 1}), "absent"),
    ] {
        let method = if what.is_empty() { "PUT" } else { "POST" };
        let detail = api.call(method, &format!("{PATH}{what}"), body.clone()).await.problem(400, "invalid");
        assert!(detail.contains(named), "{what} {body}: {detail}");
    }
    for query in ["limit=0", "limit=1001", "state=lost", "scoop=a", "after=x"] {
        api.call("GET", &format!("/v1/claims?{query}"), Value::Null).await.problem(400, "invalid");
    }
    // None of these requests had an effect.
    post(&api, "complete", json!({"token": held, "outcome": 1})).await.expect(200);
}

#[tokio::test]
async fn a_wrong_method_is_told_the_right_ones() {
    let api = Api::start().await;
    for (method, path, allowed) in [
        ("POST", PATH, "put"),
        ("PATCH", PATH, "get"),
        ("GET", &format!("{PATH}/complete") as &str, "post"),
        ("PUT", &format!("{PATH}/renew"), "post"),
        ("DELETE", &format!("{PATH}/release"), "post"),
        ("GET", &format!("{PATH}/resolve"), "post"),
        ("DELETE", "/v1/claims", "get"),
        ("PUT", "/v1/claims", "post"),
        ("GET", "/v1/claims/renew", "post"),
        ("DELETE", "/v1/ledger", "get"),
    ] {
        let reply = api.call(method, path, Value::Null).await;
        assert!(reply.header("allow").is_some_and(|allow| allow.contains(allowed)), "{reply:?}");
        reply.problem(405, "method-not-allowed");
    }
}

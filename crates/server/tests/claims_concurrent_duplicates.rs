//! Fifty concurrent duplicates over HTTP: one of them may act, the others wait and get its outcome.

mod support;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use support::Api;

const PATH: &str = "/v1/claims/charges/order-7";

fn all(api: &Arc<Api>, ask: &Value) -> Vec<tokio::task::JoinHandle<support::Reply>> {
    let ask = |_| {
        let (api, ask) = (api.clone(), ask.clone());
        tokio::spawn(async move { api.call("PUT", PATH, ask).await })
    };
    (0..50).map(ask).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_duplicates_cause_one_effect_and_get_equal_responses() {
    let api = Arc::new(Api::start().await);
    let asked = all(&api, &json!({"lease_ms": 60_000, "wait_ms": 20_000}));
    // One claim is answered; the others wait at the store. A claim counts as waiting until it is answered.
    let answered = async {
        while !asked.iter().any(tokio::task::JoinHandle::is_finished) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(50), answered).await.expect("one is answered");
    api.waiting(49).await;
    let mut token = None;
    let mut waiting = Vec::new();
    for reply in asked {
        if reply.is_finished() {
            let grant = reply.await.unwrap().expect(201);
            assert!(token.replace(grant["token"].clone()).is_none(), "two may act");
        } else {
            waiting.push(reply);
        }
    }
    let done = json!({"token": token.expect("one may act"), "outcome": {"charge": "ch_1"}});
    api.call("POST", &format!("{PATH}/complete"), done).await.expect(200);
    assert_eq!(waiting.len(), 49);
    let mut answers = std::collections::BTreeSet::new();
    for reply in waiting {
        let reply = reply.await.unwrap();
        answers.insert(reply.text.clone());
        assert_eq!(reply.expect(200)["outcome"], json!({"charge": "ch_1"}));
    }
    assert_eq!(answers.len(), 1, "equal answers: {answers:?}");
    let stats = api.call("GET", "/v1/ledger", Value::Null).await.expect(200)["stats"].clone();
    assert_eq!((&stats["granted"], &stats["completed"]), (&json!(1), &json!(1)), "{stats}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_wait_one_may_act_and_the_others_are_told_at_once() {
    let api = Arc::new(Api::start().await);
    let mut statuses = Vec::new();
    for reply in all(&api, &json!({"lease_ms": 60_000})) {
        statuses.push(reply.await.unwrap().status);
    }
    statuses.sort_unstable();
    assert_eq!(statuses[..2], [201, 409]);
    assert!(statuses[1..].iter().all(|status| *status == 409), "{statuses:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_holder_gives_up_one_of_those_who_wait_may_act() {
    let api = Arc::new(Api::start().await);
    let first = api.call("PUT", PATH, json!({"lease_ms": 60_000})).await.expect(201);
    let asked = all(&api, &json!({"lease_ms": 60_000, "wait_ms": 20_000}));
    api.waiting(50).await;
    api.call("POST", &format!("{PATH}/release"), json!({"token": first["token"]})).await.expect(200);
    api.waiting(49).await;
    api.clock.advance_ms(20_000);
    let (mut granted, mut told) = (0, 0);
    for reply in asked {
        match reply.await.unwrap().status {
            201 => granted += 1,
            409 => told += 1,
            status => panic!("{status}"),
        }
    }
    assert_eq!((granted, told), (1, 49));
}

#[tokio::test]
async fn a_server_that_goes_answers_claims_that_wait() {
    let api = Api::start().await;
    api.call("PUT", PATH, json!({"lease_ms": 60_000})).await.expect(201);
    let stop = async {
        api.waiting(1).await;
        api.stop();
    };
    let ask = api.call("PUT", PATH, json!({"lease_ms": 60_000, "wait_ms": 20_000}));
    let (reply, ()) = tokio::join!(ask, stop);
    assert_eq!(reply.expect(409)["retry_after_ms"], 60_000);
}

//! Point 11: an outcome is returned as recorded, including failures; an effect whose outcome is too large never runs
//! again.

use hapax_core::ledger::OUTCOME_BYTES_MAX;
use hapax_core::{ClaimRequest, EntryState, Json, OnDoubt, RecordedOutcome, TokenError};

use crate::ledger_trial::{ask, complete, done, failed, id, json, parking, replayed};
use crate::trial::Trial;

pub(crate) async fn a_final_failure_is_replayed(t: Trial) {
    let order = id("order-7");
    t.completed(&order, &failed("card refused")).await;
    assert_eq!(t.state(&order).await, Some(EntryState::Failed));
    for on_doubt in [OnDoubt::Retry, OnDoubt::Park] {
        let claim = t.claim(ClaimRequest { on_doubt, ..ask(&order, "other") }).await;
        assert_eq!(replayed(&claim), Some(&failed("card refused")));
    }
}

pub(crate) async fn an_outcome_comes_back_byte_for_byte(mut t: Trial) {
    let texts = [
        "null",
        "0",
        "\"\"",
        "{}",
        "12345678901234567890123456789",
        "1.0",
        "1e400",
        "{\"b\":1,\"a\":2,\"b\":3}",
        " { \"spaces\" :\t[ 1 , 2 ]\n} ",
        "\"\\u00e4 ä \\ud83d\\ude00 😀 \\u0000\"",
        "\"ἅπαξ לפעם אחת 一度\"",
        "[[[[[[[[[[]]]]]]]]]]",
    ];
    for (n, text) in texts.iter().enumerate() {
        t.completed(&id(&n.to_string()), &RecordedOutcome::done(Json::parse(text).expect("JSON"))).await;
    }
    for after_crash in [false, true] {
        if after_crash {
            if !t.ledger().ledger_capabilities().durable {
                break;
            }
            t.crash().await;
        }
        for (n, text) in texts.iter().enumerate() {
            let claim = t.claim(ask(&id(&n.to_string()), "other")).await;
            let value = replayed(&claim).and_then(|outcome| outcome.value.clone());
            // A protocol may trim white space around the value.
            assert_eq!(value.map(|json| json.as_str().trim().to_owned()).as_deref(), Some(text.trim()));
        }
    }
}

/// A JSON text of exactly this many bytes, not all of them ASCII.
fn sized(bytes: usize) -> Json {
    let text = format!("ä{}", "x".repeat(bytes - 4));
    let json = json(&text);
    assert_eq!(json.as_str().len(), bytes);
    json
}

pub(crate) async fn an_outcome_at_the_limit_is_kept_whole(t: Trial) {
    let order = id("order-7");
    let outcome = RecordedOutcome::done(sized(OUTCOME_BYTES_MAX));
    let grant = t.completed(&order, &outcome).await;
    assert_eq!(replayed(&t.claim(ask(&order, "other")).await), Some(&outcome));
    assert_eq!(t.entry(&order).await.expect("an entry").outcome, Some(outcome.clone()));
    t.end(&order, &grant.token, complete(&outcome)).await.expect("the same again");
}

pub(crate) async fn of_an_oversize_outcome_a_marker_is_kept_and_it_never_runs_again(mut t: Trial) {
    for (key, outcome) in [
        ("paid", RecordedOutcome::done(sized(OUTCOME_BYTES_MAX + 1))),
        ("refused", RecordedOutcome::failed(sized(2 * OUTCOME_BYTES_MAX))),
    ] {
        let order = id(key);
        let bytes = outcome.value.as_ref().map(|json| json.as_str().len() as u64);
        let marker = RecordedOutcome { failed: outcome.failed, value: None, omitted_bytes: bytes };
        let grant = t.completed(&order, &outcome).await;
        t.end(&order, &grant.token, complete(&outcome)).await.expect("the same again");
        if t.ledger().ledger_capabilities().durable {
            t.crash().await;
        }
        for claim in [t.claim(ask(&order, "other")).await, t.claim(parking(&order, "worker")).await] {
            assert_eq!(replayed(&claim), Some(&marker));
        }
        assert_eq!(t.entry(&order).await.expect("an entry").outcome, Some(marker));
    }
}

pub(crate) async fn an_oversize_outcome_cannot_be_changed_to_another_one(t: Trial) {
    let order = id("order-7");
    let grant = t.completed(&order, &RecordedOutcome::done(sized(OUTCOME_BYTES_MAX + 1))).await;
    let before = t.entry(&order).await;
    for other in [
        RecordedOutcome::done(sized(OUTCOME_BYTES_MAX + 2)),
        RecordedOutcome { failed: false, value: None, omitted_bytes: None },
    ] {
        assert_eq!(t.end(&order, &grant.token, complete(&other)).await, Err(TokenError::Ended));
    }
    assert_eq!(t.entry(&order).await, before);
}

pub(crate) async fn an_outcome_without_a_value_is_an_outcome(t: Trial) {
    let order = id("order-7");
    let outcome = RecordedOutcome { failed: false, value: None, omitted_bytes: None };
    t.completed(&order, &outcome).await;
    assert_eq!(replayed(&t.claim(ask(&order, "other")).await), Some(&outcome));
    assert_ne!(replayed(&t.claim(ask(&order, "other")).await), Some(&done("")));
}

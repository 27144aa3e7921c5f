//! Point 10: a key is valid only within its scope.

use hapax_core::{EntryFilter, EntryId, EntryState, IdempotencyKey, Scope};

use crate::ledger_trial::{ask, complete, done, id, replayed};
use crate::trial::Trial;

fn entry(scope: &str, key: &str) -> EntryId {
    EntryId::new(Scope::new(scope).unwrap(), IdempotencyKey::new(key).unwrap())
}

pub(crate) async fn the_same_key_in_another_scope_is_another_entry(t: Trial) {
    let (ann, bob) = (entry("tenant/ann", "order-7"), entry("tenant/bob", "order-7"));
    t.completed(&ann, &done("for ann")).await;
    let grant = t.grant(ask(&bob, "worker")).await;
    assert!(t.end(&ann, &grant.token, complete(&done("no"))).await.is_err(), "a token of one scope only");
    t.end(&bob, &grant.token, complete(&done("for bob"))).await.unwrap();
    assert_eq!(replayed(&t.claim(ask(&ann, "other")).await), Some(&done("for ann")));
    assert_eq!(replayed(&t.claim(ask(&bob, "other")).await), Some(&done("for bob")));
    t.forget(&ann).await.unwrap();
    assert_eq!((t.state(&ann).await, t.state(&bob).await), (None, Some(EntryState::Completed)));
}

pub(crate) async fn scope_and_key_do_not_run_into_each_other(t: Trial) {
    let all =
        [("ab", "c"), ("a", "bc"), ("abc", "x"), ("a b", "c"), ("a", "b c"), ("a/b", "c"), ("a", "b/c")];
    for (scope, key) in all {
        let entry = entry(scope, key);
        t.completed(&entry, &done(&format!("{scope}+{key}"))).await;
    }
    for (scope, key) in all {
        let claim = t.claim(ask(&entry(scope, key), "other")).await;
        assert_eq!(replayed(&claim), Some(&done(&format!("{scope}+{key}"))));
    }
    assert_eq!(t.entries(EntryFilter { limit: 100, ..EntryFilter::default() }).await.len(), all.len());
}

pub(crate) async fn names_of_any_form_are_told_apart(t: Trial) {
    let long = "k".repeat(255);
    let all = [
        ("queue/jobs", "ключ-7"),
        ("queue/jobs", "a b?c=d&e#f%20"),
        ("queue/jobs", "a b?c=d&e#f 0"),
        ("queue/jobs", "../x"),
        ("queue/jobs", "x'; DROP TABLE entries; --"),
        ("queue/jobs", "\"{}[]\\"),
        ("queue/jobs", long.as_str()),
        (long.as_str(), long.as_str()),
        ("tenant ä/route /v1/pay", "1"),
        ("queue/jobs", "Order"),
        ("queue/jobs", "order"),
    ];
    for (n, (scope, key)) in all.iter().enumerate() {
        t.completed(&entry(scope, key), &done(&n.to_string())).await;
    }
    for (n, (scope, key)) in all.iter().enumerate() {
        let view = t.entry(&entry(scope, key)).await.expect("an entry");
        assert_eq!((&view.id, view.outcome), (&entry(scope, key), Some(done(&n.to_string()))));
    }
    assert_eq!(t.entry(&id("order")).await, None, "another scope");
}

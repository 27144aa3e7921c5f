//! What the embedded store does about claims beyond the conformance suite.

#[path = "common/ledger.rs"]
mod ledger;

use hapax_core::{ClaimEnding, Ledger, Resolution, ResolveError};
use ledger::*;

#[tokio::test]
async fn a_claim_whose_caller_went_away_is_not_given() {
    let rig = Rig::new();
    let first = rig.granted(by("a", "k")).await;
    let waiting = {
        let store = rig.store.clone();
        let request = hapax_core::ClaimRequest { wait_ms: 20_000, ..by("gone", "k") };
        tokio::spawn(async move { store.claim(vec![request]).await })
    };
    while rig.store.ledger_stats().await.unwrap().conflicts < 1 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    rig.end(ending(&id("k"), &first, ClaimEnding::Release)).await.unwrap();
    assert_eq!(rig.store.entry(&id("k")).await.unwrap(), None);
}

#[tokio::test]
async fn decisions_are_audited() {
    let rig = Rig::new();
    for (name, end) in [("lapsed", ClaimEnding::Doubt), ("done", complete("done"))] {
        let grant = rig.granted(by("a", name)).await;
        rig.end(ending(&id(name), &grant, end)).await.unwrap();
    }
    // What is refused leaves no trace.
    let refused = rig.store.resolve(&id("done"), Resolution::Absent, "eva").await;
    assert_eq!(refused, Err(ResolveError::NotInDoubt));
    rig.store.resolve(&id("lapsed"), Resolution::Absent, "eva").await.unwrap();
    rig.store.forget(&id("done"), "eva").await.unwrap();
    let audited: Vec<String> = {
        let db = rig.db();
        let mut rows = db.prepare("SELECT by || ' ' || what FROM audit").unwrap();
        rows.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    assert_eq!(
        audited,
        [
            "eva resolved the ledger's entry api/orders lapsed as absent",
            "eva forgot the ledger's entry api/orders done"
        ]
    );
}

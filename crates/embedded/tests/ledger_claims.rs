//! A claim is given to one, is durable, and ends once.

#[path = "common/ledger.rs"]
mod ledger;

use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, Ending, EntryFilter, EntryState, Fingerprint, How, Ledger, NewMessage, OnDoubt,
    QueueAdmin, QueueConfig, QueueName, QueueStore, Receive, Renew, Resolution, ResolveError, Settle,
    SettleError, Settled, TokenError,
};
use ledger::*;

#[tokio::test]
async fn one_of_fifty_concurrent_duplicates_is_granted_and_the_rest_get_its_outcome() {
    let rig = Rig::new();
    let waiting = (0..50).map(|number| {
        let store = rig.store.clone();
        let mut request = by(&format!("owner-{number}"), "k");
        request.wait_ms = 20_000;
        tokio::spawn(async move {
            match store.claim(vec![request]).await.unwrap().remove(0).unwrap() {
                Claim::Granted(grant) => {
                    let end = ending(&id("k"), &grant, complete("done"));
                    store.end(vec![end]).await.unwrap().remove(0).unwrap();
                    None
                }
                Claim::Completed { outcome, .. } => Some(outcome),
                other => panic!("{other:?}"),
            }
        })
    });
    let mut ran = 0;
    for waiting in waiting.collect::<Vec<_>>() {
        let outcome_seen = tokio::time::timeout(Duration::from_secs(30), waiting).await.unwrap().unwrap();
        match outcome_seen {
            None => ran += 1,
            Some(seen) => assert_eq!(seen, outcome("done")),
        }
    }
    assert_eq!(ran, 1);
    let stats = rig.store.ledger_stats().await.unwrap();
    assert_eq!((stats.granted, stats.replayed, stats.completed, stats.entries, stats.open), (1, 49, 1, 1, 0));
}

#[tokio::test]
async fn a_batch_grants_a_key_once() {
    let rig = Rig::new();
    let batch = vec![by("a", "k"), by("b", "k"), by("c", "other")];
    let claims = rig.store.claim(batch).await.unwrap();
    assert!(matches!(claims[0], Ok(Claim::Granted(_))));
    assert!(matches!(claims[1], Ok(Claim::InProgress { retry_after_ms: LEASE_MS })));
    assert!(matches!(claims[2], Ok(Claim::Granted(_))));
}

#[tokio::test]
async fn the_ledger_survives_a_restart_and_gives_open_claims_a_full_lease() {
    let mut rig = Rig::new();
    let held = rig.granted(by("a", "held")).await;
    let done = rig.granted(by("a", "done")).await;
    rig.end(ending(&id("done"), &done, complete("yes"))).await.unwrap();
    rig.clock.advance_ms(LEASE_MS - 1);
    rig.reopen();
    let claim = rig.claim(by("b", "held")).await;
    assert_eq!(claim, Claim::InProgress { retry_after_ms: LEASE_MS });
    assert!(matches!(rig.claim(by("b", "done")).await, Claim::Completed { .. }));
    // The same owner asking again gets the same token, even of another process.
    let again = rig.granted(by("a", "held")).await;
    assert_eq!((again.token, again.fence), (held.token.clone(), held.fence));
    let stats = rig.store.ledger_stats().await.unwrap();
    assert_eq!((stats.entries, stats.open), (2, 1));
    rig.end(ending(&id("held"), &held, Ending::Release)).await.unwrap();
    let next = rig.granted(by("b", "held")).await;
    assert!(next.fence > done.fence && next.fence > held.fence);
}

#[tokio::test]
async fn a_lapsed_claim_passes_to_another_whose_predecessor_can_do_nothing_more() {
    let rig = Rig::new();
    let first = rig.granted(by("a", "k")).await;
    rig.clock.advance_ms(LEASE_MS);
    assert!(matches!(rig.claim(parking(by("b", "k"))).await, Claim::InDoubt { .. }));
    let second = rig.granted(by("b", "k")).await;
    assert!(second.takeover && second.fence > first.fence);
    for stale in [complete("late"), Ending::Release, Ending::Doubt] {
        assert_eq!(rig.end(ending(&id("k"), &first, stale)).await, Err(TokenError::Stale));
    }
    let renew = Renew { id: id("k"), token: first.token.clone(), lease_ms: LEASE_MS };
    assert_eq!(rig.store.renew(vec![renew]).await.unwrap(), [Err(TokenError::Stale)]);
    // A token means nothing for another key.
    assert_eq!(rig.end(ending(&id("other"), &second, Ending::Release)).await, Err(TokenError::Stale));
    rig.end(ending(&id("k"), &second, complete("second"))).await.unwrap();
    rig.end(ending(&id("k"), &second, complete("second"))).await.unwrap();
    let changed = rig.end(ending(&id("k"), &second, complete("changed"))).await;
    assert_eq!(changed, Err(TokenError::Ended));
    assert_eq!(rig.store.ledger_stats().await.unwrap().stale, 5);
}

#[tokio::test]
async fn a_fingerprint_that_differs_is_refused_in_every_state() {
    let rig = Rig::new();
    let with = |owner: &str, print: &str| {
        let fingerprint = Some(Fingerprint::new(print).unwrap());
        hapax_core::ClaimRequest { fingerprint, ..by(owner, "k") }
    };
    let grant = rig.granted(with("a", "x")).await;
    let other = async || rig.store.claim(vec![with("b", "y")]).await.unwrap().remove(0);
    assert_eq!(other().await, Err(ClaimError::Mismatch));
    rig.end(ending(&id("k"), &grant, complete("done"))).await.unwrap();
    assert_eq!(other().await, Err(ClaimError::Mismatch));
    assert!(matches!(rig.claim(with("b", "x")).await, Claim::Completed { .. }));
}

#[tokio::test]
async fn a_waiting_claim_wakes_when_the_lease_ends_and_when_its_wait_is_over() {
    let rig = Rig::new();
    rig.granted(by("a", "k")).await;
    let wait = |owner: &str, wait_ms: u64| {
        let (store, request) = (rig.store.clone(), hapax_core::ClaimRequest { wait_ms, ..by(owner, "k") });
        tokio::spawn(async move { store.claim(vec![request]).await.unwrap().remove(0).unwrap() })
    };
    let (short, long) = (wait("short", 5_000), wait("long", 20_000));
    while rig.store.ledger_stats().await.unwrap().conflicts < 2 {
        tokio::task::yield_now().await;
    }
    rig.clock.advance_ms(5_000);
    let bound = Duration::from_secs(30);
    let short = tokio::time::timeout(bound, short).await.unwrap().unwrap();
    assert_eq!(short, Claim::InProgress { retry_after_ms: LEASE_MS - 5_000 });
    // Held for 15 s more than it waits: only its own deadline wakes it.
    rig.clock.advance_ms(15_000);
    let long = tokio::time::timeout(bound, long).await.unwrap().unwrap();
    assert_eq!(long, Claim::InProgress { retry_after_ms: LEASE_MS - 20_000 });
    let heir = wait("heir", 20_000);
    while rig.store.ledger_stats().await.unwrap().conflicts < 3 {
        tokio::task::yield_now().await;
    }
    rig.clock.advance_ms(LEASE_MS - 20_000);
    let heir = tokio::time::timeout(bound, heir).await.unwrap().unwrap();
    assert!(matches!(heir, Claim::Granted(grant) if grant.takeover));
}

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
    rig.end(ending(&id("k"), &first, Ending::Release)).await.unwrap();
    assert_eq!(rig.store.entry(&id("k")).await.unwrap(), None);
}

async fn delivery(rig: &Rig) -> (QueueName, hapax_core::Delivery) {
    let queue = QueueName::new("jobs").unwrap();
    rig.store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    rig.send(&queue, NewMessage::new("x")).await;
    let delivery = rig.receive(&queue).await.unwrap();
    (queue, delivery)
}

#[tokio::test]
async fn a_settle_ends_the_claim_too() {
    let rig = Rig::new();
    let (queue, delivery) = delivery(&rig).await;
    let grant = rig.granted(by("a", "k")).await;
    let claim = Some(ending(&id("k"), &grant, complete("done")));
    let settle = Settle { receipt: delivery.receipt, how: How::Ack, claim };
    assert_eq!(rig.store.settle(&queue, vec![settle.clone()]).await.unwrap(), [Ok(Settled::Acked)]);
    assert!(matches!(rig.claim(by("b", "k")).await, Claim::Completed { .. }));
    // Repeated after a lost answer: the completion is the same, the message is gone.
    assert_eq!(rig.store.settle(&queue, vec![settle]).await.unwrap(), [Err(SettleError::Gone)]);
}

#[tokio::test]
async fn a_stale_token_blocks_the_settle_and_a_stale_receipt_does_not_block_the_completion() {
    let rig = Rig::new();
    let (queue, delivery) = delivery(&rig).await;
    let lost = rig.granted(by("a", "k")).await;
    rig.clock.advance_ms(LEASE_MS);
    let taken = rig.granted(by("b", "k")).await;
    let settle = |grant, receipt| Settle {
        receipt,
        how: How::Ack,
        claim: Some(ending(&id("k"), grant, complete("x"))),
    };
    let stale = rig.store.settle(&queue, vec![settle(&lost, delivery.receipt.clone())]).await.unwrap();
    assert_eq!(stale, [Err(SettleError::Claim(TokenError::Stale))]);
    let again = rig.store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
    assert_eq!(again.attempt, 2, "the message is still there");
    let gone = rig.store.settle(&queue, vec![settle(&taken, delivery.receipt)]).await.unwrap();
    assert_eq!(gone, [Err(SettleError::Stale)]);
    assert!(matches!(rig.claim(by("c", "k")).await, Claim::Completed { .. }));
    assert_eq!(rig.store.stats(&queue).await.unwrap().in_flight, 1);
}

#[tokio::test]
async fn operators_see_decide_and_forget() {
    let rig = Rig::new();
    for (name, on_doubt) in [("held", OnDoubt::Retry), ("lapsed", OnDoubt::Park), ("done", OnDoubt::Retry)] {
        let grant = rig.granted(hapax_core::ClaimRequest { on_doubt, ..by("a", name) }).await;
        match name {
            "done" => rig.end(ending(&id(name), &grant, complete("done"))).await.unwrap(),
            "lapsed" => rig.end(ending(&id(name), &grant, Ending::Doubt)).await.unwrap(),
            _ => {}
        }
    }
    let list = async |state: Option<EntryState>, after: Option<u64>, limit: usize| {
        let filter = EntryFilter { state, after, limit, scope: Some("api/orders".parse().unwrap()) };
        let page = rig.store.entries(filter).await.unwrap();
        let names: Vec<_> = page.items.iter().map(|view| view.id.key.to_string()).collect();
        (names, page.next)
    };
    let (names, next) = list(None, None, 2).await;
    assert_eq!(names, ["held", "lapsed"]);
    assert_eq!(list(None, next, 2).await, (vec!["done".to_owned()], None));
    assert_eq!(list(Some(EntryState::InDoubt), None, 10).await.0, ["lapsed"]);
    assert_eq!(list(Some(EntryState::Processing), None, 10).await.0, ["held"]);
    assert_eq!(list(Some(EntryState::Completed), None, 10).await.0, ["done"]);

    let absent = || Resolution::Absent;
    let resolve = async |name: &str| rig.store.resolve(&id(name), absent(), "eva").await;
    assert_eq!(resolve("held").await, Err(ResolveError::InProgress { retry_after_ms: LEASE_MS }));
    assert_eq!(resolve("done").await, Err(ResolveError::NotInDoubt));
    assert_eq!(resolve("none").await, Err(ResolveError::NotFound(id("none"))));
    assert_eq!(resolve("lapsed").await, Ok(()));
    assert_eq!(rig.store.entry(&id("lapsed")).await.unwrap(), None);
    assert_eq!(rig.store.forget(&id("done"), "eva").await, Ok(()));
    assert!(rig.store.forget(&id("held"), "eva").await.is_err());
    assert_eq!(rig.store.ledger_stats().await.unwrap().entries, 1);
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

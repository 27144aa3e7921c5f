//! Keys in doubt have a bound of their own, in each scope: an upstream that fails for long fills its own scope, and no
//! other.

#[path = "common/ledger.rs"]
mod ledger;

use hapax_core::ledger::DOUBT_RETENTION_MS;
use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EntryId, EntryState, ExportedItem, Imported, Ledger,
    NewMessage, QueueAdmin as _, QueueConfig, QueueStore as _, Resolution, Settle, Settlement, Transfer as _,
    TransferScope,
};
use ledger::{LEASE_MS, Rig, by, ending, id, key, parking};

const MAX: u64 = 10;

fn full() -> Rig {
    Rig::with_in_doubt_per_scope_max(MAX)
}

fn elsewhere(name: &str) -> ClaimRequest {
    let id = EntryId::new("api/invoices".parse().unwrap(), key(name));
    parking(ClaimRequest::new(id, "ann".parse().unwrap(), LEASE_MS))
}

async fn try_claim(rig: &Rig, request: ClaimRequest) -> Result<Claim, ClaimError> {
    rig.store.claim(vec![request]).await.unwrap().remove(0)
}

fn refused(open: u64, in_doubt: u64) -> Result<Claim, ClaimError> {
    Err(ClaimError::TooManyInDoubt { scope: id("k").scope, open, in_doubt, max: MAX })
}

/// Leaves these in doubt, half of them by a lapsed lease, half by their holder's word.
async fn doubt(rig: &Rig, keys: std::ops::Range<u64>) {
    for n in keys {
        let name = format!("k{n}");
        let grant = rig.granted(parking(by("ann", &name))).await;
        if n % 2 == 0 {
            rig.end(ending(&id(&name), &grant, ClaimEnding::Doubt)).await.unwrap();
        }
    }
    rig.clock.advance_ms(LEASE_MS);
}

#[tokio::test]
async fn a_scope_in_doubt_refuses_its_new_keys_and_no_other_scope() {
    let rig = full();
    doubt(&rig, 0..MAX).await;
    let error = try_claim(&rig, parking(by("bob", "new"))).await;
    assert_eq!(error, refused(MAX, MAX));
    let error = error.unwrap_err();
    assert!(error.is_retryable() && error.code() == "too-many-in-doubt");
    let text = error.to_string();
    assert!(
        text.contains("api/orders") && text.contains("10 are in doubt") && text.contains("resolve"),
        "{text}"
    );
    // Whatever its claimant wants done about doubt: it would be in doubt as well.
    assert_eq!(try_claim(&rig, by("bob", "new")).await, refused(MAX, MAX));
    rig.granted(elsewhere("new")).await;
    // One refused claim fails no other of its batch.
    let batch = vec![elsewhere("a"), parking(by("bob", "new")), elsewhere("b")];
    let answers = rig.store.claim(batch).await.unwrap();
    assert!(matches!(answers[..], [Ok(Claim::Granted(_)), Err(_), Ok(Claim::Granted(_))]), "{answers:?}");
    // A key that is in doubt can still be asked for, taken over and completed.
    assert!(matches!(rig.claim(parking(by("bob", "k1"))).await, Claim::InDoubt { .. }));
    let taken = rig.granted(by("bob", "k1")).await;
    assert!(taken.takeover);
    rig.end(ending(&id("k1"), &taken, ledger::complete("paid"))).await.unwrap();
    rig.granted(parking(by("bob", "new"))).await;
    assert_eq!(try_claim(&rig, parking(by("bob", "more"))).await, refused(MAX, MAX - 1));
}

#[tokio::test]
async fn a_claim_that_may_come_to_be_in_doubt_counts_before_it_is() {
    let rig = full();
    let mut grants = Vec::new();
    for n in 0..MAX {
        grants.push(rig.granted(parking(by("ann", &format!("k{n}")))).await);
    }
    assert_eq!(try_claim(&rig, parking(by("bob", "new"))).await, refused(MAX, 0));
    rig.end(ending(&id("k0"), &grants[0], ClaimEnding::Release)).await.unwrap();
    rig.granted(parking(by("bob", "new"))).await;
    rig.clock.advance_ms(LEASE_MS);
    assert_eq!(
        try_claim(&rig, parking(by("bob", "more"))).await,
        refused(MAX, MAX),
        "never more than the bound"
    );
}

#[tokio::test]
async fn the_bound_survives_a_restart_and_is_freed_by_decisions() {
    let mut rig = full();
    doubt(&rig, 0..MAX).await;
    rig.reopen();
    assert!(matches!(
        try_claim(&rig, parking(by("bob", "new"))).await,
        Err(ClaimError::TooManyInDoubt { .. })
    ));
    rig.clock.advance_ms(LEASE_MS);
    for (n, name) in ["k0", "k1", "k2"].into_iter().enumerate() {
        match n {
            0 => rig.store.resolve(&id(name), Resolution::Absent, "ann").await.unwrap(),
            1 => rig.store.forget(&id(name), "ann").await.unwrap(),
            _ => {
                let outcome = ledger::outcome("paid");
                let resolution = Resolution::Completed { outcome, ttl_ms: ledger::TTL_MS };
                rig.store.resolve(&id(name), resolution, "ann").await.unwrap();
            }
        }
        rig.granted(parking(by("bob", &format!("new{n}")))).await;
        assert!(try_claim(&rig, parking(by("bob", "more"))).await.is_err());
    }
}

#[tokio::test]
async fn what_is_pruned_is_counted_no_longer() {
    let rig = full();
    for n in 0..MAX {
        rig.granted(by("ann", &format!("k{n}"))).await;
    }
    rig.clock.advance_ms(LEASE_MS + DOUBT_RETENTION_MS - 1);
    assert_eq!(try_claim(&rig, by("bob", "new")).await, refused(MAX, MAX));
    rig.clock.advance_ms(1);
    rig.granted(by("bob", "new")).await;
}

#[tokio::test]
async fn the_alarm_comes_before_the_bound() {
    let mut rig = full();
    let found = async |rig: &Rig| {
        let findings = rig.store.examine().await.unwrap().findings;
        findings.into_iter().find(|finding| finding.code == "many-in-doubt")
    };
    doubt(&rig, 0..7).await;
    assert_eq!(found(&rig).await, None);
    doubt(&rig, 7..8).await;
    let finding = found(&rig).await.expect("8 of 10 are in doubt");
    let said = &finding.message;
    assert!(said.contains("api/orders (8)") && said.contains("at 10 "), "{said}");
    rig.reopen();
    rig.clock.advance_ms(LEASE_MS);
    assert!(found(&rig).await.is_some(), "counted again after a restart");
    rig.store.resolve(&id("k0"), Resolution::Absent, "ann").await.unwrap();
    assert_eq!(found(&rig).await, None);
}

/// A FIFO message whose claim is refused for the bound keeps its place, and goes on when there is room.
#[tokio::test]
async fn messages_parked_in_doubt_count_and_their_group_goes_on_after_the_decision() {
    let rig = Rig::with_in_doubt_per_scope_max(1);
    let config = QueueConfig { kind: hapax_core::QueueKind::Fifo, ..QueueConfig::default() };
    let queue = rig.once_queue("orders.fifo", config).await;
    for (name, group) in [("a", "g"), ("b", "h")] {
        let mut message = NewMessage::new(name);
        message.group = Some(group.parse().unwrap());
        message.dedup = Some(name.parse().unwrap());
        rig.send(&queue, message).await;
    }
    let first = rig.receive(&queue).await.unwrap();
    let of = |delivery: &hapax_core::Delivery| EntryId::of_queue(&queue, delivery.key.clone());
    let ask = |delivery: &hapax_core::Delivery, by: &str| {
        parking(ClaimRequest {
            delivery: Some((queue.clone(), delivery.receipt.clone())),
            ..ClaimRequest::new(of(delivery), by.parse().unwrap(), LEASE_MS)
        })
    };
    let grant = rig.granted(ask(&first, "ann")).await;
    let park = Settle {
        claim: Some(ending(&of(&first), &grant, ClaimEnding::Doubt)),
        ..Settle::new(first.receipt.clone(), Settlement::Park { reason: "503".into() })
    };
    rig.store.settle(&queue, vec![park]).await.unwrap().remove(0).unwrap();
    let second = rig.receive(&queue).await.unwrap();
    assert!(matches!(try_claim(&rig, ask(&second, "bob")).await, Err(ClaimError::TooManyInDoubt { .. })));
    rig.store.resolve(&of(&first), Resolution::Absent, "ann").await.unwrap();
    rig.granted(ask(&second, "bob")).await;
    assert_eq!(rig.store.entry(&of(&first)).await.unwrap(), None);
    let again = rig.receive(&queue).await.expect("the parked message goes on");
    assert_eq!(again.id, first.id);
    assert_eq!(rig.store.entry(&of(&second)).await.unwrap().unwrap().state, EntryState::Processing);
}

/// Items of a ledger with this many open claims, held and in doubt alike, and one that has ended.
async fn exported(open: u64) -> Vec<ExportedItem> {
    let source = Rig::new();
    doubt(&source, 0..open / 2).await;
    for n in open / 2..open {
        source.granted(parking(by("ann", &format!("k{n}")))).await;
    }
    let grant = source.granted(by("ann", "paid")).await;
    source.end(ending(&id("paid"), &grant, ledger::complete("paid"))).await.unwrap();
    source.store.export(&TransferScope::Ledger, None, 1_000).await.unwrap().items
}

async fn import(rig: &Rig, items: &[ExportedItem]) -> Vec<Imported> {
    let answers = rig.store.import(&TransferScope::Ledger, items.to_vec()).await.unwrap();
    answers.into_iter().map(Result::unwrap).collect()
}

/// What another store left open is kept whatever the bound is here: to refuse it would lose that it may have happened.
#[tokio::test]
async fn imported_claims_count_also_beyond_the_bound_and_after_a_restart() {
    const OPEN: u64 = MAX + 4;
    let mut rig = full();
    let items = exported(OPEN).await;
    assert_eq!(import(&rig, &items).await, vec![Imported::Added; OPEN as usize + 1]);
    for restarted in [false, true] {
        assert_eq!(import(&rig, &items).await, vec![Imported::AlreadyThere; OPEN as usize + 1]);
        let error = try_claim(&rig, parking(by("bob", "new"))).await;
        assert_eq!(error, refused(OPEN, OPEN), "restarted: {restarted}");
        let findings = rig.store.examine().await.unwrap().findings;
        let many = findings.iter().find(|finding| finding.code == "many-in-doubt").expect("it is full");
        assert!(many.message.contains("api/orders (14)"), "{}", many.message);
        assert_eq!(rig.store.ledger_stats().await.unwrap().open, OPEN);
        let other = elsewhere(if restarted { "a" } else { "b" });
        let grant = rig.granted(other.clone()).await;
        rig.end(ending(&other.id, &grant, ClaimEnding::Release)).await.unwrap();
        rig.reopen();
    }
    for n in 0..OPEN - MAX {
        rig.store.resolve(&id(&format!("k{n}")), Resolution::Absent, "ann").await.unwrap();
        let left = OPEN - n - 1;
        assert_eq!(try_claim(&rig, parking(by("bob", "new"))).await, refused(left, left));
    }
    rig.store.forget(&id("k13"), "ann").await.unwrap();
    rig.granted(parking(by("bob", "new"))).await;
    assert_eq!(try_claim(&rig, parking(by("bob", "more"))).await, refused(MAX, MAX - 1));
}

/// The import fills a scope that is nearly full of claims that are held here.
#[tokio::test]
async fn imported_claims_count_beside_those_that_are_held_here() {
    let rig = full();
    for n in 0..4 {
        rig.granted(parking(by("bob", &format!("own{n}")))).await;
    }
    import(&rig, &exported(8).await).await;
    assert_eq!(try_claim(&rig, parking(by("bob", "new"))).await, refused(12, 8));
    // What is open already can be asked for, renewed and taken over.
    assert!(rig.granted(by("bob", "k0")).await.takeover);
    assert_eq!(try_claim(&rig, parking(by("bob", "new"))).await, refused(12, 7));
    rig.clock.advance_ms(LEASE_MS);
    assert_eq!(try_claim(&rig, parking(by("bob", "new"))).await, refused(12, 12));
}

//! A damaged entry is never treated as absent: its effect might happen again.

#[path = "common/ledger.rs"]
mod ledger;

use hapax_core::{
    Batch, Claim, ClaimEnding, ClaimError, EndClaim, EntryFilter, Ledger, NewMessage, QueueAdmin,
    QueueConfig, QueueStore, Receive, Renew, ResolveError, Settle, SettleError, Settled, Settlement,
    StoreError, TokenError,
};
use ledger::*;

/// Whether the only claim of a batch was refused because its entry is damaged.
fn is_damaged(answer: &Batch<Claim, ClaimError>) -> bool {
    matches!(answer.as_deref(), Ok([Err(ClaimError::Store(StoreError::Damaged(_)))]))
}

/// A store with one entry that is held and one that is completed, changed behind its back.
async fn damaged(sql: &str) -> Rig {
    let mut rig = Rig::new();
    rig.granted(by("a", "held")).await;
    let grant = rig.granted(by("a", "done")).await;
    rig.end(ending(&id("done"), &grant, complete("the outcome"))).await.unwrap();
    rig.store.close();
    assert!(rig.db().execute(sql, []).unwrap() > 0, "{sql} changed nothing");
    rig.reopen();
    rig
}

#[tokio::test]
async fn a_damaged_entry_refuses_claims_until_it_is_forgotten() {
    let changes = [
        "outcome = '\"another\"'",
        "outcome = NULL",
        "state = 0",
        "at_ms = at_ms - 1000000",
        "ttl_ms = 1",
        "prune_ms = prune_ms + 1",
        "key = 'dome'",
        "owner = 'b'",
        "scope = x'ff'",
        "takeovers = 'many'",
        "crc = crc + 1",
    ];
    for change in changes {
        let rig = damaged(&format!("UPDATE ledger SET {change} WHERE key = 'done'")).await;
        let refused = rig.store.claim(vec![by("b", "done")]).await;
        assert!(is_damaged(&refused), "{change}: {refused:?}");
        assert!(matches!(rig.store.entry(&id("done")).await, Err(StoreError::Damaged(_))), "{change}");
        // Everything else continues.
        assert!(matches!(rig.claim(by("b", "held")).await, Claim::InProgress { .. }), "{change}");
        let listed = rig.store.entries(EntryFilter { limit: 10, ..EntryFilter::default() }).await.unwrap();
        assert_eq!(listed.items.len(), 1, "{change}: the damaged one cannot be shown");
        rig.store.forget(&id("done"), "eva").await.unwrap();
        rig.granted(by("b", "done")).await;
        assert_eq!(rig.store.ledger_stats().await.unwrap().entries, 2, "{change}");
    }
}

#[tokio::test]
async fn a_damaged_open_entry_is_told_at_the_opening() {
    let rig = damaged("UPDATE ledger SET owner = 'x' WHERE key = 'held'").await;
    let warnings = rig.store.status().await.unwrap().warnings;
    assert!(
        warnings.iter().any(|warning| warning.contains("1 ledger entries were found damaged")),
        "{warnings:?}"
    );
    let refused = rig.store.claim(vec![by("a", "held")]).await;
    assert!(is_damaged(&refused), "{refused:?}");
    let resolved = rig.store.resolve(&id("held"), hapax_core::Resolution::Absent, "eva").await;
    assert!(matches!(resolved, Err(ResolveError::Store(StoreError::Damaged(_)))), "{resolved:?}");
}

#[tokio::test]
async fn damaged_entries_are_not_pruned_and_do_not_stop_pruning() {
    let rig = damaged("UPDATE ledger SET owner = 'x' WHERE key = 'done'").await;
    let grant = rig.granted(by("a", "later")).await;
    rig.end(ending(&id("later"), &grant, complete("x"))).await.unwrap();
    rig.clock.advance_ms(TTL_MS + 5_000);
    for _ in 0..3 {
        rig.store.status().await.unwrap();
    }
    assert_eq!(rig.rows("SELECT count(*) FROM ledger WHERE key = 'later'"), 0);
    assert_eq!(rig.rows("SELECT count(*) FROM ledger WHERE key = 'done'"), 1);
    let refused = rig.store.claim(vec![by("b", "done")]).await;
    assert!(is_damaged(&refused), "{refused:?}");
    let warnings = rig.store.status().await.unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("ledger entries are damaged")), "{warnings:?}");
}

#[tokio::test]
async fn rows_that_cannot_be_found_are_told_at_the_opening() {
    for sql in ["DELETE FROM ledger WHERE key = 'done'", "UPDATE ledger_rows SET rows = 1"] {
        let rig = damaged(sql).await;
        let warnings = rig.store.status().await.unwrap().warnings;
        assert!(
            warnings.iter().any(|warning| warning.contains("cannot be found in the file")),
            "{warnings:?}"
        );
    }
}

#[tokio::test]
async fn an_index_that_has_lost_an_entry_is_rebuilt() {
    let rig = Rig::new();
    for name in ["done", "other"] {
        let grant = rig.granted(by("a", name)).await;
        rig.end(ending(&id(name), &grant, complete(name))).await.unwrap();
    }
    rig.store.close();
    let file = rig.root.path().join("hapax.db");
    let sound = std::fs::read(&file).unwrap();
    let hash = id("done").hash().to_le_bytes();
    let places: Vec<_> = (0..sound.len()).filter(|at| sound[*at..].starts_with(&hash)).collect();
    assert_eq!(places.len(), 2, "once in the row, once in the index");
    let mut healed = 0;
    for place in places {
        let mut bytes = sound.clone();
        bytes[place + 7] ^= 0x10;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hapax.db"), &bytes).unwrap();
        let options =
            hapax_embedded::Options { clock: rig.clock.clone(), ..hapax_embedded::Options::default() };
        let store = hapax_embedded::Embedded::open(folder.path(), options).unwrap();
        let warnings = store.status().await.unwrap().warnings;
        match store.claim(vec![by("b", "done")]).await {
            refused if is_damaged(&refused) => store.forget(&id("done"), "eva").await.unwrap(),
            Ok(claims) => {
                assert!(matches!(claims[0], Ok(Claim::Completed { .. })), "{claims:?} {warnings:?}");
                assert!(
                    warnings.iter().any(|warning| warning.contains("rebuilt from its rows")),
                    "{warnings:?}"
                );
                healed += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(healed, 1);
}

/// Flips every byte of a ledger row in the table's pages, one at a time.
#[tokio::test]
async fn no_flipped_byte_makes_a_completed_key_run_again() {
    let rig = Rig::new();
    let outcome_text = "the outcome that only this entry has";
    let grant = rig.granted(by("a", "done")).await;
    rig.end(ending(&id("done"), &grant, complete(outcome_text))).await.unwrap();
    rig.store.close();
    let file = rig.root.path().join("hapax.db");
    let sound = std::fs::read(&file).unwrap();
    let at = sound.windows(outcome_text.len()).position(|at| at == outcome_text.as_bytes()).unwrap();
    // The row: its header, its columns and its outcome.
    let hash = id("done").hash().to_le_bytes();
    let from = (0..at).rev().find(|from| sound[*from..].starts_with(&hash)).unwrap() - 40;
    let (mut refused, mut forgotten, mut opened) = (0, 0, 0);
    for place in (from..at + outcome_text.len()).step_by(1) {
        let mut bytes = sound.clone();
        bytes[place] ^= 0x10;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hapax.db"), &bytes).unwrap();
        let clock = rig.clock.clone();
        let options = hapax_embedded::Options { clock, ..hapax_embedded::Options::default() };
        let Ok(store) = hapax_embedded::Embedded::open(folder.path(), options) else { continue };
        opened += 1;
        match &store.claim(vec![by("b", "done")]).await.unwrap()[0] {
            Ok(Claim::Completed { outcome: found, .. }) => assert_eq!(*found, outcome(outcome_text)),
            Err(ClaimError::Store(StoreError::Damaged(_))) => refused += 1,
            other => panic!("byte {place}: {other:?}"),
        }
        // An operator can forget it, or is told that the file is too damaged for that; the store continues.
        if store.forget(&id("done"), "eva").await.is_ok() {
            forgotten += 1;
            let claims = store.claim(vec![by("b", "done")]).await.unwrap();
            assert!(matches!(claims[0], Ok(Claim::Granted(_))), "byte {place}: forgotten and not free");
        }
        let claims = store.claim(vec![by("b", "another")]).await.unwrap();
        assert!(matches!(claims[0], Ok(Claim::Granted(_))), "byte {place}: the store has stopped");
    }
    println!("{opened} opened, {refused} refused, {forgotten} forgotten");
    assert!(refused > 50, "hardly any byte mattered: {refused}");
    assert!(forgotten * 10 > opened * 8, "{forgotten} of {opened} could be forgotten");
}

/// A damaged entry is the problem of its own claim: the others of a batch are renewed, ended, granted and settled.
#[tokio::test]
async fn a_damaged_entry_fails_no_other_of_its_batch() {
    const KEYS: [&str; 3] = ["a", "broken", "c"];
    let mut rig = Rig::new();
    let queue = rig.once_queue("jobs", QueueConfig::default()).await;
    let mut grants = Vec::new();
    for key in KEYS {
        grants.push(rig.granted(by("ann", key)).await);
        rig.send(&queue, NewMessage::new(key)).await;
    }
    let deliveries = rig.store.receive(&queue, Receive::up_to(3)).await.unwrap();
    rig.store.close();
    rig.db().execute("UPDATE ledger SET owner = 'x' WHERE key = 'broken'", []).unwrap();
    rig.reopen();

    let renew = |(key, grant): (&&str, &hapax_core::Grant)| Renew {
        id: id(key),
        token: grant.token.clone(),
        lease_ms: LEASE_MS,
    };
    let renewed = rig.store.renew(KEYS.iter().zip(&grants).map(renew).collect()).await.unwrap();
    assert!(matches!(renewed[..], [Ok(_), Err(TokenError::Damaged), Ok(_)]), "{renewed:?}");

    let claims = rig.store.claim(KEYS.map(|key| by("ann", key)).to_vec()).await.unwrap();
    assert!(
        matches!(
            &claims[..],
            [Ok(Claim::Granted(_)), Err(ClaimError::Store(StoreError::Damaged(why))), Ok(Claim::Granted(_))]
                if why.contains("api/orders broken")
        ),
        "{claims:?}"
    );

    let end = |at: usize| EndClaim {
        id: id(KEYS[at]),
        token: grants[at].token.clone(),
        ending: if at == 0 { complete("paid") } else { ClaimEnding::Doubt },
    };
    // The first with its delivery, the others without.
    let settle = |at: usize| Settle {
        claim: Some(end(at)),
        ..Settle::new(deliveries[at].receipt.clone(), Settlement::Ack)
    };
    let settled = rig.store.settle(&queue, vec![settle(1), settle(0)]).await.unwrap();
    assert_eq!(settled, [Err(SettleError::Claim(TokenError::Damaged)), Ok(Settled::Acked)]);
    let ended = rig.store.end(vec![end(1), end(2)]).await.unwrap();
    assert_eq!(ended, [Err(TokenError::Damaged), Ok(())]);
    assert!(matches!(rig.claim(by("bob", "a")).await, Claim::Completed { .. }));
    assert!(matches!(rig.claim(parking(by("bob", "c"))).await, Claim::InDoubt { .. }));
    assert_eq!(rig.store.status().await.unwrap().messages, 2, "only the sound one was acked");
}

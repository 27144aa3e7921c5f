//! A damaged ledger entry is never taken for absent, since its effect would happen again; and it is the problem of its own
//! key alone.

mod common;

use std::process::ExitCode;
use std::time::Instant;

use common::{Database, PATIENCE, Server, ask, completed, granted, id};

use hapax_core::{
    Claim, ClaimError, EntryFilter, ExportedItem, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig,
    QueueName, QueueStore as _, Receive, Renew, Resolution, ResolveError, Settle, SettleError, Settled,
    Settlement, StoreError, Tier, TokenError, Transfer as _, TransferScope,
};
use sqlx::{Executor as _, PgConnection, Row as _};

fn main() -> ExitCode {
    common::main(tests![
        a_damaged_entry_refuses_claims_until_it_is_forgotten,
        a_damaged_entry_fails_no_other_of_its_batch,
        damaged_entries_do_not_stop_pruning,
    ])
}

/// Damages the only row with this key.
async fn damage(db: &mut PgConnection, change: &str, key: &str) {
    let sql = format!("UPDATE hapax.ledger_entry SET {change} WHERE key = '{key}'");
    assert_eq!(db.execute(&*sql).await.unwrap().rows_affected(), 1, "{sql}");
}

fn is_damaged(claim: &Result<Claim, ClaimError>, key: &str) -> bool {
    matches!(claim, Err(ClaimError::Store(StoreError::Damaged(why))) if why.contains(key))
}

async fn a_damaged_entry_refuses_claims_until_it_is_forgotten(server: &'static Server) {
    for change in ["outcome = '{\"a'", "owner = ''", "fingerprint = ''"] {
        let database = Database::migrated(server).await;
        let store = database.open().await;
        let grant = granted(&store, ask("done", "ann")).await;
        store.end(vec![completed("done", &grant, "paid")]).await.unwrap().remove(0).unwrap();
        granted(&store, ask("held", "ann")).await;
        let mut db = database.connect().await;
        damage(&mut db, change, "done").await;

        let claims =
            store.claim(vec![ask("done", "bob"), ask("held", "bob"), ask("new", "bob")]).await.unwrap();
        assert!(is_damaged(&claims[0], "done"), "{change}: {claims:?}");
        assert!(
            matches!(&claims[1..], [Ok(Claim::InProgress { .. }), Ok(Claim::Granted(_))]),
            "{change}: {claims:?}"
        );
        assert!(matches!(store.entry(&id("done")).await, Err(StoreError::Damaged(_))), "{change}");
        let resolved = store.resolve(&id("done"), Resolution::Absent, "eva").await;
        assert!(matches!(resolved, Err(ResolveError::Store(StoreError::Damaged(_)))), "{resolved:?}");
        let listed = store.entries(EntryFilter { limit: 10, ..EntryFilter::default() }).await.unwrap();
        assert_eq!(listed.items.len(), 2, "{change}: the damaged one cannot be shown");
        let page = store.export(&TransferScope::Ledger, None, 10).await.unwrap();
        let damaged = page.items.iter().filter(|item| matches!(item, ExportedItem::Damaged { .. }));
        assert_eq!((page.items.len(), damaged.count()), (3, 1), "{change}");

        store.forget(&id("done"), "eva").await.unwrap();
        granted(&store, ask("done", "bob")).await;
    }
}

async fn a_damaged_entry_fails_no_other_of_its_batch(server: &'static Server) {
    const KEYS: [&str; 3] = ["a", "broken", "c"];
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let queue: QueueName = "jobs".parse().unwrap();
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() };
    store.create_queue(&queue, config).await.unwrap();
    let mut grants = Vec::new();
    for key in KEYS {
        grants.push(granted(&store, ask(key, "ann")).await);
        store.send(&queue, vec![NewMessage::new(key)]).await.unwrap().remove(0).unwrap();
    }
    let deliveries = store.receive(&queue, Receive::up_to(3)).await.unwrap();
    assert_eq!(deliveries.len(), 3);
    damage(&mut database.connect().await, "owner = ''", "broken").await;

    let renew = |at: usize| Renew { id: id(KEYS[at]), token: grants[at].token.clone(), lease_ms: 60_000 };
    let renewed = store.renew((0..3).map(renew).collect()).await.unwrap();
    assert!(matches!(renewed[..], [Ok(_), Err(TokenError::Damaged), Ok(_)]), "{renewed:?}");

    let settle = |at: usize| Settle {
        claim: Some(completed(KEYS[at], &grants[at], "paid")),
        ..Settle::new(deliveries[at].receipt.clone(), Settlement::Ack)
    };
    let settled = store.settle(&queue, vec![settle(1), settle(0)]).await.unwrap();
    assert_eq!(settled, [Err(SettleError::Claim(TokenError::Damaged)), Ok(Settled::Acked)]);
    let ended = store.end(vec![completed("c", &grants[2], "paid")]).await.unwrap();
    assert_eq!(ended, [Ok(())]);
    let claims = store.claim(KEYS.map(|key| ask(key, "bob")).to_vec()).await.unwrap();
    assert!(matches!(claims[0], Ok(Claim::Completed { .. })), "{claims:?}");
    assert!(is_damaged(&claims[1], "broken"), "{claims:?}");
    assert!(matches!(claims[2], Ok(Claim::Completed { .. })), "{claims:?}");
}

async fn damaged_entries_do_not_stop_pruning(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    for key in ["damaged", "sound"] {
        let grant = granted(&store, ask(key, "ann")).await;
        store.end(vec![completed(key, &grant, "paid")]).await.unwrap().remove(0).unwrap();
    }
    // An open one, which the sweep also looks at.
    granted(&store, ask("open", "ann")).await;
    let mut db = database.connect().await;
    damage(&mut db, "outcome = '{\"a'", "damaged").await;
    damage(&mut db, "owner = ''", "open").await;
    clock.advance_ms(400 * 24 * 3_600_000).await;
    let start = Instant::now();
    loop {
        let sql = "SELECT array_agg(key ORDER BY key) FROM hapax.ledger_entry";
        let keys: Vec<String> = db.fetch_one(sql).await.unwrap().get(0);
        if keys == ["damaged", "open"] {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the sound entry is not pruned: {keys:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let claim = common::claim(&store, ask("damaged", "bob")).await;
    assert!(is_damaged(&claim, "damaged"), "{claim:?}");
}

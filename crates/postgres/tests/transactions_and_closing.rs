//! Users' transactions and what happens beside them: a store is closed for a copy, a delivery is extended. At every isolation
//! level, and on a pooler.

mod common;

use std::time::Duration;

use common::{Database, Server, id};
use hapax_core::{
    AsyncInbox as _, CopyState, Extend, Fingerprint, InboxEntry, InboxError, InboxLookup, Json, NewMessage,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, RecordedOutcome, Tier, Transfer as _,
    TransferScope, policy::RetryPolicy,
};
use hapax_postgres::{InboxOptions, Isolation, PostgresInbox, PostgresStore, PostgresTransaction};
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_transaction_that_began_before_a_ledger_was_closed_does_not_enter_it,
        closing_the_ledger_waits_for_those_who_have_entered_it,
        closing_a_queue_ends_the_deliveries_of_open_transactions,
        closing_a_queue_waits_for_a_settled_delivery,
        a_held_delivery_is_settled_although_another_process_extends_it,
        a_delivery_that_is_over_is_not_held,
        only_the_current_delivery_is_settled,
    ])
}

const ALL: [Isolation; 3] = [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable];
const OTHER: &str = "embedded:/elsewhere";

fn to() -> CopyState {
    CopyState::To { store: OTHER.into(), complete: false }
}

fn entry(key: &str) -> InboxEntry {
    InboxEntry { id: id(key), fingerprint: Fingerprint::new("f").unwrap() }
}

fn done() -> RecordedOutcome {
    RecordedOutcome::done(Json::of("x").unwrap())
}

fn jobs() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// A store, the same as another process opens it, and an inbox of the first one.
async fn site(
    server: &'static Server,
    isolation: Isolation,
) -> (Database, PostgresStore, PostgresStore, PostgresInbox) {
    let database = Database::migrated(server).await;
    let (store, other) = (database.open().await, database.open().await);
    let options = InboxOptions { isolation, ..InboxOptions::default() };
    let inbox = PostgresInbox::with_options(&store, options).unwrap();
    (database, store, other, inbox)
}

/// Begins a transaction and gives it its snapshot.
async fn begun(inbox: &PostgresInbox, key: &str) -> PostgresTransaction {
    let mut tx = inbox.begin(&entry(key)).await.unwrap();
    PostgresInbox::connection(&mut tx).execute("SELECT count(*) FROM pg_class").await.unwrap();
    tx
}

async fn enter_and_record(inbox: &PostgresInbox, tx: &mut PostgresTransaction, key: &str) {
    assert_eq!(inbox.enter(tx, &entry(key)).await.unwrap(), InboxLookup::Fresh);
    inbox.record(tx, &entry(key), done(), 60_000).await.unwrap();
}

async fn entries(store: &PostgresStore) -> usize {
    store.export(&TransferScope::Ledger, None, 100).await.unwrap().items.len()
}

/// Its snapshot does not show that the ledger is closed. If it entered all the same, its entry would be missing in the copy.
async fn a_transaction_that_began_before_a_ledger_was_closed_does_not_enter_it(server: &'static Server) {
    for isolation in ALL {
        let (database, store, _, inbox) = site(server, isolation).await;
        let mut own = database.connect().await;
        let begin = match isolation {
            Isolation::ReadCommitted => "BEGIN ISOLATION LEVEL READ COMMITTED",
            Isolation::RepeatableRead => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Isolation::Serializable => "BEGIN ISOLATION LEVEL SERIALIZABLE",
        };
        own.execute(begin).await.unwrap();
        own.execute("SELECT count(*) FROM pg_class").await.unwrap();
        store.set_copy(&TransferScope::Ledger, Some(to()), "test").await.unwrap();
        let met = inbox.enter_on(&mut own, &entry("early")).await.unwrap_err();
        let told = match isolation {
            Isolation::ReadCommitted => matches!(&met, InboxError::Unavailable(why) if why.contains(OTHER)),
            _ => matches!(met, InboxError::Conflict(_)),
        };
        assert!(told, "{isolation:?}: {met}");
        own.execute("ROLLBACK").await.unwrap();
        // At READ COMMITTED the key is entered when the transaction begins.
        let met = match inbox.begin(&entry("late")).await {
            Ok(mut tx) => inbox.enter(&mut tx, &entry("late")).await.unwrap_err(),
            Err(refused) => refused,
        };
        assert!(matches!(&met, InboxError::Unavailable(why) if why.contains(OTHER)), "{isolation:?}: {met}");
        assert_eq!(entries(&store).await, 0);
        store.set_copy(&TransferScope::Ledger, None, "test").await.unwrap();
        let mut tx = begun(&inbox, "open").await;
        enter_and_record(&inbox, &mut tx, "open").await;
        inbox.commit(tx).await.unwrap();
        assert_eq!(entries(&store).await, 1, "{isolation:?}");
    }
}

/// Asks until the store shows what a task has done first, then until the task has ended or could have ended many times.
async fn give_it_time<T>(task: &tokio::task::JoinHandle<T>, mut seen: impl AsyncFnMut() -> bool) {
    while !seen().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..50 {
        if task.is_finished() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn closing_the_ledger_waits_for_those_who_have_entered_it(server: &'static Server) {
    for isolation in ALL {
        let (_database, store, other, inbox) = site(server, isolation).await;
        let mut tx = begun(&inbox, "entered").await;
        enter_and_record(&inbox, &mut tx, "entered").await;
        let copied = store.clone();
        let closing = tokio::spawn(async move {
            copied.set_copy(&TransferScope::Ledger, Some(to()), "test").await.unwrap();
            entries(&copied).await
        });
        give_it_time(&closing, async || other.ledger_copy().await.unwrap().is_some()).await;
        inbox.commit(tx).await.unwrap();
        assert_eq!(closing.await.unwrap(), 1, "{isolation:?}: the entry is in the copy");
    }
}

async fn received(store: &PostgresStore) -> hapax_core::Delivery {
    let retry = RetryPolicy::at_once();
    let config = QueueConfig { tier: Tier::Transactional, retry, ..QueueConfig::default() };
    store.create_queue(&jobs(), config).await.unwrap();
    store.send(&jobs(), vec![NewMessage::new("x")]).await.unwrap().remove(0).unwrap();
    let receive = Receive::up_to(1).lease(Duration::from_mins(10));
    store.receive(&jobs(), receive).await.unwrap().remove(0)
}

fn queue() -> TransferScope {
    TransferScope::Queue(jobs())
}

/// The transaction has entered its key and has not settled: it must not commit what the copy delivers again.
async fn closing_a_queue_ends_the_deliveries_of_open_transactions(server: &'static Server) {
    for isolation in ALL {
        let (_database, store, _, inbox) = site(server, isolation).await;
        let delivery = received(&store).await;
        let mut tx = begun(&inbox, "open").await;
        enter_and_record(&inbox, &mut tx, "open").await;
        store.set_copy(&queue(), Some(to()), "test").await.unwrap();
        let met = inbox.settle(&mut tx, &delivery.receipt).await.unwrap_err();
        let told = match isolation {
            Isolation::ReadCommitted => matches!(met, InboxError::Superseded(_)),
            _ => matches!(met, InboxError::Conflict(_)),
        };
        assert!(told, "{isolation:?}: {met}");
        inbox.rollback(tx).await;
        assert_eq!(entries(&store).await, 0);
        let copied = store.export(&queue(), None, 100).await.unwrap();
        assert_eq!(copied.items.len(), 1, "{isolation:?}: the message is copied");
    }
}

async fn closing_a_queue_waits_for_a_settled_delivery(server: &'static Server) {
    for isolation in ALL {
        let (_database, store, other, inbox) = site(server, isolation).await;
        let delivery = received(&store).await;
        let mut tx = begun(&inbox, "settled").await;
        enter_and_record(&inbox, &mut tx, "settled").await;
        assert!(inbox.settle(&mut tx, &delivery.receipt).await.unwrap());
        let copied = store.clone();
        let closing = tokio::spawn(async move {
            copied.set_copy(&queue(), Some(to()), "test").await.unwrap();
            copied.export(&queue(), None, 100).await.unwrap().items.len()
        });
        give_it_time(&closing, async || other.queue(&jobs()).await.unwrap().paused.is_some()).await;
        inbox.commit(tx).await.unwrap();
        assert_eq!(closing.await.unwrap(), 0, "{isolation:?}: it was settled here, so it is not copied");
    }
}

/// A heartbeat changes the delivery's row, which a transaction with an older snapshot could not delete then.
async fn a_held_delivery_is_settled_although_another_process_extends_it(server: &'static Server) {
    for isolation in ALL {
        let (database, store, other, inbox) = site(server, isolation).await;
        let delivery = received(&store).await;
        let mut tx = inbox.begin(&entry("long")).await.unwrap();
        inbox.hold(&mut tx, &delivery.receipt).await.unwrap();
        enter_and_record(&inbox, &mut tx, "long").await;
        let extend = Extend { receipt: delivery.receipt.clone(), lease_ms: 900_000, own_lease: false };
        // The process itself is told that the lease holds.
        store.extend(&jobs(), vec![extend.clone()]).await.unwrap().remove(0).unwrap();
        // Another process is told so, too, and does not wait for the transaction: a call that failed would be an error for
        // all deliveries in it.
        other.extend(&jobs(), vec![extend]).await.unwrap().remove(0).unwrap();
        assert!(inbox.settle(&mut tx, &delivery.receipt).await.unwrap(), "{isolation:?}");
        inbox.commit(tx).await.unwrap();
        let left = database.connect().await.fetch_one("SELECT count(*) FROM hapax.q_claim").await.unwrap();
        assert_eq!(left.get::<i64, _>(0), 0, "{isolation:?}");
    }
}

async fn a_delivery_that_is_over_is_not_held(server: &'static Server) {
    for isolation in [Isolation::RepeatableRead, Isolation::Serializable] {
        let (_database, store, _, inbox) = site(server, isolation).await;
        let delivery = received(&store).await;
        let ack = hapax_core::Settle::ack(delivery.receipt.clone());
        store.settle(&jobs(), vec![ack]).await.unwrap().remove(0).unwrap();
        let mut tx = inbox.begin(&entry("late")).await.unwrap();
        let met = inbox.hold(&mut tx, &delivery.receipt).await.unwrap_err();
        assert!(matches!(met, InboxError::Superseded(_)), "{isolation:?}: {met}");
        inbox.rollback(tx).await;
    }
}

/// A settle ends the delivery of its receipt or fails, and then nothing of its transaction is committed.
async fn only_the_current_delivery_is_settled(server: &'static Server) {
    for isolation in ALL {
        let database = Database::migrated(server).await;
        let clock = database.with_clock().await;
        let store = database.open().await;
        let options = InboxOptions { isolation, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&store, options).unwrap();
        let first = received(&store).await;
        clock.advance_ms(3_600_000).await;
        store.clock_moved().await.unwrap();
        let receive = Receive::up_to(1).lease(Duration::from_mins(10));
        let second = store.receive(&jobs(), receive).await.unwrap().remove(0);
        assert_eq!(first.id, second.id);
        let settled = async |key: &str, delivery: &hapax_core::Delivery| {
            let mut tx = begun(&inbox, key).await;
            enter_and_record(&inbox, &mut tx, key).await;
            let settled = inbox.settle(&mut tx, &delivery.receipt).await;
            match settled {
                Ok(own) => inbox.commit(tx).await.map(|()| own),
                Err(error) => {
                    // A failed statement leaves nothing to commit.
                    drop(PostgresInbox::connection(&mut tx).execute("COMMIT").await);
                    Err(error)
                }
            }
        };
        let stale = settled("stale", &first).await.unwrap_err();
        assert!(matches!(stale, InboxError::Superseded(_)), "{isolation:?}: {stale}");
        assert!(settled("current", &second).await.unwrap(), "{isolation:?}");
        let again = settled("again", &second).await.unwrap_err();
        assert!(matches!(again, InboxError::Superseded(_)), "{isolation:?}: {again}");
        assert_eq!(entries(&store).await, 1, "{isolation:?}: what failed has recorded nothing");
    }
}

//! Calls of one process are merged into few transactions, and a call that is dropped harms no other.

mod common;

use std::future::Future as _;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Database, Server, ask, claim, completed, granted, id};
use hapax_core::{
    AsyncInbox as _, Claim, ClaimError, EntryState, Fingerprint, InboxEntry, InboxLookup, Json, Ledger as _,
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receipt, Receive, RecordedOutcome,
    Settle, SettleError, Settled, StoreError,
};
use hapax_postgres::{Options, PostgresInbox, PostgresStore, PostgresTransaction};
use sqlx::{Connection as _, Row as _};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        concurrent_calls_share_transactions,
        sends_and_acks_of_a_moment_share_one_transaction,
        a_dropped_call_harms_no_other,
        a_call_dropped_at_any_time_leaves_no_transaction_and_no_lock,
        a_scope_has_a_bound_of_its_own,
        duplicates_with_the_shortest_lease_are_all_answered,
        calls_beyond_the_connections_wait_their_turn,
        acks_that_wait_for_a_lock_hold_up_no_other,
        a_send_does_not_wait_for_the_lock_of_an_ack_beside_it,
        an_ack_does_not_wait_for_a_transaction_that_ends_the_delivery_beside_it,
        acks_of_one_call_are_not_denied_because_one_waits_in_vain,
        a_receive_that_waits_for_a_lock_holds_up_no_other,
    ])
}

async fn number(database: &Database, sql: &str) -> i64 {
    let mut connection = database.connect().await;
    sqlx::query(sql).fetch_one(&mut connection).await.unwrap().get(0)
}

async fn concurrent_calls_share_transactions(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let mut all = JoinSet::new();
    for n in 0..200 {
        let store = store.clone();
        all.spawn(async move { granted(&store, ask(&format!("k{n}"), "ann")).await });
    }
    let fences: std::collections::BTreeSet<u64> =
        all.join_all().await.iter().map(|grant| grant.fence.0).collect();
    assert_eq!(fences.len(), 200, "each has a fence of its own");
    // Every transaction that opens entries adds one row.
    let transactions = number(&database, "SELECT count(*) FROM hapax.ledger_count").await;
    assert!(transactions <= 20, "200 claims took {transactions} transactions");
    assert_eq!(store.ledger_stats().await.unwrap().open, 200);
}

/// Clients that call at the same time are merged, whatever they call; also those that are answered at the same time and call
/// again.
async fn sends_and_acks_of_a_moment_share_one_transaction(server: &'static Server) {
    const CLIENTS: usize = 16;
    const ROUNDS: usize = 10;
    let database = Database::migrated(server).await;
    let (store, queue) = patient_store(&database, CLIENTS * ROUNDS).await;
    let ask = Receive { lease_ms: Some(600_000), ..Receive::up_to(CLIENTS * ROUNDS) };
    let deliveries = store.receive(&queue, ask).await.unwrap();
    assert_eq!(deliveries.len(), CLIENTS * ROUNDS);
    // Who is deleted by a transaction is a transaction's number, and so is who made a message.
    let mut admin = database.connect().await;
    let keep = "CREATE TABLE acked (by_transaction xid8);
                CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS
                  'BEGIN INSERT INTO acked VALUES (pg_current_xact_id()); RETURN NULL; END';
                CREATE TRIGGER keep AFTER DELETE ON hapax.q_claim FOR EACH STATEMENT EXECUTE FUNCTION keep();
                CREATE TRIGGER keep AFTER INSERT ON hapax.q_ready FOR EACH STATEMENT EXECUTE FUNCTION keep()";
    sqlx::raw_sql(keep).execute(&mut admin).await.unwrap();
    let mut clients = JoinSet::new();
    for (client, own) in deliveries.chunks(ROUNDS).enumerate() {
        let (store, queue, own) = (store.clone(), queue.clone(), own.to_vec());
        clients.spawn(async move {
            for delivery in own {
                if client % 2 == 0 {
                    store.send(&queue, vec![NewMessage::new("x")]).await.unwrap().remove(0).unwrap();
                }
                let settled = store.settle(&queue, vec![Settle::ack(delivery.receipt)]).await.unwrap();
                assert_eq!(settled, [Ok(Settled::Acked)]);
            }
        });
    }
    clients.join_all().await;
    let transactions = number(&database, "SELECT count(DISTINCT by_transaction) FROM acked").await;
    // Half of the clients call 20 times; in the best case there are as many transactions.
    assert!(transactions <= 40, "240 calls took {transactions} transactions");
}

async fn a_dropped_call_harms_no_other(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let mut tasks = Vec::new();
    for n in 0..60 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move { claim(&store, ask(&format!("k{n}"), "ann")).await }));
    }
    tokio::task::yield_now().await;
    for task in tasks.iter().step_by(2) {
        task.abort();
    }
    for (n, task) in tasks.into_iter().enumerate() {
        match task.await {
            Ok(answer) => assert!(matches!(answer, Ok(Claim::Granted(_))), "{n}: {answer:?}"),
            Err(aborted) => assert!(aborted.is_cancelled() && n % 2 == 0),
        }
    }
    // What was dropped has happened or not; its owner asks again.
    for n in 0..60 {
        granted(&store, ask(&format!("k{n}"), "ann")).await;
    }
    assert_eq!(store.ledger_stats().await.unwrap().entries, 60);
}

/// Polls a call a number of times, then drops it.
async fn a_call_dropped_at_any_time_leaves_no_transaction_and_no_lock(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let key = |n: usize| format!("k{n}");
    for n in 0..40 {
        let grant = granted(&store, ask(&key(n), "ann")).await;
        let mut ended = pin!(store.end(vec![completed(&key(n), &grant, "paid")]));
        let absent = id("absent");
        let mut resolved = pin!(store.forget(&absent, "test"));
        for _ in 0..n {
            let mut context = Context::from_waker(Waker::noop());
            if ended.as_mut().poll(&mut context).is_ready() || resolved.as_mut().poll(&mut context).is_ready()
            {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    store.quiet().await;
    // An operation runs to its end without its caller, so it may still be under way: it must end by itself.
    let open = "SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'";
    let advisory = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    for what in [open, advisory] {
        let start = std::time::Instant::now();
        while number(&database, what).await > 0 {
            assert!(start.elapsed() < std::time::Duration::from_mins(3), "it stays: {what}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
    for n in 0..40 {
        let grant = claim(&store, ask(&key(n), "ann")).await.unwrap();
        if let Claim::Granted(grant) = grant {
            store.end(vec![completed(&key(n), &grant, "paid")]).await.unwrap().remove(0).unwrap();
        }
        assert_eq!(store.entry(&id(&key(n))).await.unwrap().unwrap().state, EntryState::Completed);
    }
}

async fn a_scope_has_a_bound_of_its_own(server: &'static Server) {
    let database = Database::migrated(server).await;
    let options = Options { in_doubt_per_scope_max: 3, ..Options::default() };
    let store = PostgresStore::open(&database.url(), options).await.unwrap();
    let mut grants = Vec::new();
    for n in 0..3 {
        grants.push(granted(&store, ask(&n.to_string(), "ann")).await);
    }
    let doubt =
        hapax_core::EndClaim { ending: hapax_core::ClaimEnding::Doubt, ..completed("0", &grants[0], "") };
    store.end(vec![doubt]).await.unwrap().remove(0).unwrap();
    let batch = vec![ask("3", "ann"), ask("1", "ann"), ask("4", "ann")];
    let answers = store.claim(batch).await.unwrap();
    assert!(
        matches!(answers[1], Ok(Claim::Granted(_))),
        "an entry that is there can be claimed: {:?}",
        answers[1]
    );
    for answer in [&answers[0], &answers[2]] {
        let Err(ClaimError::TooManyInDoubt { open, in_doubt, max, .. }) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!((*open, *in_doubt, *max), (3, 1, 3));
    }
    let mut elsewhere = ask("3", "ann");
    elsewhere.id.scope = "other".parse().unwrap();
    granted(&store, elsewhere).await;
    store.end(vec![completed("1", &grants[1], "paid")]).await.unwrap().remove(0).unwrap();
    granted(&store, ask("3", "ann")).await;
    assert!(matches!(claim(&store, ask("4", "ann")).await, Err(ClaimError::TooManyInDoubt { .. })));
    // Another process counts before it refuses, and after a sweep also before it grants.
    let options = Options { in_doubt_per_scope_max: 3, ..Options::default() };
    let other = PostgresStore::open(&database.url(), options).await.unwrap();
    other.clock_moved().await.unwrap();
    assert!(matches!(claim(&other, ask("4", "bob")).await, Err(ClaimError::TooManyInDoubt { .. })));
}

async fn duplicates_with_the_shortest_lease_are_all_answered(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    for round in 0..20 {
        let brief = |owner: &str| hapax_core::ClaimRequest { lease_ms: 1, ..ask(&round.to_string(), owner) };
        let batch = (0..10).map(|n| brief(&format!("worker-{n}"))).collect();
        for answer in store.claim(batch).await.unwrap() {
            assert!(matches!(answer, Ok(Claim::Granted(_) | Claim::InProgress { .. })), "{answer:?}");
        }
    }
}

async fn calls_beyond_the_connections_wait_their_turn(server: &'static Server) {
    let database = Database::migrated(server).await;
    let options = Options { connections_max: 2, ..Options::default() };
    let store = PostgresStore::open(&database.url(), options).await.unwrap();
    let mut all = JoinSet::new();
    for n in 0..50 {
        let store = store.clone();
        all.spawn(async move { store.entry(&id(&n.to_string())).await });
    }
    assert!(all.join_all().await.into_iter().all(|entry| entry == Ok(None)));
    let sessions = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'hapax'";
    assert!(number(&database, sessions).await <= 2);
}

/// A queue with this many messages, and a store whose statements wait for locks for longer than the test takes.
async fn patient_store(database: &Database, messages: usize) -> (PostgresStore, QueueName) {
    let options = Options { operation_timeout: Duration::from_mins(5), ..Options::default() };
    let store = PostgresStore::open(&database.url(), options).await.unwrap();
    let queue: QueueName = "jobs".parse().unwrap();
    store.create_queue(&queue, QueueConfig::default()).await.unwrap();
    let batch = (0..messages).map(|n| NewMessage::new(format!("m{n}"))).collect();
    assert!(store.send(&queue, batch).await.unwrap().iter().all(Result::is_ok));
    (store, queue)
}

/// Returns when this many sessions of the database wait for a lock.
async fn sessions_wait(database: &Database, count: i64) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while number(database, sql).await < count {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn acks_that_wait_for_a_lock_hold_up_no_other(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, queue) = patient_store(&database, 3).await;
    let deliveries = store.receive(&queue, Receive::up_to(3)).await.unwrap();
    let mut other = database.connect().await;
    let mut held = other.begin().await.unwrap();
    let seqs: Vec<i64> = deliveries[..2].iter().map(|delivery| delivery.sequence as i64).collect();
    let lock = sqlx::query("SELECT seq FROM hapax.q_claim WHERE seq = ANY($1) FOR UPDATE").bind(seqs);
    assert_eq!(lock.fetch_all(&mut *held).await.unwrap().len(), 2);
    let ack = |at: usize| {
        let (store, queue, receipt) = (store.clone(), queue.clone(), deliveries[at].receipt.clone());
        async move { store.settle(&queue, vec![Settle::ack(receipt)]).await }
    };
    let mut waiting = Vec::new();
    for at in 0..2 {
        waiting.push(tokio::spawn(ack(at)));
        sessions_wait(&database, at as i64 + 1).await;
    }
    assert_eq!(ack(2).await.unwrap(), [Ok(Settled::Acked)]);
    assert!(waiting.iter().all(|ack| !ack.is_finished()), "it was answered before those that wait");
    held.rollback().await.unwrap();
    for ack in waiting {
        assert_eq!(ack.await.unwrap().unwrap(), [Ok(Settled::Acked)]);
    }
}

/// Sends and acks are merged. An ack of a delivery that a user's transaction is ending waits alone.
async fn a_send_does_not_wait_for_the_lock_of_an_ack_beside_it(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, queue) = patient_store(&database, 1).await;
    let delivery = store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
    let mut other = database.connect().await;
    let mut held = other.begin().await.unwrap();
    let lock = sqlx::query("SELECT seq FROM hapax.q_claim FOR UPDATE").fetch_all(&mut *held).await;
    assert_eq!(lock.unwrap().len(), 1);
    let ack = store.settle(&queue, vec![Settle::ack(delivery.receipt)]);
    let send = store.send(&queue, vec![NewMessage::new("x")]);
    let (mut ack, mut send) = (pin!(ack), pin!(send));
    // Both wait for the same batch.
    tokio::select! {
        biased;
        _ = &mut ack => panic!("its delivery is locked"),
        accepted = &mut send => drop(accepted.unwrap().remove(0).unwrap()),
    }
    held.rollback().await.unwrap();
    assert_eq!(ack.await.unwrap(), [Ok(Settled::Acked)]);
}

/// A transaction that has acked a delivery and is not committed yet.
async fn ending(store: &PostgresStore, receipt: &Receipt) -> (PostgresInbox, PostgresTransaction) {
    let inbox = PostgresInbox::new(store);
    let entry = InboxEntry { id: id("order-1"), fingerprint: Fingerprint::new("f").unwrap() };
    let mut tx = inbox.begin(&entry).await.unwrap();
    assert_eq!(inbox.enter(&mut tx, &entry).await.unwrap(), InboxLookup::Fresh);
    let outcome = RecordedOutcome::done(Json::of("x").unwrap());
    inbox.record(&mut tx, &entry, outcome, 60_000).await.unwrap();
    assert!(inbox.settle(&mut tx, receipt).await.unwrap());
    (inbox, tx)
}

async fn an_ack_does_not_wait_for_a_transaction_that_ends_the_delivery_beside_it(server: &'static Server) {
    for commits in [false, true] {
        let database = Database::migrated(server).await;
        let (store, queue) = patient_store(&database, 2).await;
        let mut deliveries = store.receive(&queue, Receive::up_to(2)).await.unwrap();
        let (free, held) = (deliveries.remove(1).receipt, deliveries.remove(0).receipt);
        let (inbox, tx) = ending(&store, &held).await;
        let waiting = store.settle(&queue, vec![Settle::ack(held)]);
        let beside = store.settle(&queue, vec![Settle::ack(free)]);
        let (mut waiting, mut beside) = (pin!(waiting), pin!(beside));
        // Both are in the same batch.
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("its delivery is locked"),
            acked = &mut beside => assert_eq!(acked.unwrap(), [Ok(Settled::Acked)]),
        }
        let wanted = if commits {
            inbox.commit(tx).await.unwrap();
            Err(SettleError::Gone)
        } else {
            inbox.rollback(tx).await;
            Ok(Settled::Acked)
        };
        assert_eq!(waiting.await.unwrap(), [wanted]);
    }
}

/// The acks of one call are answered together, after the one that waits longest; and that has a bound. What was acked before is
/// not told as not done.
async fn acks_of_one_call_are_not_denied_because_one_waits_in_vain(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, queue) = patient_store(&database, 2).await;
    let deliveries = store.receive(&queue, Receive::up_to(2)).await.unwrap();
    // A lock is waited for a quarter as long.
    let options = Options { operation_timeout: Duration::from_secs(8), ..Options::default() };
    let brief = PostgresStore::open(&database.url(), options).await.unwrap();
    let (inbox, tx) = ending(&store, &deliveries[0].receipt).await;
    let acks = || deliveries.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect::<Vec<_>>();
    let told = brief.settle(&queue, acks()).await;
    assert!(matches!(told, Err(StoreError::OutcomeUnknown(_))), "{told:?}");
    assert_eq!(number(&database, "SELECT count(*) FROM hapax.q_claim").await, 1, "the other one is acked");
    inbox.rollback(tx).await;
    assert_eq!(brief.settle(&queue, acks()).await.unwrap(), [Ok(Settled::Acked), Err(SettleError::Gone)]);
}

async fn a_receive_that_waits_for_a_lock_holds_up_no_other(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, queue) = patient_store(&database, 2).await;
    // A receive with an attempt id takes this lock.
    let mut other = database.connect().await;
    let mut held = other.begin().await.unwrap();
    let sql =
        "SELECT pg_advisory_xact_lock(q.id, hashtext('first')) FROM hapax.q_queue q WHERE q.name = 'jobs'";
    sqlx::query(sql).execute(&mut *held).await.unwrap();
    let first = {
        let (store, queue) = (store.clone(), queue.clone());
        let ask = Receive { attempt_id: Some("first".into()), ..Receive::up_to(1) };
        tokio::spawn(async move { store.receive(&queue, ask).await })
    };
    sessions_wait(&database, 1).await;
    let deliveries = store.receive(&queue, Receive::up_to(1)).await.unwrap();
    assert_eq!(deliveries.len(), 1);
    assert!(!first.is_finished(), "it was answered before the one that waits");
    held.rollback().await.unwrap();
    assert_eq!(first.await.unwrap().unwrap().len(), 1);
}

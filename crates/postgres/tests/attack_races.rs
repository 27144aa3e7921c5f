//! Races between processes, each made certain by a session that holds a lock or a transaction at the critical place.

mod common;

use std::time::Duration;

use common::{Database, Server};
use hapax_core::{
    DeadLetterPolicy, Delivery, Extend, GroupId, NewMessage, OnDead, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, Receive, RedriveFilter, RedriveRequest, Settle, Settlement,
};
use hapax_faults::{Action, FaultProxy, Match, Protocol};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Executor as _, PgConnection, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        two_waiting_receives_do_not_share_a_group,
        a_receive_that_has_a_message_waits_for_no_other_group,
        a_message_committed_behind_later_ones_is_received,
        a_message_that_a_rolled_back_transaction_had_locked_is_received,
        after_a_restart_short_leases_end_although_long_ones_are_kept,
        after_a_restart_a_repeated_receive_gives_the_same_messages,
        a_send_that_a_deletion_overtakes_leaves_nothing_behind,
        queues_deleted_under_load_leave_nothing_behind,
        dropped_calls_leave_no_transaction_and_no_lock,
        a_redrive_of_two_processes_moves_each_letter_once,
        a_redrive_moves_on_although_the_database_is_far_away,
    ])
}

/// More than enough time for anything that is not stuck.
const PATIENCE: Duration = Duration::from_mins(3);

fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

fn grouped(body: &str, group: &str) -> NewMessage {
    NewMessage::new(body.to_owned())
        .group(GroupId::new(group).unwrap())
        .dedup(hapax_core::DedupId::new(format!("{group}-{body}")).unwrap())
}

async fn send(store: &PostgresStore, name: &QueueName, message: NewMessage) {
    store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
}

async fn receive(store: &PostgresStore, name: &QueueName, max: usize, wait_ms: u64) -> Vec<Delivery> {
    let ask = Receive { wait_ms: Some(wait_ms), ..Receive::up_to(max) };
    let received = tokio::time::timeout(PATIENCE, store.receive(name, ask)).await;
    received.expect("a receive ends").unwrap()
}

/// Receives what became visible behind later messages. A process looks back from time to time, the farther the more seldom;
/// on a loaded machine the test itself may have taken long enough for the rarer look.
async fn receive_late(store: &PostgresStore, name: &QueueName) -> Vec<Delivery> {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(150) {
        let received = receive(store, name, 10, 20_000).await;
        if !received.is_empty() {
            return received;
        }
    }
    Vec::new()
}

fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8(delivery.body.to_vec()).unwrap()).collect()
}

async fn ack(store: &PostgresStore, name: &QueueName, deliveries: Vec<Delivery>) {
    let acks = deliveries.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
    for settled in store.settle(name, acks).await.unwrap() {
        settled.unwrap();
    }
}

async fn number(connection: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query(sql).fetch_one(connection).await.unwrap().get(0)
}

/// Waits until a number of sessions wait for a lock.
async fn until_blocked(connection: &mut PgConnection, sessions: i64) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let start = std::time::Instant::now();
    while number(connection, sql).await < sessions {
        assert!(start.elapsed() < PATIENCE, "no session waits for the lock");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Receives that wait together are looked for together: each still has its groups for itself.
async fn two_waiting_receives_do_not_share_a_group(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = queue("orders.fifo");
    store.create_queue(&name, QueueConfig::sqs_fifo()).await.unwrap();
    let mut waiting = tokio::task::JoinSet::new();
    for holder in 0..4 {
        let (store, name) = (store.clone(), name.clone());
        waiting.spawn(async move { (holder, receive(&store, &name, 3, 20_000).await) });
    }
    store.quiet().await;
    let batch =
        (0..8).map(|n| grouped(&n.to_string(), "a")).chain((0..8).map(|n| grouped(&n.to_string(), "b")));
    for sent in store.send(&name, batch.collect()).await.unwrap() {
        sent.unwrap();
    }
    let mut holders = std::collections::BTreeMap::new();
    let mut note = |(holder, received): (usize, Vec<Delivery>)| {
        for delivery in received {
            let group = delivery.group.clone().unwrap();
            let first = *holders.entry(group.clone()).or_insert(holder);
            assert_eq!(first, holder, "group {group} is in flight at two receivers");
        }
        holders.len()
    };
    while note(waiting.join_next().await.expect("each group is received").unwrap()) < 2 {}
    // The others have time for what they must not get.
    tokio::time::sleep(Duration::from_secs(1)).await;
    while let Some(more) = waiting.try_join_next() {
        note(more.unwrap());
    }
}

/// A receive that finds only locked groups waits for one of them, but not for a second while it holds the first.
async fn a_receive_that_has_a_message_waits_for_no_other_group(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = queue("orders.fifo");
    store.create_queue(&name, QueueConfig::sqs_fifo()).await.unwrap();
    send(&store, &name, grouped("1", "b")).await;
    send(&store, &name, grouped("1", "a")).await;
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    one.execute("BEGIN; SELECT 1 FROM hapax.q_group WHERE grp = 'b' FOR UPDATE").await.unwrap();
    two.execute("BEGIN; SELECT 1 FROM hapax.q_group WHERE grp = 'a' FOR UPDATE").await.unwrap();
    let waiting = {
        let (store, name) = (store.clone(), name.clone());
        tokio::spawn(async move { receive(&store, &name, 2, 0).await })
    };
    let mut watch = database.connect().await;
    until_blocked(&mut watch, 1).await;
    one.execute("ROLLBACK").await.unwrap();
    // Group `a` stays locked: a settle of both groups could now ask for `b`, and the two would wait for each other.
    let received = tokio::time::timeout(PATIENCE, waiting).await;
    let received = received.expect("the receive holds b and waits for a").unwrap();
    assert_eq!(received[0].group, Some(GroupId::new("b").unwrap()));
    two.execute("ROLLBACK").await.unwrap();
}

/// Places are drawn before the commit, so a lower one may become visible after a higher one was received.
async fn a_message_committed_behind_later_ones_is_received(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let name = queue("orders");
    store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
    let mut slow = database.connect().await;
    let sent = "BEGIN; SELECT hapax.q_send(q.id, q.version, '{1}', '{0}', '{4}', '{NULL}', '{NULL}', '{0}', '{NULL}', \
                ARRAY['late'::bytea]) FROM hapax.q_queue q";
    slow.execute(sent).await.unwrap();
    for round in 0..3 {
        send(&store, &name, NewMessage::new(format!("early {round}"))).await;
        for store in [&store, &second] {
            let received = receive(store, &name, 10, 0).await;
            ack(store, &name, received).await;
        }
    }
    slow.execute("COMMIT").await.unwrap();
    for store in [&store, &second] {
        // Each process must find it, however far ahead it has looked before.
        let received = receive_late(store, &name).await;
        assert_eq!(bodies(&received), ["late"]);
        let back = Extend { receipt: received[0].receipt.clone(), lease_ms: 0, own_lease: false };
        store.extend(&name, vec![back]).await.unwrap().remove(0).unwrap();
    }
}

async fn a_message_that_a_rolled_back_transaction_had_locked_is_received(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let name = queue("orders");
    store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
    send(&store, &name, NewMessage::new("locked")).await;
    // Another process has taken it, and dies before its commit.
    let mut other = database.connect().await;
    other.execute("BEGIN; DELETE FROM hapax.q_ready").await.unwrap();
    for round in 0..3 {
        send(&store, &name, NewMessage::new(format!("other {round}"))).await;
        for store in [&store, &second] {
            let received = receive(store, &name, 10, 0).await;
            ack(store, &name, received).await;
        }
    }
    let waiting = {
        let (store, name) = (store.clone(), name.clone());
        tokio::spawn(async move { receive_late(&store, &name).await })
    };
    store.quiet().await;
    other.execute("ROLLBACK").await.unwrap();
    assert_eq!(
        bodies(&waiting.await.unwrap()),
        ["locked"],
        "nothing announces it; the waiting call looks by itself"
    );
}

/// A lease ends at the later of its deadline and the start of the server plus its length: a long one that is kept must
/// not hide a short one that is over.
async fn after_a_restart_short_leases_end_although_long_ones_are_kept(server: &'static Server) {
    for fifo in [false, true] {
        let database = Database::migrated(server).await;
        let clock = database.with_clock().await;
        let store = database.open().await;
        let (name, config) = if fifo {
            (queue("orders.fifo"), QueueConfig::sqs_fifo())
        } else {
            (queue("orders"), QueueConfig::sqs())
        };
        store.create_queue(&name, config).await.unwrap();
        send(&store, &name, grouped("long", "a")).await;
        let ask = Receive { lease_ms: Some(3_600_000), ..Receive::default() };
        assert_eq!(store.receive(&name, ask).await.unwrap().len(), 1);
        clock.advance_ms(3_599_000).await;
        send(&store, &name, grouped("short", "b")).await;
        let ask = Receive { lease_ms: Some(2_000), ..Receive::default() };
        assert_eq!(bodies(&store.receive(&name, ask).await.unwrap()), ["short"]);
        clock.server_restarted().await;
        clock.advance_ms(2_000).await;
        store.clock_moved().await.unwrap();
        assert_eq!(bodies(&receive(&store, &name, 10, 0).await), ["short"], "FIFO: {fifo}");
        clock.advance_ms(3_600_000).await;
        store.clock_moved().await.unwrap();
        let mut all = bodies(&receive(&store, &name, 10, 0).await);
        all.sort();
        assert_eq!(all, ["long", "short"], "FIFO: {fifo}");
    }
}

async fn after_a_restart_a_repeated_receive_gives_the_same_messages(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    let name = queue("orders");
    store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
    for body in ["one", "two"] {
        send(&store, &name, NewMessage::new(body)).await;
    }
    let ask = Receive { lease_ms: Some(10_000), attempt_id: Some("try".into()), ..Receive::default() };
    let first = store.receive(&name, ask.clone()).await.unwrap();
    clock.advance_ms(9_000).await;
    clock.server_restarted().await;
    clock.advance_ms(5_000).await;
    store.clock_moved().await.unwrap();
    let again = store.receive(&name, ask).await.unwrap();
    assert_eq!((bodies(&again), &again[0].receipt), (bodies(&first), &first[0].receipt), "it is still held");
}

/// Rows of queues that do not exist.
const ORPHANS: &str = "SELECT count(*) FROM (SELECT queue_id FROM hapax.q_ready UNION ALL SELECT queue_id FROM hapax.q_fifo \
    UNION ALL SELECT queue_id FROM hapax.q_claim UNION ALL SELECT queue_id FROM hapax.q_due UNION ALL \
    SELECT queue_id FROM hapax.q_parked UNION ALL SELECT queue_id FROM hapax.q_group UNION ALL \
    SELECT queue_id FROM hapax.q_head UNION ALL SELECT queue_id FROM hapax.q_dedup UNION ALL \
    SELECT queue_id FROM hapax.q_undecided) x WHERE queue_id NOT IN (SELECT id FROM hapax.q_queue)";

/// Waits until nothing of a deleted queue is left.
async fn until_no_orphans(store: &PostgresStore, connection: &mut PgConnection) {
    let start = std::time::Instant::now();
    while number(connection, ORPHANS).await > 0 {
        assert!(start.elapsed() < PATIENCE, "rows of a deleted queue stay");
        store.clock_moved().await.unwrap();
        store.quiet().await;
    }
}

/// An operation that began before a queue was deleted may write after that.
async fn a_send_that_a_deletion_overtakes_leaves_nothing_behind(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let name = queue("orders");
    store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
    let mut slow = database.connect().await;
    let sent = "BEGIN; SELECT hapax.q_send(q.id, q.version, '{1}', '{0}', '{4}', '{NULL}', '{NULL}', '{0}', '{NULL}', \
                ARRAY['late'::bytea]) FROM hapax.q_queue q";
    slow.execute(sent).await.unwrap();
    store.delete_queue(&name).await.unwrap();
    slow.execute("COMMIT").await.unwrap();
    // The process that has used the queues: only its sweeper runs.
    until_no_orphans(&store, &mut slow).await;
    store.create_queue_with_interval(&name, QueueConfig::sqs(), 0).await.unwrap();
    assert_eq!(bodies(&receive(&second, &name, 10, 0).await), [""; 0], "the new queue is empty");
    assert_eq!(store.status().await.unwrap().messages, 0);
}

/// Queues are deleted and made again while clients of two processes use them.
async fn queues_deleted_under_load_leave_nothing_behind(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let dead = queue("dead.fifo");
    let name = queue("orders.fifo");
    let config = || {
        let config = QueueConfig::sqs_fifo();
        let dead_letter = Some(DeadLetterPolicy { queue: queue("dead.fifo") });
        QueueConfig { retry: config.retry.attempts(1), dead_letter, on_dead: OnDead::HaltGroup, ..config }
    };
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let clients: Vec<_> = (0..6)
        .map(|n| {
            let (store, name, over) = ([&store, &second][n % 2].clone(), name.clone(), over.clone());
            tokio::spawn(async move {
                for round in 0.. {
                    if over.load(std::sync::atomic::Ordering::SeqCst) {
                        return;
                    }
                    let _ = store
                        .send(&name, vec![grouped(&format!("{n}-{round}"), &format!("g{}", round % 3))])
                        .await;
                    let ask = Receive { wait_ms: Some(0), ..Receive::up_to(3) };
                    for delivery in store.receive(&name, ask).await.unwrap_or_default() {
                        let end = Settlement::Reject { reason: "bad".into() };
                        let end = if round % 2 == 0 { end } else { Settlement::Ack };
                        let _ = store.settle(&name, vec![Settle::new(delivery.receipt, end)]).await;
                    }
                }
            })
        })
        .collect();
    for round in 0..12 {
        store.create_queue_with_interval(&dead, QueueConfig::sqs_fifo(), 0).await.unwrap();
        second.create_queue_with_interval(&name, config(), 0).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        for name in if round % 2 == 0 { [&name, &dead] } else { [&dead, &name] } {
            second.delete_queue(name).await.unwrap();
        }
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    let mut connection = database.connect().await;
    until_no_orphans(&second, &mut connection).await;
}

/// A dropped call ends by itself: no transaction stays open, and no lock stays held.
async fn dropped_calls_leave_no_transaction_and_no_lock(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = queue("orders.fifo");
    store.create_queue(&name, QueueConfig::sqs_fifo()).await.unwrap();
    for round in 0..60u64 {
        let patience = Duration::from_micros(100 * round);
        let sent = store.send(&name, vec![grouped(&round.to_string(), "a")]);
        let _ = tokio::time::timeout(patience, sent).await;
        let ask = Receive { wait_ms: Some(5), ..Receive::up_to(2) };
        if let Ok(received) = tokio::time::timeout(patience, store.receive(&name, ask)).await {
            for delivery in received.unwrap() {
                let settle = Settle::retry(delivery.receipt, "failed");
                let _ = tokio::time::timeout(patience, store.settle(&name, vec![settle])).await;
            }
        }
    }
    let mut connection = database.connect().await;
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
                AND xact_start IS NOT NULL";
    let start = std::time::Instant::now();
    while number(&mut connection, open).await > 0 {
        assert!(start.elapsed() < PATIENCE, "a transaction stays open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // A dropped receive gives back what it was given: all that was sent is received in order, each at its first try.
    let mut last = 0;
    let start = std::time::Instant::now();
    loop {
        let received = receive(&store, &name, 10, 0).await;
        if received.is_empty() {
            let stats = store.stats(&name).await.unwrap();
            if (stats.ready, stats.in_flight, stats.delayed) == (0, 0, 0) {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "a dropped call holds a message: {stats:?}");
        }
        for delivery in &received {
            assert!(delivery.sequence > last, "out of order");
            last = delivery.sequence;
        }
        ack(&store, &name, received).await;
    }
}

/// Two processes move the same letters: each moves once.
/// Makes a queue whose messages are all dead letters.
async fn dead_letters(store: &PostgresStore, letters: usize) -> (QueueName, QueueName) {
    let (name, dead) = (queue("orders"), queue("dead"));
    store.create_queue(&dead, QueueConfig::sqs()).await.unwrap();
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    store.create_queue(&name, QueueConfig { dead_letter, ..QueueConfig::sqs() }).await.unwrap();
    let batch = (0..letters).map(|n| NewMessage::new(n.to_string())).collect();
    store.send(&name, batch).await.unwrap();
    let received = receive(store, &name, letters, 0).await;
    let reject =
        |delivery: Delivery| Settle::new(delivery.receipt, Settlement::Reject { reason: "bad".into() });
    for settled in store.settle(&name, received.into_iter().map(reject).collect()).await.unwrap() {
        settled.unwrap();
    }
    (name, dead)
}

fn redrive_of(dead: &QueueName) -> RedriveRequest {
    RedriveRequest {
        from: dead.clone(),
        to: None,
        filter: RedriveFilter::default(),
        per_second: None,
        by: "test".into(),
    }
}

/// A response takes 25 ms, and an operation may take 3 s: all letters in one transaction would need longer.
async fn a_redrive_moves_on_although_the_database_is_far_away(server: &'static Server) {
    const LETTERS: usize = 40;
    let database = Database::migrated(server).await;
    let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
    let through = database.url().replace(&server.address().to_string(), &proxy.address().to_string());
    let options = Options { operation_timeout: Duration::from_secs(3), ..Options::default() };
    let far = PostgresStore::open(&through, options).await.unwrap();
    let near = database.open().await;
    let (_, dead) = dead_letters(&near, LETTERS).await;
    near.close().await.unwrap();
    proxy.inject(Match::answer_to(""), Action::Delay(Duration::from_millis(25)));
    far.start_redrive(redrive_of(&dead)).await.unwrap();
    let start = std::time::Instant::now();
    loop {
        let task = hapax_conformance::attack::patiently(|| far.redrives(&dead)).await.remove(0);
        if task.moved == LETTERS as u64 {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{} letters were moved", task.moved);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn a_redrive_of_two_processes_moves_each_letter_once(server: &'static Server) {
    const LETTERS: usize = 250;
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let (name, dead) = dead_letters(&store, LETTERS).await;
    let request = redrive_of(&dead);
    let (one, two) = tokio::join!(store.start_redrive(request.clone()), second.start_redrive(request));
    // One at a time: the second is refused, unless the first was over before it began.
    assert!(one.is_ok() || two.is_ok(), "{one:?} {two:?}");
    let mut bodies_found = std::collections::BTreeSet::new();
    let start = std::time::Instant::now();
    while bodies_found.len() < LETTERS {
        assert!(start.elapsed() < PATIENCE, "{} letters came back", bodies_found.len());
        let (_, _) = tokio::join!(store.clock_moved(), second.clock_moved());
        let received = receive(&store, &name, LETTERS, 100).await;
        for body in bodies(&received) {
            assert!(bodies_found.insert(body.clone()), "{body} came back twice");
        }
        ack(&store, &name, received).await;
    }
    let moved: u64 = second.redrives(&dead).await.unwrap().iter().map(|task| task.moved).sum();
    assert_eq!(moved, LETTERS as u64);
    assert_eq!(second.stats(&dead).await.unwrap().ready, 0);
}

//! Receives that wait: what goes wrong for one of them or in one message harms no other, and many that wait cost little.

mod common;

use std::time::Duration;

use common::{Database, Server};
use hapax_core::{
    Browse, DedupId, Delivery, Extend, FailureCause, GroupId, MessageState, NewMessage, OnDead,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, StoreError,
};
use hapax_faults::{Action, FaultProxy, Match, Protocol};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_look_that_panics_does_not_hang_later_receives,
        a_damaged_message_is_set_aside_and_the_others_are_delivered,
        a_damaged_message_halts_its_group_where_the_queue_says_so,
        a_damaged_lease_does_not_keep_others_from_ending,
        a_receive_waits_on_when_its_queue_is_created_again,
        a_message_that_no_hint_tells_of_is_received,
        a_hint_of_another_process_wakes_a_receive,
        many_waiting_receives_take_few_statements,
    ])
}

/// More than enough time for anything that is not stuck.
const PATIENCE: Duration = Duration::from_secs(30);

fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

async fn create(store: &PostgresStore, name: &str) -> QueueName {
    let name = queue(name);
    let config = if name.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
    store.create_queue(&name, config).await.unwrap();
    name
}

async fn send(store: &PostgresStore, name: &QueueName, body: &str) {
    let mut message = NewMessage::new(body.to_owned());
    if name.is_fifo() {
        message = message.group(GroupId::new("g").unwrap()).dedup(DedupId::new(body).unwrap());
    }
    store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
}

async fn try_receive(
    store: &PostgresStore,
    name: &QueueName,
    wait_ms: u64,
) -> Result<Vec<Delivery>, StoreError> {
    let ask = Receive { wait_ms: Some(wait_ms), ..Receive::up_to(10) };
    tokio::time::timeout(PATIENCE, store.receive(name, ask)).await.expect("a receive ends")
}

fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8(delivery.body.to_vec()).unwrap()).collect()
}

/// Has the database answer a receive with a slot that was not asked for, and ends that again.
async fn answer_wrongly(database: &Database, wrongly: bool) {
    let mut connection = database.connect().await;
    // Servers of versions before use those with fewer arguments.
    let sql = "SELECT oidvectortypes(proargtypes), pronargs::int FROM pg_proc WHERE proname = 'q_recv_fifo' \
               ORDER BY pronargs DESC LIMIT 1";
    let row = connection.fetch_one(sql).await.unwrap();
    let (types, count): (String, i32) = (row.get(0), row.get(1));
    if !wrongly {
        let right = format!(
            "DROP FUNCTION hapax.q_recv_fifo({types}); ALTER FUNCTION hapax.q_recv_fifo_right RENAME TO q_recv_fifo"
        );
        connection.execute(right.as_str()).await.unwrap();
        return;
    }
    let arguments: Vec<String> = (1..=count).map(|at| format!("${at}")).collect();
    let sql = format!(
        "ALTER FUNCTION hapax.q_recv_fifo({types}) RENAME TO q_recv_fifo_right;
         CREATE FUNCTION hapax.q_recv_fifo({types}) RETURNS TABLE (slot int, now_ms bigint, m hapax.q_claim) LANGUAGE sql
         AS 'SELECT CASE WHEN r.slot > 0 THEN 99 ELSE r.slot END, r.now_ms, r.m FROM hapax.q_recv_fifo_right({}) r'",
        arguments.join(", ")
    );
    connection.execute(sql.as_str()).await.unwrap();
}

async fn a_look_that_panics_does_not_hang_later_receives(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = create(&store, "orders.fifo").await;
    send(&store, &name, "one").await;
    answer_wrongly(&database, true).await;
    let interrupted = try_receive(&store, &name, 0).await;
    assert!(matches!(interrupted, Err(StoreError::Unavailable(_))), "{interrupted:?}");
    answer_wrongly(&database, false).await;
    let two = NewMessage::new("two").group(GroupId::new("h").unwrap()).dedup(DedupId::new("two").unwrap());
    store.send(&name, vec![two]).await.unwrap().remove(0).unwrap();
    let received = try_receive(&store, &name, 0).await.unwrap();
    assert_eq!(bodies(&received), ["two"], "the first is leased until its lease ends");
}

/// Every column that can be damaged, in both kinds of queues.
/// A damaged message is parked after the others of its receive were handed out.
async fn until_parked(store: &PostgresStore, name: &QueueName) {
    let start = std::time::Instant::now();
    while store.stats(name).await.unwrap().parked == 0 {
        assert!(start.elapsed() < PATIENCE, "no message of {name} was parked");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn a_damaged_message_is_set_aside_and_the_others_are_delivered(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let mut connection = database.connect().await;
    for (number, damage) in ["story = '{'", "attrs = '[1]'", "key = ''", "dedup = ''"].into_iter().enumerate()
    {
        for (kind, table) in [("", "q_ready"), (".fifo", "q_fifo")] {
            let name = create(&store, &format!("orders{number}{kind}")).await;
            for body in ["one", "two", "three"] {
                send(&store, &name, body).await;
            }
            let sql = format!(
                "UPDATE hapax.{table} SET {damage} WHERE body = 'two' \
                 AND queue_id = (SELECT id FROM hapax.q_queue WHERE name = '{name}')"
            );
            connection.execute(sql.as_str()).await.unwrap();
            let received = try_receive(&store, &name, 0).await.unwrap();
            assert_eq!(bodies(&received), ["one", "three"], "{name}, {damage}");
            let acks = received.into_iter().map(|one| hapax_core::Settle::ack(one.receipt)).collect();
            for settled in store.settle(&name, acks).await.unwrap() {
                settled.unwrap();
            }
            assert_eq!(try_receive(&store, &name, 0).await.unwrap(), [], "{name}, {damage}");
            until_parked(&store, &name).await;
            let stats = store.stats(&name).await.unwrap();
            assert_eq!((stats.parked, stats.ready, stats.in_flight), (1, 0, 0), "{name}, {damage}");
            assert_eq!((stats.totals.damaged, stats.totals.delivered), (1, 2), "{name}, {damage}");
            let parked = Browse { state: Some(MessageState::Parked), limit: 10, ..Browse::default() };
            let view = store.browse(&name, parked).await.unwrap().items.remove(0);
            assert_eq!(view.body.as_deref(), Some(b"two".as_slice()), "{name}, {damage}");
            assert_eq!(view.deliveries, 0, "{name}, {damage}: no consumer has received it");
            let (cause, reason) = view.parked.unwrap();
            let column = damage.split(' ').next().unwrap();
            assert_eq!(cause, FailureCause::Damaged, "{name}, {damage}");
            assert!(reason.as_ref().is_some_and(|reason| reason.contains(column)), "{damage}: {reason:?}");
            assert_eq!(store.discard(&name, vec![view.id], "test").await.unwrap().count, 1);
        }
    }
}

async fn a_damaged_message_halts_its_group_where_the_queue_says_so(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = queue("orders.fifo");
    let config = QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::sqs_fifo() };
    store.create_queue(&name, config).await.unwrap();
    for body in ["one", "two", "three"] {
        send(&store, &name, body).await;
    }
    let damage = "UPDATE hapax.q_fifo SET story = '{' WHERE body = 'two'";
    database.connect().await.execute(damage).await.unwrap();
    let received = try_receive(&store, &name, 0).await.unwrap();
    assert_eq!(bodies(&received), ["one"], "what is behind the damaged message is not delivered");
    let acks = received.into_iter().map(|one| hapax_core::Settle::ack(one.receipt)).collect();
    store.settle(&name, acks).await.unwrap().remove(0).unwrap();
    assert_eq!(try_receive(&store, &name, 0).await.unwrap(), []);
    until_parked(&store, &name).await;
    assert_eq!(store.halted_groups(&name).await.unwrap(), [GroupId::new("g").unwrap()]);
    let parked = Browse { state: Some(MessageState::Parked), limit: 10, ..Browse::default() };
    let view = store.browse(&name, parked).await.unwrap().items.remove(0);
    store.discard(&name, vec![view.id], "test").await.unwrap();
    assert_eq!(bodies(&try_receive(&store, &name, 0).await.unwrap()), ["three"]);
}

async fn a_damaged_lease_does_not_keep_others_from_ending(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    let mut names = Vec::new();
    for name in ["a", "b", "c"] {
        let name = create(&store, name).await;
        send(&store, &name, "one").await;
        assert_eq!(try_receive(&store, &name, 0).await.unwrap().len(), 1);
        names.push(name);
    }
    let damage = "UPDATE hapax.q_claim SET story = '{' \
                  WHERE queue_id = (SELECT id FROM hapax.q_queue WHERE name = 'b')";
    database.connect().await.execute(damage).await.unwrap();
    clock.advance_ms(60_000).await;
    store.clock_moved().await.unwrap();
    store.quiet().await;
    let mut found = Vec::new();
    for name in &names {
        let stats = store.stats(name).await.unwrap();
        found.push((stats.ready, stats.in_flight, stats.parked));
    }
    assert_eq!(found, [(1, 0, 0), (0, 0, 1), (1, 0, 0)]);
}

async fn a_receive_waits_on_when_its_queue_is_created_again(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, other) = (database.open().await, database.open().await);
    let name = create(&store, "orders").await;
    let waiting = {
        let (store, name) = (store.clone(), name.clone());
        tokio::spawn(async move { try_receive(&store, &name, 20_000).await })
    };
    store.quiet().await;
    // In one transaction, so that no look finds it missing.
    let mut connection = database.connect().await;
    let again = "BEGIN; CREATE TEMPORARY TABLE old AS SELECT * FROM hapax.q_queue; DELETE FROM hapax.q_queue;
                 INSERT INTO hapax.q_queue (name, config, revision, version, created_ms, modified_ms)
                 SELECT name, config, revision + 1, version + 1, created_ms, modified_ms FROM old; COMMIT";
    connection.execute(again).await.unwrap();
    send(&other, &name, "one").await;
    assert_eq!(bodies(&waiting.await.unwrap().unwrap()), ["one"]);
}

/// Behind a pooler there is no LISTEN, and any hint may be lost: what others send is found by looking.
async fn a_message_that_no_hint_tells_of_is_received(server: &'static Server) {
    let database = Database::migrated(server).await;
    let pooled = Options { pooler: true, ..Options::default() };
    let store = PostgresStore::open(&database.url(), pooled.clone()).await.unwrap();
    let other = PostgresStore::open(&database.url(), pooled).await.unwrap();
    for kind in ["orders", "orders.fifo"] {
        let name = create(&store, kind).await;
        for round in 0..3 {
            let waiting = {
                let (store, name) = (store.clone(), name.clone());
                tokio::spawn(async move { try_receive(&store, &name, 20_000).await })
            };
            store.quiet().await;
            send(&other, &name, &format!("{round}")).await;
            let received = waiting.await.unwrap().unwrap();
            assert_eq!(bodies(&received), [format!("{round}")], "{name}");
            // A message that is returned keeps its place behind the floor of this process.
            let back = Extend { receipt: received[0].receipt.clone(), lease_ms: 0, own_lease: false };
            other.extend(&name, vec![back]).await.unwrap().remove(0).unwrap();
            let received = try_receive(&store, &name, 20_000).await.unwrap();
            assert_eq!(bodies(&received), [format!("{round}")], "{name}");
            let acks = received.into_iter().map(|one| hapax_core::Settle::ack(one.receipt)).collect();
            store.settle(&name, acks).await.unwrap().remove(0).unwrap();
        }
    }
}

/// 1,000 receives wait at 100 queues. A slow machine takes fewer statements, not more.
async fn many_waiting_receives_take_few_statements(server: &'static Server) {
    const QUEUES: usize = 100;
    const RECEIVES: usize = 10;
    let database = Database::migrated(server).await;
    let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
    let through = database.url().replace(&server.address().to_string(), &proxy.address().to_string());
    assert_ne!(through, database.url());
    let store = PostgresStore::open(&through, Options::default()).await.unwrap();
    let mut names = Vec::new();
    for number in 0..QUEUES {
        let kind = if number % 2 == 0 { "" } else { ".fifo" };
        names.push(create(&store, &format!("queue{number}{kind}")).await);
    }
    let mut waiting = Vec::new();
    for name in names.iter().flat_map(|name| std::iter::repeat_n(name, RECEIVES)) {
        let (store, name) = (store.clone(), name.clone());
        waiting.push(tokio::spawn(async move { try_receive(&store, &name, 20_000).await }));
    }
    // Those that begin during the first wait are waited for by the second.
    for _ in 0..2 {
        store.quiet().await;
    }
    // What is done once may still be under way in the first of these times, on a slow machine.
    for is_last in [false, true] {
        let answers = proxy.inject(Match::answer_to(""), Action::Delay(Duration::ZERO)).times(u64::MAX);
        let start = std::time::Instant::now();
        tokio::time::sleep(Duration::from_secs(6)).await;
        let (count, took) = (answers.count(), start.elapsed());
        answers.remove();
        println!("{count} statements in {took:?}");
        assert!(count > 0, "the statements are counted");
        let allowed = 5 * (took.as_secs() + 1);
        if count <= allowed {
            break;
        }
        assert!(!is_last, "{count} statements in {took:?}, at most {allowed}");
    }
    // They are still woken, each by its own message.
    for name in [&names[0], &names[1]] {
        send(&store, name, "one").await;
    }
    let mut received = 0;
    for task in waiting {
        received += task.await.unwrap().unwrap().len();
    }
    assert_eq!(received, 2);
}

/// By NOTIFY alone: the database answers no look for what waiting receives can have.
async fn a_hint_of_another_process_wakes_a_receive(server: &'static Server) {
    const LOOK: &str = "hapax.q_waiting(p_queue int[], p_prio smallint[], p_floor bigint[])";
    let database = Database::migrated(server).await;
    if server.has_pooler() && !database.url().contains("hapax_listen_url") {
        // A pooler passes no hints on.
        return;
    }
    let mut admin = database.connect().await;
    // It is the function that the program calls.
    admin.execute("SELECT 'hapax.q_waiting(int[], smallint[], bigint[])'::regprocedure").await.unwrap();
    let blind =
        format!("CREATE OR REPLACE FUNCTION {LOOK} RETURNS SETOF int LANGUAGE plpgsql AS 'BEGIN END'");
    admin.execute(blind.as_str()).await.unwrap();
    let (store, other) = (database.open().await, database.open().await);
    for name in ["jobs", "jobs.fifo"] {
        let name = create(&store, name).await;
        for round in 0..3 {
            let waiting = {
                let (store, name) = (store.clone(), name.clone());
                let ask = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
                tokio::spawn(async move { store.receive(&name, ask).await.unwrap() })
            };
            // Usually it waits then. If it does not yet, its own look finds the message.
            tokio::time::sleep(Duration::from_millis(200)).await;
            let body = format!("m{round}");
            send(&other, &name, &body).await;
            let got = waiting.await.unwrap();
            assert_eq!(bodies(&got), [body], "{name}: no hint has woken the receive");
            let ack = hapax_core::Settle::ack(got[0].receipt.clone());
            store.settle(&name, vec![ack]).await.unwrap().remove(0).unwrap();
        }
    }
}

//! A transaction that is open for long keeps every deleted row in its table. A receive that begins behind what is gone
//! reads as little as in an empty table.

mod common;

use common::{Database, Server};
use hapax_core::{
    DeadLetterPolicy, DedupId, Delivery, GroupId, NewMessage, OnDead, QueueAdmin as _, QueueConfig,
    QueueName, QueueStore as _, Receive, Settle, Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Messages that pass through the queue while the transaction is open.
const PASSED: usize = 3_000;

/// Pages that a receive reads, from a place on.
async fn pages_of_a_receive(db: &mut PgConnection, version: i64, floor: i64) -> i64 {
    let sql = format!(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT slot FROM hapax.q_take(1, {version}, '{{0}}', '{{{floor}}}', \
         '{{30000}}', '{{NULL}}', 1000000000, NULL, hapax.now_ms() - 1000)"
    );
    let mut rolled_back = db.begin().await.unwrap();
    // The first call plans; the second one is measured.
    rolled_back.execute(sql.as_str()).await.unwrap();
    let row = rolled_back.fetch_one(sql.as_str()).await.unwrap();
    let plan: serde_json::Value = row.get(0);
    let of = |name: &str| plan[0]["Plan"][name].as_i64().expect("a number");
    of("Shared Hit Blocks") + of("Shared Read Blocks")
}

async fn a_receive_behind_its_floor_reads_nothing_of_what_is_gone(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let mut holder = database.connect().await;
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    holder.execute("SELECT count(*) FROM hapax.q_ready").await.unwrap();

    let mut passed = 0;
    while passed < PASSED {
        store.send(&jobs, vec![NewMessage::new("x".repeat(500)); 500]).await.unwrap();
        let got = store.receive(&jobs, Receive::up_to(500)).await.unwrap();
        assert_eq!(got.len(), 500, "a receive behind the floor misses nothing");
        passed += got.len();
        let acks = got.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
        assert!(store.settle(&jobs, acks).await.unwrap().iter().all(Result::is_ok));
    }
    let mut db = database.connect().await;
    let version: i64 = sqlx::query_scalar("SELECT version FROM hapax.q_queue WHERE id = 1")
        .fetch_one(&mut db)
        .await
        .unwrap();
    let last: i64 =
        sqlx::query_scalar("SELECT last_value FROM hapax.q_seq").fetch_one(&mut db).await.unwrap();
    let from_zero = pages_of_a_receive(&mut db, version, 0).await;
    let behind = pages_of_a_receive(&mut db, version, last).await;
    assert!(from_zero > PASSED as i64 / 20, "the rows that are gone are still there: {from_zero} pages");
    assert!(behind < from_zero / 4, "{behind} pages behind the floor, {from_zero} from the first");
    holder.execute("ROLLBACK").await.unwrap();
    store.shut_down();
}

async fn fifo(database: &Database) -> (PostgresStore, QueueName) {
    let (store, jobs) = (database.open().await, QueueName::new("jobs.fifo").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs_fifo()).await.unwrap();
    (store, jobs)
}

async fn send(store: &PostgresStore, jobs: &QueueName, group: &str, body: &str) {
    let message = NewMessage::new(body.to_owned()).group(GroupId::new(group).unwrap());
    store.send(jobs, vec![message.dedup(DedupId::new(body).unwrap())]).await.unwrap().remove(0).unwrap();
}

async fn receive(store: &PostgresStore, jobs: &QueueName) -> Vec<Delivery> {
    store.receive(jobs, Receive { wait_ms: Some(0), ..Receive::up_to(1) }).await.unwrap()
}

fn body(got: &[Delivery]) -> &str {
    got.first().map_or("nothing", |delivery| std::str::from_utf8(&delivery.body).unwrap())
}

/// A receive does not wait for a group that is locked, for example by a send. It must not take it for gone: the floor would pass it,
/// and only a look further back would find it.
async fn a_group_that_a_receive_passed_over_is_received_as_soon_as_it_is_free(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    for group in ["a", "b", "c", "d"] {
        send(&store, &jobs, group, group).await;
    }
    // The looks at everything are over.
    assert_eq!(body(&receive(&store, &jobs).await), "a");
    let mut holder = database.connect().await;
    holder.execute("BEGIN; SELECT 1 FROM hapax.q_group WHERE grp = 'b' FOR UPDATE").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "c", "a group that is locked is passed over");
    // Longer than the floor lags.
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(body(&receive(&store, &jobs).await), "d");
    holder.execute("ROLLBACK").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "b");
    store.shut_down();
}

/// A group goes behind the others when its next message can be delivered, so no backlog of one group holds up the others.
async fn groups_take_turns(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    for (group, body) in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")] {
        send(&store, &jobs, group, body).await;
    }
    let mut order = Vec::new();
    for _ in 0..6 {
        let got = receive(&store, &jobs).await;
        order.push(body(&got).to_owned());
        store.settle(&jobs, vec![Settle::ack(got[0].receipt.clone())]).await.unwrap().remove(0).unwrap();
    }
    assert_eq!(order, ["a1", "b1", "c1", "a2", "b2", "a3"]);
    store.shut_down();
}

/// What a dropped receive gives back keeps its place, and its group its place among the groups.
async fn a_group_that_was_given_back_keeps_its_turn(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    let mut db = database.connect().await;
    let waiting = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
    let mut dropped = store.receive(&jobs, waiting);
    assert!(is_pending(&mut dropped).await, "nothing is there yet");
    send(&store, &jobs, "g", "g1").await;
    // What it knew of the queue may have been out of date, so that it does not wait yet: another poll continues it.
    let start = Instant::now();
    while in_flight(&mut db).await == 0 {
        assert!(start.elapsed() < common::PATIENCE, "it is delivered");
        tokio::time::sleep(Duration::from_millis(200)).await;
        if in_flight(&mut db).await == 0 {
            assert!(is_pending(&mut dropped).await, "nothing was delivered");
        }
    }
    send(&store, &jobs, "h", "h1").await;
    send(&store, &jobs, "i", "i1").await;
    drop(dropped);
    while in_flight(&mut db).await > 0 {
        assert!(start.elapsed() < common::PATIENCE, "it is given back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut order = Vec::new();
    for _ in 0..3 {
        order.push(body(&receive(&store, &jobs).await).to_owned());
    }
    assert_eq!(order, ["g1", "h1", "i1"]);
    store.shut_down();
}

async fn in_flight(db: &mut PgConnection) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM hapax.q_claim").fetch_one(db).await.unwrap()
}

/// A group that was announced late: its transaction drew its number, and committed when receives had passed it.
async fn announced_late(server: &'static Server) -> (Database, PostgresStore, QueueName, PgConnection) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    let mut db = database.connect().await;
    for group in ["a", "late", "c", "d", "e"] {
        send(&store, &jobs, group, group).await;
    }
    assert_eq!(body(&receive(&store, &jobs).await), "a");
    let announced = "CREATE TABLE public.announced AS SELECT * FROM hapax.q_head WHERE grp = 'late'";
    db.execute(announced).await.unwrap();
    db.execute("DELETE FROM hapax.q_head WHERE grp = 'late'").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "c");
    // Longer than the floor lags.
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(body(&receive(&store, &jobs).await), "d");
    db.execute("INSERT INTO hapax.q_head SELECT * FROM public.announced").await.unwrap();
    // The time of the next look further back.
    tokio::time::sleep(Duration::from_millis(1_050)).await;
    (database, store, jobs, db)
}

/// A receive of a FIFO queue that meets a lease that is over looks at nothing else. The look further back that was due is made by the
/// next one.
async fn a_look_further_back_is_not_spent_on_a_lease_that_is_over(server: &'static Server) {
    let (_database, store, jobs, mut db) = announced_late(server).await;
    db.execute("UPDATE hapax.q_claim SET until_ms = hapax.now_ms() - 1 WHERE grp = 'a'").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "late");
    store.shut_down();
}

/// Nor on a group that another transaction has locked at that moment: it is looked for again.
async fn a_late_group_that_was_locked_is_looked_for_again(server: &'static Server) {
    let (database, store, jobs, _db) = announced_late(server).await;
    let mut holder = database.connect().await;
    holder.execute("BEGIN; SELECT 1 FROM hapax.q_group WHERE grp = 'late' FOR UPDATE").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "e");
    holder.execute("ROLLBACK").await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "late");
    store.shut_down();
}

/// A receive that has locked a group without a message for it waits for no other group: who holds that may wait for the first one.
async fn a_receive_that_holds_a_group_waits_for_no_other(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    for group in ["empty", "held"] {
        send(&store, &jobs, group, group).await;
    }
    let mut holder = database.connect().await;
    // As a purge leaves it that comes between a send's message and its answer.
    holder.execute("DELETE FROM hapax.q_fifo WHERE grp = 'empty'").await.unwrap();
    holder.execute("BEGIN; SELECT 1 FROM hapax.q_group WHERE grp = 'held' FOR UPDATE").await.unwrap();
    let mut waiting = tokio::spawn({
        let (store, jobs) = (store.clone(), jobs.clone());
        async move { receive(&store, &jobs).await }
    });
    // The look in which it finds that the first group is empty ends, and frees it. Only then one waits for the other group.
    let mut db = database.connect().await;
    let heads = "SELECT count(*) FROM hapax.q_head WHERE grp = 'empty'";
    let start = Instant::now();
    while db.fetch_one(heads).await.unwrap().get::<i64, _>(0) > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "a receive holds the empty group, and waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    holder.execute("ROLLBACK").await.unwrap();
    let got = tokio::time::timeout(common::PATIENCE, &mut waiting).await.unwrap().unwrap();
    assert!(["held", "nothing"].contains(&body(&got)));
    if got.is_empty() {
        assert_eq!(body(&receive(&store, &jobs).await), "held");
    }
    store.shut_down();
}

/// Waits until that many sessions wait for a lock in such a statement.
async fn waits_for_locks(db: &mut PgConnection, statement: &str, sessions: i64) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND strpos(query, $1) > 0";
    let start = Instant::now();
    while sqlx::query_scalar::<_, i64>(sql).bind(statement).fetch_one(&mut *db).await.unwrap() < sessions {
        assert!(start.elapsed() < common::PATIENCE, "{statement} waits for a lock");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A group that sends make while the queue is purged keeps its messages and its head.
async fn a_group_made_during_a_purge_is_not_stuck(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    send(&store, &jobs, "old", "old").await;
    let mut db = database.connect().await;
    let (mut before, mut after) = (database.connect().await, database.connect().await);
    before.execute("BEGIN; SELECT 1 FROM hapax.q_group FOR UPDATE").await.unwrap();
    after.execute("BEGIN; SELECT 1 FROM hapax.q_head FOR UPDATE").await.unwrap();
    let purging = tokio::spawn({
        let (store, jobs) = (store.clone(), jobs.clone());
        async move { store.purge(&jobs).await }
    });
    waits_for_locks(&mut db, "hapax.q_group", 1).await;
    send(&store, &jobs, "new", "new").await;
    before.execute("ROLLBACK").await.unwrap();
    waits_for_locks(&mut db, "DELETE FROM hapax.q_head", 1).await;
    send(&store, &jobs, "new", "newer").await;
    after.execute("ROLLBACK").await.unwrap();
    assert_eq!(purging.await.unwrap().unwrap(), 1);
    for expected in ["new", "newer"] {
        let got = receive(&store, &jobs).await;
        assert_eq!(body(&got), expected);
        store.settle(&jobs, vec![Settle::ack(got[0].receipt.clone())]).await.unwrap().remove(0).unwrap();
    }
    store.shut_down();
}

/// A FIFO queue whose group `g` is halted by a message that dies, and its dead letters.
async fn halting(database: &Database) -> (PostgresStore, QueueName, QueueName) {
    let (store, dead) = fifo(database).await;
    let jobs = QueueName::new("halts.fifo").unwrap();
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    let config = QueueConfig { on_dead: OnDead::HaltGroup, dead_letter, ..QueueConfig::sqs_fifo() };
    store.create_queue(&jobs, config).await.unwrap();
    for body in ["dies", "next"] {
        send(&store, &jobs, "g", body).await;
    }
    (store, jobs, dead)
}

async fn reject(store: &PostgresStore, jobs: &QueueName) {
    let got = receive(store, jobs).await;
    let reject = Settlement::Reject { reason: "no".into() };
    store.settle(jobs, vec![Settle::new(got[0].receipt.clone(), reject)]).await.unwrap().remove(0).unwrap();
}

/// A group waits for its letter. A purge that deletes the letter lets the group continue, also if the letter came while it waited.
async fn a_purge_lets_a_group_continue_whose_letter_came_while_it_waited(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs, dead) = halting(&database).await;
    // Makes the group among the dead letters.
    send(&store, &dead, "g", "earlier").await;
    let (mut holder, mut db) = (database.connect().await, database.connect().await);
    let lock = "BEGIN; SELECT 1 FROM hapax.q_group g JOIN hapax.q_queue q ON q.id = g.queue_id WHERE q.name = 'jobs.fifo' FOR UPDATE OF g";
    assert_eq!(holder.fetch_all(sqlx::raw_sql(lock)).await.unwrap().len(), 1);
    let dying = tokio::spawn({
        let (store, jobs) = (store.clone(), jobs.clone());
        async move { reject(&store, &jobs).await }
    });
    waits_for_locks(&mut db, "hapax.q_group", 1).await;
    let purging = tokio::spawn({
        let (store, dead) = (store.clone(), dead.clone());
        async move { store.purge(&dead).await }
    });
    waits_for_locks(&mut db, "hapax.q_group", 2).await;
    holder.execute("ROLLBACK").await.unwrap();
    dying.await.unwrap();
    assert_eq!(purging.await.unwrap().unwrap(), 2);
    assert_eq!(body(&receive(&store, &jobs).await), "next");
    store.shut_down();
}

/// The same of a letter that a user's transaction has acked.
async fn a_purge_lets_a_group_continue_whose_letter_was_acked(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs, dead) = halting(&database).await;
    reject(&store, &jobs).await;
    let letter = receive(&store, &dead).await.remove(0);
    let mut db = database.connect().await;
    // It is not told to the store, which would follow it.
    let settle = "SELECT hapax.q_settle(id, $1, $2) FROM hapax.q_queue WHERE name = 'jobs.fifo'";
    let settle = sqlx::query(settle).bind(letter.sequence as i64).bind(letter.fence.0 as i64);
    settle.execute(&mut db).await.unwrap();
    store.purge(&dead).await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "next");
    store.shut_down();
}

/// A message that a purge leaves, since it was sent meanwhile, is known by its deduplication id.
async fn a_message_that_is_sent_during_a_purge_is_not_sent_twice(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    send(&store, &jobs, "old", "old").await;
    let (mut holder, mut db) = (database.connect().await, database.connect().await);
    holder.execute("BEGIN; SELECT 1 FROM hapax.q_group FOR UPDATE").await.unwrap();
    let purging = tokio::spawn({
        let (store, jobs) = (store.clone(), jobs.clone());
        async move { store.purge(&jobs).await }
    });
    waits_for_locks(&mut db, "hapax.q_group", 1).await;
    send(&store, &jobs, "new", "new").await;
    holder.execute("ROLLBACK").await.unwrap();
    assert_eq!(purging.await.unwrap().unwrap(), 1);
    send(&store, &jobs, "new", "new").await;
    let got = store.receive(&jobs, Receive { wait_ms: Some(0), ..Receive::up_to(10) }).await.unwrap();
    assert_eq!(got.len(), 1, "its repetition is a duplicate");
    store.shut_down();
}

/// Polls once; says whether it is pending.
async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending())
    })
    .await
}

/// A message that returns to a place before the others of its group (an operator releases it) is found there, though the group's
/// place had been moved up.
async fn a_released_message_is_found_below_the_place_of_its_group(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = fifo(&database).await;
    send(&store, &jobs, "g", "first").await;
    send(&store, &jobs, "g", "second").await;
    let got = receive(&store, &jobs).await;
    let park = Settlement::Park { reason: "in doubt".into() };
    store.settle(&jobs, vec![Settle::new(got[0].receipt.clone(), park)]).await.unwrap().remove(0).unwrap();
    let second = receive(&store, &jobs).await;
    assert_eq!(body(&second), "second", "a queue made over SQS continues");
    let mut db = database.connect().await;
    let low: i64 = sqlx::query_scalar("SELECT low FROM hapax.q_group").fetch_one(&mut db).await.unwrap();
    assert_eq!(low as u64, second[0].sequence, "the group's place is that of its first message");
    store.release(&jobs, vec![got[0].id]).await.unwrap();
    assert_eq!(body(&receive(&store, &jobs).await), "first", "it is before the one in flight");
    store.shut_down();
}

fn main() -> ExitCode {
    common::main(tests![
        a_receive_behind_its_floor_reads_nothing_of_what_is_gone,
        a_group_that_a_receive_passed_over_is_received_as_soon_as_it_is_free,
        groups_take_turns,
        a_group_that_was_given_back_keeps_its_turn,
        a_look_further_back_is_not_spent_on_a_lease_that_is_over,
        a_late_group_that_was_locked_is_looked_for_again,
        a_receive_that_holds_a_group_waits_for_no_other,
        a_group_made_during_a_purge_is_not_stuck,
        a_purge_lets_a_group_continue_whose_letter_came_while_it_waited,
        a_purge_lets_a_group_continue_whose_letter_was_acked,
        a_message_that_is_sent_during_a_purge_is_not_sent_twice,
        a_released_message_is_found_below_the_place_of_its_group,
    ])
}

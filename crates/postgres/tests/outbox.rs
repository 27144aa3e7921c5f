//! The outbox in SQL: what is read, in which order, by which relay, and when it is deleted.

mod common;

use std::time::Duration;

use common::{Clock, Database, PATIENCE, Server};
use hapax_core::outbox::{
    Advance, BucketLease, HeldMessage, NewOutboxMessage, OutboxMessage, OutboxStore as _, SinkDedup,
    SinkDescription,
};
use hapax_postgres::PostgresOutbox;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_message_exists_if_its_transaction_commits,
        every_body_and_header_arrives_as_written,
        the_number_is_drawn_after_the_lock,
        a_number_that_commits_late_is_waited_for,
        only_writers_of_the_bucket_are_waited_for,
        a_prepared_transaction_is_waited_for,
        a_prepared_transaction_is_waited_for_after_a_restart,
        polls_of_several_relays_do_not_mislead_each_other,
        relays_share_the_buckets,
        a_lapsed_relay_is_fenced,
        a_table_is_emptied_when_every_route_has_published_it,
        a_writer_that_stays_open_keeps_its_own_table_only,
        what_no_route_takes_is_kept,
        positions_survive_their_own_rotation,
        held_messages_keep_the_order_of_their_key,
        an_operator_retries_and_skips,
        a_skipped_message_that_was_published_meanwhile_keeps_its_key_held,
        a_route_with_a_running_relay_is_not_forgotten,
        a_position_behind_the_relay_s_own_is_noticed,
        arguments_out_of_range_are_refused,
    ])
}

struct Fixture {
    outbox: PostgresOutbox,
    clock: Clock,
    database: Database,
}

impl Fixture {
    async fn new(server: &'static Server) -> Self {
        let database = Database::migrated(server).await;
        let clock = database.with_clock().await;
        let outbox = database.open().await.outbox().unwrap();
        Self { outbox, clock, database }
    }

    async fn enqueue(&self, db: &mut PgConnection, key: &str, body: &str) -> String {
        let message = NewOutboxMessage::new("orders", body.to_owned()).key(key);
        self.outbox.enqueue(db, &message).await.unwrap()
    }

    /// What can be read from the start.
    async fn readable(&self) -> Vec<OutboxMessage> {
        let all: Vec<(u16, u64)> = (0..64).map(|bucket| (bucket, 0)).collect();
        let ranges = self.outbox.poll("r", &all).await.unwrap().ranges;
        self.outbox.read(&ranges, 100, 1 << 20).await.unwrap()
    }

    async fn bodies(&self) -> Vec<String> {
        self.readable()
            .await
            .iter()
            .map(|message| String::from_utf8_lossy(&message.body).into_owned())
            .collect()
    }

    /// A relay of the route `r` holds every bucket.
    async fn relay(&self) -> Vec<BucketLease> {
        self.outbox.register("r", &["*".to_owned()], &sink()).await.unwrap();
        self.outbox.tend("r", "relay", 60_000).await.unwrap().held
    }

    /// Records that everything readable was published.
    async fn publish_all(&self, leases: &[BucketLease]) {
        let advances: Vec<Advance> = self
            .readable()
            .await
            .iter()
            .map(|message| advance(leases[usize::from(message.bucket)], message.number))
            .collect();
        assert!(self.outbox.advance("r", "relay", &advances).await.unwrap().is_empty());
    }

    /// Waits until the store has connections again after a restart of the server.
    async fn until_connected(&self) {
        let start = std::time::Instant::now();
        while self.outbox.status().await.is_err() {
            assert!(start.elapsed() < PATIENCE, "the store is not connected again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn size(&self) -> i64 {
        let sql = "SELECT sum(pg_relation_size(oid))::bigint FROM pg_class WHERE relname ~ '^outbox_[0-9]{2}_[01]$'";
        sqlx::query(sql).fetch_one(&mut self.database.connect().await).await.unwrap().try_get(0).unwrap()
    }
}

fn advance(lease: BucketLease, position: u64) -> Advance {
    Advance { lease, after: 0, position }
}

fn sink() -> SinkDescription {
    let (name, dedup) = ("test".to_owned(), SinkDedup::None);
    SinkDescription { name, dedup, delays: false, batch_max: 1, calls_max: 1, warnings: Vec::new() }
}

/// Keys of the same bucket, and one of another.
async fn keys(db: &mut PgConnection) -> (String, String, String) {
    let bucket = async |db: &mut PgConnection, key: &str| -> i32 {
        sqlx::query("SELECT hapax.outbox_bucket($1)")
            .bind(key)
            .fetch_one(db)
            .await
            .unwrap()
            .try_get(0)
            .unwrap()
    };
    let first = bucket(db, "key-0").await;
    let (mut same, mut other) = (None, None);
    for number in 1.. {
        let key = format!("key-{number}");
        let found = if bucket(db, &key).await == first { &mut same } else { &mut other };
        found.get_or_insert(key);
        if let (Some(same), Some(other)) = (&same, &other) {
            return ("key-0".to_owned(), same.clone(), other.clone());
        }
    }
    unreachable!()
}

async fn a_message_exists_if_its_transaction_commits(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let mut tx = db.begin().await.unwrap();
    it.enqueue(&mut tx, "a", "rolled back").await;
    tx.rollback().await.unwrap();
    let mut tx = db.begin().await.unwrap();
    it.enqueue(&mut tx, "a", "1").await;
    let mut savepoint = tx.begin().await.unwrap();
    it.enqueue(&mut savepoint, "a", "rolled back to the savepoint").await;
    savepoint.rollback().await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    it.enqueue(&mut savepoint, "a", "2").await;
    savepoint.commit().await.unwrap();
    it.enqueue(&mut tx, "a", "3").await;
    assert_eq!(it.bodies().await, [""; 0], "nothing before the commit");
    tx.commit().await.unwrap();
    assert_eq!(it.bodies().await, ["1", "2", "3"]);
}

async fn every_body_and_header_arrives_as_written(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let message = NewOutboxMessage::new("täglich", vec![0, 255, 1])
        .key("k")
        .header("tenant", "nörth")
        .traceparent("00-1-2-01")
        .deliver_at_ms(1_900_000_000_123);
    let id = it.outbox.enqueue(&mut db, &message).await.unwrap();
    db.execute("SELECT hapax.enqueue('t', 'k', 'text'), hapax.enqueue('t', 'k', '{\"a\": 1}'::jsonb, p_traceparent => '00-3')")
        .await
        .unwrap();
    let read = it.readable().await;
    let found = NewOutboxMessage {
        topic: read[0].topic.clone(),
        key: read[0].key.clone(),
        body: read[0].body.clone(),
        headers: read[0].headers.clone(),
        deliver_at_ms: read[0].deliver_at_ms,
    };
    assert_eq!((found, &read[0].id), (message, &id));
    assert_eq!((&read[1].body[..], &read[2].body[..]), (&b"text"[..], &b"{\"a\": 1}"[..]));
    assert_eq!(read[2].headers["traceparent"], "00-3");
}

async fn the_number_is_drawn_after_the_lock(server: &'static Server) {
    let it = Fixture::new(server).await;
    let (mut db, mut blocker) = (it.database.connect().await, it.database.connect().await);
    let (key, _, _) = keys(&mut db).await;
    let row =
        sqlx::query("SELECT lpad(hapax.outbox_bucket($1)::text, 2, '0')").bind(&key).fetch_one(&mut db).await;
    let bucket: String = row.unwrap().try_get(0).unwrap();
    // Often enough that the plan of the statement is kept and used again.
    let mut writer = it.database.connect().await;
    for number in 0..8 {
        it.enqueue(&mut writer, &key, &number.to_string()).await;
    }
    let mut tx = blocker.begin().await.unwrap();
    let lock = format!("LOCK TABLE hapax.outbox_{bucket}_0, hapax.outbox_{bucket}_1 IN SHARE MODE");
    tx.execute(lock.as_str()).await.unwrap();
    let (outbox, message) = (it.outbox.clone(), NewOutboxMessage::new("t", "1").key(key));
    let written = tokio::spawn(async move { outbox.enqueue(&mut writer, &message).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'RowExclusiveLock'";
    let start = std::time::Instant::now();
    while sqlx::query_scalar::<_, i64>(waits).fetch_one(&mut db).await.unwrap() == 0 {
        assert!(start.elapsed() < PATIENCE, "the writer does not wait for the lock");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let last = format!("SELECT pg_sequence_last_value('hapax.outbox_number_{bucket}'::regclass)");
    let last: Option<i64> = sqlx::query_scalar(&last).fetch_one(&mut db).await.unwrap();
    assert_eq!(last, Some(8), "no number was drawn");
    tx.rollback().await.unwrap();
    written.await.unwrap().unwrap();
}

async fn a_number_that_commits_late_is_waited_for(server: &'static Server) {
    let it = Fixture::new(server).await;
    let (mut slow, mut fast) = (it.database.connect().await, it.database.connect().await);
    let (key, same, _) = keys(&mut fast).await;
    let mut open = slow.begin().await.unwrap();
    it.enqueue(&mut open, &key, "slow").await;
    it.enqueue(&mut fast, &same, "fast").await;
    assert_eq!(it.bodies().await, [""; 0], "a lower number may still commit");
    let mut later = fast.begin().await.unwrap();
    it.enqueue(&mut later, &same, "later").await;
    assert_eq!(it.bodies().await, [""; 0]);
    open.commit().await.unwrap();
    assert_eq!(it.bodies().await, ["slow", "fast"], "the writer that came later is not waited for");
    later.commit().await.unwrap();
    assert_eq!(it.bodies().await, ["slow", "fast", "later"]);
}

async fn only_writers_of_the_bucket_are_waited_for(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    db.execute("CREATE TABLE other (number int)").await.unwrap();
    let (key, _, other) = keys(&mut db).await;
    let (mut elsewhere, mut writer) = (it.database.connect().await, it.database.connect().await);
    let mut unrelated = elsewhere.begin().await.unwrap();
    unrelated.execute("INSERT INTO other VALUES (1)").await.unwrap();
    let mut in_other_bucket = writer.begin().await.unwrap();
    it.enqueue(&mut in_other_bucket, &other, "other").await;
    it.enqueue(&mut db, &key, "1").await;
    assert_eq!(it.bodies().await, ["1"]);
}

async fn a_prepared_transaction_is_waited_for(_shared: &'static Server) {
    let server = Server::start(&["fsync=off", "max_prepared_transactions=5"]).unwrap();
    let it = Fixture::new(Box::leak(Box::new(server))).await;
    let (mut slow, mut fast) = (it.database.connect().await, it.database.connect().await);
    let (key, same, _) = keys(&mut fast).await;
    slow.execute("BEGIN").await.unwrap();
    it.enqueue(&mut slow, &key, "slow").await;
    it.enqueue(&mut fast, &same, "fast").await;
    assert_eq!(it.bodies().await, [""; 0]);
    slow.execute("PREPARE TRANSACTION 'slow'").await.unwrap();
    assert_eq!(it.bodies().await, [""; 0], "it is not open any more, but may still commit");
    slow.execute("COMMIT PREPARED 'slow'").await.unwrap();
    assert_eq!(it.bodies().await, ["slow", "fast"]);
}

/// A restart gives the transaction another name.
async fn a_prepared_transaction_is_waited_for_after_a_restart(_shared: &'static Server) {
    let server = Server::start(&["fsync=off", "max_prepared_transactions=5"]).unwrap();
    let server: &'static Server = Box::leak(Box::new(server));
    let it = Fixture::new(server).await;
    let (mut slow, mut fast) = (it.database.connect().await, it.database.connect().await);
    let (key, same, _) = keys(&mut fast).await;
    slow.execute("BEGIN").await.unwrap();
    it.enqueue(&mut slow, &key, "slow").await;
    it.enqueue(&mut fast, &same, "fast").await;
    assert_eq!(it.bodies().await, [""; 0]);
    slow.execute("PREPARE TRANSACTION 'slow'").await.unwrap();
    server.stop("QUIT");
    server.run().unwrap();
    it.until_connected().await;
    assert_eq!(it.bodies().await, [""; 0], "it may still commit");
    let mut later = it.database.connect().await;
    let mut open = later.begin().await.unwrap();
    it.enqueue(&mut open, &same, "later").await;
    it.database.connect().await.execute("COMMIT PREPARED 'slow'").await.unwrap();
    assert_eq!(it.bodies().await, ["slow", "fast"]);
}

async fn polls_of_several_relays_do_not_mislead_each_other(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let (key, _, _) = keys(&mut db).await;
    let sql = "SELECT hapax.outbox_bucket($1)";
    let bucket: i32 = sqlx::query_scalar(sql).bind(&key).fetch_one(&mut db).await.unwrap();
    let bucket = u16::try_from(bucket).unwrap();
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (outbox, mut db) = (it.outbox.clone(), it.database.connect().await);
        let message = NewOutboxMessage::new("t", "x").key(key.clone());
        writers.spawn(async move {
            for _ in 0..150 {
                let mut tx = db.begin().await.unwrap();
                outbox.enqueue(&mut tx, &message).await.unwrap();
                tx.execute("SELECT pg_sleep(random() * 0.004)").await.unwrap();
                tx.commit().await.unwrap();
            }
        });
    }
    let outbox = std::sync::Arc::new(it.outbox.clone());
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut pollers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (outbox, ended) = (outbox.clone(), ended.clone());
        pollers.spawn(async move {
            let (mut after, mut found) = (0, 0);
            loop {
                let is_last = ended.load(std::sync::atomic::Ordering::Relaxed);
                // The route has published nothing; what is read is remembered here.
                let polled = outbox.poll("r", &[(bucket, 0)]).await.unwrap();
                if let Some(mut range) = polled.ranges.first().copied().filter(|range| range.through > after)
                {
                    range.after = after;
                    found += outbox.read(&[range], 10_000, 1 << 20).await.unwrap().len();
                    after = range.through;
                } else if is_last {
                    return found;
                }
            }
        });
    }
    writers.join_all().await;
    ended.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(pollers.join_all().await, [8 * 150; 6], "each has found everything");
}

async fn relays_share_the_buckets(server: &'static Server) {
    let it = Fixture::new(server).await;
    for route in ["r", "other"] {
        it.outbox.register(route, &["*".to_owned()], &sink()).await.unwrap();
    }
    let tend = async |relay: &str| it.outbox.tend("r", relay, 10_000).await.unwrap();
    let first = tend("a").await;
    assert_eq!((first.held.len(), first.surplus), (64, 0));
    assert_eq!(tend("b").await.held, [], "what a holds is not taken from it");
    let first = tend("a").await;
    assert_eq!(first.surplus, 32);
    it.outbox.give_back("r", "a", &first.held[..32]).await.unwrap();
    let second = tend("b").await;
    assert_eq!(second.held.len(), 32);
    assert!(second.held.iter().all(|lease| lease.fence == 2), "each change of hands has its own fence");
    assert_eq!(it.outbox.tend("other", "c", 10_000).await.unwrap().held.len(), 64, "routes are apart");
    it.outbox.give_back("r", "b", &[]).await.unwrap();
    assert_eq!(tend("a").await.held.len(), 64, "a relay that ends leaves its buckets at once");
}

async fn a_lapsed_relay_is_fenced(server: &'static Server) {
    let it = Fixture::new(server).await;
    let lapsed = it.relay().await;
    it.clock.advance_ms(60_001).await;
    let taken = it.outbox.tend("r", "other", 60_000).await.unwrap().held;
    assert_eq!(taken.len(), 64);
    let lost =
        it.outbox.advance("r", "relay", &[advance(lapsed[3], 5), advance(lapsed[7], 5)]).await.unwrap();
    assert_eq!(lost, [3, 7]);
    assert_eq!(it.outbox.advance("r", "other", &[advance(taken[3], 5)]).await.unwrap(), [0; 0]);
    assert_eq!(it.outbox.positions("r", &[3, 7]).await.unwrap(), [(3, 5), (7, 0)]);
}

async fn a_table_is_emptied_when_every_route_has_published_it(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let leases = it.relay().await;
    it.outbox.register("slow", &["*".to_owned()], &sink()).await.unwrap();
    let slow = it.outbox.tend("slow", "relay", 3_600_000).await.unwrap().held;
    it.enqueue(&mut db, "a", "1").await;
    it.publish_all(&leases).await;
    assert_eq!(it.outbox.rotate().await.unwrap().emptied, 0, "it is being written");
    it.clock.advance_ms(600_000).await;
    it.outbox.tend("r", "relay", 60_000).await.unwrap();
    assert_eq!(
        it.outbox.rotate().await.unwrap().emptied,
        1,
        "the positions; one route has not published the message"
    );
    let message = it.readable().await.remove(0);
    let advance = advance(slow[usize::from(message.bucket)], message.number);
    it.outbox.advance("slow", "relay", &[advance]).await.unwrap();
    assert_eq!(it.outbox.rotate().await.unwrap().emptied, 1);
    assert_eq!(it.size().await, 0);
    it.enqueue(&mut db, "a", "2").await;
    assert_eq!(it.bodies().await, ["2"]);
}

async fn a_writer_that_stays_open_keeps_its_own_table_only(server: &'static Server) {
    let it = Fixture::new(server).await;
    let (mut db, mut writer) = (it.database.connect().await, it.database.connect().await);
    let leases = it.relay().await;
    let (key, same, other) = keys(&mut db).await;
    it.enqueue(&mut db, &key, "1").await;
    it.enqueue(&mut db, &other, "2").await;
    it.publish_all(&leases).await;
    let mut open = writer.begin().await.unwrap();
    it.enqueue(&mut open, &same, "open").await;
    it.clock.advance_ms(600_000).await;
    let rotated = it.outbox.rotate().await.unwrap();
    assert_eq!((rotated.emptied, rotated.busy), (2, 1), "the other bucket, and the positions");
    it.enqueue(&mut db, &other, "3").await;
    let mut readable = it.bodies().await;
    readable.sort();
    assert_eq!(readable, ["1", "3"], "the open writer keeps its table, and delays no other");
    open.commit().await.unwrap();
    let leases = it.relay().await;
    it.publish_all(&leases).await;
    assert_eq!(it.outbox.rotate().await.unwrap().emptied, 1);
}

async fn what_no_route_takes_is_kept(server: &'static Server) {
    let it = Fixture::new(server).await;
    let leases = it.relay().await;
    it.outbox.register("r", &["payments.*".to_owned(), "or_ers".to_owned()], &sink()).await.unwrap();
    let mut db = it.database.connect().await;
    for body in ["1", "2"] {
        it.enqueue(&mut db, "a", body).await;
    }
    it.outbox.enqueue(&mut db, &NewOutboxMessage::new("payments.made", "paid").key("a")).await.unwrap();
    it.publish_all(&leases).await;
    it.clock.advance_ms(600_000).await;
    let rotated = it.outbox.rotate().await.unwrap();
    assert_eq!((rotated.emptied, rotated.unrouted), (2, 1), "the table, and the positions");
    assert_eq!(it.size().await, 0, "they are not in the way");
    let kept = it.outbox.held(None, true, 10).await.unwrap();
    let kept: Vec<_> = kept.iter().map(|(route, held)| (route.as_str(), held.message.body.clone())).collect();
    assert_eq!(kept, [("", "1".into()), ("", "2".into())]);
    assert_eq!(it.outbox.status().await.unwrap()[0].held, 0, "they are of no route");
    // Another route takes them, in order.
    it.outbox.register("all", &["ord*".to_owned()], &sink()).await.unwrap();
    let lease = it.outbox.tend("all", "relay", 60_000).await.unwrap().held;
    let all: Vec<u16> = (0..64).collect();
    for body in ["1", "2"] {
        let due = it.outbox.due("all", &all, 10).await.unwrap();
        assert_eq!((due.len(), &due[0].message.body[..]), (1, body.as_bytes()));
        let lease = lease[usize::from(due[0].message.bucket)];
        it.outbox.release("all", "relay", lease, &due[0].message).await.unwrap();
    }
    assert!(it.outbox.held(None, false, 10).await.unwrap().is_empty());
}

async fn positions_survive_their_own_rotation(server: &'static Server) {
    let it = Fixture::new(server).await;
    let leases = it.relay().await;
    for position in 1..=20 {
        it.outbox.advance("r", "relay", &[advance(leases[5], position)]).await.unwrap();
    }
    for _ in 0..3 {
        it.clock.advance_ms(600_000).await;
        it.outbox.rotate().await.unwrap();
        assert_eq!(it.outbox.positions("r", &[5]).await.unwrap(), [(5, 20)]);
        let rows = "SELECT (SELECT count(*) FROM hapax.outbox_position_0) + (SELECT count(*) FROM hapax.outbox_position_1)";
        let rows: i64 = sqlx::query_scalar(rows).fetch_one(&mut it.database.connect().await).await.unwrap();
        assert_eq!(rows, 1);
    }
}

fn held(message: &OutboxMessage, parked: bool) -> HeldMessage {
    let error = Some("no".to_owned());
    HeldMessage { message: message.clone(), attempts: 1, parked, retry_after_ms: Some(1_000), error }
}

async fn due(it: &Fixture) -> Vec<String> {
    let all: Vec<u16> = (0..64).collect();
    let due = it.outbox.due("r", &all, 100).await.unwrap();
    due.iter().map(|held| String::from_utf8_lossy(&held.message.body).into_owned()).collect()
}

async fn held_messages_keep_the_order_of_their_key(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let leases = it.relay().await;
    for (key, body) in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3")] {
        it.enqueue(&mut db, key, body).await;
    }
    let read = it.readable().await;
    let of = |body: &str| read.iter().find(|message| message.body == body.as_bytes().to_vec()).unwrap();
    let hold = async |bodies: &[&str]| {
        let messages = bodies.iter().map(|body| held(of(body), false)).collect();
        assert_eq!(it.outbox.hold("r", "relay", &leases, messages).await.unwrap(), [0; 0]);
    };
    hold(&["a1", "a2", "b1"]).await;
    hold(&["a2", "a3"]).await;
    assert_eq!(due(&it).await, [""; 0], "not yet");
    it.clock.advance_ms(1_000).await;
    let mut first = due(&it).await;
    first.sort();
    assert_eq!(first, ["a1", "b1"], "one of each key");
    let lease = leases[usize::from(of("a1").bucket)];
    let release = async |body: &str| it.outbox.release("r", "relay", lease, of(body)).await.unwrap();
    assert_eq!(release("a1").await, Some(true));
    assert!(due(&it).await.contains(&"a2".to_owned()), "the next one is due at once");
    let again = HeldMessage { attempts: 2, ..held(of("a2"), false) };
    it.outbox.postpone("r", "relay", lease, &again).await.unwrap();
    assert_eq!(due(&it).await, ["b1"]);
    it.clock.advance_ms(1_000).await;
    assert_eq!(release("a2").await, Some(true));
    assert_eq!(release("a3").await, Some(false), "the key is held no more");
    let stale = BucketLease { fence: lease.fence + 1, ..lease };
    assert_eq!(it.outbox.release("r", "relay", stale, of("b1")).await.unwrap(), None);
    let keys = it.outbox.held_keys("r", &(0..64).collect::<Vec<_>>()).await.unwrap();
    assert_eq!(keys.into_iter().map(|(_, key)| key).collect::<Vec<_>>(), ["b"]);
}

async fn an_operator_retries_and_skips(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let leases = it.relay().await;
    let mut ids = Vec::new();
    for body in ["1", "2", "3"] {
        ids.push(it.enqueue(&mut db, "a", body).await);
    }
    let read = it.readable().await;
    let messages = read.iter().map(|message| held(message, true)).collect();
    it.outbox.hold("r", "relay", &leases, messages).await.unwrap();
    let status = it.outbox.status().await.unwrap().remove(0);
    assert_eq!((status.held, status.parked), (3, 1), "the first is parked, the others wait behind it");
    it.clock.advance_ms(3_600_000).await;
    assert_eq!(due(&it).await, [""; 0]);
    assert_eq!(it.outbox.retry("r", Some("nonsense"), "ann").await.unwrap(), 0);
    assert_eq!(it.outbox.retry("r", Some(&ids[0]), "ann").await.unwrap(), 1);
    assert_eq!(due(&it).await, ["1"]);
    assert!(it.outbox.skip("r", &ids[0], "ann").await.unwrap());
    assert!(!it.outbox.skip("r", &ids[0], "ann").await.unwrap());
    assert_eq!(due(&it).await, ["2"]);
    assert!(it.outbox.skip("r", &ids[2], "ann").await.unwrap(), "also one that waits behind");
    assert_eq!(due(&it).await, ["2"]);
    let told: i64 = sqlx::query_scalar("SELECT count(*) FROM hapax.audit WHERE by = 'ann'")
        .fetch_one(&mut db)
        .await
        .unwrap();
    assert_eq!(told, 3);
}

/// The relay was publishing it when an operator decided to skip it. What waits behind it is still to be waited for.
async fn a_skipped_message_that_was_published_meanwhile_keeps_its_key_held(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let leases = it.relay().await;
    for body in ["1", "2"] {
        it.enqueue(&mut db, "a", body).await;
    }
    let read = it.readable().await;
    let messages = read.iter().map(|message| held(message, false)).collect();
    it.outbox.hold("r", "relay", &leases, messages).await.unwrap();
    assert!(it.outbox.skip("r", &read[0].id, "ann").await.unwrap());
    let lease = leases[usize::from(read[0].bucket)];
    assert_eq!(it.outbox.release("r", "relay", lease, &read[0]).await.unwrap(), Some(true));
    assert_eq!(due(&it).await, ["2"]);
    assert_eq!(it.outbox.release("r", "relay", lease, &read[1]).await.unwrap(), Some(false));
}

async fn a_route_with_a_running_relay_is_not_forgotten(server: &'static Server) {
    let it = Fixture::new(server).await;
    it.relay().await;
    let error = it.outbox.forget("r", "ann").await.unwrap_err().to_string();
    assert!(error.contains("stop it first"), "{error}");
    it.clock.advance_ms(60_001).await;
    assert!(it.outbox.forget("r", "ann").await.unwrap(), "its lease has ended");
    assert!(!it.outbox.forget("r", "ann").await.unwrap());
    // A relay that was paused all the time.
    let error = it.outbox.tend("r", "relay", 60_000).await.unwrap_err().to_string();
    assert!(error.contains("was forgotten"), "{error}");
}

/// The relay goes on while its database was restored from a backup.
async fn a_position_behind_the_relay_s_own_is_noticed(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let leases = it.relay().await;
    it.enqueue(&mut db, "a", "1").await;
    let bucket = it.readable().await[0].bucket;
    let lease = leases[usize::from(bucket)];
    for read in [2, 1_000] {
        let polled = it.outbox.poll("r", &[(bucket, read)]).await.unwrap();
        assert_eq!((polled.ranges, polled.rewound), (vec![], vec![bucket]), "{read}");
    }
    let behind = Advance { lease, after: 2, position: 3 };
    assert_eq!(it.outbox.advance("r", "relay", &[behind]).await.unwrap(), [bucket]);
    assert_eq!(it.outbox.positions("r", &[bucket]).await.unwrap(), [(bucket, 0)]);
    assert_eq!(it.outbox.advance("r", "relay", &[advance(lease, 1)]).await.unwrap(), [0; 0]);
    let polled = it.outbox.poll("r", &[(bucket, 1)]).await.unwrap();
    assert_eq!((polled.ranges, polled.rewound), (vec![], vec![]));
}

async fn arguments_out_of_range_are_refused(server: &'static Server) {
    let it = Fixture::new(server).await;
    let mut db = it.database.connect().await;
    let long = "x".repeat(256);
    for message in [
        NewOutboxMessage::new("", "b"),
        NewOutboxMessage::new(long.clone(), "b"),
        NewOutboxMessage::new("a\nb", "b"),
        NewOutboxMessage::new("t", "b").key(""),
        NewOutboxMessage::new("t", "b").key(long),
        NewOutboxMessage::new("t", vec![0; (1 << 20) + 1]),
        NewOutboxMessage::new("t", "b").header("h", "x".repeat(70_000)),
    ] {
        let error = it.outbox.enqueue(&mut db, &message).await.unwrap_err();
        assert!(error.to_string().contains("hapax.enqueue"), "{error}");
    }
    assert_eq!(it.bodies().await, [""; 0]);
}

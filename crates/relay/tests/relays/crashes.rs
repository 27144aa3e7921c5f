//! Relays that die at every step, a database that restarts, a backup that is restored.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::StoreError;
use hapax_core::outbox::{
    Advance, BucketLease, BucketRange, HeldMessage, OutboxMessage, OutboxStore, Polled, PublishAnswer,
    Publisher, Rotated, RouteStatus, SinkDescription, Tended,
};
use hapax_faults::PostgresServer;
use hapax_postgres::PostgresOutbox;
use hapax_relay::RelayOptions;
use tokio::sync::Notify;

use crate::fixture::{Database, PATIENCE, Recorder, Running, eventually, quick};

/// A point at which a relay stops for good.
#[derive(Clone)]
struct Crash {
    at: String,
    reached: Arc<Notify>,
}

impl Crash {
    async fn point(&self, name: &str) {
        if self.at == name {
            self.reached.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

struct CrashingStore {
    inner: PostgresOutbox,
    crash: Crash,
}

macro_rules! delegate {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)+) => {
        #[async_trait]
        impl OutboxStore for CrashingStore {
            fn bucket_count(&self) -> u16 {
                self.inner.bucket_count()
            }

            async fn changed(&self, wait: Duration) {
                self.inner.changed(wait).await;
            }

            $(async fn $name(&self, $($arg: $type),*) -> Result<$result, StoreError> {
                self.crash.point(concat!("before ", stringify!($name))).await;
                let done = self.inner.$name($($arg),*).await;
                self.crash.point(concat!("after ", stringify!($name))).await;
                done
            })+
        }
    };
}

delegate! {
    register(route: &str, topics: &[String], sink: &SinkDescription) -> ();
    forget(route: &str, by: &str) -> bool;
    tend(route: &str, relay: &str, lease_ms: u64) -> Tended;
    give_back(route: &str, relay: &str, buckets: &[BucketLease]) -> ();
    positions(route: &str, buckets: &[u16]) -> Vec<(u16, u64)>;
    poll(route: &str, read: &[(u16, u64)]) -> Polled;
    read(ranges: &[BucketRange], rows: usize, bytes: usize) -> Vec<OutboxMessage>;
    advance(route: &str, relay: &str, advances: &[Advance]) -> Vec<u16>;
    hold(route: &str, relay: &str, leases: &[BucketLease], messages: Vec<HeldMessage>) -> Vec<u16>;
    held_keys(route: &str, buckets: &[u16]) -> Vec<(u16, String)>;
    due(route: &str, buckets: &[u16], max: usize) -> Vec<HeldMessage>;
    release(route: &str, relay: &str, lease: BucketLease, message: &OutboxMessage) -> Option<bool>;
    postpone(route: &str, relay: &str, lease: BucketLease, held: &HeldMessage) -> ();
    rotate() -> Rotated;
    status() -> Vec<RouteStatus>;
    held(route: Option<&str>, parked: bool, max: usize) -> Vec<(String, HeldMessage)>;
    unpublished(route: &str, max: usize) -> Vec<OutboxMessage>;
    retry(route: &str, id: Option<&str>, by: &str) -> u64;
    skip(route: &str, id: &str, by: &str) -> bool;
}

struct CrashingSink {
    inner: Arc<Recorder>,
    crash: Crash,
}

#[async_trait]
impl Publisher for CrashingSink {
    fn describe(&self) -> SinkDescription {
        self.inner.describe()
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        self.crash.point("before publish").await;
        let answers = self.inner.publish(batch).await;
        self.crash.point("after publish").await;
        answers
    }
}

/// Fails once for each message of the key `b`, so that everything is set aside and released once.
fn flaky(sink: &Recorder) {
    let failed = std::sync::Mutex::new(std::collections::HashSet::new());
    sink.answer(move |message| {
        let first = message.key.as_deref() == Some("b") && failed.lock().unwrap().insert(message.id.clone());
        first.then(|| PublishAnswer::Failed("later".into()))
    });
}

pub async fn a_crash_at_every_step_repeats_nothing_at_a_deduplicating_sink(server: &'static PostgresServer) {
    let steps = [
        "tend",
        "positions",
        "held_keys",
        "poll",
        "read",
        "publish",
        "hold",
        "advance",
        "due",
        "release",
        "rotate",
    ];
    let mut template: Option<Database> = None;
    for step in steps {
        for moment in ["before", "after"] {
            let first: &Database = match &template {
                None => template.insert(Database::new(server).await),
                Some(first) => first,
            };
            let at = format!("{moment} {step}");
            let copy = Database::copy_of(server, &first.name);
            let sink = Recorder::new(true);
            flaky(&sink);
            let crash = Crash { at: at.clone(), reached: Arc::default() };
            let inner = copy.outbox().await;
            let store = Arc::new(CrashingStore { inner: inner.clone(), crash: crash.clone() });
            let crashing = Arc::new(CrashingSink { inner: sink.clone(), crash: crash.clone() });
            copy.enqueue(&[("a", "1"), ("b", "1"), ("a", "2"), ("b", "2"), ("c", "1"), ("b", "3")]).await;
            let short = || RelayOptions {
                lease: Duration::from_millis(300),
                rotate: Duration::from_millis(20),
                ..quick("r")
            };
            let dies = Running::start(store, crashing, short());
            tokio::time::timeout(PATIENCE, crash.reached.notified())
                .await
                .unwrap_or_else(|_| panic!("{at} is not reached"));
            dies.kill().await;
            let lives = Running::start(Arc::new(inner.clone()), sink.clone(), short());
            copy.enqueue(&[("a", "3"), ("b", "4")]).await;
            eventually(&format!("{at}: everything is published"), async || sink.count() >= 8).await;
            eventually(&format!("{at}: the positions are recorded"), async || {
                let status = inner.status().await.unwrap().remove(0);
                (status.lag, status.held) == (0, 0)
            })
            .await;
            lives.stop().await;
            assert_eq!(sink.of_key("a"), ["1", "2", "3"], "{at}");
            assert_eq!(sink.of_key("b"), ["1", "2", "3", "4"], "{at}");
            assert_eq!(sink.count(), 8, "{at}");
        }
    }
}

/// A server of its own, which crashes while the relay publishes.
pub async fn a_restarted_database_is_waited_for(_shared: &'static PostgresServer) {
    let server: &'static PostgresServer = Box::leak(Box::new(PostgresServer::start(&["fsync=off"]).unwrap()));
    let database = Database::new(server).await;
    let sink = Recorder::new(true);
    let outbox = database.outbox().await;
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    // A relay whose route cannot be registered ends.
    eventually("it is registered", async || !outbox.status().await.unwrap().is_empty()).await;
    for round in 0..3u32 {
        let bodies: Vec<String> = (round * 100..round * 100 + 100).map(|number| number.to_string()).collect();
        let messages: Vec<(&str, &str)> = bodies.iter().map(|body| ("a", body.as_str())).collect();
        database.enqueue(&messages).await;
        server.stop("QUIT");
        server.run().unwrap();
    }
    eventually("everything is published", async || sink.count() >= 300).await;
    relay.stop().await;
    let expected: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    assert_eq!(sink.of_key("a"), expected);
}

/// The database is away for longer than the lease, in the middle of a round. The sink does not deduplicate.
pub async fn an_outage_within_a_round_repeats_nothing(server: &'static PostgresServer) {
    let database = Arc::new(Database::new(server).await);
    let sink = Recorder::new(false);
    database.enqueue(&[("a", "1"), ("a", "2")]).await;
    let outbox = Arc::new(database.outbox().await);
    let (down, is_down) = (database.clone(), Arc::new(AtomicBool::new(false)));
    let went_down = is_down.clone();
    sink.answer(move |message| {
        if message.body == "1" {
            down.refuse_connections();
            went_down.store(true, Ordering::Relaxed);
            return None;
        }
        Some(PublishAnswer::Unavailable("down".into()))
    });
    let lease = Duration::from_millis(600);
    let relay = Running::start(outbox, sink.clone(), RelayOptions { lease, ..quick("r") });
    eventually("the first one is published", async || is_down.load(Ordering::Relaxed)).await;
    tokio::time::sleep(lease * 2).await;
    sink.answer(|_| None);
    database.accept_connections();
    sink.wait_for(2).await;
    relay.stop().await;
    assert_eq!(sink.bodies(), ["1", "2"]);
}

/// What was published after the backup is published again under the same ids, and what is written after the restore gets new
/// ones, although its numbers were used before.
pub async fn a_restored_backup_swallows_no_message(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let sink = Recorder::new(true);
    database.enqueue(&[("a", "1"), ("a", "2")]).await;
    let backup = Database::copy_of(server, &database.name);
    let relay = Running::start(Arc::new(database.outbox().await), sink.clone(), quick("r"));
    database.enqueue(&[("a", "lost by the restore")]).await;
    sink.wait_for(3).await;
    relay.stop().await;
    let relay = Running::start(Arc::new(backup.outbox().await), sink.clone(), quick("r"));
    backup.enqueue(&[("a", "after the restore")]).await;
    sink.wait_for(4).await;
    assert_eq!(relay.watch.counts().duplicates, 2, "the first two are recognised");
    relay.stop().await;
    assert_eq!(sink.of_key("a"), ["1", "2", "lost by the restore", "after the restore"]);
}

/// A backup is restored under a relay that runs, or a copy that lagged behind takes over: the relay has read further than the
/// database knows of, and the numbers behind that are given to other messages.
pub async fn a_database_restored_under_a_relay_loses_nothing(server: &'static PostgresServer) {
    for written_before in [1, 4] {
        let database = Database::new(server).await;
        let sink = Recorder::new(true);
        let start = async || Running::start(Arc::new(database.outbox().await), sink.clone(), quick("r"));
        let relay = start().await;
        database.enqueue(&[("a", "1"), ("a", "2")]).await;
        sink.wait_for(2).await;
        relay.stop().await;
        database.refuse_connections();
        let backup = Database::copy_of(server, &database.name);
        database.accept_connections();
        let relay = start().await;
        database.enqueue(&[("a", "lost 1"), ("a", "lost 2"), ("a", "lost 3")]).await;
        sink.wait_for(5).await;
        eventually("the positions are recorded", async || {
            database.outbox().await.status().await.is_ok_and(|status| status[0].lag == 0)
        })
        .await;
        let new: Vec<String> = (0..written_before).map(|number| format!("new {number}")).collect();
        backup.enqueue(&new.iter().map(|body| ("a", body.as_str())).collect::<Vec<_>>()).await;
        backup.refuse_connections();
        database.refuse_connections();
        let rename = |from: &str, to: &str| {
            server.sql("postgres", &format!("ALTER DATABASE {from} RENAME TO {to}")).unwrap();
        };
        rename(&database.name, &format!("{}_old", database.name));
        rename(&backup.name, &database.name);
        database.accept_connections();
        sink.wait_for(5 + written_before).await;
        database.enqueue(&[("a", "last")]).await;
        sink.wait_for(6 + written_before).await;
        relay.stop().await;
        let got = sink.of_key("a");
        assert_eq!(got[5..5 + written_before], new, "{got:?}");
        assert_eq!(got.len(), 6 + written_before, "{got:?}");
    }
}

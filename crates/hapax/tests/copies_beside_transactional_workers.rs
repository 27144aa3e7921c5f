//! A store is copied while workers of the tier `transactional` have transactions open in it: in the source, and in the
//! target. Each transfer is made once, in one of the two databases.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hapax::copy::{CopyRequest, copy};
use hapax::core::QueueAdmin as _;
use hapax::postgres::{InboxOptions, Isolation, Options, PostgresInbox, PostgresStore};
use hapax::{GroupId, Hapax, QueueConfig, QueueName, RetryPolicy, Tier, Worker};
use hapax_faults::PostgresServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::sync::watch;

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(3);
const COUNT: i32 = 150;

fn main() -> ExitCode {
    let server = || {
        static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
        SERVER.get_or_init(PostgresServer::start_in_memory).as_ref()
    };
    let mut trials = Vec::new();
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        for fifo in [false, true] {
            for from in [Source::Database, Source::Folder] {
                let name = format!("from_{from:?}::{isolation:?}::fifo_{fifo}").to_lowercase();
                trials.push(Trial::ignorable_test(name, move || match server() {
                    Ok(server) => {
                        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
                        runtime.unwrap().block_on(copied(server, from, isolation, fifo));
                        Ok::<_, Failed>(Completion::Completed)
                    }
                    Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
                }));
            }
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Where the queue is before the copy. The transactions are in the same database, or already in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Database,
    Folder,
}

/// A database with a journal of transfers.
struct Site {
    url: String,
    store: PostgresStore,
}

impl Site {
    async fn open(server: &PostgresServer) -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("copied_{}_{number}", std::process::id());
        server.sql("postgres", &format!("CREATE DATABASE {name} TEMPLATE template0")).unwrap();
        let url = server.url(&name);
        let store = PostgresStore::open(&url, Options { migrate: true, ..Options::default() }).await.unwrap();
        let mut db = PgConnection::connect(&url).await.unwrap();
        db.execute("CREATE TABLE journal (number int)").await.unwrap();
        Self { url, store }
    }

    async fn made(&self) -> Vec<i32> {
        let mut db = PgConnection::connect(&self.url).await.unwrap();
        sqlx::query_scalar("SELECT number FROM journal").fetch_all(&mut db).await.unwrap()
    }
}

/// One transfer of the source whose transaction is open while the source is closed: until the copy has ended, or for as long as
/// the copy waits for it.
#[derive(Clone)]
struct Held {
    store: PostgresStore,
    queue: QueueName,
    begun: watch::Sender<bool>,
    copied: watch::Receiver<bool>,
}

impl Held {
    async fn source_is_closed(&self) -> bool {
        let info = self.store.queue(&self.queue).await.unwrap();
        info.paused.is_some_and(|paused| paused.copy.is_some())
    }

    async fn hold(mut self) {
        self.begun.send_replace(true);
        // Not `until`: the compiler cannot see that the future of its closure is `Send`.
        let deadline = Instant::now() + PATIENCE;
        while !self.source_is_closed().await {
            assert!(Instant::now() < deadline, "it took too long until the source is closed");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let copied = self.copied.wait_for(|copied| *copied);
        drop(tokio::time::timeout(Duration::from_secs(2), copied).await);
    }
}

/// A worker of a queue whose transactions are in a site's database; runs until it is told to stop.
async fn works(
    queue: &hapax::Queue<i32>,
    site: &Site,
    isolation: Isolation,
    held: Option<Held>,
    mut stop: watch::Receiver<bool>,
) -> tokio::task::JoinHandle<()> {
    let inbox =
        PostgresInbox::with_options(&site.store, InboxOptions { isolation, ..InboxOptions::default() });
    let builder = queue.async_transactional_worker(&inbox.unwrap(), move |number: i32, db, _cx| {
        let held = held.clone().filter(|_| number == COUNT / 2);
        Box::pin(async move {
            if let Some(held) = held {
                held.hold().await;
            }
            // So slow that transfers are left when the copy begins, on a fast machine as well.
            tokio::time::sleep(Duration::from_millis(if number < COUNT / 2 { 0 } else { 40 })).await;
            sqlx::query("INSERT INTO journal VALUES ($1)").bind(number).execute(db).await.map(drop)
        })
    });
    let worker: Worker = builder.concurrency(4).build().await.unwrap();
    tokio::spawn(async move {
        worker.run(async move { drop(stop.wait_for(|stop| *stop).await) }).await.unwrap();
    })
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "it took too long until {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn copied(server: &PostgresServer, from: Source, isolation: Isolation, fifo: bool) {
    let (old, new) = (Site::open(server).await, Site::open(server).await);
    let folder = tempfile::tempdir().unwrap();
    let from_url = match from {
        Source::Database => old.url.clone(),
        Source::Folder => format!("embedded:{}", folder.path().display()),
    };
    let source = Hapax::open(&from_url).await.unwrap();
    let target = Hapax::open(&new.url).await.unwrap();
    let name = if fifo { "transfers.fifo" } else { "transfers" };
    let base = if fifo { QueueConfig::fifo() } else { QueueConfig::default() };
    let config = QueueConfig { tier: Tier::Transactional, retry: RetryPolicy::at_once(), ..base };
    let queue = source.queue::<i32>(name).unwrap();
    queue.ensure(config).await.unwrap();
    let name = QueueName::new(name).unwrap();
    // Each twice: duplicates meet the entries of the other store.
    for number in (0..COUNT).flat_map(|number| [number, number]) {
        let message = hapax::NewMessage::new(number.to_string())
            .idempotency_key(&format!("transfer-{number}").parse().unwrap());
        let message = if fifo {
            let dedup = format!("{number}-{}", fastrand::u64(..)).parse().unwrap();
            message.group(GroupId::new(format!("g{}", number % 5)).unwrap()).dedup(dedup)
        } else {
            message
        };
        source.store().send(&name, vec![message]).await.unwrap().remove(0).unwrap();
    }

    let stop = watch::Sender::new(false);
    // With the queue in a folder, the transactions are in the target from the beginning.
    let site = if from == Source::Database { &old } else { &new };
    let (mut begun, copied) = (watch::channel(false), watch::Sender::new(false));
    let held = Held {
        store: old.store.clone(),
        queue: name.clone(),
        begun: begun.0.clone(),
        copied: copied.subscribe(),
    };
    let held = (from == Source::Database).then_some(held);
    let holds = held.is_some();
    let before = works(&queue, site, isolation, held, stop.subscribe()).await;
    until("some transfers are made", async || site.made().await.len() >= 20).await;
    if holds {
        begun.1.wait_for(|begun| *begun).await.unwrap();
    }
    let request = CopyRequest::new(&from_url, &new.url, "test");
    copy(source.store(), target.store(), &request, &mut |_| {}).await.unwrap();
    let made = site.made().await.len() as i32;
    copied.send_replace(true);
    assert!(made < COUNT, "the copy was made while transfers were left");

    let there = target.queue::<i32>(name.as_str()).unwrap();
    let after = works(&there, &new, isolation, None, stop.subscribe()).await;
    until("the target is empty", async || {
        let stats = new.store.stats(&name).await.unwrap();
        stats.ready + stats.delayed + stats.in_flight + stats.parked == 0
    })
    .await;
    stop.send_replace(true);
    after.await.unwrap();
    // It cannot settle what was copied, and would try for a while.
    before.abort();
    drop(before.await);
    let mut times = BTreeMap::new();
    for number in old.made().await.into_iter().chain(new.made().await) {
        *times.entry(number).or_insert(0) += 1;
    }
    let once: BTreeMap<i32, i32> = (0..COUNT).map(|number| (number, 1)).collect();
    assert_eq!(times, once, "each transfer is made once");
    if from == Source::Database {
        assert_eq!(old.made().await.len() as i32, made, "nothing was made in the source after the copy");
    }
}

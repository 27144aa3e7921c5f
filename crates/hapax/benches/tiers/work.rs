//! The flow that every tier has: messages with a number, and a handler whose effect is a line in a file, or, at `transactional`, a
//! row in the handler's own database.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hapax::core::{Browse, MessageState};
use hapax::postgres::{Options, PostgresInbox, PostgresStore};
use hapax::worker::StopWhen;

use hapax::{Hapax, Queue, QueueConfig, RetryPolicy, SqliteInbox, Tier, Worker, WorkerBuilder};
use rusqlite::Connection;
use tokio::sync::Notify;

use crate::places::Empty;
use crate::{Mode, PATIENCE};

/// The handler's lease; what a killed process held returns after it.
const LEASE: Duration = Duration::from_secs(2);

pub struct Flow {
    hapax: Hapax,
    queue: Queue<u64>,
    mode: Mode,
    empty: Empty,
    /// The database of the handler, if it is the store's.
    postgres: Option<PostgresStore>,
}

/// Where the effects of a flow are.
pub fn effects(folder: &Path) -> PathBuf {
    folder.join("effects")
}

/// The numbers in a file of lines.
fn numbers(file: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| line.parse().expect("a number")).collect()
}

/// The numbers of the messages whose handlers have ended, except those of `transactional`.
pub fn ended(empty: &Empty) -> Vec<u64> {
    numbers(&empty.folder.join("ended"))
}

fn append(file: &Path) -> Arc<File> {
    Arc::new(File::options().create(true).append(true).open(file).expect("a file"))
}

/// The handler's own database, where the store is none that can hold its writes.
fn open_database(folder: &Path) -> Connection {
    let db = Connection::open(folder.join("shop.db")).expect("it opens");
    db.busy_timeout(PATIENCE).expect("a timeout");
    let create = "PRAGMA journal_mode = WAL; CREATE TABLE IF NOT EXISTS effects (number INTEGER)";
    db.execute_batch(create).expect("a table");
    db
}

/// The numbers of the effects that were made.
pub async fn made(empty: &Empty, mode: Mode) -> Vec<u64> {
    if mode.tier != Tier::Transactional {
        return numbers(&effects(&empty.folder));
    }
    if empty.url.starts_with("postgres") {
        use sqlx::Connection as _;
        let mut db = sqlx::PgConnection::connect(&empty.url).await.expect("a connection");
        let rows = sqlx::query_scalar::<_, i64>("SELECT number FROM effects").fetch_all(&mut db).await;
        return rows.expect("rows").into_iter().map(i64::unsigned_abs).collect();
    }
    let db = open_database(&empty.folder);
    let mut select = db.prepare("SELECT number FROM effects").expect("a table");
    let rows = select.query_map([], |row| row.get::<_, i64>(0)).expect("rows");
    rows.map(|number| number.expect("a number").unsigned_abs()).collect()
}

impl Flow {
    pub async fn open(empty: &Empty, mode: Mode) -> Self {
        let hapax = Hapax::open(&empty.url).await.expect("the store opens");
        let queue = hapax.queue::<u64>("jobs").expect("a name");
        let lease_ms = LEASE.as_millis() as u64;
        let config = QueueConfig {
            tier: mode.tier,
            retry: RetryPolicy::at_once(),
            lease_ms,
            ..QueueConfig::default()
        };
        queue.ensure(config).await.expect("a queue");
        let postgres = if mode.tier == Tier::Transactional && empty.url.starts_with("postgres") {
            Some(PostgresStore::open(&empty.url, Options::default()).await.expect("it opens"))
        } else {
            None
        };
        Self { hapax, queue, mode, empty: empty.clone(), postgres }
    }

    /// Sends the numbers from 0.
    pub async fn send(&self, messages: usize) {
        let numbers: Vec<u64> = (0..messages as u64).collect();
        for batch in numbers.chunks(100) {
            for sent in self.queue.send_batch(batch).await {
                sent.expect("it is accepted");
            }
        }
    }

    /// Waits in the handler for this long after the effect, so that a kill finds work under way.
    fn builder(&self, pause: Duration) -> WorkerBuilder {
        match (self.mode.tier, &self.postgres) {
            (Tier::Transactional, Some(store)) => {
                let inbox = PostgresInbox::new(store);
                self.queue.async_transactional_worker(&inbox, move |number: u64, db, _cx| {
                    Box::pin(async move {
                        let insert =
                            sqlx::query("INSERT INTO effects VALUES ($1)").bind(number.cast_signed());
                        insert.execute(db).await?;
                        tokio::time::sleep(pause).await;
                        Ok::<_, sqlx::Error>(())
                    })
                })
            }
            (Tier::Transactional, None) => {
                let inbox = SqliteInbox::new(open_database(&self.empty.folder)).expect("an inbox");
                self.queue.transactional_worker(
                    &inbox,
                    move |number: u64, tx: &rusqlite::Transaction<'_>, _: &_| {
                        let insert = tx.execute("INSERT INTO effects VALUES (?1)", [number.cast_signed()]);
                        std::thread::sleep(pause);
                        insert.map(drop)
                    },
                )
            }
            _ => {
                let (file, ended) =
                    (append(&effects(&self.empty.folder)), append(&self.empty.folder.join("ended")));
                let worker = self.queue.worker(move |number: u64, _cx| {
                    let (file, ended) = (file.clone(), ended.clone());
                    async move {
                        // One write of a few bytes: it is there as a whole, also if the process dies now.
                        (&*file).write_all(format!("{number}\n").as_bytes())?;
                        if !pause.is_zero() {
                            tokio::time::sleep(pause).await;
                            (&*ended).write_all(format!("{number}\n").as_bytes())?;
                        }
                        Ok::<_, std::io::Error>(())
                    }
                });
                worker.on_doubt(self.mode.on_doubt)
            }
        }
    }

    /// Works on this many messages.
    pub async fn work(&self, messages: usize, in_flight: usize) {
        let (left, done) = (Arc::new(AtomicUsize::new(messages)), Arc::new(Notify::new()));
        let told = done.clone();
        let builder = self.builder(Duration::ZERO).concurrency(in_flight).on_settled(move |_| {
            if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                told.notify_one();
            }
        });
        run(builder, async move { done.notified().await }).await;
    }

    /// Sends a message when the one before is settled; the time of each.
    pub async fn one_by_one(&self, count: usize) -> Vec<Duration> {
        let (settled, mut next) = tokio::sync::mpsc::unbounded_channel();
        let builder = self.builder(Duration::ZERO).concurrency(1).on_settled(move |_| {
            let _ = settled.send(Instant::now());
        });
        let mut times = Vec::with_capacity(count);
        run(builder, async {
            for number in 0..count as u64 {
                let start = Instant::now();
                self.queue.send(&number).await.expect("it is accepted");
                times.push(next.recv().await.expect("the worker runs") - start);
            }
        })
        .await;
        times
    }

    /// Works until nothing is left.
    pub async fn work_until_empty(&self, pause: Duration) {
        // What a killed process held comes back when its lease has ended: then the worker starts once more.
        let name = self.queue.name();
        loop {
            let stats = self.hapax.store().stats(name).await.expect("the queue is there");
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                return;
            }
            let next = self.builder(pause).concurrency(8);
            run(next.stop_when(StopWhen::Empty), std::future::pending()).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The numbers of the messages that wait for a decision.
    pub async fn parked(&self) -> Vec<u64> {
        let browse = Browse { state: Some(MessageState::Parked), limit: 1_000, ..Browse::default() };
        let page = self.hapax.store().browse(self.queue.name(), browse).await.expect("the queue is there");
        let bodies = page.items.into_iter().filter_map(|view| view.body);
        bodies.map(|body| serde_json::from_slice(&body).expect("a number")).collect()
    }

    pub async fn close(self) {
        self.hapax.store().close().await.expect("it closes");
        if let Some(postgres) = self.postgres {
            postgres.shut_down();
        }
    }
}

async fn run(builder: WorkerBuilder, until: impl Future<Output = ()>) {
    let worker: Worker = builder.build().await.expect("the tier holds");
    let over = tokio::time::timeout(PATIENCE, worker.run(until)).await;
    over.expect("it ends in time").expect("the worker runs");
}

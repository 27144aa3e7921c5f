//! The default store of Hapax: queues in one folder, durable when a call returns, with no other process to run.
//!
//! A pure state machine holds the metadata of live messages in memory. One writer thread applies all pending operations
//! as one wave, writes it in one SQLite transaction and then answers: group commit. `docs/ARCHITECTURE.md` has a
//! diagram.
//!
//! ```
//! use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive, Settle};
//! use hapax_embedded::{Embedded, Options};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let store = Embedded::open(folder.path(), Options::default())?;
//! let queue = QueueName::new("jobs")?;
//! store.create_queue(&queue, QueueConfig::default()).await?;
//! store.send(&queue, vec![NewMessage::new("hello")]).await?;
//!
//! let deliveries = store.receive(&queue, Receive::up_to(10)).await?;
//! assert_eq!(&deliveries[0].body[..], b"hello");
//! store.settle(&queue, vec![Settle::ack(deliveries[0].receipt.clone())]).await?;
//! # Ok(())
//! # }
//! ```

mod backup;
mod browse;
mod catalogue;
mod checkpoint;
mod claims;
mod crc;
mod documents;
mod engine;
mod environment;
mod ids;
mod ledger;
mod lock;
mod maps;
mod medium;
mod op_queue;
mod receipt;
mod record;
mod storage;
mod store;
mod time;
mod transfer;
mod waiters;
mod writer;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hapax_core::{Clock, StoreError, StoreTotals, SystemClock};
use thiserror::Error;

pub use engine::{MEMORY_BYTES_A_MESSAGE, StoreQuota};
pub use environment::{Environment, FINDING_CODES};
pub use medium::{Medium, medium};

use browse::Reader;
use catalogue::Catalogue;
use checkpoint::Checkpoint;
use engine::Loader;
use ids::Ids;
use lock::FolderLock;
use op_queue::OpQueue;
use receipt::ReceiptCodec;
use storage::sqlite::{DbLocation, Sqlite};
use storage::{ReadError, Storage};
use time::StoreTime;
use writer::{Op, Writer};

/// Name of the database file in a store's folder.
const DATABASE: &str = "hapax.db";

/// Options for opening a store.
#[derive(Clone)]
pub struct Options {
    /// Limits on the store's content. Default: no limit.
    pub quota: StoreQuota,
    /// Sends are refused when the disk has less free space than this, in bytes, so that messages can still be settled.
    /// Default: 64 MiB.
    pub reserve_bytes: u64,
    /// The source of time. Default: the machine's clock; tests pass one that they move.
    pub clock: Arc<dyn Clock>,
    /// Opens a store even if it is on a network file system. Its locks and syncs are not reliable: two processes may
    /// write at the same time, and acknowledged changes may be lost. Default: no; such a folder is refused.
    pub allow_network_file_system: bool,
    /// Maximum count of open claims in one scope, held or in doubt: a claim beyond it is refused, other scopes are not
    /// affected. At least 1, default 100,000. At 80% in doubt the store warns.
    pub in_doubt_per_scope_max: u64,
    /// What the folder lies on, for tests; looked up when `None`.
    #[doc(hidden)]
    pub medium: Option<Medium>,
    #[doc(hidden)]
    pub vfs: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            quota: StoreQuota::default(),
            reserve_bytes: 64 * 1024 * 1024,
            clock: Arc::new(SystemClock::default()),
            allow_network_file_system: false,
            in_doubt_per_scope_max: engine::PER_SCOPE_MAX_DEFAULT,
            medium: None,
            vfs: None,
        }
    }
}

/// Why a store could not be opened, backed up or restored. Nothing was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process has the folder open.
    #[error(
        "the store in {folder} is in use by {holder}; {remedy}",
        folder = .folder.display(),
        remedy = in_use_remedy(.endpoint.as_deref())
    )]
    InUse {
        /// The folder.
        folder: PathBuf,
        /// Which process has it open.
        holder: String,
        /// Where that process answers for the store over HTTP, if it has said so ([`Embedded::announce`]).
        endpoint: Option<String>,
    },
    /// This process already has the folder open.
    #[error(
        "the store in {folder} is already open in this process; share it (a `Hapax` is cheap to clone) instead of \
         opening it again",
        folder = .folder.display()
    )]
    OpenHere {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder is on a network file system, whose locks and syncs are not reliable.
    #[error(
        "{folder} is on a network file system ({kind}), which does not keep what a store needs (locks, fsync); \
         use a folder on a local disk (see docs/errors/network-file-system.md)",
        folder = .folder.display()
    )]
    NetworkFileSystem {
        /// The folder.
        folder: PathBuf,
        /// The type of the file system.
        kind: String,
    },
    /// The file was written by a newer version.
    #[error(
        "{file} has version {version}, this program knows up to {known}; use the newer program, or the backup that \
         it wrote beside the file before it migrated",
        file = .file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: i64,
        /// The newest version that this program knows.
        known: i64,
    },
    /// The file is not a Hapax database.
    #[error("{file} is not a Hapax store; use another folder", file = .file.display())]
    NotOurs {
        /// The file.
        file: PathBuf,
    },
    /// SQLite cannot use its write-ahead log here.
    #[error("{file} cannot be used with a write-ahead log (journal mode {mode}); use a folder on a local disk", file = .file.display())]
    NoWal {
        /// The file.
        file: PathBuf,
        /// The journal mode that SQLite uses instead.
        mode: String,
    },
    /// The target exists and must not be overwritten.
    #[error("{path} exists; name a file that does not", path = .path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// The path is not UTF-8, which SQLite requires.
    #[error("{path} is not valid UTF-8; use another path", path = .path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// Rows that the store cannot work without are damaged.
    #[error("the store is damaged: {0}")]
    Damaged(String),
    /// The operating system returned an error.
    #[error("{path}: {error}", path = .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The operating system's error.
        error: std::io::Error,
    },
    /// SQLite returned an error.
    #[error("the database cannot be used: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The store was closed or has stopped.
    #[error("{0}")]
    Closed(StoreError),
    /// The operating system could not start a thread.
    #[error("no thread could be started: {0}")]
    Thread(std::io::Error),
    /// The operating system provided no random numbers.
    #[error("no random numbers could be had: {0}")]
    Random(String),
}

fn damaged(error: ReadError) -> OpenError {
    OpenError::Damaged(error.0)
}

/// State shared by callers and the writer.
struct StoreState {
    op_queue: OpQueue,
    clock: Arc<dyn Clock>,
    time: Arc<StoreTime>,
    codec: ReceiptCodec,
    ids: Ids,
    location: DbLocation,
    receives: AtomicU64,
    catalogue: Arc<Catalogue>,
    report: Mutex<WriterReport>,
    environment: Environment,
    reserve_bytes: u64,
}

/// What the writer tells about itself, without being asked.
#[derive(Default, Clone)]
struct WriterReport {
    stopped: Option<StoreError>,
    warnings: Vec<String>,
    stats: StoreTotals,
    /// As of the last wave that was committed.
    usage: engine::Counters,
}

impl StoreState {
    fn report(&self) -> WriterReport {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A store in one folder. Cheap to share behind an [`Arc`]. Dropping it closes the store.
pub struct Embedded {
    state: Arc<StoreState>,
    threads: Arc<Threads>,
}

/// The store's threads.
struct Threads {
    writer: Mutex<Option<JoinHandle<()>>>,
    reader: Mutex<Reader>,
}

impl Threads {
    /// Rejects further operations and waits until everything is written.
    fn close(&self, state: &StoreState) {
        state.op_queue.close(StoreError::Unavailable("the store is closed".into()));
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).stop();
        // Held while joining: a second close also returns only once the store is closed.
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = writer.take() {
            let _ = thread.join();
        }
    }
}

impl Embedded {
    /// Opens the store in `folder`, or creates one there.
    pub fn open(folder: impl AsRef<Path>, options: Options) -> Result<Self, OpenError> {
        let folder = folder.as_ref();
        let found = options.medium.or_else(|| medium(folder));
        let environment = Environment {
            folder: folder.to_owned(),
            medium: found.clone(),
            reserve_bytes: options.reserve_bytes,
        };
        let risk = medium::admit(folder, found, options.allow_network_file_system)?;
        let lock = if options.vfs.is_none() { Some(FolderLock::take(folder)?) } else { None };
        let location = DbLocation { file: folder.join(DATABASE), vfs: options.vfs };
        let mut storage = Sqlite::open(location.clone(), storage::schema::STEPS, Checkpoint::Background)?;
        let (codec, ids) = (ReceiptCodec::new(storage.secret()), storage.ids());
        let header = storage.header().map_err(damaged)?;
        let time = Arc::new(StoreTime::start(options.clock.clone(), header.clock_ms));
        let mut report = WriterReport::default();
        report.warnings.extend(risk);
        report.warnings.extend(header.paused.as_ref().map(|paused| format!("the store is paused: {paused}")));
        let mut loader = Loader::new(header, options.quota, time.now());
        storage.load(&mut loader).map_err(damaged)?;
        if loader.damaged > 0 {
            let rows = loader.damaged;
            report
                .warnings
                .push(format!("{rows} messages were found damaged and are parked; see `parked list`"));
        }
        report.warnings.append(&mut loader.warnings);
        let mut engine = loader.finish();
        engine.set_in_doubt_per_scope_max(options.in_doubt_per_scope_max);
        let reader = Reader::start(&location)?;

        let mut seed = [0u8; 8];
        getrandom::fill(&mut seed).map_err(|error| OpenError::Random(error.to_string()))?;
        let seed = u64::from_le_bytes(seed);
        let writer = Writer::new(engine, storage, time.clone(), ids.clone(), seed, options.reserve_bytes);
        let state = Arc::new(StoreState {
            op_queue: OpQueue::default(),
            clock: options.clock,
            time,
            codec,
            ids,
            location,
            receives: AtomicU64::new(0),
            catalogue: writer.catalogue.clone(),
            report: Mutex::new(report),
            environment,
            reserve_bytes: options.reserve_bytes,
        });
        let nudged = Arc::downgrade(&state);
        state.clock.on_moved(Arc::new(move || {
            if let Some(state) = nudged.upgrade() {
                state.op_queue.nudge();
            }
        }));
        let theirs = state.clone();
        let spawn = std::thread::Builder::new().name("hapax-writer".into());
        let thread = spawn.spawn(move || serve(writer, &theirs, lock)).map_err(OpenError::Thread)?;
        let threads = Threads { writer: Mutex::new(Some(thread)), reader: Mutex::new(reader) };
        Ok(Self { state, threads: Arc::new(threads) })
    }

    /// Tells other processes that try to open the folder at which URL this one answers for the store: they are refused with
    /// [`OpenError::InUse`], which names it.
    pub fn announce(&self, endpoint: &str) {
        let DbLocation { file, vfs } = &self.state.location;
        // Once closed, the folder may be another process's.
        let (Some(folder), None, None) = (file.parent(), vfs, self.state.op_queue.closed()) else { return };
        if let Err(error) = lock::announce(folder, endpoint) {
            // Only the hint is lost.
            tracing::debug!(%error, "the store's address cannot be written into its lock file");
        }
    }

    /// Closes the store: answers those who wait, writes what was accepted, copies the log back. Further calls answer
    /// `Unavailable`.
    pub fn close(&self) {
        self.threads.close(&self.state);
    }

    /// Writes a backup of the running store to `to`, a file that must not exist. Blocks until it is written; sends and
    /// settles continue meanwhile.
    pub fn backup(&self, to: impl AsRef<Path>) -> Result<(), OpenError> {
        if let Some(closed) = self.state.op_queue.closed() {
            // Another process may have opened the folder by now.
            return Err(OpenError::Closed(closed));
        }
        backup::take(&self.state.location, to.as_ref(), self.state.clock.wall_ms())
    }

    /// Restores a backup into `folder`, which must not hold a store. The restored store is paused until it is resumed,
    /// because messages settled after the backup was taken would be delivered again.
    pub fn restore(backup: impl AsRef<Path>, folder: impl AsRef<Path>) -> Result<(), OpenError> {
        medium::admit(folder.as_ref(), medium(folder.as_ref()), false)?;
        let _lock = FolderLock::take(folder.as_ref())?;
        backup::restore(backup.as_ref(), folder.as_ref())
    }

    /// How many transactions were committed and how much was in them.
    pub fn commit_stats(&self) -> StoreTotals {
        self.state.report().stats
    }
}

/// What to do about a folder that another process has open.
fn in_use_remedy(endpoint: Option<&str>) -> String {
    match endpoint {
        Some(url) => format!("it answers at {url}: use that (`--endpoint {url}`), or stop it"),
        None => "stop it, or use its HTTP address if it has one".to_owned(),
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.close();
    }
}

/// Rejects callers if the writer panics; otherwise they would wait for an answer that never comes.
struct WriterExitGuard<'a>(&'a StoreState);

impl Drop for WriterExitGuard<'_> {
    fn drop(&mut self) {
        let defect = "the writer failed, which is a defect; start the store again and report it";
        let stopped = StoreError::Unavailable(defect.into());
        if std::thread::panicking() {
            self.0.report.lock().unwrap_or_else(PoisonError::into_inner).stopped = Some(stopped.clone());
        }
        self.0.op_queue.close(stopped);
        // Dropping the pending operations answers them.
        let mut waiting = Vec::new();
        while self.0.op_queue.take(&mut waiting, None) {
            waiting.clear();
        }
    }
}

/// No new operation within this gap means none is coming.
const ARRIVAL_GAP: Duration = Duration::from_micros(100);

/// Serves receives at once, and delays operations that need a sync until as many have arrived as in recent waves
/// (`expected`): the callers answered then are likely to send again, and an operation that misses this sync waits for
/// the next. Delays no longer than two syncs take. Returns the number to expect next time.
fn gather(writer: &mut Writer<Sqlite>, op_queue: &OpQueue, ops: &mut Vec<Op>, expected: usize) -> usize {
    let start = Instant::now();
    let gap = ARRIVAL_GAP.min(writer.sync_time);
    loop {
        writer.run_unsynced(ops);
        if ops.is_empty() {
            return expected;
        }
        let last_arrival = Instant::now();
        loop {
            if ops.len() >= expected || last_arrival.elapsed() > gap || start.elapsed() > writer.sync_time * 2
            {
                return ops.len().max(expected - expected.div_ceil(8));
            }
            std::thread::yield_now();
            if op_queue.take_more(ops) > 0 {
                break;
            }
        }
    }
}

/// The writer thread.
fn serve(mut writer: Writer<Sqlite>, state: &StoreState, lock: Option<FolderLock>) {
    let _ending = WriterExitGuard(state);
    state.report.lock().unwrap_or_else(PoisonError::into_inner).usage = writer.engine.usage();
    let mut ops = Vec::new();
    let mut expected = 0;
    while state.op_queue.take(&mut ops, writer.sleep()) {
        expected = gather(&mut writer, &state.op_queue, &mut ops, expected);
        writer.run(&mut ops);
        let mut report = state.report.lock().unwrap_or_else(PoisonError::into_inner);
        report.stats = writer.stats;
        if writer.stopped.is_none() {
            report.usage = writer.engine.usage();
        }
        report.warnings.append(&mut writer.damaged);
        let excess = report.warnings.len().saturating_sub(1_000);
        report.warnings.drain(..excess);
        report.stopped.clone_from(&writer.stopped);
        if let Some(stopped) = &writer.stopped {
            state.op_queue.close(stopped.clone());
        }
    }
    writer.close();
    if writer.stopped.is_some() {
        // The file is left unchanged and locked until this process ends: only a restart recovers it.
        std::mem::forget((writer.storage, lock));
    } else {
        writer.storage.close();
    }
}

//! The `transactional` tier over the user's own SQLite file: business write, ledger entry and outcome in one
//! transaction of theirs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use hapax_core::{EntryId, Fingerprint, Json, RecordedOutcome, Tier, ledger};
use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::builder::WorkerBuilder;
use crate::cx::{Cx, Job};
use crate::handler::{Handler, parse};
use crate::outcome::{Ended, IntoOutcome, Stop, panic_text};
use crate::point::Point;

/// The table beside the user's own.
const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS hapax_inbox (
        scope TEXT NOT NULL,
        key TEXT NOT NULL,
        fingerprint TEXT,
        failed INTEGER NOT NULL,
        outcome TEXT,
        omitted_bytes INTEGER,
        recorded_ms INTEGER NOT NULL,
        prune_ms INTEGER NOT NULL,
        PRIMARY KEY (scope, key)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS hapax_inbox_prune ON hapax_inbox (prune_ms);
";
/// How many entries whose time is over one transaction removes: steady work, no stall.
const PRUNE_MAX: u32 = 4;

/// Why a database cannot carry the `transactional` tier, or an entry could not be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InboxError {
    /// SQLite refused.
    #[error("the database refused: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The database has no file: nothing in it survives the process.
    #[error("the database is in memory or temporary, so nothing survives the process; use a file")]
    NotAFile,
    /// A commit does not wait for the disk.
    #[error(
        "`PRAGMA synchronous` is {level}, so a power cut may take back what was committed; set it to FULL (2)"
    )]
    NotSynchronous {
        /// The level.
        level: i64,
    },
}

/// What an entry says about a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entered {
    /// Nothing is known: the effect may happen, in this transaction.
    Fresh,
    /// The effect has ended before; this is what came of it.
    Completed(RecordedOutcome),
    /// The key was used for something else.
    Mismatch,
}

/// The ledger entries of `transactional` handlers, in a table of the user's own SQLite database.
///
/// Inside one transaction of that database the effect happens once: the row is there if and only if the business write
/// is. SQLite's write lock stands for the lease, so two runs of the same key wait for each other.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// use hapax_worker::SqliteInbox;
///
/// let connection = rusqlite::Connection::open(folder.path().join("shop.db"))?;
/// connection.pragma_update(None, "journal_mode", "wal")?;
/// connection.pragma_update(None, "synchronous", "full")?;
/// let inbox = SqliteInbox::new(connection)?;
/// # drop(inbox);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteInbox {
    connection: Arc<Mutex<Connection>>,
}

impl SqliteInbox {
    /// Uses a connection to the database that the handler writes to; makes the table if it is not there. Refuses a
    /// database that may lose what it has committed.
    pub fn new(connection: Connection) -> Result<Self, InboxError> {
        if connection.path().is_none_or(str::is_empty) {
            return Err(InboxError::NotAFile);
        }
        let level = connection.pragma_query_value(None, "synchronous", |row| row.get::<_, i64>(0))?;
        if level < 2 {
            return Err(InboxError::NotSynchronous { level });
        }
        connection.execute_batch(TABLE)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }

    /// Looks a key up, in the caller's transaction. That has to hold the write lock (`BEGIN IMMEDIATE`), or two of them
    /// may both find nothing.
    pub fn enter(
        tx: &Transaction<'_>,
        id: &EntryId,
        fingerprint: &Fingerprint,
    ) -> Result<Entered, InboxError> {
        let mut select = tx.prepare_cached(
            "SELECT fingerprint, failed, outcome, omitted_bytes FROM hapax_inbox WHERE scope = ?1 AND key = ?2",
        )?;
        let row = select.query_row(params![id.scope.as_str(), id.key.as_str()], |row| {
            let known: Option<String> = row.get(0)?;
            let value: Option<String> = row.get(2)?;
            let outcome = RecordedOutcome {
                failed: row.get(1)?,
                value: value.and_then(|text| Json::parse(&text).ok()),
                omitted_bytes: row.get::<_, Option<i64>>(3)?.map(|bytes| bytes as u64),
            };
            Ok((known, outcome))
        });
        Ok(match row.optional()? {
            None => Entered::Fresh,
            Some((known, _)) if known.as_deref() != Some(fingerprint.as_str()) => Entered::Mismatch,
            Some((_, outcome)) => Entered::Completed(outcome),
        })
    }

    /// Records what came of a key, in the caller's transaction, beside its own writes.
    pub fn record(
        tx: &Transaction<'_>,
        id: &EntryId,
        fingerprint: &Fingerprint,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError> {
        let outcome = outcome.kept();
        let now_ms = wall_ms();
        let ttl_ms = ttl_ms.clamp(ledger::TTL_MS_MIN, ledger::TTL_MS_MAX);
        let mut insert =
            tx.prepare_cached("INSERT INTO hapax_inbox VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
        insert.execute(params![
            id.scope.as_str(),
            id.key.as_str(),
            fingerprint.as_str(),
            outcome.failed,
            outcome.value.as_ref().map(Json::as_str),
            outcome.omitted_bytes.map(|bytes| bytes as i64),
            now_ms as i64,
            (now_ms + ttl_ms) as i64,
        ])?;
        let mut prune = tx.prepare_cached(
            "DELETE FROM hapax_inbox WHERE (scope, key) IN \
             (SELECT scope, key FROM hapax_inbox WHERE prune_ms <= ?1 LIMIT ?2)",
        )?;
        prune.execute(params![now_ms as i64, PRUNE_MAX])?;
        Ok(())
    }
}

fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

impl WorkerBuilder {
    /// What to run for each message inside a transaction of the inbox's database: the tier `transactional`. Business
    /// writes go through the transaction that is passed; it is committed together with the outcome when the handler
    /// says done, right after a last look at the lease, and rolled back otherwise.
    ///
    /// The handler blocks, as SQLite does, on a thread for that; the connection runs one of them at a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::sync::Arc;
    /// # use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore};
    /// # let folder = tempfile::tempdir()?;
    /// # let store = Arc::new(hapax_embedded::Embedded::open(folder.path(), hapax_embedded::Options::default())?);
    /// # let queue = QueueName::new("charges")?;
    /// # store.create_queue(&queue, QueueConfig::default()).await?;
    /// # store.send(&queue, vec![NewMessage::new("1999")]).await?;
    /// # let connection = rusqlite::Connection::open(folder.path().join("shop.db"))?;
    /// # connection.execute_batch("CREATE TABLE ledger_lines (cents INTEGER)")?;
    /// use hapax_worker::{Cx, SqliteInbox, Worker};
    /// use rusqlite::Transaction;
    ///
    /// fn book(cents: u64, tx: &Transaction<'_>, _cx: &Cx) -> Result<(), rusqlite::Error> {
    ///     tx.execute("INSERT INTO ledger_lines VALUES (?1)", [cents as i64]).map(drop)
    /// }
    ///
    /// let inbox = SqliteInbox::new(connection)?;
    /// let worker = Worker::over(store, queue).transactional_handler(&inbox, book).build().await?;
    /// # let watch = worker.watch();
    /// # worker.run(async move { while watch.counts().done < 1 { tokio::task::yield_now().await } }).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn transactional_handler<T, F, O>(mut self, inbox: &SqliteInbox, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(T, &Transaction<'_>, &Cx) -> O + Send + Sync + 'static,
        O: IntoOutcome,
    {
        let (inbox, handler) = (inbox.clone(), Arc::new(handler));
        let run = move |job: &Arc<Job>, _record: bool| {
            let (inbox, handler, job) = (inbox.clone(), handler.clone(), job.clone());
            let blocking =
                move || inbox.run(&job, |tx, cx| Ok(Ended::of(handler(parse(&job)?, tx, cx), true)));
            Box::pin(async move {
                match tokio::task::spawn_blocking(blocking).await {
                    Ok(ended) => ended,
                    Err(error) if error.is_panic() => Ended::Panicked(panic_text(&*error.into_panic())),
                    // The runtime ends: nothing was committed.
                    Err(_) => Ended::NotStarted(Stop::Abandoned),
                }
            }) as crate::handler::Boxed<Ended>
        };
        self.handler = Some(Handler::Transactional(Arc::new(run)));
        self.tier(Tier::Transactional)
    }
}

/// What went wrong with the database itself: nothing was committed, or it will be found.
fn failed(error: &dyn std::fmt::Display) -> Ended {
    Ended::Retry { after_ms: None, error: format!("the transaction was rolled back: {error}") }
}

impl SqliteInbox {
    /// One run: look the key up, run, record, commit.
    fn run(
        &self,
        job: &Arc<Job>,
        handler: impl FnOnce(&Transaction<'_>, &Cx) -> Result<Ended, Ended>,
    ) -> Ended {
        let cx = Cx { job: job.clone() };
        // A panic in a handler before this one rolled its transaction back; the connection is fine.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if job.lease.is_lost() {
            return Ended::NotStarted(job.lease.stop().unwrap_or(Stop::Lost));
        }
        match run_in(&mut connection, &cx, handler) {
            Ok(ended) => ended,
            Err(error) => failed(&error),
        }
    }
}

fn run_in(
    connection: &mut Connection,
    cx: &Cx,
    handler: impl FnOnce(&Transaction<'_>, &Cx) -> Result<Ended, Ended>,
) -> Result<Ended, InboxError> {
    let job = &cx.job;
    let (id, hooks) = (cx.entry_id(), &job.env.hooks);
    let hash = blake3::hash(&job.delivery.body).to_hex();
    let fingerprint = Fingerprint::new(hash).expect("hex digits");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match SqliteInbox::enter(&tx, id, &fingerprint)? {
        Entered::Fresh => {}
        Entered::Completed(outcome) => return Ok(Ended::Replayed(outcome)),
        Entered::Mismatch => return Ok(Ended::Mismatch(id.key.as_str().to_owned())),
    }
    let ended = match handler(&tx, cx) {
        Ok(ended) => ended,
        Err(unparsable) => return Ok(unparsable),
    };
    let Ended::Done(value) = ended else { return Ok(ended) };
    let outcome = RecordedOutcome { failed: false, value: value.clone(), omitted_bytes: None };
    SqliteInbox::record(&tx, id, &fingerprint, outcome, job.env.ttl_ms)?;
    if !hooks.pass_blocking(Point::BeforeCommit) {
        return Ok(Ended::NotStarted(Stop::Abandoned));
    }
    // Whoever has the message now runs for itself; a commit behind this look is found by its key.
    if job.lease.is_lost() {
        return Ok(Ended::Stopped(job.lease.stop().unwrap_or(Stop::Lost)));
    }
    tx.commit()?;
    if !hooks.pass_blocking(Point::AfterCommit) {
        return Ok(Ended::NotStarted(Stop::Abandoned));
    }
    Ok(Ended::Done(value))
}

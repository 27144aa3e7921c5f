//! The inbox and the outbox in the user's own SQLite file: business write, ledger entry, outcome and messages in one
//! transaction of that file. The outbox is [`SqliteOutbox`].
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! use hapax_core::{BlockingInbox as _, EntryId, InboxLookup, InboxEntry, Json, RecordedOutcome};
//! use hapax_core::inbox::TransactionEnd;
//! use hapax_sqlite::SqliteInbox;
//!
//! let connection = rusqlite::Connection::open(folder.path().join("shop.db"))?;
//! connection.pragma_update(None, "journal_mode", "wal")?;
//! connection.pragma_update(None, "synchronous", "full")?;
//! connection.execute_batch("CREATE TABLE payments (cents INTEGER)")?;
//! let inbox = SqliteInbox::new(connection)?;
//!
//! let entry = InboxEntry { id: EntryId::new("shop".parse()?, "order-7".parse()?), fingerprint: "abc".parse()? };
//! let pay = || {
//!     inbox.in_transaction(|tx| {
//!         let entered = inbox.enter(tx, &entry).unwrap();
//!         if entered == InboxLookup::Fresh {
//!             tx.execute("INSERT INTO payments VALUES (1999)", []).unwrap();
//!             let paid = RecordedOutcome::done(Json::of("paid").unwrap());
//!             inbox.record(tx, &entry, paid, 86_400_000).unwrap();
//!         }
//!         (entered, TransactionEnd::Commit)
//!     })
//! };
//! assert_eq!(pay()?, InboxLookup::Fresh);
//! assert!(matches!(pay()?, InboxLookup::Completed(_)), "the second payment is not made");
//! # Ok(())
//! # }
//! ```

mod outbox;
mod positions;

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::inbox::TransactionEnd;
use hapax_core::{
    BlockingInbox, Clock, InboxEntry, InboxError, InboxLookup, Json, LedgerCapabilities, RecordedOutcome,
    SystemClock, ledger,
};
use rusqlite::{Connection, ErrorCode, OptionalExtension as _, Transaction, TransactionBehavior, params};

pub use outbox::SqliteOutbox;

/// Hapax's table in the user's database.
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
/// Maximum number of expired entries that one transaction deletes: spreads the work, so that no transaction stalls.
const PRUNE_MAX: u32 = 4;
/// Default lock timeout: how long a transaction waits for another one.
const LOCK_TIMEOUT_MS_DEFAULT: u64 = 5_000;

/// The ledger entries of `transactional` handlers, in a table of the user's own SQLite database. Clones are cheap.
///
/// Ledger entry and business write are in the same transaction, so the effect happens once: the row exists if and only
/// if the business write does. SQLite's write lock takes the place of the lease, so two runs of the same key wait for
/// each other, at most for the lock timeout.
#[derive(Clone)]
pub struct SqliteInbox {
    shared: Arc<SharedConnection>,
    clock: Arc<dyn Clock>,
    lock_timeout_ms: u64,
}

struct SharedConnection {
    /// `None` while a transaction uses it.
    connection: Mutex<Option<Connection>>,
    returned: Condvar,
}

impl SqliteInbox {
    /// Uses a connection to the database that the handler writes to; creates the table if it does not exist. Refuses a
    /// database that may lose committed transactions. Sets the connection's busy timeout to the lock timeout of 5 s.
    pub fn new(connection: Connection) -> Result<Self, InboxError> {
        if connection.path().is_none_or(str::is_empty) {
            let problem =
                "the database is in memory or temporary, so nothing survives the process; use a file";
            return Err(InboxError::NotDurable(problem.into()));
        }
        let level = connection
            .pragma_query_value(None, "synchronous", |row| row.get::<_, i64>(0))
            .map_err(database)?;
        if level < 2 {
            return Err(InboxError::NotDurable(format!(
                "`PRAGMA synchronous` is {level}, so a power cut may take back what was committed; set it to FULL (2)"
            )));
        }
        connection.busy_timeout(Duration::from_millis(LOCK_TIMEOUT_MS_DEFAULT)).map_err(database)?;
        connection.execute_batch(TABLE).map_err(database)?;
        connection.execute_batch(positions::TABLE).map_err(database)?;
        let shared = SharedConnection { connection: Mutex::new(Some(connection)), returned: Condvar::new() };
        Ok(Self {
            shared: Arc::new(shared),
            clock: Arc::new(SystemClock::default()),
            lock_timeout_ms: LOCK_TIMEOUT_MS_DEFAULT,
        })
    }

    /// How long a transaction waits for another one, of this process or another. Default 5 s.
    pub fn lock_timeout(mut self, timeout: Duration) -> Result<Self, InboxError> {
        self.lock_timeout_ms = timeout.as_millis() as u64;
        self.connection()?.busy_timeout(timeout).map_err(database)?;
        Ok(self)
    }

    /// The clock that decides when entries expire. Default the machine's.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Takes the connection; waits for the transaction that uses it.
    fn connection(&self) -> Result<ConnectionGuard<'_>, InboxError> {
        let lock = self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let timeout = Duration::from_millis(self.lock_timeout_ms);
        let (mut lock, _) = self
            .shared
            .returned
            .wait_timeout_while(lock, timeout, |connection| connection.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match lock.take() {
            Some(connection) => Ok(ConnectionGuard { connection: Some(connection), shared: &self.shared }),
            None => Err(InboxError::Locked { timeout_ms: self.lock_timeout_ms }),
        }
    }

    fn failed(&self, error: rusqlite::Error) -> InboxError {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                InboxError::Locked { timeout_ms: self.lock_timeout_ms }
            }
            _ => database(error),
        }
    }
}

/// The connection while one transaction uses it; returned when dropped, also by a panic of the handler.
struct ConnectionGuard<'a> {
    connection: Option<Connection>,
    shared: &'a SharedConnection,
}

impl Deref for ConnectionGuard<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection.as_ref().expect("there until it is dropped")
    }
}

impl DerefMut for ConnectionGuard<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("there until it is dropped")
    }
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        *self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner) = self.connection.take();
        self.shared.returned.notify_one();
    }
}

fn database(error: rusqlite::Error) -> InboxError {
    InboxError::Database(Box::new(error))
}

impl BlockingInbox for SqliteInbox {
    type Tx<'t> = Transaction<'t>;

    fn inbox_capabilities(&self) -> LedgerCapabilities {
        LedgerCapabilities { name: "sqlite".into(), durable: true, fence: true, may_evict: false }
    }

    fn in_transaction<R>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> (R, TransactionEnd),
    ) -> Result<R, InboxError> {
        let mut connection = self.connection()?;
        // Take the write lock at the start; otherwise two transactions could both find no entry.
        let tx = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(|error| self.failed(error))?;
        let (value, end) = work(&tx);
        match end {
            TransactionEnd::Commit => tx.commit().map_err(|error| self.failed(error))?,
            TransactionEnd::Rollback => tx.rollback().map_err(database)?,
        }
        Ok(value)
    }

    fn enter(&self, tx: &Transaction<'_>, entry: &InboxEntry) -> Result<InboxLookup, InboxError> {
        let mut select = tx
            .prepare_cached(
                "SELECT fingerprint, failed, outcome, omitted_bytes FROM hapax_inbox WHERE scope = ?1 AND key = ?2",
            )
            .map_err(database)?;
        let (scope, key) = (entry.id.scope.as_str(), entry.id.key.as_str());
        let row = select.query_row(params![scope, key], |row| {
            let known: Option<String> = row.get(0)?;
            let value: Option<String> = row.get(2)?;
            let outcome = RecordedOutcome {
                failed: row.get(1)?,
                value: value.and_then(|text| Json::parse(&text).ok()),
                omitted_bytes: row.get::<_, Option<i64>>(3)?.map(|bytes| bytes as u64),
            };
            Ok((known, outcome))
        });
        Ok(match row.optional().map_err(database)? {
            None => InboxLookup::Fresh,
            Some((known, _)) if known.as_deref() != Some(entry.fingerprint.as_str()) => InboxLookup::Mismatch,
            Some((_, outcome)) => InboxLookup::Completed(outcome),
        })
    }

    fn record(
        &self,
        tx: &Transaction<'_>,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError> {
        if hapax_core::mutant::is("inbox-not-recorded") {
            return Ok(());
        }
        let outcome = outcome.without_oversize_value();
        let now_ms = self.clock.wall_ms();
        let ttl_ms = ttl_ms.clamp(ledger::TTL_MS_MIN, ledger::TTL_MS_MAX);
        let mut insert = tx
            .prepare_cached("INSERT INTO hapax_inbox VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")
            .map_err(database)?;
        let inserted = insert.execute(params![
            entry.id.scope.as_str(),
            entry.id.key.as_str(),
            entry.fingerprint.as_str(),
            outcome.failed,
            outcome.value.as_ref().map(Json::as_str),
            outcome.omitted_bytes.map(|bytes| bytes as i64),
            now_ms as i64,
            (now_ms + ttl_ms) as i64,
        ]);
        inserted.map_err(database)?;
        let mut prune = tx
            .prepare_cached(
                "DELETE FROM hapax_inbox WHERE (scope, key) IN \
                 (SELECT scope, key FROM hapax_inbox WHERE prune_ms <= ?1 LIMIT ?2)",
            )
            .map_err(database)?;
        prune.execute(params![now_ms as i64, PRUNE_MAX]).map_err(database)?;
        Ok(())
    }
}

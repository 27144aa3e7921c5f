//! The transactional seam: entries of the ledger that are made in the user's own transactions, and deliveries that end in
//! them.
//!
//! The SQL functions `hapax.enter`, `hapax.record` and `hapax.q_settle` do the work (`migrations/0005_*.sql`), and `hapax.tx_enter`
//! and `hapax.tx_record` for the usual case at READ COMMITTED (`migrations/0008_*.sql`). This module
//! owns the connections of the transactions, says what their errors mean, and keeps duplicates of a key within one process
//! off the database while the first one runs.
//!
//! A transaction of a worker begins and enters its key in one round trip, and records, settles and commits in another. Such
//! texts begin and end the transaction without sqlx, which counts how deep transactions are nested: its count stays at one
//! on these connections, so that a handler's `begin()` makes a savepoint.

mod error;
mod keys;
mod positions;
mod script;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::{
    AsyncInbox, InboxEntry, InboxError, InboxLookup, Json, Ledger as _, LedgerCapabilities, Receipt,
    RecordedOutcome, StoreError,
};
use sqlx::postgres::{PgArguments, PgRow, PgTransactionManager};
use sqlx::query::Query;
use sqlx::{Executor as _, PgConnection, Postgres, Row as _, TransactionManager as _};

use crate::PostgresStore;
use crate::connect::UrlError;
use crate::ledger::hash_of;
use crate::pool::{Pool, Taken};
use crate::pooled;
use crate::queues::Ending;
pub(crate) use error::before_commit;
use error::{after_handler, at_commit, is_lock_timeout, lost};
use keys::{KeyGuard, Keys};

/// A longer value is sent apart from the text of its statement, which the server logs when the statement fails.
const VALUE_BYTES_MAX: usize = 4_096;
const RECORD: &str = "SELECT hapax.record($1, $2, $3, $4, $5)";

/// What a transaction sees of others that are committed while it runs; see PostgreSQL's documentation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Each statement sees what was committed before it.
    #[default]
    ReadCommitted,
    /// Every statement sees the database as it was at the start. To change what has changed since is a conflict.
    RepeatableRead,
    /// As if transactions ran one after the other. Expect conflicts, also between messages that have nothing in common.
    Serializable,
}

impl Isolation {
    fn sql(self) -> &'static str {
        match self {
            Self::ReadCommitted => "READ COMMITTED",
            Self::RepeatableRead => "REPEATABLE READ",
            Self::Serializable => "SERIALIZABLE",
        }
    }
}

/// Options of a [`PostgresInbox`].
#[derive(Debug, Clone)]
pub struct InboxOptions {
    /// Isolation of the transactions, default READ COMMITTED. A run whose transaction lost against another one is started
    /// again. With the other levels a delivery's row is locked from the start of its transaction: its lease is not renewed
    /// in the database while the handler runs, and no one else gets the message until the transaction ends.
    pub isolation: Isolation,
    /// Maximum count of transactions that are open at the same time, each with a connection of its own. 1 to 1,000, default
    /// 16, as the concurrency of a worker.
    pub transactions_max: usize,
    /// How long a transaction waits for another one that has entered the same key. After that the delivery is put back,
    /// uncounted. 1 ms to 60 s, default 1 s.
    pub lock_wait: Duration,
    /// The server ends a transaction whose client sends nothing for this long, for example because its process is stopped:
    /// until then the key is taken. At least 100 ms, default 1 minute.
    pub idle_max: Duration,
    /// The server ends a statement of a handler that takes longer. At least 100 ms, default 1 minute.
    pub statement_max: Duration,
}

impl Default for InboxOptions {
    fn default() -> Self {
        Self {
            isolation: Isolation::default(),
            transactions_max: 16,
            lock_wait: Duration::from_secs(1),
            idle_max: Duration::from_mins(1),
            statement_max: Duration::from_mins(1),
        }
    }
}

impl InboxOptions {
    fn check(&self) -> Result<(), UrlError> {
        let ms = |limit: Duration| limit.as_millis().min(u128::from(u64::MAX)) as u64;
        let bounds = [
            ("transactions_max", self.transactions_max as u64, 1, 1_000),
            ("lock_wait (ms)", ms(self.lock_wait), 1, 60_000),
            ("idle_max (ms)", ms(self.idle_max), 100, i32::MAX as u64),
            ("statement_max (ms)", ms(self.statement_max), 100, i32::MAX as u64),
        ];
        for (field, value, min, max) in bounds {
            hapax_core::validate::within(field, value, min, max)
                .map_err(|error| UrlError(error.to_string()))?;
        }
        Ok(())
    }
}

/// Transactions of a PostgreSQL database that hold the business writes of a handler and the ledger entry of its message. If
/// the queue is in the same database, the delivery ends in the same transaction. Clones share their connections.
///
/// A worker uses it for the tier `transactional`. The same rows can be written from any language, see `hapax.enter` and
/// `hapax.record` in the documentation; from Rust, on a connection of your own:
///
/// ```no_run
/// # async fn example(store: hapax_postgres::PostgresStore, mut db: sqlx::PgConnection) -> Result<(), Box<dyn std::error::Error>> {
/// use hapax_core::{EntryId, Fingerprint, InboxEntry, InboxLookup, Json, RecordedOutcome};
/// use hapax_postgres::PostgresInbox;
/// use sqlx::Connection as _;
///
/// let inbox = PostgresInbox::new(&store);
/// let entry = InboxEntry {
///     id: EntryId::new("shop/charge".parse()?, "order-7".parse()?),
///     fingerprint: Fingerprint::new("1999-cents")?,
/// };
/// let mut tx = db.begin().await?;
/// match inbox.enter_on(&mut tx, &entry).await? {
///     InboxLookup::Fresh => {
///         sqlx::query("INSERT INTO charges VALUES ($1)").bind(1999).execute(&mut *tx).await?;
///         inbox.record_on(&mut tx, &entry, RecordedOutcome::done(Json::of(&"charged")?), 86_400_000).await?;
///         tx.commit().await?;
///     }
///     InboxLookup::Completed(outcome) => println!("done before: {outcome:?}"),
///     other => println!("later: {other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresInbox {
    inner: Arc<Inner>,
}

struct Inner {
    store: PostgresStore,
    pool: Pool,
    keys: Arc<Keys>,
    options: InboxOptions,
    begin: String,
    /// Sets the bounds of a transaction, where the session does not have them.
    bounds: String,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pool.close();
    }
}

/// An open transaction. Dropping it closes its connection, which rolls it back.
pub struct PostgresTransaction {
    taken: Taken,
    /// Duplicates of the key in this process wait for it.
    _key: KeyGuard,
    /// The key that was entered when it began.
    entered: Option<(InboxEntry, InboxLookup)>,
    ending: Option<Ending>,
    /// The delivery is acked in it.
    settled: bool,
}

impl PostgresInbox {
    /// The inbox of a store's database, with default options. It belongs to the tokio runtime on which it is made.
    pub fn new(store: &PostgresStore) -> Self {
        Self::with_options(store, InboxOptions::default()).expect("the defaults are in their ranges")
    }

    /// The inbox of a store's database.
    pub fn with_options(store: &PostgresStore, options: InboxOptions) -> Result<Self, UrlError> {
        options.check()?;
        let pool = store.base.pool.sibling(options.transactions_max, "hapax-inbox");
        let (idle_ms, statement_ms) = (options.idle_max.as_millis(), options.statement_max.as_millis());
        let begin = format!("BEGIN ISOLATION LEVEL {} READ WRITE; ", options.isolation.sql());
        let bounds = format!(
            "SET LOCAL idle_in_transaction_session_timeout = {idle_ms}; \
             SET LOCAL statement_timeout = {statement_ms}; SET LOCAL lock_timeout = 0; "
        );
        let inner = Inner { store: store.clone(), pool, keys: Arc::default(), options, begin, bounds };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Looks a key up in the caller's transaction, and prevents others from entering it until that transaction ends. Waits
    /// at most [`InboxOptions::lock_wait`] for another transaction that has entered it.
    pub async fn enter_on(
        &self,
        db: &mut PgConnection,
        entry: &InboxEntry,
    ) -> Result<InboxLookup, InboxError> {
        let sql = "SELECT state, outcome, failed, omitted_bytes, since_ms, retry_ms FROM hapax.enter($1, $2, $3, $4)";
        let enter = sqlx::query(sql)
            .bind(entry.id.scope.as_str())
            .bind(entry.id.key.as_str())
            .bind(entry.fingerprint.as_str())
            .bind(self.inner.options.lock_wait.as_millis() as i32);
        found(&enter.fetch_one(db).await.map_err(before_commit)?)
    }

    /// Records the outcome of a key that [`enter_on`](Self::enter_on) found fresh, in the same transaction. It is kept for
    /// `ttl_ms`.
    pub async fn record_on(
        &self,
        db: &mut PgConnection,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError> {
        let record = record(RECORD, entry, &outcome, ttl_ms);
        record.execute(db).await.map_err(after_handler)?;
        Ok(())
    }

    /// Whether the key is entered with the statement that begins the transaction, and the outcome recorded with the one that
    /// commits it. At the other levels the delivery is locked first, and what loses against another transaction is more often
    /// a statement than the commit: the connection is kept then.
    fn has_short_form(&self) -> bool {
        self.inner.options.isolation == Isolation::ReadCommitted
    }

    /// Begins a transaction on a connection, and enters the key if that is to happen at once. A transaction that waited for the
    /// key in vain can only be rolled back.
    async fn begin_on(
        &self,
        db: &mut PgConnection,
        entry: &InboxEntry,
    ) -> Result<Option<InboxLookup>, InboxError> {
        let Inner { begin, bounds, options, store, .. } = &*self.inner;
        let pooler = store.base.options.pooler;
        let mut sql = String::with_capacity(512);
        if PgTransactionManager::get_transaction_depth(db) == 0 {
            // The first transaction of a connection.
            if !pooler {
                let session = bounds.replace("SET LOCAL ", "SET ");
                db.execute(sqlx::raw_sql(&session)).await.map_err(before_commit)?;
            }
            PgTransactionManager::begin(db, Some(begin.clone().into())).await.map_err(before_commit)?;
        } else {
            sql.push_str(begin);
        }
        if pooler {
            // The session is not ours, and others have left their statements in it.
            sql.push_str(bounds);
            sql.push_str(&pooled::clean_up(""));
            sql.push_str("; ");
        }
        let wait_ms = options.lock_wait.as_millis();
        if self.has_short_form() {
            script::push_enter(&mut sql, entry, wait_ms);
        }
        if sql.is_empty() {
            return Ok(None);
        }
        let entered = match db.fetch_all(sqlx::raw_sql(&sql)).await {
            Ok(rows) => {
                rows.last().map(|row| row.try_get::<bool, _>(0)).transpose().map_err(before_commit)?
            }
            Err(error) if is_lock_timeout(&error) => {
                return Ok(Some(InboxLookup::InProgress { retry_after_ms: wait_ms as u64 }));
            }
            Err(error) => return Err(before_commit(error)),
        };
        match entered {
            None => Ok(None),
            Some(true) => Ok(Some(InboxLookup::Fresh)),
            Some(false) => self.enter_on(db, entry).await.map(Some),
        }
    }

    /// Both in one statement. `false`: another store made the receipt, and there is nothing to settle.
    async fn record_and_settle(
        &self,
        tx: &mut PostgresTransaction,
        entry: &InboxEntry,
        outcome: &RecordedOutcome,
        ttl_ms: u64,
        receipt: &Receipt,
    ) -> Result<bool, InboxError> {
        let ending = self.ending(tx, receipt);
        let ended = match &ending {
            Some(ending) => {
                let sql = "SELECT hapax.record($1, $2, $3, $4, $5), hapax.q_settle($6, $7, $8)";
                ending.bind(record(sql, entry, outcome, ttl_ms)).execute(&mut tx.taken.connection).await
            }
            None => record(RECORD, entry, outcome, ttl_ms).execute(&mut tx.taken.connection).await,
        };
        ended.map_err(after_handler)?;
        (tx.settled, tx.ending) = (ending.is_some(), ending);
        Ok(tx.settled)
    }

    /// Ends a transaction by statements of which the last one is COMMIT.
    async fn end(&self, mut tx: PostgresTransaction, sql: &str) -> Result<(), InboxError> {
        let limit = self.inner.pool.bounds().operation;
        let connection = &mut tx.taken.connection;
        if PgTransactionManager::get_transaction_depth(connection) != 1 {
            return Err(InboxError::EndedByHandler("it left a nested transaction open".into()));
        }
        match tokio::time::timeout(limit, connection.execute(sqlx::raw_sql(sql))).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(at_commit(error)),
            Err(_) => return Err(InboxError::Unknown(format!("no answer within {} ms", limit.as_millis()))),
        }
        let PostgresTransaction { taken, ending, settled, .. } = tx;
        self.inner.pool.give_back(taken);
        if let Some(ending) = ending.filter(|_| settled) {
            ending.committed();
        }
        Ok(())
    }

    /// The delivery that a transaction ends; `None`: another store made the receipt.
    fn ending(&self, tx: &mut PostgresTransaction, receipt: &Receipt) -> Option<Ending> {
        tx.ending.take().or_else(|| self.inner.store.queues.ending(receipt))
    }
}

/// A statement whose first parameters are those of `hapax.record`.
fn record<'q>(
    sql: &'q str,
    entry: &'q InboxEntry,
    outcome: &'q RecordedOutcome,
    ttl_ms: u64,
) -> Query<'q, Postgres, PgArguments> {
    sqlx::query(sql)
        .bind(entry.id.scope.as_str())
        .bind(entry.id.key.as_str())
        .bind(outcome.value.as_ref().map(Json::as_str))
        .bind(i64::try_from(ttl_ms).unwrap_or(i64::MAX))
        .bind(outcome.failed)
}

/// What `hapax.enter` has answered.
fn found(row: &PgRow) -> Result<InboxLookup, InboxError> {
    let number = |column: &str| {
        let value = row.try_get::<Option<i64>, _>(column).map_err(before_commit)?;
        Ok::<_, InboxError>(value.unwrap_or(0) as u64)
    };
    let state: &str = row.try_get("state").map_err(before_commit)?;
    Ok(match state {
        "fresh" => InboxLookup::Fresh,
        "completed" => InboxLookup::Completed(outcome(row).map_err(before_commit)?),
        "in-progress" => InboxLookup::InProgress { retry_after_ms: number("retry_ms")? },
        "in-doubt" => InboxLookup::InDoubt { since_ms: number("since_ms")? },
        "mismatch" => InboxLookup::Mismatch,
        other => return Err(InboxError::Database(format!("hapax.enter answered {other:?}").into())),
    })
}

fn outcome(row: &PgRow) -> Result<RecordedOutcome, sqlx::Error> {
    let value: Option<&str> = row.try_get("outcome")?;
    let value =
        value.map(Json::parse).transpose().map_err(|error| sqlx::Error::Decode(error.to_string().into()))?;
    let omitted_bytes = row.try_get::<Option<i64>, _>("omitted_bytes")?.map(|bytes| bytes as u64);
    Ok(RecordedOutcome { failed: row.try_get("failed")?, value, omitted_bytes })
}

#[async_trait]
impl AsyncInbox for PostgresInbox {
    type Tx = PostgresTransaction;
    type Connection = PgConnection;

    fn inbox_capabilities(&self) -> LedgerCapabilities {
        self.inner.store.ledger_capabilities()
    }

    async fn begin(&self, entry: &InboxEntry) -> Result<PostgresTransaction, InboxError> {
        let Inner { pool, keys, options, .. } = &*self.inner;
        let timeout_ms = options.lock_wait.as_millis() as u64;
        let key = keys.enter(hash_of(&entry.id), options.lock_wait).await;
        let key = key.ok_or(InboxError::Locked { timeout_ms })?;
        let mut taken = pool.take("begin").await.map_err(|error| match error {
            StoreError::Overloaded(_) => {
                InboxError::Locked { timeout_ms: pool.bounds().connect.as_millis() as u64 }
            }
            error => InboxError::Unavailable(error.to_string()),
        })?;
        // The server bounds how long it waits for the key.
        let limit = pool.bounds().operation + options.lock_wait;
        let begun = tokio::time::timeout(limit, self.begin_on(&mut taken.connection, entry)).await;
        let begun = begun.unwrap_or_else(|_| {
            Err(InboxError::Unavailable("the database did not begin a transaction in time".into()))
        });
        let entered = begun?.map(|found| (entry.clone(), found));
        Ok(PostgresTransaction { taken, _key: key, entered, ending: None, settled: false })
    }

    fn connection(tx: &mut PostgresTransaction) -> &mut PgConnection {
        &mut tx.taken.connection
    }

    async fn commit(&self, tx: PostgresTransaction) -> Result<(), InboxError> {
        self.end(tx, "COMMIT").await
    }

    async fn rollback(&self, mut tx: PostgresTransaction) {
        let connection = &mut tx.taken.connection;
        // A connection whose handler has left a nested transaction open, or that does not answer, is closed.
        if PgTransactionManager::get_transaction_depth(connection) == 1 {
            let rollback = connection.execute(sqlx::raw_sql("ROLLBACK"));
            if let Ok(Ok(_)) = tokio::time::timeout(self.inner.pool.bounds().operation, rollback).await {
                self.inner.pool.give_back(tx.taken);
            }
        }
    }

    async fn enter(
        &self,
        tx: &mut PostgresTransaction,
        entry: &InboxEntry,
    ) -> Result<InboxLookup, InboxError> {
        // What was found for the key that the transaction began with is told once, whichever keys are entered before it.
        match tx.entered.take_if(|(entered, _)| *entered == *entry) {
            Some((_, found)) => Ok(found),
            None => self.enter_on(&mut tx.taken.connection, entry).await,
        }
    }

    async fn record(
        &self,
        tx: &mut PostgresTransaction,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError> {
        self.record_on(&mut tx.taken.connection, entry, outcome, ttl_ms).await
    }

    async fn hold(&self, tx: &mut PostgresTransaction, receipt: &Receipt) -> Result<(), InboxError> {
        // At READ COMMITTED the last statement finds the row as the last heartbeat has left it.
        if self.inner.options.isolation == Isolation::ReadCommitted {
            return Ok(());
        }
        let Some(ending) = self.inner.store.queues.ending(receipt) else { return Ok(()) };
        if !ending.hold(&mut tx.taken.connection).await.map_err(before_commit)? {
            return Err(InboxError::Superseded("the delivery is over".into()));
        }
        tx.ending = Some(ending);
        Ok(())
    }

    async fn settle(&self, tx: &mut PostgresTransaction, receipt: &Receipt) -> Result<bool, InboxError> {
        let Some(ending) = self.ending(tx, receipt) else { return Ok(false) };
        let settle = ending.bind(sqlx::query("SELECT hapax.q_settle($1, $2, $3)"));
        settle.execute(&mut tx.taken.connection).await.map_err(before_commit)?;
        (tx.ending, tx.settled) = (Some(ending), true);
        Ok(true)
    }

    async fn complete(
        &self,
        mut tx: PostgresTransaction,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
        receipt: &Receipt,
    ) -> Result<bool, InboxError> {
        let length = outcome.value.as_ref().map_or(0, |value| value.as_str().len());
        if self.has_short_form() && length <= VALUE_BYTES_MAX {
            tx.ending = self.ending(&mut tx, receipt);
            tx.settled = tx.ending.is_some();
            let (settled, delivery) = (tx.settled, tx.ending.as_ref().map(Ending::numbers));
            let sql = script::complete(entry, &outcome, ttl_ms, delivery);
            return self.end(tx, &sql).await.map(|()| settled);
        }
        match self.record_and_settle(&mut tx, entry, &outcome, ttl_ms, receipt).await {
            Ok(settled) => self.commit(tx).await.map(|()| settled),
            Err(error) => {
                self.rollback(tx).await;
                Err(error)
            }
        }
    }

    fn is_own(&self, receipt: &Receipt) -> bool {
        self.inner.store.queues.is_own(receipt)
    }

    fn is_conflict(&self, error: &str) -> bool {
        lost(error)
    }
}

//! The outbox in the user's own SQLite file.
//!
//! SQLite has one writer at a time, so numbers are committed in their order, and a relay can read everything that it sees. The
//! outbox has one bucket.

use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::StoreError;
use hapax_core::outbox::{
    self, Advance, BucketLease, BucketRange, HeldMessage, NewOutboxMessage, OUTBOX_BODY_BYTES_MAX,
    OutboxMessage, OutboxStore, Polled, Rotated, RouteStatus, SinkDescription, Tended,
};
use rusqlite::{
    Connection, ErrorCode, OptionalExtension as _, Row, Transaction, TransactionBehavior, params,
};

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS hapax_outbox (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, topic TEXT NOT NULL, key TEXT, body BLOB NOT NULL,
        headers TEXT NOT NULL, deliver_at_ms INTEGER, enqueued_ms INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS hapax_outbox_route (
        route TEXT PRIMARY KEY, topics TEXT NOT NULL, target TEXT NOT NULL, after_a_crash TEXT NOT NULL, position INTEGER NOT NULL DEFAULT 0,
        relay TEXT, fence INTEGER NOT NULL DEFAULT 0, until_ms INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS hapax_outbox_held (
        route TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL, topic TEXT NOT NULL, key TEXT, body BLOB NOT NULL,
        headers TEXT NOT NULL, deliver_at_ms INTEGER, enqueued_ms INTEGER NOT NULL, alone INTEGER NOT NULL,
        next_ms INTEGER, parked INTEGER NOT NULL, attempts INTEGER NOT NULL, error TEXT, PRIMARY KEY (route, number)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS hapax_outbox_held_key ON hapax_outbox_held (route, key, number);
    CREATE INDEX IF NOT EXISTS hapax_outbox_held_due ON hapax_outbox_held (route, next_ms);
";

const MESSAGE: &str = "number, id, topic, key, body, headers, deliver_at_ms, enqueued_ms";
const BUSY: Duration = Duration::from_secs(5);
/// Published messages that one transaction deletes, so that writers do not wait long.
const DELETE_MAX: u64 = 1_000;
/// The only bucket.
const BUCKET: u16 = 0;

/// The outbox in a SQLite file. Clones are the same outbox.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// use hapax_core::outbox::NewOutboxMessage;
/// use hapax_sqlite::SqliteOutbox;
///
/// let mut db = rusqlite::Connection::open(folder.path().join("shop.db"))?;
/// db.execute_batch("CREATE TABLE orders (number INTEGER)")?;
/// SqliteOutbox::create_tables(&db)?;
/// let tx = db.transaction()?;
/// tx.execute("INSERT INTO orders VALUES (7)", [])?;
/// SqliteOutbox::enqueue(&tx, &NewOutboxMessage::new("orders.placed", r#"{"order":7}"#).key("order-7"))?;
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteOutbox {
    connection: Arc<Mutex<Connection>>,
    /// Cleaning up has looked at the messages up to this number.
    cleaned: Arc<AtomicI64>,
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64
}

fn failed(error: &rusqlite::Error) -> StoreError {
    let told = format!("outbox: {error}");
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Overloaded(told),
        Some(ErrorCode::DiskFull) => StoreError::Full(told),
        _ => StoreError::Unavailable(told),
    }
}

impl SqliteOutbox {
    /// Opens the outbox of a file that exists.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        if !path.exists() {
            return Err(StoreError::Invalid(format!("{}: there is no such file", path.display())));
        }
        let open = || {
            let connection = Connection::open(path)?;
            connection.busy_timeout(BUSY)?;
            // A position must not be lost after it was recorded.
            connection.pragma_update(None, "synchronous", "full")?;
            Self::create_tables(&connection)?;
            Ok(connection)
        };
        let connection = open().map_err(|error| failed(&error))?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), cleaned: Arc::default() })
    }

    /// Creates the outbox's tables if they do not exist.
    pub fn create_tables(connection: &Connection) -> rusqlite::Result<()> {
        connection.execute_batch(TABLES)
    }

    /// Writes a message in the caller's transaction; returns its id.
    pub fn enqueue(tx: &Transaction<'_>, message: &NewOutboxMessage) -> rusqlite::Result<String> {
        let is_name = |text: &str| (1..=255).contains(&text.len()) && !text.chars().any(char::is_control);
        let problem = if !is_name(&message.topic) {
            "topic: use 1 to 255 bytes without control characters"
        } else if message.key.as_deref().is_some_and(|key| !is_name(key)) {
            "key: use 1 to 255 bytes without control characters"
        } else if message.body.len() > OUTBOX_BODY_BYTES_MAX {
            "body: use at most 1 MiB"
        } else {
            let mut insert = tx.prepare_cached(
                "INSERT INTO hapax_outbox (id, topic, key, body, headers, deliver_at_ms, enqueued_ms)
                 VALUES (lower(hex(randomblob(16))), ?1, ?2, ?3, ?4, ?5, ?6) RETURNING id",
            )?;
            let headers = serde_json::json!(message.headers).to_string();
            let deliver_at_ms = message.deliver_at_ms.map(|ms| ms as i64);
            let values =
                params![message.topic, message.key, &message.body[..], headers, deliver_at_ms, now_ms()];
            return insert.query_row(values, |row| row.get(0));
        };
        Err(rusqlite::Error::ToSqlConversionFailure(problem.into()))
    }

    /// Runs a transaction that writes.
    async fn on_db<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.transaction(TransactionBehavior::Immediate, work).await
    }

    /// Runs a transaction that only reads: it neither waits for writers nor makes them wait.
    async fn reading<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.transaction(TransactionBehavior::Deferred, work).await
    }

    /// Runs a transaction on a thread that may block.
    async fn transaction<T: Send + 'static>(
        &self,
        behavior: TransactionBehavior,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let connection = self.connection.clone();
        let run = move || {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let tx = connection.transaction_with_behavior(behavior)?;
            let done = work(&tx)?;
            tx.commit()?;
            Ok(done)
        };
        match tokio::task::spawn_blocking(run).await {
            Ok(done) => done.map_err(|error: rusqlite::Error| failed(&error)),
            Err(error) => Err(StoreError::OutcomeUnknown(format!("outbox: {error}"))),
        }
    }
}

fn message(row: &Row<'_>) -> rusqlite::Result<OutboxMessage> {
    let headers: String = row.get("headers")?;
    Ok(OutboxMessage {
        bucket: BUCKET,
        number: row.get::<_, i64>("number")? as u64,
        id: row.get("id")?,
        topic: row.get("topic")?,
        key: row.get("key")?,
        body: Bytes::from(row.get::<_, Vec<u8>>("body")?),
        headers: serde_json::from_str(&headers).map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, error.into())
        })?,
        deliver_at_ms: row.get::<_, Option<i64>>("deliver_at_ms")?.map(|ms| ms as u64),
        enqueued_ms: row.get::<_, i64>("enqueued_ms")? as u64,
    })
}

fn held(row: &Row<'_>) -> rusqlite::Result<HeldMessage> {
    let next_ms: Option<i64> = row.get("next_ms")?;
    Ok(HeldMessage {
        message: message(row)?,
        attempts: row.get("attempts")?,
        parked: row.get("parked")?,
        retry_after_ms: next_ms.map(|next| (next - now_ms()).max(0) as u64),
        error: row.get("error")?,
    })
}

/// Whether a relay holds the bucket under this fence.
fn is_own(tx: &Transaction<'_>, route: &str, relay: &str, fence: u64) -> rusqlite::Result<bool> {
    tx.query_row(
        "SELECT count(*) FROM hapax_outbox_route WHERE route = ?1 AND relay = ?2 AND fence = ?3",
        params![route, relay, fence as i64],
        |row| Ok(row.get::<_, i64>(0)? == 1),
    )
}

/// Deletes a held message and makes the next one of its key due. Returns whether there is one; `None`: it was not there.
fn remove(tx: &Transaction<'_>, route: &str, number: i64) -> rusqlite::Result<Option<bool>> {
    let removed: Option<(Option<String>, bool)> = tx
        .query_row(
            "DELETE FROM hapax_outbox_held WHERE route = ?1 AND number = ?2 RETURNING key, alone",
            params![route, number],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()?;
    match removed {
        None => Ok(None),
        Some((Some(key), false)) => {
            let next = tx.execute(
                "UPDATE hapax_outbox_held SET next_ms = CASE WHEN parked THEN NULL ELSE ?3 END WHERE route = ?1 AND number =
                 (SELECT min(number) FROM hapax_outbox_held WHERE route = ?1 AND key = ?2 AND NOT alone)",
                params![route, key, now_ms()],
            )?;
            Ok(Some(next > 0))
        }
        Some(_) => Ok(Some(false)),
    }
}

fn fence_of(leases: &[BucketLease]) -> u64 {
    leases.first().map_or(0, |lease| lease.fence)
}

#[async_trait]
impl OutboxStore for SqliteOutbox {
    fn bucket_count(&self) -> u16 {
        1
    }

    async fn register(
        &self,
        route: &str,
        topics: &[String],
        sink: &SinkDescription,
    ) -> Result<(), StoreError> {
        let (route, topics) = (route.to_owned(), serde_json::json!(topics).to_string());
        let (target, after_a_crash) = (sink.name.clone(), sink.dedup.after_a_crash());
        self.on_db(move |tx| {
            let sql = "INSERT INTO hapax_outbox_route (route, topics, target, after_a_crash) VALUES (?1, ?2, ?3, ?4)
                       ON CONFLICT (route) DO UPDATE SET topics = excluded.topics, target = excluded.target,
                         after_a_crash = excluded.after_a_crash";
            tx.execute(sql, params![route, topics, target, after_a_crash]).map(drop)
        })
        .await
    }

    async fn forget(&self, route: &str, _by: &str) -> Result<bool, StoreError> {
        let name = route.to_owned();
        let forgotten = self.on_db(move |tx| {
            let sql = "SELECT relay IS NOT NULL AND until_ms > ?2 FROM hapax_outbox_route WHERE route = ?1";
            let runs: Option<bool> =
                tx.query_row(sql, params![name, now_ms()], |row| row.get(0)).optional()?;
            if runs == Some(false) {
                tx.execute("DELETE FROM hapax_outbox_held WHERE route = ?1", [&name])?;
                tx.execute("DELETE FROM hapax_outbox_route WHERE route = ?1", [&name])?;
            }
            Ok(runs)
        });
        match forgotten.await? {
            Some(true) => Err(outbox::route_runs(route)),
            known => Ok(known.is_some()),
        }
    }

    async fn tend(&self, route: &str, relay: &str, lease_ms: u64) -> Result<Tended, StoreError> {
        let (name, relay) = (route.to_owned(), relay.to_owned());
        let tended = self.on_db(move |tx| {
            let now = now_ms();
            tx.execute(
                "UPDATE hapax_outbox_route SET fence = fence + (relay IS NOT ?2), relay = ?2, until_ms = ?3 + ?4
                 WHERE route = ?1 AND (relay IS NULL OR relay = ?2 OR until_ms <= ?3)",
                params![name, relay, now, lease_ms as i64],
            )?;
            let sql = "SELECT fence, relay IS ?2 FROM hapax_outbox_route WHERE route = ?1";
            let found = |row: &Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, bool>(1)?));
            tx.query_row(sql, params![name, relay], found).optional()
        });
        let Some((fence, is_own)) = tended.await? else {
            return Err(outbox::route_is_unknown(route));
        };
        let held = is_own.then_some(BucketLease { bucket: BUCKET, fence: fence as u64 });
        Ok(Tended { held: held.into_iter().collect(), surplus: 0 })
    }

    async fn give_back(&self, route: &str, relay: &str, _buckets: &[BucketLease]) -> Result<(), StoreError> {
        let (route, relay) = (route.to_owned(), relay.to_owned());
        self.on_db(move |tx| {
            let sql = "UPDATE hapax_outbox_route SET relay = NULL WHERE route = ?1 AND relay = ?2";
            tx.execute(sql, params![route, relay]).map(drop)
        })
        .await
    }

    async fn positions(&self, route: &str, buckets: &[u16]) -> Result<Vec<(u16, u64)>, StoreError> {
        let (route, buckets) = (route.to_owned(), buckets.to_vec());
        self.reading(move |tx| {
            let sql = "SELECT position FROM hapax_outbox_route WHERE route = ?1";
            let position: Option<i64> = tx.query_row(sql, [route], |row| row.get(0)).optional()?;
            Ok(buckets.into_iter().map(|bucket| (bucket, position.unwrap_or(0) as u64)).collect())
        })
        .await
    }

    async fn poll(&self, route: &str, read: &[(u16, u64)]) -> Result<Polled, StoreError> {
        let (route, read) = (route.to_owned(), read.to_vec());
        let known = self.reading(move |tx| {
            // Not the largest number in the table: what was published is deleted.
            let last = tx.prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'hapax_outbox'")?;
            let position = tx.prepare_cached("SELECT position FROM hapax_outbox_route WHERE route = ?1")?;
            let number = |found: Option<i64>| found.unwrap_or(0) as u64;
            let one = |row: &Row<'_>| row.get::<_, i64>(0);
            let (mut last, mut position) = (last, position);
            Ok((
                number(last.query_row([], one).optional()?),
                number(position.query_row([route], one).optional()?),
            ))
        });
        let (through, published) = known.await?;
        let mut polled = Polled::default();
        for (bucket, after) in read {
            if published < after {
                polled.rewound.push(bucket);
            } else if after < through {
                polled.ranges.push(BucketRange { bucket, after, through });
            }
        }
        Ok(polled)
    }

    async fn read(
        &self,
        ranges: &[BucketRange],
        rows: usize,
        bytes: usize,
    ) -> Result<Vec<OutboxMessage>, StoreError> {
        let Some(range) = ranges.first().copied() else { return Ok(Vec::new()) };
        self.reading(move |tx| {
            let sql = format!(
                "SELECT {MESSAGE} FROM hapax_outbox WHERE number > ?1 AND number <= ?2 ORDER BY number LIMIT ?3"
            );
            let mut select = tx.prepare_cached(&sql)?;
            let mut found = select.query(params![range.after as i64, range.through as i64, rows as i64])?;
            let (mut messages, mut size) = (Vec::new(), 0);
            while size < bytes
                && let Some(row) = found.next()?
            {
                let message = message(row)?;
                size += message.body.len();
                messages.push(message);
            }
            Ok(messages)
        })
        .await
    }

    async fn advance(&self, route: &str, relay: &str, advances: &[Advance]) -> Result<Vec<u16>, StoreError> {
        let (route, relay) = (route.to_owned(), relay.to_owned());
        let Some(advance) = advances.first().copied() else { return Ok(Vec::new()) };
        self.on_db(move |tx| {
            let Advance { lease, after, position } = advance;
            let sql = "UPDATE hapax_outbox_route SET position = max(position, ?2) WHERE route = ?1 AND position >= ?3";
            if is_own(tx, &route, &relay, lease.fence)?
                && tx.execute(sql, params![route, position as i64, after as i64])? == 1
            {
                return Ok(Vec::new());
            }
            Ok(vec![lease.bucket])
        })
        .await
    }

    async fn hold(
        &self,
        route: &str,
        relay: &str,
        leases: &[BucketLease],
        messages: Vec<HeldMessage>,
    ) -> Result<Vec<u16>, StoreError> {
        let (route, relay, fence) = (route.to_owned(), relay.to_owned(), fence_of(leases));
        self.on_db(move |tx| {
            if !is_own(tx, &route, &relay, fence)? {
                return Ok(vec![BUCKET]);
            }
            for held in &messages {
                let alone = held.message.ordered_key().is_none();
                let number = held.message.number as i64;
                let sql = "SELECT NOT ?4 AND EXISTS (SELECT 1 FROM hapax_outbox_held
                           WHERE route = ?1 AND key = ?2 AND NOT alone AND number < ?3)";
                let waits: bool =
                    tx.query_row(sql, params![route, held.message.key, number, alone], |row| row.get(0))?;
                let due_ms = now_ms() + held.retry_after_ms.unwrap_or(0) as i64;
                let due_ms = due_ms.max(held.message.deliver_at_ms.unwrap_or(0) as i64);
                let parked = held.parked && !waits;
                let sql = format!(
                    "INSERT INTO hapax_outbox_held SELECT ?1, {MESSAGE}, ?3, ?4, ?5, ?6, ?7 FROM hapax_outbox
                     WHERE number = ?2 ON CONFLICT DO NOTHING"
                );
                let next_ms = (!waits && !parked).then_some(due_ms);
                tx.execute(&sql, params![route, number, alone, next_ms, parked, held.attempts, held.error])?;
            }
            Ok(Vec::new())
        })
        .await
    }

    async fn held_keys(&self, route: &str, _buckets: &[u16]) -> Result<Vec<(u16, String)>, StoreError> {
        let route = route.to_owned();
        self.reading(move |tx| {
            let mut select =
                tx.prepare("SELECT DISTINCT key FROM hapax_outbox_held WHERE route = ?1 AND NOT alone")?;
            select.query_map([route], |row| Ok((BUCKET, row.get(0)?)))?.collect()
        })
        .await
    }

    async fn due(&self, route: &str, _buckets: &[u16], max: usize) -> Result<Vec<HeldMessage>, StoreError> {
        let route = route.to_owned();
        self.reading(move |tx| {
            let sql = "SELECT * FROM hapax_outbox_held WHERE route = ?1 AND next_ms <= ?2 ORDER BY next_ms, number LIMIT ?3";
            tx.prepare_cached(sql)?.query_map(params![route, now_ms(), max as i64], held)?.collect()
        })
        .await
    }

    async fn release(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        message: &OutboxMessage,
    ) -> Result<Option<bool>, StoreError> {
        let (route, relay, number) = (route.to_owned(), relay.to_owned(), message.number as i64);
        let key = message.ordered_key().map(str::to_owned);
        self.on_db(move |tx| {
            if !is_own(tx, &route, &relay, lease.fence)? {
                return Ok(None);
            }
            if let Some(still_held) = remove(tx, &route, number)? {
                return Ok(Some(still_held));
            }
            // An operator has skipped it meanwhile.
            let sql =
                "SELECT EXISTS (SELECT 1 FROM hapax_outbox_held WHERE route = ?1 AND key = ?2 AND NOT alone)";
            tx.query_row(sql, params![route, key], |row| row.get(0)).map(Some)
        })
        .await
    }

    async fn postpone(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        held: &HeldMessage,
    ) -> Result<(), StoreError> {
        let (route, relay, held) = (route.to_owned(), relay.to_owned(), held.clone());
        self.on_db(move |tx| {
            if !is_own(tx, &route, &relay, lease.fence)? {
                return Ok(());
            }
            let next_ms = (!held.parked).then(|| now_ms() + held.retry_after_ms.unwrap_or(0) as i64);
            let sql = "UPDATE hapax_outbox_held SET parked = ?3, attempts = ?4, error = ?5, next_ms = ?6
                       WHERE route = ?1 AND number = ?2";
            let number = held.message.number as i64;
            tx.execute(sql, params![route, number, held.parked, held.attempts, held.error, next_ms]).map(drop)
        })
        .await
    }

    async fn rotate(&self) -> Result<Rotated, StoreError> {
        let cleaned = self.cleaned.clone();
        self.on_db(move |tx| {
            let mut patterns: Vec<String> = Vec::new();
            let mut select = tx.prepare("SELECT topics FROM hapax_outbox_route")?;
            for topics in select.query_map([], |row| row.get::<_, String>(0))? {
                patterns.extend(serde_json::from_str::<Vec<String>>(&topics?).unwrap_or_default());
            }
            // Behind those of the last time, so that messages that no route takes are not in the way.
            let sql = "SELECT number, topic FROM hapax_outbox
                       WHERE number > ?2 AND number <= (SELECT min(position) FROM hapax_outbox_route) ORDER BY number LIMIT ?1";
            let mut select = tx.prepare(sql)?;
            let one = |row: &Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?));
            let from = cleaned.load(Ordering::Relaxed);
            let rows: Vec<(i64, String)> =
                select.query_map(params![DELETE_MAX as i64, from], one)?.collect::<Result<_, _>>()?;
            let mut rotated = Rotated::default();
            for (number, topic) in &rows {
                if patterns.iter().any(|pattern| outbox::topic_matches(pattern, topic)) {
                    tx.execute("DELETE FROM hapax_outbox WHERE number = ?1", [number])?;
                    rotated.emptied = 1;
                } else {
                    rotated.unrouted = 1;
                }
            }
            let is_full = rows.len() as u64 == DELETE_MAX;
            let next = rows.last().filter(|_| is_full).map_or(0, |(number, _)| *number);
            cleaned.store(next, Ordering::Relaxed);
            Ok(rotated)
        })
        .await
    }

    async fn changed(&self, wait: Duration) {
        tokio::time::sleep(wait).await;
    }

    async fn status(&self) -> Result<Vec<RouteStatus>, StoreError> {
        self.reading(|tx| {
            let sql = "SELECT r.route, r.target, r.topics, r.until_ms > ?1 AND r.relay IS NOT NULL,
                  (SELECT count(*) FROM hapax_outbox o WHERE o.number > r.position),
                  (SELECT count(*) FROM hapax_outbox_held h WHERE h.route = r.route),
                  (SELECT count(*) FROM hapax_outbox_held h WHERE h.route = r.route AND h.parked),
                  (SELECT min(enqueued_ms) FROM hapax_outbox o WHERE o.number > r.position),
                  (SELECT min(enqueued_ms) FROM hapax_outbox_held h WHERE h.route = r.route), r.after_a_crash
                FROM hapax_outbox_route r ORDER BY r.route";
            let status = |row: &Row<'_>| {
                let topics: String = row.get(2)?;
                let oldest = [row.get::<_, Option<i64>>(7)?, row.get(8)?].into_iter().flatten().min();
                Ok(RouteStatus {
                    route: row.get(0)?,
                    target: row.get(1)?,
                    after_a_crash: row.get(9)?,
                    topics: serde_json::from_str(&topics).unwrap_or_default(),
                    relays: u64::from(row.get::<_, bool>(3)?),
                    lag: row.get::<_, i64>(4)? as u64,
                    oldest_ms: oldest.map(|ms| ms as u64),
                    held: row.get::<_, i64>(5)? as u64,
                    parked: row.get::<_, i64>(6)? as u64,
                })
            };
            tx.prepare(sql)?.query_map([now_ms()], status)?.collect()
        })
        .await
    }

    async fn held(
        &self,
        route: Option<&str>,
        parked: bool,
        max: usize,
    ) -> Result<Vec<(String, HeldMessage)>, StoreError> {
        let route = route.map(str::to_owned);
        self.reading(move |tx| {
            let sql =
                "SELECT * FROM hapax_outbox_held WHERE (?1 IS NULL OR route = ?1) AND (parked OR NOT ?2)
                       ORDER BY route, number LIMIT ?3";
            let one = |row: &Row<'_>| Ok((row.get("route")?, held(row)?));
            tx.prepare(sql)?.query_map(params![route, parked, max as i64], one)?.collect()
        })
        .await
    }

    async fn unpublished(&self, route: &str, max: usize) -> Result<Vec<OutboxMessage>, StoreError> {
        let after = self.positions(route, &[BUCKET]).await?.first().map_or(0, |(_, position)| *position);
        let range = BucketRange { bucket: BUCKET, after, through: i64::MAX as u64 };
        self.read(&[range], max, usize::MAX).await
    }

    async fn retry(&self, route: &str, id: Option<&str>, _by: &str) -> Result<u64, StoreError> {
        let (route, id) = (route.to_owned(), id.map(str::to_owned));
        self.on_db(move |tx| {
            let sql = "UPDATE hapax_outbox_held SET parked = 0, attempts = 0, next_ms = ?3
                       WHERE route = ?1 AND parked AND (?2 IS NULL OR id = ?2)";
            Ok(tx.execute(sql, params![route, id, now_ms()])? as u64)
        })
        .await
    }

    async fn skip(&self, route: &str, id: &str, _by: &str) -> Result<bool, StoreError> {
        let (route, id) = (route.to_owned(), id.to_owned());
        self.on_db(move |tx| {
            let sql = "SELECT number FROM hapax_outbox_held WHERE route = ?1 AND id = ?2";
            let number: Option<i64> = tx.query_row(sql, params![route, id], |row| row.get(0)).optional()?;
            Ok(match number {
                Some(number) => remove(tx, &route, number)?.is_some(),
                None => false,
            })
        })
        .await
    }
}

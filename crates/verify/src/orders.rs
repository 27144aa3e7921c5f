//! The outbox workload: an order and its message are one transaction of the user's database, and relays publish the message.
//! On a store in PostgreSQL the outbox is in the store's own database; else it is in a file of SQLite.
//!
//! Beside it, in another SQLite file, the control that publishes and then marks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::SqliteOutbox;
use hapax::core::message::IDEMPOTENCY_KEY_ATTRIBUTE;
use hapax::relay::{self, NewOutboxMessage, RelayConfig};
use rusqlite::{Connection, TransactionBehavior};
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::recorder::{Pay, Payment, Reporter};
use crate::roles::{self, Site};
use crate::workload::{Shape, Workload};

/// Rows that the control publishes before it marks them.
const BATCH: u32 = 10;
/// How long the control takes between its two steps, and how often it looks.
const GAP: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_millis(30);
/// Unpublished messages that are listed at the end of a run.
const LISTED_MAX: usize = 10_000;

const ORDERS: &str = "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)";
const NAIVE: &str = "CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, number INTEGER NOT NULL, published INTEGER NOT NULL DEFAULT 0)";

/// The function that writes a message to the outbox: part of its statement.
pub const ENQUEUE: &str = "hapax.enqueue";
/// A key in the same bucket of the outbox as another one, for an account: the account's name with a number behind it.
const SHARED_BUCKET: &str = "SELECT $1 || '.' || n FROM generate_series(0, 9999) AS n
    WHERE hapax.outbox_bucket($1 || '.' || n) = hapax.outbox_bucket($2) ORDER BY n LIMIT 1";

/// The name of the workload with an outbox.
pub const WORKLOAD: &str = "orders";

fn table(run: &str) -> String {
    format!("hapax_verify_{run}_orders")
}

/// The topic of a run's messages, and the name of its route.
fn topic(run: &str) -> String {
    format!("hapax-verify-{run}")
}

fn file(site: &Site) -> PathBuf {
    site.bank.with_file_name("orders.db")
}

fn naive_file(site: &Site) -> PathBuf {
    site.bank.with_file_name("naive.db")
}

fn open(path: &Path, tables: &str) -> anyhow::Result<Connection> {
    let connection = Connection::open(path).with_context(|| path.display().to_string())?;
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.execute_batch(tables)?;
    Ok(connection)
}

/// The URL of the outbox.
fn outbox_url(site: &Site) -> String {
    site.database.clone().unwrap_or_else(|| format!("sqlite:{}", file(site).display()))
}

/// Creates the tables.
pub async fn create(site: &Site) -> anyhow::Result<()> {
    open(&naive_file(site), NAIVE)?;
    let Some(url) = &site.database else {
        return Ok(SqliteOutbox::create_tables(&open(&file(site), ORDERS)?)?);
    };
    let mut db = PgConnection::connect(url).await?;
    db.execute(format!("CREATE TABLE {} (id TEXT PRIMARY KEY)", table(&site.run)).as_str()).await?;
    Ok(())
}

/// Deletes what a run leaves in the database; files go with the run's folder.
pub async fn clean_up(site: &Site) -> anyhow::Result<()> {
    let Some(url) = &site.database else { return Ok(()) };
    let mut db = PgConnection::connect(url).await?;
    db.execute(format!("DROP TABLE IF EXISTS {}", table(&site.run)).as_str()).await?;
    // A relay that was killed counts as one that runs until its lease ends.
    let outbox = relay::open_outbox(url).await?;
    let route = topic(&site.run);
    roles::repeat(|| outbox.forget(&route, "hapax verify")).await.map(drop)
}

/// Writes orders for one account.
pub struct Writer {
    site: Site,
    postgres: Option<PgConnection>,
    /// The key of the account's messages in the outbox of a database.
    key: Option<String>,
}

impl Writer {
    pub fn new(site: &Site) -> Self {
        Self { site: site.clone(), postgres: None, key: None }
    }

    /// Writes an order, and its message, unless it is there already. After an error it may be there or not.
    pub async fn place(&mut self, workload: &Workload, payment: &Payment) -> anyhow::Result<()> {
        if workload.shape == Shape::PublishMark {
            return place_naively(&self.site, payment);
        }
        let Some(url) = self.site.database.clone() else { return place_in_sqlite(&self.site, payment) };
        let mut db = match self.postgres.take() {
            Some(db) => db,
            None => PgConnection::connect(&url).await?,
        };
        let key = match &self.key {
            Some(key) => key,
            None => self.key.insert(outbox_key(&mut db, &payment.account).await?),
        };
        place_in_postgres(&mut db, &self.site.run, key, payment).await?;
        self.postgres = Some(db);
        Ok(())
    }
}

/// The key of an account's messages. Accounts are in pairs, and those of a pair share one of the outbox's 64 buckets, as the keys
/// of a real database do: what is committed out of turn by one is seen beside the other.
async fn outbox_key(db: &mut PgConnection, account: &str) -> anyhow::Result<String> {
    let number = account.trim_start_matches(|c: char| !c.is_ascii_digit());
    match number.parse::<u64>() {
        Ok(odd) if odd % 2 == 1 => {
            let first = format!("{}{}", account.trim_end_matches(number), odd - 1);
            Ok(sqlx::query_scalar(SHARED_BUCKET).bind(account).bind(first).fetch_one(db).await?)
        }
        _ => Ok(account.to_owned()),
    }
}

async fn place_in_postgres(
    db: &mut PgConnection,
    run: &str,
    key: &str,
    payment: &Payment,
) -> anyhow::Result<()> {
    let mut tx = db.begin().await?;
    let insert = format!("INSERT INTO {} VALUES ($1) ON CONFLICT DO NOTHING", table(run));
    let added = sqlx::query(&insert).bind(&payment.id).execute(&mut *tx).await?;
    if added.rows_affected() == 1 {
        let headers = serde_json::json!({ IDEMPOTENCY_KEY_ATTRIBUTE: payment.id }).to_string();
        let enqueue = format!("SELECT {ENQUEUE}($1, $2, $3::text, $4::jsonb)");
        let enqueue = sqlx::query(&enqueue)
            .bind(topic(run))
            .bind(key)
            .bind(serde_json::to_string(payment)?)
            .bind(headers);
        enqueue.execute(&mut *tx).await?;
    }
    Ok(tx.commit().await?)
}

fn place_in_sqlite(site: &Site, payment: &Payment) -> anyhow::Result<()> {
    let mut db = open(&file(site), ORDERS)?;
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if tx.execute("INSERT INTO orders VALUES (?1) ON CONFLICT DO NOTHING", [&payment.id])? == 1 {
        let message = NewOutboxMessage::new(topic(&site.run), serde_json::to_vec(payment)?)
            .key(&payment.account)
            .header(IDEMPOTENCY_KEY_ATTRIBUTE, &payment.id);
        SqliteOutbox::enqueue(&tx, &message)?;
    }
    Ok(tx.commit()?)
}

fn place_naively(site: &Site, payment: &Payment) -> anyhow::Result<()> {
    let insert = "INSERT INTO orders (id, account, number) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";
    let values = (&payment.id, &payment.account, payment.number.cast_signed());
    open(&naive_file(site), NAIVE)?.execute(insert, values)?;
    Ok(())
}

/// Messages of the outbox that are not published yet.
pub async fn count_unpublished(site: &Site) -> anyhow::Result<u64> {
    let outbox = relay::open_outbox(&outbox_url(site)).await?;
    let route = topic(&site.run);
    let status = outbox.status().await?.into_iter().find(|status| status.route == route);
    let Some(status) = status else { bail!("the relay's route is not there") };
    Ok(status.lag + status.held)
}

/// Messages of the control that are not marked yet.
pub fn count_unmarked(site: &Site) -> anyhow::Result<u64> {
    let count = "SELECT count(*) FROM orders WHERE NOT published";
    let naive: i64 = open(&naive_file(site), NAIVE)?.query_row(count, [], |row| row.get(0))?;
    Ok(naive.cast_unsigned())
}

/// The payments of messages that are not published yet.
pub async fn list_unpublished(site: &Site) -> anyhow::Result<Vec<String>> {
    let outbox = relay::open_outbox(&outbox_url(site)).await?;
    let messages = outbox.unpublished(&topic(&site.run), LISTED_MAX).await?;
    let payment = |body: &[u8]| serde_json::from_slice::<Payment>(body).ok().map(|payment| payment.id);
    Ok(messages.iter().filter_map(|message| payment(&message.body)).collect())
}

/// A relay process: publishes the outbox, and runs the control beside it.
pub async fn run_relay(site: &Site, workloads: &[Workload]) -> anyhow::Result<()> {
    let of = |shape: Shape| workloads.iter().find(move |workload| workload.shape == shape).copied();
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(workload) = of(Shape::Outbox) {
        tasks.spawn(publish(site.clone(), workload));
    }
    if let Some(workload) = of(Shape::PublishMark) {
        tasks.spawn(publish_then_mark(site.clone(), workload));
    }
    roles::ready();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

async fn publish(site: Site, workload: Workload) -> anyhow::Result<()> {
    let config = RelayConfig {
        name: topic(&site.run),
        from: Some(outbox_url(&site)),
        to: Some(site.endpoint.clone()),
        queue: Some(workload.queue(&site.run)),
        topics: vec![topic(&site.run)],
        lease_ms: site.lease().as_millis() as u64,
        // What is not published in this run would be missed by the checker.
        max_attempts: 0,
        ..RelayConfig::default()
    };
    // The database or the server may be down.
    let run = || async {
        relay::open(&config, None, None).await?.run(std::future::pending()).await?;
        anyhow::Ok(())
    };
    loop {
        let _ = run().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The control: publishes what is not marked, then marks it.
async fn publish_then_mark(site: Site, workload: Workload) -> anyhow::Result<()> {
    let reporter = Reporter::new(site.recorder, "relay");
    let db = open(&naive_file(&site), NAIVE)?;
    loop {
        let batch = read_unmarked(&db)?;
        for payment in &batch {
            let pay = Pay {
                who: reporter.who().to_owned(),
                workload: workload.name.to_owned(),
                payment: payment.clone(),
                key: payment.id.clone(),
                fence: 0,
                deliveries: 1,
                takeover: false,
            };
            reporter.pay(&pay).await?;
        }
        if !batch.is_empty() {
            reporter.gap(workload.name, true).await?;
            tokio::time::sleep(GAP).await;
            reporter.gap(workload.name, false).await?;
        }
        for payment in &batch {
            db.execute("UPDATE orders SET published = 1 WHERE id = ?1", [&payment.id])?;
        }
        tokio::time::sleep(POLL).await;
    }
}

fn read_unmarked(db: &Connection) -> anyhow::Result<Vec<Payment>> {
    let select = "SELECT id, account, number FROM orders WHERE NOT published ORDER BY rowid LIMIT ?1";
    let mut rows = db.prepare_cached(select)?;
    let payment = |row: &rusqlite::Row<'_>| {
        let number = row.get::<_, i64>(2)?.cast_unsigned();
        Ok(Payment { id: row.get(0)?, account: row.get(1)?, number })
    };
    Ok(rows.query_map([BATCH], payment)?.collect::<Result<_, _>>()?)
}

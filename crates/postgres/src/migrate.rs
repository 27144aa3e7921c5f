//! The schema `hapax` and its versions. Each migration is a numbered file in `migrations/`, and is applied once, in order,
//! in one transaction with all others that are missing.

use std::time::Duration;

use hapax_core::StoreError;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

use crate::connect::{self, Options, Target};
use crate::error::{Access, Failure};
use crate::{BoxFuture, OpenError, pooled};

/// One step of the schema.
struct Migration {
    version: i32,
    name: &'static str,
    /// The scripts, one after the other.
    scripts: &'static [Script],
    /// The lowest version that a program must know to work on the schema after this step. A program that knows less is
    /// refused; one that knows at least this much works beside newer ones.
    readers_from: i32,
}

/// A part of a migration.
enum Script {
    Both(&'static str),
    /// One script for each form of the schema.
    ByForm {
        standard: &'static str,
        portable: &'static str,
    },
    /// Queues have no portable form.
    StandardOnly(&'static str),
}

impl Script {
    fn sql(&self, portable: bool) -> Option<&'static str> {
        match self {
            Self::Both(sql) => Some(sql),
            Self::ByForm { standard, portable: other } => Some(if portable { other } else { standard }),
            Self::StandardOnly(sql) => (!portable).then_some(sql),
        }
    }
}

const BASE: &[Script] = &[
    Script::Both(include_str!("../migrations/0001_base.sql")),
    Script::ByForm {
        standard: include_str!("../migrations/0001_fences.sql"),
        portable: include_str!("../migrations/0001_fences_portable.sql"),
    },
    Script::Both(include_str!("../migrations/0001_audit.sql")),
];
const LEDGER: &[Script] = &[Script::Both(include_str!("../migrations/0002_ledger.sql"))];
const DOCUMENTS: &[Script] = &[Script::Both(include_str!("../migrations/0003_documents.sql"))];
const QUEUES: &[Script] = &[Script::StandardOnly(include_str!("../migrations/0004_queues.sql"))];
const INBOX: &[Script] = &[
    Script::StandardOnly(include_str!("../migrations/0005_settled.sql")),
    Script::Both(include_str!("../migrations/0005_inbox.sql")),
];
const COPY: &[Script] = &[Script::StandardOnly(include_str!("../migrations/0006_copy.sql"))];
const OUTBOX: &[Script] = &[Script::StandardOnly(include_str!("../migrations/0007_outbox.sql"))];
const SHORT_TRANSACTIONS: &[Script] = &[
    Script::StandardOnly(include_str!("../migrations/0008_settled.sql")),
    Script::Both(include_str!("../migrations/0008_short_transactions.sql")),
];
const POSITIONS: &[Script] = &[Script::Both(include_str!("../migrations/0009_positions.sql"))];
const WRITE: &[Script] = &[Script::StandardOnly(include_str!("../migrations/0010_write.sql"))];
const GROUPS: &[Script] = &[Script::StandardOnly(include_str!("../migrations/0011_groups.sql"))];

/// Every migration, in order. A released one is never changed.
///
/// One that alters tables of messages locks `q_queue` before them, and then `ledger_entry`: nearly every transaction of a server
/// reads the first one first. So new ones wait there, and those under way end. In another order a migration and the servers wait for each other
/// whenever it tries, and under load it never gets all of its locks.
const MIGRATIONS: &[Migration] = &[
    Migration { version: 1, name: "base", scripts: BASE, readers_from: 1 },
    Migration { version: 2, name: "ledger", scripts: LEDGER, readers_from: 1 },
    Migration { version: 3, name: "documents", scripts: DOCUMENTS, readers_from: 1 },
    Migration { version: 4, name: "queues", scripts: QUEUES, readers_from: 1 },
    Migration { version: 5, name: "inbox", scripts: INBOX, readers_from: 1 },
    // A program that does not know of closed queues would accept messages that the copy does not have.
    Migration { version: 6, name: "copy", scripts: COPY, readers_from: 6 },
    Migration { version: 7, name: "outbox", scripts: OUTBOX, readers_from: 1 },
    Migration { version: 8, name: "short transactions", scripts: SHORT_TRANSACTIONS, readers_from: 1 },
    Migration { version: 9, name: "positions", scripts: POSITIONS, readers_from: 1 },
    Migration { version: 10, name: "write", scripts: WRITE, readers_from: 1 },
    Migration { version: 11, name: "groups", scripts: GROUPS, readers_from: 1 },
];

/// The version of the schema that this program makes.
pub const SCHEMA_VERSION: i32 = MIGRATIONS[MIGRATIONS.len() - 1].version;

/// What a migration did, or would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationReport {
    /// The version of the schema before; 0: there was none.
    pub from: i32,
    /// The migrations that were missing, in order: version and name.
    pub applied: Vec<(i32, &'static str)>,
    /// The changes were rolled back.
    pub dry_run: bool,
}

/// Applies the migrations that a database is missing. With `dry_run` it applies them and rolls back, which shows that
/// they can be applied. Several processes may call it at the same time.
///
/// ```no_run
/// # async fn example() -> Result<(), hapax_postgres::OpenError> {
/// let report = hapax_postgres::migrate("postgres://localhost/shop", &Default::default(), true).await?;
/// println!("{} migrations are missing", report.applied.len());
/// # Ok(())
/// # }
/// ```
pub async fn migrate(url: &str, options: &Options, dry_run: bool) -> Result<MigrationReport, OpenError> {
    let target = Target::new(url, options)?;
    let limit = target.bounds.connect;
    let unavailable = |problem: String| StoreError::Unavailable(format!("migrate: {problem}"));
    let opened = tokio::time::timeout(limit, PgConnection::connect_with(&target.connect)).await;
    let opened = opened.map_err(|_| unavailable(format!("no connection within {} ms", limit.as_millis())))?;
    let mut connection =
        opened.map_err(|error| unavailable(format!("no connection: {}", connect::refusal(&error))))?;
    let mut attempt = 1;
    let report = loop {
        match apply(&mut connection, &target.options, dry_run, lock_wait_ms(attempt)).await {
            Err(failure) if failure.lost_a_lock() && attempt < ATTEMPTS_MAX => {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..500))).await;
                attempt += 1;
            }
            ended => break ended,
        }
    };
    let report = report.map_err(|failure| failure.into_store_error("migrate", Access::Write))?;
    // Its work is committed; a failed goodbye changes nothing.
    let _ = connection.close().await;
    Ok(report)
}

/// How often a migration that does not get its locks is begun at most: servers lock the same tables in other orders, so it may take several
/// attempts under load. Attempts that wait for one lock each take about a minute together. They are counted rather than timed, since the work
/// before a lock may take longer than that.
const ATTEMPTS_MAX: u64 = 60;

/// How long an attempt waits for each of its locks, because everything else queues behind it meanwhile.
///
/// Most attempts give up before PostgreSQL looks for deadlocks, by default after 1 s: of a deadlock with a server the migration mostly is the
/// one that loses. An operation of a server that has waited for longer can still lose, and is repeated. Every fifth attempt waits until
/// PostgreSQL has looked, because only that look interrupts an autovacuum that holds the lock.
fn lock_wait_ms(attempt: u64) -> u64 {
    if attempt.is_multiple_of(5) { 1_500 } else { 500 }
}

const VERSIONS: &str = "
CREATE SCHEMA IF NOT EXISTS hapax;
CREATE TABLE IF NOT EXISTS hapax.migration (
  version int PRIMARY KEY,
  name text NOT NULL,
  readers_from int NOT NULL,
  applied timestamptz NOT NULL DEFAULT clock_timestamp()
);
";

async fn apply(
    connection: &mut PgConnection,
    options: &Options,
    dry_run: bool,
    lock_wait_ms: u64,
) -> Result<MigrationReport, Failure> {
    let portable = options.portable;
    let mut transaction = if options.pooler {
        connection.begin_with(pooled::begin(options.operation_timeout, false)).await?
    } else {
        connection.begin().await?
    };
    let limits =
        format!("SET LOCAL statement_timeout = '30min'; SET LOCAL lock_timeout = '{lock_wait_ms}ms'");
    run_script(&mut transaction, &limits).await?;
    if !portable {
        run_script(&mut transaction, "SELECT pg_advisory_xact_lock(hashtext('hapax.migrate'))").await?;
    }
    run_script(&mut transaction, VERSIONS).await?;
    let from = version(&mut transaction).await?;
    let mut applied = Vec::new();
    for step in MIGRATIONS.iter().filter(|step| step.version > from) {
        for sql in step.scripts.iter().filter_map(|script| script.sql(portable)) {
            run_script(&mut transaction, sql).await?;
        }
        sqlx::query("INSERT INTO hapax.migration (version, name, readers_from) VALUES ($1, $2, $3)")
            .bind(step.version)
            .bind(step.name)
            .bind(step.readers_from)
            .execute(&mut *transaction)
            .await?;
        applied.push((step.version, step.name));
    }
    sqlx::query("INSERT INTO hapax.store (secret, portable) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(new_secret()?)
        .bind(portable)
        .execute(&mut *transaction)
        .await?;
    if dry_run {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(MigrationReport { from, applied, dry_run })
}

/// Boxed, since the compiler cannot see otherwise that the future is `Send`.
fn run_script<'c>(connection: &'c mut PgConnection, sql: &'c str) -> BoxFuture<'c, Result<(), sqlx::Error>> {
    Box::pin(async move { connection.execute(sqlx::raw_sql(sql)).await.map(drop) })
}

fn new_secret() -> Result<Vec<u8>, Failure> {
    let mut secret = vec![0; 32];
    let filled = getrandom::fill(&mut secret);
    filled.map_err(|error| StoreError::Unavailable(format!("no randomness from the system: {error}")))?;
    Ok(secret)
}

async fn version(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    let row =
        sqlx::query("SELECT coalesce(max(version), 0) FROM hapax.migration").fetch_one(connection).await?;
    row.try_get(0)
}

/// What an opened database says about its schema.
pub(crate) struct Schema {
    /// 0: there is none.
    pub version: i32,
    /// The lowest version that a program must know.
    pub readers_from: i32,
}

impl Schema {
    pub async fn read(connection: &mut PgConnection) -> Result<Self, Failure> {
        let exists = sqlx::query("SELECT to_regclass('hapax.migration') IS NOT NULL");
        if !exists.fetch_one(&mut *connection).await?.try_get::<bool, _>(0)? {
            return Ok(Self { version: 0, readers_from: 0 });
        }
        let row = sqlx::query(
            "SELECT coalesce(max(version), 0), coalesce(max(readers_from), 0) FROM hapax.migration",
        )
        .fetch_one(connection)
        .await?;
        Ok(Self { version: row.try_get(0)?, readers_from: row.try_get(1)? })
    }

    /// Whether this program can work on the schema.
    pub fn check(&self) -> Result<(), OpenError> {
        if self.version < SCHEMA_VERSION {
            return Err(OpenError::OldSchema { found: self.version, needed: SCHEMA_VERSION });
        }
        if self.readers_from > SCHEMA_VERSION {
            return Err(OpenError::NewSchema { needed: self.readers_from, known: SCHEMA_VERSION });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_numbered_without_gaps() {
        for (at, step) in MIGRATIONS.iter().enumerate() {
            assert_eq!(step.version as usize, at + 1, "{}", step.name);
            assert!((1..=step.version).contains(&step.readers_from), "{}", step.name);
        }
    }

    #[test]
    fn neighbouring_versions_work_side_by_side_unless_a_migration_says_otherwise() {
        let schema = |version, readers_from| Schema { version, readers_from };
        assert!(schema(SCHEMA_VERSION, 1).check().is_ok());
        assert!(schema(SCHEMA_VERSION + 1, 1).check().is_ok(), "a newer program has migrated");
        let newer = schema(SCHEMA_VERSION + 1, SCHEMA_VERSION + 1).check();
        assert!(matches!(newer, Err(OpenError::NewSchema { .. })), "{newer:?}");
        let older = schema(SCHEMA_VERSION - 1, 1).check();
        assert!(matches!(older, Err(OpenError::OldSchema { .. })), "{older:?}");
    }
}

//! Queues, ledger, inbox, outbox and documents of Hapax on PostgreSQL 15 and later: several processes share one database.
//!
//! ```no_run
//! # async fn example() -> Result<(), hapax_postgres::OpenError> {
//! use hapax_postgres::{Options, PostgresStore};
//! let store = PostgresStore::open("postgres://localhost/shop", Options { migrate: true, ..Options::default() }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The parts, from the outside in: `ledger`, `documents`, `queues`, `inbox` and `outbox` implement the seams; [`merge`] merges the
//! calls of a kind into batches; `pool` runs an operation on a connection, bounded in time and safe to cancel;
//! `transaction` ends transactions and repeats those that lose against another one; `error` says what a failure means;
//! `hints` tells other processes that something has changed. SQL lives in the modules of the seams and in
//! `migrations/`. Every time comes from `hapax.now_us()`, the database's clock.
//!
//! [`merge`]: self

mod connect;
mod documents;
mod error;
mod findings;
mod hints;
mod inbox;
mod ledger;
mod merge;
mod migrate;
mod outbox;
mod pool;
mod pooled;
mod queues;
mod seal;
mod transaction;

use std::sync::Arc;

use hapax_core::StoreError;
use sqlx::{PgConnection, Row as _};
use thiserror::Error;

pub use connect::{Options, UrlError};
pub use findings::FINDING_CODES;
pub use inbox::{InboxOptions, Isolation, PostgresInbox, PostgresTransaction};
pub use migrate::{MigrationReport, SCHEMA_VERSION, migrate};
pub use outbox::PostgresOutbox;

use connect::Target;
use error::{Access, Failure};
use hints::Hints;
use ledger::PostgresLedger;
use migrate::Schema;
use pool::Pool;
use queues::Queues;
use seal::Seal;

/// A future of an operation on a connection.
pub(crate) type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why a store could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL or an option is not acceptable.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The database cannot be reached or refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The schema is missing or older than this program.
    #[error(
        "the database has version {found} of the schema `hapax`, this program needs {needed}; run `hapax migrate --store URL`"
    )]
    OldSchema {
        /// The schema's version; 0: there is none.
        found: i32,
        /// The version that this program makes.
        needed: i32,
    },
    /// A newer program has changed the schema in a way that this one cannot work with.
    #[error(
        "the schema `hapax` needs a program that knows its version {needed}, and this one knows {known}; use a newer one"
    )]
    NewSchema {
        /// The lowest version that a program must know.
        needed: i32,
        /// The version that this program makes.
        known: i32,
    },
    /// The schema has the other form than the one asked for.
    #[error(
        "the schema `hapax` was made in the {} form, and the URL asks for the {} one; set `hapax_portable={found}`",
        form(*found),
        form(!found)
    )]
    Form {
        /// Whether the schema is in the portable form.
        found: bool,
    },
    /// The database cannot hold every text.
    #[error("the database's encoding is {0}; Hapax needs UTF8: create the database with ENCODING 'UTF8'")]
    Encoding(String),
}

fn form(portable: bool) -> &'static str {
    if portable { "portable" } else { "standard" }
}

impl OpenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Url(_) => "store-url",
            Self::Store(error) => error.code(),
            Self::OldSchema { .. } => "schema-old",
            Self::NewSchema { .. } => "schema-new",
            Self::Form { .. } => "schema-form",
            Self::Encoding(_) => "database-encoding",
        }
    }
}

/// What all parts of a store share.
pub(crate) struct Base {
    pub pool: Pool,
    pub hints: Hints,
    pub seal: Seal,
    pub options: Options,
    /// What was committed survives a crash of the server's machine, by its settings when the store was opened.
    pub durable: bool,
}

impl Drop for Base {
    fn drop(&mut self) {
        self.hints.close();
        self.pool.close();
    }
}

/// A store in a PostgreSQL database. Clones are the same store.
#[derive(Clone)]
pub struct PostgresStore {
    base: Arc<Base>,
    ledger: Arc<PostgresLedger>,
    queues: Arc<Queues>,
}

impl PostgresStore {
    /// Opens the store in the schema `hapax` of a database. It belongs to the tokio runtime on which it is opened.
    pub async fn open(url: &str, options: Options) -> Result<Self, OpenError> {
        if options.migrate {
            migrate(url, &options, false).await?;
        }
        let target = Target::new(url, &options)?;
        let Options { pooler, portable, .. } = target.options;
        let pool = Pool::new(target.connect, target.bounds, pooler, !portable);
        let found = pool.run("open", Access::Read, |connection| Box::pin(examine(connection))).await?;
        found.schema.check()?;
        if found.encoding != "UTF8" {
            return Err(OpenError::Encoding(found.encoding));
        }
        if found.portable != target.options.portable {
            return Err(OpenError::Form { found: found.portable });
        }
        pool.set_has_schema();
        let hints = Hints::new(pool.clone(), target.listen);
        let base = Arc::new(Base {
            pool,
            hints,
            seal: Seal::new(found.secret),
            options: target.options,
            durable: found.durable,
        });
        let ledger = Arc::new(PostgresLedger::new(&base));
        let queues = Arc::new(Queues::new(&base, &ledger));
        Ok(Self { base, ledger, queues })
    }

    /// Stops the store's background work and closes its connections. Operations that are under way are not interrupted;
    /// later ones fail.
    pub fn shut_down(&self) {
        self.queues.close();
        self.ledger.close();
        self.base.hints.close();
        self.base.pool.close();
    }
}

impl PostgresStore {
    /// For tests: returns when all calls that were made before have been answered, or wait for a change.
    #[doc(hidden)]
    pub async fn quiet(&self) {
        self.ledger.quiet().await;
        self.queues.quiet().await;
    }

    /// For tests that replace the database's clock: lets waiting calls and timed work look at it again.
    #[doc(hidden)]
    pub async fn clock_moved(&self) -> Result<(), StoreError> {
        self.queues.look_again();
        self.ledger.clock_moved().await
    }
}

struct Found {
    schema: Schema,
    encoding: String,
    secret: [u8; 32],
    portable: bool,
    durable: bool,
}

async fn examine(connection: &mut PgConnection) -> Result<Found, Failure> {
    let schema = Schema::read(connection).await?;
    let sql =
        "SELECT current_setting('server_encoding'), coalesce(current_setting('fsync', true), 'on') <> 'off'";
    let row = sqlx::query(sql).fetch_one(&mut *connection).await?;
    let (encoding, durable) = (row.try_get(0)?, row.try_get(1)?);
    if schema.version == 0 {
        return Ok(Found { schema, encoding, secret: [0; 32], portable: false, durable });
    }
    let row = sqlx::query("SELECT secret, portable FROM hapax.store").fetch_one(connection).await?;
    let secret: Vec<u8> = row.try_get(0)?;
    let secret = secret.try_into().map_err(|_| StoreError::Damaged("hapax.store: the secret".to_owned()))?;
    Ok(Found { schema, encoding, secret, portable: row.try_get(1)?, durable })
}

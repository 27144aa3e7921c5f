//! The database with the banks: of a private server, or a new one on a given server.

use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use hapax::postgres::{Options, PostgresStore};
use hapax::{Hapax, QueueConfig, RetryPolicy, Tier};
use hapax_faults::PostgresServer;
use sqlx::{Connection as _, Executor as _, PgConnection};

use super::PgBank;
use crate::bank::Payment;

/// How long a crash delays a payment.
const LEASE_MS: u64 = 1_000;

/// A database with three queues and the tables of three banks.
pub struct Site {
    /// `None`: the server belongs to somebody else.
    server: Option<Arc<PostgresServer>>,
    /// The URL that was given, or that of the private server's database `postgres`.
    admin: String,
    database: String,
    url: String,
}

impl Site {
    pub async fn open(given: Option<&str>) -> anyhow::Result<Self> {
        let server = match given {
            Some(_) => None,
            None => Some(Arc::new(tokio::task::spawn_blocking(start).await??)),
        };
        let admin = match &server {
            Some(server) => server.url("postgres"),
            None => given.unwrap_or_default().to_owned(),
        };
        let database = format!("hapax_payments_{}", std::process::id());
        let mut db = PgConnection::connect(&admin).await.with_context(|| "the database cannot be reached")?;
        let create = format!("CREATE DATABASE {database} TEMPLATE template0 ENCODING 'UTF8'");
        db.execute(&*create)
            .await
            .with_context(|| format!("{create}: the role of the URL has to be allowed to"))?;
        let site = Self { server, url: with_database(&admin, &database), admin, database };
        if let Err(error) = site.set_up().await {
            site.close().await.ok();
            return Err(error);
        }
        Ok(site)
    }

    async fn set_up(&self) -> anyhow::Result<()> {
        let store = PostgresStore::open(&self.url, Options { migrate: true, ..Options::default() }).await?;
        let hapax = Hapax::with_store(Arc::new(store));
        for bank in PgBank::ALL {
            let tier = if bank == PgBank::Transactional { Tier::Transactional } else { Tier::AtLeastOnce };
            let retry = RetryPolicy::at_once();
            let config = QueueConfig { tier, lease_ms: LEASE_MS, retry, ..QueueConfig::default() };
            hapax.queue::<Payment>(bank.name())?.ensure(config).await?;
        }
        let mut db = self.connect().await?;
        // A unique constraint would catch duplicates in this table. It would not catch a second mail, or a second update.
        db.execute(
            "CREATE TABLE journal (bank text NOT NULL, payment text NOT NULL, cents bigint NOT NULL);
             CREATE TABLE accounts (bank text PRIMARY KEY, cents bigint NOT NULL)",
        )
        .await?;
        for bank in PgBank::NAMES {
            sqlx::query("INSERT INTO accounts VALUES ($1, 0)").bind(bank).execute(&mut db).await?;
        }
        Ok(())
    }

    /// The URL of the database, for workers and producers.
    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn what(&self) -> String {
        let server = if self.server.is_some() { "a private server" } else { "the given server" };
        format!("the database {} of {server}", self.database)
    }

    pub fn kills_what(&self) -> &'static str {
        if self.server.is_some() { "the whole database server" } else { "all sessions of the database" }
    }

    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        Ok(PgConnection::connect(&self.url).await?)
    }

    /// Kills the private server with all of its processes and starts it again, or ends all sessions of the database.
    pub async fn kill_database(&self) -> anyhow::Result<()> {
        let Some(server) = self.server.clone() else {
            let mut db = PgConnection::connect(&self.admin).await?;
            let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
            sqlx::query(end).bind(&self.database).execute(&mut db).await?;
            return Ok(());
        };
        let kill = move || {
            server.signal_all("KILL");
            server.stop("KILL");
            server.run().map_err(|why| anyhow!(why))
        };
        tokio::task::spawn_blocking(kill).await?
    }

    /// Drops the database. A private server ends with this process.
    pub async fn close(&self) -> anyhow::Result<()> {
        let mut db = PgConnection::connect(&self.admin).await?;
        let drop = format!("DROP DATABASE {} WITH (FORCE)", self.database);
        db.execute(&*drop).await.with_context(|| format!("the database {} remains", self.database))?;
        Ok(())
    }
}

fn start() -> anyhow::Result<PostgresServer> {
    let advice = "no private PostgreSQL server could be started. Install PostgreSQL 15 or later (Debian: apt-get install \
                  postgresql; its programs have to be on the path, or in the folder HAPAX_POSTGRES_BIN), or give the URL of \
                  a server: -- --postgres postgres://user@host/database";
    PostgresServer::start(&[]).map_err(|why| anyhow!(why).context(advice))
}

/// The URL of another database on the same server.
fn with_database(url: &str, database: &str) -> String {
    let (base, query) = url.split_once('?').map_or((url, None), |(base, query)| (base, Some(query)));
    let authority = base.find("://").map_or(0, |at| at + 3);
    let host_end = base[authority..].find('/').map_or(base.len(), |at| authority + at);
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    format!("{}/{database}{query}", &base[..host_end])
}

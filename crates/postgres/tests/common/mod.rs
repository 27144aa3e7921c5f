//! A private PostgreSQL server for the tests of one process, and a database of its own for each test.
//!
//! The server is the one that `HAPAX_TEST_POSTGRES` names (a URL whose role may create databases), or else one that is
//! started here from the programs of PostgreSQL 15, or from those in the folder that `HAPAX_POSTGRES_BIN` names. It ends with
//! the process, also if that is killed. With `HAPAX_TEST_PGBOUNCER` (`polling` or `listening`) stores reach it through a
//! PgBouncer. With `HAPAX_TEST_SMOKE` the suites run a selection of their cases.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod server;
pub mod smoke;
pub mod suite;
pub mod trouble;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, Grant, Json, Ledger as _,
    RecordedOutcome,
};
use hapax_postgres::{Options, PostgresStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection};

pub use hapax_conformance::attack::PATIENCE;
pub use server::Server;

/// The server of this process; `Err`: why there is none.
pub fn shared() -> Result<&'static Server, &'static str> {
    static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let server = match std::env::var("HAPAX_TEST_POSTGRES") {
            Ok(url) => Server::given(&url),
            Err(_) => Server::start_in_memory()?,
        };
        match std::env::var("HAPAX_TEST_PGBOUNCER").as_deref() {
            Err(_) => Ok(server),
            Ok("polling") => server.behind_pooler(false),
            Ok("listening") => server.behind_pooler(true),
            Ok(other) => panic!("HAPAX_TEST_PGBOUNCER is {other:?}; it is `polling` or `listening`"),
        }
    });
    server.as_ref().map_err(String::as_str)
}

/// A test of a store, as a function that is given the shared server.
pub struct Test {
    pub name: &'static str,
    pub run: fn(&'static Server),
}

/// Lists tests by their names.
#[macro_export]
macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        &[$($crate::common::Test { name: stringify!($name), run: |server| $crate::common::block_on($name(server)) }),+]
    };
}

/// Runs tests. Without a server each is reported as ignored, with the reason.
pub fn main(tests: &'static [Test]) -> std::process::ExitCode {
    let trial = |test: &'static Test| {
        Trial::ignorable_test(test.name, move || match shared() {
            Ok(server) => {
                (test.run)(server);
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit_code()
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// A database of its own, dropped at the end.
pub struct Database {
    server: &'static Server,
    pub name: String,
    /// Parameters of the store's URL.
    query: &'static str,
}

impl Database {
    /// An empty database.
    pub async fn empty(server: &'static Server) -> Self {
        Self::copy_of(server, "template0", "").await
    }

    /// A database with the schema.
    pub async fn migrated(server: &'static Server) -> Self {
        Self::migrated_with(server, "").await
    }

    /// The same, with these parameters in the store's URL: a copy of a database that is migrated once.
    pub async fn migrated_with(server: &'static Server, query: &'static str) -> Self {
        static TEMPLATES: Mutex<BTreeMap<(String, &str), String>> = Mutex::new(BTreeMap::new());
        let make = move || {
            let make = async move {
                let database = Self::copy_of(server, "template0", query).await;
                hapax_postgres::migrate(&database.url(), &Options::default(), false).await.unwrap();
                database.raise_places(true).await;
                // It is kept for the whole process.
                std::mem::ManuallyDrop::new(database).name.clone()
            };
            std::thread::spawn(move || block_on(make)).join().expect("a database is migrated")
        };
        let template = TEMPLATES.lock().unwrap().entry((server.url(""), query)).or_insert_with(make).clone();
        Self::copy_of(server, &template, query).await
    }

    /// Has the places of FIFO groups moved up with every change, so that each test finds what is below one that is too high, or as
    /// rarely as the schema does it.
    pub async fn raise_places(&self, always: bool) {
        let when = if always { "true" } else { "random() < 0.016" };
        let sql = format!(
            "DO $$ BEGIN IF to_regprocedure('hapax.q_raises()') IS NOT NULL THEN CREATE OR REPLACE FUNCTION hapax.q_raises() \
             RETURNS boolean LANGUAGE sql AS 'SELECT {when}'; END IF; END $$"
        );
        self.connect().await.execute(sql.as_str()).await.unwrap();
    }

    async fn copy_of(server: &'static Server, template: &str, query: &'static str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{}_{number}", std::process::id());
        let mut admin = server.connect("postgres").await;
        if server.has_pooler() {
            // It keeps the sessions in which the template was made.
            let end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1";
            sqlx::query(end).bind(template).execute(&mut admin).await.unwrap();
        }
        let create = format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE {template}");
        let start = Instant::now();
        // A session of the template that has just been closed may not have ended yet: the server waits for 5 s only.
        while let Err(error) = admin.execute(create.as_str()).await {
            let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
            let in_use = code.is_some_and(|code| code == "55006");
            assert!(in_use && start.elapsed() < PATIENCE, "{error}");
        }
        Self { server, name, query }
    }

    pub fn url(&self) -> String {
        let url = self.server.store_url(&self.name);
        match self.query {
            "" => url,
            query => format!("{url}{}{query}", if url.contains('?') { '&' } else { '?' }),
        }
    }

    /// The URL of the database itself, without a pooler and without a store's parameters.
    pub fn direct_url(&self) -> String {
        self.server.url(&self.name)
    }

    pub async fn connect(&self) -> PgConnection {
        self.server.connect(&self.name).await
    }

    pub async fn open(&self) -> PostgresStore {
        PostgresStore::open(&self.url(), Options::default()).await.unwrap()
    }

    /// Removes everything that earlier tests have left, but not the schema, nor messages of the outbox. Much faster than a
    /// new database.
    pub async fn clear(&self) {
        let mut connection = self.connect().await;
        // A statement of an earlier test may still be under way.
        if self.server.has_pooler() {
            self.until_idle(&mut connection).await;
        } else {
            let end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
                       WHERE datname = current_database() AND pid <> pg_backend_pid()";
            connection.execute(end).await.unwrap();
        }
        connection
            .execute(
                "DO $$ DECLARE t text; BEGIN
                   FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'hapax'
                     AND tablename NOT IN ('migration', 'store', 'ledger_gate') AND tablename !~ '^outbox_[0-9]' LOOP EXECUTE format('DELETE FROM hapax.%I', t); END LOOP;
                 END $$",
            )
            .await
            .unwrap();
    }

    /// Waits until no session is at work. A pooler's sessions are not ended: it would give an ended one to the next client.
    async fn until_idle(&self, connection: &mut PgConnection) {
        let busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                    AND pid <> pg_backend_pid() AND state <> 'idle'";
        let start = std::time::Instant::now();
        while sqlx::query_scalar::<_, i64>(busy).fetch_one(&mut *connection).await.unwrap() > 0 {
            assert!(
                start.elapsed() < std::time::Duration::from_mins(1),
                "sessions of {} stay busy",
                self.name
            );
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Replaces the database's clock by one that only [`Clock::advance_ms`] moves. Call it before stores are opened.
    pub async fn with_clock(&self) -> Clock {
        let mut connection = self.connect().await;
        connection.execute(CLOCK).await.unwrap();
        Clock { connection: tokio::sync::Mutex::new(connection) }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server, self.name.clone());
        // The test's runtime may be at its end. A database that stays does no harm: its server is private.
        let drop = async move {
            let mut admin = server.connect("postgres").await;
            admin.execute(format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)").as_str()).await
        };
        std::thread::spawn(move || block_on(drop).is_ok());
    }
}

/// The clock of a database, for tests. Every time of a store comes from `hapax.now_us()` and `hapax.started_ms()`, so
/// replacing these two functions is all there is to it; the store itself has no part in it.
pub struct Clock {
    connection: tokio::sync::Mutex<PgConnection>,
}

const CLOCK: &str = "
DROP SCHEMA IF EXISTS hapax_test CASCADE;
CREATE SCHEMA hapax_test;
CREATE TABLE hapax_test.clock (now_us bigint NOT NULL, started_ms bigint NOT NULL);
INSERT INTO hapax_test.clock VALUES (1800000000000000, 1700000000000);
CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT now_us FROM hapax_test.clock';
CREATE OR REPLACE FUNCTION hapax.started_ms() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT started_ms FROM hapax_test.clock';
";

impl Clock {
    pub async fn advance_ms(&self, ms: u64) {
        let mut connection = self.connection.lock().await;
        let advance = sqlx::query("UPDATE hapax_test.clock SET now_us = now_us + $1").bind(ms as i64 * 1000);
        advance.execute(&mut *connection).await.unwrap();
    }

    /// As if the server had been started now.
    pub async fn server_restarted(&self) {
        let mut connection = self.connection.lock().await;
        connection.execute("UPDATE hapax_test.clock SET started_ms = now_us / 1000").await.unwrap();
    }
}

/// Sets the clock of a database back, as an operator or NTP would; no time passes.
pub async fn set_back_ms(url: &str, ms: u64) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let back = sqlx::query("UPDATE hapax_test.clock SET now_us = now_us - $1").bind(ms as i64 * 1000);
    back.execute(&mut connection).await.unwrap();
}

pub fn id(key: &str) -> EntryId {
    EntryId::new("orders".parse().unwrap(), key.parse().unwrap())
}

pub fn ask(key: &str, owner: &str) -> ClaimRequest {
    ClaimRequest::new(id(key), owner.parse().unwrap(), 60_000)
}

/// The answer to one claim.
pub async fn claim(store: &PostgresStore, request: ClaimRequest) -> Result<Claim, ClaimError> {
    store.claim(vec![request]).await?.remove(0)
}

pub async fn granted(store: &PostgresStore, request: ClaimRequest) -> Grant {
    match claim(store, request).await {
        Ok(Claim::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// The end of a claim with an outcome.
pub fn completed(key: &str, grant: &Grant, outcome: &str) -> EndClaim {
    let outcome = RecordedOutcome::done(Json::of(outcome).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    EndClaim { id: id(key), token: grant.token.clone(), ending }
}

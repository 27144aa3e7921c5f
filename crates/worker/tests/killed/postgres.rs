//! The column with queue, ledger and effects in one PostgreSQL database.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use hapax_core::{EntryId, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueStore as _, Tier};
use hapax_faults::PostgresServer;
use hapax_postgres::{Options, PostgresInbox, PostgresStore};
use hapax_worker::{Cx, Worker};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

use super::column::{BETWEEN, die_at, lease, line, work};
use super::{Case, Fate, Found, Line, block_on, effects, note, queue};

/// The server of this process; `Err`: why there is none.
pub fn server() -> Result<&'static PostgresServer, &'static str> {
    static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match std::env::var("HAPAX_TEST_POSTGRES") {
        Ok(url) => Ok(PostgresServer::given(&url)),
        Err(_) => PostgresServer::start_in_memory(),
    });
    server.as_ref().map_err(String::as_str)
}

/// A clock that is moved by the test. Every time of a store comes from these two functions.
const CLOCK: &str = "
CREATE SCHEMA hapax_test;
CREATE TABLE hapax_test.clock (now_us bigint NOT NULL);
INSERT INTO hapax_test.clock VALUES (1800000000000000);
CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT now_us FROM hapax_test.clock';
CREATE OR REPLACE FUNCTION hapax.started_ms() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT 1700000000000::bigint'";

fn url(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("url")).unwrap()
}

async fn open(folder: &Path) -> PostgresStore {
    PostgresStore::open(&url(folder), Options { migrate: true, ..Options::default() }).await.unwrap()
}

/// A database with a queue and a table of effects.
pub fn prepare(folder: &Path) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let server = server().expect("the column is left out without a server");
    let name = format!("killed_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    server.sql("postgres", &format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")).unwrap();
    std::fs::write(folder.join("url"), server.url(&name)).unwrap();
    block_on(async {
        drop(open(folder).await);
        let mut db = PgConnection::connect(&url(folder)).await.unwrap();
        db.execute(CLOCK).await.unwrap();
        let store = open(folder).await;
        let config = QueueConfig { tier: Tier::Transactional, ..QueueConfig::sqs() };
        store.create_queue(&queue(), config).await.unwrap();
        let table = "CREATE TABLE effects (at bigint GENERATED ALWAYS AS IDENTITY, key text, fence bigint, derived text)";
        db.execute(table).await.unwrap();
    });
}

pub fn send(folder: &Path, message: NewMessage) {
    block_on(async { open(folder).await.send(&queue(), vec![message]).await.unwrap().remove(0).unwrap() });
}

/// Reads the effects, the queue and the ledger.
pub fn inspect(folder: &Path) -> Found {
    block_on(async {
        let store = open(folder).await;
        let stats = store.stats(&queue()).await.unwrap();
        assert_eq!((stats.ready, stats.delayed, stats.in_flight), (0, 0, 0), "the queue is not at rest");
        let mut effects = effects(folder);
        let mut db = PgConnection::connect(&url(folder)).await.unwrap();
        let rows = sqlx::query("SELECT key, fence, derived FROM effects ORDER BY at")
            .fetch_all(&mut db)
            .await
            .unwrap();
        let line = |row: &sqlx::postgres::PgRow| {
            let fence: i64 = row.get("fence");
            Line { key: row.get("key"), fence: fence as u64, derived: row.get("derived") }
        };
        effects.lines = rows.iter().map(line).collect();
        let id = EntryId::of_queue(&queue(), "order-7".parse().unwrap());
        let entry = store.entry(&id).await.unwrap();
        let outcome =
            entry.as_ref().and_then(|entry| entry.outcome.clone()).and_then(|outcome| outcome.value);
        let fate = match effects.lines.len() {
            effects if stats.parked > 0 => Fate::InDoubt { effects },
            0 => Fate::Lost,
            1 => Fate::Once,
            _ => Fate::Duplicate,
        };
        let entry = entry.map(|entry| entry.state.as_str().to_owned());
        Found {
            fate,
            effects,
            parked: stats.parked,
            entry,
            outcome: outcome.map(|json| json.as_str().to_owned()),
        }
    })
}

/// Works until the queue is empty, or dies.
pub async fn child(case: Case) {
    if case.point.is_none() {
        let mut db = PgConnection::connect(&url(&case.folder)).await.unwrap();
        let advance = sqlx::query("UPDATE hapax_test.clock SET now_us = now_us + $1");
        advance.bind(BETWEEN.as_micros() as i64).execute(&mut db).await.unwrap();
    }
    let store = Arc::new(open(&case.folder).await);
    let inbox = PostgresInbox::new(&store);
    let (hook, folder) = (die_at(case.point), case.folder.clone());
    let builder = Worker::over(store.clone(), queue()).lease(lease(&case)).hook(move |point| hook(point));
    let builder =
        builder.async_transactional_handler(&inbox, move |_: u32, db: &mut PgConnection, cx: Cx| {
            let folder = folder.clone();
            Box::pin(async move {
                let line = line(&cx);
                note(&folder, "run", &line);
                let insert = sqlx::query("INSERT INTO effects (key, fence, derived) VALUES ($1, $2, $3)");
                let insert = insert.bind(&line.key).bind(line.fence as i64).bind(&line.derived);
                insert.execute(db).await?;
                cx.effect_point().await;
                Ok::<_, sqlx::Error>(line.fence)
            })
        });
    work(store, builder).await;
}

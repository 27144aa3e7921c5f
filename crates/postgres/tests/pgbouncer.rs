//! A store behind PgBouncer in transaction mode: sessions change with every transaction and belong to several clients.
//! Version 1.18 knows nothing of prepared statements, so it is the strictest one.

mod common;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::{Database, Server, ask, block_on, completed, granted};
use hapax_core::{
    Extend, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive,
    Settle,
};
use hapax_postgres::{Options, PostgresStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use tokio::task::JoinSet;

/// A server behind a pooler; `Err`: why there is none.
fn pooled(listens: bool) -> Result<&'static Server, &'static str> {
    static SERVERS: [OnceLock<Result<Server, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    let start = || Server::start_in_memory()?.behind_pooler(listens);
    SERVERS[usize::from(listens)].get_or_init(start).as_ref().map_err(String::as_str)
}

/// Runs a test on a server whose stores do not listen, or do so by a direct URL.
fn trial(name: &'static str, listens: bool, run: fn(&'static Server)) -> Trial {
    let name = format!("{name}::{}", if listens { "listening" } else { "polling" });
    Trial::ignorable_test(name, move || match pooled(listens) {
        Ok(server) => {
            run(server);
            Ok::<_, Failed>(Completion::Completed)
        }
        Err(why) => Ok(Completion::ignored_with(format!("needs PgBouncer and PostgreSQL 15: {why}"))),
    })
}

fn main() -> ExitCode {
    let both = [false, true].into_iter().flat_map(|listens| {
        [
            trial("lifecycles_of_many_clients_share_few_sessions", listens, |server| {
                block_on(lifecycles_of_many_clients_share_few_sessions(server));
            }),
            trial("a_waiting_receive_gets_what_another_process_sends", listens, |server| {
                block_on(a_waiting_receive_gets_what_another_process_sends(server));
            }),
        ]
    });
    let once = [
        trial("the_test_bed_gives_statements_to_different_sessions", false, |server| {
            block_on(the_test_bed_gives_statements_to_different_sessions(server));
        }),
        trial("a_pooler_that_was_not_declared_is_told", false, |server| {
            block_on(a_pooler_that_was_not_declared_is_told(server));
        }),
        trial("a_transaction_whose_beginning_fails_is_not_left_open", false, |server| {
            block_on(a_transaction_whose_beginning_fails_is_not_left_open(server));
        }),
        trial("a_lock_is_not_waited_for_without_bound", false, |server| {
            block_on(a_lock_is_not_waited_for_without_bound(server));
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), both.chain(once).collect()).exit_code()
}

fn jobs() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// The pooler's URL, without the parameters of a store.
fn plain(database: &Database) -> String {
    let url = database.url();
    url.split('?').next().unwrap_or_default().to_owned()
}

/// A client that is not a store.
async fn client(database: &Database) -> PgConnection {
    let options: PgConnectOptions = plain(database).parse().unwrap();
    PgConnection::connect_with(&options.extra_float_digits(None)).await.unwrap()
}

/// Else the other tests prove nothing.
async fn the_test_bed_gives_statements_to_different_sessions(server: &'static Server) {
    let database = Database::empty(server).await;
    let mut clients = [client(&database).await, client(&database).await];
    // Two transactions at the same time need two sessions.
    for client in &mut clients {
        client.execute("BEGIN").await.unwrap();
    }
    for client in &mut clients {
        client.execute("COMMIT").await.unwrap();
    }
    let mut sessions = BTreeSet::new();
    for _ in 0..4 {
        let row = clients[0].fetch_one("SELECT pg_backend_pid()").await.unwrap();
        sessions.insert(row.get::<i32, _>(0));
    }
    assert_eq!(sessions.len(), 2, "{sessions:?}");
}

/// The statements that stand before an operation fail for a while: afterwards each connection is as good as before.
async fn a_transaction_whose_beginning_fails_is_not_left_open(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    store.create_queue(&jobs(), QueueConfig::default()).await.unwrap();
    let send = async || store.send(&jobs(), vec![NewMessage::new("x")]).await;
    let mut admin = database.connect().await;
    admin.execute("ALTER FUNCTION hapax.raise_fence() RENAME TO not_there").await.unwrap();
    for _ in 0..3 {
        let refused = send().await.unwrap_err().to_string();
        assert!(refused.contains("raise_fence"), "{refused}");
    }
    admin.execute("ALTER FUNCTION hapax.not_there() RENAME TO raise_fence").await.unwrap();
    for _ in 0..3 {
        send().await.unwrap().remove(0).unwrap();
    }
}

/// Whether repeating the call is the caller's business, as with any store.
async fn lifecycle(store: &PostgresStore, worker: usize, number: usize) -> Vec<String> {
    let body = format!("{worker}-{number}");
    store.send(&jobs(), vec![NewMessage::new(body.clone())]).await.unwrap().remove(0).unwrap();
    let grant = granted(store, ask(&body, "ann")).await;
    let got = store.receive(&jobs(), Receive { wait_ms: Some(20_000), ..Receive::up_to(1) }).await.unwrap();
    for delivery in &got {
        let extended = store
            .extend(
                &jobs(),
                vec![Extend { receipt: delivery.receipt.clone(), lease_ms: 60_000, own_lease: false }],
            )
            .await;
        extended.unwrap().remove(0).unwrap();
        let settled = store.settle(&jobs(), vec![Settle::ack(delivery.receipt.clone())]).await;
        settled.unwrap().remove(0).unwrap();
    }
    store.end(vec![completed(&body, &grant, "paid")]).await.unwrap().remove(0).unwrap();
    got.iter().map(|delivery| String::from_utf8_lossy(&delivery.body).into_owned()).collect()
}

async fn lifecycles_of_many_clients_share_few_sessions(server: &'static Server) {
    const WORKERS: usize = 16;
    const EACH: usize = 6;
    let database = Database::migrated(server).await;
    let stores = [Arc::new(database.open().await), Arc::new(database.open().await)];
    stores[0].create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let store = stores[worker % 2].clone();
        workers.spawn(async move {
            let mut seen = Vec::new();
            for number in 0..EACH {
                seen.extend(lifecycle(&store, worker, number).await);
            }
            seen
        });
    }
    let seen: Vec<String> = workers.join_all().await.into_iter().flatten().collect();
    let distinct: BTreeSet<&String> = seen.iter().collect();
    assert_eq!((seen.len(), distinct.len()), (WORKERS * EACH, WORKERS * EACH), "each message once");
    let stats = stores[1].ledger_stats().await.unwrap();
    assert_eq!((stats.entries, stats.open), ((WORKERS * EACH) as u64, 0));
    for store in &stores {
        store.shut_down();
    }
    sessions_are_as_they_were(&database).await;
}

/// What the store leaves in sessions that others will use: no setting, no lock, no transaction. Prepared statements of
/// one operation at most.
async fn sessions_are_as_they_were(database: &Database) {
    let mut client = client(database).await;
    let mut direct = database.connect().await;
    let settings = ["statement_timeout", "lock_timeout", "enable_seqscan", "synchronous_commit", "jit"];
    for _ in 0..6 {
        for name in settings {
            let show = format!("SHOW {name}");
            let through: String = client.fetch_one(show.as_str()).await.unwrap().get(0);
            let new: String = direct.fetch_one(show.as_str()).await.unwrap().get(0);
            assert_eq!(through, new, "{name}");
        }
        let left = "SELECT count(*) FROM pg_prepared_statements WHERE name <> ''";
        let left: i64 = client.fetch_one(left).await.unwrap().get(0);
        assert!(left <= 20, "{left} prepared statements are left in a session");
    }
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let held: i64 = sqlx::query_scalar(held).fetch_one(&mut direct).await.unwrap();
    assert_eq!(held, 0);
}

async fn a_waiting_receive_gets_what_another_process_sends(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (one, two) = (database.open().await, database.open().await);
    one.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    for round in 0..3 {
        let wait = Receive { wait_ms: Some(20_000), ack_on_receive: true, ..Receive::up_to(1) };
        let (waits, name) = (one.clone(), jobs());
        let waiting = tokio::spawn(async move { waits.receive(&name, wait).await.unwrap() });
        one.quiet().await;
        two.send(&jobs(), vec![NewMessage::new(format!("{round}"))]).await.unwrap().remove(0).unwrap();
        assert_eq!(waiting.await.unwrap().len(), 1, "round {round}");
    }
}

async fn a_pooler_that_was_not_declared_is_told(server: &'static Server) {
    let database = Database::migrated(server).await;
    let Err(refused) = PostgresStore::open(&plain(&database), Options::default()).await else {
        panic!("a pooler was taken for a server");
    };
    let refused = refused.to_string();
    assert!(refused.contains("hapax_pooler=true"), "{refused}");
}

/// Behind a pooler, too, a statement ends by itself: here one that waits for a lock.
async fn a_lock_is_not_waited_for_without_bound(server: &'static Server) {
    let database = Database::migrated(server).await;
    let options = Options { operation_timeout: Duration::from_secs(4), ..Options::default() };
    let store = PostgresStore::open(&database.url(), options).await.unwrap();
    store.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let mut holder = database.connect().await;
    holder.execute("BEGIN; LOCK TABLE hapax.q_ready IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let refused = store.send(&jobs(), vec![NewMessage::new("a")]).await;
    let refused = refused.map(|_| ()).unwrap_err();
    // The server's answer, not our own end of the wait: the outcome is known.
    assert_eq!(refused.code(), "overloaded", "{refused}");
    holder.execute("ROLLBACK").await.unwrap();
    store.send(&jobs(), vec![NewMessage::new("b")]).await.unwrap().remove(0).unwrap();
}

//! A bank in a PostgreSQL database: accounts whose sum never changes, and a journal of transfers.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_core::{QueueAdmin as _, QueueName};
use hapax_faults::{PgBouncer, PostgresServer};
use hapax_postgres::{Options, PostgresStore};
use hapax_worker::{Cx, Worker, WorkerReport};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, PgConnection};

/// Timeout of every wait; only a test that hangs reaches it.
const TIMEOUT: Duration = Duration::from_mins(3);
/// Sessions of a pooler for each database. Fewer than transactions, so that they have to share them.
const SESSIONS: usize = 6;
const ACCOUNTS: [&str; 4] = ["a", "b", "c", "d"];

/// A test by its name.
pub type Test = (&'static str, fn(&'static PostgresServer));

fn shared() -> Result<&'static PostgresServer, &'static str> {
    static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match std::env::var("HAPAX_TEST_POSTGRES") {
        Ok(url) => Ok(PostgresServer::given(&url)),
        Err(_) => PostgresServer::start_in_memory(),
    });
    server.as_ref().map_err(String::as_str)
}

/// The pooler between stores and the server, if `HAPAX_TEST_PGBOUNCER` asks for one.
fn pooler(server: &PostgresServer) -> Option<&'static PgBouncer> {
    static POOLER: OnceLock<Option<PgBouncer>> = OnceLock::new();
    let start = || {
        std::env::var_os("HAPAX_TEST_PGBOUNCER")
            .map(|_| PgBouncer::start(server.address(), SESSIONS).unwrap())
    };
    POOLER.get_or_init(start).as_ref()
}

/// Runs tests by their names. Without PostgreSQL each is reported as ignored, with the reason.
pub fn main(tests: &[Test]) -> ExitCode {
    let trial = |&(name, test): &Test| {
        Trial::ignorable_test(name, move || match shared() {
            Ok(server) => {
                test(server);
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit_code()
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// Waits until a condition holds; fails after the timeout.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < deadline, "it took too long until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs a worker until a condition holds.
pub async fn run_until(worker: Worker, mut holds: impl AsyncFnMut() -> bool) -> WorkerReport {
    let stop = tokio::sync::watch::Sender::new(false);
    let mut told = stop.subscribe();
    let running = tokio::spawn(worker.run(async move { drop(told.wait_for(|stop| *stop).await) }));
    until("the worker is done", &mut holds).await;
    stop.send_replace(true);
    tokio::time::timeout(TIMEOUT, running).await.expect("the worker hangs").unwrap().unwrap()
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    pub number: u32,
    pub from: String,
    pub to: String,
    pub cents: i64,
}

impl Transfer {
    pub fn new(number: u32) -> Self {
        let account = |at: u32| ACCOUNTS[at as usize % ACCOUNTS.len()].to_owned();
        Self {
            number,
            from: account(number),
            to: account(number + 1 + number % 2),
            cents: i64::from(number) + 1,
        }
    }

    pub fn key(&self) -> String {
        format!("transfer-{}", self.number)
    }

    /// Moves the money, and notes it in the journal. Accounts are locked in the order of their names.
    pub async fn make(&self, db: &mut PgConnection, cx: &Cx) -> Result<(), sqlx::Error> {
        let mut changes = [(&self.from, -self.cents), (&self.to, self.cents)];
        changes.sort();
        for (account, cents) in changes {
            let change = sqlx::query("UPDATE accounts SET cents = cents + $2 WHERE id = $1");
            change.bind(account).bind(cents).execute(&mut *db).await?;
        }
        self.note(db, cx).await
    }

    pub async fn note(&self, db: &mut PgConnection, cx: &Cx) -> Result<(), sqlx::Error> {
        let note = sqlx::query("INSERT INTO journal (number, key, fence) VALUES ($1, $2, $3)");
        let note =
            note.bind(self.number as i32).bind(cx.idempotency_key().as_str()).bind(cx.fence().0 as i64);
        note.execute(db).await.map(drop)
    }
}

fn new_name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("bank_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A database with the schema and with accounts, which is made once and copied for each bank.
fn template(server: &'static PostgresServer) -> &'static str {
    static TEMPLATE: OnceLock<String> = OnceLock::new();
    let make = move || {
        let name = new_name();
        server
            .sql("postgres", &format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0"))
            .unwrap();
        let url = server.url(&name);
        let migrate = async { hapax_postgres::migrate(&url, &Options::default(), false).await };
        // A test may be running on this thread's runtime.
        std::thread::scope(|scope| scope.spawn(|| block_on(migrate)).join()).unwrap().unwrap();
        let values = ACCOUNTS.map(|account| format!("('{account}', 0)")).join(", ");
        let tables = format!(
            "CREATE TABLE accounts (id text PRIMARY KEY, cents bigint NOT NULL); \
             CREATE TABLE journal (at bigint GENERATED ALWAYS AS IDENTITY, number int, key text, fence bigint); \
             INSERT INTO accounts VALUES {values}"
        );
        server.sql(&name, &tables).unwrap();
        name
    };
    TEMPLATE.get_or_init(make)
}

pub struct Bank {
    /// The URL of a store.
    pub url: String,
    /// Where that leads to.
    pub address: SocketAddr,
    /// The URL of the database itself.
    direct: String,
    pub database: String,
    pub store: PostgresStore,
}

impl Bank {
    /// A new database with accounts, and its store.
    pub async fn open(server: &'static PostgresServer) -> Self {
        let database = new_name();
        let create = format!("CREATE DATABASE {database} ENCODING 'UTF8' TEMPLATE {}", template(server));
        let deadline = Instant::now() + TIMEOUT;
        // The last session of the template may not have ended yet: the server waits for 5 s only.
        while let Err(error) = server.sql("postgres", &create) {
            let in_use = error.contains("is being accessed by other users");
            assert!(in_use && Instant::now() < deadline, "{error}");
        }
        // Each database has a secret of its own, by which it knows its receipts.
        let secret = "UPDATE hapax.store SET secret = sha256(convert_to(gen_random_uuid()::text, 'UTF8'))";
        server.sql(&database, secret).unwrap();
        let direct = server.url(&database);
        let (url, address) = match pooler(server) {
            None => (direct.clone(), server.address()),
            Some(pooler) => {
                let through = direct.replace(&server.address().to_string(), &pooler.address().to_string());
                (format!("{through}?hapax_pooler=true"), pooler.address())
            }
        };
        let store = PostgresStore::open(&url, Options::default()).await.unwrap();
        Self { url, address, direct, database, store }
    }

    /// Whether stores reach the database through a pooler.
    pub fn is_pooled(&self) -> bool {
        !self.direct.contains(&self.address.to_string())
    }

    /// The same store, as another process opens it.
    pub async fn store_again(&self) -> PostgresStore {
        PostgresStore::open(&self.url, Options::default()).await.unwrap()
    }

    /// Whether nothing of a queue waits or is under way. After a fault the store may need another call.
    pub async fn is_empty(&self, queue: &QueueName) -> bool {
        match self.store.stats(queue).await {
            Ok(stats) => stats.ready + stats.delayed + stats.in_flight == 0,
            Err(error) if error.is_retryable() => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// A session of the database itself.
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.direct).await.unwrap()
    }

    /// The transfers in the order in which they were made.
    pub async fn numbers(&self) -> Vec<u32> {
        let mut db = self.connect().await;
        let numbers = sqlx::query_scalar::<_, i32>("SELECT number FROM journal ORDER BY at");
        numbers.fetch_all(&mut db).await.unwrap().into_iter().map(|number| number as u32).collect()
    }

    /// Each of these transfers was made once, and no other; the accounts have what follows from them.
    pub async fn check(&self, transfers: &[Transfer]) {
        let mut made = self.numbers().await;
        made.sort_unstable();
        let mut wanted: Vec<u32> = transfers.iter().map(|transfer| transfer.number).collect();
        wanted.sort_unstable();
        assert_eq!(made, wanted, "each transfer is made once");
        let mut db = self.connect().await;
        for account in ACCOUNTS {
            let change = |transfer: &Transfer| {
                i64::from(transfer.to == account) * transfer.cents
                    - i64::from(transfer.from == account) * transfer.cents
            };
            let cents = sqlx::query_scalar("SELECT cents FROM accounts WHERE id = $1").bind(account);
            let cents: i64 = cents.fetch_one(&mut db).await.unwrap();
            assert_eq!(cents, transfers.iter().map(change).sum::<i64>(), "account {account}");
        }
    }
}

//! After an outage the rate of before comes back by itself, within seconds of the database accepting writes.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{PATIENCE, Server};
use hapax_conformance::attack::{patiently, returns_to_half};
use hapax_core::{
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, StoreError,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(&[
        common::Test { name: "after_a_crash_the_rate_comes_back", run: |_| block_on(recovers(Fault::Crash)) },
        common::Test {
            name: "after_all_sessions_were_terminated_the_rate_comes_back",
            run: |_| block_on(recovers(Fault::Terminate)),
        },
    ])
}

fn block_on(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(test);
}

#[derive(Clone, Copy)]
enum Fault {
    Crash,
    Terminate,
}

const CLIENTS: usize = 8;
/// How long the rate before is measured.
const BEFORE: Duration = Duration::from_secs(3);

/// Clients that send, receive and ack, one message in a call, and repeat what may be repeated.
struct Clients {
    done: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Clients {
    fn start(store: &PostgresStore, queue: &QueueName) -> Self {
        let (done, over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let mut tasks = JoinSet::new();
        for _ in 0..CLIENTS {
            let (store, queue, done, over) = (store.clone(), queue.clone(), done.clone(), over.clone());
            tasks.spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    match lifecycle(&store, &queue).await {
                        Ok(acked) => drop(done.fetch_add(acked, Ordering::SeqCst)),
                        Err(error) => {
                            assert!(error.is_retryable(), "{error}");
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
            });
        }
        Self { done, over, tasks }
    }

    fn done(&self) -> usize {
        self.done.load(Ordering::SeqCst)
    }

    async fn end(self) {
        self.over.store(true, Ordering::SeqCst);
        self.tasks.join_all().await;
    }
}

async fn lifecycle(store: &PostgresStore, queue: &QueueName) -> Result<usize, StoreError> {
    for sent in store.send(queue, vec![NewMessage::new("x".repeat(256))]).await? {
        sent.expect("it is accepted");
    }
    let ask = Receive { wait_ms: Some(1_000), lease_ms: Some(600_000), ..Receive::up_to(1) };
    let acks: Vec<Settle> =
        store.receive(queue, ask).await?.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
    if acks.is_empty() {
        return Ok(0);
    }
    Ok(store.settle(queue, acks).await?.iter().filter(|acked| acked.is_ok()).count())
}

/// Waits until the database accepts writes, by a session that has no part in the store.
async fn until_writable(url: &str) {
    let start = Instant::now();
    loop {
        let write = async {
            let mut db = PgConnection::connect(url).await?;
            db.execute("CREATE TABLE IF NOT EXISTS written (at timestamptz)").await?;
            db.execute("INSERT INTO written VALUES (now())").await
        };
        match write.await {
            Ok(_) => return,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn recovers(fault: Fault) {
    let server = Server::start(&["fsync=on"]).unwrap();
    let url = server.url("postgres");
    hapax_postgres::migrate(&url, &Options::default(), false).await.unwrap();
    let (store, queue) =
        (PostgresStore::open(&url, Options::default()).await.unwrap(), QueueName::new("jobs").unwrap());
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    let clients = Clients::start(&store, &queue);
    let start = Instant::now();
    while clients.done() < 100 {
        assert!(start.elapsed() < PATIENCE, "{} lifecycles", clients.done());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (start, before) = (Instant::now(), clients.done());
    tokio::time::sleep(BEFORE).await;
    let (usual, some) = (start.elapsed() / 3, (clients.done() - before) / 3);
    match fault {
        Fault::Crash => {
            server.stop("QUIT");
            server.run().unwrap();
        }
        Fault::Terminate => {
            let mut operator = PgConnection::connect(&url).await.unwrap();
            let kill =
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'hapax'";
            let killed = operator.fetch_all(kill).await.unwrap().len();
            assert!(killed > 1, "the store has sessions");
        }
    }
    until_writable(&url).await;
    let back = returns_to_half(|| clients.done(), some, usual).await;
    println!("{some} lifecycles in {usual:?} before; {back:?} from the first write until the rate was back");
    clients.end().await;
    patiently(|| store.stats(&queue)).await;
    store.shut_down();
}

//! After an outage the rate of before comes back by itself, within seconds of the database accepting writes.

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{PATIENCE, Server};
use hapax_conformance::attack::{RECOVERY_MAX, patiently};
use hapax_core::{
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, StoreError,
};
use hapax_postgres::{Options, PostgresStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::task::JoinSet;

fn main() -> ExitCode {
    let tests = [
        ("after_a_crash_the_rate_comes_back", Fault::Crash),
        ("after_all_sessions_were_terminated_the_rate_comes_back", Fault::Terminate),
    ];
    let trial = |(name, fault)| {
        Trial::ignorable_test(name, move || match Server::start(&["fsync=on"]) {
            Ok(server) => {
                block_on(recovers(&server, fault));
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    // One after the other: each measures how fast the machine is.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit_code()
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
/// How long a usual rate is measured.
const USUAL: Duration = Duration::from_secs(3);
/// How long the rate has to last after an outage.
const WINDOW: Duration = Duration::from_secs(2);
/// Time between two samples.
const STEP: Duration = Duration::from_millis(50);

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

    /// How many lifecycles end in a second, once they are under way.
    async fn rate(&self) -> f64 {
        let start = Instant::now();
        while self.done() < 100 {
            assert!(start.elapsed() < PATIENCE, "{} lifecycles", self.done());
            tokio::time::sleep(STEP).await;
        }
        let (start, before) = (Instant::now(), self.done());
        tokio::time::sleep(USUAL).await;
        let (time, done) = (start.elapsed(), self.done() - before);
        assert!(done > 0, "no lifecycle ends within {time:?}");
        done as f64 / time.as_secs_f64()
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

/// When the rate was at least half of the usual one again, for [`WINDOW`]; `None`: not within [`RECOVERY_MAX`]. A sample is a time and how
/// many lifecycles had ended by then.
fn back_at(samples: &[(Duration, usize)], usual: f64) -> Option<Duration> {
    let needed = usual / 2.0 * WINDOW.as_secs_f64();
    samples.iter().enumerate().find_map(|(at, (began, before))| {
        let (_, after) = samples[at..].iter().take_while(|(time, _)| *time <= *began + WINDOW).last()?;
        (*began <= RECOVERY_MAX && (after - before) as f64 >= needed).then_some(*began)
    })
}

async fn recovers(server: &Server, fault: Fault) {
    let url = server.url("postgres");
    hapax_postgres::migrate(&url, &Options::default(), false).await.unwrap();
    let (store, queue) =
        (PostgresStore::open(&url, Options::default()).await.unwrap(), QueueName::new("jobs").unwrap());
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    let clients = Clients::start(&store, &queue);
    let usual = clients.rate().await;
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
    let (start, mut samples) = (Instant::now(), vec![(Duration::ZERO, clients.done())]);
    let mut back = None;
    while back.is_none() && start.elapsed() <= RECOVERY_MAX + WINDOW {
        tokio::time::sleep(STEP).await;
        samples.push((start.elapsed(), clients.done()));
        back = back_at(&samples, usual);
    }
    clients.end().await;
    patiently(|| store.stats(&queue)).await;
    store.shut_down();
    println!("{usual:.0} lifecycles a second before; back {back:?} after the first write");
    if back.is_none() {
        // The machine may have become slower meanwhile: a store that is opened now shows what it can do.
        let store = PostgresStore::open(&url, Options::default()).await.unwrap();
        let clients = Clients::start(&store, &queue);
        let now = clients.rate().await;
        clients.end().await;
        store.shut_down();
        let back = back_at(&samples, now);
        println!("{now:.0} lifecycles a second by a store that is opened now; back {back:?} by that measure");
        let seconds: Vec<_> = samples.iter().step_by(20).collect();
        assert!(back.is_some(), "{usual:.0} a second before, {now:.0} now, meanwhile {seconds:?}");
    }
}

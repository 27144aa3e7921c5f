//! The worker processes: one worker at `transactional`, and the consumers of the other two banks.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hapax::postgres::{Options, PostgresInbox, PostgresStore};
use hapax::worker::Point;
use hapax::{Hapax, Receive, Worker};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};

use super::PgBank;
use crate::bank::Payment;
use crate::roles::{Kill, settled};

/// Pause after an error, for example while the database is down.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a worker tries to start.
const START: Duration = Duration::from_mins(1);

/// One worker process. `task` is `run`, until it is killed; `finish`, until all is settled; or when to kill itself.
pub async fn work(url: &str, task: &str) -> anyhow::Result<()> {
    let kill = match task {
        "run" | "finish" => None,
        kill => Some(Kill::from_arg(kill, &PgBank::NAMES)?),
    };
    let (hapax, worker) =
        tokio::time::timeout(START, start(url, kill)).await.context("the store cannot be opened")?;
    let pool =
        PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5)).connect_lazy(url)?;
    println!("ready");
    let consumers = async {
        let [_, before, after] = PgBank::ALL;
        tokio::join!(
            consume(&hapax, &pool, before, kill),
            consume(&hapax, &pool, before, kill),
            consume(&hapax, &pool, after, kill),
            consume(&hapax, &pool, after, kill),
        )
    };
    let until = async {
        if task == "finish" { settled(&hapax, &PgBank::NAMES).await } else { std::future::pending().await }
    };
    tokio::select! {
        done = worker.run(until) => drop(done?),
        _ = consumers => {}
    }
    Ok(())
}

/// Opens the store and makes the worker; the database may just be starting again.
async fn start(url: &str, kill: Option<Kill>) -> (Hapax, Worker) {
    loop {
        let started = async {
            let store = PostgresStore::open(url, Options::default()).await?;
            let inbox = PostgresInbox::new(&store);
            let hapax = Hapax::with_store(Arc::new(store));
            let worker = transactional(&hapax, &inbox, kill).await?;
            anyhow::Ok((hapax, worker))
        };
        match started.await {
            Ok(started) => return started,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// The worker of the first bank. Payment, ledger entry and ack are committed together.
async fn transactional(hapax: &Hapax, inbox: &PostgresInbox, kill: Option<Kill>) -> anyhow::Result<Worker> {
    let bank = PgBank::Transactional;
    let payments = hapax.queue::<Payment>(bank.name())?;
    let worker = payments.async_transactional_worker(inbox, move |payment, db, cx| {
        Box::pin(async move {
            pay(db, bank, &payment).await?;
            cx.effect_point().await;
            Ok::<_, sqlx::Error>("paid")
        })
    });
    Ok(worker.concurrency(2).hook(Kill::hook(kill, bank.name())).build().await?)
}

/// The effect, the same for all banks: two writes in the caller's transaction.
async fn pay(db: &mut PgConnection, bank: PgBank, payment: &Payment) -> Result<(), sqlx::Error> {
    println!("run {}", bank.name());
    let cents = payment.cents as i64;
    let entry = sqlx::query("INSERT INTO journal VALUES ($1, $2, $3)");
    entry.bind(bank.name()).bind(&payment.id).bind(cents).execute(&mut *db).await?;
    // Banks are slow.
    tokio::time::sleep(Duration::from_millis(fastrand::u64(2..12))).await;
    let account = sqlx::query("UPDATE accounts SET cents = cents + $2 WHERE bank = $1");
    account.bind(bank.name()).bind(cents).execute(db).await.map(drop)
}

/// A consumer as it is usually written, without Hapax's worker: receive, write, ack, in one order or the other.
async fn consume(hapax: &Hapax, pool: &PgPool, bank: PgBank, kill: Option<Kill>) {
    let passes = Kill::hook(kill, bank.name());
    loop {
        if let Err(_error) = consume_one(hapax, pool, bank, &passes).await {
            // A real one would log it. What it holds returns when its lease ends.
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn consume_one(
    hapax: &Hapax,
    pool: &PgPool,
    bank: PgBank,
    passes: &impl Fn(Point),
) -> anyhow::Result<()> {
    let payments = hapax.queue::<Payment>(bank.name())?;
    for received in payments.receive(Receive { wait_ms: Some(1_000), ..Receive::up_to(1) }).await? {
        let payment = received.value()?;
        if bank == PgBank::AckBefore {
            received.ack().await?;
            passes(Point::AfterSettle);
            commit(pool, bank, &payment).await?;
        } else {
            commit(pool, bank, &payment).await?;
            passes(Point::AfterCommit);
            received.ack().await?;
        }
    }
    Ok(())
}

async fn commit(pool: &PgPool, bank: PgBank, payment: &Payment) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    pay(&mut transaction, bank, payment).await?;
    transaction.commit().await
}

//! The child processes: one sends payments, the others make them and are killed at some point.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use hapax::core::Scope;
use hapax::worker::Point;
use hapax::{Cx, HandlerOutcome, Hapax, IdempotencyKey, QueueConfig, QueueName, Tier, Worker};
use rustix::process::{Signal, getpid, kill_process};
use tokio::net::TcpStream;

use crate::bank::{self, Bank, BankResponse, Payment, Request};

/// How long a crash delays a payment.
const LEASE_MS: u64 = 300;

/// Where a worker kills its own process: when a delivery of the queue passes the point for the `nth` time.
#[derive(Debug, Clone, Copy)]
pub struct Kill {
    pub queue: &'static str,
    pub point: Point,
    pub nth: u32,
}

impl Kill {
    /// Formats it for the command line of a worker.
    pub fn to_arg(self) -> String {
        format!("{}:{}:{}", self.queue, self.point, self.nth)
    }

    /// Parses it; the queue is one of these.
    pub fn from_arg(arg: &str, queues: &[&'static str]) -> anyhow::Result<Self> {
        let parts: Vec<_> = arg.split(':').collect();
        let [queue, point, nth] = parts[..] else { anyhow::bail!("{arg:?} is not QUEUE:POINT:NTH") };
        let queue = queues.iter().find(|known| **known == queue).context("no such queue")?;
        Ok(Self { queue, point: point.parse().map_err(anyhow::Error::msg)?, nth: nth.parse()? })
    }

    /// A hook for the worker of a queue that kills the process as told.
    pub fn hook(kill: Option<Self>, queue: &'static str) -> impl Fn(Point) + Send + Sync + 'static {
        let (kill, passed) = (kill.filter(|kill| kill.queue == queue), AtomicU32::new(0));
        move |at| {
            if let Some(Self { point, nth, .. }) = kill
                && at == point
                && passed.fetch_add(1, Ordering::SeqCst) + 1 == nth
            {
                die();
            }
        }
    }
}

/// Kills this process, as `kill -9` or the out-of-memory killer would.
fn die() {
    let _ = kill_process(getpid(), Signal::KILL);
}

/// The handler: makes one payment. It passes key, fence and takeover to the bank. A handler cannot do more for its
/// effect to happen once; the rest is up to the bank.
async fn pay(bank: Bank, address: SocketAddr, payment: Payment, cx: Cx) -> HandlerOutcome<String> {
    let Ok(connection) = TcpStream::connect(address).await else {
        return HandlerOutcome::retry("the bank is closed"); // Nothing was sent, so nothing happened.
    };
    let request = Request {
        bank,
        payment,
        derived_key: cx.derived_key("pay").to_string(),
        fence: cx.fence().0,
        takeover: cx.is_takeover(),
    };
    match bank::pay(connection, &request).await {
        Ok(BankResponse::Moved | BankResponse::Known) => {
            HandlerOutcome::Done(format!("{} paid", request.payment.id))
        }
        Ok(BankResponse::Overtaken) => {
            HandlerOutcome::in_doubt("a later run was at the bank before this one")
        }
        Err(error) => HandlerOutcome::in_doubt(error), // The money may have moved.
    }
}

/// The worker of one queue.
pub async fn worker(
    hapax: &Hapax,
    bank: Bank,
    address: SocketAddr,
    kill: Option<Kill>,
) -> anyhow::Result<Worker> {
    let payments = hapax.queue::<Payment>(bank.name())?;
    let build = || {
        payments
            .worker(move |payment, cx| pay(bank, address, payment, cx))
            .on_doubt(bank.on_doubt())
            .concurrency(2)
            .hook(Kill::hook(kill, bank.name()))
            .build()
    };
    repeat(build).await
}

/// Completes when every message of these queues has ended or is parked.
pub async fn settled(hapax: &Hapax, queues: &[&'static str]) {
    loop {
        let mut left = 0;
        for queue in queues {
            let queue = QueueName::new(*queue).expect("a constant");
            match hapax.store().stats(&queue).await {
                Ok(stats) => left += stats.ready + stats.delayed + stats.in_flight,
                Err(_) => left += 1,
            }
        }
        if left == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Works all three queues until everything is settled. A worker that kills itself works only the queue that it is to die
/// at: otherwise the other two might be empty before it is their turn to have a crash.
pub async fn work(
    hapax: &Hapax,
    address: SocketAddr,
    kill: Option<Kill>,
    ready: impl FnOnce(),
) -> anyhow::Result<()> {
    let start = async |bank: Bank| {
        let is_worked = kill.is_none_or(|kill| kill.queue == bank.name());
        if is_worked { worker(hapax, bank, address, kill).await.map(Some) } else { Ok(None) }
    };
    let [keyed, fenced, trusting] = Bank::ALL.map(start);
    let (keyed, fenced, trusting) = tokio::try_join!(keyed, fenced, trusting)?;
    ready();
    let run = async |worker: Option<Worker>| {
        if let Some(worker) = worker {
            worker.run(settled(hapax, &Bank::NAMES)).await?;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(run(keyed), run(fenced), run(trusting))?;
    Ok(())
}

/// Repeats a call for a while: a store that several processes share may be out of reach. A send that is repeated may be there
/// twice; its key makes that harmless.
pub async fn repeat<T, E: Into<anyhow::Error>, F: Future<Output = Result<T, E>>>(
    mut call: impl FnMut() -> F,
) -> anyhow::Result<T> {
    let end = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        match call().await {
            Ok(done) => return Ok(done),
            Err(error) if tokio::time::Instant::now() > end => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Sends every payment one to three times, in random order. Prints a line for each accepted send; after `die_after` of
/// them the process dies.
pub async fn produce(hapax: &Hapax, seed: u64, payments: u64, die_after: usize) -> anyhow::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sends = Vec::new();
    for number in 1..=payments {
        let payment = Payment { id: format!("p-{number:02}"), cents: 100 };
        sends.extend(std::iter::repeat_n(payment, random.usize(1..=3)));
    }
    random.shuffle(&mut sends);
    for bank in Bank::ALL {
        let queue = hapax.queue::<Payment>(bank.name())?;
        let config =
            QueueConfig { tier: Tier::EffectivelyOnce, lease_ms: LEASE_MS, ..QueueConfig::default() };
        repeat(|| queue.ensure(config.clone())).await?;
    }
    let mut sent = 0;
    for payment in &sends {
        let key = IdempotencyKey::new(&payment.id)?;
        for bank in Bank::ALL {
            let queue = hapax.queue::<Payment>(bank.name())?;
            repeat(|| queue.send_with(payment, |message| message.idempotency_key(&key))).await?;
            println!("sent {}", bank.name());
            sent += 1;
            if sent == die_after {
                die();
            }
        }
    }
    Ok(())
}

/// The ledger's scope of a bank's queue.
pub fn scope(bank: Bank) -> Scope {
    Scope::of_queue(&QueueName::new(bank.name()).expect("a constant"))
}

//! Sends payments all the time while workers and database are killed, then lets a last worker finish.

use std::time::Duration;

use anyhow::bail;
use hapax::worker::Point;
use hapax::{DedupId, Hapax, IdempotencyKey};
use std::os::unix::process::ExitStatusExt as _;
use tokio::time::{Instant, sleep, sleep_until};

use super::PgBank;
use super::site::Site;
use crate::bank::Payment;
use crate::roles::Kill;
use crate::storm::{live, spawn};

/// The amount of each payment.
pub const CENTS: u64 = 100;
/// Payments that are there before the first worker starts.
const FIRST: u64 = 20;
/// Time between two payments.
const EVERY: Duration = Duration::from_millis(20);
/// Worker processes at the same time.
const WORKERS: usize = 2;
/// Maximum life of one worker process.
const LIFE: Duration = Duration::from_mins(4);

/// Counters of the storm. Arrays are by bank.
#[derive(Debug, Default)]
pub struct Storm {
    pub payments: u64,
    /// Sends that were accepted.
    pub sends: [u64; 3],
    /// How often a payment was begun.
    pub runs: [u64; 3],
    pub workers_killed: u64,
    pub database_kills: u64,
}

/// Each bank's worst moments, and more of the first bank's.
const MOMENTS: [(PgBank, Point); 6] = [
    (PgBank::AckBefore, Point::AfterSettle),
    (PgBank::AckAfter, Point::AfterCommit),
    (PgBank::Transactional, Point::InEffect),
    (PgBank::Transactional, Point::AfterEffect),
    (PgBank::Transactional, Point::BeforeCommit),
    (PgBank::Transactional, Point::AfterCommit),
];

/// Returns when all is settled; no child process runs then.
pub async fn rage(site: &Site, time: Duration, seed: u64) -> anyhow::Result<Storm> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut storm = Storm::default();
    let hapax = Hapax::open(site.url()).await?;
    let mut producer = Producer { hapax: &hapax, random: random.fork(), payments: 0, sends: [0; 3] };
    for _ in 0..FIRST {
        producer.send_next().await?;
    }
    for (bank, point) in MOMENTS {
        let kill = Kill { queue: bank.name(), point, nth: random.u32(1..=3) };
        worker(site, &kill.to_arg(), None, &mut storm).await?;
        println!("a worker died at {point} of delivery {} of {}", kill.nth, kill.queue);
        producer.send_next().await?;
    }
    println!("now {} s of kills at random times", time.as_secs());
    let until = Instant::now() + time;
    let (first, second) = (random.fork(), random.fork());
    let ((), killed, first, second) = tokio::try_join!(
        producer.send_until(until),
        kill_database_until(site, time, until, random),
        kill_workers_until(site, until, first),
        kill_workers_until(site, until, second),
    )?;
    const { assert!(WORKERS == 2, "one future for each") };
    storm.database_kills = killed;
    for part in [first, second] {
        storm.workers_killed += part.workers_killed;
        (0..3).for_each(|bank| storm.runs[bank] += part.runs[bank]);
    }
    worker(site, "finish", None, &mut storm).await?;
    (storm.payments, storm.sends) = (producer.payments, producer.sends);
    Ok(storm)
}

/// Runs one worker process to its end, which has to be a kill unless it is told to finish.
async fn worker(site: &Site, task: &str, after: Option<Duration>, storm: &mut Storm) -> anyhow::Result<()> {
    let child = spawn(&["work-postgres", site.url(), task])?;
    let runs = &mut storm.runs;
    let status = live(child, LIFE, after, |line| {
        for bank in PgBank::ALL {
            runs[bank as usize] += u64::from(line.strip_prefix("run ") == Some(bank.name()));
        }
    });
    let status = status.await?;
    match (task, status.signal()) {
        ("finish", None) if status.success() => {}
        (_, Some(9)) if task != "finish" => storm.workers_killed += 1,
        _ => bail!("a worker ({task}) ended by itself: {status}"),
    }
    Ok(())
}

async fn kill_workers_until(site: &Site, until: Instant, mut random: fastrand::Rng) -> anyhow::Result<Storm> {
    let mut storm = Storm::default();
    while Instant::now() < until {
        let after = Duration::from_millis(random.u64(50..1_500));
        worker(site, "run", Some(after), &mut storm).await?;
    }
    Ok(storm)
}

/// Every few seconds, and at least once.
async fn kill_database_until(
    site: &Site,
    time: Duration,
    until: Instant,
    mut random: fastrand::Rng,
) -> anyhow::Result<u64> {
    let pause_ms_max = (time.as_millis() as u64 / 2).clamp(500, 8_000);
    let mut count = 0;
    while Instant::now() < until || count == 0 {
        sleep(Duration::from_millis(random.u64(pause_ms_max / 2..pause_ms_max))).await;
        site.kill_database().await?;
        count += 1;
        println!("the database was killed, and is back");
    }
    Ok(count)
}

/// Sends the payments. It lives on, so it repeats a send until it is accepted.
struct Producer<'a> {
    hapax: &'a Hapax,
    random: fastrand::Rng,
    payments: u64,
    sends: [u64; 3],
}

impl Producer<'_> {
    async fn send_until(&mut self, until: Instant) -> anyhow::Result<()> {
        while Instant::now() < until {
            self.send_next().await?;
            sleep_until(until.min(Instant::now() + EVERY)).await;
        }
        Ok(())
    }

    /// Sends the next payment to each bank: to `transactional` up to three times, as producers that do not know what they
    /// have sent; to the others once.
    async fn send_next(&mut self) -> anyhow::Result<()> {
        self.payments += 1;
        let payment = Payment { id: format!("p-{}", self.payments), cents: CENTS };
        for bank in PgBank::ALL {
            let times = if bank == PgBank::Transactional { self.random.u64(1..=3) } else { 1 };
            for _ in 0..times {
                self.send(bank, &payment).await?;
                self.sends[bank as usize] += 1;
            }
        }
        Ok(())
    }

    /// Repeats the send while the database is down. A deduplication id keeps a repeated send from being a second message,
    /// so doubles of `ack-before` and `ack-after` are their own.
    async fn send(&self, bank: PgBank, payment: &Payment) -> anyhow::Result<()> {
        let queue = self.hapax.queue::<Payment>(bank.name())?;
        let (key, dedup) = (IdempotencyKey::new(&payment.id)?, DedupId::new(&payment.id)?);
        let deadline = Instant::now() + LIFE;
        loop {
            let sent = queue.send_with(payment, |message| match bank {
                PgBank::Transactional => message.idempotency_key(&key),
                PgBank::AckBefore | PgBank::AckAfter => message.dedup(dedup.clone()),
            });
            match sent.await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => sleep(EVERY).await,
            }
        }
    }
}

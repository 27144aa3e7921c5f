//! The same with money in PostgreSQL, where queue, ledger and accounts can be one database.
//!
//! `cargo run --release --features postgres --example payments -- --postgres [URL] [--seconds N] [--seed N]`
//!
//! For a minute, worker processes are killed with SIGKILL, and so is the database server. There are three banks, which are
//! tables without a constraint that would catch a duplicate:
//!
//! * `transactional` has a queue of that tier: payment, ledger entry and ack are one transaction. Its producer sends each
//!   payment up to three times. Every payment is made once.
//! * `ack-before` and `ack-after` have a consumer as it is usually written: receive, write to the database, ack. Their
//!   producers send nothing twice. The first acks before it commits: what is under way in a crash is lost. The second acks
//!   after it has committed: what is under way is paid twice.
//!
//! Without a URL a private server is started (PostgreSQL 15 or later has to be installed), and all of its processes are
//! killed. On the server of a URL a new database is made, and dropped at the end; instead of the server, all sessions of that
//! database are ended.

mod site;
mod storm;
mod workers;

use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::Hapax;

use crate::summary::holds;
use site::Site;
use storm::Storm;
pub use workers::work;

/// A bank, and the queue of payments to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PgBank {
    Transactional,
    AckBefore,
    AckAfter,
}

impl PgBank {
    const ALL: [Self; 3] = [Self::Transactional, Self::AckBefore, Self::AckAfter];
    const NAMES: [&'static str; 3] = ["transactional", "ack-before", "ack-after"];

    /// The name of the bank and of its queue.
    fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

struct Args {
    url: Option<String>,
    seconds: u64,
    seed: u64,
}

impl Args {
    fn parse(args: &[&str]) -> anyhow::Result<Self> {
        let mut parsed = Self { url: None, seconds: 60, seed: fastrand::u64(..1_000_000) };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut number = || -> anyhow::Result<u64> {
                let value = args.next().with_context(|| format!("{arg} takes a number"))?;
                value.parse().with_context(|| format!("{arg} takes a number, not {value:?}"))
            };
            match *arg {
                "--seconds" => parsed.seconds = number()?,
                "--seed" => parsed.seed = number()?,
                url if url.starts_with("postgres") && parsed.url.is_none() => {
                    parsed.url = Some(url.to_owned());
                }
                other => bail!(
                    "{other:?} is neither a URL postgres://… nor an option; see the example's first lines"
                ),
            }
        }
        if !(1..=300).contains(&parsed.seconds) {
            bail!("--seconds takes 1 to 300, not {}", parsed.seconds);
        }
        Ok(parsed)
    }
}

/// Runs everything, and prints what the banks have. `true`: each bank has the expected payments.
pub async fn show(args: &[&str]) -> anyhow::Result<bool> {
    let Args { url, seconds, seed } = Args::parse(args)?;
    let site = Site::open(url.as_deref()).await?;
    println!("seed {seed}; the bank is {}\n", site.what());
    let result = run(&site, Duration::from_secs(seconds), seed).await;
    let closed = site.close().await;
    let holds = result?;
    closed?;
    Ok(holds)
}

async fn run(site: &Site, time: Duration, seed: u64) -> anyhow::Result<bool> {
    let storm = storm::rage(site, time, seed).await?;
    println!(
        "\nKilled: {} worker processes, and {} {} {}. All is settled.\n",
        storm.workers_killed,
        site.kills_what(),
        storm.database_kills,
        if storm.database_kills == 1 { "time" } else { "times" },
    );
    print(site, &storm).await
}

/// What a bank's tables say.
struct Books {
    /// Entries of the journal.
    made: u64,
    /// Payments with an entry.
    payments: u64,
    /// Payments with more than one.
    doubles: u64,
    /// The balance of its account.
    cents: i64,
}

async fn books(site: &Site, bank: PgBank) -> anyhow::Result<Books> {
    let sql = "SELECT coalesce(sum(times), 0)::bigint, count(*), count(*) FILTER (WHERE times > 1), \
               (SELECT cents FROM accounts WHERE bank = $1) \
               FROM (SELECT count(*) AS times FROM journal WHERE bank = $1 GROUP BY payment) AS by_payment";
    let query = sqlx::query_as::<_, (i64, i64, i64, i64)>(sql).bind(bank.name());
    let (made, payments, doubles, cents) = query.fetch_one(&mut site.connect().await?).await?;
    Ok(Books { made: made as u64, payments: payments as u64, doubles: doubles as u64, cents })
}

async fn print(site: &Site, storm: &Storm) -> anyhow::Result<bool> {
    let hapax = Hapax::open(site.url()).await?;
    println!(
        "{:<13} {:>8} {:>6} {:>6} {:>6} {:>8} {:>6}",
        "bank", "payments", "sends", "runs", "made", "doubles", "lost"
    );
    let mut found = Vec::new();
    for bank in PgBank::ALL {
        let books = books(site, bank).await?;
        let (sends, runs) = (storm.sends[bank as usize], storm.runs[bank as usize]);
        let lost = storm.payments - books.payments;
        println!(
            "{:<13} {:>8} {:>6} {:>6} {:>6} {:>8} {:>6}",
            bank.name(),
            storm.payments,
            sends,
            runs,
            books.made,
            books.doubles,
            lost
        );
        found.push((books, lost));
    }
    println!();
    let [(transactional, lost), (before, lost_before), (after, lost_after)] = &found[..] else {
        bail!("there are three banks");
    };
    let mut all = holds(
        "transactional: every payment once",
        transactional.doubles == 0 && *lost == 0 && transactional.made == storm.payments,
    );
    let balance = |books: &Books| books.cents == books.made as i64 * storm::CENTS as i64;
    all &= holds("transactional: the balance is the sum of the payments", balance(transactional));
    let mut parked = 0;
    for bank in PgBank::ALL {
        parked += hapax.store().stats(&bank.name().parse()?).await?.parked;
    }
    all &= holds("no message was set aside", parked == 0);
    all &= holds(
        "ack-before: a crash between ack and commit lost a payment, and none was made twice",
        *lost_before > 0 && before.doubles == 0,
    );
    all &= holds(
        "ack-after: a crash between commit and ack made a payment twice, and none was lost",
        after.doubles > 0 && *lost_after == 0,
    );
    Ok(all)
}

//! Starts the processes, kills them and restarts them, until everything is settled.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::worker::Point;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::bank::Bank;
use crate::roles::Kill;

/// Number of payments for each bank.
pub const PAYMENTS: u64 = 40;
/// How often the parent kills workers at random times, after the kills at named points.
const RANDOM_KILLS: usize = 6;
/// Maximum life of one process.
const LIFE: Duration = Duration::from_secs(30);

/// Counters of the storm.
#[derive(Debug, Default)]
pub struct Storm {
    /// Sends that were accepted, by bank.
    pub sends: HashMap<Bank, u64>,
    /// Processes that were killed.
    pub crashes: u64,
    /// Crashes between a payment and the record of it, by bank.
    pub after_effect: HashMap<&'static str, u64>,
}

/// When a worker is killed.
#[derive(Debug)]
enum Death {
    /// By itself, when a delivery passes a point.
    At(Kill),
    /// By the parent after this time, at any point.
    After(Duration),
    /// Not before everything is done.
    Never,
}

/// The schedule: first the named points, including each bank's crash between payment and record, then random times.
fn schedule(random: &mut fastrand::Rng) -> Vec<Death> {
    let mut at = |bank: Bank, point| Death::At(Kill { queue: bank.name(), point, nth: random.u32(2..=5) });
    let mut deaths = vec![
        at(Bank::Fenced, Point::AfterEffect),
        at(Bank::Trusting, Point::AfterEffect),
        at(Bank::Keyed, Point::AfterEffect),
        at(Bank::Trusting, Point::AfterClaim),
        at(Bank::Keyed, Point::BeforeSettle),
        at(Bank::Fenced, Point::AfterSettle),
    ];
    for _ in 0..RANDOM_KILLS {
        deaths.push(Death::After(Duration::from_millis(random.u64(5..120))));
    }
    deaths
}

/// Sends and works until everything is settled; no child process runs when it returns.
pub async fn rage(store: &str, banks: SocketAddr, seed: u64) -> anyhow::Result<Storm> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut done = Storm::default();
    // A producer that died does not know which payments it has sent: it starts again from the beginning.
    for die_after in [random.usize(60..180), usize::MAX] {
        let (seed, payments, die_after) = (seed.to_string(), PAYMENTS.to_string(), die_after.to_string());
        let child = spawn(&["produce", store, &seed, &payments, &die_after])?;
        let mut sends: HashMap<Bank, u64> = HashMap::new();
        let status = live(child, LIFE, None, |line| {
            for bank in Bank::ALL.into_iter().filter(|bank| line == format!("sent {}", bank.name())) {
                *sends.entry(bank).or_default() += 1;
            }
        });
        done.ended(status.await?, None)?;
        for (bank, count) in sends {
            *done.sends.entry(bank).or_default() += count;
        }
    }
    println!("the producer sent {} messages, died once and began again", done.sends.values().sum::<u64>());
    let deaths = schedule(&mut random).into_iter().chain(std::iter::repeat_with(|| Death::Never));
    for death in deaths {
        let (kill, after) = match death {
            Death::At(kill) => (Some(kill), None),
            Death::After(after) => (None, Some(after)),
            Death::Never => (None, None),
        };
        let child = spawn(&["work", store, &banks.to_string(), &kill.map_or("-".to_owned(), Kill::to_arg)])?;
        let status = live(child, LIFE, after, |_| {}).await?;
        if done.ended(status, kill)? {
            break;
        }
        match (kill, after) {
            (Some(Kill { queue, point, nth }), _) => {
                println!("a worker died at {point} of delivery {nth} of {queue}");
            }
            (_, after) => println!("a worker died {:?} after its start", after.unwrap_or_default()),
        }
    }
    Ok(done)
}

impl Storm {
    /// Records how a process ended. `true`: by itself, with everything done.
    fn ended(&mut self, status: ExitStatus, kill: Option<Kill>) -> anyhow::Result<bool> {
        if status.success() {
            return Ok(true);
        }
        if status.signal() != Some(9) {
            bail!("a process failed of itself: {status}");
        }
        self.crashes += 1;
        if let Some(kill) = kill.filter(|kill| kill.point == Point::AfterEffect) {
            *self.after_effect.entry(kill.queue).or_default() += 1;
        }
        Ok(false)
    }
}

pub fn spawn(args: &[&str]) -> anyhow::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command.spawn().context("a process cannot be started")
}

/// Reads the lines of a process until it ends, or kills it this time after it was ready. It ends within its life.
pub async fn live(
    mut child: Child,
    life_max: Duration,
    kill_after: Option<Duration>,
    mut heard: impl FnMut(&str),
) -> anyhow::Result<ExitStatus> {
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let life = async {
        while let Some(line) = lines.next_line().await? {
            heard(&line);
            if let (Some(after), "ready") = (kill_after, &*line) {
                let ended = timeout(after, child.wait()).await;
                if ended.is_err() {
                    child.start_kill()?;
                }
            }
        }
        anyhow::Ok(child.wait().await?)
    };
    timeout(life_max, life).await.context("a process hangs")?
}

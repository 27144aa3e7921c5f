//! What the stages do, with either client.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

/// Records of a transaction.
pub const BATCH: usize = 20;
/// One transfer in as many fails once, at its last moment.
const FAILS_ONE_IN: u64 = 40;

pub const ACCOUNTS: [&str; 6] = ["ada", "bob", "cyd", "dan", "eve", "fay"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    pub id: u64,
    pub from: &'static str,
    pub to: &'static str,
    pub amount: i64,
}

impl Transfer {
    pub fn random(id: u64, random: &mut fastrand::Rng) -> Self {
        let from = random.usize(..ACCOUNTS.len());
        let to = (from + random.usize(1..ACCOUNTS.len())) % ACCOUNTS.len();
        Self { id, from: ACCOUNTS[from], to: ACCOUNTS[to], amount: random.i64(1..100) }
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, from, to, amount } = self;
        write!(f, "{id} {from} {to} {amount}")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stack {
    Ours,
    Librdkafka,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A transfer into two postings.
    Split,
    /// A posting into a line of the statement of its account.
    Post,
}

impl Stage {
    pub fn transactional_id(self, run: &str) -> String {
        format!("{run}-{}", self.name())
    }

    fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Post => "post",
        }
    }
}

/// A stage as a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub stack: Stack,
    pub stage: Stage,
    pub address: String,
    pub run: String,
}

impl Settings {
    pub fn arguments(&self) -> [String; 4] {
        let stack = if self.stack == Stack::Ours { "ours" } else { "librdkafka" };
        [stack.to_owned(), self.stage.name().to_owned(), self.address.clone(), self.run.clone()]
    }

    pub fn parse(arguments: &[String]) -> Option<Self> {
        let [stack, stage, address, run] = arguments else { return None };
        let stack = match stack.as_str() {
            "ours" => Stack::Ours,
            "librdkafka" => Stack::Librdkafka,
            _ => return None,
        };
        let stage = [Stage::Split, Stage::Post].into_iter().find(|known| known.name() == stage)?;
        Some(Self { stack, stage, address: address.clone(), run: run.clone() })
    }

    pub fn input(&self) -> String {
        let topic = if self.stage == Stage::Split { "transfers" } else { "postings" };
        format!("{}-{topic}", self.run)
    }

    pub fn output(&self) -> String {
        let topic = if self.stage == Stage::Split { "postings" } else { "statements" };
        format!("{}-{topic}", self.run)
    }

    pub fn transactional_id(&self) -> String {
        self.stage.transactional_id(&self.run)
    }

    /// The longest time from a transaction's first record to its commit. All transfers are there from the beginning, so the first
    /// stage has full batches.
    pub fn batch_time_max(&self) -> Duration {
        if self.stage == Stage::Split { Duration::from_secs(30) } else { Duration::from_millis(500) }
    }

    pub fn group(&self) -> String {
        format!("{}-group", self.transactional_id())
    }
}

/// What a stage makes of its input.
pub struct Work {
    stage: Stage,
    failed: HashSet<u64>,
}

impl Work {
    pub fn new(stage: Stage) -> Self {
        Self { stage, failed: HashSet::new() }
    }

    /// The outputs of a record, by account, and whether it fails after them.
    pub fn handle(&mut self, value: &str) -> (Vec<(String, String)>, Result<(), String>) {
        let words: Vec<&str> = value.split(' ').collect();
        match (self.stage, &words[..]) {
            (Stage::Split, [id, from, to, amount]) => {
                let postings = vec![
                    ((*from).to_owned(), format!("{id} {from} -{amount}")),
                    ((*to).to_owned(), format!("{id} {to} {amount}")),
                ];
                let id: u64 = id.parse().unwrap_or(0);
                let fails = id % FAILS_ONE_IN == FAILS_ONE_IN - 1 && self.failed.insert(id);
                (postings, if fails { Err("it fails once".to_owned()) } else { Ok(()) })
            }
            (Stage::Post, [_, account, _]) => (vec![((*account).to_owned(), value.to_owned())], Ok(())),
            _ => (Vec::new(), Err(format!("{value:?} cannot be read"))),
        }
    }
}

//! What is lost and what is made twice when the worker's process is killed.

use std::collections::{HashMap, HashSet};
use std::process::{Child as Process, Command, Stdio};
use std::time::{Duration, Instant};

use crate::places::{Empty, Site};
use crate::work::{self, Flow};
use crate::{Mode, PATIENCE};

const CHILD: &str = "HAPAX_TIERS_CHILD";
/// How long a handler takes after its effect.
const PAUSE: Duration = Duration::from_millis(5);
/// Effects between two kills.
const BETWEEN: usize = 25;

/// The process that works and is killed.
pub struct Child {
    mode: Mode,
    empty: Empty,
}

impl Child {
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var(CHILD).ok()?;
        let (mode, rest) = text.split_once('\n')?;
        let (url, folder) = rest.split_once('\n')?;
        let mode = Mode::ALL.into_iter().find(|one| one.name == mode)?;
        Some(Self { mode, empty: Empty { url: url.to_owned(), folder: folder.into() } })
    }

    pub async fn run(self) {
        let flow = Flow::open(&self.empty, self.mode).await;
        flow.work_until_empty(PAUSE).await;
        flow.close().await;
    }

    fn start(&self) -> Process {
        let Empty { url, folder } = &self.empty;
        let about = format!("{}\n{url}\n{}", self.mode.name, folder.display());
        let program = std::env::current_exe().expect("a program knows where it is");
        Command::new(program).env(CHILD, about).stdin(Stdio::null()).spawn().expect("it starts")
    }
}

pub struct After {
    pub kills: usize,
    pub sent: usize,
    pub lost: usize,
    pub repeated: usize,
    pub parked: usize,
    /// Of these: those whose handler had not begun, was running, and had ended.
    pub stages: [usize; 3],
}

pub async fn measure(site: &Site, mode: Mode, kills: usize) -> After {
    let empty = site.fresh().await;
    let sent = (kills + 2) * 2 * BETWEEN;
    let flow = Flow::open(&empty, mode).await;
    flow.send(sent).await;
    // Only one process may have an embedded store open.
    flow.close().await;
    let child = Child { mode, empty: empty.clone() };
    let mut done = 0;
    while done < kills {
        let before = work::made(&empty, mode).await.len();
        let mut process = child.start();
        let start = Instant::now();
        let mut is_over = false;
        while work::made(&empty, mode).await.len() < before + BETWEEN && !is_over {
            is_over = process.try_wait().expect("its state").is_some();
            assert!(start.elapsed() < PATIENCE, "nothing happens");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if is_over {
            break;
        }
        process.kill().expect("it is killed");
        process.wait().expect("it has ended");
        done += 1;
    }
    let mut last = child.start();
    let ended = tokio::task::spawn_blocking(move || last.wait());
    let ended = tokio::time::timeout(PATIENCE, ended).await.expect("it ends in time").expect("a task");
    assert!(ended.expect("its state").success(), "the last process failed");
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for number in work::made(&empty, mode).await {
        *counts.entry(number).or_default() += 1;
    }
    let flow = Flow::open(&empty, mode).await;
    let parked = flow.parked().await;
    flow.close().await;
    let ended: HashSet<u64> = work::ended(&empty).into_iter().collect();
    let mut stages = [0; 3];
    for number in &parked {
        stages[usize::from(counts.contains_key(number)) + usize::from(ended.contains(number))] += 1;
    }
    After {
        kills: done,
        sent,
        lost: (0..sent as u64)
            .filter(|number| !counts.contains_key(number) && !parked.contains(number))
            .count(),
        repeated: counts.values().filter(|count| **count > 1).count(),
        parked: parked.len(),
        stages,
    }
}

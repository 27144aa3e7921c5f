//! Kills of workers, aimed at the controls: a run whose controls were never hit in the middle of their work shows nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::fault::{Fault, Target};
use crate::recorder::Reporter;
use crate::workload::Workload;

/// How long a kill waits for a control in the middle of its work.
const WAIT: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(5);
/// Kills of workers after which a run gives up, and is invalid.
const KILLS_MAX: u32 = 15;

/// Chooses the worker that is killed.
pub struct Aim<'a> {
    reporter: &'a Reporter,
    /// Controls that were not hit yet.
    missing: BTreeSet<&'static str>,
    kills: u32,
}

impl<'a> Aim<'a> {
    pub fn new(reporter: &'a Reporter, workloads: &[Workload]) -> Self {
        let controls = workloads.iter().filter(|workload| workload.is_control());
        Self { reporter, missing: controls.map(|workload| workload.name).collect(), kills: 0 }
    }

    /// Whether a run with these faults needs more kills of workers than it had.
    pub fn owes_kills(&self, wanted: &[Fault]) -> bool {
        let kill = Fault::Kill(Target::Worker);
        wanted.contains(&kill) && !self.missing.is_empty() && self.kills < KILLS_MAX
    }

    /// Kills a worker in which a control is in the middle of its work, if it was not hit before; else any. Starts another.
    pub async fn kill_worker(
        &mut self,
        cluster: &mut Cluster,
        random: &mut fastrand::Rng,
    ) -> anyhow::Result<()> {
        let end = Instant::now() + WAIT;
        let mut worker = random.usize(..cluster.workers.len());
        while !self.missing.is_empty() && Instant::now() < end {
            let gaps = self.reporter.gaps().await?;
            let is_in_gap =
                |process: &hapax_faults::Process| self.in_gap(&gaps, process.id()).next().is_some();
            if let Some(found) = cluster.workers.iter().position(is_in_gap) {
                worker = found;
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        let id = cluster.workers[worker].id();
        cluster.restart_worker(worker)?;
        self.kills += 1;
        // It is dead: what is in its gap now stays there.
        let gaps = self.reporter.gaps().await?;
        let hit: Vec<String> = self.in_gap(&gaps, id).map(str::to_owned).collect();
        self.missing.retain(|name| !hit.iter().any(|hit| hit == name));
        Ok(())
    }

    /// The controls in their gap in a process, of those that are missing.
    fn in_gap<'g>(&'g self, gaps: &'g [(String, String)], process: u32) -> impl Iterator<Item = &'g str> {
        let who = Reporter::name("worker", process);
        let own =
            gaps.iter().filter(move |(by, workload)| *by == who && self.missing.contains(workload.as_str()));
        own.map(|(_, workload)| workload.as_str())
    }
}

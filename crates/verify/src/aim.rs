//! Kills of workers and relays, aimed at the controls: a run whose controls were never hit in the middle of their work shows nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};

use crate::cluster::Cluster;
use crate::fault::{Fault, RelayPoint, Side, Target};
use crate::recorder::Reporter;
use crate::workload::Workload;

/// How long a kill waits for a control in the middle of its work.
const WAIT: Duration = Duration::from_secs(1);
/// How long a request of a killed relay is on its way.
const LATE: Duration = Duration::from_millis(1_500);
const POLL: Duration = Duration::from_millis(5);
/// Kills after which a run gives up, and is invalid.
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

    /// The kill that a run with these faults still needs.
    pub fn owed_kill(&self, wanted: &[Fault]) -> Option<Fault> {
        let kill = if self.misses_relay() {
            Fault::KillRelay(RelayPoint::Published)
        } else {
            Fault::Kill(Target::Worker)
        };
        let kills = wanted.contains(&Fault::Kill(Target::Worker));
        (kills && !self.missing.is_empty() && self.kills < KILLS_MAX).then_some(kill)
    }

    /// Kills the relay when one of its requests is on its way, or was carried out and not answered yet. Starts another.
    /// Returns how many requests that were.
    pub async fn kill_relay(&mut self, cluster: &mut Cluster, point: RelayPoint) -> anyhow::Result<u64> {
        let on = match point {
            RelayPoint::Publishing | RelayPoint::PublishingLate => Match::request("/messages"),
            RelayPoint::Published => Match::answer_to("/messages"),
        };
        let Some(proxy) = cluster.proxy(Side::Relays) else { return Ok(0) };
        let held = proxy.inject(on, Action::Hold).times(1);
        let id = cluster.relay.as_ref().map(hapax_faults::Process::id).unwrap_or_default();
        let end = Instant::now() + WAIT;
        while Instant::now() < end {
            let gaps = self.reporter.gaps().await?;
            let is_hit = self.in_gap(&gaps, "relay", id).next().is_some() || !self.misses_relay();
            if held.count() > 0 && is_hit {
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        cluster.stop_relay();
        // Else it would hold a request of the next relay.
        held.remove();
        let hits = held.count();
        cluster.restart_relay()?;
        self.kills += 1;
        self.note_hit("relay", id).await?;
        if point == RelayPoint::Publishing {
            // A request that is held until its relay is dead, and never released, does not arrive.
            return Ok(hits);
        }
        if point == RelayPoint::PublishingLate {
            // The next relay has the dead one's lease to wait for, and then publishes the same.
            tokio::time::sleep(LATE).await;
        }
        held.release();
        Ok(hits)
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
                |process: &hapax_faults::Process| self.in_gap(&gaps, "worker", process.id()).next().is_some();
            if let Some(found) = cluster.workers.iter().position(is_in_gap) {
                worker = found;
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        let id = cluster.workers[worker].id();
        cluster.restart_worker(worker)?;
        self.kills += 1;
        self.note_hit("worker", id).await
    }

    /// Notes which controls were in their gap in a process that was killed: what is there now stays there.
    async fn note_hit(&mut self, role: &str, process: u32) -> anyhow::Result<()> {
        let gaps = self.reporter.gaps().await?;
        let hit: Vec<String> = self.in_gap(&gaps, role, process).map(str::to_owned).collect();
        self.missing.retain(|name| !hit.iter().any(|hit| hit == name));
        Ok(())
    }

    /// Whether a control in the relay's process was not hit yet.
    fn misses_relay(&self) -> bool {
        self.missing.iter().any(|name| Workload::named(name).is_some_and(|control| control.is_relayed()))
    }

    /// The controls in their gap in a process, of those that are missing.
    fn in_gap<'g>(
        &'g self,
        gaps: &'g [(String, String)],
        role: &str,
        process: u32,
    ) -> impl Iterator<Item = &'g str> + use<'g, 'a> {
        let who = Reporter::name(role, process);
        let own =
            gaps.iter().filter(move |(by, workload)| *by == who && self.missing.contains(workload.as_str()));
        own.map(|(_, workload)| workload.as_str())
    }
}

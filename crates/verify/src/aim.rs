//! Kills and power cuts, aimed at work that is under way: one that hits nothing shows nothing. Controls come first, since a run
//! whose controls were never hit in the middle of their work would not have found a violation of Hapax either.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};

use crate::cluster::Cluster;
use crate::fault::{Fault, RelayPoint, Side, Target};
use crate::orders;
use crate::recorder::{OpenCall, Reporter};
use crate::workload::{Shape, Workload};

/// How long a kill waits for a control in the middle of its work.
const WAIT: Duration = Duration::from_secs(1);
/// How long a request of a killed relay is on its way.
const LATE: Duration = Duration::from_millis(1_500);
const POLL: Duration = Duration::from_millis(5);
/// How long a kill of a server waits until a send was carried out whose response is lost.
const SEND: Duration = Duration::from_millis(300);
/// How long the transaction of an order stays open, and how often in one fault: relays read on meanwhile.
const OPEN_ORDER: Duration = Duration::from_millis(350);
const OPEN_ORDERS: u32 = 4;
/// Responses to sends that are lost before a server is killed.
const LOST_SENDS: u64 = 4;
/// How long workers stand still before a power cut: what is accepted meanwhile is in the store only.
const UNCONSUMED: Duration = Duration::from_millis(150);
/// Kills after which a run gives up, and is invalid.
const KILLS_MAX: u32 = 15;
/// Faults for a workload that none has reached after which a run gives up, and is inconclusive.
const REPEATED_MAX: u32 = 3;

/// Chooses the worker that is killed.
pub struct Aim<'a> {
    reporter: &'a Reporter,
    /// Controls that were not hit yet.
    missing: BTreeSet<&'static str>,
    /// Workloads of Hapax's whose workers call a bank.
    callers: Vec<&'static str>,
    kills: u32,
    /// Faults that were injected again for each workload that had not been reached.
    repeated: BTreeMap<&'static str, u32>,
    /// The workload whose consumers ack themselves, if it is in the run.
    receivers: Option<&'static str>,
}

impl<'a> Aim<'a> {
    pub fn new(reporter: &'a Reporter, workloads: &[Workload]) -> Self {
        let controls = workloads.iter().filter(|workload| workload.is_control());
        let missing = controls.map(|workload| workload.name).collect();
        let calls = |workload: &&Workload| {
            matches!(workload.shape, Shape::Worker(_) | Shape::Outbox | Shape::Receiver)
        };
        let callers = workloads.iter().filter(calls).map(|workload| workload.name).collect();
        let receivers = workloads.iter().find(|workload| workload.shape == Shape::Receiver);
        let receivers = receivers.map(|workload| workload.name);
        Self { reporter, missing, callers, kills: 0, repeated: BTreeMap::new(), receivers }
    }

    /// The fault that a run of these faults still needs: a kill for a control that was not hit, or one for a workload that none
    /// has reached. Else a short run would show nothing by chance.
    pub async fn owed_fault(
        &mut self,
        round: &[Fault],
        workloads: &[Workload],
    ) -> anyhow::Result<Option<Fault>> {
        if let Some(kill) = self.owed_kill(round) {
            return Ok(Some(kill));
        }
        let counts = self.reporter.counts().await?;
        let hit = |name: &str| counts.per_workload.get(name).map_or(0, |progress| progress.hit);
        let may_be_tried = |name: &str| self.repeated.get(name).is_none_or(|tries| *tries < REPEATED_MAX);
        let owed = owed_to_unreached(round, workloads, |name| hit(name) == 0 && may_be_tried(name));
        Ok(owed.map(|(workload, fault)| {
            *self.repeated.entry(workload).or_default() += 1;
            fault
        }))
    }

    /// The kill that a run of these faults still needs for its controls.
    fn owed_kill(&self, round: &[Fault]) -> Option<Fault> {
        let kill = if self.misses_relay() {
            Fault::KillRelay(RelayPoint::Published)
        } else {
            Fault::Kill(Target::Worker)
        };
        let kills = round.contains(&Fault::Kill(Target::Worker));
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

    /// Keeps transactions of orders open after they have drawn their number in the outbox, one after another, while orders with later
    /// numbers are committed. Returns how many were overtaken.
    pub async fn keep_order_open(&self, cluster: &Cluster) -> anyhow::Result<u64> {
        let Some(proxy) = cluster.proxy(Side::Store) else { return Ok(0) };
        let mut overtaken = 0;
        for _ in 0..OPEN_ORDERS {
            // Its producer commits when it has heard that the message is written.
            let held = proxy.inject(Match::answer_to(orders::ENQUEUE), Action::Hold).times(1);
            let end = Instant::now() + WAIT;
            while held.count() == 0 && Instant::now() < end {
                tokio::time::sleep(POLL).await;
            }
            let before = self.accepted_orders().await;
            tokio::time::sleep(OPEN_ORDER).await;
            let after = self.accepted_orders().await;
            held.release();
            // What each producer reports first may have been committed before.
            let already = Workload::named(orders::WORKLOAD).map_or(0, |workload| workload.accounts());
            overtaken += u64::from(held.count() > 0 && after? > before? + already);
        }
        Ok(overtaken)
    }

    async fn accepted_orders(&self) -> anyhow::Result<u64> {
        let counts = self.reporter.counts().await?;
        Ok(counts.per_workload.get(orders::WORKLOAD).map_or(0, |progress| progress.accepted))
    }

    /// Kills a server when a send was carried out and its response is lost: its producer repeats it after the restart.
    pub async fn kill_server(&self, cluster: &mut Cluster, number: usize) -> anyhow::Result<()> {
        let lost = match cluster.proxy(Side::Producers) {
            Some(proxy) => proxy.inject(Match::answer_to("/messages"), Action::Drop).times(LOST_SENDS),
            None => return cluster.restart_server(number),
        };
        let end = Instant::now() + SEND;
        while lost.count() == 0 && Instant::now() < end {
            tokio::time::sleep(POLL).await;
        }
        lost.remove();
        cluster.restart_server(number)
    }

    /// Cuts the server's power when it has accepted sends that no worker has seen.
    pub async fn cut_power(&self, cluster: &mut Cluster) -> anyhow::Result<()> {
        for worker in 0..cluster.workers.len() {
            cluster.pause_worker(worker, true);
        }
        tokio::time::sleep(UNCONSUMED).await;
        let cut = cluster.cut_power();
        for worker in 0..cluster.workers.len() {
            cluster.pause_worker(worker, false);
        }
        cut
    }

    /// The worker to stop past its lease: one with a message that it has paid for and not acked, so that its ack comes when the
    /// message was delivered to another. If there is none, any.
    pub async fn worker_to_pause(
        &self,
        cluster: &Cluster,
        random: &mut fastrand::Rng,
    ) -> anyhow::Result<usize> {
        let begin = Instant::now();
        while let (Some(workload), true) = (self.receivers, begin.elapsed() < WAIT) {
            let gaps = self.reporter.gaps().await?;
            let holds = |process: &hapax_faults::Process| {
                let who = Reporter::name("worker", process.id());
                gaps.iter().any(|(by, of)| *by == who && of == workload)
            };
            let holders: Vec<usize> =
                (0..cluster.workers.len()).filter(|&at| holds(&cluster.workers[at])).collect();
            if let Some(worker) = random.choice(holders) {
                return Ok(worker);
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(random.usize(..cluster.workers.len()))
    }

    /// Kills a worker in which a control that was not hit before is in the middle of its work, and a handler in its call to
    /// the bank: before the money is moved and after it in turns. If there is none, any. Starts another.
    pub async fn kill_worker(
        &mut self,
        cluster: &mut Cluster,
        random: &mut fastrand::Rng,
    ) -> anyhow::Result<()> {
        let begin = Instant::now();
        let mut worker = random.usize(..cluster.workers.len());
        while (!self.missing.is_empty() || !self.callers.is_empty()) && begin.elapsed() < WAIT {
            let gaps = self.reporter.gaps().await?;
            let calls = self.reporter.open_calls().await?;
            let is_in_gap = |process: &hapax_faults::Process| {
                self.missing.is_empty() || self.in_gap(&gaps, "worker", process.id()).next().is_some()
            };
            // A control in its gap is enough when both were waited for.
            let is_late = begin.elapsed() > WAIT / 2 && !self.missing.is_empty();
            let is_in_call =
                |process: &hapax_faults::Process| is_late || self.is_in_call(&calls, process.id());
            let is_aim = |process: &hapax_faults::Process| is_in_gap(process) && is_in_call(process);
            if let Some(found) = cluster.workers.iter().position(is_aim) {
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

    /// Whether a handler of Hapax's in this worker is in the part of its call that the next kill is aimed at.
    fn is_in_call(&self, calls: &[OpenCall], process: u32) -> bool {
        let (who, moved) = (Reporter::name("worker", process), self.kills.is_multiple_of(2));
        let is_aim = |call: &OpenCall| {
            call.who == who && call.moved == moved && self.callers.contains(&call.workload.as_str())
        };
        self.callers.is_empty() || calls.iter().any(is_aim)
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

/// A fault for the first workload under a guarantee that needs one: the one that reaches the fewest other workloads, since that one
/// is aimed at it. How a user's own program ends is not seen.
fn owed_to_unreached(
    round: &[Fault],
    workloads: &[Workload],
    needs_one: impl Fn(&str) -> bool,
) -> Option<(&'static str, Fault)> {
    let ours = || workloads.iter().filter(|workload| !workload.is_control());
    let is_unreached = |workload: &&Workload| workload.shape != Shape::Own && needs_one(workload.name);
    let reached = |fault: &Fault| ours().filter(|workload| fault.reaches(workload)).count();
    ours().filter(is_unreached).find_map(|workload| {
        let reaching = round.iter().filter(|fault| fault.reaches(workload) && is_seen(fault, workload));
        Some((workload.name, *reaching.min_by_key(|fault| reached(fault))?))
    })
}

/// Whether what a fault does to this workload is seen while the run goes on, and not only by the checker: it sees the claims of a process
/// that was killed, and what a killed relay had under way.
fn is_seen(fault: &Fault, workload: &Workload) -> bool {
    match fault {
        Fault::KillRelay(_) | Fault::OpenOrder => false,
        Fault::Kill(Target::Worker) | Fault::Pause | Fault::Scale => workload.shape != Shape::Claims,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::ROUND;
    use crate::workload::ALL;

    #[test]
    fn a_workload_that_was_not_reached_gets_the_fault_that_is_aimed_at_it() {
        let owed = |round: &[Fault], name: &str| {
            let owed = owed_to_unreached(round, &ALL, |of| of == name);
            owed.map(|(workload, fault)| {
                assert_eq!(workload, name);
                fault.to_string()
            })
        };
        let all_but_proxy: Vec<Fault> =
            ROUND.into_iter().filter(|fault| !fault.to_string().contains("prox")).collect();
        assert_eq!(owed(&ROUND, "charges").as_deref(), Some("kill -9 of the proxies"));
        let through_ledger = |fault: &str| fault.starts_with("claim: ") || fault.starts_with("complete: ");
        assert!(owed(&all_but_proxy, "charges").is_some_and(|fault| through_ledger(&fault)));
        assert!(owed(&ROUND, "claims").is_some_and(|fault| through_ledger(&fault)), "its kills are not seen");
        assert!(owed(&ROUND, "orders").is_some_and(|fault| !fault.contains("relay")), "nor a relay's");
        let workers = [Fault::Kill(Target::Worker), Fault::Pause];
        assert_eq!(owed(&workers, "charges"), None, "no fault of this run reaches it");
        assert_eq!(owed(&workers, "payments").as_deref(), Some("kill -9 of a worker"));
        assert_eq!(owed(&ROUND, "handler"), None, "how it ends is not seen");
        assert_eq!(owed(&ROUND, "ack-after"), None, "a control has kills of its own");
    }
}

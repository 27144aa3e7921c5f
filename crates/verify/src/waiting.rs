//! What a run still waits for at its end, and for how long.

use std::fmt;
use std::time::{Duration, Instant};

use hapax::Hapax;

use crate::cluster::Cluster;
use crate::operator::{self, Doubts};
use crate::orders;
use crate::recorder::Reporter;
use crate::workload::{Shape, Workload};

/// The rest is waited for as long as it becomes less; this is how long it may stay the same.
const STALLED: Duration = Duration::from_mins(2);
/// If the rest stays the same for this long, leases may be too short for the machine.
const SLOW: Duration = Duration::from_secs(10);
/// How long the rest may take at all.
const DRAIN_MAX: Duration = Duration::from_mins(30);

/// Messages and keys of a workload that are not done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Open {
    pub workload: &'static str,
    pub is_control: bool,
    ready: u64,
    delayed: u64,
    in_flight: u64,
    dead: u64,
    parked: u64,
    in_doubt: u64,
    held: u64,
    /// In the outbox, and not published.
    pub unpublished: u64,
}

impl Open {
    /// All of them. A key that is in doubt or held may belong to a message that is counted too.
    pub fn total(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    fn counts(&self) -> [(&'static str, u64); 8] {
        [
            ("ready", self.ready),
            ("delayed", self.delayed),
            ("in flight", self.in_flight),
            ("dead", self.dead),
            ("parked", self.parked),
            ("keys in doubt", self.in_doubt),
            ("keys held", self.held),
            ("not published", self.unpublished),
        ]
    }
}

impl fmt::Display for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.counts().into_iter().filter(|(_, count)| *count > 0);
        let counts: Vec<String> = counts.map(|(name, count)| format!("{count} {name}")).collect();
        write!(f, "{}: {}", self.workload, counts.join(", "))
    }
}

/// Resolves doubts and redrives dead letters; returns what is not done yet of each workload that has some.
pub async fn count_open(
    hapax: &Hapax,
    cluster: &Cluster,
    reporter: &Reporter,
    workloads: &[Workload],
    doubts: &mut Doubts,
) -> anyhow::Result<Vec<Open>> {
    let run = &cluster.site().run;
    let mut all = Vec::new();
    for workload in workloads {
        let mut open = Open { workload: workload.name, is_control: workload.is_control(), ..Open::default() };
        if workload.has_queue() {
            let stats = hapax.store().stats(&workload.queue(run)).await?;
            (open.ready, open.delayed, open.in_flight) = (stats.ready, stats.delayed, stats.in_flight);
            let keys = doubts.resolve(hapax, cluster, reporter, workload).await?;
            (open.in_doubt, open.held) = (keys.in_doubt, keys.held);
        }
        if let Some(dead) = workload.dead_queue(run) {
            let stats = hapax.store().stats(&dead).await?;
            open.dead = stats.ready + stats.delayed + stats.in_flight;
        }
        if workload.rejects && workload.fifo {
            open.parked = operator::release_rejected(hapax, reporter, workload, run).await?;
        }
        if cluster.has_relay() {
            open.unpublished = match workload.shape {
                Shape::Outbox => orders::count_unpublished(cluster.site()).await?,
                Shape::PublishMark => orders::count_unmarked(cluster.site())?,
                _ => 0,
            };
        }
        if open.total() > 0 {
            all.push(open);
        }
    }
    operator::redrive_if_dead(hapax, reporter, workloads, run).await?;
    Ok(all)
}

/// How long the rest is waited for: as long as it becomes less, whatever the load of the machine, up to a bound.
pub struct Patience {
    begun: Instant,
    least: u64,
    least_at: Instant,
}

impl Patience {
    pub fn new(now: Instant) -> Self {
        Self { begun: now, least: u64::MAX, least_at: now }
    }

    /// Whether the rest becomes less too slowly for leases of a second: what is claimed when its lease has ended is never done.
    pub fn is_slow(&self, now: Instant) -> bool {
        now.duration_since(self.least_at) >= SLOW || now.duration_since(self.begun) >= 3 * SLOW
    }

    /// Notes how much is waiting, or that it could not be counted. Returns why it is not waited for any longer, if it is not.
    pub fn note(&mut self, waiting: Result<&[&Open], &anyhow::Error>, now: Instant) -> Option<String> {
        let count = waiting.map_or(u64::MAX, |open| open.iter().map(|open| open.total()).sum());
        if count < self.least {
            (self.least, self.least_at) = (count, now);
        }
        let stalled = now.duration_since(self.least_at);
        let drained = now.duration_since(self.begun);
        let because = if stalled >= STALLED {
            format!("became no less for {} s", stalled.as_secs())
        } else if drained >= DRAIN_MAX {
            "became less, but too slowly".to_owned()
        } else {
            return None;
        };
        let what = match waiting {
            Ok(open) => open.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            Err(error) => format!("what cannot be counted ({error:#})"),
        };
        Some(format!("{} s after the last fault, this is left and {because}: {what}", drained.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(ready: u64) -> Open {
        Open { workload: "payments", ready, in_flight: 2, ..Open::default() }
    }

    #[test]
    fn a_rest_that_becomes_less_is_waited_for_and_one_that_does_not_is_named() {
        let begun = Instant::now();
        let mut patience = Patience::new(begun);
        let at = |seconds| begun + Duration::from_secs(seconds);
        for minute in 0..20 {
            let rest = open(100 - minute);
            assert_eq!(patience.note(Ok(&[&rest]), at(minute * 60)), None, "slow, but it becomes less");
        }
        let last = 19 * 60;
        assert!(!patience.is_slow(begun + Duration::from_secs(9)));
        assert_eq!(patience.note(Ok(&[&open(81)]), at(last + 119)), None);
        let why = patience.note(Ok(&[&open(81)]), at(last + 120)).unwrap();
        assert_eq!(
            why,
            "1260 s after the last fault, this is left and became no less for 120 s: payments: 81 ready, 2 in flight"
        );
    }

    #[test]
    fn the_whole_is_bounded() {
        let begun = Instant::now();
        let mut patience = Patience::new(begun);
        let gives_up = (0..10_000).find(|minute| {
            let rest = open(10_000 - minute);
            patience.note(Ok(&[&rest]), begun + Duration::from_secs(minute * 60)).is_some()
        });
        assert_eq!(gives_up, Some(30));
    }

    #[test]
    fn a_store_that_does_not_answer_is_waited_for_and_named() {
        let begun = Instant::now();
        let mut patience = Patience::new(begun);
        let error = anyhow::anyhow!("connection refused");
        assert_eq!(patience.note(Err(&error), begun + Duration::from_secs(119)), None);
        let why = patience.note(Err(&error), begun + Duration::from_secs(121)).unwrap();
        assert!(why.contains("connection refused"), "{why}");
    }
}

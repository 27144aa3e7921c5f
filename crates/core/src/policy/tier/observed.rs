//! Rules about what happens in a queue: each names its evidence, the cause, and a change.
//!
//! A process that observes deliveries fills in [`ObservedQueue`]. Without it the store's own counters are used where they
//! suffice, and the other rules find nothing.

use serde::{Deserialize, Serialize};

use super::rules::{Rule, RuleResult, found, span, warning};
use super::{Facts, HandlerLease};
use crate::queue::Tier;

/// What was observed of a queue in the latest minutes, by one process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObservedQueue {
    /// Length of the window, in milliseconds.
    pub window_ms: u64,
    /// Deliveries.
    pub delivered: u64,
    /// Deliveries of a message whose previous lease had run out.
    pub expired: u64,
    /// Settles refused because the lease had passed to another delivery: that work was done in vain.
    pub late: u64,
    /// Median time from delivery to settle.
    pub held_p50_ms: Option<u64>,
    /// 99th percentile of the time from delivery to settle, late ones included.
    pub held_p99_ms: Option<u64>,
    /// How many settles the percentiles are made of.
    pub held_count: u64,
    /// Settles of deliveries that this process made, those that were refused as too late included.
    pub settled: u64,
    /// Of these, settles after the end of the lease with all its extensions. On a store that other processes use only
    /// refused ones, because another process may have extended the lease.
    pub overran: u64,
    /// The lease of the latest delivery.
    pub lease_ms: u64,
    /// Consumers that were heard of for the first time.
    pub consumers_started: u64,
    /// Consumers that were not heard of for three leases.
    pub consumers_stopped: u64,
    /// Claims granted for deliveries, since the process started.
    pub granted: u64,
    /// Claims of deliveries that got a recorded outcome, since the process started.
    pub replayed: u64,
    /// Claims that met their key in progress.
    pub conflicts: u64,
    /// Messages that died.
    pub dead: u64,
    /// The most frequent error of those that died.
    pub dead_error: Option<CommonError>,
    /// Messages that are still in the queue after at least [`POISON_DELIVERIES`] deliveries.
    pub poison: u64,
    /// The id of one of them.
    pub poison_example: Option<String>,
    /// The group with the most deliveries.
    pub hot_group: Option<String>,
    /// Deliveries of that group.
    pub hot_group_delivered: u64,
}

/// An error, and how many messages had it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonError {
    /// Its text.
    pub error: String,
    /// How many messages had it.
    pub count: u64,
}

/// A message that was delivered this often and is neither acked nor dead blocks consumers in vain.
pub const POISON_DELIVERIES: u32 = 6;

/// Expired leases cause a warning from this number on, and from this share of all deliveries.
const EXPIRED_MIN: u64 = 10;
const EXPIRED_PER_MILLE: u64 = 10;
/// The same for settles after the end of the lease, whether or not the message was delivered again.
const OVERRAN_MIN: u64 = 5;
const OVERRAN_PER_MILLE: u64 = 10;
/// Percentiles of fewer settles are not used.
const HELD_MIN: u64 = 20;
/// A tier is not called unused before this number of claims.
const GRANTED_MIN: u64 = 10_000;
const DEAD_MIN: u64 = 5;
const DEAD_PER_MILLE: u64 = 10;
const CONFLICTS_MIN: u64 = 100;
const CONFLICTS_PER_MILLE: u64 = 50;
const READY_MIN: u64 = 10_000;
/// Of fewer sends since the store was opened it is not told whether consumers keep up.
const SENT_MIN: u64 = 1_000;
const HOT_DELIVERED_MIN: u64 = 100;
/// A lease is long if it is this many times the 99th percentile, and at least this long.
const LONG_TIMES: u64 = 20;
const LONG_MS_MIN: u64 = 120_000;

pub(super) const RULES: &[Rule] = &[
    warning("leases-expire", leases_expire),
    warning("lease-below-p99", lease_below_p99),
    warning("scaling-loses-leases", scaling_loses_leases),
    warning("lease-far-above-work", lease_far_above_work),
    warning("poison-messages", poison_messages),
    warning("messages-die", messages_die),
    warning("groups-halted", groups_halted),
    warning("keys-collide", keys_collide),
    warning("ledger-never-hit", ledger_never_hit),
    warning("hot-group", hot_group),
    warning("queue-grows", queue_grows),
];

fn per_mille(part: u64, of: u64) -> u64 {
    part.saturating_mul(1000).checked_div(of).unwrap_or(0)
}

fn percent(part: u64, of: u64) -> String {
    let per_mille = per_mille(part, of);
    format!("{}.{}%", per_mille / 10, per_mille % 10)
}

/// A lease with room above the 99th percentile, in a round number.
///
/// ```text
/// 0.8 s -> 2 s, 3 s -> 5 s, 41 s -> 75 s, 10 min -> 15 min
/// ```
fn suggested_lease_ms(p99_ms: u64) -> u64 {
    let wanted_ms = p99_ms.saturating_add(p99_ms / 2).max(1_000);
    let step_ms = match wanted_ms {
        ..10_000 => 1_000,
        10_000..60_000 => 5_000,
        60_000..600_000 => 15_000,
        _ => 60_000,
    };
    (wanted_ms / step_ms + 1) * step_ms
}

impl ObservedQueue {
    /// 99th percentile of the time from delivery to settle, if there were enough settles for one.
    pub fn p99_ms(&self) -> Option<u64> {
        self.held_p99_ms.filter(|_| self.held_count >= HELD_MIN)
    }

    fn loses_leases(&self) -> bool {
        self.expired >= EXPIRED_MIN && per_mille(self.expired, self.delivered) >= EXPIRED_PER_MILLE
    }

    /// Leases run out because their holders ended, and not because they were slow.
    fn scaling(&self) -> bool {
        self.loses_leases()
            && self.late < self.expired / 2
            && self.consumers_started + self.consumers_stopped >= 3
    }

    /// Leases run out in such numbers that `leases-expire` reports them.
    fn repeats_slow_work(&self) -> bool {
        self.loses_leases() && !self.scaling()
    }
}

/// The remedy for a lease that is shorter than the work.
fn longer_lease(p99_ms: u64) -> String {
    let lease_ms = suggested_lease_ms(p99_ms);
    format!(
        "set the lease to {} (`hapax queue set QUEUE --lease {}s`), to `auto` in the worker, or let consumers extend it while \
         they work",
        span(lease_ms),
        lease_ms / 1_000
    )
}

fn leases_expire(facts: &Facts) -> RuleResult {
    if !facts.redelivers() {
        return None;
    }
    let Some(seen) = &facts.observed else { return leases_expire_by_counters(facts) };
    if !seen.repeats_slow_work() {
        return None;
    }
    let evidence = format!(
        "{} of deliveries were repeated because their lease ran out ({} of {} in {}), and {} settles came too late",
        percent(seen.expired, seen.delivered),
        seen.expired,
        seen.delivered,
        span(seen.window_ms),
        seen.late,
    );
    match seen.p99_ms() {
        Some(p99_ms) if p99_ms >= seen.lease_ms => found(
            format!("lease {}, P99 {}: {evidence}", span(seen.lease_ms), span(p99_ms)),
            longer_lease(p99_ms),
        ),
        p99_ms => found(
            format!(
                "{evidence}; the lease is {}{}",
                span(seen.lease_ms),
                p99_ms.map_or_else(String::new, |ms| format!(", P99 {}", span(ms)))
            ),
            "find out why consumers end or hang without a settle: their logs, their memory limit, how they are stopped",
        ),
    }
}

/// The same with nothing but the store's counters since it was opened.
fn leases_expire_by_counters(facts: &Facts) -> RuleResult {
    let totals = &facts.stats.as_ref()?.totals;
    if totals.expired < EXPIRED_MIN || per_mille(totals.expired, totals.delivered) < EXPIRED_PER_MILLE {
        return None;
    }
    found(
        format!(
            "{} of deliveries expired ({} of {}) and {} settles came too late; the lease is {}",
            percent(totals.expired, totals.delivered),
            totals.expired,
            totals.delivered,
            totals.stale,
            span(facts.queue.lease_ms)
        ),
        "set a lease above the handler's time, `auto`, or a heartbeat; or find out why consumers die",
    )
}

fn lease_below_p99(facts: &Facts) -> RuleResult {
    lease_below_handler(facts).or_else(|| lease_below_work(facts))
}

/// A worker that starts: its heartbeats end before the latest deliveries of the queue did.
fn lease_below_handler(facts: &Facts) -> RuleResult {
    let handler = facts.handler.as_ref().filter(|_| facts.redelivers())?;
    let (HandlerLease::Fixed { lease_ms }, Some(p99_ms)) = (handler.lease, handler.p99_ms) else {
        return None;
    };
    let held_ms = lease_ms.max(handler.heartbeat_ms_max.unwrap_or(0));
    if held_ms >= p99_ms {
        return None;
    }
    found(
        format!(
            "a delivery is held for {} at most, and the latest ones took {} (P99): the slowest runs are delivered again while \
             they run",
            span(held_ms),
            span(p99_ms)
        ),
        format!("set a lease above {}, `auto`, or a heartbeat that lasts as long", span(p99_ms)),
    )
}

/// Work outlives its lease, and few of its messages were delivered again so far because no consumer asked at that moment. Once
/// many were, `leases-expire` reports the same cause with better evidence.
fn lease_below_work(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|seen| facts.redelivers() && !seen.repeats_slow_work())?;
    let p99_ms = seen.p99_ms().filter(|p99_ms| *p99_ms >= seen.lease_ms)?;
    if seen.overran < OVERRAN_MIN || per_mille(seen.overran, seen.settled) < OVERRAN_PER_MILLE {
        return None;
    }
    found(
        format!(
            "lease {}, P99 {}: {} of {} settles in {} came after the end of their lease, {} of them too late; each could have \
             been delivered again while it was worked on",
            span(seen.lease_ms),
            span(p99_ms),
            seen.overran,
            seen.settled,
            span(seen.window_ms),
            seen.late.min(seen.overran),
        ),
        longer_lease(p99_ms),
    )
}

fn scaling_loses_leases(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|seen| facts.redelivers() && seen.scaling())?;
    found(
        format!(
            "{} leases ran out in {} while {} consumers started and {} stopped: consumers are stopped in the middle of \
             their work",
            seen.expired,
            span(seen.window_ms),
            seen.consumers_started,
            seen.consumers_stopped
        ),
        "stop consumers with SIGTERM and give them time to drain (Kubernetes: terminationGracePeriodSeconds above --drain), \
         and scale in more slowly",
    )
}

fn lease_far_above_work(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|_| facts.redelivers())?;
    let p99_ms = seen.p99_ms()?;
    let long = seen.lease_ms >= LONG_MS_MIN && seen.lease_ms >= p99_ms.saturating_mul(LONG_TIMES);
    // A long lease costs nothing until a consumer dies.
    if !long || seen.expired == 0 {
        return None;
    }
    let lease_ms = suggested_lease_ms(p99_ms.saturating_mul(4)).max(30_000);
    found(
        format!(
            "lease {}, P99 {}: after the end of a consumer {} messages waited for their lease before they were delivered \
             again",
            span(seen.lease_ms),
            span(p99_ms),
            seen.expired
        ),
        format!(
            "set the lease to {} (`hapax queue set QUEUE --lease {}s`)",
            span(lease_ms),
            lease_ms / 1_000
        ),
    )
}

fn poison_messages(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|seen| seen.poison > 0)?;
    let example = seen.poison_example.as_deref().unwrap_or_default();
    let limit = match facts.queue.retry.limit() {
        Some(max) => format!("lower retry.max_attempts (now {max})"),
        None => "set retry.max_attempts and a dead-letter queue".to_owned(),
    };
    found(
        format!(
            "{} messages were delivered {POISON_DELIVERIES} times or more and are still in the queue, for example {example}",
            seen.poison
        ),
        format!(
            "`hapax why QUEUE {example}` shows its errors; mend the handler or reject such messages, and {limit}"
        ),
    )
}

fn messages_die(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref()?;
    // Behind a load balancer messages die through another process than the one that delivered them.
    let delivered = seen.delivered.max(seen.dead);
    if seen.dead < DEAD_MIN || per_mille(seen.dead, delivered) < DEAD_PER_MILLE {
        return None;
    }
    let common = seen.dead_error.as_ref().map_or_else(
        || "without an error of their consumers: their leases ran out".to_owned(),
        |common| format!("{} of them with: {}", common.count, common.error),
    );
    found(
        format!(
            "{} messages died in {} ({} of deliveries), {common}",
            seen.dead,
            span(seen.window_ms),
            percent(seen.dead, delivered)
        ),
        "`hapax dead list` shows them; mend what that error says, then `hapax dead redrive`",
    )
}

fn groups_halted(facts: &Facts) -> RuleResult {
    let halted = facts.stats.map(|stats| stats.halted).filter(|halted| *halted > 0)?;
    found(
        format!(
            "{halted} messages wait in groups that are halted because an earlier message of the group died"
        ),
        "`hapax parked list` shows the groups; decide about the dead letter, then `hapax parked release QUEUE --group GROUP`",
    )
}

fn keys_collide(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|_| facts.records())?;
    if seen.conflicts < CONFLICTS_MIN || per_mille(seen.conflicts, seen.delivered) < CONFLICTS_PER_MILLE {
        return None;
    }
    found(
        format!(
            "{} claims met their key in progress ({} of deliveries in {}): many messages have the same key",
            seen.conflicts,
            percent(seen.conflicts, seen.delivered),
            span(seen.window_ms)
        ),
        "if they are copies of one message, find the producer that sends twice; if they are different effects, give each its \
         own key",
    )
}

fn ledger_never_hit(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|_| facts.tier == Tier::EffectivelyOnce)?;
    if seen.granted < GRANTED_MIN || seen.replayed + seen.conflicts > 0 {
        return None;
    }
    found(
        format!(
            "{} claims were made, and not one was a duplicate: the ledger has cost its writes and stopped nothing",
            seen.granted
        ),
        "that is the price of insurance; where the effect is idempotent by itself, at-least-once is enough",
    )
}

fn hot_group(facts: &Facts) -> RuleResult {
    let seen = facts.observed.as_ref().filter(|_| facts.queue.is_fifo())?;
    let (hot, ready) = (seen.hot_group.as_deref()?, facts.stats.as_ref()?.ready);
    if seen.hot_group_delivered < HOT_DELIVERED_MIN
        || seen.hot_group_delivered.saturating_mul(2) < seen.delivered
        || ready < seen.hot_group_delivered
    {
        return None;
    }
    found(
        format!(
            "group {hot} has {} of {} deliveries in {} while {} messages wait: one group is worked on by one consumer at a time",
            seen.hot_group_delivered,
            seen.delivered,
            span(seen.window_ms),
            ready
        ),
        "use a finer group where order is not needed across the whole of it; more consumers do not help",
    )
}

fn queue_grows(facts: &Facts) -> RuleResult {
    let stats = facts.stats.as_ref()?;
    let (sent, acked) = (stats.totals.sent, stats.totals.acked);
    if stats.ready < READY_MIN || sent < SENT_MIN || acked.saturating_mul(2) > sent {
        return None;
    }
    found(
        format!("{} messages wait; of {sent} that were sent, {acked} are done: the queue grows", stats.ready),
        "add consumers, or set a quota so that producers are refused before the store is full",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggested_lease_is_round_and_has_room() {
        for (p99_ms, lease_ms) in
            [(100, 2_000), (800, 2_000), (3_000, 5_000), (41_000, 75_000), (600_000, 960_000)]
        {
            assert_eq!(suggested_lease_ms(p99_ms), lease_ms, "{p99_ms}");
        }
    }
}

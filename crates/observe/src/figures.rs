//! What this process has seen of one queue: counters since it started, and a window of the latest minutes for advice.

use std::net::SocketAddr;

use foldhash::HashMap;
use hapax_core::policy::tier::{CommonError, ObservedQueue};

/// Length of the window that advice is about.
pub const WINDOW_MS: u64 = 10 * MINUTE_MS;
const MINUTE_MS: u64 = 60_000;
const MINUTES: usize = 10;
/// Maximum number of consumers that are told apart in one queue; further ones are not counted by name.
const NAMES_MAX: usize = 1_000;
/// The same for groups and for errors, of each minute. What is frequent comes among the first.
const MINUTE_NAMES_MAX: usize = 200;
/// From this number of settles on, older ones count half.
const HELD_MAX: u32 = 2_048;

hapax_core::metrics! {
    /// What this process has seen of a queue's deliveries since it started.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct DeliveryFigures is "hapax_delivery", kept by Process, labels ["queue"];
    plain {}
    nested {}
    /// Deliveries of messages that had been delivered before.
    counter repeated,
    /// Of these, those after a lease that ran out.
    counter repeated_after_expiry,
    /// Of these, those after the consumer gave the message back.
    counter repeated_after_return,
    /// Of these, those whose earlier delivery was made by another process or before this one started.
    counter repeated_cause_unknown,
    /// Settles and extensions refused because the lease had passed on or the message was gone.
    counter late,
    /// Settles with less than a fifth of the lease left.
    counter near_expiry,
    /// Claims granted for deliveries: the handler runs.
    counter granted,
    /// Claims granted over a lapsed holder.
    counter takeovers,
    /// Claims of deliveries that got a recorded outcome: the handler does not run.
    counter replayed,
    /// Claims of deliveries that met their key in progress.
    counter conflicts,
    /// Claims of deliveries whose key was used before for another content.
    counter mismatches,
    /// Claims of deliveries that were left because their key is in doubt.
    counter in_doubt,
    /// Messages that a settle sent to the dead letters.
    counter died,
    /// Messages that a settle set aside.
    counter parked,
    /// Consumers that were heard of for the first time.
    counter consumers_started,
    /// Leases that ran out within a minute of the start of a consumer, or whose consumer was not heard of since.
    counter expired_near_scaling,
    /// Median time from delivery to settle, of the latest settles.
    gauge held_median_ms("held_median_seconds", Milliseconds): Option<u64>,
    /// 99th percentile of the time from delivery to settle, of the latest settles.
    gauge held_p99_ms("held_ninety_ninth_seconds", Milliseconds): Option<u64>,
    /// The lease of the latest delivery.
    gauge lease_ms("lease_seconds", Milliseconds): Option<u64>,
}

/// Counts of one minute.
#[derive(Debug, Clone, Default)]
struct Minute {
    at: u64,
    delivered: u64,
    expired: u64,
    late: u64,
    settled: u64,
    overran: u64,
    conflicts: u64,
    dead: u64,
    started: u64,
    errors: HashMap<String, u64>,
    groups: HashMap<String, u64>,
}

/// What is kept about one queue.
#[derive(Debug, Default)]
pub(crate) struct QueueFigures {
    pub figures: DeliveryFigures,
    held: Histogram,
    minutes: [Minute; MINUTES],
    consumers: HashMap<String, Consumer>,
    first_ms: Option<u64>,
}

/// A consumer of a queue, by its name.
#[derive(Debug)]
struct Consumer {
    /// When it was first and last heard of.
    first_ms: u64,
    last_ms: u64,
    /// It is taken for a consumer. A connection that nobody named is one once it has received twice: a client that makes one for each
    /// call would be a new consumer with each.
    counts: bool,
}

impl QueueFigures {
    fn minute(&mut self, now_ms: u64) -> &mut Minute {
        self.first_ms.get_or_insert(now_ms);
        let at = now_ms / MINUTE_MS;
        let minute = &mut self.minutes[(at % MINUTES as u64) as usize];
        if minute.at != at {
            *minute = Minute { at, ..Minute::default() };
        }
        minute
    }

    /// A consumer asks for messages.
    pub fn asked(&mut self, now_ms: u64, consumer: &str) {
        let Some(known) = self.consumers.get_mut(consumer) else { return self.heard(now_ms, consumer) };
        known.last_ms = now_ms;
        if !known.counts {
            known.counts = true;
            self.started(now_ms);
        }
    }

    fn started(&mut self, now_ms: u64) {
        self.figures.consumers_started += 1;
        self.minute(now_ms).started += 1;
    }

    /// A consumer is heard of.
    pub fn heard(&mut self, now_ms: u64, consumer: &str) {
        if let Some(known) = self.consumers.get_mut(consumer) {
            known.last_ms = now_ms;
            return;
        }
        if self.consumers.len() >= NAMES_MAX {
            let kept_ms = |known: &Consumer| if known.counts { WINDOW_MS } else { MINUTE_MS };
            self.consumers.retain(|_, known| now_ms.saturating_sub(known.last_ms) < kept_ms(known));
        }
        // Of further ones it is not known whether they are new.
        if self.consumers.len() >= NAMES_MAX {
            return;
        }
        let counts = consumer.parse::<SocketAddr>().is_err();
        self.consumers.insert(consumer.to_owned(), Consumer { first_ms: now_ms, last_ms: now_ms, counts });
        if counts {
            self.started(now_ms);
        }
    }

    pub fn delivered(&mut self, now_ms: u64, lease_ms: u64, group: Option<&str>) {
        self.figures.lease_ms = Some(lease_ms);
        let minute = self.minute(now_ms);
        minute.delivered += 1;
        if let Some(group) = group {
            count(&mut minute.groups, group);
        }
    }

    /// The lease of a delivery to `consumer` ran out.
    pub fn expired(&mut self, now_ms: u64, delivered_ms: u64, consumer: Option<&str>) {
        self.figures.repeated_after_expiry += 1;
        self.minute(now_ms).expired += 1;
        let silent = |known: &Consumer| known.counts && known.last_ms <= delivered_ms;
        let gone = consumer.and_then(|name| self.consumers.get(name)).is_some_and(silent);
        let joined = |known: &Consumer| known.counts && now_ms.saturating_sub(known.first_ms) < MINUTE_MS;
        // The first consumers of a process are no scaling.
        let young = self.first_ms.is_none_or(|first_ms| now_ms.saturating_sub(first_ms) < MINUTE_MS);
        if gone || !young && self.consumers.values().any(joined) {
            self.figures.expired_near_scaling += 1;
        }
    }

    pub fn late(&mut self, now_ms: u64) {
        self.figures.late += 1;
        self.minute(now_ms).late += 1;
    }

    pub fn conflict(&mut self, now_ms: u64) {
        self.figures.conflicts += 1;
        self.minute(now_ms).conflicts += 1;
    }

    pub fn died(&mut self, now_ms: u64, error: Option<&str>) {
        self.figures.died += 1;
        let minute = self.minute(now_ms);
        minute.dead += 1;
        if let Some(error) = error {
            let line = error.lines().next().unwrap_or_default();
            count(&mut minute.errors, hapax_core::policy::truncate(line, 200));
        }
    }

    /// A delivery was held this long until its settle, or until it was refused; `overran`: longer than its lease.
    pub fn held(&mut self, now_ms: u64, held_ms: u64, overran: bool) {
        self.held.add(held_ms);
        let minute = self.minute(now_ms);
        minute.settled += 1;
        minute.overran += u64::from(overran);
    }

    /// Forgets what the window holds, because the queue's policy has changed: advice is about the new one.
    pub fn policy_changed(&mut self) {
        self.minutes = Default::default();
        self.held = Histogram::default();
        self.first_ms = None;
    }

    /// The counters, with the gauges as they are now.
    pub fn read(&self) -> DeliveryFigures {
        DeliveryFigures {
            held_median_ms: self.held.quantile(50),
            held_p99_ms: self.held.quantile(99),
            ..self.figures
        }
    }

    /// The latest minutes.
    pub fn window(&self, now_ms: u64) -> ObservedQueue {
        let now = now_ms / MINUTE_MS;
        let recent = || self.minutes.iter().filter(move |minute| minute.at + MINUTES as u64 > now);
        let lease_ms = self.figures.lease_ms.unwrap_or_default();
        let age_ms = self.first_ms.map_or(0, |first_ms| now_ms.saturating_sub(first_ms));
        let mut seen = ObservedQueue {
            window_ms: WINDOW_MS.min(age_ms.max(1_000)) / 1_000 * 1_000,
            held_p50_ms: self.held.quantile(50),
            held_p99_ms: self.held.quantile(99),
            held_count: self.held.count.into(),
            lease_ms,
            granted: self.figures.granted,
            replayed: self.figures.replayed,
            ..ObservedQueue::default()
        };
        let (mut errors, mut groups) = (HashMap::<&str, u64>::default(), HashMap::<&str, u64>::default());
        for minute in recent() {
            seen.delivered += minute.delivered;
            seen.expired += minute.expired;
            seen.late += minute.late;
            seen.settled += minute.settled;
            seen.overran += minute.overran;
            seen.conflicts += minute.conflicts;
            seen.dead += minute.dead;
            seen.consumers_started += minute.started;
            for (error, count) in &minute.errors {
                *errors.entry(error).or_default() += count;
            }
            for (group, count) in &minute.groups {
                *groups.entry(group).or_default() += count;
            }
        }
        let silent_ms = (3 * lease_ms).max(MINUTE_MS / 2);
        let stopped = |known: &&Consumer| {
            let silence_ms = now_ms.saturating_sub(known.last_ms);
            silence_ms > silent_ms && silence_ms < WINDOW_MS
        };
        seen.consumers_stopped =
            self.consumers.values().filter(|known| known.counts).filter(stopped).count() as u64;
        // Without its own start the first consumer is no change.
        seen.consumers_started = seen.consumers_started.saturating_sub(1);
        seen.dead_error = most(&errors).map(|(error, count)| CommonError { error: error.to_owned(), count });
        if let Some((group, count)) = most(&groups) {
            (seen.hot_group, seen.hot_group_delivered) = (Some(group.to_owned()), count);
        }
        seen
    }
}

/// The name with the highest count; of equals, the first.
fn most<'a>(counts: &HashMap<&'a str, u64>) -> Option<(&'a str, u64)> {
    let by_count = |a: &(&&str, &u64), b: &(&&str, &u64)| a.1.cmp(b.1).then(b.0.cmp(a.0));
    counts.iter().max_by(by_count).map(|(name, count)| (*name, *count))
}

fn count(names: &mut HashMap<String, u64>, name: &str) {
    if let Some(count) = names.get_mut(name) {
        *count += 1;
    } else if names.len() < MINUTE_NAMES_MAX {
        names.insert(name.to_owned(), 1);
    }
}

/// Counts of durations in buckets whose limits grow by about 19%.
#[derive(Debug, Default)]
struct Histogram {
    count: u32,
    buckets: Vec<u32>,
}

impl Histogram {
    const BUCKETS: usize = 4 * 40;

    /// Four buckets for each doubling: the two bits below the highest one.
    fn bucket(ms: u64) -> usize {
        let ms = ms.max(4);
        let high = ms.ilog2();
        let below = (ms >> (high - 2)) & 3;
        (((high - 2) * 4) as usize + below as usize).min(Self::BUCKETS - 1)
    }

    /// The upper limit of a bucket.
    fn limit_ms(bucket: usize) -> u64 {
        let (high, below) = (bucket / 4, bucket % 4);
        (5 + below as u64) << high
    }

    fn add(&mut self, ms: u64) {
        if self.buckets.is_empty() {
            self.buckets.resize(Self::BUCKETS, 0);
        }
        if self.count >= HELD_MAX {
            self.buckets.iter_mut().for_each(|count| *count /= 2);
            self.count = self.buckets.iter().sum();
        }
        self.buckets[Self::bucket(ms)] += 1;
        self.count += 1;
    }

    fn quantile(&self, percent: u32) -> Option<u64> {
        let wanted = (u64::from(self.count) * u64::from(percent)).div_ceil(100).max(1);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return Some(Self::limit_ms(bucket));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_at_most_a_quarter_too_high_and_never_too_low() {
        let mut held = Histogram::default();
        assert_eq!(held.quantile(99), None);
        for ms in 1..=1_000 {
            held.add(ms);
        }
        for (percent, exact) in [(50, 500), (99, 990)] {
            let found = held.quantile(percent).unwrap();
            assert!(found >= exact && found <= exact * 5 / 4 + 1, "{percent}: {found}");
        }
        for ms in [0, 5, 7, 1_000, 43_200_000] {
            let limit_ms = Histogram::limit_ms(Histogram::bucket(ms));
            assert!(limit_ms > ms && limit_ms <= ms.max(4) * 5 / 4 + 1, "{ms}: {limit_ms}");
        }
    }

    #[test]
    fn the_latest_settles_count_most() {
        let mut held = Histogram::default();
        (0..10 * HELD_MAX).for_each(|_| held.add(60_000));
        (0..10 * HELD_MAX).for_each(|_| held.add(10));
        assert!(held.quantile(99).unwrap() < 20);
        assert!(held.count <= HELD_MAX);
    }

    #[test]
    fn what_is_older_than_the_window_is_forgotten() {
        let mut queue = QueueFigures::default();
        queue.delivered(0, 1_000, Some("a"));
        queue.died(0, Some("no such card\nat line 7"));
        let seen = queue.window(WINDOW_MS - 1);
        assert_eq!((seen.delivered, seen.dead, seen.hot_group_delivered), (1, 1, 1));
        assert_eq!(seen.dead_error.unwrap().error, "no such card");
        assert_eq!(queue.window(WINDOW_MS).delivered, 0);
        assert_eq!(queue.figures.died, 1, "the counter stays");
        queue.delivered(WINDOW_MS, 1_000, None);
        assert_eq!(queue.window(WINDOW_MS).delivered, 1, "the place of the first minute is used again");
    }

    #[test]
    fn consumers_beyond_the_names_that_are_kept_are_not_counted_at_every_call() {
        let mut queue = QueueFigures::default();
        for now_ms in [0, 1_000, 2_000] {
            (0..NAMES_MAX + 200).for_each(|number| queue.heard(now_ms, &number.to_string()));
        }
        assert_eq!(queue.figures.consumers_started, NAMES_MAX as u64);
    }

    #[test]
    fn minutes_of_the_window_are_added_up_and_the_latest_lease_counts() {
        let mut queue = QueueFigures::default();
        for (minute, times) in [(0, 3), (1, 2)] {
            for _ in 0..times {
                queue.delivered(minute * MINUTE_MS, 1_000 + minute, Some("g"));
                queue.died(minute * MINUTE_MS, Some("no"));
            }
        }
        queue.held(MINUTE_MS, 10, false);
        queue.held(MINUTE_MS, 10, false);
        queue.held(MINUTE_MS, 5_000, true);
        queue.figures.replayed = 7;
        let seen = queue.window(MINUTE_MS);
        assert_eq!(seen.dead_error.clone().unwrap().count, 5, "{seen:?}");
        assert_eq!((seen.hot_group_delivered, seen.delivered, seen.lease_ms), (5, 5, 1_001), "{seen:?}");
        assert_eq!((seen.settled, seen.overran, seen.replayed), (3, 1, 7), "{seen:?}");
        assert!(seen.held_p50_ms < Some(20) && seen.held_p99_ms >= Some(5_000), "{seen:?}");

        queue.policy_changed();
        queue.delivered(2 * MINUTE_MS, 1_000, None);
        let seen = queue.window(2 * MINUTE_MS + 5_000);
        assert_eq!((seen.window_ms, seen.delivered, seen.dead, seen.settled), (5_000, 1, 0, 0), "{seen:?}");
        assert_eq!((seen.held_p50_ms, seen.held_p99_ms, seen.held_count), (None, None, 0), "{seen:?}");
    }

    #[test]
    fn a_consumer_has_stopped_after_three_leases_and_half_a_minute_for_as_long_as_the_window() {
        let stopped = |lease_ms: u64, silence_ms: u64| {
            let mut queue = QueueFigures::default();
            queue.asked(0, "pod");
            queue.delivered(0, lease_ms, None);
            queue.window(silence_ms).consumers_stopped
        };
        assert_eq!((stopped(1_000, 30_000), stopped(1_000, 30_001)), (0, 1));
        assert_eq!((stopped(20_000, 60_000), stopped(20_000, 60_001)), (0, 1));
        assert_eq!((stopped(1_000, WINDOW_MS - 1), stopped(1_000, WINDOW_MS)), (1, 0));
    }

    #[test]
    fn leases_run_out_near_scaling_if_their_consumer_is_gone_or_another_has_just_come() {
        let near = |first_ms: u64, joined_ms: u64, heard_ms: u64| {
            let mut queue = QueueFigures::default();
            queue.asked(first_ms, "pod-1");
            queue.delivered(200_000, 1_000, None);
            queue.asked(joined_ms, "pod-2");
            queue.asked(heard_ms, "pod-1");
            queue.expired(202_000, 200_000, Some("pod-1"));
            queue.figures.expired_near_scaling
        };
        assert_eq!(near(0, 0, 201_000), 0, "both are old and there");
        assert_eq!(near(0, 0, 200_000), 1, "its consumer is gone");
        assert_eq!(near(0, 190_000, 201_000), 1, "another has come");
        assert_eq!(near(190_000, 190_000, 201_000), 0, "the first consumers are no scaling");
    }

    #[test]
    fn a_connection_for_each_call_is_no_new_consumer() {
        let mut queue = QueueFigures::default();
        for port in 1_000..1_100_u64 {
            let name = format!("10.0.0.7:{port}");
            let now_ms = port * 1_000;
            queue.asked(now_ms, &name);
            queue.delivered(now_ms, 500, None);
            queue.expired(now_ms + 600, now_ms, Some(&name));
        }
        let seen = queue.window(1_200_000);
        assert_eq!((seen.consumers_started, seen.consumers_stopped, seen.expired), (0, 0, 100), "{seen:?}");
        assert_eq!((queue.figures.consumers_started, queue.figures.expired_near_scaling), (0, 0));
        // Connections that are used again are consumers, and so is what has a name.
        for name in ["10.0.0.7:2000", "[::1]:2000"] {
            for now_ms in [1_200_000, 1_200_100, 1_200_200] {
                queue.asked(now_ms, name);
            }
        }
        queue.asked(1_200_000, "pod-1");
        assert_eq!(queue.window(1_200_300).consumers_started, 2, "three, but for the first");
        assert_eq!(queue.window(1_300_000).consumers_stopped, 3);
    }

    #[test]
    fn names_of_a_minute_are_bounded_and_a_hot_group_is_found() {
        let mut queue = QueueFigures::default();
        for number in 0..10_000 {
            let cold = number.to_string();
            queue.delivered(0, 1_000, Some(if number % 2 == 0 { "hot" } else { &cold }));
            queue.died(0, Some(&cold));
        }
        let minute = &queue.minutes[0];
        assert_eq!((minute.groups.len(), minute.errors.len()), (MINUTE_NAMES_MAX, MINUTE_NAMES_MAX));
        let seen = queue.window(0);
        assert_eq!((seen.hot_group.as_deref(), seen.hot_group_delivered), (Some("hot"), 5_000));
    }
}

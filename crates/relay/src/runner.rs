//! The rounds of a relay.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::StoreError;
use hapax_core::mutant;
use hapax_core::outbox::{
    Advance, BucketLease, HeldMessage, OutboxMessage, OutboxStore, Polled, PublishAnswer, Publisher,
    SinkDescription, SourceBucket,
};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::options::RelayOptions;
use crate::pace::Pace;
use crate::plan::{Round, Step, behind};
use crate::watch::{RelayWatch, Shared};

/// How often a relay asks for its share, at least; a share of the lease if that is shorter.
const TEND: Duration = Duration::from_secs(2);
/// How often the figures of the outbox are read.
const OBSERVE: Duration = Duration::from_secs(5);
/// How long a shutdown waits for the sink.
const DRAIN: Duration = Duration::from_secs(20);
/// Messages of a bucket that are read at once, at least.
const ROWS_MIN: usize = 8;

/// A relay of one route.
pub struct Relay {
    shared: Arc<Shared>,
}

impl Relay {
    /// A relay from an outbox to a sink.
    pub fn new(store: Arc<dyn OutboxStore>, sink: Arc<dyn Publisher>, options: RelayOptions) -> Self {
        Self { shared: Arc::new(Shared::new(store, sink, options)) }
    }

    /// Counts and readiness.
    pub fn watch(&self) -> RelayWatch {
        RelayWatch::new(self.shared.clone())
    }

    /// What its sink says about itself.
    pub fn sink(&self) -> SinkDescription {
        self.shared.description.clone()
    }

    /// Publishes until `shutdown` resolves; then finishes what the sink is working on, and gives its buckets to other
    /// relays. Failures of the sink and of the database are waited out; only a route that cannot be registered is an error.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), StoreError> {
        let shared = self.shared;
        let RelayOptions { route, topics, relay, .. } = &shared.options;
        shared.store.register(route, topics, &shared.description).await?;
        for warning in &shared.description.warnings {
            tracing::warn!(route, sink = shared.description.name, "{warning}");
        }
        let (stop, stopped) = watch::channel(false);
        let mut background = JoinSet::new();
        background.spawn(tend(shared.clone()));
        background.spawn(rotate(shared.clone()));
        background.spawn(observe(shared.clone()));
        let mut working = JoinSet::new();
        working.spawn(crate::held::retry(shared.clone(), stopped.clone()));
        let rounds =
            Rounds { shared: shared.clone(), stopped, read: BTreeMap::new(), open: None, failures: 0 };
        working.spawn(rounds.run());
        shutdown.await;
        // Its receivers live as long as the tasks.
        let _ = stop.send(true);
        let drained = tokio::time::timeout(DRAIN, async { while working.join_next().await.is_some() {} });
        if drained.await.is_err() {
            tracing::warn!(
                route,
                "the sink did not answer in time; what it was given may be published again"
            );
            working.shutdown().await;
        }
        background.shutdown().await;
        if let Err(error) = shared.store.give_back(route, relay, &[]).await {
            tracing::warn!(route, %error, "the buckets were not given back; other relays take them when the lease ends");
        }
        Ok(())
    }
}

/// Renews the lease and takes this relay's share of the buckets.
async fn tend(shared: Arc<Shared>) {
    let RelayOptions { route, relay, lease, .. } = &shared.options;
    loop {
        let tending = shared.tending.lock().await;
        let asked = Instant::now();
        match shared.store.tend(route, relay, lease.as_millis() as u64).await {
            Ok(tended) => {
                let lost = shared.ownership.renewed(&tended, asked, *lease);
                shared.counts.lost_buckets.add_many(lost);
            }
            Err(error) => shared.store_failed("renew the lease", &error),
        }
        drop(tending);
        tokio::time::sleep((*lease / 3).min(TEND)).await;
    }
}

/// Reads what waits for the route, for metrics.
async fn observe(shared: Arc<Shared>) {
    loop {
        match shared.store.status().await {
            Ok(routes) => {
                shared.observed(routes.into_iter().find(|status| status.route == shared.options.route));
            }
            Err(error) => {
                tracing::debug!(route = shared.options.route, %error, "the outbox's figures were not read");
            }
        }
        tokio::time::sleep(OBSERVE).await;
    }
}

/// Cleans up what is published.
async fn rotate(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(shared.options.rotate).await;
        match shared.store.rotate().await {
            Ok(rotated) => {
                shared.counts.rotated.add_many(rotated.emptied as usize);
                if rotated.unrouted > 0 {
                    let tables = rotated.unrouted;
                    tracing::warn!(tables, "the outbox has messages that no route takes; they are kept");
                }
            }
            Err(error) => shared.store_failed("clean up", &error),
        }
    }
}

/// Calls the sink with several batches at the same time. Returns what it answered for each message.
async fn call(
    shared: &Arc<Shared>,
    round: &Round,
    calls: Vec<Vec<usize>>,
    read: &BTreeMap<u16, Read>,
) -> (Vec<usize>, Vec<PublishAnswer>) {
    let mut running = JoinSet::new();
    for indices in calls {
        let batch: Vec<OutboxMessage> =
            indices.iter().map(|&index| round.items[index].message.clone()).collect();
        let buckets: BTreeSet<u16> = batch.iter().map(|message| message.bucket).collect();
        let buckets =
            buckets.into_iter().filter_map(|bucket| read.get(&bucket).map(|read| read.source(bucket)));
        let buckets: Vec<SourceBucket> = buckets.collect();
        let shared = shared.clone();
        running.spawn(async move {
            let answers = shared.sink.publish_from(&shared.source(&buckets, false), &batch).await;
            assert_eq!(answers.len(), batch.len(), "a sink answers for each message");
            (indices, answers)
        });
    }
    let (mut indices, mut answers) = (Vec::new(), Vec::new());
    // It is not cancelled: the tasks end with this one.
    while let Some(done) = running.join_next().await {
        let (of, given) = done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        indices.extend(of);
        answers.extend(given);
    }
    (indices, answers)
}

/// A bucket as this relay reads it.
#[derive(Debug, Clone, Copy)]
struct Read {
    fence: u64,
    position: u64,
}

impl Read {
    fn source(self, bucket: u16) -> SourceBucket {
        let lease = BucketLease { bucket, fence: self.fence };
        SourceBucket { lease, recorded: Some(self.position) }
    }
}

struct Rounds {
    shared: Arc<Shared>,
    stopped: watch::Receiver<bool>,
    read: BTreeMap<u16, Read>,
    /// The round that is not over. It is kept through failures of the database, so that nothing is published twice.
    open: Option<Open>,
    /// Failures in a row, of the sink or of the database.
    failures: u32,
}

struct Open {
    round: Round,
    /// What the sink did not accept, and is not set aside yet.
    hold: Vec<HeldMessage>,
}

impl Rounds {
    async fn run(mut self) {
        let mut pace = Pace::new(self.shared.options.idle_poll);
        while !*self.stopped.borrow() {
            match self.step().await {
                Ok(true) => pace.found(),
                Ok(false) => {
                    let shared = self.shared.clone();
                    self.unless_stopped(shared.store.changed(pace.idle())).await;
                }
                Err(error) => {
                    self.shared.store_failed("publish", &error);
                    self.back_off().await;
                }
            }
        }
        // What was published is recorded, so that the next relay does not repeat it.
        if let Some(open) = self.open.take()
            && let Err(error) = self.record(open.round.positions()).await
        {
            self.shared.store_failed("record the last positions", &error);
        }
    }

    async fn unless_stopped(&mut self, wait: impl Future<Output = ()>) {
        tokio::select! {
            () = wait => {}
            // The sender lives as long as this task.
            _ = self.stopped.wait_for(|stopped| *stopped) => {}
        }
    }

    async fn back_off(&mut self) {
        self.failures = self.failures.saturating_add(1);
        let delay = self.shared.outage_delay(self.failures);
        self.unless_stopped(tokio::time::sleep(delay)).await;
    }

    /// Continues the open round, or begins one. Returns whether there was something to do.
    async fn step(&mut self) -> Result<bool, StoreError> {
        let leases = self.leases().await?;
        if self.open.is_none() {
            self.open = self.begin(&leases).await?;
        }
        let Some(mut open) = self.open.take() else { return Ok(false) };
        let result = self.publish(&mut open).await;
        // Everything that failed is tried again with what is still open.
        match result {
            Ok(true) => Ok(true),
            Ok(false) => {
                self.open = Some(open);
                self.back_off().await;
                Ok(true)
            }
            Err(error) => {
                self.open = Some(open);
                Err(error)
            }
        }
    }

    /// The buckets that this relay holds now; loads the positions of new ones.
    async fn leases(&mut self) -> Result<Vec<BucketLease>, StoreError> {
        let shared = self.shared.clone();
        let RelayOptions { route, relay, .. } = &shared.options;
        if self.open.is_none() {
            let _tending = shared.tending.lock().await;
            let surplus = shared.ownership.take_surplus();
            if !surplus.is_empty() {
                shared.store.give_back(route, relay, &surplus).await?;
            }
        }
        let leases = shared.ownership.leases();
        if shared.ownership.has_lapsed() {
            // What is open may still be ours: that is known when the database answers.
            return Ok(leases);
        }
        let fences: BTreeMap<u16, u64> = leases.iter().map(|lease| (lease.bucket, lease.fence)).collect();
        self.read.retain(|bucket, read| fences.get(bucket) == Some(&read.fence));
        let new: Vec<u16> = fences.keys().filter(|bucket| !self.read.contains_key(bucket)).copied().collect();
        if let Some(open) = &mut self.open {
            // A bucket that was lost and came back is read again, from its recorded position.
            let ours: BTreeSet<u16> = self.read.keys().copied().collect();
            let lost = open.round.positions().into_keys().filter(|bucket| !ours.contains(bucket)).collect();
            open.round.drop_buckets(&lost);
            open.hold.retain(|held| !lost.contains(&held.message.bucket));
        }
        if !new.is_empty() {
            let positions = shared.store.positions(route, &new).await?;
            let keys = shared.store.held_keys(route, &new).await?;
            let mut held = shared.held.lock().await;
            held.retain(|bucket, _| fences.contains_key(bucket) && !new.contains(bucket));
            for (bucket, key) in keys {
                held.entry(bucket).or_default().insert(key);
            }
            for (bucket, position) in positions {
                self.read.insert(bucket, Read { fence: fences[&bucket], position });
            }
        }
        Ok(leases)
    }

    /// Reads the messages of a round; `None`: there is nothing to do.
    async fn begin(&mut self, leases: &[BucketLease]) -> Result<Option<Open>, StoreError> {
        let shared = &self.shared;
        let options = &shared.options;
        if leases.is_empty() {
            // Other relays have all buckets, or the lease has lapsed.
            if !shared.ownership.has_lapsed() {
                shared.is_idle();
            }
            return Ok(None);
        }
        let held_keys: usize = shared.held.lock().await.values().map(std::collections::HashSet::len).sum();
        if held_keys > options.held_keys_max {
            shared.problem(&format!(
                "{held_keys} keys are set aside; nothing is read until the sink accepts some"
            ));
            return Ok(None);
        }
        let read: Vec<(u16, u64)> = self.read.iter().map(|(&bucket, read)| (bucket, read.position)).collect();
        let Polled { ranges, rewound } = shared.store.poll(&options.route, &read).await?;
        if !rewound.is_empty() {
            let (route, buckets) = (&options.route, rewound.len());
            tracing::warn!(
                route,
                buckets,
                "the outbox was restored to an earlier state; its positions are read again"
            );
            self.read.retain(|bucket, _| !rewound.contains(bucket));
            return Ok(None);
        }
        if ranges.is_empty() {
            shared.is_idle();
            return Ok(None);
        }
        let rows = (options.batch_max / ranges.len()).max(ROWS_MIN);
        let bytes = (options.batch_bytes_max / ranges.len()).max(1);
        let messages = shared.store.read(&ranges, rows, bytes).await?;
        let keys = shared.held.lock().await;
        let delays = shared.description.delays;
        let round = Round::new(messages, &ranges, (rows, bytes), &options.topics, &keys, delays);
        let waits = round.items.iter().filter(|item| item.step == Step::Hold);
        let hold = waits.map(|item| behind(&item.message)).collect();
        Ok(Some(Open { round, hold }))
    }

    /// Publishes what is open. Returns whether the round is over; otherwise the sink takes nothing now.
    async fn publish(&mut self, open: &mut Open) -> Result<bool, StoreError> {
        let shared = self.shared.clone();
        self.set_aside(open).await?;
        if mutant::is("relay-marks-first") {
            self.record(open.round.ends()).await?;
        }
        loop {
            let SinkDescription { batch_max, calls_max, .. } = shared.description;
            let calls = open.round.next(batch_max, calls_max.max(1));
            if calls.is_empty() || *self.stopped.borrow() {
                break;
            }
            if shared.ownership.has_lapsed() {
                return Err(StoreError::Unavailable("the lease has lapsed".to_owned()));
            }
            // Under the fence with which they were read: a bucket that was lost and came back is read again.
            let is_ours = |lease: &BucketLease| {
                self.read.get(&lease.bucket).is_some_and(|read| read.fence == lease.fence)
            };
            let leases = shared.ownership.leases();
            let ours: BTreeSet<u16> = leases.into_iter().filter(is_ours).map(|lease| lease.bucket).collect();
            let buckets = calls.iter().flatten().map(|&index| open.round.items[index].message.bucket);
            let lost: BTreeSet<u16> = buckets.filter(|bucket| !ours.contains(bucket)).collect();
            if !lost.is_empty() {
                self.lose(open, &lost);
                continue;
            }
            let (indices, answers) = call(&shared, &open.round, calls, &self.read).await;
            let retry = &shared.options.retry;
            let answered = open.round.answered(&indices, answers, || retry.delay_ms(1, fastrand::u64(..)));
            shared.counts.published.add_many(answered.published);
            shared.counts.duplicates.add_many(answered.duplicates);
            shared.counts.refused.add_many(answered.refused);
            shared.counts.failed.add_many(answered.failed);
            if let Some(error) = &answered.problem {
                shared.failing(error);
            }
            if answered.published + answered.duplicates > 0 {
                shared.accepted();
                self.failures = 0;
            }
            open.hold = answered.hold;
            self.set_aside(open).await?;
            if let Some(problem) = answered.unavailable {
                let route = &shared.options.route;
                shared.counts.unavailable.add();
                shared.problem(&problem);
                tracing::warn!(
                    route,
                    sink = shared.description.name,
                    problem,
                    "the sink takes nothing; trying again"
                );
                self.record(open.round.positions()).await?;
                return Ok(false);
            }
        }
        self.record(open.round.positions()).await?;
        Ok(true)
    }

    /// Sets aside what the sink did not accept, and what waits behind it.
    async fn set_aside(&mut self, open: &mut Open) -> Result<(), StoreError> {
        if open.hold.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        let RelayOptions { route, relay, .. } = &shared.options;
        let mut held = shared.held.lock().await;
        let buckets: BTreeSet<u16> = open.hold.iter().map(|held| held.message.bucket).collect();
        let leases: Vec<BucketLease> = buckets
            .iter()
            .filter_map(|bucket| {
                self.read.get(bucket).map(|read| BucketLease { bucket: *bucket, fence: read.fence })
            })
            .collect();
        let lost = shared.store.hold(route, relay, &leases, open.hold.clone()).await?;
        shared.counts.held.add_many(open.hold.len());
        for message in std::mem::take(&mut open.hold) {
            let OutboxMessage { bucket, number, .. } = message.message;
            if let Some(key) = message.message.ordered_key() {
                held.entry(bucket).or_default().insert(key.to_owned());
            }
            for item in &mut open.round.items {
                if (item.message.bucket, item.message.number) == (bucket, number) {
                    item.step = Step::Done;
                }
            }
        }
        drop(held);
        shared.ownership.lose(&lost);
        shared.counts.lost_buckets.add_many(lost.len());
        self.lose(open, &lost.into_iter().collect());
        Ok(())
    }

    /// Forgets buckets that another relay has taken.
    fn lose(&mut self, open: &mut Open, lost: &BTreeSet<u16>) {
        open.round.drop_buckets(lost);
        open.hold.retain(|held| !lost.contains(&held.message.bucket));
        self.read.retain(|bucket, _| !lost.contains(bucket));
    }

    /// Records how far the buckets are published.
    async fn record(&mut self, positions: BTreeMap<u16, u64>) -> Result<(), StoreError> {
        if mutant::is("relay-never-marks") {
            return Ok(());
        }
        let RelayOptions { route, relay, .. } = &self.shared.options;
        let mut advances = Vec::new();
        for (bucket, position) in positions {
            if let Some(read) = self.read.get(&bucket).filter(|read| read.position < position) {
                let lease = BucketLease { bucket, fence: read.fence };
                advances.push(Advance { lease, after: read.position, position });
            }
        }
        if advances.is_empty() {
            return Ok(());
        }
        let lost = self.shared.store.advance(route, relay, &advances).await?;
        self.shared.ownership.lose(&lost);
        self.shared.counts.lost_buckets.add_many(lost.len());
        for advance in advances {
            if let Some(read) = self.read.get_mut(&advance.lease.bucket) {
                read.position = advance.position;
            }
        }
        self.read.retain(|bucket, _| !lost.contains(bucket));
        Ok(())
    }
}

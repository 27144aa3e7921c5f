//! What the tasks of a relay share, and what it shows of itself while it runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hapax_core::StoreError;
use hapax_core::metrics::{Metrics as _, Sample};
use hapax_core::outbox::{OutboxStore, PublishSource, Publisher, RouteStatus, SinkDescription, SourceBucket};

use crate::counts::{RelayCells, RelayCounts, RelayState};
use crate::options::RelayOptions;
use crate::ownership::Ownership;
use crate::plan::HeldKeys;

/// How long the figures of the outbox are shown.
const STATUS_COUNTS: Duration = Duration::from_secs(30);
/// How long a failure is known. A message that fails is tried again within a minute; later it was parked or skipped.
const FAILURE_COUNTS: Duration = Duration::from_mins(2);

/// What the tasks of a relay share.
pub(crate) struct Shared {
    pub store: Arc<dyn OutboxStore>,
    pub sink: Arc<dyn Publisher>,
    pub description: SinkDescription,
    pub options: RelayOptions,
    pub counts: RelayCells,
    pub ownership: Ownership,
    /// Held while buckets are taken or given back, so that none is taken for ours that was just given back.
    pub tending: tokio::sync::Mutex<()>,
    /// A task that decides by it keeps it locked until the outbox has been changed.
    pub held: tokio::sync::Mutex<HeldKeys>,
    progress: Mutex<Progress>,
    /// What waits for the route, as it was last read.
    status: Mutex<Option<(Instant, RouteStatus)>>,
}

struct Progress {
    /// When the sink last accepted something, or there was nothing to publish.
    at: Instant,
    /// When the sink last accepted something.
    accepted: Option<Instant>,
    /// When the sink first and last failed since it last accepted something.
    failing: Option<(Instant, Instant)>,
    problem: Option<String>,
}

impl Shared {
    pub fn new(store: Arc<dyn OutboxStore>, sink: Arc<dyn Publisher>, options: RelayOptions) -> Self {
        let description = sink.describe();
        let progress =
            Mutex::new(Progress { at: Instant::now(), accepted: None, failing: None, problem: None });
        let (counts, ownership, tending, held, status) = Default::default();
        Self { store, sink, description, options, counts, ownership, tending, held, progress, status }
    }

    /// What a sink is told about the messages of these buckets.
    pub fn source<'a>(&'a self, buckets: &'a [SourceBucket], held: bool) -> PublishSource<'a> {
        let RelayOptions { route, relay, .. } = &self.options;
        PublishSource { store: &*self.store, route, relay, buckets, held }
    }

    /// What waits for the route was read.
    pub fn observed(&self, status: Option<RouteStatus>) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) =
            status.map(|status| (Instant::now(), status));
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is nothing to publish, except for what was set aside.
    pub fn is_idle(&self) {
        let mut progress = self.progress();
        progress.at = Instant::now();
        progress.failing = progress.failing.filter(|(_, last)| last.elapsed() < FAILURE_COUNTS);
        if progress.failing.is_none() {
            progress.problem = None;
        }
    }

    /// The sink has accepted something.
    pub fn accepted(&self) {
        let mut progress = self.progress();
        progress.at = Instant::now();
        progress.accepted = Some(progress.at);
        progress.failing = None;
        progress.problem = None;
    }

    /// The sink has failed.
    pub fn failing(&self, problem: &str) {
        let mut progress = self.progress();
        let now = Instant::now();
        progress.failing = Some((progress.failing.map_or(now, |(first, _)| first), now));
        progress.problem = Some(problem.to_owned());
    }

    pub fn problem(&self, problem: &str) {
        self.progress().problem = Some(problem.to_owned());
    }

    /// How long to wait after this many failures in a row.
    pub fn outage_delay(&self, failures: u32) -> Duration {
        Duration::from_millis(self.options.outage.delay_ms(failures, fastrand::u64(..)))
    }

    /// Whether the sink has accepted something within this time.
    pub fn has_accepted_within(&self, time: Duration) -> bool {
        self.progress().accepted.is_some_and(|at| at.elapsed() < time)
    }

    pub fn store_failed(&self, doing: &'static str, error: &StoreError) {
        self.counts.store_errors.add();
        self.problem(&error.to_string());
        tracing::warn!(route = %self.options.route, doing, %error, "the outbox's database did not do it; trying again");
    }
}

/// Counts and readiness of a relay, while it runs and afterwards.
#[derive(Clone)]
pub struct RelayWatch {
    shared: Arc<Shared>,
}

impl RelayWatch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// What it has done.
    pub fn counts(&self) -> RelayCounts {
        self.shared.counts.read()
    }

    /// The counters, its readiness, and what waits in the outbox for its route, as metrics. The latter was read within the last
    /// half minute; it is left out if the database has not answered since then.
    pub fn samples(&self) -> Vec<Sample> {
        let labels = [self.route()];
        let mut samples = self.counts().samples(&labels);
        samples.extend(RelayState { ready: u64::from(self.readiness().is_ok()) }.samples(&labels));
        let status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, status)) = status.as_ref().filter(|(at, _)| at.elapsed() < STATUS_COUNTS) {
            samples.extend(status.samples(&labels));
        }
        samples
    }

    /// The route's name.
    pub fn route(&self) -> &str {
        &self.shared.options.route
    }

    /// Whether it makes progress: it has published something, or had nothing to publish, within the last 30 s
    /// ([`RelayOptions::stalled`]). Otherwise why not. Messages that are parked do not count, those that fail do.
    pub fn readiness(&self) -> Result<(), String> {
        let progress = self.shared.progress();
        let since = progress.failing.map_or(progress.at, |(first, _)| first.min(progress.at));
        let stalled = since.elapsed();
        if stalled < self.shared.options.stalled {
            return Ok(());
        }
        let why = progress.problem.as_deref().unwrap_or("no answer");
        Err(format!("route {}: nothing published for {} s: {why}", self.route(), stalled.as_secs()))
    }
}

//! The configuration of a worker.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;

use bytes::Bytes;
use hapax_claim::{Claims, LeaseKeeper, Owners, Timer};
use hapax_core::ledger::{TTL_MS_DEFAULT, TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::policy::tier::{self, Facts, Finding, HandlerDatabase, HandlerFacts, LedgerFacts};
use hapax_core::{
    Clock, Delivery, Ledger, OnDoubt, QueueAdmin, QueueName, QueueSource, QueueStore, Receive, Source,
    SourceDescription, Store, StoreError, Tier, policy,
};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::{Notify, mpsc, watch};

use crate::auto::{AutoLease, LeaseLength, LeaseTime};
use crate::claiming::DuplicateWaiters;
use crate::cx::{Cx, Env};
use crate::decide::Policy;
use crate::handler::{self, Handler};
use crate::limits::{KeyOf, PerKey, Rate, Slots};
use crate::observe::{OnSettled, SettledDelivery, SingleDelivery, StopWhen};
use crate::outcome::{IntoOutcome, OnError};
use crate::point::{Hook, Hooks, Point};
use crate::state::WorkerState;
use crate::stats::Stats;
use crate::worker::Worker;

/// Default number of handlers that run at the same time.
const CONCURRENCY_DEFAULT: usize = 16;
/// Maximum number of handlers that run at the same time.
const CONCURRENCY_MAX: usize = 100_000;
/// Default drain timeout.
const DRAIN_MS_DEFAULT: u64 = 30_000;

/// Why a worker could not be built.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The store or the queue could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no handler.
    #[error("the worker has no handler; give it one with `handler`, `raw_handler` or `batch_handler`")]
    NoHandler,
    /// A setting is out of range.
    #[error("{setting}: {problem}")]
    Setting {
        /// The builder's method.
        setting: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// The tier cannot hold with this store, ledger or handler.
    #[error("the tier cannot hold: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Tier(Vec<Finding>),
    /// The operating system started no thread, or has no random numbers.
    #[error("the heartbeat cannot be started: {0}")]
    Heartbeat(String),
}

impl BuildError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::NoHandler => "no-handler",
            Self::Setting { .. } => "invalid",
            Self::Tier(refusals) => match refusals.first().map(|refusal| &refusal.code) {
                Some(Cow::Borrowed(code)) => code,
                _ => "tier",
            },
            Self::Heartbeat(_) => "no-heartbeat",
        }
    }
}

fn setting(setting: &'static str, problem: impl Into<String>) -> BuildError {
    BuildError::Setting { setting, problem: problem.into() }
}

fn within(name: &'static str, value: u64, min: u64, max: u64) -> Result<(), BuildError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(setting(name, format!("{value} is out of range; use {min} to {max}")))
}

/// Configures a worker; see [`Worker::builder`].
#[derive(Clone)]
#[must_use = "call `build` to get a worker"]
pub struct WorkerBuilder {
    pub(crate) source: Arc<dyn Source>,
    /// The queue of a store, for trials that send to it.
    pub(crate) queue: Option<(Arc<dyn QueueStore>, QueueName)>,
    ledger: Option<Arc<dyn Ledger>>,
    /// The ledger is in the queue's own store.
    own_ledger: bool,
    pub(crate) handler: Option<Handler>,
    tier: Option<Tier>,
    concurrency: usize,
    per_key: Option<(usize, KeyOf)>,
    per_second: Option<f64>,
    lease: Option<LeaseLength>,
    auto_from_queue: bool,
    run_max: Option<Duration>,
    on_doubt: OnDoubt,
    on_error: Option<OnError>,
    ttl: Option<Duration>,
    drain: Duration,
    consumer: Option<String>,
    idempotent_by_derived_key: bool,
    stop_when: StopWhen,
    on_settled: Option<OnSettled>,
    clock: Option<Arc<dyn Clock>>,
    pub(crate) hooks: Hooks,
}

/// Long enough to cover every later delivery of the message.
fn ttl_ms_default(described: &SourceDescription) -> u64 {
    let horizon_ms = tier::redrive_horizon_ms(&described.config, described.dead_retention_ms.unwrap_or(0));
    horizon_ms.clamp(TTL_MS_DEFAULT, TTL_MS_MAX)
}

impl Worker {
    /// A worker for a queue of a store that holds queues and a ledger.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::sync::Arc;
    /// # use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Tier};
    /// # use hapax_embedded::{Embedded, Options};
    /// # let folder = tempfile::tempdir()?;
    /// # let store = Arc::new(Embedded::open(folder.path(), Options::default())?);
    /// # let queue = QueueName::new("charges")?;
    /// # let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() };
    /// # store.create_queue(&queue, config).await?;
    /// # store.send(&queue, vec![NewMessage::new(r#"{"order":7,"cents":1999}"#)]).await?;
    /// use hapax_worker::{Cx, Worker};
    ///
    /// #[derive(serde::Deserialize)]
    /// struct Charge {
    ///     order: u64,
    ///     cents: u64,
    /// }
    ///
    /// async fn charge(charge: Charge, cx: Cx) -> Result<String, std::io::Error> {
    ///     // A bank that honours this key charges once, however often this runs.
    ///     let key = cx.derived_key("charge");
    ///     Ok(format!("charged {} for order {} as {key}", charge.cents, charge.order))
    /// }
    ///
    /// let worker = Worker::builder(store, queue).handler(charge).concurrency(8).build().await?;
    /// let watch = worker.watch();
    /// let report = worker
    ///     .run(async move {
    ///         while watch.counts().done < 1 {
    ///             tokio::task::yield_now().await;
    ///         }
    ///     })
    ///     .await?;
    /// assert!(report.drained);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(store: Arc<dyn Store>, queue: QueueName) -> WorkerBuilder {
        let ledger: Arc<dyn Ledger> = store.clone();
        WorkerBuilder { ledger: Some(ledger), own_ledger: true, ..Self::over(store, queue) }
    }

    /// A worker for a queue of a store without a ledger; [`WorkerBuilder::ledger`] sets one in another store.
    pub fn over(store: Arc<dyn QueueAdmin>, queue: QueueName) -> WorkerBuilder {
        let source = QueueSource::new(store.clone(), queue.clone());
        WorkerBuilder { queue: Some((store, queue)), ..Self::from_source(Arc::new(source)) }
    }

    /// A worker for any [`Source`]: a queue, a broker's topic, or your own. [`Source::describe`] supplies its name,
    /// policy and capabilities. It has no ledger unless one is set.
    pub fn from_source(source: Arc<dyn Source>) -> WorkerBuilder {
        WorkerBuilder {
            source,
            queue: None,
            ledger: None,
            own_ledger: false,
            handler: None,
            tier: None,
            concurrency: CONCURRENCY_DEFAULT,
            per_key: None,
            per_second: None,
            lease: None,
            auto_from_queue: false,
            run_max: None,
            on_doubt: OnDoubt::Retry,
            on_error: None,
            ttl: None,
            drain: Duration::from_millis(DRAIN_MS_DEFAULT),
            consumer: None,
            idempotent_by_derived_key: false,
            stop_when: StopWhen::Never,
            on_settled: None,
            clock: None,
            hooks: Hooks::default(),
        }
    }
}

impl WorkerBuilder {
    /// The handler of each message: an async function of the message, parsed from JSON, and its context.
    pub fn handler<T, F, Fut>(mut self, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(T, Cx) -> Fut + Send + Sync + 'static,
        Fut: Future + Send + 'static,
        Fut::Output: IntoOutcome,
    {
        self.handler = Some(Handler::One(handler::one(handler)));
        self
    }

    /// The handler of each message, called with the unparsed bytes.
    pub fn raw_handler<F, Fut>(mut self, handler: F) -> Self
    where
        F: Fn(Bytes, Cx) -> Fut + Send + Sync + 'static,
        Fut: Future + Send + 'static,
        Fut::Output: IntoOutcome,
    {
        self.handler = Some(Handler::One(handler::raw(handler)));
        self
    }

    /// The handler of up to `max` messages at once; it returns one outcome per message, in order. On a FIFO queue a
    /// batch holds messages of one group, in order. The batch counts as one for [`WorkerBuilder::concurrency`], and is
    /// stopped when all of its leases are lost.
    pub fn batch_handler<T, F, Fut, O>(mut self, max: usize, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(Vec<(T, Cx)>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<O>> + Send + 'static,
        O: IntoOutcome,
    {
        self.handler = Some(Handler::Many { run: handler::many(handler), max });
        self
    }

    /// The guarantee. Default the queue's tier.
    pub fn tier(mut self, tier: Tier) -> Self {
        self.tier = Some(tier);
        self
    }

    /// The ledger of the store that holds the source's queue: a settle may end a claim in the same transaction.
    /// [`Worker::builder`] sets it.
    pub fn store_ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self.own_ledger = true;
        self
    }

    /// A ledger in another store. Claims end there before their deliveries are settled here.
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self.own_ledger = false;
        self
    }

    /// Number of handlers that run at the same time. Default 16.
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// Maximum number of concurrent runs per group; messages without a group are not limited. A FIFO queue keeps its
    /// own order.
    pub fn per_group(self, max: usize) -> Self {
        self.per_key(max, |delivery| delivery.group.as_ref().map(|group| group.as_str().to_owned()))
    }

    /// Maximum number of concurrent runs per key. `of` returns a delivery's key; `None` means no limit. Not for FIFO
    /// queues.
    pub fn per_key(
        mut self,
        max: usize,
        of: impl Fn(&Delivery) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.per_key = Some((max, Arc::new(of)));
        self
    }

    /// Maximum number of starts per second, evenly spread.
    pub fn per_second(mut self, per_second: f64) -> Self {
        self.per_second = Some(per_second);
        self
    }

    /// The lease of deliveries and claims. Default the queue's lease. The heartbeat renews it after a third of its
    /// time, so it limits how long a crash delays a message, not how long a handler may run.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(LeaseLength::Fixed { ms: lease.as_millis() as u64 });
        self
    }

    /// A lease that adapts to the run times of the handler, starting from the queue's lease.
    pub fn lease_auto(mut self) -> Self {
        self.lease = Some(LeaseLength::Auto(AutoLease::default()));
        self.auto_from_queue = true;
        self
    }

    /// A lease that adapts to the run times of the handler, within the given limits.
    pub fn lease_auto_with(mut self, auto: AutoLease) -> Self {
        self.lease = Some(LeaseLength::Auto(auto));
        self.auto_from_queue = false;
        self
    }

    /// Time limit of one run: after it, heartbeats end and the run is stopped at its next await. Default no limit.
    pub fn run_max(mut self, run_max: Duration) -> Self {
        self.run_max = Some(run_max);
        self
    }

    /// What to do about a key whose last run may or may not have caused the effect. Default retry: right if the effect
    /// is idempotent by [`Cx::derived_key`], or checks [`Cx::fence`].
    pub fn on_doubt(mut self, on_doubt: OnDoubt) -> Self {
        self.on_doubt = on_doubt;
        self
    }

    /// The meaning of a handler's `Err`. Default [`OnError::InDoubt`] at `effectively-once`, [`OnError::Retry`] at the
    /// other tiers.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = Some(on_error);
        self
    }

    /// How long outcomes are kept for duplicates. 1 s to 366 days; default 4 days, or as long as the message may be
    /// delivered again, including by a redrive.
    pub fn outcome_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Drain timeout: how long running handlers may continue after the worker was told to stop. Default 30 s.
    pub fn drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// The name of this worker in message histories; a suffix that is unique for every start is added. Default the
    /// process id.
    pub fn consumer(mut self, name: impl Into<String>) -> Self {
        self.consumer = Some(name.into());
        self
    }

    /// When the worker stops by itself. Default never.
    pub fn stop_when(mut self, stop_when: StopWhen) -> Self {
        self.stop_when = stop_when;
        self
    }

    /// Called for each ended delivery, after the store has answered. It must not block: settles wait for it.
    pub fn on_settled(mut self, tell: impl Fn(&SettledDelivery<'_>) + Send + Sync + 'static) -> Self {
        self.on_settled = Some(Arc::new(tell));
        self
    }

    /// The clock for leases, pauses and timeouts. Default the machine's; a test passes its own.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Called at every [`Point`] that a delivery passes: a testing aid, for example to kill the process there. No cost
    /// when it is not set.
    pub fn hook(mut self, hook: impl Fn(Point) + Send + Sync + 'static) -> Self {
        self.hooks.hook = Some(Arc::new(hook) as Hook);
        self
    }

    /// Receives and settles through this source instead of the store itself, for example to inject faults.
    pub fn source(mut self, source: Arc<dyn Source>) -> Self {
        self.source = source;
        self
    }

    /// Declares that the effect is idempotent by [`Cx::derived_key`]: it happens once per key, for any number of calls.
    /// This only affects the tier check, which otherwise warns if a doubt leads to a retry.
    pub fn idempotent_by_derived_key(mut self) -> Self {
        self.idempotent_by_derived_key = true;
        self
    }

    /// Reads the source's description and checks everything: the settings, and whether the tier can hold.
    pub async fn build(self) -> Result<Worker, BuildError> {
        let handler = self.handler.clone().ok_or(BuildError::NoHandler)?;
        let described = self.source.describe().await?;
        let tier = self.tier.unwrap_or(described.config.tier);
        let fifo = described.config.is_fifo();
        let lease = self.check_lease(described.lease_ms, tier)?;
        within("concurrency", self.concurrency as u64, 1, CONCURRENCY_MAX as u64)?;
        let ttl_ms = self.ttl.map_or_else(|| ttl_ms_default(&described), |ttl| ttl.as_millis() as u64);
        within("outcome_ttl", ttl_ms, TTL_MS_MIN, TTL_MS_MAX)?;
        let warnings = self.check_tier(&described, tier, lease, ttl_ms)?;
        if let Handler::Many { max, .. } = handler {
            within("batch_handler", max as u64, 1, Receive::MAX as u64)?;
        }
        let run_us_max = self.run_max.map(|max| max.as_micros() as u64);
        within("run_max", run_us_max.unwrap_or(1), 1, u64::MAX / 4)?;
        if let Some(rate) = self.per_second.filter(|rate| !(*rate > 0.0 && *rate <= 1e6)) {
            return Err(setting(
                "per_second",
                format!("{rate} is out of range; use more than 0, at most a million"),
            ));
        }
        if let Some((max, _)) = &self.per_key {
            within("per_key", *max as u64, 1, self.concurrency as u64)?;
            if fifo || matches!(handler, Handler::Many { .. }) {
                let problem = "FIFO queues and batch handlers have no limit per key; \
                               a FIFO queue runs one message of a group at a time anyway";
                return Err(setting("per_key", problem));
            }
        }
        let consumer = self.check_consumer()?;
        let owners = Owners::new(&consumer);

        let source = self.source;
        let ledger = self.ledger.filter(|_| tier == Tier::EffectivelyOnce);
        let lease = Arc::new(LeaseTime::new(lease));
        let stats = Arc::new(Stats::default());
        let time = self.clock.map_or_else(Timer::system, Timer::new);
        let lease_keeper =
            LeaseKeeper::new(Some(source.clone()), ledger.clone(), time.clone(), stats.clone())
                .map_err(|error| BuildError::Heartbeat(error.to_string()))?;
        let default_error = OnError::default_at(tier);
        let policy = Policy {
            tier,
            on_doubt: self.on_doubt,
            on_error: self.on_error.unwrap_or(default_error),
            ttl_ms,
        };
        let env = Env {
            name: described.name,
            scope: described.scope,
            ttl_ms,
            timer: time.clone(),
            lease: lease.clone(),
            hooks: self.hooks,
        };
        let (sender, ended_deliveries) = mpsc::unbounded_channel();
        let per_key = self.per_key.map(|(max, of)| PerKey::new(of, max, self.concurrency));
        let worker_state = WorkerState {
            env: Arc::new(env),
            source,
            own_ledger: self.own_ledger && ledger.is_some(),
            same_store: self.own_ledger && ledger.is_some() && described.capabilities.settle_ends_claims,
            claims: ledger.map(|ledger| Claims::new(ledger, time.clone())),
            owners,
            queue: described.queue,
            fifo,
            leased: described.lease_ms.is_some(),
            policy,
            handler,
            run_us_max,
            consumer,
            lease,
            stats,
            lease_keeper,
            duplicate_waiters: DuplicateWaiters::new(self.concurrency),
            slots: Slots::new(self.concurrency),
            rate: self.per_second.map(|rate| Rate::new(rate, time.now_us())),
            per_key,
            drain_ms: self.drain.as_millis() as u64,
            ended_deliveries: sender,
            unsettled: AtomicUsize::new(0),
            settled: Notify::new(),
            put_back: AtomicUsize::new(0),
            abandoned: AtomicBool::new(false),
            ledger_failures: AtomicU32::new(0),
            draining: watch::Sender::new(false),
            stop_when: self.stop_when,
            single_delivery: watch::Sender::new(SingleDelivery::Free),
            returns_us: AtomicU64::new(0),
            on_settled: self.on_settled,
        };
        Ok(Worker { state: Arc::new(worker_state), ended_deliveries, warnings })
    }

    /// Compares the tier with the features of store, ledger and handler; returns the warnings.
    fn check_tier(
        &self,
        described: &SourceDescription,
        wanted: Tier,
        lease: LeaseLength,
        ttl_ms: u64,
    ) -> Result<Vec<Finding>, BuildError> {
        let inbox = self.handler.as_ref().and_then(Handler::inbox);
        if inbox.is_some() && wanted != Tier::Transactional {
            return Err(setting(
                "tier",
                "a transactional handler has the tier transactional; leave it unset",
            ));
        }
        let ledger = if let Some(can) = inbox {
            Some(LedgerFacts { capabilities: can.clone(), same_store: false, ttl_ms })
        } else {
            let facts = |ledger: &Arc<dyn Ledger>| LedgerFacts {
                capabilities: ledger.ledger_capabilities(),
                same_store: self.own_ledger,
                ttl_ms,
            };
            self.ledger.as_ref().map(facts)
        };
        let lease = match lease {
            LeaseLength::Fixed { ms } => tier::HandlerLease::Fixed { lease_ms: ms },
            LeaseLength::Auto(_) => tier::HandlerLease::Auto,
        };
        let heartbeat = self.run_max.map_or(policy::LEASE_MS_MAX, |max| max.as_millis() as u64);
        let handler = HandlerFacts {
            lease,
            heartbeat_ms_max: Some(heartbeat),
            p99_ms: described.held_p99_ms,
            on_doubt: self.on_doubt,
            idempotent_by_derived_key: self.idempotent_by_derived_key,
            database: if inbox.is_some() { HandlerDatabase::WithLedger } else { HandlerDatabase::None },
        };
        let facts = Facts {
            tier: wanted,
            dead_retention_ms: described.dead_retention_ms,
            dead_queue_missing: described.config.dead_letter.is_some()
                && described.dead_retention_ms.is_none(),
            ledger,
            handler: Some(handler),
            ..Facts::new(described.config.clone(), described.capabilities.clone())
        };
        let (refusals, warnings): (Vec<_>, Vec<_>) =
            tier::check(&facts).into_iter().partition(Finding::is_refusal);
        if refusals.is_empty() { Ok(warnings) } else { Err(BuildError::Tier(refusals)) }
    }

    fn check_lease(&self, given_ms: Option<u64>, tier: Tier) -> Result<LeaseLength, BuildError> {
        let queue_ms = given_ms.filter(|ms| *ms > 0).unwrap_or(policy::LEASE_MS_DEFAULT);
        let lease = match self.lease {
            // The tier check refuses it, as `hapax doctor` does.
            None if given_ms == Some(0) && tier != Tier::AtMostOnce => {
                return Ok(LeaseLength::Fixed { ms: 0 });
            }
            None => LeaseLength::Fixed { ms: queue_ms },
            Some(LeaseLength::Auto(auto)) if self.auto_from_queue => {
                LeaseLength::Auto(AutoLease { start_ms: queue_ms, ..auto })
            }
            Some(lease) => lease,
        };
        match lease {
            LeaseLength::Fixed { ms } => within("lease", ms, 1, policy::LEASE_MS_MAX)?,
            LeaseLength::Auto(auto) => {
                within("lease_auto_with.max_ms", auto.max_ms, 1, policy::LEASE_MS_MAX)?;
                within("lease_auto_with.min_ms", auto.min_ms, 1, auto.max_ms)?;
                if !(1.0..=100.0).contains(&auto.margin) {
                    let problem = format!("{} is out of range; use 1 to 100", auto.margin);
                    return Err(setting("lease_auto_with.margin", problem));
                }
            }
        }
        Ok(lease)
    }

    /// A name that is unique among all starts of all processes.
    fn check_consumer(&self) -> Result<String, BuildError> {
        let name = self.consumer.clone().unwrap_or_else(|| format!("worker-{}", std::process::id()));
        let fits = (1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if !fits {
            return Err(setting("consumer", format!("{name:?}: use 1 to 64 visible ASCII characters")));
        }
        let mut nonce = [0u8; 8];
        getrandom::fill(&mut nonce).map_err(|error| BuildError::Heartbeat(error.to_string()))?;
        Ok(format!("{name}-{:016x}", u64::from_le_bytes(nonce)))
    }
}

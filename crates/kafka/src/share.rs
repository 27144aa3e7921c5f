//! A share group (KIP-932, Kafka 4.2 or later) as a [`Source`]: a topic is worked on like a queue.
//!
//! ```no_run
//! use std::sync::Arc;
//! use hapax_kafka::share::{ShareError, ShareOptions, ShareSource};
//! use hapax_kafka::wire::Connect;
//!
//! # async fn example() -> Result<(), ShareError> {
//! let connect = Connect::plain(["localhost:9092"]);
//! let options = ShareOptions::new(connect, "billing", "orders", "orders-dead");
//! let source = Arc::new(ShareSource::connect(options).await?);
//! // Worker::from_source(source).handler(...)
//! # drop(source); Ok(()) }
//! ```
//! | Hapax | share group |
//! |---|---|
//! | lease | the acquisition lock of a record, renewed by the worker's heartbeat |
//! | attempt | the broker's delivery count, and the attempts before a record went through the retry topic |
//! | ack | accept |
//! | retry | held under its lock for the delay and then released, or a copy in the retry topic |
//! | defer | delivered again by the same member, without the broker's counting it |
//! | reject, out of attempts, in doubt | a copy in the dead-letter topic, then accept |
//!
//! The broker drops a record that was delivered as often as its limit allows. So the handler is not run for that last
//! delivery: the record goes to the dead-letter topic. The broker counts every delivery, also one that was given back by a
//! worker that ends, by a lost connection, or because no receive took it within a second: a limit of 5 leaves 4 of them.
//!
//! Connections, locks and the group's membership are served by a thread of their own, so that a handler which blocks its
//! runtime keeps its locks. Dropping the source ends the thread: it closes the share sessions, which returns what was not
//! settled, and leaves the group.

mod copies;
mod engine;
mod holds;
mod member;
mod record;
mod session;
mod settings;
mod settle;
mod state;
mod undecoded;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::policy::RetryPolicy;
use hapax_core::{
    Batch, Capabilities, DeadLetterPolicy, Delivery, Extend, QueueConfig, QueueName, Receipt, Receive,
    RemainingLease, Scope, Settle, SettleError, Settled, Source, SourceDescription, StoreError,
    SupportedSettlements, Tier, policy,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::admin::AdminError;
use crate::refusal::Refusal;
use crate::wire::{Connect, WireError};
use engine::{Engine, Job};
use settings::Settings;
use state::Shared;

pub use record::headers;

/// How long the thread may take to leave the group when the source is closed.
const CLOSE_MAX: Duration = Duration::from_secs(15);

/// How a share group is worked on.
#[derive(Debug, Clone)]
pub struct ShareOptions {
    /// How brokers are reached.
    pub connect: Connect,
    /// The share group.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// The topic that takes the dead letters; required, because a broker keeps none.
    pub dead_letter_topic: String,
    /// The topic that takes records whose next attempt is further away than one lock. It belongs to this group alone, which
    /// reads it as well. Default none: then no delay may be longer than a lock.
    pub retry_topic: Option<String>,
    /// `at-least-once` (default) or `effectively-once`, which needs a ledger. The others are refused.
    pub tier: Tier,
    /// Delays and number of attempts. Default 1 s to 10 s with full jitter, 4 attempts: one less than the broker's default
    /// limit, because its last delivery is not run.
    pub retry: RetryPolicy,
    /// Accepts a group that begins at the end of the topic, and so skips what was sent before its first member joined.
    /// Default no: `share.auto.offset.reset` has to be `earliest`.
    pub may_begin_at_end: bool,
    /// Accepts a group that is given records of aborted transactions. Default no: `share.isolation.level` has to be
    /// `read_committed`.
    pub may_read_uncommitted: bool,
}

impl ShareOptions {
    /// The defaults.
    pub fn new(connect: Connect, group: &str, topic: &str, dead_letter_topic: &str) -> Self {
        Self {
            connect,
            group: group.to_owned(),
            topic: topic.to_owned(),
            dead_letter_topic: dead_letter_topic.to_owned(),
            retry_topic: None,
            tier: Tier::AtLeastOnce,
            retry: RetryPolicy { cap_ms: 10_000, ..RetryPolicy::default() }.attempts(4),
            may_begin_at_end: false,
            may_read_uncommitted: false,
        }
    }

    /// Sets the group's configuration on the brokers as this source needs it: it begins at the start of the topic, and reads
    /// committed records only. Needs the right to alter configurations.
    pub async fn configure_group(&self) -> Result<(), ShareError> {
        let values = [("share.auto.offset.reset", "earliest"), ("share.isolation.level", "read_committed")];
        settings::set_group(&self.connect, &self.group, &values).await
    }
}

/// Why a share group cannot be worked on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// Settings that a guarantee does not hold with.
    #[error("{}", crate::refusal::lines(.0))]
    Refused(Vec<Refusal>),
    /// The brokers could not be asked.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The operating system starts no thread.
    #[error("no thread for the share group: {0}")]
    Thread(std::io::Error),
}

impl From<WireError> for ShareError {
    fn from(error: WireError) -> Self {
        Self::Admin(error.into())
    }
}

/// A share group as a [`Source`]. One is one member of the group.
pub struct ShareSource {
    shared: Arc<Shared>,
    jobs: mpsc::UnboundedSender<Job>,
    description: SourceDescription,
    member: String,
    stop: watch::Sender<bool>,
    ended: tokio::sync::Mutex<Option<oneshot::Receiver<()>>>,
}

impl std::fmt::Debug for ShareSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShareSource").field("name", &self.description.name).finish_non_exhaustive()
    }
}

impl ShareSource {
    /// Checks the settings of brokers and group, and joins the group.
    pub async fn connect(options: ShareOptions) -> Result<Self, ShareError> {
        let settings = settings::check(&options).await?;
        let description = describe(&options, &settings)?;
        let shared = Arc::new(Shared::new(settings.lock_ms));
        let (jobs, queued) = mpsc::unbounded_channel();
        let (stop, stopped) = watch::channel(false);
        let (done, ended) = oneshot::channel();
        let engine = Engine::new(options, settings, shared.clone());
        let member = engine.member.clone();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ShareError::Thread)?;
        std::thread::Builder::new()
            .name("hapax-share".into())
            .spawn(move || {
                runtime.block_on(engine.run(queued, stopped));
                let _ = done.send(());
            })
            .map_err(ShareError::Thread)?;
        Ok(Self { shared, jobs, description, member, stop, ended: tokio::sync::Mutex::new(Some(ended)) })
    }

    /// This member's id in the group.
    pub fn member(&self) -> &str {
        &self.member
    }

    /// Returns what was not settled, leaves the group, and waits for that, at most 15 s.
    pub async fn close(&self) {
        self.stop.send_replace(true);
        if let Some(ended) = self.ended.lock().await.take() {
            let _ = timeout(CLOSE_MAX, ended).await;
        }
    }

    /// Has the thread do it, and waits for the answer.
    async fn ask<T>(&self, job: impl FnOnce(oneshot::Sender<T>) -> Job) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let gone = || StoreError::Unavailable("the source was closed".into());
        self.jobs.send(job(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}

impl Drop for ShareSource {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

fn describe(options: &ShareOptions, settings: &Settings) -> Result<SourceDescription, ShareError> {
    let scope = Scope::new(format!("kafka/{}/{}", options.topic, options.group)).map_err(|error| {
        let remedy = format!("{error}; shorten the group or the topic");
        ShareError::Refused(vec![Refusal::new("group", options.group.as_str(), remedy)])
    })?;
    // A topic may have a name that no queue has.
    let dead_letter = QueueName::new(&options.dead_letter_topic).ok().map(|queue| DeadLetterPolicy { queue });
    let mut config = QueueConfig {
        tier: options.tier,
        lease_ms: settings.lock_ms,
        retention_ms: settings.retention_ms,
        retry: options.retry,
        dead_letter,
        ..QueueConfig::default()
    };
    // A broker does not know keys.
    config.dedup.window_ms = 0;
    let mut capabilities = Capabilities::none("kafka-share-group");
    capabilities.leases = true;
    capabilities.settles = SupportedSettlements::ALL;
    capabilities.settles.park = false;
    capabilities.message_bytes_max = policy::MESSAGE_BYTES_MAX;
    capabilities.wake_up = hapax_core::WakeUp::Push;
    Ok(SourceDescription {
        name: options.topic.clone(),
        queue: None,
        scope,
        dead_retention_ms: config.dead_letter.is_some().then_some(settings.dead_retention_ms),
        config,
        lease_ms: Some(settings.lock_ms),
        held_p99_ms: None,
        capabilities,
    })
}

#[async_trait]
impl Source for ShareSource {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        Ok(self.description.clone())
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        if receive.ack_on_receive {
            let problem = "a share group does not work at-most-once; use at-least-once or effectively-once";
            return Err(StoreError::Invalid(problem.into()));
        }
        let wait_ms = receive.wait_ms.unwrap_or(0).min(policy::WAIT_MS_MAX);
        self.shared.next(receive.max.clamp(1, Receive::MAX), Duration::from_millis(wait_ms)).await
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.ask(|reply| Job::Settle(batch, reply)).await?
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.ask(|reply| Job::Extend(batch, reply)).await?
    }

    async fn revoked(&self) -> Vec<Receipt> {
        self.shared.revoked().await
    }
}

//! The seams. A new store implements [`QueueStore`] and [`QueueAdmin`], declares its features in [`Capabilities`], and
//! runs the conformance suite.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::capabilities::Capabilities;
use crate::copy::CopyState;
use crate::error::{AdminError, SendError, SettleError, StoreError};
use crate::ledger::{EndClaim, EntryId, Store};
use crate::message::{Attributes, Delivery, NewMessage, Priority};
use crate::name::{DedupId, GroupId, MessageId, QueueName, Receipt, Revision};
use crate::policy;
use crate::policy::tier::{Finding, ObservedQueue};
use crate::queue::QueueConfig;
use crate::transfer::Transfer;

/// One result per element, in the order of the request; or one error for the whole batch.
pub type Batch<T, E> = Result<Vec<Result<T, E>>, StoreError>;

/// An accepted message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Its id; for a suppressed duplicate, the id of the first send.
    pub id: MessageId,
    /// Its position in the queue; for a suppressed duplicate, that of the first send.
    pub sequence: u64,
    /// The send repeated an earlier one inside the window, so no message was added.
    pub duplicate: bool,
}

/// Parameters of a receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// Maximum number of deliveries, 1 to 1,000; a wire protocol may allow fewer.
    pub max: usize,
    /// How long each delivery is leased; the queue's default when `None`.
    pub lease_ms: Option<u64>,
    /// How long to wait for the first message; the queue's default when `None`.
    pub wait_ms: Option<u64>,
    /// The consumer's name, for the history of failed attempts.
    pub consumer: Option<String>,
    /// Acks each message as it is delivered (`at-most-once`): it never returns and may be lost.
    pub ack_on_receive: bool,
    /// Names this receive, at most 128 bytes: repeated within five minutes, also after a restart of the store, it gives
    /// again what is still held of the deliveries that it gave, and no other message. Once all of them were settled or
    /// their leases ran out, it is a new receive. If it is dropped, what it was given stays leased for the repeat. Does
    /// not go with `ack_on_receive`.
    pub attempt_id: Option<String>,
}

impl Default for Receive {
    fn default() -> Self {
        Self {
            max: 1,
            lease_ms: None,
            wait_ms: None,
            consumer: None,
            ack_on_receive: false,
            attempt_id: None,
        }
    }
}

impl Receive {
    /// Maximum number of deliveries of one receive.
    pub const MAX: usize = 1000;

    /// At most `max` deliveries, with the queue's own lease and wait.
    pub fn up_to(max: usize) -> Self {
        Self { max, ..Self::default() }
    }
}

/// How a delivery ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub enum Settlement {
    /// Done: the message is deleted.
    Ack,
    /// Failed: the message returns after the delay of the queue's policy or the requested one. When it is out of
    /// attempts, it goes to the dead letters.
    Retry {
        /// A delay that replaces the policy's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after_ms: Option<u64>,
        /// The error, kept in the history.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// Put back without counting the attempt.
    Defer {
        /// How long the message stays invisible.
        #[serde(default)]
        after_ms: u64,
    },
    /// No attempt can succeed: the message goes to the dead letters at once, or is parked if the queue has none.
    Reject {
        /// The reason, kept with the message.
        reason: String,
    },
    /// The message stays in its own queue until an operator decides, because its effect may have happened. The attempt
    /// is not counted.
    Park {
        /// Why the effect is in doubt.
        reason: String,
    },
}

/// Ends one delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settle {
    /// The delivery's receipt.
    pub receipt: Receipt,
    /// How it ends.
    pub settlement: Settlement,
    /// Ends the claim that was made for the delivery, in the same transaction. A stale token blocks the settle; a stale
    /// receipt does not block the end of the claim.
    pub claim: Option<EndClaim>,
    /// With [`Settlement::Park`]: the ledger's entry whose doubt it is parked for. A store that ends claims
    /// ([`Capabilities::settle_ends_claims`](crate::Capabilities::settle_ends_claims)) parks the message only while that
    /// entry is in doubt: one that was decided about meanwhile would never release it. Instead the message is returned
    /// at once, uncounted, which is told by [`Settled::Returned`]. Other stores take no notice of it.
    pub parked_for: Option<EntryId>,
}

impl Settle {
    /// Ends a delivery without a claim.
    pub fn new(receipt: Receipt, settlement: Settlement) -> Self {
        Self { receipt, settlement, claim: None, parked_for: None }
    }

    /// An ack.
    pub fn ack(receipt: Receipt) -> Self {
        Self::new(receipt, Settlement::Ack)
    }

    /// A retry by the queue's policy.
    pub fn retry(receipt: Receipt, error: impl Into<String>) -> Self {
        Self::new(receipt, Settlement::Retry { after_ms: None, error: Some(error.into()) })
    }
}

/// The effect of a settle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Settled {
    /// The message was deleted.
    Acked,
    /// The message returns after a delay.
    Returned {
        /// The delay.
        after_ms: u64,
    },
    /// The message went to the dead letters.
    Dead,
    /// The message is parked in its own queue: it is in doubt, or was rejected and there is no dead-letter queue.
    Parked,
}

/// Changes one delivery's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extend {
    /// The delivery's receipt.
    pub receipt: Receipt,
    /// The new lease, counted from now. 0 returns the message at once, regardless of the retry policy, and counts the
    /// attempt.
    pub lease_ms: u64,
    /// Whether the delivery has a lease of its own from now on, as after a visibility change of SQS: in a FIFO group its
    /// end takes back no delivery behind it, and it is not taken back when the lease of one before it ends. A heartbeat
    /// says `false`.
    pub own_lease: bool,
}

/// Time left of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemainingLease {
    /// Milliseconds since the store's answer.
    pub lease_ms: u64,
}

/// The queue seam: the operations of producers and consumers.
#[async_trait]
pub trait QueueStore: Send + Sync {
    /// The features of this store.
    fn capabilities(&self) -> Capabilities;

    /// Accepts messages. Each is durable when its result is `Ok`.
    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError>;

    /// Leases messages, and waits for the first one if asked to. If the future is dropped before it is ready, nothing
    /// was leased and no attempt was counted.
    async fn receive(&self, queue: &QueueName, receive: Receive) -> Result<Vec<Delivery>, StoreError>;

    /// Ends deliveries. Safe to repeat after an unknown outcome: for a settled delivery the result is
    /// [`SettleError::Gone`] or [`SettleError::Stale`].
    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError>;

    /// Changes leases: the heartbeat, and SQS's visibility change. On a standard queue a lease that ran out, or that was
    /// set to 0, can be taken again while no newer delivery holds the message; one that was nacked or deferred cannot.
    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError>;
}

/// Why a delivery failed, or why a message is dead or parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureCause {
    /// The consumer asked for a retry.
    Retry,
    /// The lease ran out: the consumer crashed, hung or was too slow.
    Expired,
    /// The consumer rejected it.
    Rejected,
    /// Its stored bytes do not match their checksum.
    Damaged,
    /// Its effect may or may not have happened.
    InDoubt,
}

impl FailureCause {
    /// The cause's name in JSON, output and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Expired => "expired",
            Self::Rejected => "rejected",
            Self::Damaged => "damaged",
            Self::InDoubt => "in-doubt",
        }
    }
}

/// One failed attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// Its number among the attempts, from 1; a parked delivery, which does not count, has the next attempt's number.
    pub attempt: u32,
    /// Its number among all deliveries, from 1.
    pub deliveries: u32,
    /// When it ended.
    pub at_ms: u64,
    /// How it ended.
    pub cause: FailureCause,
    /// The consumer's error message.
    pub error: Option<String>,
    /// The consumer's name.
    pub consumer: Option<String>,
}

/// A dead letter's origin and cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// The queue in which it died.
    pub source: QueueName,
    /// Why it died.
    pub cause: FailureCause,
    /// The last error, or the reason of the rejection.
    pub error: Option<String>,
    /// How many attempts it had in that queue.
    pub attempts: u32,
    /// How often it was delivered, in that queue and before.
    pub deliveries: u32,
    /// When it was first delivered in that queue.
    pub first_received_ms: u64,
    /// When it died.
    pub died_ms: u64,
}

/// A message's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageState {
    /// Can be received.
    Ready,
    /// Invisible until its delay is over.
    Delayed,
    /// Leased.
    InFlight,
    /// Not delivered until an operator decides.
    Parked,
}

/// A message as an operator sees it; browsing does not deliver it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageView {
    /// Its id.
    pub id: MessageId,
    /// Its state.
    pub state: MessageState,
    /// The payload; `None` when it is damaged.
    pub body: Option<bytes::Bytes>,
    /// Named values sent with the body.
    pub attributes: Attributes,
    /// Attempts so far: deliveries that count against the queue's `retry.max_attempts`.
    pub attempts: u32,
    /// Deliveries so far, counted or not.
    pub deliveries: u32,
    /// When it was sent.
    pub sent_ms: u64,
    /// When it becomes visible, or its lease runs out.
    pub due_ms: u64,
    /// Its position in the queue.
    pub sequence: u64,
    /// The group.
    pub group: Option<GroupId>,
    /// The deduplication id.
    pub dedup: Option<DedupId>,
    /// Urgency.
    pub priority: Priority,
    /// Its origin and cause of death, if it is a dead letter.
    pub dead: Option<DeadLetter>,
    /// Why it is parked, if it is.
    pub parked: Option<(FailureCause, Option<String>)>,
    /// The most recent failed attempts, oldest first.
    pub history: Vec<FailedAttempt>,
}

/// Which messages to browse.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Browse {
    /// Only messages in this state.
    pub state: Option<MessageState>,
    /// Only this message.
    pub id: Option<MessageId>,
    /// Continue after this sequence, from an earlier page.
    pub after: Option<u64>,
    /// Maximum count, 1 to 1,000.
    pub limit: usize,
}

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The rows.
    pub items: Vec<T>,
    /// Pass it as `after` for the next page; `None` at the end.
    pub next: Option<u64>,
}

/// The effect of a discard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Discarded {
    /// How many messages were deleted.
    pub count: u64,
    /// Messages that were not deleted because they are in flight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_flight: Vec<MessageId>,
}

crate::metrics! {
    /// A queue's counters, kept as it changes, never scanned for.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct QueueStats is "hapax_queue", kept by Store, labels ["queue"];
    plain {}
    nested {
        /// Counters since the store was opened.
        pub totals: QueueTotals,
    }
    /// Messages that can be received.
    gauge ready,
    /// Messages invisible until their delay is over.
    gauge delayed,
    /// Messages leased, and those on their way to another queue.
    gauge in_flight,
    /// Messages set aside.
    gauge parked,
    /// Messages that wait in halted FIFO groups; they are among the ready and delayed ones, and are not dropped by age.
    gauge halted [serde(default)],
    /// Bytes of bodies and attributes.
    gauge bytes("bytes", Bytes),
    /// When the oldest message was sent.
    gauge oldest_sent_ms("oldest_sent_timestamp_seconds", Milliseconds): Option<u64>,
}

crate::metrics! {
    /// What happened in a queue since its store was opened.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct QueueTotals is "hapax_queue", kept by Store, labels ["queue"];
    plain {}
    nested {}
    /// Messages accepted.
    counter sent,
    /// Sends suppressed as duplicates.
    counter duplicates,
    /// Deliveries made, those included that were given back because their receiver was gone.
    counter delivered,
    /// Deliveries acked.
    counter acked,
    /// Deliveries that the consumer gave back for a retry.
    counter retried,
    /// Deliveries put back uncounted.
    counter deferred,
    /// Leases that ran out.
    counter expired,
    /// Messages that died: sent to the dead letters, or parked where there are none.
    counter dead,
    /// Settles and extensions refused because their receipt was stale.
    counter stale,
    /// Messages dropped because their retention ran out.
    counter retention_dropped,
    /// Messages found damaged.
    counter damaged,
}

/// A queue and its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueInfo {
    /// Its name.
    pub name: QueueName,
    /// Its configuration.
    pub config: QueueConfig,
    /// The configuration's revision; pass it to [`QueueAdmin::set_queue`] to change only the version that was read.
    pub revision: Revision,
    /// When it was created.
    pub created_ms: u64,
    /// When its configuration last changed.
    pub modified_ms: u64,
    /// Set while the queue is paused.
    pub paused: Option<QueuePause>,
}

/// The pause of a queue: it delivers nothing, but accepts messages, and earlier deliveries can be settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePause {
    /// Start of the pause.
    pub since_ms: u64,
    /// Who paused it; at most 256 bytes are kept.
    pub by: String,
    /// The reason; at most 4 KiB are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Set while the queue is closed for a copy to or from another store: then it accepts nothing, and nothing can be
    /// settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyState>,
    /// The queue was not paused before it was closed, and delivers again when it is opened.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_only: bool,
}

impl QueuePause {
    /// A pause by an operator.
    pub fn new(since_ms: u64, by: &str, reason: Option<&str>) -> Self {
        Self {
            since_ms,
            by: policy::truncate(by, 256).to_owned(),
            reason: reason.map(|reason| policy::truncate(reason, policy::ERROR_BYTES_MAX).to_owned()),
            copy: None,
            copy_only: false,
        }
    }
}

/// Which dead letters to redrive; an empty filter means all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RedriveFilter {
    /// Only these messages.
    pub ids: Vec<MessageId>,
    /// Only those that died of this cause.
    pub cause: Option<FailureCause>,
    /// Only those that came from this queue.
    pub source: Option<QueueName>,
    /// Only those that came from one of these queues; empty means any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<QueueName>,
    /// Only those whose last error contains this text.
    pub error_contains: Option<String>,
    /// Only those that died at or after this time.
    pub died_from_ms: Option<u64>,
    /// Only those that died before this time.
    pub died_until_ms: Option<u64>,
}

/// A redrive to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedriveRequest {
    /// The dead-letter queue.
    pub from: QueueName,
    /// The target; each message's own source queue when `None`.
    pub to: Option<QueueName>,
    /// Which messages.
    pub filter: RedriveFilter,
    /// Maximum messages per second, 1 to 10,000; default 500.
    pub per_second: Option<u32>,
    /// Who started it, for the audit.
    pub by: String,
}

/// The state of a redrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RedriveState {
    /// Messages are being moved.
    Running,
    /// Every message that was in the queue at the start was examined.
    Completed,
    /// Stopped by request.
    Cancelled,
    /// Stopped because its queue or its target was deleted.
    Failed,
}

/// A redrive, running or ended. Ended ones are the audit trail: who, when, which messages, how many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedriveTask {
    /// Its number.
    pub id: u64,
    /// The dead-letter queue.
    pub from: QueueName,
    /// The target; each message's own source queue when `None`.
    pub to: Option<QueueName>,
    /// Which messages.
    pub filter: RedriveFilter,
    /// Maximum messages per second.
    pub per_second: u32,
    /// Who started it.
    pub by: String,
    /// Its state.
    pub state: RedriveState,
    /// When it started.
    pub started_ms: u64,
    /// When it ended.
    pub ended_ms: Option<u64>,
    /// How many messages were in the queue at the start.
    pub total: u64,
    /// How many it moved.
    pub moved: u64,
    /// How many it did not move: filtered out, or their target is gone.
    pub left: u64,
    /// Why it failed.
    pub failure: Option<String>,
}

crate::metrics! {
    /// How the store as a whole is doing. A server leaves figures of the whole store out for a key that has only some of
    /// the queues, see `withheld`.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct StoreStatus is "hapax_store", kept by Store, labels [];
    plain {
        /// Why deliveries are paused, if they are.
        pub paused: Option<String>,
        /// Why the store has stopped, if it has.
        pub stopped: Option<String>,
        /// Why every send is refused, if it is: a full disk, or a quota of the whole store.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub refuses_sends: Option<String>,
        /// What an operator should know, for example damaged rows found at start.
        pub warnings: Vec<String>,
        /// Figures, warnings and why sends are refused were left out by a server, because the key is for some queues
        /// only: the numbers here are not the store's.
        #[serde(skip)]
        pub withheld: bool,
    }
    nested {
        /// Counters since the store was opened, where the store counts them.
        #[serde(flatten)]
        pub totals: StoreTotals,
    }
    /// Messages in all queues; of a store that has stopped, as far as it was known then.
    gauge messages,
    /// Bytes of bodies and attributes in all queues; of a store that has stopped, as far as it was known then.
    gauge bytes("bytes", Bytes),
}

crate::metrics! {
    /// What a store has done since it was opened.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct StoreTotals is "hapax_store", kept by Store, labels [];
    plain {}
    nested {}
    /// Transactions committed.
    counter commits,
    /// Transactions that waited for the disk.
    counter synced,
    /// Operations in the transactions: sends, receives, settles, extensions and claims, each message counted.
    counter operations,
}

/// The administration seam.
#[async_trait]
pub trait QueueAdmin: QueueStore {
    /// Creates a queue; `true` if it is new. An existing queue with an equal configuration is not an error.
    async fn create_queue(&self, name: &QueueName, config: QueueConfig) -> Result<bool, AdminError> {
        self.create_queue_with_interval(name, config, 0).await
    }

    /// As [`create_queue`](Self::create_queue), but refused as [`AdminError::TooSoon`] while a queue of that name was
    /// deleted less than `interval_ms` ago; at most [`INTERVAL_MS_MAX`](crate::policy::INTERVAL_MS_MAX).
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError>;

    /// A queue's configuration.
    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError>;

    /// Replaces a queue's configuration and returns its new revision. With `expected`, only if the configuration
    /// still has that revision; else it is refused as [`AdminError::RevisionConflict`]. An equal configuration keeps
    /// its revision.
    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError>;

    /// Stops deliveries from a queue until it is resumed, also across restarts: receives are empty and long polls wait.
    /// Sends, settles, expiry and retention continue. A queue that is already paused keeps its first pause.
    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError>;

    /// Starts the deliveries of a paused queue again and wakes the receives that wait on it.
    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError>;

    /// Deletes a queue and everything in it.
    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError>;

    /// All queues, ordered by name.
    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError>;

    /// A queue's counters.
    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError>;

    /// The counters of several queues, in their order; `None` for one that does not exist.
    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            match self.stats(name).await {
                Ok(stats) => all.push(Some(stats)),
                Err(StoreError::NoSuchQueue(_)) => all.push(None),
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// What was observed of a queue in the latest minutes, by the process that observes this store. `None`: nothing. Stores
    /// themselves observe nothing.
    async fn observed(&self, name: &QueueName) -> Result<Option<ObservedQueue>, StoreError> {
        let _ = name;
        Ok(None)
    }

    /// Deletes all messages that are in the queue now; returns their number.
    async fn purge(&self, name: &QueueName) -> Result<u64, StoreError> {
        match self.purge_with_interval(name, 0).await {
            Ok(count) => Ok(count),
            Err(AdminError::Store(error)) => Err(error),
            Err(error) => Err(StoreError::Invalid(error.to_string())),
        }
    }

    /// As [`purge`](Self::purge), but refused as [`AdminError::TooSoon`] if the last purge was less than `interval_ms`
    /// ago; at most [`INTERVAL_MS_MAX`](crate::policy::INTERVAL_MS_MAX).
    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError>;

    /// Lists messages without delivering them, ordered by sequence.
    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError>;

    /// Deletes waiting and parked messages by id, permanently; `by` is kept for the audit. A message in flight is not
    /// deleted: its consumer may be causing the effect. Unknown ids are ignored.
    async fn discard(&self, name: &QueueName, ids: Vec<MessageId>, by: &str)
    -> Result<Discarded, StoreError>;

    /// Makes parked messages ready again, with their attempts at zero; a damaged one is accepted as it is. As by a
    /// redrive, the recorded failure of its key is cleared from a ledger in the same store, or it would be rejected
    /// again unrun; what was completed, is in doubt or is running stays. Returns how many were parked.
    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError>;

    /// Lets a halted FIFO group continue.
    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError>;

    /// FIFO groups that are halted because one of their messages died.
    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError>;

    /// Starts moving dead letters back. The task continues across restarts.
    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError>;

    /// Redrives out of a queue, newest first; ended ones are the audit trail.
    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError>;

    /// Stops a redrive; messages that it has moved stay moved.
    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError>;

    /// The state of the store. An error means that the store could not be reached, and says nothing about its state.
    async fn status(&self) -> Result<StoreStatus, StoreError>;

    /// Facts about the store and its environment (disk, file system, database settings), and the problems found there.
    /// Examined now, not cached.
    async fn examine(&self) -> Result<Examination, StoreError>;

    /// Shuts the store down in order: waiting calls get an answer, accepted writes are made durable. Later calls fail
    /// with `Unavailable`. A second close returns when the first one has finished.
    async fn close(&self) -> Result<(), StoreError>;

    /// Operations that only some stores have; `None`: this store has its own tools for them.
    fn maintenance(&self) -> Option<&dyn Maintenance> {
        None
    }

    /// Export and import, to move queues and ledger; `None`: this store cannot be moved from or to.
    fn transfer(&self) -> Option<&dyn Transfer> {
        None
    }
}

/// Extension of a store that can be restored from a Hapax backup. Such a store is paused after the restore.
#[async_trait]
pub trait Maintenance: Send + Sync {
    /// Starts deliveries of a paused store again.
    async fn resume(&self, by: &str) -> Result<(), StoreError>;
}

/// A store's report about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Examination {
    /// Facts by name. The value of a name that ends in `_bytes` or `_ms` is a number.
    #[serde(default)]
    pub facts: BTreeMap<String, serde_json::Value>,
    /// Problems and doubts, refusals first.
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// A store with all seams, shared.
pub type SharedStore = Arc<dyn Store>;

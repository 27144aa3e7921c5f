//! The context of a handler's run.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hapax_claim::{Granted, Lease, LeasedItem, Timer};
use hapax_core::{
    Attributes, Delivery, EntryId, Fence, Fingerprint, Grant, GroupId, IdempotencyKey, KeySource, MessageId,
    Receipt, Scope, Token,
};
use tokio::time::Instant;

use crate::auto::LeaseTime;
use crate::point::{Hooks, Point};

/// State shared by all deliveries of a worker.
pub(crate) struct Env {
    /// The source's name.
    pub name: String,
    pub scope: Scope,
    pub ttl_ms: u64,
    pub timer: Timer,
    /// The current lease of deliveries and claims.
    pub lease: Arc<LeaseTime>,
    pub hooks: Hooks,
}

/// Whether a delivery was settled by the transaction of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InTransaction {
    No,
    /// The result of the commit is not known.
    Unknown,
    Yes,
}

/// One delivery that the worker processes.
pub(crate) struct Job {
    pub env: Arc<Env>,
    pub delivery: Delivery,
    pub lease: Lease,
    pub received_us: u64,
    /// The handler was started.
    pub began: AtomicBool,
    /// It holds a start of the worker's rate that it has not used.
    pub has_token: AtomicBool,
    /// Its entry is in the store of its queue, although the worker claims nothing there (`transactional`).
    pub ledger_here: AtomicBool,
    settled: AtomicU8,
    entry: EntryId,
    granted: OnceLock<Granted>,
}

impl Job {
    pub fn new(env: Arc<Env>, delivery: Delivery, lease: Lease, received_us: u64) -> Self {
        let entry = EntryId::new(env.scope.clone(), delivery.key.clone());
        let (began, has_token) = (AtomicBool::new(false), AtomicBool::new(false));
        let (settled, granted) = (AtomicU8::new(InTransaction::No as u8), OnceLock::new());
        let ledger_here = AtomicBool::new(false);
        Self { env, delivery, lease, received_us, began, has_token, ledger_here, settled, entry, granted }
    }

    pub fn set_settled(&self, settled: InTransaction) {
        self.settled.store(settled as u8, Ordering::SeqCst);
    }

    pub fn is_settled(&self, how: InTransaction) -> bool {
        self.settled.load(Ordering::SeqCst) == how as u8
    }

    /// Lookup key of the intended effect in the ledger.
    pub fn entry(&self) -> &EntryId {
        &self.entry
    }

    /// Hash of the message's content: other content under the same key is a mismatch.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::new(blake3::hash(&self.delivery.body).to_hex()).expect("hex digits")
    }

    /// Whether the right to act is lost, as far as this process can know.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost(self.env.timer.now_us())
    }

    /// The tracing span of its run: the handler's log records carry these fields.
    pub fn span(&self) -> tracing::Span {
        let (queue, message, attempt) = (&self.env.name, self.delivery.id, self.delivery.attempt);
        tracing::info_span!("delivery", %queue, message_id = %message, attempt)
    }

    pub fn grant(&self) -> Option<&Grant> {
        self.granted.get().map(|granted| &granted.grant)
    }

    /// The handler starts now: what it was claimed for may happen.
    pub fn begin(&self) {
        self.began.store(true, Ordering::SeqCst);
        self.has_token.store(false, Ordering::SeqCst);
        self.mark_claim_used();
    }

    /// The claim is not given back any more when the last reference to this is dropped.
    pub fn mark_claim_used(&self) {
        if let Some(granted) = self.granted.get() {
            granted.mark_used();
        }
    }

    pub fn granted(&self, granted: Granted) {
        self.lease.claim_granted(granted.asked_us, granted.grant.lease_ms);
        let fresh = self.granted.set(granted).is_ok();
        assert!(fresh, "a delivery is claimed once");
    }
}

impl LeasedItem for Job {
    fn lease(&self) -> &Lease {
        &self.lease
    }

    fn lease_ms(&self) -> u64 {
        self.env.lease.ms()
    }

    fn receipt(&self) -> Option<&Receipt> {
        Some(&self.delivery.receipt)
    }

    fn claim(&self) -> Option<(&EntryId, &Token)> {
        self.grant().map(|grant| (&self.entry, &grant.token))
    }
}

/// The context of one run of a handler. Clones are cheap.
///
/// When the lease is lost, the handler is dropped at its next `await`, and the store refuses its records and settles.
/// Some effects cannot be prevented: code that blocks its thread until it awaits again, tasks that the handler spawned,
/// and third parties that it has called. Pass [`Cx::fence`] or [`Cx::derived_key`] to those.
#[derive(Clone)]
pub struct Cx {
    pub(crate) job: Arc<Job>,
}

impl Cx {
    /// Grows with every run for the same key: a system that remembers the largest one it has seen can refuse zombies.
    /// It does not undo their earlier writes.
    pub fn fence(&self) -> Fence {
        self.job.grant().map_or(self.job.delivery.fence, |grant| grant.fence)
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.job.delivery.attempt
    }

    /// Identifies the intended effect; chosen by the sender.
    pub fn idempotency_key(&self) -> &IdempotencyKey {
        &self.job.delivery.key
    }

    /// The source of the idempotency key. [`KeySource::MessageId`] covers redelivery, but not a producer that sent
    /// twice.
    pub fn key_source(&self) -> KeySource {
        self.job.delivery.key_source
    }

    /// The idempotency key with its scope: the lookup key of this effect in the ledger.
    pub fn entry_id(&self) -> &EntryId {
        &self.job.entry
    }

    /// The key for a call to another system on behalf of this message: the same in every attempt and for every
    /// duplicate. `label` distinguishes several such calls.
    pub fn derived_key(&self, label: &str) -> IdempotencyKey {
        if hapax_core::mutant::is("derived-key-per-run") {
            return self.entry_id().derived_key(&format!("{label} {}", self.fence().0));
        }
        self.entry_id().derived_key(label)
    }

    /// The message's id; the same in every attempt.
    pub fn message_id(&self) -> MessageId {
        self.job.delivery.id
    }

    /// The name of the queue or topic that the message came from.
    pub fn queue(&self) -> &str {
        &self.job.env.name
    }

    /// The message's group.
    pub fn group(&self) -> Option<&GroupId> {
        self.job.delivery.group.as_ref()
    }

    /// Named values sent with the body.
    pub fn attributes(&self) -> &Attributes {
        &self.job.delivery.attributes
    }

    /// The delivery with all its fields.
    pub fn delivery(&self) -> &Delivery {
        &self.job.delivery
    }

    /// Whether an earlier run lapsed or gave up: its effect may have happened.
    pub fn is_takeover(&self) -> bool {
        self.job.grant().is_some_and(|grant| grant.takeover)
    }

    /// When the lease ends unless a heartbeat renews it, or the time limit of the run, whichever comes first.
    pub fn deadline(&self) -> Instant {
        // Thirty years represent "never".
        let far_us = 30 * 365 * 24 * 3600 * 1_000_000;
        let until_us = self.job.lease.until_us().min(self.job.lease.run_until_us());
        let left_us = until_us.saturating_sub(self.job.env.timer.now_us()).min(far_us);
        Instant::now() + Duration::from_micros(left_us)
    }

    /// Time left until [`Cx::deadline`].
    pub fn remaining(&self) -> Duration {
        self.deadline().saturating_duration_since(Instant::now())
    }

    /// Completes when this run has to stop: its lease is lost, its time limit is over, or the worker shuts down. The
    /// handler is dropped at its next `await` anyway; this is for work that it has passed to other tasks.
    pub async fn cancelled(&self) {
        self.job.lease.cancelled().await;
    }

    /// Whether this run has to stop. For loops that block their thread.
    pub fn is_cancelled(&self) -> bool {
        self.job.lease.stop().is_some()
    }

    /// Marks the point of the effect for crash tests: [`Point::InEffect`]. Does nothing otherwise.
    pub async fn effect_point(&self) {
        if !self.job.env.hooks.is_empty() {
            self.job.env.hooks.pass(Point::InEffect).await;
        }
    }
}

impl std::fmt::Debug for Cx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cx")
            .field("queue", &self.queue())
            .field("message_id", &self.message_id())
            .field("attempt", &self.attempt())
            .field("key", self.idempotency_key())
            .finish_non_exhaustive()
    }
}

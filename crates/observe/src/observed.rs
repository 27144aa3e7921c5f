//! A store whose calls are observed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::policy::tier::ObservedQueue;
use hapax_core::store::SharedStore;
use hapax_core::validate::ATTRIBUTES_MAX;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, Claim, ClaimError, ClaimRequest, Delivery, Discarded, Document,
    DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, EndClaim, EntryFilter, EntryId,
    EntryView, Examination, ExpectedRevision, Extend, GroupId, Json, Ledger, LedgerCapabilities, LedgerStats,
    Maintenance, MessageId, MessageView, NewMessage, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName,
    QueueStats, QueueStore, Receive, RedriveRequest, RedriveTask, RemainingLease, Renew, Resolution,
    ResolveError, Revision, SendError, Sent, Settle, SettleError, Settled, StoreError, StoreStatus,
    TokenError, Transfer,
};
use tokio::sync::{Mutex, Semaphore};

use crate::kept;
use crate::observer::{ClaimSummary, HandOut, Observer, SettleSummary, UncertainRepeat};
use crate::trace::{BegunSpan, SpanContext, TRACEPARENT, Tracer, now_ns};

/// Lives are written to the store at most this often.
const WRITE_INTERVAL_MS: u64 = 2_000;
/// Number of receives whose repeated messages are looked up at the same time. Beyond it a cause stays unknown.
const LOOKUPS_MAX: u32 = 16;
/// All lives in memory are written in this number of parts; what happens meanwhile may need more.
const PARTS_MAX: usize = 40;
/// Every queue accepts messages of this size: no queue has a lower limit.
const EVERY_QUEUE_BYTES: u64 = 1_024;

/// Passes every call on to a store, and tells an [`Observer`] what was asked and answered. Clones are cheap.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle};
/// use hapax_observe::{ObservedStore, Subject};
///
/// let embedded = hapax_embedded::Embedded::open(folder.path(), Default::default())?;
/// let store = ObservedStore::new(std::sync::Arc::new(embedded));
/// let queue = QueueName::new("emails")?;
/// store.create_queue(&queue, QueueConfig::default()).await?;
/// let sent = store.send(&queue, vec![NewMessage::new("hello")]).await?.remove(0)?;
///
/// let delivery = store.receive(&queue, Receive::default()).await?.remove(0);
/// store.settle(&queue, vec![Settle::retry(delivery.receipt, "the mail server is away")]).await?;
/// let life = store.observer().life(&Subject::Message(sent.id)).unwrap();
/// assert_eq!(life.moments.len(), 2, "a delivery, and its return with the error");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ObservedStore {
    inner: SharedStore,
    observer: Arc<Observer>,
    last_write_ms: Arc<AtomicU64>,
    is_write_planned: Arc<AtomicBool>,
    /// One write at a time: the end of a process waits for the one under way.
    writing: Arc<Mutex<()>>,
    tracer: Option<Arc<Tracer>>,
    shared: bool,
    lookups: Arc<Semaphore>,
}

impl ObservedStore {
    /// Observes a store.
    pub fn new(inner: SharedStore) -> Self {
        Self::with_observer(inner, Arc::default())
    }

    /// Observes a store for an observer that others have, too.
    pub fn with_observer(inner: SharedStore, observer: Arc<Observer>) -> Self {
        Self {
            inner,
            observer,
            last_write_ms: Arc::default(),
            is_write_planned: Arc::default(),
            writing: Arc::default(),
            tracer: None,
            shared: true,
            lookups: Arc::new(Semaphore::new(LOOKUPS_MAX as usize)),
        }
    }

    /// No other process uses the store: a delivery whose settle was not seen here was not settled.
    #[must_use]
    pub fn only_process(mut self) -> Self {
        self.shared = false;
        self
    }

    /// Makes spans of sampled messages.
    #[must_use]
    pub fn traced(mut self, tracer: Arc<Tracer>) -> Self {
        self.tracer = Some(tracer);
        self
    }

    /// What was observed.
    pub fn observer(&self) -> &Arc<Observer> {
        &self.observer
    }

    /// Writes what is not written yet to the store's documents, once all causes are looked up.
    pub async fn write_history(&self) {
        let _all = self.lookups.acquire_many(LOOKUPS_MAX).await;
        write_parts(&self.inner, &self.observer, &self.writing).await;
    }

    /// Writes in a task of its own, when it is time: also if no further call comes, since other processes tell of it too.
    fn write_soon(&self) {
        if self.is_write_planned.load(Ordering::Relaxed) || !self.observer.has_unwritten() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_write_planned.swap(true, Ordering::Relaxed) {
            return;
        }
        let since_ms = self.observer.now_ms().saturating_sub(self.last_write_ms.load(Ordering::Relaxed));
        let wait = Duration::from_millis(WRITE_INTERVAL_MS.saturating_sub(since_ms));
        // A store that was dropped meanwhile is not kept open for it.
        let (inner, observer) = (Arc::downgrade(&self.inner), self.observer.clone());
        let (planned, last_write_ms) = (self.is_write_planned.clone(), self.last_write_ms.clone());
        let writing = self.writing.clone();
        runtime.spawn(async move {
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
            // What happens from now on is for the next write.
            last_write_ms.store(observer.now_ms(), Ordering::Relaxed);
            planned.store(false, Ordering::Relaxed);
            if let Some(inner) = inner.upgrade() {
                write_parts(&inner, &observer, &writing).await;
            }
        });
    }
}

async fn write_parts(inner: &SharedStore, observer: &Observer, writing: &Mutex<()>) {
    let _alone = writing.lock().await;
    let mut parts = 0;
    while observer.has_unwritten() && parts < PARTS_MAX {
        kept::write(inner.as_ref(), observer).await;
        parts += 1;
    }
}

impl ObservedStore {
    /// Asks the store how the deliveries before these ended. In a task of its own: a receive that waited for it could be dropped
    /// with its deliveries.
    fn look_up(&self, queue: &QueueName, repeats: Vec<UncertainRepeat>) {
        if repeats.is_empty() {
            return;
        }
        let (runtime, permit) =
            (tokio::runtime::Handle::try_current(), self.lookups.clone().try_acquire_owned());
        let (Ok(runtime), Ok(permit)) = (runtime, permit) else {
            for repeat in repeats {
                self.observer.explained(queue, repeat, None);
            }
            return;
        };
        let (inner, observer, queue) = (Arc::downgrade(&self.inner), self.observer.clone(), queue.clone());
        runtime.spawn(async move {
            for repeat in repeats {
                let browse = Browse { id: Some(repeat.id), limit: 1, ..Browse::default() };
                let found = match inner.upgrade() {
                    Some(inner) => inner.browse(&queue, browse).await.ok(),
                    None => None,
                };
                let record = found.and_then(|mut page| page.items.pop()).map(|view| view.history);
                observer.explained(&queue, repeat, record);
            }
            drop(permit);
        });
    }
}

/// The spans of deliveries that a call is about, and when it began.
type BegunCalls = (u64, Vec<Option<SpanContext>>);

impl ObservedStore {
    /// Sends messages of which some are sampled. `spans` has their places in the batch.
    async fn send_traced(
        &self,
        tracer: &Tracer,
        queue: &QueueName,
        mut batch: Vec<NewMessage>,
        spans: Vec<(usize, BegunSpan)>,
    ) -> Batch<Sent, SendError> {
        let start_ns = now_ns();
        for (at, span) in &spans {
            let message = &mut batch[*at];
            if span.injected && !self.has_room(queue, message).await {
                message.attributes.remove(TRACEPARENT);
            }
        }
        let sent = self.inner.send(queue, batch).await?;
        for (at, span) in spans {
            let Some(answer) = sent.get(at) else { break };
            let id = answer.as_ref().ok().map(|sent| sent.id.to_string());
            let error = answer.as_ref().err().map(ToString::to_string);
            tracer.finish(span.end(queue, start_ns, id, error));
        }
        Ok(sent)
    }

    /// Whether the queue accepts a message that a context was added to. It has to be known before the send: a message that
    /// was refused and sent again without its context would come behind the rest of its batch.
    async fn has_room(&self, queue: &QueueName, message: &NewMessage) -> bool {
        if message.attributes.len() > ATTRIBUTES_MAX {
            return false;
        }
        let bytes = message.bytes();
        // Most messages fit into every queue, and need no look at the configuration of theirs.
        bytes <= EVERY_QUEUE_BYTES
            || self.inner.queue(queue).await.is_ok_and(|info| bytes <= info.config.message_bytes_max)
    }

    /// The spans of these deliveries; `None` if nothing is traced. Asked before the call, which may end the deliveries.
    fn begin_calls(&self, deliveries: impl Iterator<Item = u64>) -> Option<BegunCalls> {
        self.tracer.as_ref()?;
        let contexts = self.observer.traces_of(deliveries)?;
        Some((now_ns(), contexts))
    }

    fn end_calls<'a>(
        &self,
        begun: Option<BegunCalls>,
        operation: &str,
        results: impl Iterator<Item = (&'a QueueName, &'static str)>,
    ) {
        let (Some(tracer), Some((start_ns, contexts))) = (&self.tracer, begun) else { return };
        for (context, (queue, result)) in contexts.into_iter().zip(results) {
            if let Some(context) = context {
                tracer.called(context, operation, queue, start_ns, result);
            }
        }
    }
}

fn settled_word(answer: &Result<Settled, SettleError>) -> &'static str {
    match answer {
        Ok(Settled::Acked) => "acked",
        Ok(Settled::Returned { .. }) => "returned",
        Ok(Settled::Dead) => "dead",
        Ok(Settled::Parked) => "parked",
        Err(error) => error.code(),
    }
}

fn claimed_word(answer: &Result<Claim, ClaimError>) -> &'static str {
    match answer {
        Ok(Claim::Granted(grant)) if grant.takeover => "taken over",
        Ok(Claim::Granted(_)) => "granted",
        Ok(Claim::Completed { .. }) => "replayed",
        Ok(Claim::InProgress { .. }) => "in progress",
        Ok(Claim::InDoubt { .. }) => "in doubt",
        Err(error) => error.code(),
    }
}

#[async_trait]
impl QueueStore for ObservedStore {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn send(&self, queue: &QueueName, mut batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        let tracer = self.tracer.as_deref();
        let spans = tracer.map(|tracer| tracer.begin_sends(&mut batch)).unwrap_or_default();
        let sent = match tracer {
            // Few are: the others do not pay for the size of its future.
            Some(tracer) if !spans.is_empty() => {
                Box::pin(self.send_traced(tracer, queue, batch, spans)).await?
            }
            _ => self.inner.send(queue, batch).await?,
        };
        self.observer.sent(queue, &sent);
        Ok(sent)
    }

    async fn receive(&self, queue: &QueueName, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        let (consumer, acked) = (receive.consumer.clone(), receive.ack_on_receive);
        self.observer.heard(queue, consumer.as_deref());
        let mut deliveries = self.inner.receive(queue, receive).await?;
        if let Some(tracer) = &self.tracer {
            for delivery in &mut deliveries {
                tracer.delivered(queue, delivery);
            }
        }
        let how = HandOut { acked, traced: self.tracer.is_some(), shared: self.shared };
        let uncertain = self.observer.delivered(queue, consumer.as_deref(), how, &deliveries);
        self.look_up(queue, uncertain);
        self.write_soon();
        Ok(deliveries)
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let asked: Vec<_> = batch.iter().map(|settle| SettleSummary::new(&self.observer, settle)).collect();
        let begun = self.begin_calls(asked.iter().map(|one| one.delivery));
        let answers = self.inner.settle(queue, batch).await?;
        self.end_calls(begun, "settle", answers.iter().map(|answer| (queue, settled_word(answer))));
        self.observer.settled(queue, &asked, &answers);
        self.write_soon();
        Ok(answers)
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        let asked: Vec<_> =
            batch.iter().map(|one| (self.observer.hash(&one.receipt), one.lease_ms)).collect();
        let answers = self.inner.extend(queue, batch).await?;
        self.observer.extended(queue, &asked, &answers);
        Ok(answers)
    }
}

#[async_trait]
impl QueueAdmin for ObservedStore {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        self.inner.create_queue_with_interval(name, config, interval_ms).await
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        self.inner.queue(name).await
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        let revision = self.inner.set_queue(name, config, expected).await?;
        self.observer.policy_changed(name);
        Ok(revision)
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        self.inner.pause_queue(name, by, reason).await
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        self.inner.resume_queue(name, by).await
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        self.inner.delete_queue(name).await?;
        self.observer.queue_deleted(name);
        Ok(())
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        self.inner.queues().await
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        self.inner.stats(name).await
    }

    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        self.inner.stats_of(names).await
    }

    async fn observed(&self, name: &QueueName) -> Result<Option<ObservedQueue>, StoreError> {
        Ok(self.observer.window(name))
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        self.inner.purge_with_interval(name, interval_ms).await
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        self.inner.browse(name, browse).await
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        self.inner.discard(name, ids, by).await
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        self.inner.release(name, ids).await
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        self.inner.release_group(name, group).await
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        self.inner.halted_groups(name).await
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.inner.start_redrive(request).await
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        self.inner.redrives(from).await
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.inner.cancel_redrive(id).await
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        self.inner.status().await
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.inner.examine().await
    }

    async fn close(&self) -> Result<(), StoreError> {
        if self.observer.has_unwritten() {
            self.write_history().await;
        }
        self.inner.close().await
    }

    fn maintenance(&self) -> Option<&dyn Maintenance> {
        self.inner.maintenance()
    }

    fn transfer(&self) -> Option<&dyn Transfer> {
        self.inner.transfer()
    }
}

#[async_trait]
impl Ledger for ObservedStore {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.inner.ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        let asked: Vec<_> = batch.iter().map(|claim| ClaimSummary::new(&self.observer, claim)).collect();
        let deliveries = asked.iter().filter_map(|one| one.delivery.as_ref().map(|(_, hash)| *hash));
        let begun = self.begin_calls(deliveries);
        let answers = self.inner.claim(batch).await?;
        if begun.is_some() {
            let queues = asked.iter().filter_map(|one| one.delivery.as_ref().map(|(queue, _)| queue));
            // Claims without a delivery have no span, and are left out of both lists.
            let of_deliveries = asked.iter().zip(&answers).filter(|(one, _)| one.delivery.is_some());
            let words = of_deliveries.map(|(_, answer)| claimed_word(answer));
            self.end_calls(begun, "claim", queues.zip(words));
        }
        self.observer.claimed(&asked, &answers);
        self.write_soon();
        Ok(answers)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        self.inner.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        let asked = batch.clone();
        let answers = self.inner.end(batch).await?;
        self.observer.ended(&asked, &answers);
        Ok(answers)
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        self.inner.entry(id).await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        self.inner.entries(filter).await
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.inner.resolve(id, resolution, by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.inner.forget(id, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.inner.ledger_stats().await
    }
}

#[async_trait]
impl Documents for ObservedStore {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        self.inner.document(name).await
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        self.inner.documents(filter).await
    }

    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        self.inner.put_document(name, value, expected).await
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        self.inner.delete_document(name, expected).await
    }
}

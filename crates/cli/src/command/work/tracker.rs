//! Between the worker and its queue: knows what is being worked on, reports how each delivery ended, and says when
//! there is nothing more to do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax::core::{Batch, QueueSource, Remaining, Source, SourceDescription};
use hapax::{
    Delivery, Extend, GroupId, How, IdempotencyKey, MessageId, Receipt, Receive, Settle, SettleError,
    Settled, StoreError,
};
use tokio::sync::Notify;

use super::report::{Line, Reporter};

/// A delivery whose end was not confirmed for so long is not waited for: it returns by its lease.
const UNCONFIRMED: Duration = Duration::from_mins(2);
/// A duplicate of what is being worked on right here is put back for no longer than this: its turn comes when the other
/// one ends, not when that one's lease would.
const RIVAL_MS: u64 = 500;

/// When to stop without being told.
#[derive(Debug, Clone, Copy)]
pub struct Until {
    /// After one delivery.
    pub once: bool,
    /// When a receive finds nothing and nothing is being worked on.
    pub empty: bool,
}

struct Open {
    id: MessageId,
    attempt: u32,
    group: Option<GroupId>,
    key: IdempotencyKey,
    since: Instant,
    /// When it was received, another delivery with its key was being worked on here.
    rival: bool,
    /// The command was started, or was to be.
    begun: bool,
    /// It ended so.
    ended: Option<(Instant, String)>,
    /// What ended it was not the message's fault: no attempt is counted.
    uncounted: bool,
}

/// See the module.
pub struct DeliveryTracker {
    source: QueueSource,
    until: Until,
    /// Deliveries are acked when they are received; nobody settles them.
    acked: bool,
    reporter: Reporter,
    open: Mutex<HashMap<Receipt, Open>>,
    taken: AtomicBool,
    /// When the last of those comes back that were put back because of a rival.
    returns: Mutex<Option<Instant>>,
    changed: Notify,
    over: Notify,
    fatal: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeliveryTracker {
    pub fn new(source: QueueSource, until: Until, acked: bool, reporter: Reporter) -> Arc<Self> {
        Arc::new(Self {
            source,
            until,
            acked,
            reporter,
            open: Mutex::default(),
            taken: AtomicBool::new(false),
            returns: Mutex::new(None),
            changed: Notify::new(),
            over: Notify::new(),
            fatal: Mutex::new(None),
        })
    }

    /// Completes when there is nothing more to do.
    pub async fn over(&self) {
        self.over.notified().await;
    }

    /// The command cannot be started: everything stops.
    pub fn fail(&self, problem: String) {
        lock(&self.fatal).get_or_insert(problem);
        self.over.notify_one();
    }

    /// Why everything stopped.
    pub fn failure(&self) -> Option<String> {
        lock(&self.fatal).take()
    }

    /// How many commands run.
    pub fn running(&self) -> usize {
        lock(&self.open).values().filter(|open| open.begun && open.ended.is_none()).count()
    }

    pub fn begin(&self, receipt: &Receipt) {
        if let Some(open) = lock(&self.open).get_mut(receipt) {
            open.begun = true;
        }
    }

    /// A run ended, by words for people. Not the message's fault: its attempt is not counted.
    pub fn end(&self, receipt: &Receipt, words: String, uncounted: bool) {
        if let Some(open) = lock(&self.open).get_mut(receipt) {
            open.ended = Some((Instant::now(), words));
            open.uncounted = uncounted;
        }
        if self.acked {
            self.settled(receipt, &How::Ack, &Ok(Settled::Acked));
        }
    }

    fn takes_in(&self, deliveries: &[Delivery]) {
        let mut open = lock(&self.open);
        for delivery in deliveries {
            let key = delivery.key.clone();
            let one = Open {
                id: delivery.id,
                attempt: delivery.attempt,
                group: delivery.group.clone(),
                rival: open.values().any(|other| other.key == key),
                key,
                since: Instant::now(),
                begun: false,
                ended: None,
                uncounted: false,
            };
            open.insert(delivery.receipt.clone(), one);
        }
    }

    /// Waits until a delivery ends; forgets those whose end was never confirmed.
    async fn change(&self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.changed.notified()).await;
        let forgotten =
            |open: &Open| open.ended.as_ref().is_some_and(|(ended, _)| ended.elapsed() > UNCONFIRMED);
        lock(&self.open).retain(|_, open| !forgotten(open));
    }

    /// What the worker cannot know: whose fault an end was, and that a rival is near.
    fn as_known_here(&self, settle: Settle) -> Settle {
        let open = lock(&self.open);
        let Some(one) = open.get(&settle.receipt) else { return settle };
        let how = match settle.how {
            How::Retry { .. } if one.uncounted => How::Defer { after_ms: 0 },
            How::Defer { after_ms } if one.rival && !one.begun => {
                How::Defer { after_ms: after_ms.min(RIVAL_MS) }
            }
            how => how,
        };
        Settle { how, ..settle }
    }

    fn settled(&self, receipt: &Receipt, how: &How, answer: &Result<Settled, SettleError>) {
        let mut open = lock(&self.open);
        let Some(one) = open.remove(receipt) else { return };
        if matches!(answer, Ok(Settled::Returned { .. })) && one.group.is_some() {
            // In a FIFO queue those behind it went back with it, without a settle of their own.
            open.retain(|_, other| other.begun || other.group != one.group);
        }
        drop(open);
        if let (true, Ok(Settled::Returned { after_ms })) = (one.rival && !one.begun, answer) {
            // The store began to count before it answered, so it is ready by then.
            let at = Some(Instant::now() + Duration::from_millis(*after_ms));
            let mut returns = lock(&self.returns);
            *returns = at.max(*returns);
        }
        let words = one.ended.map(|(_, words)| words);
        let line = Line {
            id: one.id,
            attempt: one.attempt,
            key: one.key,
            ran: one.begun,
            took: one.since.elapsed(),
            how,
            answer,
            words: words.unwrap_or_default(),
        };
        self.reporter.print(&line);
        if self.until.once {
            // Another run of its key is not over, or the ledger cannot be asked: that was nobody's turn.
            if !one.begun && matches!(how, How::Defer { .. }) {
                self.taken.store(false, Ordering::SeqCst);
            } else {
                self.over.notify_one();
            }
        }
        self.changed.notify_one();
    }
}

#[async_trait]
impl Source for DeliveryTracker {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        self.source.describe().await
    }

    async fn next(&self, mut receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        if self.until.once {
            receive.max = 1;
            while self.taken.load(Ordering::SeqCst) {
                self.changed.notified().await;
            }
        }
        if self.until.empty {
            receive.wait_ms = Some(0);
        }
        let deliveries = self.source.next(receive).await?;
        self.takes_in(&deliveries);
        self.taken.fetch_or(!deliveries.is_empty(), Ordering::SeqCst);
        if self.until.empty && deliveries.is_empty() {
            let returns = *lock(&self.returns);
            if !lock(&self.open).is_empty() {
                self.change().await;
            } else if let Some(left) = returns.and_then(|at| at.checked_duration_since(Instant::now())) {
                tokio::time::sleep(left.min(Duration::from_millis(RIVAL_MS))).await;
            } else {
                self.over.notify_one();
                std::future::pending::<()>().await;
            }
        }
        Ok(deliveries)
    }

    async fn finish(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let batch: Vec<_> = batch.into_iter().map(|settle| self.as_known_here(settle)).collect();
        let ends: Vec<_> = batch.iter().map(|one| (one.receipt.clone(), one.how.clone())).collect();
        let answers = self.source.finish(batch).await?;
        for ((receipt, how), answer) in ends.iter().zip(&answers) {
            // A refused claim is settled once more, in another way.
            if !matches!(answer, Err(SettleError::Claim(_))) {
                self.settled(receipt, how, answer);
            }
        }
        Ok(answers)
    }

    async fn keep(&self, batch: Vec<Extend>) -> Batch<Remaining, SettleError> {
        self.source.keep(batch).await
    }
}

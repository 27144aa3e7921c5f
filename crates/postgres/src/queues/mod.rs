//! The queues of the store.
//!
//! The parts: `send`, `receive` and `settle` are the operations of producers and consumers, `admin`, `browse` and
//! `redrive` those of operators, `sweep` does what time causes. Sends and acks of standard queues, and extensions, are
//! single statements for all calls that wait ([`Merger`]). Everything else is one transaction per call: lock, load (`write`),
//! decide in memory (`work`), write.
//!
//! Where queues and ledger meet, each calls functions of the other. Ids of entries are those of the SQL function
//! `hapax.entry_id`.
//!
//! The ledger calls these SQL functions, which its migration defines without effect and which the migration of the queues
//! replaces: `hapax.entry_needed(id bytea) RETURNS boolean` (whether a message in the store needs the entry, so that it is
//! not pruned), `hapax.doubt_cleared(ids bytea[])` (messages that are parked for these entries continue) and
//! `hapax.link_entries(ids bytea[], messages bigint[], granted boolean[])` (claims for deliveries). It asks
//! `Queues::message_of` for the message of a receipt.
//!
//! The queues call, inside their own transactions: `ledger::end_in` to end the claim of a settle, `ledger::in_doubt_in`,
//! and the SQL function `hapax.ledger_clear(ids bytea[], redriven boolean)` before a message is linked to its key.

mod admin;
mod browse;
mod catalogue;
mod copy;
mod counted;
mod entries;
mod fair;
mod feed;
mod floors;
mod import;
mod in_flight;
mod merged;
mod receipt;
mod receive;
mod redrive;
mod room;
mod row;
mod seams;
mod send;
mod settle;
mod settled;
mod stats;
mod sweep;
mod transaction;
mod transfer;
mod unsynced;
mod work;
mod write;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use hapax_core::store::QueueTotals;
use hapax_core::{QueueName, Receipt, StoreError};

use crate::Base;
use crate::hints::Topic;
use crate::ledger::PostgresLedger;
use crate::merge::Merger;

pub(crate) use catalogue::Queue;
use feed::Feed;
pub(crate) use settled::Ending;

/// The queues' part of a store.
pub(crate) struct Queues {
    inner: Arc<Inner>,
}

/// What the queues' calls and background tasks share.
pub(crate) struct Inner {
    base: Arc<Base>,
    ledger: Arc<PostgresLedger>,
    /// Configurations as they were last read. Every statement that relies on one compares its version.
    known: Mutex<HashMap<QueueName, Arc<Queue>>>,
    totals: Mutex<HashMap<i32, QueueTotals>>,
    feeds: Mutex<HashMap<i32, Arc<Feed>>>,
    /// What time causes is done by one task per queue at a time.
    sweeps: Mutex<HashMap<i32, Arc<tokio::sync::Mutex<()>>>>,
    floors: Mutex<HashMap<i32, floors::Floors>>,
    noisy: Mutex<HashMap<i32, fair::Known>>,
    /// The leases of each queue as they were last counted.
    in_flight: Mutex<HashMap<i32, in_flight::Counted>>,
    fence_floor: unsynced::Floor,
    /// Figures whose count took long.
    counted: Mutex<counted::Counted>,
    writes: Merger<merged::Write, merged::Written>,
    extends: Merger<settle::Extends, Vec<(u64, u64)>>,
    /// Deliveries that transactions of this process are ending, by place and fence.
    ending: Mutex<HashSet<(u64, u64)>>,
    /// Deliveries that transactions of this process have ended, and whose end was not followed.
    settled: Mutex<HashMap<i32, Vec<i64>>>,
    begun: Once,
    closed: AtomicBool,
    sweeper: sweep::Signals,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queues {
    pub fn new(base: &Arc<Base>, ledger: &Arc<PostgresLedger>) -> Self {
        let inner = Inner {
            base: base.clone(),
            ledger: ledger.clone(),
            known: Mutex::default(),
            totals: Mutex::default(),
            feeds: Mutex::default(),
            sweeps: Mutex::default(),
            floors: Mutex::default(),
            noisy: Mutex::default(),
            in_flight: Mutex::default(),
            fence_floor: unsynced::Floor::default(),
            counted: Mutex::default(),
            writes: merged::merger(base),
            extends: settle::extend_merger(base),
            ending: Mutex::default(),
            settled: Mutex::default(),
            begun: Once::new(),
            closed: AtomicBool::new(false),
            sweeper: sweep::Signals::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The message that a receipt names.
    pub fn message_of(&self, _queue: &QueueName, receipt: &Receipt) -> Option<i64> {
        receipt::Named::parse(&self.inner.base.seal, receipt).map(|named| named.seq as i64)
    }

    /// Stops the background work; calls that wait fail.
    pub fn close(&self) {
        self.inner.closed.store(true, Ordering::Relaxed);
        self.look_again();
    }

    /// Has every call that waits look again, and does what time causes, now.
    pub fn look_again(&self) {
        self.kick_all();
        self.inner.sweeper.now();
    }

    /// Has every call that waits look again.
    pub fn kick_all(&self) {
        for feed in lock(&self.inner.feeds).values() {
            feed.kick();
        }
    }

    /// Waits until each call that waits has looked, and until what time causes is done.
    pub async fn quiet(&self) {
        while !lock(&self.inner.feeds).values().all(|feed| feed.is_idle()) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        if self.inner.begun.is_completed() {
            self.inner.sweeper.done().await;
        }
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Starts the background work with the first use of the queues.
    fn begin(self: &Arc<Self>) -> Result<(), StoreError> {
        if self.is_closed() {
            return Err(StoreError::Unavailable("the store is closed".into()));
        }
        self.begun.call_once(|| {
            self.base.pool.runtime().spawn(sweep::run(Arc::downgrade(self)));
            self.base.pool.runtime().spawn(feed::listen(Arc::downgrade(self)));
        });
        Ok(())
    }

    /// Something of a queue can be received: calls that wait look again, here and in other processes.
    fn freed(&self, queue_id: i32) {
        self.kick(queue_id);
        self.base.hints.publish(Topic::Queues, [queue_id as u64]);
    }

    /// Calls of this process that wait look again.
    fn kick(&self, queue_id: i32) {
        if let Some(feed) = lock(&self.feeds).get(&queue_id) {
            feed.kick();
        }
    }

    /// Adds to the counters of a queue.
    fn count(&self, queue_id: i32, more: &QueueTotals) {
        if *more == QueueTotals::default() {
            return;
        }
        let mut all = lock(&self.totals);
        let totals = all.entry(queue_id).or_default();
        totals.sent += more.sent;
        totals.duplicates += more.duplicates;
        totals.delivered += more.delivered;
        totals.acked += more.acked;
        totals.retried += more.retried;
        totals.deferred += more.deferred;
        totals.expired += more.expired;
        totals.dead += more.dead;
        totals.stale += more.stale;
        totals.retention_dropped += more.retention_dropped;
        totals.damaged += more.damaged;
    }
}

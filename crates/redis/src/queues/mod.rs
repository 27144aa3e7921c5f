//! Queues. Each operation on a queue is one script on the shard of that queue; `scripts/queue/common.lua` describes what is
//! kept. A message that goes to another queue (dead letters, redrives) takes two steps, see `moves`.

mod admin;
mod call;
mod copy;
mod doubt;
mod import;
mod message;
mod moves;
mod receive;
mod redrive;
mod seams;
mod send;
mod settle;
mod stats;
mod sweep;
mod transfer;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use hapax_core::{QueueConfig, QueueInfo, QueueName, StoreError};

use crate::hints::Hints;
use crate::keys::{Shard, shard_of_queue};
use crate::ledger::waiters::{Asking, Waiters};
use crate::run::Runner;

#[cfg(test)]
pub(crate) use call::{arguments, keys};
pub(crate) use doubt::Claims;
pub(crate) use message::DeliveryRef;
pub(crate) use moves::{HELD, WAITING};
pub(crate) use sweep::run as run_sweeper;

/// The longest pause between two looks at what other processes may change, in milliseconds: while their hints are heard, and
/// while they are not.
pub(crate) const POLL_MS_MAX: u64 = 2_000;
const POLL_MS_DEAF: u64 = 500;
/// The first pause; it doubles.
pub(crate) const POLL_MS_MIN: u64 = 20;
/// How often a call is repeated because the queue's settings were changed meanwhile.
const CHANGES_MAX: usize = 10;
/// Queues whose scripts are sent together. Each script is short, and the time for all answers is that of one call.
const TOGETHER_MAX: usize = 100;

/// The queues' part of a store.
pub(crate) struct Queues {
    runner: Arc<Runner>,
    /// Receives that wait, by the names of their queues.
    pub waiters: Arc<Waiters>,
    asking: Arc<Asking>,
    /// Whether changes of other processes are heard.
    hints: OnceLock<Weak<Hints>>,
    /// What the ledger knows about claims, some of which end with a delivery.
    pub claims: Claims,
    /// What was read of the queues. Each script compares the revision.
    known: Mutex<HashMap<QueueName, Arc<Known>>>,
    /// The largest fence that this process has seen. Shards have clocks of their own.
    fence: AtomicU64,
    /// For tests: the step behind which a move ends; 0: none.
    pub dies_at: AtomicU8,
}

/// A queue as this process knows it.
pub(crate) struct Known {
    name: QueueName,
    shard: Shard,
    config: QueueConfig,
    /// The settings that the scripts need, with their revision.
    settings: Vec<u8>,
    keys: Vec<String>,
}

impl Queues {
    pub fn new(runner: Arc<Runner>) -> Self {
        Self {
            runner,
            waiters: Arc::default(),
            asking: Arc::default(),
            hints: OnceLock::new(),
            claims: Claims::default(),
            known: Mutex::default(),
            fence: AtomicU64::new(0),
            dies_at: AtomicU8::new(0),
        }
    }

    /// Hints of other processes are heard from now on.
    pub fn hear(&self, hints: &Arc<Hints>) {
        // It is called once.
        let _ = self.hints.set(Arc::downgrade(hints));
    }

    /// The longest pause between two looks at what others may change in a shard.
    pub fn poll_ms_max(&self, shard: Shard) -> u64 {
        let hints = self.hints.get().and_then(Weak::upgrade);
        if hints.is_some_and(|hints| hints.are_heard(shard)) { POLL_MS_MAX } else { POLL_MS_DEAF }
    }

    /// All calls that were made before have been answered, or wait for a message.
    pub async fn quiet(&self) {
        self.asking.passed().await;
    }

    /// The clock was moved by hand.
    pub async fn clock_moved(&self) -> Result<(), StoreError> {
        self.sweep_all().await?;
        self.waiters.wake_all();
        Ok(())
    }

    fn cache(&self) -> MutexGuard<'_, HashMap<QueueName, Arc<Known>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, name: &QueueName) {
        self.cache().remove(name);
    }

    /// The queue with its settings, from memory if they were read before.
    async fn known(&self, name: &QueueName) -> Result<Arc<Known>, StoreError> {
        let found = self.cache().get(name).cloned();
        if let Some(found) = found {
            return Ok(found);
        }
        let (info, revision) = self.read_info(name).await?;
        Ok(self.remember(info, &revision))
    }

    /// The same for several queues; `None` for one that does not exist. Those that are not in memory are read together.
    async fn known_of(&self, names: &[&QueueName]) -> Vec<Result<Option<Arc<Known>>, StoreError>> {
        let mut all: Vec<Result<Option<Arc<Known>>, StoreError>> = {
            let cache = self.cache();
            names.iter().map(|name| Ok(cache.get(*name).cloned())).collect()
        };
        let missing: Vec<usize> = (0..names.len()).filter(|at| matches!(all[*at], Ok(None))).collect();
        for some in missing.chunks(TOGETHER_MAX) {
            let asked: Vec<&QueueName> = some.iter().map(|at| names[*at]).collect();
            for (at, info) in some.iter().zip(self.read_infos(&asked).await) {
                all[*at] = info.map(|info| info.map(|(info, revision)| self.remember(info, &revision)));
            }
        }
        all
    }

    fn remember(&self, info: QueueInfo, revision: &str) -> Arc<Known> {
        let keys = self.runner.keys.queue(&info.name);
        let known = Arc::new(Known::new(keys, &info.name, info.config, revision));
        self.cache().insert(info.name, known.clone());
        known
    }

    fn fence_floor(&self) -> u64 {
        self.fence.load(Ordering::Relaxed)
    }

    fn saw_fence(&self, fence: u64) {
        self.fence.fetch_max(fence, Ordering::Relaxed);
    }
}

impl Known {
    fn new(keys: Vec<String>, name: &QueueName, config: QueueConfig, revision: &str) -> Self {
        let settings = call::settings(revision, name, &config);
        Self { name: name.clone(), shard: shard_of_queue(name), config, settings, keys }
    }
}

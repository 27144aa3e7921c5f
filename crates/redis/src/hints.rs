//! Hints from other processes by sharded pub/sub: scripts publish in which queue messages became ready and which keys were freed,
//! and whoever waits for them here looks again. A hint may be lost, so waiting calls also look by themselves: seldom while
//! hints are heard, often while they are not.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};

use crate::keys::{SHARDS, Shard};
use crate::ledger::waiters::Waiters;
use crate::node::pipeline;
use crate::queues::Queues;
use crate::run::Runner;

/// Time between two looks whether all shards are heard.
const EVERY: Duration = Duration::from_secs(1);

/// What arrives, and from whom.
struct Ears {
    claims: Arc<Waiters>,
    queues: Arc<Waiters>,
    heard: AtomicU64,
}

/// A connection that listens to the shards of one node.
struct Listener {
    shards: Vec<Shard>,
    is_broken: Arc<AtomicBool>,
    /// Dropped with the listener, which ends the subscriptions.
    _connection: MultiplexedConnection,
}

/// The hints of a store.
pub(crate) struct Hints {
    runner: Arc<Runner>,
    ears: Arc<Ears>,
    listeners: Mutex<HashMap<String, Listener>>,
    /// A bit for each shard that is heard.
    shards_heard: AtomicU64,
}

impl Ears {
    /// A hint, or the end of the connection.
    fn hear(&self, push: &PushInfo) {
        if push.kind != PushKind::SMessage {
            return;
        }
        let Some(Value::BulkString(hint)) = push.data.get(1) else { return };
        self.heard.fetch_add(1, Ordering::Relaxed);
        match std::str::from_utf8(hint).ok().and_then(|hint| hint.split_once(' ')) {
            Some(("q", queue)) => self.queues.freed(queue),
            Some(("c", member)) => self.claims.freed(member),
            _ => {}
        }
    }
}

impl Hints {
    pub fn new(runner: Arc<Runner>, queues: &Queues) -> Self {
        let (claims, queues) = (queues.claims.waiters.clone(), queues.waiters.clone());
        let ears = Arc::new(Ears { claims, queues, heard: AtomicU64::new(0) });
        Self { runner, ears, listeners: Mutex::default(), shards_heard: AtomicU64::new(0) }
    }

    /// How many hints have arrived.
    pub fn heard(&self) -> u64 {
        self.ears.heard.load(Ordering::Relaxed)
    }

    /// Whether the changes of others in a shard are heard.
    pub fn are_heard(&self, shard: Shard) -> bool {
        self.shards_heard.load(Ordering::Relaxed) & (1 << shard) != 0
    }

    /// Which shards each master has.
    fn wanted(&self) -> HashMap<String, Vec<Shard>> {
        let mut wanted: HashMap<String, Vec<Shard>> = HashMap::new();
        for shard in 0..SHARDS {
            if let Some(owner) = self.runner.topology.owner(shard) {
                wanted.entry(owner).or_default().push(shard);
            }
        }
        wanted
    }

    /// Listens to the nodes that are not heard.
    async fn look(&self) {
        let wanted = self.wanted();
        let missing: Vec<(String, Vec<Shard>)> = {
            let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            listeners.retain(|address, listener| {
                !listener.is_broken.load(Ordering::Relaxed) && wanted.get(address) == Some(&listener.shards)
            });
            wanted.into_iter().filter(|(address, _)| !listeners.contains_key(address)).collect()
        };
        self.count();
        for (address, shards) in missing {
            match self.listen(&address, shards).await {
                Ok(listener) => {
                    self.listeners.lock().unwrap_or_else(PoisonError::into_inner).insert(address, listener);
                    self.count();
                    // What happened before is not heard any more.
                    self.ears.queues.wake_all();
                    self.ears.claims.wake_all();
                }
                Err(error) => {
                    tracing::debug!(%error, address, "hints are not heard; waiting calls look more often");
                }
            }
        }
    }

    fn count(&self) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let shards = listeners.values().flat_map(|listener| &listener.shards);
        self.shards_heard.store(shards.fold(0, |bits, shard| bits | 1 << shard), Ordering::Relaxed);
    }

    async fn listen(&self, address: &str, shards: Vec<Shard>) -> Result<Listener, String> {
        let is_broken = Arc::new(AtomicBool::new(false));
        let (ears, broken) = (self.ears.clone(), is_broken.clone());
        let hear = move |push: PushInfo| {
            // The subscription ends with the connection, or because the shard has moved.
            if matches!(push.kind, PushKind::Disconnection | PushKind::SUnsubscribe) {
                broken.store(true, Ordering::Relaxed);
            }
            ears.hear(&push);
            Ok::<_, redis::aio::SendError>(())
        };
        let mut connection = self.runner.topology.subscriber(address, hear).await?;
        let mut asked = pipeline();
        for shard in &shards {
            asked.cmd("SSUBSCRIBE").arg(self.runner.keys.wake(*shard));
        }
        let told: Vec<redis::RedisResult<Value>> =
            asked.query_async(&mut connection).await.map_err(|error| error.to_string())?;
        for told in told {
            told.map_err(|error| error.to_string())?;
        }
        Ok(Listener { shards, is_broken, _connection: connection })
    }
}

/// Listens until the store is dropped or closed.
pub(crate) async fn run(hints: Weak<Hints>) {
    loop {
        let Some(hints) = hints.upgrade() else { return };
        hints.look().await;
        drop(hints);
        tokio::time::sleep(EVERY).await;
    }
}

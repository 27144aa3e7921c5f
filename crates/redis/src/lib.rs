//! Queues, ledger and documents of Hapax on Redis 7 and Valkey: several processes share one node, a master with replicas, or a Cluster.
//!
//! ```no_run
//! # async fn example() -> Result<(), hapax_redis::OpenError> {
//! use hapax_redis::{Durability, Options, RedisStore};
//! let options = Options { durability: Durability::Replicated, ..Options::default() };
//! let store = RedisStore::open("redis+cluster://10.0.0.1:6379,10.0.0.2:6379", options).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The parts, from the outside in: `queues`, `ledger` and `documents` implement the seams by calls of
//! scripts; `run` brings a call to the node that has its keys, repeats it where nothing was done, and asks for the
//! confirmations of the level; `topology` knows the nodes, `node` their connections; `guard` watches the servers' settings;
//! `error` says what a failure means. Lua lives in `scripts/` only. Every time comes from Redis's TIME.

mod connect;
mod copy;
mod documents;
mod error;
mod guard;
mod hints;
mod keys;
mod layout;
mod ledger;
mod link;
mod msgpack;
mod node;
mod queues;
mod run;
mod script;
mod topology;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_core::{Examination, StoreError};
use thiserror::Error;
use tokio::task::AbortHandle;

pub use connect::{Durability, Options, UrlError};
pub use guard::FINDING_CODES;

use connect::Target;
use guard::Guard;
use hints::Hints;
use keys::Keys;
use ledger::LedgerState;
use queues::Queues;
use run::{Boot, Runner};
use topology::Topology;

/// Why a store could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL or an option is not acceptable.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// Redis cannot be reached or refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The server lacks what the scripts need.
    #[error("{node} has version {version}")]
    TooOld {
        /// The server.
        node: String,
        /// Its version.
        version: String,
    },
    /// The server may delete entries when its memory is full.
    #[error(
        "{node} has maxmemory-policy {policy}: it may evict entries, and a forgotten outcome is a second effect"
    )]
    MayEvict {
        /// The server.
        node: String,
        /// Its policy.
        policy: String,
    },
    /// The level `local` asks for more than the server does.
    #[error("{node} has {found}, and the level `local` needs each change on the disk before it is answered")]
    Durability {
        /// The server.
        node: String,
        /// The setting that it has.
        found: String,
    },
    /// The level `replicated` needs a replica.
    #[error("{node} has no replica, and the level `replicated` needs one")]
    NoReplica {
        /// The server.
        node: String,
    },
    /// Another version of Hapax has written what is there, in a form that this one does not read.
    #[error("the data in {node} has {found}, and this version of Hapax reads layout {}", layout::LAYOUT)]
    Layout {
        /// The server.
        node: String,
        /// The layout that it has.
        found: String,
    },
}

impl OpenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Url(_) => "store-url",
            Self::Store(error) => error.code(),
            Self::TooOld { .. } => "redis-too-old",
            Self::MayEvict { .. } => "redis-may-evict",
            Self::Durability { .. } => "redis-durability",
            Self::NoReplica { .. } => "redis-no-replica",
            Self::Layout { .. } => "redis-layout",
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Url(_) => "write it as docs/redis.md says",
            Self::Store(_) => "look whether the server runs and can be reached",
            Self::TooOld { .. } => "use Redis 7.0 or later, or Valkey",
            Self::MayEvict { .. } => "set maxmemory-policy noeviction",
            Self::Durability { .. } => {
                "set appendonly yes, appendfsync always and no-appendfsync-on-rewrite no; or choose hapax_durability=replicated, or process if a loss is acceptable"
            }
            Self::NoReplica { .. } => "add a replica, or choose hapax_durability=local",
            Self::Layout { .. } => {
                "use the version of Hapax that has written it, with hapax copy to bring it to another store; or use another hapax_prefix"
            }
        }
    }
}

/// What all parts of a store share.
pub(crate) struct Base {
    pub runner: Arc<Runner>,
    pub ledger: Arc<LedgerState>,
    pub queues: Arc<Queues>,
    pub guard: Arc<Guard>,
    pub hints: Arc<Hints>,
    tasks: Vec<AbortHandle>,
    watch: AbortHandle,
    is_closed: AtomicBool,
}

impl Base {
    pub fn stopped(&self) -> Option<String> {
        self.is_closed.load(Ordering::Relaxed).then(|| "the store was closed".to_owned())
    }

    /// Whether calls are accepted.
    pub fn begin(&self) -> Result<(), StoreError> {
        self.stopped().map_or(Ok(()), |why| Err(StoreError::Unavailable(why)))
    }

    fn stop(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.tasks.iter().chain([&self.watch]).for_each(AbortHandle::abort);
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Queues, ledger and documents in Redis. Clones are the same store.
#[derive(Clone)]
pub struct RedisStore {
    base: Arc<Base>,
}

impl RedisStore {
    /// Opens the store. It belongs to the tokio runtime on which it is opened. Nothing has to be created before.
    pub async fn open(url: &str, options: Options) -> Result<Self, OpenError> {
        let runner = connect(url, &options).await?;
        let guard = Arc::new(Guard::new(runner.clone()));
        guard.check().await?;
        if let Some(problem) = layout::problem(&runner).await? {
            return Err(problem);
        }
        for master in runner.topology.masters() {
            runner.load_scripts(&master, Boot::Opened).await?;
        }
        let queues = Arc::new(Queues::new(runner.clone()));
        let ledger = Arc::new(LedgerState::new(runner.clone(), queues.clone()));
        let hints = Arc::new(Hints::new(runner.clone(), &queues));
        queues.hear(&hints);
        let tasks = vec![
            tokio::spawn(hints::run(Arc::downgrade(&hints))).abort_handle(),
            tokio::spawn(ledger::run_sweeper(Arc::downgrade(&ledger))).abort_handle(),
            tokio::spawn(queues::run_sweeper(Arc::downgrade(&queues))).abort_handle(),
        ];
        let watch = tokio::spawn(guard::run(Arc::downgrade(&guard))).abort_handle();
        let base =
            Base { runner, ledger, queues, guard, hints, tasks, watch, is_closed: AtomicBool::new(false) };
        Ok(Self { base: Arc::new(base) })
    }

    /// Examines servers without opening the store in them, so that those are reported too in which it could not be opened.
    pub async fn examine_servers(url: &str, options: Options) -> Result<Examination, OpenError> {
        let runner = connect(url, &options).await?;
        Ok(Guard::new(runner).examine().await?)
    }

    /// Stops the store's background work. Operations that are under way are not interrupted; later ones fail.
    pub fn shut_down(&self) {
        self.base.stop();
    }
}

async fn connect(url: &str, options: &Options) -> Result<Arc<Runner>, OpenError> {
    let target = Target::new(url, options)?;
    let (keys, options) = (Keys::new(&target.options.prefix), target.options.clone());
    let runner = Runner::new(Topology::new(target, &keys), keys, options);
    runner.topology.refresh().await?;
    Ok(Arc::new(runner))
}

impl RedisStore {
    /// For tests: returns when all calls that were made before have been answered, or wait for a change.
    #[doc(hidden)]
    pub async fn quiet(&self) {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        self.base.ledger.quiet().await;
        self.base.queues.quiet().await;
    }

    /// For tests with a clock of their own: lets waiting calls and timed work look at it again.
    #[doc(hidden)]
    pub async fn clock_moved(&self) -> Result<(), StoreError> {
        self.base.ledger.clock_moved().await?;
        self.base.queues.clock_moved().await
    }

    /// For tests: as if the servers had been restarted.
    #[doc(hidden)]
    pub async fn server_restarted(&self) -> Result<(), StoreError> {
        for master in self.base.runner.topology.masters() {
            self.base.runner.boot(&*self.base.runner.topology.node(&master)?, Boot::Restarted).await?;
        }
        Ok(())
    }

    /// For tests: moves between queues end behind this step, as if their process had died there; 0: they do not.
    #[doc(hidden)]
    pub fn end_moves_behind_step(&self, step: u8) {
        self.base.queues.dies_at.store(step, Ordering::Relaxed);
    }

    /// For tests: the next move between queues waits behind this step until another one, or none, is set.
    #[doc(hidden)]
    pub fn hold_a_move_behind_step(&self, step: u8) {
        self.base.queues.dies_at.store(step + queues::HELD, Ordering::SeqCst);
    }

    /// For tests: whether a move waits.
    #[doc(hidden)]
    pub fn is_a_move_held(&self) -> bool {
        self.base.queues.dies_at.load(Ordering::SeqCst) > queues::WAITING
    }

    /// For tests: how many hints of other processes were heard.
    #[doc(hidden)]
    pub fn hints_heard(&self) -> u64 {
        self.base.hints.heard()
    }

    /// For tests: what is known about the servers stays as it is, unless a call finds that it is wrong.
    #[doc(hidden)]
    pub fn stop_watching(&self) {
        self.base.watch.abort();
    }

    /// For tests: looks at the servers' settings now.
    #[doc(hidden)]
    pub async fn look_at_servers(&self) -> Result<Option<OpenError>, StoreError> {
        self.base.runner.topology.refresh().await?;
        self.base.guard.look().await
    }
}

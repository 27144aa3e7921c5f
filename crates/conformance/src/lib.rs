//! Conformance suites: one for [`QueueStore`](hapax_core::QueueStore) and [`QueueAdmin`], one for [`Ledger`], one for
//! [`Documents`], and one for what is told about messages ([`observed_cases`]). Every store passes them, or declares in its [`Capabilities`](hapax_core::Capabilities) what it cannot
//! do.
//!
//! A new store implements a [`Harness`] and a [`Factory`], and then needs its own test binary (`harness = false`):
//!
//! ```text
//! fn main() -> std::process::ExitCode {
//!     let skips = &["p06_fifo::*", "p10_fences::fences_grow_when_the_wall_clock_was_set_back"];
//!     hapax_conformance::main(MyFactory, &[hapax_conformance::cases(), hapax_conformance::ledger_cases()], skips)
//! }
//! ```
//!
//! It takes the arguments of any Rust test binary and runs each case as a test on a fresh store:
//! `p02_receipts::a_stale_receipt_settles_nothing`, `l04_tokens::a_stale_token_changes_nothing`. A case that the store
//! cannot run is reported as ignored, never as passed. The store states the list of these cases, and the list is
//! checked. A plain loop can run the cases as well. The cases define the expected results; the only lists of them are
//! in `suite.rs`, `ledger_suite.rs`, `document_suite.rs` and `observed_suite.rs`.
//!
//! Requirements for a harness beyond its signatures: an operation that starts after [`Harness::advance_ms`] has
//! returned sees the new time, and so does one that waits inside the store. Timed work of the store (expiry into the
//! dead letters, retention, redrive, pruning) may lag behind; the suites wait for it.

pub mod agreement;
pub mod attack;
mod cases;
mod document_cases;
mod document_suite;
#[path = "inbox_suite.rs"]
pub mod inbox;
mod ledger_cases;
mod ledger_suite;
mod ledger_trial;
mod memory;
mod memory_inbox;
mod observed;
mod observed_cases;
mod observed_suite;
mod runner;
mod suite;
mod trial;
mod values;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::store::SharedStore;
use hapax_core::{Documents, Ledger, Order, QueueAdmin};

pub use document_suite::document_cases;
pub use ledger_suite::ledger_cases;
pub use memory::MemoryStore;
pub use memory_inbox::{MemoryInbox, MemoryTx};
pub use observed::Observed;
pub use observed_suite::observed_cases;
pub use runner::main;
pub use suite::cases;
use trial::Trial;

/// A case's future.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One store under test, with the operations that a test needs.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The store; after a restart or a crash, the new one. The suite keeps no copy across them.
    fn store(&self) -> Arc<dyn QueueAdmin>;

    /// The ledger, on the same clock: the store's own, or a separate one. `None`: only the queue suite runs.
    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        None
    }

    /// The documents, on the same data. `None`: their suite does not run.
    fn documents(&self) -> Option<Arc<dyn Documents>> {
        None
    }

    /// Queues, ledger and documents in one store, for [`Observed`] and [`observed_cases`].
    fn whole(&self) -> Option<SharedStore> {
        None
    }

    /// The same through the second handle.
    fn second_whole(&self) -> Option<SharedStore> {
        None
    }

    /// A second handle to the same data, as another process would have. `None`: the store allows one process only, and
    /// the cases with two handles are skipped.
    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        None
    }

    /// The ledger through the second handle.
    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        None
    }

    /// Returns when every started call has reached the store and no background work is pending.
    async fn quiet(&self);

    /// Advances the store's time: moves a test clock, or sleeps.
    async fn advance_ms(&self, ms: u64);

    /// Closes the store and opens it again on the same data.
    async fn restart(&mut self);

    /// Reopens the store on the same data without closing it, as after `kill -9`. A harness that cannot do that
    /// restarts the store.
    async fn crash(&mut self);

    /// Whether [`advance_ms`](Self::advance_ms) takes no real time; if it does, cases that need minutes are skipped.
    fn fast_time(&self) -> bool;

    /// Whether only [`advance_ms`](Self::advance_ms) moves the store's time, so that cases can expect exact
    /// milliseconds.
    fn exact_time(&self) -> bool {
        false
    }

    /// Whether [`set_wall_back`](Self::set_wall_back) works.
    fn can_set_wall_back(&self) -> bool {
        false
    }

    /// Sets the store's wall clock back, as an operator or NTP would; no time passes.
    fn set_wall_back(&self, _ms: u64) {}
}

/// Makes stores to test.
#[async_trait]
pub trait Factory: Send + Sync {
    /// An empty store that shares nothing with any other.
    async fn fresh(&self) -> Box<dyn Harness>;
}

/// A requirement of a case; the case is skipped if the store does not meet it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Minutes or hours of the store's time.
    FastTime,
    /// Order inside a FIFO group.
    Order,
    /// Fences that only grow.
    Fence,
    /// Leases that survive the death of the store's process.
    DurableLease,
    /// Deduplication windows of two hours.
    LongDedup,
    /// A wall clock that can be set back.
    WallBack,
    /// A ledger that survives the death of its process.
    DurableLedger,
    /// A ledger whose fences only grow, also across restarts.
    LedgerFence,
    /// Queues and ledger in one store: a settle may end a claim, and an entry lives as long as its message.
    OneStore,
    /// A second handle to the same store.
    SecondHandle,
    /// Export and import.
    Transfer,
    /// Many seconds of work: runs when `HAPAX_LONG` is set.
    Heavy,
}

impl Need {
    /// Why the case cannot run on this store, or `None` if it can.
    fn missing(self, harness: &dyn Harness) -> Option<&'static str> {
        let can = harness.store().capabilities();
        let ledger = || harness.ledger().map(|ledger| ledger.ledger_capabilities());
        let (holds, why) = match self {
            Self::FastTime => (harness.fast_time(), "needs minutes of the store's time, which are real here"),
            Self::Order => (can.order == Order::PerGroup, "the store keeps no order"),
            Self::Fence => (can.fence, "the store's fences may not grow"),
            Self::DurableLease => (can.durable_lease, "the store's leases do not survive it"),
            Self::LongDedup => {
                (can.dedup_ms_max >= 2 * 3600 * 1000, "the store deduplicates for less than 2 h")
            }
            Self::WallBack => (harness.can_set_wall_back(), "the harness cannot set the wall clock back"),
            Self::DurableLedger => {
                (ledger().is_some_and(|can| can.durable), "the ledger does not survive its process")
            }
            Self::LedgerFence => (ledger().is_some_and(|can| can.fence), "the ledger's fences may not grow"),
            Self::OneStore => (can.settle_ends_claims, "queues and ledger are in different stores"),
            Self::SecondHandle => (harness.second_store().is_some(), "the store belongs to one process"),
            Self::Transfer => (harness.store().transfer().is_some(), "the store cannot be moved"),
            Self::Heavy => (std::env::var_os("HAPAX_LONG").is_some(), "set HAPAX_LONG to run it"),
        };
        (!holds).then_some(why)
    }
}

/// One guarantee that the suite checks.
#[derive(Clone, Copy)]
pub struct Case {
    /// The number of the point in the design's queue semantics or ledger protocol; 0 for administration.
    pub point: u8,
    /// The group of cases, for example `p02_receipts`.
    pub module: &'static str,
    /// The guarantee.
    pub name: &'static str,
    /// Requirements for the store.
    pub needs: &'static [Need],
    body: fn(Trial) -> BoxFuture<()>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.module, self.name)
    }
}

/// The result of a case that did not panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaseOutcome {
    /// The case ran, and the guarantee held.
    Passed,
    /// The store does not meet a requirement; the reason.
    Skipped(&'static str),
}

impl Case {
    /// Why the case cannot run on this store, or `None` if it can.
    pub fn missing(&self, harness: &dyn Harness) -> Option<&'static str> {
        self.needs.iter().find_map(|need| need.missing(harness))
    }

    /// Whether the case runs only if `HAPAX_LONG` is set.
    pub fn is_heavy(&self) -> bool {
        self.needs.contains(&Need::Heavy)
    }

    /// Runs the case on a fresh store, on a tokio runtime with time enabled. Panics if the guarantee does not hold.
    pub fn run(&'static self, harness: Box<dyn Harness>) -> BoxFuture<CaseOutcome> {
        if let Some(why) = self.missing(&*harness) {
            return Box::pin(std::future::ready(CaseOutcome::Skipped(why)));
        }
        Box::pin(async move {
            (self.body)(Trial::new(self, harness)).await;
            CaseOutcome::Passed
        })
    }
}

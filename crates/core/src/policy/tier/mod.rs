//! The tier check: the guarantee that a queue's consumers want, compared with the features of store, ledger, handler
//! and policy.
//!
//! A tier is checked, never just asserted. [`check`] takes the [`Facts`] and reports refusals (the tier cannot hold: do
//! not start) and warnings (the tier is doubtful: start, and tell the operator). Each [`Finding`] has a stable code and
//! a page under `docs/errors/`. A worker runs the check when it starts; `hapax doctor` prints the same report.

mod observed;
mod rules;
mod store;
mod store_fit;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::capabilities::Capabilities;
use crate::ledger::{LedgerCapabilities, OnDoubt};
use crate::message::KeySource;
use crate::queue::{QueueConfig, Tier};
use crate::store::QueueStats;

pub use observed::{CommonError, ObservedQueue, POISON_DELIVERIES};
pub use store::{StoreFacts, check_store};
pub use store_fit::{fits_store, priority_fits_store};

/// The known facts about a queue, its store and its handler. Unknown facts are left out, and rules that need them find
/// nothing.
///
/// ```
/// use hapax_core::policy::tier::{Facts, Severity, check};
/// use hapax_core::{Capabilities, QueueConfig, Tier};
///
/// let mut store = Capabilities::none("my-store");
/// (store.fence, store.durable_lease) = (true, true);
/// (store.dedup_ms_max, store.message_bytes_max) = (1_209_600_000, 1_048_576);
/// let queue = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() };
/// let findings = check(&Facts::new(queue, store));
/// assert_eq!(findings[0].code, "ledger-missing");
/// assert_eq!(findings[0].severity, Severity::Refusal);
/// ```
#[derive(Debug, Clone)]
pub struct Facts {
    /// The tier that is wanted; [`Facts::new`] takes the queue's.
    pub tier: Tier,
    /// The queue's policy.
    pub queue: QueueConfig,
    /// How long the queue's dead-letter queue keeps messages, if known.
    pub dead_retention_ms: Option<u64>,
    /// The dead-letter queue that the policy names is known not to exist.
    pub dead_queue_missing: bool,
    /// The queue's counters, where they are known.
    pub stats: Option<QueueStats>,
    /// What a process has observed of the queue, where one observes it.
    pub observed: Option<ObservedQueue>,
    /// The weakest source of idempotency keys seen so far. `None`: none seen yet, so the queue's policy decides.
    pub key_source: Option<KeySource>,
    /// How long producers keep repeating a send without an answer, if known.
    pub producer_retry_ms: Option<u64>,
    /// The features of the store.
    pub store: Capabilities,
    /// The ledger, if there is one.
    pub ledger: Option<LedgerFacts>,
    /// The handler, if known.
    pub handler: Option<HandlerFacts>,
}

impl Facts {
    /// A queue in a store, with nothing known about ledger and handler.
    pub fn new(queue: QueueConfig, store: Capabilities) -> Self {
        Self {
            tier: queue.tier,
            queue,
            dead_retention_ms: None,
            dead_queue_missing: false,
            stats: None,
            observed: None,
            key_source: None,
            producer_retry_ms: None,
            store,
            ledger: None,
            handler: None,
        }
    }
}

/// The ledger that holds a handler's claims.
#[derive(Debug, Clone)]
pub struct LedgerFacts {
    /// Its features.
    pub capabilities: LedgerCapabilities,
    /// It is the queue's own store, which keeps the entries of its messages and dead letters regardless of their age.
    pub same_store: bool,
    /// How long it keeps an outcome.
    pub ttl_ms: u64,
}

/// How long a delivery is leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerLease {
    /// The same lease for each delivery.
    Fixed {
        /// The lease.
        lease_ms: u64,
    },
    /// Adapts to the measured run times of the handler.
    Auto,
}

/// The database that a `transactional` handler writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandlerDatabase {
    /// The handler has none.
    None,
    /// It also holds the ledger's entries, so one transaction covers both.
    WithLedger,
    /// The ledger's entries are in another database.
    Other,
    /// Hapax cannot take part in its transactions.
    Unsupported {
        /// The kind of database.
        kind: String,
    },
}

/// The known facts about a handler.
#[derive(Debug, Clone)]
pub struct HandlerFacts {
    /// How its deliveries are leased.
    pub lease: HandlerLease,
    /// Maximum time for which a heartbeat extends a lease; `None`: there is no heartbeat.
    pub heartbeat_ms_max: Option<u64>,
    /// 99th percentile of the run time, once there were runs.
    pub p99_ms: Option<u64>,
    /// What is done about a lapsed claim whose holder may have caused the effect.
    pub on_doubt: OnDoubt,
    /// The handler is declared idempotent by the derived key: the effect happens once per key, for any number of calls.
    pub idempotent_by_derived_key: bool,
    /// The database of its business write.
    pub database: HandlerDatabase,
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The tier cannot hold: do not start.
    Refusal,
    /// The tier holds, with a doubt that an operator should know of.
    Warning,
}

/// Something that keeps a tier from holding, or casts doubt on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The stable code, for example `ledger-missing`.
    pub code: Cow<'static, str>,
    /// Its severity.
    pub severity: Severity,
    /// The problem, with the value that caused it.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl Finding {
    /// The page that explains it.
    pub fn page(&self) -> String {
        page(&self.code)
    }

    /// Whether the tier cannot hold.
    pub fn is_refusal(&self) -> bool {
        self.severity == Severity::Refusal
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, message, remedy, .. } = self;
        write!(f, "{code}: {message}; {remedy} (see {})", self.page())
    }
}

/// The page that explains a code, whether of a finding or of an error.
pub fn page(code: &str) -> String {
    format!("docs/errors/{code}.md")
}

/// Compares the wanted guarantee with the facts. Refusals come first; an empty result means that the tier holds, as far
/// as the facts show.
pub fn check(facts: &Facts) -> Vec<Finding> {
    let found = rules().filter_map(|rule| {
        let (message, remedy) = (rule.find)(facts)?;
        Some(Finding { code: rule.code.into(), severity: rule.severity, message, remedy })
    });
    let mut findings: Vec<Finding> = found.collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// The rules about configuration, then those about what was observed.
fn rules() -> impl Iterator<Item = &'static rules::Rule> {
    rules::RULES.iter().chain(observed::RULES)
}

/// The codes of those rules of [`check`] that are about what was observed.
pub fn observed_codes() -> impl Iterator<Item = &'static str> {
    observed::RULES.iter().map(|rule| rule.code)
}

/// All codes of [`check`] and [`check_store`], with their severity. Stores have additional codes of their own.
pub fn codes() -> BTreeMap<&'static str, Severity> {
    rules().map(|rule| (rule.code, rule.severity)).chain(store::codes()).collect()
}

/// How long after an outcome was recorded the same message may still be delivered again without a redrive.
///
/// That is the queue's whole retention, regardless of attempts and backoff: a message that waits while there is no
/// consumer uses no attempt.
pub fn retry_horizon_ms(queue: &QueueConfig) -> u64 {
    queue.retention_ms
}

/// How long after an outcome was recorded one redrive of the dead letter may deliver its message again. The message may
/// be redriven again after that; a ledger in another store has to be consulted for each redrive.
///
/// On a standard queue a dead letter keeps its message's age; on a FIFO queue its retention starts again. A redriven
/// message gets the queue's full retention again.
pub fn redrive_horizon_ms(queue: &QueueConfig, dead_retention_ms: u64) -> u64 {
    let dead_ms = if queue.is_fifo() {
        queue.retention_ms.saturating_add(dead_retention_ms)
    } else {
        queue.retention_ms.max(dead_retention_ms)
    };
    dead_ms.saturating_add(queue.retention_ms)
}

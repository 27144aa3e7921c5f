//! The tier check: what a queue's consumers want, compared with what store, ledger, handler and policy can do.
//!
//! A tier is checked, never just asserted. [`check`] is given the [`Facts`] and says what cannot hold (a refusal: do not
//! start) and what is doubtful (a warning: start, and say so). Each [`Finding`] has a stable code and a page under
//! `docs/errors/`. A worker checks when it starts, `hapax doctor` prints the same report.

mod rules;
mod store;
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
use crate::store::QueueTotals;

pub use store::{StoreFacts, check_store};

/// What is known about a queue, its store and its handler. What is not known is left out, and so is what would follow
/// from it.
///
/// ```
/// use hapax_core::policy::tier::{Facts, Severity, check};
/// use hapax_core::{Capabilities, QueueConfig, Tier};
///
/// let mut store = Capabilities::none("my-store");
/// (store.fence, store.durable_lease, store.dedup_ms_max) = (true, true, 1_209_600_000);
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
    /// How long the queue's dead-letter queue keeps messages, where it is known.
    pub dead_retention_ms: Option<u64>,
    /// The dead-letter queue that the policy names is known not to exist.
    pub dead_queue_missing: bool,
    /// What happened in the queue since its store was opened, where it is known.
    pub totals: Option<QueueTotals>,
    /// Where idempotency keys were seen to come from: the weakest source. `None`: not seen yet, so the policy decides.
    pub key_source: Option<KeySource>,
    /// How long producers go on repeating a send whose answer they did not get, where it is known.
    pub producer_retry_ms: Option<u64>,
    /// What the store can do.
    pub store: Capabilities,
    /// The ledger, if there is one.
    pub ledger: Option<LedgerFacts>,
    /// The handler, where it is known.
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
            totals: None,
            key_source: None,
            producer_retry_ms: None,
            store,
            ledger: None,
            handler: None,
        }
    }
}

/// The ledger that a handler's claims go to.
#[derive(Debug, Clone)]
pub struct LedgerFacts {
    /// What it can do.
    pub can: LedgerCapabilities,
    /// It is the queue's own store, which keeps the entries of its live messages and dead letters whatever their age.
    pub same_store: bool,
    /// How long it keeps an outcome.
    pub ttl_ms: u64,
}

/// How long a delivery is leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// The same for each.
    Fixed {
        /// How long.
        lease_ms: u64,
    },
    /// Follows the handler's own times.
    Auto,
}

/// The database that a `transactional` handler writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Database {
    /// The handler has none.
    None,
    /// It holds the ledger's entries too, so one transaction covers both.
    WithLedger,
    /// The ledger's entries are in another one.
    Other,
    /// Hapax cannot take part in its transactions.
    Unsupported {
        /// Which kind it is.
        kind: String,
    },
}

/// What is known about a handler.
#[derive(Debug, Clone)]
pub struct HandlerFacts {
    /// How its deliveries are leased.
    pub lease: Lease,
    /// How long a heartbeat keeps a lease at most; `None`: there is no heartbeat.
    pub heartbeat_ms_max: Option<u64>,
    /// The time that 99 of 100 runs stay below, once there were some.
    pub p99_ms: Option<u64>,
    /// What is done about a claim whose holder may have acted.
    pub on_doubt: OnDoubt,
    /// It was declared that the effect happens once for each derived key, whoever asks for it and how often.
    pub honours_derived_key: bool,
    /// The database of its business write.
    pub database: Database,
}

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The tier cannot hold: do not start.
    Refusal,
    /// The tier holds, with a doubt that someone should know of.
    Warning,
}

/// Something that keeps a tier from holding, or casts doubt on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The stable code, for example `ledger-missing`.
    pub code: Cow<'static, str>,
    /// How grave it is.
    pub severity: Severity,
    /// What is found, and which value.
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

/// Compares what is wanted with what can be done: refusals first. Empty: the tier holds, as far as the facts tell.
pub fn check(facts: &Facts) -> Vec<Finding> {
    let found = rules::RULES.iter().filter_map(|rule| {
        let (message, remedy) = (rule.find)(facts)?;
        Some(Finding { code: rule.code.into(), severity: rule.severity, message, remedy })
    });
    let mut findings: Vec<Finding> = found.collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// Every code that [`check`] and [`check_store`] can find, with how grave it is. A store has codes of its own.
pub fn codes() -> BTreeMap<&'static str, Severity> {
    rules::RULES.iter().map(|rule| (rule.code, rule.severity)).chain(store::codes()).collect()
}

/// How long after an outcome was recorded the same message may still be delivered again, without anyone asking for it.
///
/// That is the queue's whole retention, however few attempts a message has and however short its backoff: a message
/// that waits while no consumer is there counts no attempt.
pub fn retry_horizon_ms(queue: &QueueConfig) -> u64 {
    queue.retention_ms
}

/// How long after an outcome was recorded its message may come back by one redrive of its dead letter. A message may be
/// redriven again after that; a ledger in another store has to be asked about each.
///
/// A dead letter of a standard queue keeps its message's age; on a FIFO queue its time starts anew. A redriven message
/// has the queue's retention before it, again.
pub fn redrive_horizon_ms(queue: &QueueConfig, dead_retention_ms: u64) -> u64 {
    let dead_ms = if queue.is_fifo() {
        queue.retention_ms.saturating_add(dead_retention_ms)
    } else {
        queue.retention_ms.max(dead_retention_ms)
    };
    dead_ms.saturating_add(queue.retention_ms)
}

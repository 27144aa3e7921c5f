//! The advisor: every rule of [`hapax_core::policy::tier`] over what is known about a store and its queues.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use hapax_core::ledger::TTL_MS_DEFAULT;
use hapax_core::metrics::{KeptBy, Kind, Metric, Sample, Unit};
use hapax_core::policy::tier::{Facts, Finding, LedgerFacts, StoreFacts, check, check_store};
use hapax_core::{
    Browse, EntryFilter, EntryState, MessageId, MessageState, QueueConfig, QueueInfo, QueueName, QueueStats,
    Store, StoreError,
};
use serde::{Deserialize, Serialize};

use crate::observer::Observer;

/// Entries in doubt are counted up to this number.
const DOUBTS_MAX: usize = 1_000;

/// Messages that may be poison are looked up, this number at most.
const POISON_MAX: usize = 20;

/// A finding, and the queue that it is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The queue; `None`: the store as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// What was found, and what to do.
    #[serde(flatten)]
    pub finding: Finding,
}

/// What an operator should know and change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// What was found: about the store first, then by queue.
    pub findings: Vec<Located>,
    /// What could not be looked at, so that findings may be missing.
    #[serde(default)]
    pub not_seen: Vec<NotSeen>,
}

/// What could not be looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotSeen {
    /// The queue that it is about.
    pub queue: QueueName,
    /// What, and why.
    pub what: String,
}

impl Advice {
    /// What was found about one queue, and what could not be looked at.
    pub fn of_queue(&self, queue: &QueueName) -> (Vec<Finding>, Vec<String>) {
        let of_queue = |located: &&Located| located.queue.as_ref() == Some(queue);
        let findings = self.findings.iter().filter(of_queue).map(|located| located.finding.clone()).collect();
        let not_seen =
            self.not_seen.iter().filter(|one| one.queue == *queue).map(|one| one.what.clone()).collect();
        (findings, not_seen)
    }

    /// Adds what the store finds about itself: its file system, its database, its outbox. Who is told needs the right to examine.
    pub async fn add_examination(&mut self, store: &dyn Store) {
        match store.examine().await {
            Ok(examined) => {
                let located = |finding| Located { queue: None, finding };
                self.findings.splice(0..0, examined.findings.into_iter().map(located));
            }
            Err(error) => tracing::debug!(%error, "the store could not be examined"),
        }
    }

    /// What was found about the store as a whole.
    pub fn of_whole(&self) -> Vec<Finding> {
        let whole = self.findings.iter().filter(|located| located.queue.is_none());
        whole.map(|located| located.finding.clone()).collect()
    }
}

/// What the caller knows beside the store.
#[derive(Default)]
pub struct Known<'a> {
    /// What this process has observed.
    pub observer: Option<&'a Observer>,
    /// Requests that ran without protection.
    pub ran_unprotected: u64,
    /// How long producers keep repeating a send.
    pub producer_retry_ms: Option<u64>,
    /// Which queues may be looked at; `None`: all.
    pub shows: Option<&'a (dyn Fn(&QueueName) -> bool + Sync)>,
}

impl Known<'_> {
    fn may_see(&self, queue: &QueueName) -> bool {
        self.shows.is_none_or(|shows| shows(queue))
    }
}

/// All findings about those queues that may be looked at and, if `whole`, about the store.
pub async fn of_store(store: &dyn Store, known: &Known<'_>, whole: bool) -> Result<Advice, StoreError> {
    let mut advice = Advice::default();
    let mut is_stopped = false;
    if whole {
        let facts = store_facts(store, known).await?;
        is_stopped = facts.status.stopped.is_some();
        advice
            .findings
            .extend(check_store(&facts).into_iter().map(|finding| Located { queue: None, finding }));
    }
    let all = match store.queues().await {
        Ok(all) => all,
        // A store that has stopped lists no queues. That it has is what an operator should know.
        Err(_) if is_stopped => return Ok(advice),
        Err(error) => return Err(error),
    };
    let retentions: HashMap<QueueName, u64> =
        all.iter().map(|info| (info.name.clone(), info.config.retention_ms)).collect();
    let mut shown = all;
    shown.retain(|info| known.may_see(&info.name));
    let names: Vec<QueueName> = shown.iter().map(|info| info.name.clone()).collect();
    let mut poison = known.observer.map(Observer::poison_candidates).unwrap_or_default();
    // If not all counters can be had, each queue is asked for its own, so that the others are told about.
    let mut counted = store.stats_of(&names).await.ok();
    for (at, info) in shown.iter().enumerate() {
        let dead = info.config.dead_letter.as_ref().map(|dead| &dead.queue);
        let looked_at = LookedAt {
            stats: match &mut counted {
                Some(counted) => Ok(counted.get_mut(at).and_then(Option::take)),
                None => stats_of(store, &info.name).await,
            },
            dead: Ok(dead.map(|queue| DeadQueue::known(retentions.get(queue).copied())).unwrap_or_default()),
            poison: poison.remove(&info.name).unwrap_or_default(),
        };
        let (findings, not_seen) = look(store, known, info, looked_at).await;
        let located = |finding| Located { queue: Some(info.name.clone()), finding };
        advice.findings.extend(findings.into_iter().map(located));
        let of_queue = |what| NotSeen { queue: info.name.clone(), what };
        advice.not_seen.extend(not_seen.into_iter().map(of_queue));
    }
    Ok(advice)
}

/// The counters of a queue; `None` if it was deleted meanwhile.
async fn stats_of(store: &dyn Store, queue: &QueueName) -> Result<Option<QueueStats>, StoreError> {
    match store.stats(queue).await {
        Ok(stats) => Ok(Some(stats)),
        Err(StoreError::NoSuchQueue(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What was looked at for a queue.
struct LookedAt {
    stats: Result<Option<QueueStats>, StoreError>,
    dead: Result<DeadQueue, (QueueName, StoreError)>,
    /// Messages that may be poison.
    poison: Vec<MessageId>,
}

/// The facts about a store as a whole; versions are not among them.
pub async fn store_facts(store: &dyn Store, known: &Known<'_>) -> Result<StoreFacts, StoreError> {
    let status = store.status().await?;
    let mut facts = StoreFacts { status, ran_unprotected: known.ran_unprotected, ..StoreFacts::default() };
    if facts.status.withheld || facts.status.stopped.is_some() {
        return Ok(facts);
    }
    // A store without a ledger has none in doubt.
    if let Ok(stats) = store.ledger_stats().await {
        facts.mismatches = stats.mismatches;
        if stats.open > 0 {
            let filter =
                EntryFilter { state: Some(EntryState::InDoubt), limit: DOUBTS_MAX, ..EntryFilter::default() };
            facts.in_doubt = store.entries(filter).await.map_or(0, |page| page.items.len() as u64);
        }
    }
    Ok(facts)
}

/// The findings about one queue, and what could not be looked at.
pub async fn of_queue(store: &dyn Store, known: &Known<'_>, info: &QueueInfo) -> (Vec<Finding>, Vec<String>) {
    let mut poison = known.observer.map(Observer::poison_candidates).unwrap_or_default();
    let looked_at = LookedAt {
        stats: stats_of(store, &info.name).await,
        dead: DeadQueue::of(store, &info.config).await,
        poison: poison.remove(&info.name).unwrap_or_default(),
    };
    look(store, known, info, looked_at).await
}

async fn look(
    store: &dyn Store,
    known: &Known<'_>,
    info: &QueueInfo,
    looked_at: LookedAt,
) -> (Vec<Finding>, Vec<String>) {
    let mut not_seen = Vec::new();
    let mut facts = Facts::new(info.config.clone(), store.capabilities());
    facts.producer_retry_ms = known.producer_retry_ms;
    facts.ledger = own_ledger(store);
    facts.observed = known.observer.and_then(|observer| observer.window(&info.name));
    if let Some(seen) = &mut facts.observed {
        for id in looked_at.poison.into_iter().take(POISON_MAX) {
            let browse = Browse { id: Some(id), limit: 1, ..Browse::default() };
            let found = store.browse(&info.name, browse).await.ok().and_then(|mut page| page.items.pop());
            if found.is_some_and(|found| found.state != MessageState::Parked) {
                seen.poison += 1;
                seen.poison_example.get_or_insert_with(|| id.to_string());
            }
        }
    }
    match looked_at.stats {
        Ok(stats) => facts.stats = stats,
        Err(error) => not_seen.push(not_seen_text("its counters", &error)),
    }
    let hidden =
        info.config.dead_letter.as_ref().map(|dead| &dead.queue).filter(|queue| !known.may_see(queue));
    if let Some(queue) = hidden {
        not_seen.push(format!("not allowed to see: its dead-letter queue {queue}"));
        return (about(&info.name, check(&facts)), not_seen);
    }
    match looked_at.dead {
        Ok(dead) => {
            (facts.dead_retention_ms, facts.dead_queue_missing) = (dead.retention_ms, dead.is_missing);
        }
        Err((queue, error)) => {
            not_seen.push(not_seen_text(&format!("its dead-letter queue {queue}"), &error));
        }
    }
    (about(&info.name, check(&facts)), not_seen)
}

/// The commands in findings, with the name of the queue that they are about.
fn about(queue: &QueueName, mut findings: Vec<Finding>) -> Vec<Finding> {
    for finding in &mut findings {
        finding.remedy = finding.remedy.replace(" QUEUE ", &format!(" {queue} "));
    }
    findings
}

/// What a queue's policy and its store say about its tier, without any counters.
pub async fn of_policy(store: &dyn Store, config: &QueueConfig) -> Vec<Finding> {
    let dead = DeadQueue::of(store, config).await.unwrap_or_default();
    check(&Facts {
        dead_retention_ms: dead.retention_ms,
        dead_queue_missing: dead.is_missing,
        ledger: own_ledger(store),
        ..Facts::new(config.clone(), store.capabilities())
    })
}

/// What could not be looked at, and why. A server's refusal of a key arrives as `Invalid`.
fn not_seen_text(what: &str, error: &StoreError) -> String {
    let why =
        if matches!(error, StoreError::Invalid(_)) { "not allowed to see" } else { "could not look at" };
    format!("{why}: {what} ({error})")
}

/// The ledger in the queue's own store, if it has one.
fn own_ledger(store: &dyn Store) -> Option<LedgerFacts> {
    let held = store.capabilities().settle_ends_claims;
    let facts = || LedgerFacts {
        capabilities: store.ledger_capabilities(),
        same_store: true,
        ttl_ms: TTL_MS_DEFAULT,
    };
    held.then(facts)
}

/// What is known about the queue that takes a queue's dead letters.
#[derive(Debug, Clone, Copy, Default)]
struct DeadQueue {
    /// How long it keeps messages, where that is known.
    retention_ms: Option<u64>,
    /// It is named but does not exist.
    is_missing: bool,
}

impl DeadQueue {
    /// Looks at the dead-letter queue that a policy names, if it names one. Fails with its name.
    async fn of(store: &dyn Store, config: &QueueConfig) -> Result<Self, (QueueName, StoreError)> {
        let Some(dead) = &config.dead_letter else { return Ok(Self::default()) };
        match store.queue(&dead.queue).await {
            Ok(found) => Ok(Self::known(Some(found.config.retention_ms))),
            Err(StoreError::NoSuchQueue(_)) => Ok(Self::known(None)),
            Err(error) => Err((dead.queue.clone(), error)),
        }
    }

    /// One that keeps messages this long; `None`: there is none of that name.
    fn known(retention_ms: Option<u64>) -> Self {
        Self { retention_ms, is_missing: retention_ms.is_none() }
    }
}

/// The metric of the advisor's findings.
pub static FINDING: Metric = Metric {
    name: "hapax_advice_finding",
    help: "1 for each finding of the advisor; `hapax doctor` says what to do about it.",
    kind: Kind::Gauge,
    unit: Unit::Items,
    kept_by: KeptBy::Process,
    labels: &["queue", "code"],
};

/// The findings as metrics: 1 for each.
pub fn samples(advice: &Advice) -> Vec<Sample> {
    let sample = |(queue, code): (&Option<QueueName>, &Cow<'static, str>)| {
        let queue = queue.as_ref().map_or_else(String::new, ToString::to_string);
        let labels = vec![("queue", queue), ("code", code.to_string())];
        Sample { metric: &FINDING, labels, value: 1 }
    };
    // One queue may have several findings with the same code.
    let told: BTreeSet<_> = advice.findings.iter().map(|found| (&found.queue, &found.finding.code)).collect();
    told.into_iter().map(sample).collect()
}

#[cfg(test)]
mod tests {
    use hapax_core::policy::tier::Severity;

    use super::*;

    #[test]
    fn each_sample_is_there_once() {
        let located = |queue: &str, code: &'static str, message: &str| Located {
            queue: Some(QueueName::new(queue).unwrap()),
            finding: Finding {
                code: code.into(),
                severity: Severity::Warning,
                message: message.to_owned(),
                remedy: "do something".to_owned(),
            },
        };
        let findings = vec![
            located("a", "lease-short", "one"),
            located("a", "no-limit", "two"),
            located("a", "lease-short", "three"),
            located("b", "lease-short", "four"),
        ];
        let samples = samples(&Advice { findings, not_seen: Vec::new() });
        let labels: Vec<_> =
            samples.iter().map(|sample| (&*sample.labels[0].1, &*sample.labels[1].1)).collect();
        assert_eq!(labels, [("a", "lease-short"), ("a", "no-limit"), ("b", "lease-short")]);
    }
}

//! One function per finding. It returns the problem and its remedy, or `None`.

use super::{
    Facts, HandlerDatabase, HandlerLease, LedgerFacts, Severity, redrive_horizon_ms, retry_horizon_ms,
    store_fit,
};
use crate::ledger::OnDoubt;
use crate::message::KeySource;
use crate::policy::RetryPolicy;
use crate::queue::{OnDead, QueueConfig, Tier};

/// The problem and its remedy.
pub(super) type RuleResult = Option<(String, String)>;

/// A possible finding.
pub(super) struct Rule {
    pub code: &'static str,
    pub severity: Severity,
    pub find: fn(&Facts) -> RuleResult,
}

const fn refusal(code: &'static str, find: fn(&Facts) -> RuleResult) -> Rule {
    Rule { code, severity: Severity::Refusal, find }
}

pub(super) const fn warning(code: &'static str, find: fn(&Facts) -> RuleResult) -> Rule {
    Rule { code, severity: Severity::Warning, find }
}

/// All rules, in the order in which they are reported. A test requires a page for each code under `docs/errors/`.
pub(super) const RULES: &[Rule] = &[
    refusal("ledger-missing", ledger_missing),
    refusal("ledger-not-durable", ledger_not_durable),
    refusal("ledger-may-evict", ledger_may_evict),
    refusal("ledger-fence-may-repeat", ledger_fence_may_repeat),
    refusal("ledger-ttl-too-short", ledger_ttl_too_short),
    refusal("database-missing", database_missing),
    refusal("database-not-supported", database_not_supported),
    refusal("ledger-in-other-database", ledger_in_other_database),
    refusal("lease-zero", lease_zero),
    refusal("order-not-kept", |facts| store_fit::order(&facts.queue, &facts.store)),
    refusal("halt-group-not-supported", |facts| store_fit::halt_group(&facts.queue, &facts.store)),
    refusal("dedup-window-too-long", |facts| store_fit::dedup_window(&facts.queue, &facts.store)),
    refusal("message-size-not-supported", |facts| store_fit::message_size(&facts.queue, &facts.store)),
    warning("key-is-message-id", key_is_message_id),
    warning("key-is-content", key_is_content),
    warning("effect-may-repeat", effect_may_repeat),
    warning("no-attempt-limit", no_attempt_limit),
    warning("own-dead-letters", own_dead_letters),
    warning("retries-at-once", retries_at_once),
    warning("retention-ends-retries", retention_ends_retries),
    warning("retention-drops-messages", retention_drops_messages),
    warning("dead-letter-queue-missing", dead_letter_queue_missing),
    warning("dead-letters-short-lived", dead_letters_short_lived),
    warning("ledger-ttl-below-redrive", ledger_ttl_below_redrive),
    warning("dedup-window-short", dedup_window_short),
    warning("order-has-holes", order_has_holes),
    warning("delivery-fence-may-repeat", delivery_fence_may_repeat),
    warning("delivery-not-durable", delivery_not_durable),
    warning("settle-not-atomic", settle_not_atomic),
];

#[expect(clippy::unnecessary_wraps, reason = "a rule ends with it")]
pub(super) fn found(message: impl Into<String>, remedy: impl Into<String>) -> RuleResult {
    Some((message.into(), remedy.into()))
}

/// Formats milliseconds in their two largest units.
pub(super) fn span(ms: u64) -> String {
    const UNITS: [(&str, u64); 5] =
        [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];
    let (mut parts, mut rest_ms) = (Vec::new(), ms);
    for (unit, unit_ms) in UNITS {
        if rest_ms >= unit_ms && parts.len() < 2 {
            parts.push(format!("{} {unit}", rest_ms / unit_ms));
            rest_ms %= unit_ms;
        }
    }
    if parts.is_empty() { "0 ms".to_owned() } else { parts.join(" ") }
}

impl Facts {
    /// The tier records outcomes.
    pub(super) fn records(&self) -> bool {
        matches!(self.tier, Tier::EffectivelyOnce | Tier::Transactional)
    }

    /// The tier redelivers a message that was not acked.
    pub(super) fn redelivers(&self) -> bool {
        self.tier != Tier::AtMostOnce
    }

    /// The ledger, if the tier needs one.
    fn needed_ledger(&self) -> Option<&LedgerFacts> {
        self.ledger.as_ref().filter(|_| self.records())
    }

    fn lease(&self) -> HandlerLease {
        self.handler
            .as_ref()
            .map_or(HandlerLease::Fixed { lease_ms: self.queue.lease_ms }, |handler| handler.lease)
    }

    /// The database of a handler with the `transactional` tier.
    fn database(&self) -> Option<&HandlerDatabase> {
        let handler = self.handler.as_ref().filter(|_| self.tier == Tier::Transactional);
        handler.map(|handler| &handler.database)
    }

    /// The source of keys: the weakest one seen, else the weakest one that the policy allows.
    fn weakest_key(&self) -> KeySource {
        let by_policy = || match &self.queue {
            queue if queue.key_pointer.is_some() => KeySource::Body,
            // Each message has an id: a FIFO queue refuses messages without one, and content-based deduplication adds a
            // digest.
            queue if queue.is_fifo() || queue.dedup.content_based => KeySource::DedupId,
            _ => KeySource::MessageId,
        };
        self.key_source.unwrap_or_else(by_policy)
    }
}

fn ledger_missing(facts: &Facts) -> RuleResult {
    // A transactional handler's ledger is in its database, which has findings of its own.
    if facts.tier != Tier::EffectivelyOnce || facts.ledger.is_some() {
        return None;
    }
    let store = &facts.store.name;
    found(
        format!("effectively-once needs a ledger, and there is none beside the {store} store"),
        "use a store that has one or pass a ledger, or want at-least-once",
    )
}

fn ledger_not_durable(facts: &Facts) -> RuleResult {
    let ledger = facts.needed_ledger().filter(|ledger| !ledger.capabilities.durable)?;
    found(
        format!("the {} ledger may forget what it has answered when it stops", ledger.capabilities.name),
        "turn on its persistence or use a durable ledger; a forgotten outcome is a second effect",
    )
}

fn ledger_may_evict(facts: &Facts) -> RuleResult {
    let ledger = facts.needed_ledger().filter(|ledger| ledger.capabilities.may_evict)?;
    found(
        format!(
            "the {} ledger may drop entries before their time when it runs out of room",
            ledger.capabilities.name
        ),
        "set it to refuse writes instead (Redis: maxmemory-policy noeviction), or use another ledger",
    )
}

fn ledger_fence_may_repeat(facts: &Facts) -> RuleResult {
    // In a transaction the row lock takes the place of the fence.
    let ledger = facts.needed_ledger().filter(|ledger| !ledger.capabilities.fence)?;
    if facts.tier != Tier::EffectivelyOnce {
        return None;
    }
    found(
        format!(
            "the {} ledger's fences may repeat, so a lapsed holder may end its successor's claim",
            ledger.capabilities.name
        ),
        "use a ledger whose fences only grow, also through a failover",
    )
}

fn ledger_ttl_too_short(facts: &Facts) -> RuleResult {
    let ledger = facts.needed_ledger().filter(|ledger| !ledger.same_store)?;
    let horizon_ms = retry_horizon_ms(&facts.queue);
    if ledger.ttl_ms >= horizon_ms {
        return None;
    }
    found(
        format!(
            "outcomes are kept for {}, and a message may be delivered again for {} (the queue's retention)",
            span(ledger.ttl_ms),
            span(horizon_ms)
        ),
        "keep outcomes at least that long, or the messages not as long; or put queue and ledger into one store, \
         which keeps the entries of its own messages",
    )
}

fn database_missing(facts: &Facts) -> RuleResult {
    facts.database().filter(|database| **database == HandlerDatabase::None)?;
    found(
        "transactional needs the database that the handler writes to, and the handler has none",
        "give the worker the handler's database, or want effectively-once",
    )
}

fn database_not_supported(facts: &Facts) -> RuleResult {
    let Some(HandlerDatabase::Unsupported { kind }) = facts.database() else { return None };
    found(
        format!("transactional cannot take part in the transactions of {kind}"),
        "use a database that Hapax keeps a ledger in, or want effectively-once",
    )
}

fn ledger_in_other_database(facts: &Facts) -> RuleResult {
    facts.database().filter(|database| **database == HandlerDatabase::Other)?;
    found(
        "transactional needs ledger and business write in one database, and the ledger is in another one",
        "put the ledger into the handler's database, or want effectively-once",
    )
}

fn lease_zero(facts: &Facts) -> RuleResult {
    if !facts.redelivers() || facts.lease() != (HandlerLease::Fixed { lease_ms: 0 }) {
        return None;
    }
    found(
        "the lease is 0, so a message is back in the queue while its handler runs",
        "set a lease above the handler's time, or `auto`",
    )
}

fn key_is_message_id(facts: &Facts) -> RuleResult {
    if !facts.records() || facts.weakest_key() != KeySource::MessageId {
        return None;
    }
    let message = if facts.key_source.is_some() {
        "some messages are known only by their message id"
    } else {
        "a message without an idempotency key or deduplication id is known only by its message id"
    };
    found(
        format!("{message}: that covers a redelivery, not a producer that sends twice"),
        "send the attribute hapax-idempotency-key, or set key_pointer to where the body has the key",
    )
}

fn key_is_content(facts: &Facts) -> RuleResult {
    if !facts.records() || !facts.queue.dedup.content_based || facts.weakest_key() != KeySource::DedupId {
        return None;
    }
    found(
        "a message without an idempotency key or deduplication id is known by its body: a second one with the same \
         body gets the first one's outcome, be it meant or not",
        "send the attribute hapax-idempotency-key, or set key_pointer to where the body has the key",
    )
}

fn effect_may_repeat(facts: &Facts) -> RuleResult {
    let handler = facts.handler.as_ref().filter(|_| facts.tier == Tier::EffectivelyOnce)?;
    if handler.on_doubt != OnDoubt::Retry || handler.idempotent_by_derived_key {
        return None;
    }
    found(
        "on_doubt is retry, and it is not declared that the effect honours the derived key: after a crash between effect \
         and completion it happens twice",
        "pass the derived key to whatever the handler calls and declare it, or set on_doubt to park",
    )
}

fn no_attempt_limit(facts: &Facts) -> RuleResult {
    if !facts.records() || facts.queue.retry.limit().is_some() {
        return None;
    }
    found(
        format!(
            "the queue has no limit on attempts: a message that always fails is tried for {} and then dropped",
            span(facts.queue.retention_ms)
        ),
        "set retry.max_attempts, and dead_letter.queue to keep such messages apart",
    )
}

fn own_dead_letters(facts: &Facts) -> RuleResult {
    let queue = &facts.queue;
    if queue.dead_letter.is_some() || !queue.extra.contains_key(QueueConfig::EXTRA_OWN_DEAD_LETTERS) {
        return None;
    }
    found(
        format!(
            "the queue is its own dead-letter queue: a message that always fails stays in it for {} and is then dropped",
            span(queue.retention_ms)
        ),
        "name another queue in its RedrivePolicy",
    )
}

fn retries_at_once(facts: &Facts) -> RuleResult {
    if facts.queue.retry.base_ms > 0 || !facts.redelivers() {
        return None;
    }
    let message = match facts.queue.retry.limit() {
        None => {
            "a failed message returns at once, and nothing limits its attempts: a handler that fails fast is run as often \
             as it can be"
                .to_owned()
        }
        Some(1) => return None,
        Some(_) if !facts.records() => return None,
        Some(max) => {
            format!("a failed message returns at once: a handler that fails fast uses up {max} attempts in a moment")
        }
    };
    let remedy =
        "set retry.base_ms and retry.cap_ms, so that an outage shorter than the backoff kills no message";
    found(message, remedy)
}

/// Maximum total delay of all retries of a message.
fn backoff_ms(retry: &RetryPolicy, max_attempts: u32) -> u64 {
    (1..max_attempts).fold(0, |sum: u64, attempt| sum.saturating_add(retry.ceiling_ms(attempt)))
}

fn retention_ends_retries(facts: &Facts) -> RuleResult {
    let max_attempts = facts.queue.retry.limit().filter(|_| facts.redelivers())?;
    let backoff_ms = backoff_ms(&facts.queue.retry, max_attempts);
    if backoff_ms < facts.queue.retention_ms {
        return None;
    }
    found(
        format!(
            "{max_attempts} attempts may take {} of backoff, and the queue keeps a message for {}: it is dropped before \
             it is dead",
            span(backoff_ms),
            span(facts.queue.retention_ms)
        ),
        "raise retention_ms, or lower retry.cap_ms or retry.max_attempts",
    )
}

fn retention_drops_messages(facts: &Facts) -> RuleResult {
    let dropped = facts.stats.as_ref()?.totals.retention_dropped;
    if dropped == 0 || !facts.redelivers() {
        return None;
    }
    found(
        format!(
            "{dropped} messages were dropped because they were older than {}",
            span(facts.queue.retention_ms)
        ),
        "add consumers, raise retention_ms, or look at what keeps failing",
    )
}

fn dead_letter_queue_missing(facts: &Facts) -> RuleResult {
    let dead = facts.queue.dead_letter.as_ref().filter(|_| facts.dead_queue_missing)?;
    found(
        format!(
            "the dead-letter queue {} does not exist: messages that are dead stay parked in this queue",
            dead.queue
        ),
        "create it again, or name another one or none; then release what is parked",
    )
}

fn dead_letters_short_lived(facts: &Facts) -> RuleResult {
    let kept_ms =
        facts.dead_retention_ms.filter(|_| facts.redelivers() && facts.queue.dead_letter.is_some())?;
    if facts.queue.is_fifo() || kept_ms > facts.queue.retention_ms {
        return None;
    }
    found(
        format!(
            "a dead letter keeps its message's age, and its queue keeps it for {} since it was sent ({} here): one \
             that dies late is dropped before anyone sees it",
            span(kept_ms),
            span(facts.queue.retention_ms)
        ),
        "give the dead-letter queue a longer retention than this one",
    )
}

fn ledger_ttl_below_redrive(facts: &Facts) -> RuleResult {
    let ledger =
        facts.needed_ledger().filter(|ledger| !ledger.same_store && facts.queue.dead_letter.is_some())?;
    let horizon_ms = redrive_horizon_ms(&facts.queue, facts.dead_retention_ms?);
    if ledger.ttl_ms >= horizon_ms {
        return None;
    }
    found(
        format!(
            "outcomes are kept for {}, and a dead letter may be redriven and delivered for {}",
            span(ledger.ttl_ms),
            span(horizon_ms)
        ),
        "keep outcomes that long, or redrive no dead letter that is older than they are",
    )
}

fn dedup_window_short(facts: &Facts) -> RuleResult {
    let retry_ms = facts.producer_retry_ms?;
    let window_ms = facts.queue.dedup.window_ms;
    // A duplicate sent after the window still finds the outcome of the first message, as long as the ledger keeps it.
    let known_ms = match facts.needed_ledger() {
        Some(ledger) if facts.weakest_key() != KeySource::MessageId => window_ms.max(ledger.ttl_ms),
        _ => window_ms,
    };
    if known_ms >= retry_ms {
        return None;
    }
    found(
        format!(
            "producers repeat a send for up to {}, and a repetition is recognised for {}",
            span(retry_ms),
            span(known_ms)
        ),
        "raise dedup.window_ms (up to the retention), or let producers give up earlier",
    )
}

fn order_has_holes(facts: &Facts) -> RuleResult {
    let queue = &facts.queue;
    let ends = queue.dead_letter.is_some() || queue.retry.limit().is_some();
    if !facts.redelivers() || !queue.is_fifo() || !ends || queue.on_dead != OnDead::Continue {
        return None;
    }
    found(
        "on_dead is continue: after a dead letter or a parked message its group continues, and its order has a hole",
        "set on_dead to halt-group where later messages need the earlier ones",
    )
}

fn delivery_fence_may_repeat(facts: &Facts) -> RuleResult {
    if !facts.redelivers() || facts.store.fence {
        return None;
    }
    found(
        format!("the fences of the {} store's deliveries may repeat after a failover", facts.store.name),
        "do not let a sink turn zombies away by a delivery's fence alone",
    )
}

fn delivery_not_durable(facts: &Facts) -> RuleResult {
    if !facts.redelivers() || facts.store.durable_lease {
        return None;
    }
    found(
        format!(
            "the {} store may forget the last deliveries when its process dies: messages come back early, attempts uncounted",
            facts.store.name
        ),
        "expect duplicates after a crash of the store; on PostgreSQL, hapax_sync_receives=true in its URL prevents it",
    )
}

fn settle_not_atomic(facts: &Facts) -> RuleResult {
    if !facts.redelivers() || facts.store.atomic_settle {
        return None;
    }
    found(
        format!(
            "a settle takes the {} store several steps: a crash between them may leave a message both in its queue \
             and among the dead letters",
            facts.store.name
        ),
        "use another store, or look for the message id before a redrive",
    )
}

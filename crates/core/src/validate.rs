//! What may be asked of a store, as pure functions. Every store calls them, so every store refuses the same requests in
//! the same words. A queue's own settings are checked by [`QueueConfig::validate`].

use crate::error::{AdminError, SendError, StoreError};
use crate::ledger;
use crate::message::{NewMessage, Priority};
use crate::name::QueueName;
use crate::policy::{self, Visibility};
use crate::queue::{QueueConfig, RedriveAllow};
use crate::store::{Receive, RedriveRequest};
use crate::transfer::{ExportedEntry, ExportedMessage, ExportedStage, FENCE_BOUND_MAX};

/// Maximum count of elements of one batch, and of ids in one request.
pub const BATCH_MAX: usize = 1_000;
/// Maximum count of attributes of one message.
pub const ATTRIBUTES_MAX: usize = 100;
/// Maximum count of rows of one page.
pub const PAGE_MAX: usize = 1_000;
/// Messages per second that a redrive moves, unless it says otherwise.
pub const REDRIVE_PER_SECOND_DEFAULT: u32 = 500;
/// The highest rate of a redrive, in messages per second.
pub const REDRIVE_PER_SECOND_MAX: u32 = 10_000;
/// The longest name of a receive (`attempt_id`), in bytes.
pub const ATTEMPT_ID_BYTES_MAX: usize = 128;
/// The longest name of a consumer, in bytes.
pub const CONSUMER_BYTES_MAX: usize = 256;

/// What of a message is compared with its queue's configuration. A store that has taken the message apart fills it in.
#[derive(Debug, Clone, Copy)]
pub struct MessageShape {
    /// Body, and the attributes' names, types and values.
    pub bytes: u64,
    /// Count of attributes.
    pub attributes: usize,
    /// The delay that the sender asks for.
    pub delay_ms: Option<u64>,
    /// The delivery time that the sender asks for.
    pub deliver_at_ms: Option<u64>,
    /// It has a group.
    pub has_group: bool,
    /// It has a deduplication id.
    pub has_dedup: bool,
    /// Its urgency.
    pub priority: Priority,
}

impl From<&NewMessage> for MessageShape {
    fn from(message: &NewMessage) -> Self {
        Self {
            bytes: message.bytes(),
            attributes: message.attributes.len(),
            delay_ms: message.delay_ms,
            deliver_at_ms: message.deliver_at_ms,
            has_group: message.group.is_some(),
            has_dedup: message.dedup.is_some(),
            priority: message.priority,
        }
    }
}

/// Whether a queue accepts a message of this shape; if so, when it becomes visible.
///
/// ```
/// # use hapax_core::{NewMessage, QueueConfig, validate};
/// let error = validate::message(&QueueConfig::fifo(), (&NewMessage::new("x")).into(), 0).unwrap_err();
/// assert_eq!(error.to_string(), "group: a FIFO queue needs a group on each message");
/// ```
pub fn message(config: &QueueConfig, message: MessageShape, now_ms: u64) -> Result<Visibility, SendError> {
    let invalid = |problem: String| Err(SendError::Invalid(problem));
    if message.attributes > ATTRIBUTES_MAX {
        let count = message.attributes;
        return invalid(format!("{count} attributes are too many; use at most {ATTRIBUTES_MAX}"));
    }
    if message.bytes > config.message_bytes_max {
        return Err(SendError::TooLarge { bytes: message.bytes, bytes_max: config.message_bytes_max });
    }
    match message.delay_ms {
        Some(delay_ms) if delay_ms > policy::DELAY_MS_MAX => {
            let max = policy::DELAY_MS_MAX;
            return invalid(format!("delay_ms: {delay_ms} is out of range; use 0 to {max}"));
        }
        Some(_) if config.is_fifo() => {
            return invalid("delay_ms: a FIFO queue has one delay for all; set it on the queue".into());
        }
        _ => {}
    }
    if message.priority > Priority::MAX {
        let (priority, max) = (message.priority.0, Priority::MAX.0);
        return invalid(format!("priority: {priority} is out of range; use 0 to {max}"));
    }
    if config.is_fifo() {
        if !message.has_group {
            return invalid("group: a FIFO queue needs a group on each message".into());
        }
        if message.priority != Priority(0) {
            return invalid("priority: a FIFO queue keeps order, so it has no priorities".into());
        }
        if !message.has_dedup && !config.dedup.content_based {
            let problem =
                "dedup: a FIFO queue needs a deduplication id on each message, or dedup.content_based";
            return invalid(problem.into());
        }
    }
    policy::visibility(config, now_ms, message.delay_ms, message.deliver_at_ms)
}

/// Times and places of an import are below this: they fit into a JSON number.
const NUMBER_END: u64 = 1 << 53;
/// Counts of an import are at most this: there is room to count on.
const COUNT_MAX: u32 = 1 << 30;

/// Whether a queue accepts an exported message.
pub fn import(config: &QueueConfig, exported: &ExportedMessage) -> Result<(), SendError> {
    message(config, (&exported.as_new()).into(), 0)?;
    let invalid = |problem: &str| Err(SendError::Invalid(format!("message {}: {problem}", exported.id)));
    let e = exported;
    let mut numbers = vec![e.sequence, e.sent_ms, e.retained_from_ms, e.visible_ms, e.first_received_ms];
    numbers.extend(e.dead.iter().flat_map(|dead| [dead.first_received_ms, dead.died_ms]));
    numbers.extend(e.history.iter().map(|failed| failed.at_ms));
    if numbers.iter().any(|number| *number >= NUMBER_END) {
        return invalid("a time or the sequence is out of range; use numbers below 2^53");
    }
    if e.fence.0 > FENCE_BOUND_MAX {
        return invalid(&format!("fence: {} is out of range; use 0 to {FENCE_BOUND_MAX}", e.fence));
    }
    let counts = [e.deliveries].into_iter().chain(e.dead.iter().flat_map(|d| [d.attempts, d.deliveries]));
    if let Some(count) = counts.into_iter().find(|count| *count > COUNT_MAX) {
        return invalid(&format!("{count} attempts or deliveries are too many; use at most {COUNT_MAX}"));
    }
    if e.attempts > e.deliveries {
        return invalid("it has more attempts than deliveries");
    }
    if e.history.len() > policy::HISTORY_MAX as usize || e.entries.len() > ATTRIBUTES_MAX {
        return invalid("its history or its list of entries is too long");
    }
    let texts = e.history.iter().map(|failed| &failed.error).chain(e.dead.iter().map(|dead| &dead.error));
    if texts.flatten().any(|text| text.len() > policy::ERROR_BYTES_MAX) {
        return invalid("an error text is longer than 4096 bytes");
    }
    if e.undecided && (e.parked.is_none() || e.group.is_none() || !config.is_fifo()) {
        return invalid("only a parked message of a FIFO group halts its group");
    }
    Ok(())
}

/// Whether a ledger accepts an exported entry.
pub fn import_entry(entry: &ExportedEntry) -> Result<(), SendError> {
    let (at_ms, ttl_ms) = match &entry.stage {
        ExportedStage::InDoubt { since_ms, .. } => (*since_ms, ledger::TTL_MS_MIN),
        ExportedStage::Completed { at_ms, ttl_ms, .. } => (*at_ms, *ttl_ms),
    };
    let bounds = [
        ("claimed_ms", entry.claimed_ms, 0, NUMBER_END - 1),
        ("at_ms", at_ms, 0, NUMBER_END - 1),
        // One that a message needed may be older than any entry is kept; the store bounds how long it keeps it.
        ("ttl_ms", ttl_ms, ledger::TTL_MS_MIN, NUMBER_END - 1),
        ("takeovers", entry.takeovers.into(), 0, COUNT_MAX.into()),
    ];
    for (field, value, min, max) in bounds {
        within(field, value, min, max)
            .map_err(|error| SendError::Invalid(format!("entry {}: {error}", entry.id)))?;
    }
    Ok(())
}

/// Whether a number of a request is within its bounds, both included.
pub fn within(field: &str, value: u64, min: u64, max: u64) -> Result<(), StoreError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(StoreError::Invalid(format!("{field}: {value} is out of range; use {min} to {max}")))
}

/// Whether a receive asks for what there is.
pub fn receive(receive: &Receive) -> Result<(), StoreError> {
    let len = |text: &Option<String>| text.as_ref().map_or(0, String::len) as u64;
    within("max", receive.max as u64, 1, Receive::MAX as u64)?;
    within("lease_ms", receive.lease_ms.unwrap_or(0), 0, policy::LEASE_MS_MAX)?;
    within("wait_ms", receive.wait_ms.unwrap_or(0), 0, policy::WAIT_MS_MAX)?;
    within("attempt_id's length", len(&receive.attempt_id), 0, ATTEMPT_ID_BYTES_MAX as u64)?;
    if receive.ack_on_receive && receive.attempt_id.is_some() {
        let problem =
            "attempt_id: a receive that acks what it takes cannot be repeated; leave one of the two out";
        return Err(StoreError::Invalid(problem.into()));
    }
    within("consumer's length", len(&receive.consumer), 0, CONSUMER_BYTES_MAX as u64)
}

/// Whether a request has an acceptable count of elements; `what` names their list.
pub fn batch(what: &str, count: usize) -> Result<(), StoreError> {
    if count <= BATCH_MAX {
        return Ok(());
    }
    Err(StoreError::Invalid(format!("{what}: {count} elements are too many; use at most {BATCH_MAX}")))
}

/// Whether a listing asks for an acceptable count of rows.
pub fn page(limit: usize) -> Result<(), StoreError> {
    within("limit", limit as u64, 1, PAGE_MAX as u64)
}

/// Whether a queue may have this configuration. `find` gives the configuration of another queue, `None` if there is no
/// such queue.
pub fn queue<'c>(
    name: &QueueName,
    config: &QueueConfig,
    find: impl FnOnce(&QueueName) -> Option<&'c QueueConfig>,
) -> Result<(), AdminError> {
    config.validate(name)?;
    let Some(policy) = &config.dead_letter else { return Ok(()) };
    let problem = match find(&policy.queue).map(|dead| &dead.redrive_allow) {
        None => "does not exist; create it first",
        Some(RedriveAllow::None) => "takes no dead letters (redrive_allow is none)",
        Some(RedriveAllow::Queues(queues)) if !queues.contains(name) => {
            "takes no dead letters of this queue (redrive_allow)"
        }
        Some(_) => return Ok(()),
    };
    let problem = format!("queue {} {problem}", policy.queue);
    Err(AdminError::Config { field: "dead_letter.queue", problem })
}

/// Whether a redrive between queues of these configurations may start; gives its rate in messages per second. `to` is
/// the configuration of the queue that the request names, `None` if it names none.
pub fn redrive(
    request: &RedriveRequest,
    from: &QueueConfig,
    to: Option<&QueueConfig>,
) -> Result<u32, AdminError> {
    batch("filter.ids", request.filter.ids.len())?;
    batch("filter.sources", request.filter.sources.len())?;
    if let (Some(name), Some(to)) = (&request.to, to) {
        if *name == request.from {
            return Err(AdminError::Refused(format!("queue {name} is where the messages are already")));
        }
        if to.kind != from.kind {
            let from = &request.from;
            let problem = format!("queue {name} is not of the same kind as {from}: one is FIFO, one is not");
            return Err(AdminError::Refused(problem));
        }
    }
    let per_second = request.per_second.unwrap_or(REDRIVE_PER_SECOND_DEFAULT);
    if !(1..=REDRIVE_PER_SECOND_MAX).contains(&per_second) {
        let problem = format!("{per_second} is out of range; use 1 to {REDRIVE_PER_SECOND_MAX}");
        return Err(AdminError::Config { field: "per_second", problem });
    }
    Ok(per_second)
}

/// Whether something may be done that was last done at `last_ms` and has to keep an interval. `what` says what was done,
/// for example `queue payments was purged`.
pub fn interval(
    now_ms: u64,
    last_ms: Option<u64>,
    interval_ms: u64,
    what: impl FnOnce() -> String,
) -> Result<(), AdminError> {
    if interval_ms > policy::INTERVAL_MS_MAX {
        let problem = format!("{interval_ms} is out of range; use 0 to {}", policy::INTERVAL_MS_MAX);
        return Err(AdminError::Config { field: "interval_ms", problem });
    }
    match last_ms.map(|last_ms| (last_ms + interval_ms).saturating_sub(now_ms)) {
        Some(retry_after_ms @ 1..) => Err(AdminError::TooSoon { what: what(), retry_after_ms }),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;

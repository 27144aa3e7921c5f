//! What a queue needs of its store: compared when the queue is made or changed, and when a worker starts.

use super::rules::{RuleResult, found, span};
use crate::capabilities::{Capabilities, Order};
use crate::error::{AdminError, SendError};
use crate::message::Priority;
use crate::queue::{OnDead, QueueConfig};

/// What a configuration needs and a store does not have, with a remedy.
type Need = fn(&QueueConfig, &Capabilities) -> RuleResult;

/// Whether a store has what the configuration of a queue needs. The error names the field, the store and a remedy.
///
/// ```
/// use hapax_core::policy::tier::fits_store;
/// use hapax_core::{Capabilities, OnDead, Order, QueueConfig};
///
/// let mut store = Capabilities::none("my-store");
/// (store.order, store.dedup_ms_max, store.message_bytes_max) = (Order::PerGroup, 300_000, 1_048_576);
/// let error = fits_store(&QueueConfig::fifo(), &store).unwrap_err();
/// assert!(error.to_string().starts_with("on_dead: the my-store store cannot halt a group"), "{error}");
/// let continues = QueueConfig { on_dead: OnDead::Continue, ..QueueConfig::fifo() };
/// assert_eq!(fits_store(&continues, &store), Ok(()));
/// ```
pub fn fits_store(queue: &QueueConfig, store: &Capabilities) -> Result<(), AdminError> {
    let needs: [(&'static str, Need); 4] = [
        ("kind", order),
        ("on_dead", halt_group),
        ("dedup.window_ms", dedup_window),
        ("message_bytes_max", message_size),
    ];
    for (field, need) in needs {
        if let Some((message, remedy)) = need(queue, store) {
            return Err(AdminError::Config { field, problem: format!("{message}; {remedy}") });
        }
    }
    Ok(())
}

/// Whether a store can deliver a message of this priority as its sender expects. A store without priorities calls it
/// for each send.
pub fn priority_fits_store(priority: Priority, store: &Capabilities) -> Result<(), SendError> {
    if priority == Priority(0) || store.priorities {
        return Ok(());
    }
    Err(SendError::Invalid(format!(
        "priority: the {} store has no priorities; send with priority 0, put urgent messages into a queue of their own, \
         or use another store",
        store.name
    )))
}

pub(super) fn order(queue: &QueueConfig, store: &Capabilities) -> RuleResult {
    if !queue.is_fifo() || store.order != Order::None {
        return None;
    }
    found(
        format!("the queue is FIFO, and the {} store keeps no order", store.name),
        "use another store, or a standard queue",
    )
}

pub(super) fn halt_group(queue: &QueueConfig, store: &Capabilities) -> RuleResult {
    if queue.on_dead != OnDead::HaltGroup || store.halt_group {
        return None;
    }
    found(
        format!("the {} store cannot halt a group while one of its messages is dead or parked", store.name),
        "set on_dead to continue if the messages behind it may be delivered, or use another store",
    )
}

pub(super) fn dedup_window(queue: &QueueConfig, store: &Capabilities) -> RuleResult {
    let (window_ms, most_ms) = (queue.dedup.window_ms, store.dedup_ms_max);
    if window_ms <= most_ms {
        return None;
    }
    found(
        format!(
            "deduplication ids are to be remembered for {}, and the {} store remembers them for {} at most",
            span(window_ms),
            store.name,
            span(most_ms)
        ),
        "shorten dedup.window_ms, or use another store",
    )
}

pub(super) fn message_size(queue: &QueueConfig, store: &Capabilities) -> RuleResult {
    let (wanted, most) = (queue.message_bytes_max, store.message_bytes_max);
    if wanted <= most {
        return None;
    }
    found(
        format!("messages may have {wanted} bytes, and the {} store takes {most} at most", store.name),
        "lower message_bytes_max and send references to larger data, or use another store",
    )
}

//! A copy of a store to another one: what is closed for it, and why.
//!
//! A queue or a ledger that is copied is closed in both stores: in the source from the beginning of the copy on, in the
//! target until everything is there. A closed queue accepts, delivers and settles nothing, and time does not change it, so
//! that both sides can be compared. What is closed stays so across restarts, for every process on the store.

use serde::{Deserialize, Serialize};

use crate::error::StoreError;
use crate::name::QueueName;
use crate::store::QueuePause;
use crate::transfer::{ExportedItem, ExportedStage};

/// The document in which a store keeps the state of its ledger.
pub const LEDGER_COPY: &str = "hapax/copy";

/// Why a queue or the ledger is closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum CopyState {
    /// It is copied to another store, or was.
    To {
        /// The other store, without secrets.
        store: String,
        /// All of it is there, compared and open.
        #[serde(default)]
        complete: bool,
    },
    /// It is copied from another store, and not all of it is here.
    From {
        /// The other store, without secrets.
        store: String,
    },
}

impl CopyState {
    /// The error of every operation on what is closed. `what` names it, for example `queue jobs`.
    pub fn refusal(&self, what: &str) -> StoreError {
        StoreError::Moved(match self {
            Self::To { store, complete: true } => format!(
                "{what} was copied to {store} and is closed here; use it there, or open it here again with `hapax copy --release`"
            ),
            Self::To { store, complete: false } => format!(
                "{what} is being copied to {store} and is closed here; use it there when the copy is complete"
            ),
            Self::From { store } => {
                format!("{what} is being copied from {store}; it opens when all of it is here")
            }
        })
    }

    /// The error of every operation on a ledger that is closed.
    pub fn ledger_refusal(&self) -> StoreError {
        self.refusal("the ledger")
    }
}

/// The pause of a queue that is closed, or what remains of it when the queue is opened. `before` is its pause until now.
pub fn pause_for_copy(
    before: Option<QueuePause>,
    state: Option<CopyState>,
    now_ms: u64,
    by: &str,
) -> Option<QueuePause> {
    match (before, state) {
        (Some(before), None) => (!before.copy_only).then_some(QueuePause { copy: None, ..before }),
        (Some(before), state) => Some(QueuePause { copy: state, ..before }),
        (None, Some(state)) => Some(QueuePause {
            since_ms: now_ms,
            by: crate::policy::truncate(by, 256).to_owned(),
            reason: None,
            copy: Some(state),
            copy_only: true,
        }),
        (None, None) => None,
    }
}

/// Refuses an operation on a queue that is closed.
pub fn check_open(queue: &QueueName, paused: Option<&QueuePause>) -> Result<(), StoreError> {
    match paused.and_then(|paused| paused.copy.as_ref()) {
        None => Ok(()),
        Some(state) => Err(state.refusal(&format!("queue {queue}"))),
    }
}

/// A checksum of what was exported, to compare two stores. What differs between equal contents is left out: places, the
/// time of an export, and retention, which begins again if it is nearly over when something is imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksum {
    sum: u128,
    items: u64,
    ordered: bool,
}

impl Checksum {
    /// Of the messages of a queue, in their order.
    pub fn of_queue() -> Self {
        Self { sum: 0, items: 0, ordered: true }
    }

    /// Of the entries of a ledger, in any order.
    pub fn of_ledger() -> Self {
        Self { ordered: false, ..Self::of_queue() }
    }

    /// Adds the next item.
    pub fn add(&mut self, item: &ExportedItem) {
        let json = serde_json::to_vec(&comparable(item)).expect("an item is plain data");
        let mut hasher = blake3::Hasher::new();
        if self.ordered {
            hasher.update(&self.items.to_le_bytes());
        }
        let hash = hasher.update(&json).finalize();
        let first = hash.as_bytes().first_chunk::<16>().expect("a hash has 32 bytes");
        self.sum = self.sum.wrapping_add(u128::from_le_bytes(*first));
        self.items += 1;
    }

    /// How many items were added.
    pub fn items(&self) -> u64 {
        self.items
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.sum)
    }
}

/// An item without what may differ between two stores.
fn comparable(item: &ExportedItem) -> ExportedItem {
    let mut item = item.clone();
    match &mut item {
        ExportedItem::Message(message) => {
            (message.sequence, message.retained_from_ms) = (0, 0);
            // Which entries there are is compared with the ledger.
            message.entries.clear();
            if message.parked.is_some() {
                message.visible_ms = 0;
            }
        }
        ExportedItem::Entry(entry) => match &mut entry.stage {
            ExportedStage::InDoubt { since_ms, .. } => *since_ms = 0,
            ExportedStage::Completed { ttl_ms, .. } => *ttl_ms = 0,
        },
        ExportedItem::Undecided { .. } | ExportedItem::Dedup(_) | ExportedItem::Damaged { .. } => {}
    }
    item
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(complete: bool) -> CopyState {
        CopyState::To { store: "postgres://db/shop".into(), complete }
    }

    #[test]
    fn a_queue_that_was_paused_before_a_copy_is_paused_after_it() {
        let operator = QueuePause::new(7, "ann", Some("incident"));
        for before in [None, Some(operator)] {
            let closed = pause_for_copy(before.clone(), Some(to(false)), 9, "copier");
            assert_eq!(closed.as_ref().and_then(|pause| pause.copy.clone()), Some(to(false)));
            let complete = pause_for_copy(closed, Some(to(true)), 10, "copier");
            let stored = serde_json::to_string(&complete).unwrap();
            let read: Option<QueuePause> = serde_json::from_str(&stored).unwrap();
            assert_eq!(read, complete);
            assert_eq!(pause_for_copy(read, None, 11, "copier"), before);
        }
        assert_eq!(pause_for_copy(None, None, 1, "copier"), None);
    }

    #[test]
    fn a_checksum_of_a_queue_depends_on_the_order_and_one_of_a_ledger_does_not() {
        let group = |name: &str| ExportedItem::Undecided { group: name.parse().unwrap(), id: None };
        let (a, b) = (group("a"), group("b"));
        for (empty, ordered) in [(Checksum::of_queue(), true), (Checksum::of_ledger(), false)] {
            let sum = |items: &[&ExportedItem]| {
                let mut sum = empty.clone();
                for item in items {
                    sum.add(item);
                }
                sum
            };
            assert_eq!(sum(&[&a, &b]), sum(&[&a, &b]));
            assert_eq!(sum(&[&a, &b]) == sum(&[&b, &a]), !ordered);
            assert_ne!(sum(&[&a]), sum(&[&a, &a]));
        }
    }

    #[test]
    fn a_refusal_names_the_queue_and_the_other_store_and_is_retryable() {
        let queue = QueueName::new("jobs").unwrap();
        let from = CopyState::From { store: "postgres://db/shop".into() };
        for state in [to(false), to(true), from] {
            let pause = pause_for_copy(None, Some(state), 1, "copier");
            let refusal = check_open(&queue, pause.as_ref()).unwrap_err();
            assert_eq!((refusal.code(), refusal.is_retryable()), ("moved", true));
            let text = refusal.to_string();
            assert!(text.contains("queue jobs") && text.contains("postgres://db/shop"), "{text}");
        }
        assert_eq!(check_open(&queue, Some(&QueuePause::new(1, "ann", None))), Ok(()));
    }
}

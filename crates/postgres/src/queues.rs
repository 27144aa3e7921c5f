//! The queues of the store.
//!
//! Where queues and ledger meet, each calls functions of the other. Ids of entries are the 16 bytes of
//! [`EntryId::hash`](hapax_core::EntryId::hash), little-endian, as `bytea`.
//!
//! The ledger calls these SQL functions, which its migration defines without effect and which the migration of the queues
//! replaces: `hapax.entry_needed(id bytea) RETURNS boolean` (whether a message in the store needs the entry, so that it is
//! not pruned), `hapax.doubt_cleared(ids bytea[])` (messages that are parked for these entries continue) and
//! `hapax.link_entries(ids bytea[], messages bigint[], granted boolean[])` (claims for deliveries). It asks
//! `Queues::message_of` for the message of a receipt.
//!
//! The queues call, inside their own transactions: `ledger::end_in` to end the claim of a settle, `ledger::in_doubt_in`,
//! and the SQL function `hapax.ledger_clear(ids bytea[], redriven boolean)` before a message is linked to its key.

use std::sync::Arc;

use hapax_core::{QueueName, Receipt};

use crate::Base;

/// The queues' part of a store.
pub(crate) struct Queues {
    base: Arc<Base>,
}

impl Queues {
    pub fn new(base: &Arc<Base>) -> Self {
        Self { base: base.clone() }
    }

    /// The message that a receipt names.
    #[expect(clippy::unused_self, reason = "there are no queues yet")]
    pub fn message_of(&self, _queue: &QueueName, _receipt: &Receipt) -> Option<i64> {
        None
    }

    /// Stops the background work of the queues.
    pub fn close(&self) {
        tracing::debug!(connections_max = self.base.options.connections_max, "the queues are closed");
    }
}

//! Positions in a partitioned log, kept in the database of the business writes: the position advances in the transaction
//! that holds the effects of the records up to it, so that both happen or neither does.
//!
//! A position is advanced by compare-and-set. A reader that was superseded without noticing, for example while its process was
//! stopped, finds another position than it left, and its transaction is rolled back.

use async_trait::async_trait;

use crate::inbox::{AsyncInbox, BlockingInbox, InboxError};

/// A partition of a topic, as one group reads it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogPartition {
    /// The group of readers.
    pub group: String,
    /// The topic's id. A topic that was deleted and created again has another one, hence no position.
    pub topic_id: String,
    /// The topic's name, for operators.
    pub topic: String,
    /// The partition's number.
    pub partition: i32,
}

impl std::fmt::Display for LogPartition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} of group {}", self.topic, self.partition, self.group)
    }
}

/// What an advance that found another position answers.
pub fn superseded(partition: &LogPartition, from: Option<i64>) -> InboxError {
    let from = from.map_or_else(|| "none".to_owned(), |offset| offset.to_string());
    InboxError::Superseded(format!(
        "the position in {partition} is no longer {from}: another reader moved it"
    ))
}

/// Positions in a database whose transactions may live across an `await`.
#[async_trait]
pub trait AsyncPositions: AsyncInbox {
    /// The offset of the next record; `None`: there is no position yet.
    async fn position(&self, of: &LogPartition) -> Result<Option<i64>, InboxError>;

    /// Moves a position in the caller's transaction, if it is `from`; otherwise [`InboxError::Superseded`], and the caller
    /// rolls back. Waits for another transaction that moves it.
    async fn advance(
        &self,
        tx: &mut Self::Tx,
        of: &LogPartition,
        from: Option<i64>,
        to: i64,
    ) -> Result<(), InboxError>;
}

/// Positions in a database whose transactions block their thread.
pub trait BlockingPositions: BlockingInbox {
    /// The offset of the next record; `None`: there is no position yet.
    fn position(&self, tx: &Self::Tx<'_>, of: &LogPartition) -> Result<Option<i64>, InboxError>;

    /// Moves a position in the caller's transaction, if it is `from`; otherwise [`InboxError::Superseded`], and the caller
    /// rolls back.
    fn advance(
        &self,
        tx: &Self::Tx<'_>,
        of: &LogPartition,
        from: Option<i64>,
        to: i64,
    ) -> Result<(), InboxError>;
}

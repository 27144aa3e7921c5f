//! Positions in a partitioned log, advanced in the user's transactions.

use async_trait::async_trait;
use hapax_core::positions::{AsyncPositions, LogPartition, superseded};
use hapax_core::{InboxError, StoreError};
use sqlx::Row as _;

use super::error::after_handler;
use super::{PostgresInbox, PostgresTransaction};
use crate::error::Access;

const POSITION: &str = "SELECT next_offset FROM hapax.log_position
    WHERE reader_group = $1 AND topic_id = $2 AND partition = $3";
const FIRST: &str =
    "INSERT INTO hapax.log_position (reader_group, topic_id, partition, topic, next_offset, moved_ms)
     VALUES ($1, $2, $3, $4, $5, hapax.now_ms()) ON CONFLICT DO NOTHING";
const NEXT: &str = "UPDATE hapax.log_position SET topic = $4, next_offset = $5, moved_ms = hapax.now_ms()
     WHERE reader_group = $1 AND topic_id = $2 AND partition = $3 AND next_offset = $6";

#[async_trait]
impl AsyncPositions for PostgresInbox {
    async fn position(&self, of: &LogPartition) -> Result<Option<i64>, InboxError> {
        let of = of.clone();
        let read = self.inner.store.base.pool.repeat("position", Access::Read, move |connection| {
            let of = of.clone();
            Box::pin(async move {
                let read = sqlx::query(POSITION).bind(&of.group).bind(&of.topic_id).bind(of.partition);
                let row = read.fetch_optional(connection).await?;
                Ok(row.map(|row| row.try_get(0)).transpose()?)
            })
        });
        read.await.map_err(|error: StoreError| InboxError::Unavailable(error.to_string()))
    }

    async fn advance(
        &self,
        tx: &mut PostgresTransaction,
        of: &LogPartition,
        from: Option<i64>,
        to: i64,
    ) -> Result<(), InboxError> {
        let statement = sqlx::query(if from.is_some() { NEXT } else { FIRST })
            .bind(&of.group)
            .bind(&of.topic_id)
            .bind(of.partition)
            .bind(&of.topic)
            .bind(to);
        let statement = match from {
            Some(from) => statement.bind(from),
            None => statement,
        };
        let moved = statement.execute(&mut tx.taken.connection).await.map_err(after_handler)?;
        if moved.rows_affected() == 0 && !hapax_core::mutant::is("position-not-compared") {
            return Err(superseded(of, from));
        }
        Ok(())
    }
}

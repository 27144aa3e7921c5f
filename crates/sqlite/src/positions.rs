//! Positions in a partitioned log, advanced in the user's transactions.

use hapax_core::InboxError;
use hapax_core::positions::{BlockingPositions, LogPartition, superseded};
use rusqlite::{OptionalExtension as _, Transaction, params};

use crate::{SqliteInbox, database};

/// One row for each group and partition.
pub(crate) const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS hapax_log_position (
        reader_group TEXT NOT NULL,
        topic_id TEXT NOT NULL,
        partition INTEGER NOT NULL,
        topic TEXT NOT NULL,
        next_offset INTEGER NOT NULL CHECK (next_offset >= 0),
        PRIMARY KEY (reader_group, topic_id, partition)
    ) WITHOUT ROWID;
";

impl BlockingPositions for SqliteInbox {
    fn position(&self, tx: &Transaction<'_>, of: &LogPartition) -> Result<Option<i64>, InboxError> {
        let mut select = tx
            .prepare_cached(
                "SELECT next_offset FROM hapax_log_position
                 WHERE reader_group = ?1 AND topic_id = ?2 AND partition = ?3",
            )
            .map_err(database)?;
        let key = params![of.group, of.topic_id, of.partition];
        select.query_row(key, |row| row.get(0)).optional().map_err(database)
    }

    fn advance(
        &self,
        tx: &Transaction<'_>,
        of: &LogPartition,
        from: Option<i64>,
        to: i64,
    ) -> Result<(), InboxError> {
        let sql = match from {
            None => "INSERT INTO hapax_log_position VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING",
            Some(_) => {
                "UPDATE hapax_log_position SET topic = ?4, next_offset = ?5
                 WHERE reader_group = ?1 AND topic_id = ?2 AND partition = ?3 AND next_offset = ?6"
            }
        };
        let mut statement = tx.prepare_cached(sql).map_err(database)?;
        let moved = match from {
            None => statement.execute(params![of.group, of.topic_id, of.partition, of.topic, to]),
            Some(from) => statement.execute(params![of.group, of.topic_id, of.partition, of.topic, to, from]),
        };
        if moved.map_err(database)? == 0 && !hapax_core::mutant::is("position-not-compared") {
            return Err(superseded(of, from));
        }
        Ok(())
    }
}

//! Message ids: made from a message's number, so that none has to be kept. Only messages that came from another store have
//! ids that are kept.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use hapax_core::{MessageId, policy};
use rusqlite::Connection;

use crate::crc::Crc;
use crate::record::ImportedRow;

/// A UUID of version 8: 60 random bits of the epoch, then the number. Clones share what was imported.
#[derive(Debug, Clone)]
pub(crate) struct Ids {
    /// First number and salt of each epoch, ascending.
    epochs: Arc<[(u64, u64)]>,
    imported: Arc<ImportedIds>,
}

/// Ids of messages that came from another store.
#[derive(Debug, Default)]
struct ImportedIds {
    /// A store into which nothing was imported pays for nothing else than this look.
    any: AtomicBool,
    maps: RwLock<Maps>,
}

#[derive(Debug, Default)]
struct Maps {
    by_seq: HashMap<u64, u128>,
    by_id: HashMap<u128, ImportedRow>,
}

/// How long the id of a message that is gone is remembered, so that a repeated import does not bring it back.
const REMEMBERED_MS: u64 = policy::RETENTION_MS_MAX;

const VERSION_MASK: u64 = 0xf000;
const VERSION: u64 = 0x8000;
const VARIANT: u64 = 0b10 << 62;
const NUMBER_MASK: u64 = (1 << 62) - 1;

impl Ids {
    #[cfg(test)]
    pub fn fixed(salt: u64) -> Self {
        Self { epochs: [(1, salt)].into(), imported: Arc::default() }
    }

    /// `None` if a row is damaged: ids made with a wrong salt would match no message.
    pub fn load(db: &Connection) -> rusqlite::Result<Option<Self>> {
        let mut statement = db.prepare("SELECT first_seq, salt, crc FROM epoch ORDER BY first_seq")?;
        let epoch = |row: &rusqlite::Row<'_>| {
            let epoch = (row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64);
            Ok((row.get::<_, u32>(2)? == Self::crc(epoch)).then_some(epoch))
        };
        let epochs: Option<Vec<_>> = statement.query_map([], epoch)?.collect::<Result<_, _>>()?;
        let Some(epochs) = epochs.filter(|epochs| !epochs.is_empty()) else { return Ok(None) };
        let ids = Self { epochs: epochs.into(), imported: Arc::default() };
        let mut statement =
            db.prepare("SELECT id, seq, queue, gone, at_ms, crc FROM imported ORDER BY seq")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let id =
                row.get_ref(0)?.as_blob().ok().and_then(|id| id.try_into().ok()).map(u128::from_le_bytes);
            let number = |at: usize| row.get::<_, i64>(at).map_or(u64::MAX, |number| number as u64);
            let imported = ImportedRow {
                seq: number(1),
                id: MessageId(id.unwrap_or_default()),
                queue: number(2) as u32,
                gone: number(3) == 1,
                at_ms: number(4),
            };
            if number(5) == u64::from(imported.crc()) {
                ids.add_imported(imported);
            } else {
                let seq = imported.seq;
                tracing::error!(seq, "the id of an imported message is damaged: it has another one now");
            }
        }
        Ok(Some(ids))
    }

    /// Forgets ids of imported messages that are long gone. `now_ms` is the store's time.
    pub fn prune_imported(db: &Connection, now_ms: u64) -> rusqlite::Result<()> {
        let sql = "DELETE FROM imported WHERE at_ms < ?1 AND seq NOT IN (SELECT seq FROM message)";
        db.execute(sql, [now_ms.saturating_sub(REMEMBERED_MS) as i64]).map(drop)
    }

    /// What is known of an imported message, which may be gone.
    pub fn imported(&self, id: MessageId) -> Option<ImportedRow> {
        if !self.imported.any.load(Ordering::Acquire) {
            return None;
        }
        self.imported.maps.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id.0).copied()
    }

    pub fn add_imported(&self, row: ImportedRow) {
        let mut maps = self.imported.maps.write().unwrap_or_else(PoisonError::into_inner);
        maps.by_seq.insert(row.seq, row.id.0);
        if !row.gone {
            maps.by_id.insert(row.id.0, row);
        }
        self.imported.any.store(true, Ordering::Release);
    }

    /// Takes an import back whose wave was not committed.
    pub fn drop_imported(&self, row: &ImportedRow) {
        let mut maps = self.imported.maps.write().unwrap_or_else(PoisonError::into_inner);
        maps.by_seq.remove(&row.seq);
        if !row.gone {
            maps.by_id.remove(&row.id.0);
        }
    }

    fn crc((first_seq, salt): (u64, u64)) -> u32 {
        let mut crc = Crc::new();
        crc.word(first_seq).word(salt);
        crc.end()
    }

    /// Numbers from `first_seq` on get ids that no earlier epoch has issued.
    pub fn begin_epoch(db: &Connection, first_seq: u64) -> rusqlite::Result<()> {
        let salt: i64 = db.query_row("SELECT random()", [], |row| row.get(0))?;
        let sql = "INSERT OR REPLACE INTO epoch (first_seq, salt, crc) VALUES (?1, ?2, ?3)";
        db.execute(sql, rusqlite::params![first_seq as i64, salt, Self::crc((first_seq, salt as u64))])?;
        Ok(())
    }

    fn salt(&self, seq: u64) -> u64 {
        let after = self.epochs.partition_point(|(first_seq, _)| *first_seq <= seq);
        self.epochs.get(after.saturating_sub(1)).map_or(0, |(_, salt)| *salt)
    }

    pub fn id(&self, seq: u64) -> MessageId {
        if self.imported.any.load(Ordering::Acquire) {
            let maps = self.imported.maps.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(id) = maps.by_seq.get(&seq) {
                return MessageId(*id);
            }
        }
        self.own_id(seq)
    }

    fn own_id(&self, seq: u64) -> MessageId {
        let high = (self.salt(seq) & !VERSION_MASK) | VERSION;
        MessageId(u128::from(high) << 64 | u128::from(VARIANT | seq))
    }

    /// The number of an id that this store gave out, or that came with an import.
    pub fn seq(&self, id: MessageId) -> Option<u64> {
        self.imported(id).map(|row| row.seq).or_else(|| self.own_seq(id))
    }

    /// The number of an id that this store gave out.
    pub fn own_seq(&self, id: MessageId) -> Option<u64> {
        let seq = id.0 as u64 & NUMBER_MASK;
        (self.own_id(seq) == id).then_some(seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_their_message_and_differ_between_epochs() {
        let before = Ids::fixed(77);
        let after = Ids { epochs: [(1, 77), (100, 78)].into(), imported: Arc::default() };
        assert_eq!(before.id(99), after.id(99));
        assert_ne!(before.id(100), after.id(100), "an id given out after the backup is not given out again");
        for seq in [1, 99, 100, 1 << 40] {
            assert_eq!(after.seq(after.id(seq)), Some(seq));
        }
        assert_eq!(after.seq(before.id(100)), None);
        assert_eq!(after.seq(MessageId(0)), None);
        assert_eq!(after.id(1).to_string().as_bytes()[14], b'8');
    }

    #[test]
    fn an_imported_message_keeps_its_id() {
        let ids = Ids::fixed(77);
        let (foreign, own) = (MessageId(9), ids.id(4));
        let row = ImportedRow { seq: 5, id: foreign, queue: 0, gone: false, at_ms: 0 };
        ids.clone().add_imported(row);
        assert_eq!((ids.id(5), ids.seq(foreign), ids.imported(foreign)), (foreign, Some(5), Some(row)));
        assert_eq!((ids.id(4), ids.seq(own), ids.imported(own)), (own, Some(4), None), "others keep theirs");
        let gone = ImportedRow { seq: 6, gone: true, ..row };
        ids.add_imported(gone);
        assert_eq!((ids.id(6), ids.imported(foreign)), (foreign, Some(row)), "the message itself is found");
        ids.drop_imported(&row);
        assert_eq!((ids.seq(foreign), ids.id(5)), (None, Ids::fixed(77).id(5)));
    }
}

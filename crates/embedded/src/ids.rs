//! Message ids: made from a message's number, so that none has to be kept.

use hapax_core::MessageId;
use rusqlite::Connection;

use crate::crc::Crc;

/// A UUID of version 8: 60 random bits of the epoch, then the number.
#[derive(Debug, Clone)]
pub(crate) struct Ids {
    /// First number and salt of each epoch, ascending.
    epochs: std::sync::Arc<[(u64, u64)]>,
}

const VERSION_MASK: u64 = 0xf000;
const VERSION: u64 = 0x8000;
const VARIANT: u64 = 0b10 << 62;
const NUMBER_MASK: u64 = (1 << 62) - 1;

impl Ids {
    #[cfg(test)]
    pub fn fixed(salt: u64) -> Self {
        Self { epochs: [(1, salt)].into() }
    }

    /// `None` when a row is damaged: ids made with a wrong salt would name no message.
    pub fn load(db: &Connection) -> rusqlite::Result<Option<Self>> {
        let mut statement = db.prepare("SELECT first_seq, salt, crc FROM epoch ORDER BY first_seq")?;
        let epoch = |row: &rusqlite::Row<'_>| {
            let epoch = (row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64);
            Ok((row.get::<_, u32>(2)? == Self::crc(epoch)).then_some(epoch))
        };
        let epochs: Option<Vec<_>> = statement.query_map([], epoch)?.collect::<Result<_, _>>()?;
        Ok(epochs.filter(|epochs| !epochs.is_empty()).map(|epochs| Self { epochs: epochs.into() }))
    }

    fn crc((first_seq, salt): (u64, u64)) -> u32 {
        let mut crc = Crc::new();
        crc.word(first_seq).word(salt);
        crc.end()
    }

    /// Numbers from `first_seq` on get ids that no earlier epoch gave out.
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
        let high = (self.salt(seq) & !VERSION_MASK) | VERSION;
        MessageId(u128::from(high) << 64 | u128::from(VARIANT | seq))
    }

    /// The number of an id that this store gave out.
    pub fn seq(&self, id: MessageId) -> Option<u64> {
        let seq = id.0 as u64 & NUMBER_MASK;
        (self.id(seq) == id).then_some(seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_their_message_and_differ_between_epochs() {
        let before = Ids::fixed(77);
        let after = Ids { epochs: [(1, 77), (100, 78)].into() };
        assert_eq!(before.id(99), after.id(99));
        assert_ne!(before.id(100), after.id(100), "an id given out after the backup is not given out again");
        for seq in [1, 99, 100, 1 << 40] {
            assert_eq!(after.seq(after.id(seq)), Some(seq));
        }
        assert_eq!(after.seq(before.id(100)), None);
        assert_eq!(after.seq(MessageId(0)), None);
        assert_eq!(after.id(1).to_string().as_bytes()[14], b'8');
    }
}

//! Rows of receives that may be repeated.

use rusqlite::{Connection, Row, params};

use crate::engine::{LoadedRow, Loader};
use crate::record::AttemptRow;

pub(super) fn put(db: &Connection, queue: u32, row: &AttemptRow) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO receive_attempt (queue, key, at_ms, deliveries, crc) VALUES (?1, ?2, ?3, ?4, ?5)";
    let words = row.deliveries.iter().flat_map(|(seq, fence)| [*seq, *fence]);
    let deliveries: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let key = row.key.to_le_bytes();
    db.prepare_cached(sql)?.execute(params![
        queue,
        &key[..],
        row.at_ms as i64,
        deliveries,
        row.crc(queue)
    ])?;
    Ok(())
}

pub(super) fn drop(db: &Connection, queue: u32, key: u128) -> rusqlite::Result<()> {
    let sql = "DELETE FROM receive_attempt WHERE queue = ?1 AND key = ?2";
    db.prepare_cached(sql)?.execute(params![queue, &key.to_le_bytes()[..]])?;
    Ok(())
}

/// A row as it should be, whatever it holds; `None` if it is too short or too long for that.
fn row(key: &[u8], at_ms: i64, deliveries: &[u8]) -> Option<AttemptRow> {
    let key = u128::from_le_bytes(key.try_into().ok()?);
    let (pairs, rest) = deliveries.as_chunks::<16>();
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let deliveries = pairs.iter().map(|pair| (word(&pair[..8]), word(&pair[8..]))).collect();
    rest.is_empty().then_some(AttemptRow { key, at_ms: at_ms as u64, deliveries })
}

fn sound(at: &Row<'_>) -> rusqlite::Result<Option<(u32, AttemptRow)>> {
    let (queue, key, deliveries): (u32, Vec<u8>, Vec<u8>) = (at.get(0)?, at.get(1)?, at.get(3)?);
    let crc: u32 = at.get(4)?;
    let row = row(&key, at.get(2)?, &deliveries).filter(|row| row.crc(queue) == crc);
    Ok(row.map(|row| (queue, row)))
}

pub(super) fn load(db: &Connection, loader: &mut Loader) -> rusqlite::Result<()> {
    let sql = "SELECT queue, CAST(key AS BLOB), at_ms, CAST(deliveries AS BLOB), crc FROM receive_attempt";
    let mut statement = db.prepare(sql)?;
    let mut found = statement.query([])?;
    while let Some(at) = found.next()? {
        // A value of another type is damage as well.
        match sound(at) {
            Ok(Some((queue, row))) => loader.add(LoadedRow::Attempt { queue, row }),
            Ok(None) | Err(_) => {
                loader.warn("a remembered receive is damaged; repeated, it may give other messages");
            }
        }
    }
    Ok(())
}

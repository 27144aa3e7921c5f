//! Migration of message keys: version 2 derived them at delivery, version 3 stores them.

use std::collections::HashMap;

use hapax_core::{KeySource, MessageKey};
use rusqlite::{Connection, params};

use super::{FoundBody, rows};
use crate::browse::parse_attributes;
use crate::record::{BodyRow, Content, key_source_code};

/// The key pointers of the queues, by id and by name.
struct Pointers {
    by_id: HashMap<u32, String>,
    by_name: HashMap<String, Option<String>>,
}

fn pointers(db: &Connection) -> rusqlite::Result<Pointers> {
    let mut found = Pointers { by_id: HashMap::new(), by_name: HashMap::new() };
    let mut statement = db.prepare("SELECT id, name, config FROM queue WHERE deleted = 0")?;
    let mut queues = statement.query([])?;
    while let Some(row) = queues.next()? {
        // A row that cannot be read is reported when the queues are loaded.
        let (Ok(id), Ok(name), Ok(config)) = (row.get(0), row.get(1), row.get::<_, String>(2)) else {
            continue;
        };
        let config: serde_json::Value = serde_json::from_str(&config).unwrap_or_default();
        let pointer = config["key_pointer"].as_str().map(str::to_owned);
        found.by_name.insert(name, pointer.clone());
        if let Some(pointer) = pointer {
            found.by_id.insert(id, pointer);
        }
    }
    Ok(found)
}

/// Stores with each message the key that version 2 would have read from its body at the next delivery. A dead letter
/// gets the key by the pointer of the queue in which it died.
pub(super) fn decide_keys(db: &Connection) -> rusqlite::Result<()> {
    let pointers = pointers(db)?;
    if pointers.by_id.is_empty() {
        return Ok(());
    }
    let sql = "SELECT message.seq, message.queue, dead.source FROM message LEFT JOIN dead USING (seq)";
    let mut statement = db.prepare(sql)?;
    let mut messages = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = messages.next()? {
        let (Ok(seq), Ok(queue)) = (row.get::<_, i64>(0), row.get::<_, u32>(1)) else { continue };
        let source = row.get::<_, Option<String>>(2).ok().flatten();
        let pointer = match source.and_then(|source| pointers.by_name.get(&source)) {
            Some(pointer) => pointer.as_ref(),
            None => pointers.by_id.get(&queue),
        };
        if let Some(pointer) = pointer {
            found.push((seq as u64, pointer));
        }
    }
    for (seq, pointer) in found {
        store_key(db, seq, pointer)?;
    }
    Ok(())
}

fn store_key(db: &Connection, seq: u64, pointer: &str) -> rusqlite::Result<()> {
    // A damaged message is parked when it is loaded, so its key does not matter.
    let FoundBody::Sound(BodyRow { origin, content, .. }) = rows::body(db, seq)? else { return Ok(()) };
    let attributes = content.attributes.as_deref().map(parse_attributes).unwrap_or_default();
    let sender_key = MessageKey::explicit(&attributes, &content.body, Some(pointer));
    let Some(key) = sender_key.filter(|key| key.source == KeySource::Body) else { return Ok(()) };
    let (text, code) = (key.key.clone(), key_source_code(key.source));
    let content = Content::new(content.dedup, content.attributes, Some(key), content.body);
    let crc = BodyRow::crc(seq, origin, content.crc);
    let sql = "UPDATE body SET key_source = ?2, key = ?3, crc = ?4 WHERE seq = ?1";
    db.prepare_cached(sql)?.execute(params![seq as i64, code, text.as_str(), crc])?;
    Ok(())
}

//! The parts of migrations that SQL cannot do.

use rusqlite::{Connection, params};
use serde_json::{Value, json};

use super::{rows, write};

/// Version 3: the limit on attempts is part of the retry policy, a message's key is stored with the message, and a
/// group is halted because of specific messages.
pub(super) fn to_version_3(db: &Connection) -> rusqlite::Result<()> {
    move_limits(db)?;
    halt_for_messages(db)?;
    super::migrate_keys::decide_keys(db)
}

/// A halted group now waits for its dead letters. If none is left, it waits for a message that does not exist, until
/// the group is released.
fn halt_for_messages(db: &Connection) -> rusqlite::Result<()> {
    let sql = "SELECT halted_groups.queue, halted_groups.grp, letter.seq FROM halted_groups \
               LEFT JOIN queue ON queue.id = halted_groups.queue \
               LEFT JOIN (SELECT message.seq, dead.source, message.grp FROM dead JOIN message USING (seq)) AS letter \
               ON letter.source = queue.name AND letter.grp = halted_groups.grp";
    let read = |row: &rusqlite::Row<'_>| {
        Ok((row.get::<_, u32>(0)?, row.get::<_, String>(1)?, row.get::<_, Option<i64>>(2)?))
    };
    let rows: Vec<_> = db.prepare(sql)?.query_map([], read)?.flatten().collect();
    for (queue, group, seq) in rows {
        write::put_halted(db, queue, &group, seq.unwrap_or(0) as u64)?;
    }
    db.execute_batch("DROP TABLE halted_groups")
}

/// Moves the limit on attempts from the dead-letter policy to the retry policy. Existing queues keep their behaviour:
/// one without a dead-letter queue has no limit, although new queues have one by default.
fn move_limits(db: &Connection) -> rusqlite::Result<()> {
    let mut statement = db.prepare(
        "SELECT id, config, created_ms, modified_ms, purged_before, deleted, crc, CAST(name AS BLOB) FROM queue",
    )?;
    let read = |row: &rusqlite::Row<'_>| {
        let numbers = [row.get(0)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?];
        Ok((numbers, row.get::<_, i64>(6)?, row.get::<_, Vec<u8>>(7)?, row.get::<_, String>(1)?))
    };
    // A row that is unreadable or whose checksum does not match stays unchanged; opening the store reports it.
    let rows: Vec<([i64; 5], i64, Vec<u8>, String)> = statement.query_map([], read)?.flatten().collect();
    for (numbers, crc, name, config) in rows {
        let words = numbers.map(|number| number as u64);
        let sound = crc == i64::from(rows::queue_row_crc(words, &name, &config, (0, 0, None)));
        let Some(config) = sound.then(|| with_limit(&config)).flatten() else { continue };
        db.execute(
            "UPDATE queue SET config = ?2, crc = ?3 WHERE id = ?1",
            params![numbers[0], config, rows::queue_row_crc(words, &name, &config, (0, 0, None))],
        )?;
    }
    Ok(())
}

/// The queue's configuration in the format of version 3.
fn with_limit(config: &str) -> Option<String> {
    let mut config: Value = serde_json::from_str(config).ok()?;
    let fields = config.as_object_mut()?;
    let dead = fields.get_mut("dead_letter").and_then(Value::as_object_mut);
    let limit = dead.and_then(|dead| dead.remove("max_attempts")).unwrap_or(json!(0));
    let at_once = json!({ "base_ms": 0, "cap_ms": 0, "jitter": "full" });
    fields.entry("retry").or_insert(at_once).as_object_mut()?.insert("max_attempts".into(), limit);
    fields.entry("on_dead").or_insert(json!("continue"));
    Some(config.to_string())
}

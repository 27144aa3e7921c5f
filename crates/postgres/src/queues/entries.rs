//! Where messages and entries of the ledger meet: an entry is kept as long as a message lives that may need it, and a
//! settle may end a claim.

use hapax_core::{EntryId, QueueName, Tier};
use sqlx::PgConnection;

use super::Queue;
use super::row::Message;
use super::work::Work;
use crate::error::Failure;

/// An entry's id as it is stored.
fn bytes(id: &EntryId) -> Vec<u8> {
    crate::ledger::hash_of(id).to_vec()
}

/// The entry of a message's own key.
pub(super) fn own(queue: &QueueName, message: &Message) -> Vec<u8> {
    bytes(&EntryId::of_queue(queue, message.key()))
}

/// Whether the handlers of a queue claim or enter keys of the ledger.
fn is_once(queue: &Queue) -> bool {
    matches!(queue.config.tier, Tier::EffectivelyOnce | Tier::Transactional)
}

async fn link(db: &mut PgConnection, entries: Vec<Vec<u8>>, messages: &[&Message]) -> Result<(), Failure> {
    let sql = "INSERT INTO hapax.q_need (entry, queue_id, seq) SELECT * FROM unnest($1::bytea[], $2::int[], $3::bigint[]) \
               ON CONFLICT DO NOTHING";
    let link = sqlx::query(sql).bind(entries).bind(messages.iter().map(|m| m.queue_id).collect::<Vec<_>>());
    link.bind(messages.iter().map(|m| m.seq as i64).collect::<Vec<_>>()).execute(db).await?;
    Ok(())
}

/// Removes entries whose time is over, and, for messages that come `again`, recorded failures.
async fn clear(db: &mut PgConnection, entries: &[Vec<u8>], again: bool) -> Result<(), Failure> {
    let mut entries = entries.to_vec();
    entries.sort_unstable();
    entries.dedup();
    sqlx::query("SELECT hapax.ledger_clear($1, $2)").bind(entries).bind(again).execute(db).await?;
    Ok(())
}

/// Links new messages to the entries of their keys.
pub(super) async fn link_new(db: &mut PgConnection, queue: &Queue, new: &[&Message]) -> Result<(), Failure> {
    if !is_once(queue) || new.is_empty() {
        return Ok(());
    }
    let entries: Vec<Vec<u8>> = new.iter().map(|message| own(&queue.name, message)).collect();
    clear(db, &entries, false).await?;
    link(db, entries, new).await
}

/// A dead letter goes back: it needs the entry of its key in the queue that it goes to, and must not meet the failure that
/// it died of.
pub(super) async fn link_redriven(
    db: &mut PgConnection,
    (from, seq): (&Queue, u64),
    source: Option<&Queue>,
    target: &Queue,
    message: &Message,
) -> Result<(), Failure> {
    let sql = "DELETE FROM hapax.q_need WHERE queue_id = $1 AND seq = $2";
    let had = sqlx::query(sql).bind(from.id).bind(seq as i64).execute(&mut *db).await?.rows_affected() > 0;
    if !had && !is_once(target) && !source.is_some_and(is_once) {
        return Ok(());
    }
    let entries = vec![own(&target.name, message)];
    // An outcome that the letter has kept beyond its time stays; only a failure is cleared.
    link(db, entries.clone(), &[message]).await?;
    clear(db, &entries, true).await
}

/// Parked messages continue: they must not meet the failures that these entries of their keys keep.
pub(super) async fn clear_failures(db: &mut PgConnection, entries: &[Vec<u8>]) -> Result<(), Failure> {
    if entries.is_empty() {
        return Ok(());
    }
    clear(db, entries, true).await
}

/// Messages that have ended need nothing; those that have died take what they need with them.
pub(super) async fn follow(db: &mut PgConnection, work: &Work<'_>) -> Result<(), Failure> {
    if let (Some(dead), false) = (work.dead, work.deaths.is_empty()) {
        let (before, after): (Vec<i64>, Vec<i64>) =
            work.deaths.iter().map(|(before, after)| (*before as i64, *after as i64)).unzip();
        let sql = "UPDATE hapax.q_need n SET queue_id = $2, seq = ($4::bigint[])[array_position($3::bigint[], n.seq)] \
                   WHERE n.queue_id = $1 AND n.seq = ANY($3)";
        let moved = sqlx::query(sql).bind(work.queue.id).bind(dead.id).bind(before).bind(after);
        moved.execute(&mut *db).await?;
    }
    if !work.ended.is_empty() {
        let ended: Vec<i64> = work.ended.iter().map(|seq| *seq as i64).collect();
        let sql = "DELETE FROM hapax.q_need WHERE queue_id = $1 AND seq = ANY($2)";
        sqlx::query(sql).bind(work.queue.id).bind(ended).execute(db).await?;
    }
    Ok(())
}

/// Which of these entries are in doubt. They stay so until the end of the transaction.
pub(super) async fn in_doubt(db: &mut PgConnection, ids: &[&EntryId]) -> Result<Vec<bool>, Failure> {
    let mut entries: Vec<Vec<u8>> = ids.iter().map(|id| bytes(id)).collect();
    let asked = entries.clone();
    entries.sort_unstable();
    entries.dedup();
    let sql = "SELECT e.id FROM (SELECT x.id, x.stage, x.until_ms, x.lease_ms FROM hapax.ledger_entry x \
               WHERE x.id = ANY($1) ORDER BY x.id FOR UPDATE) e WHERE e.stage = 1 OR (e.stage = 0 \
               AND greatest(e.until_ms, hapax.started_ms() + e.lease_ms) <= hapax.now_ms())";
    let found: Vec<Vec<u8>> = sqlx::query_scalar(sql).bind(entries).fetch_all(db).await?;
    Ok(asked.iter().map(|entry| found.contains(entry)).collect())
}

/// Removes what is kept for messages that are gone in other ways than by a settle.
pub(super) async fn forget_gone(db: &mut PgConnection, queue: &Queue) -> Result<(), Failure> {
    let sql = "DELETE FROM hapax.q_need WHERE ctid = ANY(ARRAY(SELECT n.ctid FROM hapax.q_need n WHERE n.queue_id = $1 \
               AND NOT hapax.q_lives(n.queue_id, n.seq) LIMIT 1000))";
    sqlx::query(sql).bind(queue.id).execute(db).await?;
    Ok(())
}

/// Links an imported message to what it needed in its former store, and to the entry of its key.
pub(super) async fn link_imported(
    db: &mut PgConnection,
    queue: &Queue,
    message: &Message,
    needed: &[EntryId],
) -> Result<(), Failure> {
    let mut entries: Vec<Vec<u8>> = needed.iter().map(bytes).collect();
    let own = own(&queue.name, message);
    if is_once(queue) && !entries.contains(&own) {
        // As before a send: what is over is gone, so that the message does not bring it back.
        clear(db, std::slice::from_ref(&own), false).await?;
        entries.push(own);
    }
    for entry in entries {
        link(db, vec![entry], &[message]).await?;
    }
    Ok(())
}

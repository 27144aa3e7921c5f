//! Locks messages and groups, and writes what was decided about them.

use std::collections::{BTreeSet, HashSet};

use hapax_core::{GroupId, MessageId};
use sqlx::{PgConnection, Row as _};

use super::row::{COLUMNS, Message, Table, halves, insert, low_of};
use super::work::Work;
use super::{Queue, catalogue, room};
use crate::error::Failure;

/// A FIFO group of a queue.
pub(super) type GroupOf = (i32, GroupId);

/// The store's time, and new places.
pub(super) async fn draw(
    db: &mut PgConnection,
    count: usize,
) -> Result<(u64, std::collections::VecDeque<u64>), sqlx::Error> {
    let sql = "SELECT hapax.now_ms() AS now_ms, \
               ARRAY(SELECT nextval('hapax.q_seq') FROM generate_series(1, $1::int)) AS numbers";
    let row = sqlx::query(sql).bind(count as i32).fetch_one(db).await?;
    let numbers: Vec<i64> = row.try_get("numbers")?;
    let now_ms: i64 = row.try_get("now_ms")?;
    Ok((now_ms as u64, numbers.into_iter().map(|number| number as u64).collect()))
}

/// Start of the database server.
pub(super) async fn started_ms(db: &mut PgConnection) -> Result<u64, sqlx::Error> {
    let ms: i64 = sqlx::query_scalar("SELECT hapax.started_ms()").fetch_one(db).await?;
    Ok(ms as u64)
}

/// The condition for a message's row, by places in `$2`.
fn by_seq(table: Table) -> &'static str {
    match table {
        // A message that was never returned is found by its place, the others by an index of their own.
        Table::Ready => {
            "ctid = ANY(ARRAY(SELECT x.ctid FROM hapax.q_ready x WHERE x.queue_id = $1 AND \
             x.prio = ANY('{0,1,2,3,4,5,6,7,8,9}'::smallint[]) AND x.pos = ANY($2) AND x.pos = x.seq UNION ALL \
             SELECT x.ctid FROM hapax.q_ready x WHERE x.queue_id = $1 AND x.seq = ANY($2) AND x.pos <> x.seq))"
        }
        // By the number alone: an index that begins with the queue holds every row that was deleted lately.
        _ => "queue_id + 0 = $1 AND seq = ANY($2)",
    }
}

/// Locks messages by place, wherever they are. A message that moves meanwhile is looked for again.
pub(super) async fn lock(
    db: &mut PgConnection,
    queue_id: i32,
    seqs: &[u64],
) -> Result<Vec<(Table, Message)>, sqlx::Error> {
    let mut seqs: Vec<i64> = seqs.iter().map(|seq| *seq as i64).collect();
    seqs.sort_unstable();
    seqs.dedup();
    let of = |table: Table| {
        let (letter, name, found) = (table.letter(), table.name(), by_seq(table));
        format!(
            "{letter} AS MATERIALIZED (SELECT '{letter}' AS place, {COLUMNS} FROM {name} WHERE {found} ORDER BY seq FOR UPDATE)"
        )
    };
    let each = |table: Table| format!("SELECT * FROM {}", table.letter());
    let sql = format!("WITH {} {}", Table::ALL.map(of).join(", "), Table::ALL.map(each).join(" UNION ALL "));
    let mut found = Vec::new();
    for _ in 0..3 {
        if seqs.is_empty() {
            break;
        }
        let rows = sqlx::query(&sql).bind(queue_id).bind(&seqs).fetch_all(&mut *db).await?;
        let rows: Vec<_> = rows.iter().map(Message::read_placed).collect::<Result<_, _>>()?;
        seqs.retain(|seq| !rows.iter().any(|(_, message)| message.seq == *seq as u64));
        found.extend(rows);
    }
    Ok(found)
}

/// Where messages are, by place: their groups.
pub(super) async fn groups_of(
    db: &mut PgConnection,
    queue_id: i32,
    seqs: &[u64],
) -> Result<Vec<GroupId>, sqlx::Error> {
    let seqs: Vec<i64> = seqs.iter().map(|seq| *seq as i64).collect();
    // One number at a time: for several at once, PostgreSQL reads a whole index that has the group where it takes the table for empty.
    let of = |table: Table| {
        format!("(SELECT x.grp FROM {} x WHERE x.seq = s.seq AND x.queue_id + 0 = $1)", table.name())
    };
    let sql = format!(
        "SELECT DISTINCT coalesce({}) FROM unnest($2::bigint[]) s(seq)",
        [Table::Claim, Table::Fifo, Table::Parked].map(of).join(", ")
    );
    let all: Vec<Option<String>> = sqlx::query_scalar(&sql).bind(queue_id).bind(&seqs).fetch_all(db).await?;
    let all = all.into_iter().flatten();
    Ok(all.filter_map(|group| GroupId::new(group).ok()).collect())
}

/// Places of messages by their ids.
pub(super) async fn seqs_of(
    db: &mut PgConnection,
    queue_id: i32,
    ids: &[MessageId],
) -> Result<Vec<(MessageId, u64)>, sqlx::Error> {
    // Most ids are made of their place; the others are found by their lower half.
    let lows: Vec<i64> = ids.iter().map(|id| halves(*id).1 as i64).collect();
    let places: Vec<i64> = ids.iter().map(|id| (halves(*id).1 & !(1 << 63)) as i64).collect();
    let of = |table: Table| {
        let (name, found) = (table.name(), by_seq(table));
        format!(
            "SELECT seq, id_hi, id_lo FROM {name} WHERE {found} AND id_lo IS NULL UNION ALL \
             SELECT seq, id_hi, id_lo FROM {name} WHERE queue_id = $1 AND id_lo = ANY($3)"
        )
    };
    let sql = Table::ALL.map(of).join(" UNION ALL ");
    let rows = sqlx::query(&sql).bind(queue_id).bind(&places).bind(&lows).fetch_all(db).await?;
    let mut found = Vec::new();
    for row in rows {
        let (seq, high): (i64, i64) = (row.try_get("seq")?, row.try_get("id_hi")?);
        let low: Option<i64> = row.try_get("id_lo")?;
        let id = super::row::id_of(high as u64, low.map_or_else(|| low_of(seq as u64), |low| low as u64));
        if ids.contains(&id) {
            found.push((id, seq as u64));
        }
    }
    Ok(found)
}

/// Locks FIFO groups, and makes those that are not there.
pub(super) async fn lock_groups(
    db: &mut PgConnection,
    groups: &BTreeSet<GroupOf>,
) -> Result<(), sqlx::Error> {
    if groups.is_empty() {
        return Ok(());
    }
    let (queues, names) = columns(groups);
    loop {
        let insert =
            "INSERT INTO hapax.q_group SELECT * FROM unnest($1::int[], $2::text[]) ON CONFLICT DO NOTHING";
        sqlx::query(insert).bind(&queues).bind(&names).execute(&mut *db).await?;
        // In the order of the key, so that two batches cannot wait for each other.
        let lock = "SELECT 1 FROM hapax.q_group g WHERE (g.queue_id, g.grp) IN \
                    (SELECT * FROM unnest($1::int[], $2::text[])) ORDER BY g.queue_id, g.grp FOR UPDATE";
        let locked = sqlx::query(lock).bind(&queues).bind(&names).fetch_all(&mut *db).await?;
        // A group that was empty may have been removed between the two statements.
        if locked.len() == groups.len() {
            return Ok(());
        }
    }
}

fn columns(groups: &BTreeSet<GroupOf>) -> (Vec<i32>, Vec<String>) {
    groups.iter().map(|(queue_id, group)| (*queue_id, group.as_str().to_owned())).unzip()
}

/// What was done to the messages of groups, beyond new ones and moves between waiting and in flight.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Change {
    /// What waits again was not delivered: its group keeps its place among the groups.
    pub given_back: bool,
    /// Messages came with numbers that may be lower than those of all others in their group.
    pub below: bool,
}

/// Announces what can be delivered of groups whose locks are held.
pub(super) async fn announce(
    db: &mut PgConnection,
    groups: &BTreeSet<GroupOf>,
    change: Change,
) -> Result<(), sqlx::Error> {
    if groups.is_empty() {
        return Ok(());
    }
    let (queues, names) = columns(groups);
    let announce = sqlx::query("SELECT hapax.q_heads($1, $2, $3, $4)").bind(queues).bind(names);
    announce.bind(change.given_back).bind(change.below).execute(db).await?;
    Ok(())
}

/// Which of these groups have a delivery that another transaction has locked. The other deliveries are locked then.
pub(super) async fn busy_groups(
    db: &mut PgConnection,
    queue_id: i32,
    groups: &[GroupId],
) -> Result<BTreeSet<GroupId>, sqlx::Error> {
    let names: Vec<&str> = groups.iter().map(GroupId::as_str).collect();
    let sql = "SELECT hapax.q_busy($1, $2)";
    let busy: Vec<String> = sqlx::query_scalar(sql).bind(queue_id).bind(names).fetch_all(db).await?;
    Ok(busy.into_iter().filter_map(|group| GroupId::new(group).ok()).collect())
}

/// Deliveries whose rows another transaction has locked, with their fences. Waits for none of them.
pub(super) async fn locked(db: &mut PgConnection, seqs: &[i64]) -> Result<HashSet<(u64, u64)>, sqlx::Error> {
    let sql = "WITH free AS MATERIALIZED (SELECT seq FROM hapax.q_claim WHERE seq = ANY($1) ORDER BY seq \
               FOR UPDATE SKIP LOCKED) SELECT c.seq, c.fence FROM hapax.q_claim c \
               WHERE c.seq = ANY($1) AND c.seq <> ALL (ARRAY(SELECT seq FROM free))";
    let rows = sqlx::query(sql).bind(seqs).fetch_all(db).await?;
    rows.iter().map(|row| Ok((row.try_get::<i64, _>(0)? as u64, row.try_get::<i64, _>(1)? as u64))).collect()
}

/// The deliveries of groups of a queue whose locks are held.
pub(super) async fn in_flight(
    db: &mut PgConnection,
    queue_id: i32,
    groups: &[GroupId],
) -> Result<Vec<Message>, sqlx::Error> {
    let names: Vec<&str> = groups.iter().map(GroupId::as_str).collect();
    let sql = format!("SELECT {COLUMNS} FROM hapax.q_flight($1, $2)");
    let rows = sqlx::query(&sql).bind(queue_id).bind(names).fetch_all(db).await?;
    rows.iter().map(Message::read).collect()
}

/// Writes what changed.
pub(super) async fn write(db: &mut PgConnection, work: &Work<'_>) -> Result<(), sqlx::Error> {
    let changed = || work.items.values().filter(|item| item.changed);
    for table in Table::ALL {
        let left =
            changed().filter_map(|item| item.was.filter(|was| was.table == table).map(|was| (was, item)));
        let (name, found) = match table {
            Table::Ready => {
                (table.name(), "queue_id = $1 AND prio = ANY('{0,1,2,3,4,5,6,7,8,9}'::smallint[]) AND pos")
            }
            _ => (table.name(), "queue_id + 0 = $1 AND seq"),
        };
        let keys: Vec<i64> = left
            .map(|(was, item)| if table == Table::Ready { was.pos } else { item.message.seq } as i64)
            .collect();
        if !keys.is_empty() {
            let sql = format!("DELETE FROM {name} WHERE {found} = ANY($2)");
            sqlx::query(&sql).bind(work.queue.id).bind(keys).execute(&mut *db).await?;
        }
    }
    for table in Table::ALL {
        let here: Vec<&Message> =
            changed().filter(|item| item.table == Some(table)).map(|item| &item.message).collect();
        insert(db, table, &here).await?;
    }
    if let Some(dead) = work.dead {
        let new: Vec<&Message> =
            changed().filter(|item| item.was.is_none()).map(|item| &item.message).collect();
        mark(db, dead, &new).await?;
        if !new.is_empty() {
            room::forget(db, dead).await?;
        }
    }
    for (group, id) in &work.halts {
        let (high, low) = halves(*id);
        let sql = "INSERT INTO hapax.q_undecided (queue_id, id_hi, id_lo, grp) VALUES ($1, $2, $3, $4) \
                   ON CONFLICT DO NOTHING";
        let halt = sqlx::query(sql).bind(work.queue.id).bind(high as i64).bind(low as i64);
        halt.bind(group.as_str()).execute(&mut *db).await?;
    }
    Ok(())
}

/// Notes that a standard queue has messages with a priority or a group, if it is the first time; says whether it was.
pub(super) async fn mark(
    db: &mut PgConnection,
    queue: &Queue,
    new: &[&Message],
) -> Result<bool, sqlx::Error> {
    let bits = new.iter().fold(0, |bits, message| bits | 1i32 << message.priority.0.min(9));
    let grouped = new.iter().any(|message| message.group.is_some());
    if queue.config.is_fifo() || (bits & !queue.priorities == 0 && (queue.grouped || !grouped)) {
        return Ok(false);
    }
    let sql = "UPDATE hapax.q_queue SET prios = prios | $2, grouped = grouped OR $3, \
               version = nextval('hapax.q_revision') WHERE id = $1";
    sqlx::query(sql).bind(queue.id).bind(bits).bind(grouped).execute(db).await?;
    Ok(true)
}

/// Groups of a queue no longer wait for these messages; gives the groups. What was kept in a group that is not halted any
/// more has its whole retention again. The caller holds the groups' locks.
pub(super) async fn unhalt(
    db: &mut PgConnection,
    queue: &Queue,
    ids: &[MessageId],
    now_ms: u64,
) -> Result<BTreeSet<GroupOf>, sqlx::Error> {
    let (highs, lows): (Vec<i64>, Vec<i64>) =
        ids.iter().map(|id| halves(*id)).map(|(high, low)| (high as i64, low as i64)).unzip();
    let sql = "DELETE FROM hapax.q_undecided u WHERE u.queue_id = $1 AND (u.id_hi, u.id_lo) IN \
               (SELECT * FROM unnest($2::bigint[], $3::bigint[])) RETURNING u.grp";
    let gone = sqlx::query_scalar(sql).bind(queue.id).bind(highs).bind(lows).fetch_all(&mut *db).await?;
    free(db, queue, gone, now_ms).await
}

/// As [`unhalt`], for the groups of all queues. A message that died in several queues, one after the other, is waited for in
/// each of them.
pub(super) async fn unhalt_everywhere(
    db: &mut PgConnection,
    ids: &[MessageId],
    now_ms: u64,
) -> Result<BTreeSet<GroupOf>, Failure> {
    let mut freed = BTreeSet::new();
    if ids.is_empty() {
        return Ok(freed);
    }
    let (highs, lows): (Vec<i64>, Vec<i64>) =
        ids.iter().map(|id| halves(*id)).map(|(high, low)| (high as i64, low as i64)).unzip();
    let sql = format!(
        "SELECT {} FROM hapax.q_queue q WHERE q.id IN (SELECT u.queue_id FROM hapax.q_undecided u \
         WHERE (u.id_lo, u.id_hi) IN (SELECT * FROM unnest($1::bigint[], $2::bigint[])))",
        catalogue::COLUMNS
    );
    for row in sqlx::query(&sql).bind(lows).bind(highs).fetch_all(&mut *db).await? {
        freed.extend(unhalt(db, &Queue::read(&row)?, ids, now_ms).await?);
    }
    Ok(freed)
}

/// As [`unhalt`], for all that a group waits for.
pub(super) async fn unhalt_group(
    db: &mut PgConnection,
    queue: &Queue,
    group: &GroupId,
    now_ms: u64,
) -> Result<BTreeSet<GroupOf>, sqlx::Error> {
    let sql = "DELETE FROM hapax.q_undecided u WHERE u.queue_id = $1 AND u.grp = $2 RETURNING u.grp";
    let gone = sqlx::query_scalar(sql).bind(queue.id).bind(group.as_str()).fetch_all(&mut *db).await?;
    free(db, queue, gone, now_ms).await
}

async fn free(
    db: &mut PgConnection,
    queue: &Queue,
    groups: Vec<String>,
    now_ms: u64,
) -> Result<BTreeSet<GroupOf>, sqlx::Error> {
    if !groups.is_empty() {
        let sql = "UPDATE hapax.q_fifo f SET retained_ms = $3 WHERE f.queue_id = $1 AND f.grp = ANY($2) \
                   AND f.retained_ms + $4 < $3 AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u \
                   WHERE u.queue_id = f.queue_id AND u.grp = f.grp)";
        let kept = sqlx::query(sql).bind(queue.id).bind(&groups).bind(now_ms as i64);
        kept.bind(queue.config.retention_ms as i64).execute(db).await?;
    }
    Ok(groups.into_iter().filter_map(|group| Some((queue.id, GroupId::new(group).ok()?))).collect())
}

//! Export and import of queues; the ledger's part is in its own module.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::transfer::{FENCE_BOUND_MAX, PAGE_BYTES_MAX};
use hapax_core::{
    AdminError, Batch, CopyState, EntryId, ExportPage, ExportedItem, ExportedMessage, FailureCause, Fence,
    GroupId, Imported, MessageId, QueueName, RememberedId, SendError, StoreError, Transfer, TransferScope,
    policy, validate,
};
use sqlx::{PgConnection, Row as _};

use super::row::{Message, Table, id_of};
use super::write::{self, seqs_of};
use super::{Inner, Queue, browse, catalogue, import};
use crate::error::{Access, Failure};
use crate::{BoxFuture, PostgresStore, ledger};

/// Where a page begins.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Cursor {
    /// Messages behind this place.
    Messages(u64),
    /// Remembered deduplication ids behind this one.
    Dedup(Vec<u8>),
}

impl Cursor {
    fn parse(text: Option<&str>) -> Result<Self, StoreError> {
        let wrong = || StoreError::Invalid("after: use the `next` of an earlier page".into());
        match text.map(|text| (text.get(..1), text.get(1..).unwrap_or_default())) {
            None => Ok(Self::Messages(0)),
            Some((Some("m"), place)) => place.parse().map(Self::Messages).map_err(|_| wrong()),
            Some((Some("d"), "")) => Ok(Self::Dedup(Vec::new())),
            Some((Some("d"), key)) => {
                let key = u128::from_str_radix(key, 16).map_err(|_| wrong())?;
                Ok(Self::Dedup(key.to_be_bytes().to_vec()))
            }
            Some(_) => Err(wrong()),
        }
    }
}

/// All queues.
pub(super) async fn all_queues(db: &mut PgConnection) -> Result<Vec<Queue>, Failure> {
    let sql = format!("SELECT {} FROM hapax.q_queue ORDER BY id", catalogue::COLUMNS);
    sqlx::query(&sql).fetch_all(db).await?.iter().map(Queue::read).collect()
}

/// Messages by id, in whichever queue they are.
pub(super) async fn find_anywhere(
    db: &mut PgConnection,
    ids: &[MessageId],
) -> Result<Vec<(Table, Message)>, Failure> {
    let mut found = Vec::new();
    if ids.is_empty() {
        return Ok(found);
    }
    for queue in all_queues(db).await? {
        let seqs: Vec<u64> = seqs_of(db, queue.id, ids).await?.into_iter().map(|(_, seq)| seq).collect();
        found.extend(write::lock(db, queue.id, &seqs).await?);
    }
    Ok(found)
}

async fn export_queue(
    db: &mut PgConnection,
    name: &QueueName,
    cursor: &Cursor,
    limit: usize,
) -> Result<Result<ExportPage, AdminError>, Failure> {
    let queue = Queue::get(db, name).await?;
    let Some(paused_ms) = queue.paused.as_ref().map(|paused| paused.since_ms) else {
        let problem =
            format!("queue {name} is not paused, so it changes while it is exported; pause it first");
        return Ok(Err(AdminError::Refused(problem)));
    };
    let (now_ms, _) = write::draw(db, 0).await?;
    Ok(Ok(match cursor {
        Cursor::Messages(after) => export_messages(db, &queue, *after, limit, paused_ms).await?,
        Cursor::Dedup(after) => export_dedup(db, &queue, after, limit, now_ms).await?,
    }))
}

/// What groups of a queue are halted for: the message, and the group.
async fn undecided(db: &mut PgConnection, queue: &Queue) -> Result<Vec<(MessageId, GroupId)>, Failure> {
    let sql = "SELECT id_hi, id_lo, grp FROM hapax.q_undecided WHERE queue_id = $1";
    let mut all = Vec::new();
    for row in sqlx::query(sql).bind(queue.id).fetch_all(db).await? {
        let (high, low): (i64, i64) = (row.try_get("id_hi")?, row.try_get("id_lo")?);
        let group = GroupId::new(row.try_get::<String, _>("grp")?);
        all.extend(group.ok().map(|group| (id_of(high as u64, low as u64), group)));
    }
    Ok(all)
}

/// Dead letters elsewhere that groups wait for, by the places that they return to; 0 if that is not known.
async fn waits(
    db: &mut PgConnection,
    queue: &Queue,
    undecided: &[(MessageId, GroupId)],
) -> Result<Vec<(u64, ExportedItem)>, Failure> {
    let ids: Vec<MessageId> = undecided.iter().map(|(id, _)| *id).collect();
    let found = find_anywhere(db, &ids).await?;
    let mut waits = Vec::new();
    for (id, group) in undecided {
        let letter = found.iter().map(|(_, message)| message).find(|message| message.id == *id);
        if letter.is_some_and(|letter| letter.queue_id == queue.id) {
            // It says so itself.
            continue;
        }
        let story = letter.map(|letter| &letter.story);
        let home = story.filter(|story| story.dead.as_ref().is_some_and(|dead| dead.source == queue.name));
        let place = home.and_then(|story| story.died_at).unwrap_or(0);
        let item = ExportedItem::Undecided { group: group.clone(), id: letter.map(|_| *id) };
        waits.push((place, item));
    }
    Ok(waits)
}

async fn export_messages(
    db: &mut PgConnection,
    queue: &Queue,
    after: u64,
    limit: usize,
    paused_ms: u64,
) -> Result<ExportPage, Failure> {
    let undecided = if queue.config.is_fifo() { undecided(db, queue).await? } else { Vec::new() };
    let waits = waits(db, queue, &undecided).await?;
    let mut found = browse::behind(db, queue, &Table::ALL, after, limit + 1).await?;
    let mut upto = found.get(limit).map(|(_, message)| message.seq);
    found.truncate(limit);
    let (mut placed, mut bytes) = (Vec::new(), 0);
    for (table, message) in found {
        let halts = undecided.iter().any(|(id, _)| *id == message.id);
        let seq = message.seq;
        let entries = linked(db, queue, seq).await?;
        let item = exported(table, message, halts, entries, paused_ms);
        let size = item.bytes() + 1;
        if bytes > 0 && bytes + size > PAGE_BYTES_MAX {
            upto = Some(seq);
            break;
        }
        bytes += size;
        placed.push((seq, item));
    }
    let own =
        |place: u64| (place > after || (place, after) == (0, 0)) && upto.is_none_or(|upto| place < upto);
    placed.extend(waits.into_iter().filter(|(place, _)| own(*place)));
    placed.sort_by_key(|(place, _)| *place);
    let items = placed.into_iter().map(|(_, item)| item).collect();
    let next = upto.map_or_else(|| "d".to_owned(), |upto| format!("m{}", upto - 1));
    Ok(ExportPage { items, next: Some(next) })
}

/// The entries of the ledger that a message needs, and that are there.
async fn linked(db: &mut PgConnection, queue: &Queue, seq: u64) -> Result<Vec<EntryId>, Failure> {
    let sql = "SELECT e.scope, e.key FROM hapax.q_need n JOIN hapax.ledger_entry e ON e.id = n.entry \
               WHERE n.queue_id = $1 AND n.seq = $2 ORDER BY e.scope, e.key";
    let rows = sqlx::query(sql).bind(queue.id).bind(seq as i64).fetch_all(db).await?;
    let id = |row: &sqlx::postgres::PgRow| {
        let scope = row.get::<String, _>("scope").parse().ok()?;
        Some(EntryId::new(scope, row.get::<String, _>("key").parse().ok()?))
    };
    Ok(rows.iter().filter_map(id).collect())
}

fn exported(
    table: Table,
    message: Message,
    undecided: bool,
    entries: Vec<EntryId>,
    paused_ms: u64,
) -> ExportedItem {
    let parked = message.story.parked.as_ref().map(|(cause, _)| *cause).filter(|_| table == Table::Parked);
    let attributes = match message.attributes() {
        Ok(attributes) if parked != Some(FailureCause::Damaged) => attributes,
        Ok(_) => return damaged(&message, "it was parked as damaged"),
        Err(problem) => return damaged(&message, &problem),
    };
    let visible_ms = match table {
        // In flight counts as returned when the queue was paused: the same time on every page.
        Table::Claim => paused_ms,
        _ => message.until_ms.unwrap_or(message.sent_ms),
    };
    ExportedItem::Message(Box::new(ExportedMessage {
        id: message.id,
        sequence: message.seq,
        attributes,
        key: message.key(),
        key_source: message.key_source,
        body: message.body,
        group: message.group,
        dedup: message.dedup,
        priority: message.priority,
        sent_ms: message.sent_ms,
        retained_from_ms: message.retained_ms,
        visible_ms,
        first_received_ms: message.first_ms.unwrap_or(0),
        attempts: message.attempts,
        deliveries: message.deliveries,
        fence: Fence(message.fence),
        parked,
        undecided,
        dead: message.story.dead,
        history: message.story.history,
        entries,
    }))
}

fn damaged(message: &Message, problem: &str) -> ExportedItem {
    ExportedItem::Damaged { what: format!("message {}", message.id), problem: problem.to_owned() }
}

async fn export_dedup(
    db: &mut PgConnection,
    queue: &Queue,
    after: &[u8],
    limit: usize,
    now_ms: u64,
) -> Result<ExportPage, Failure> {
    let sql = "SELECT hash, first_ms, id_hi, id_lo FROM hapax.q_dedup WHERE queue_id = $1 AND hash > $2 ORDER BY hash LIMIT $3";
    let rows = sqlx::query(sql).bind(queue.id).bind(after).bind(limit as i64).fetch_all(db).await?;
    let (mut page, mut last) = (ExportPage::default(), None);
    for row in &rows {
        let number = |name: &str| row.try_get::<i64, _>(name).map(|number| number as u64);
        let Ok(hash) = row.try_get::<Vec<u8>, _>("hash")?.try_into().map(u128::from_be_bytes) else {
            continue;
        };
        last = Some(hash);
        let sent_ms = number("first_ms")?;
        if policy::is_duplicate(sent_ms, queue.config.dedup.window_ms, now_ms) {
            let (hash, id) = (format!("{hash:032x}"), id_of(number("id_hi")?, number("id_lo")?));
            page.items.push(ExportedItem::Dedup(RememberedId { hash, id, sent_ms }));
        }
    }
    page.next = last.filter(|_| rows.len() == limit).map(|hash| format!("d{hash:032x}"));
    Ok(page)
}

/// Has the next fences be above a bound. Only one session at a time may do so.
pub(super) async fn raise(db: &mut PgConnection, bound: u64) -> Result<(), Failure> {
    let lock = "SELECT pg_advisory_xact_lock(hashtext('hapax.fence'))";
    sqlx::query(lock).execute(&mut *db).await?;
    let sql = "SELECT setval('hapax.fence', $1) WHERE (SELECT last_value FROM hapax.fence) < $1";
    sqlx::query(sql).bind(bound as i64).execute(db).await?;
    Ok(())
}

#[async_trait]
impl Transfer for PostgresStore {
    async fn fence_bound(&self) -> Result<Fence, StoreError> {
        let read = self.base.pool.run("read the fence", Access::Read, |db| {
            Box::pin(async move {
                let last: i64 =
                    sqlx::query_scalar("SELECT last_value FROM hapax.fence").fetch_one(db).await?;
                Ok(Fence(last as u64 + 1))
            })
        });
        read.await
    }

    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        validate::within("fence", bound.0, 0, FENCE_BOUND_MAX)?;
        let inner = self.opened()?;
        let raise = inner.transact("raise the fence", move |db| {
            Box::pin(async move {
                super::admin::audit(db, "import", format!("raised fences to {bound} for an import")).await?;
                raise(db, bound.0).await
            }) as BoxFuture<'_, _>
        });
        raise.await
    }

    async fn set_copy(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        self.set_copy_of(scope, state, by).await
    }

    async fn ledger_copy(&self) -> Result<Option<CopyState>, StoreError> {
        self.ledger_copy_state().await
    }

    async fn export(
        &self,
        from: &TransferScope,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError> {
        validate::page(limit)?;
        let inner = self.opened()?;
        match from {
            TransferScope::Queue(name) => {
                let args = Arc::new((name.clone(), Cursor::parse(after)?));
                let exported = inner.transact("export", move |db| {
                    let args = args.clone();
                    Box::pin(async move { export_queue(db, &args.0, &args.1, limit).await })
                        as BoxFuture<'_, _>
                });
                exported.await?
            }
            TransferScope::Ledger => {
                let wrong = |_| StoreError::Invalid("after: use the `next` of an earlier page".into());
                let after: u64 = after.map(str::parse).transpose().map_err(wrong)?.unwrap_or(0);
                let exported = self.base.pool.run("export", Access::Read, move |db| {
                    Box::pin(async move { ledger::transfer::export(db, after, limit).await })
                });
                Ok(exported.await?)
            }
        }
    }

    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        validate::batch("items", items.len())?;
        self.opened()?.import(to, items).await
    }
}

impl Inner {
    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        let args = Arc::new((to.clone(), items));
        let imported = self.transact("import", move |db| {
            let args = args.clone();
            Box::pin(async move {
                match &args.0 {
                    TransferScope::Queue(name) => import::to_queue(db, name, &args.1).await,
                    TransferScope::Ledger => import::to_ledger(db, &args.1).await,
                }
            }) as BoxFuture<'_, _>
        });
        let (answers, queue_id): (Vec<Result<Imported, SendError>>, Option<i32>) = imported.await?;
        if let (TransferScope::Queue(name), Some(queue_id)) = (to, queue_id) {
            self.forget(name);
            self.freed(queue_id);
        }
        Ok(answers)
    }
}

/// The groups that items of a FIFO queue belong to.
pub(super) fn groups(queue: &Queue, items: &[ExportedItem]) -> BTreeSet<(i32, GroupId)> {
    let fifo = queue.config.is_fifo();
    items
        .iter()
        .filter_map(|item| item.group().filter(|_| fifo))
        .map(|group| (queue.id, group.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        assert_eq!(Cursor::parse(Some("m17")), Ok(Cursor::Messages(17)));
        assert_eq!(Cursor::parse(Some("d")), Ok(Cursor::Dedup(Vec::new())));
        assert_eq!(Cursor::parse(Some("d0f")), Ok(Cursor::Dedup(15u128.to_be_bytes().to_vec())));
        for wrong in ["", "m", "x", "dx", "\u{e4}1"] {
            assert!(Cursor::parse(Some(wrong)).is_err(), "{wrong}");
        }
    }
}

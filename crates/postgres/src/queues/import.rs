//! Imports: each item is compared with what is there, so that an import can be repeated.

use std::collections::HashSet;

use hapax_core::transfer::{IMPORTED_MS_MIN, RefusedGroups};
use hapax_core::{
    DedupScope, EntryId, ExportedItem, ExportedMessage, GroupId, Imported, MessageId, QueueName,
    RememberedId, SendError, policy, validate,
};
use sqlx::PgConnection;

use super::room::{Room, Size};
use super::row::{Message, Story, Table, halves, insert};
use super::transfer::{find_anywhere, groups, raise};
use super::write;
use super::{Queue, entries};
use crate::error::Failure;
use crate::ledger;

type Answer = Result<Imported, SendError>;

fn invalid(problem: impl Into<String>) -> Answer {
    Err(SendError::Invalid(problem.into()))
}

/// What an import to a queue knows.
struct Import<'q> {
    queue: &'q Queue,
    now_ms: u64,
    numbers: std::collections::VecDeque<u64>,
    room: Room,
    /// Messages of the batch that are somewhere in the store.
    live: Vec<(Table, Message)>,
    /// Ids that were imported before.
    before: HashSet<MessageId>,
    /// Ids that are imported now.
    noted: Vec<MessageId>,
    /// Messages of `live` that are added now, with the entries that they needed in their former store.
    added: Vec<(usize, Vec<EntryId>)>,
}

pub(super) async fn to_ledger(
    db: &mut PgConnection,
    items: &[ExportedItem],
) -> Result<(Vec<Answer>, Option<i32>), Failure> {
    let mut answers = Vec::new();
    for item in items {
        answers.push(match item {
            ExportedItem::Entry(entry) => ledger::transfer::import(db, (**entry).clone()).await?,
            ExportedItem::Damaged { what, problem } => damaged(what, problem),
            _ => invalid("what belongs to a queue is not for the ledger"),
        });
    }
    Ok((answers, None))
}

fn damaged(what: &str, problem: &str) -> Answer {
    invalid(format!("{what} was damaged when it was exported ({problem})"))
}

pub(super) async fn to_queue(
    db: &mut PgConnection,
    name: &QueueName,
    items: &[ExportedItem],
) -> Result<(Vec<Answer>, Option<i32>), Failure> {
    let queue = Queue::get_for_import(db, name).await?;
    let groups = groups(&queue, items);
    write::lock_groups(db, &groups).await?;
    let bytes = items.iter().map(bytes_of).sum();
    let room = Room::of(db, &queue, Size { messages: items.len() as u64, bytes }).await?;
    let (now_ms, numbers) = write::draw(db, items.len()).await?;
    let ids: Vec<MessageId> = items.iter().flat_map(|item| ids_of(name, item)).collect();
    let live = find_anywhere(db, &ids).await?;
    let before = imported(db, &ids).await?;
    let mut import =
        Import { queue: &queue, now_ms, numbers, room, live, before, noted: Vec::new(), added: Vec::new() };
    let (mut refused, mut answers) = (RefusedGroups::default(), Vec::new());
    for item in items {
        let answer = match refused.check(item) {
            Ok(()) => import.one(db, item).await?,
            Err(error) => Err(error),
        };
        if answer.is_err() {
            refused.add(item.group().filter(|_| queue.config.is_fifo()).cloned());
        }
        answers.push(answer);
    }
    import.write(db).await?;
    import.room.note(db).await?;
    let below = write::Change { below: true, ..write::Change::default() };
    write::announce(db, &groups, below).await?;
    Ok((answers, Some(queue.id)))
}

fn bytes_of(item: &ExportedItem) -> u64 {
    match item {
        ExportedItem::Message(message) => message.bytes_counted(),
        _ => 0,
    }
}

/// The ids that an item is known by.
fn ids_of(name: &QueueName, item: &ExportedItem) -> Vec<MessageId> {
    match item {
        ExportedItem::Message(message) => vec![message.id],
        ExportedItem::Undecided { group, id } => {
            [*id, Some(halt_id(name, group, *id))].into_iter().flatten().collect()
        }
        ExportedItem::Dedup(remembered) => vec![remembered.id],
        ExportedItem::Entry(_) | ExportedItem::Damaged { .. } => Vec::new(),
    }
}

/// What a halt that was imported is remembered under, so that a repeated import does not halt a group again that was
/// released since.
fn halt_id(queue: &QueueName, group: &GroupId, id: Option<MessageId>) -> MessageId {
    let what = format!("halted {queue} {}", id.map_or_else(String::new, |id| id.to_string()));
    MessageId(policy::dedup_hash(DedupScope::Group, Some(group), &what))
}

/// Which of these ids were imported to a queue that exists.
async fn imported(db: &mut PgConnection, ids: &[MessageId]) -> Result<HashSet<MessageId>, Failure> {
    let texts: Vec<Vec<u8>> = ids.iter().map(|id| id.0.to_be_bytes().to_vec()).collect();
    let sql = "SELECT id FROM hapax.q_imported WHERE id = ANY($1)";
    let found: Vec<Vec<u8>> = sqlx::query_scalar(sql).bind(texts).fetch_all(db).await?;
    let id = |bytes: Vec<u8>| bytes.try_into().ok().map(|bytes| MessageId(u128::from_be_bytes(bytes)));
    Ok(found.into_iter().filter_map(id).collect())
}

impl Import<'_> {
    async fn one(&mut self, db: &mut PgConnection, item: &ExportedItem) -> Result<Answer, Failure> {
        match item {
            ExportedItem::Message(message) => self.message(db, message).await,
            ExportedItem::Undecided { group, id } => self.undecided(db, group, *id).await,
            ExportedItem::Dedup(remembered) => self.dedup(db, remembered).await,
            ExportedItem::Damaged { what, problem } => Ok(damaged(what, problem)),
            ExportedItem::Entry(_) => Ok(invalid("an entry of the ledger is not for a queue")),
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers.pop_front().expect("one for each item was drawn")
    }

    fn find(&self, id: MessageId) -> Option<&Message> {
        self.live.iter().map(|(_, message)| message).find(|message| message.id == id)
    }

    /// Remembers what was imported.
    fn note(&mut self, id: MessageId) {
        self.before.insert(id);
        self.noted.push(id);
    }

    async fn message(
        &mut self,
        db: &mut PgConnection,
        exported: &ExportedMessage,
    ) -> Result<Answer, Failure> {
        if self.before.contains(&exported.id) || self.find(exported.id).is_some() {
            return Ok(Ok(Imported::AlreadyThere));
        }
        let checked = validate::import(&self.queue.config, exported);
        if let Err(error) = checked.and_then(|()| self.room.take(exported.bytes_counted())) {
            return Ok(Err(error));
        }
        let seq = self.number();
        let (table, message) = self.placed(exported, seq);
        if let Some(group) = message.group.as_ref().filter(|_| exported.undecided) {
            self.halt(db, group, message.id).await?;
        }
        self.note(exported.id);
        self.added.push((self.live.len(), exported.entries.clone()));
        self.live.push((table, message));
        Ok(Ok(Imported::Added))
    }

    /// Writes the messages that were added.
    async fn write(&self, db: &mut PgConnection) -> Result<(), Failure> {
        let added = || self.added.iter().map(|(at, _)| &self.live[*at]);
        for table in Table::ALL {
            let here: Vec<&Message> =
                added().filter(|(to, _)| *to == table).map(|(_, message)| message).collect();
            insert(db, table, &here).await?;
        }
        let all: Vec<&Message> = added().map(|(_, message)| message).collect();
        if let Some(fence) = all.iter().map(|message| message.fence).max() {
            raise(db, fence).await?;
            write::mark(db, self.queue, &all).await?;
        }
        for (at, needed) in &self.added {
            entries::link_imported(db, self.queue, &self.live[*at].1, needed).await?;
        }
        let ids: Vec<Vec<u8>> = self.noted.iter().map(|id| id.0.to_be_bytes().to_vec()).collect();
        let sql = "INSERT INTO hapax.q_imported (id, queue_id) SELECT u.id, $2 FROM unnest($1::bytea[]) u(id) ON CONFLICT DO NOTHING";
        sqlx::query(sql).bind(ids).bind(self.queue.id).execute(db).await?;
        Ok(())
    }

    fn placed(&self, exported: &ExportedMessage, seq: u64) -> (Table, Message) {
        let hidden = exported.visible_ms > self.now_ms;
        let table = match (exported.parked, self.queue.config.is_fifo(), hidden) {
            (Some(_), ..) => Table::Parked,
            (None, true, _) => Table::Fifo,
            (None, false, true) => Table::Due,
            (None, false, false) => Table::Ready,
        };
        let reason = || exported.history.last().and_then(|failed| failed.error.clone());
        let story = Story {
            history: exported.history.clone(),
            dead: exported.dead.clone(),
            // A group that waits for it says where it returns to.
            died_at: None,
            parked: exported.parked.map(|cause| (cause, reason())),
        };
        // What will need a message that is over, for example a group that waits for it, may come later.
        let retention_ms = self.queue.config.retention_ms;
        let base_min_ms = (self.now_ms + retention_ms.min(IMPORTED_MS_MIN)).saturating_sub(retention_ms);
        let attributes = (!exported.attributes.is_empty())
            .then(|| serde_json::to_string(&exported.attributes).expect("attributes are plain data"));
        let message = Message {
            seq,
            id: exported.id,
            pos: seq,
            sent_ms: exported.sent_ms,
            retained_ms: exported.retained_from_ms.max(base_min_ms),
            fence: exported.fence.0,
            // Kept also if it is over, so that it is exported again as it was.
            until_ms: Some(exported.visible_ms)
                .filter(|visible_ms| exported.parked.is_none() && *visible_ms != exported.sent_ms),
            // No delivery of this store can be extended.
            received_ms: None,
            first_ms: Some(exported.first_received_ms).filter(|ms| *ms > 0),
            queue_id: self.queue.id,
            attempts: exported.attempts,
            deliveries: exported.deliveries,
            bytes: exported.bytes_counted(),
            lease_ms: None,
            priority: exported.priority,
            key_source: exported.key_source,
            own: false,
            group: exported.group.clone(),
            dedup: exported.dedup.clone(),
            key: Some(exported.key.clone()),
            consumer: None,
            story,
            attributes,
            body: exported.body.clone(),
            damage: None,
        };
        (table, message)
    }

    async fn halt(&self, db: &mut PgConnection, group: &GroupId, id: MessageId) -> Result<(), Failure> {
        let (high, low) = halves(id);
        let sql = "INSERT INTO hapax.q_undecided (queue_id, id_hi, id_lo, grp) VALUES ($1, $2, $3, $4) \
                   ON CONFLICT DO NOTHING";
        let halt = sqlx::query(sql).bind(self.queue.id).bind(high as i64).bind(low as i64);
        halt.bind(group.as_str()).execute(db).await?;
        Ok(())
    }

    async fn undecided(
        &mut self,
        db: &mut PgConnection,
        group: &GroupId,
        id: Option<MessageId>,
    ) -> Result<Answer, Failure> {
        if !self.queue.config.is_fifo() {
            return Ok(invalid("only a FIFO queue has groups that can be halted"));
        }
        let done = halt_id(&self.queue.name, group, id);
        if self.before.contains(&done) {
            return Ok(Ok(Imported::AlreadyThere));
        }
        if let Some(id) = id {
            let Some((table, letter)) = self.live.iter().find(|(_, message)| message.id == id) else {
                return Ok(invalid(format!(
                    "dead letter {id}, which group {group} waits for, is not there; import its queue first, and do not \
                     discard it before its group is imported"
                )));
            };
            if letter.story.dead.is_none() {
                // It is not among the dead letters any more: it was decided about.
                return Ok(Ok(Imported::AlreadyThere));
            }
            let (table, mut letter) = (*table, letter.clone());
            letter.story.died_at = Some(self.number());
            let story = serde_json::to_string(&letter.story).expect("a story is plain data");
            let sql = format!(
                "UPDATE {} SET story = $1 WHERE queue_id = $2 AND seq = $3 AND prio = $4",
                table.name()
            );
            let place = sqlx::query(&sql).bind(story).bind(letter.queue_id).bind(letter.seq as i64);
            place.bind(i16::from(letter.priority.0)).execute(&mut *db).await?;
        }
        self.halt(db, group, id.unwrap_or(done)).await?;
        self.note(done);
        Ok(Ok(Imported::Added))
    }

    async fn dedup(&mut self, db: &mut PgConnection, remembered: &RememberedId) -> Result<Answer, Failure> {
        let RememberedId { hash, id, sent_ms } = remembered;
        let Some(key) = u128::from_str_radix(hash, 16).ok().filter(|_| hash.len() == 32) else {
            return Ok(invalid(format!("hash {hash:?} is not valid: use 32 hexadecimal digits")));
        };
        if *sent_ms > self.now_ms + policy::RETENTION_MS_MAX {
            return Ok(invalid(format!("sent_ms: {sent_ms} is more than 14 days ahead")));
        }
        let window_ms = self.queue.config.dedup.window_ms;
        if !policy::is_duplicate(*sent_ms, window_ms, self.now_ms) {
            return Ok(Ok(Imported::AlreadyThere));
        }
        let own =
            self.find(*id).filter(|message| message.queue_id == self.queue.id).map(|message| message.seq);
        let seq = own.unwrap_or_else(|| self.number());
        let (high, low) = halves(*id);
        let sql = "INSERT INTO hapax.q_dedup AS d (queue_id, hash, first_ms, id_hi, id_lo, seq) VALUES ($1, $2, $3, $4, $5, $6) \
                   ON CONFLICT (queue_id, hash) DO UPDATE SET first_ms = excluded.first_ms, id_hi = excluded.id_hi, \
                   id_lo = excluded.id_lo, seq = excluded.seq WHERE d.first_ms + $7 <= $8";
        let remember =
            sqlx::query(sql).bind(self.queue.id).bind(key.to_be_bytes().to_vec()).bind(*sent_ms as i64);
        let remember = remember.bind(high as i64).bind(low as i64).bind(seq as i64).bind(window_ms as i64);
        let added = remember.bind(self.now_ms as i64).execute(db).await?.rows_affected() > 0;
        Ok(Ok(if added { Imported::Added } else { Imported::AlreadyThere }))
    }
}

//! Export and import of queues and ledger. Pages are read by the reading thread; imports are written by the writer.

use std::sync::PoisonError;

use async_trait::async_trait;
use hapax_core::ledger::protocol::Stage;
use hapax_core::transfer::PAGE_BYTES_MAX;
use hapax_core::{
    AdminError, Attributes, Batch, CopyState, ExportPage, ExportedEntry, ExportedItem, ExportedMessage,
    ExportedStage, FailureCause, Fence, Imported, MessageKey, Priority, QueueName, RememberedId, SendError,
    StoreError, Transfer, TransferScope, policy, validate,
};
use rusqlite::{Connection, OptionalExtension as _, params};
use tokio::sync::oneshot;

use crate::browse::parse_attributes;
use crate::engine::{ExportStep, GroupWait, PageMessage, PageMetadata, Undecided};
use crate::ids::Ids;
use crate::record::{
    Content, FLAG_DEAD, FLAG_HISTORY, FLAG_KEYED, LedgerRow, MessageRow, State, parked_cause,
};
use crate::storage::{self, FoundBody};
use crate::writer::Op;
use crate::{Embedded, StoreState};

/// An item on its way in; a message's content is encoded and checksummed by the caller's thread.
pub(crate) struct PreparedItem {
    pub item: ExportedItem,
    pub content: Option<Content>,
}

impl From<ExportedItem> for PreparedItem {
    fn from(item: ExportedItem) -> Self {
        let content = match &item {
            ExportedItem::Message(message) => Some(content(message)),
            _ => None,
        };
        Self { item, content }
    }
}

/// The content of a message. Its key is stored only where the rest does not tell it.
fn content(message: &ExportedMessage) -> Content {
    let encode = || serde_json::to_string(&message.attributes).expect("attributes are plain data");
    let attributes = (!message.attributes.is_empty()).then(encode);
    let given = MessageKey { key: message.key.clone(), source: message.key_source };
    let sender_key = MessageKey::explicit(&message.attributes, &message.body, None);
    let told =
        MessageKey::decide(sender_key, message.dedup.as_ref().map(hapax_core::DedupId::as_str), message.id);
    let key = (given != told).then_some(given);
    Content::new(message.dedup.clone().map(String::from), attributes, key, message.body.clone())
}

/// Where a page begins.
#[derive(Clone, Copy)]
enum Cursor {
    /// Messages behind this place.
    Messages(u64),
    /// Remembered deduplication ids behind this one; `None`: from the first.
    Dedup(Option<u128>),
}

impl Cursor {
    fn parse(text: Option<&str>) -> Result<Self, StoreError> {
        let wrong = || StoreError::Invalid("after: use the `next` of an earlier page".into());
        match text.map(|text| (text.get(..1), text.get(1..).unwrap_or_default())) {
            None => Ok(Self::Messages(0)),
            Some((Some("m"), place)) => place.parse().map(Self::Messages).map_err(|_| wrong()),
            Some((Some("d"), "")) => Ok(Self::Dedup(None)),
            Some((Some("d"), key)) => {
                u128::from_str_radix(key, 16).map(|key| Self::Dedup(Some(key))).map_err(|_| wrong())
            }
            Some(_) => Err(wrong()),
        }
    }
}

#[async_trait]
impl Transfer for Embedded {
    async fn fence_bound(&self) -> Result<Fence, StoreError> {
        self.state.job(|engine, _| engine.fence_bound()).await
    }

    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        self.state.job(move |engine, now| engine.raise_fence(now, bound)).await?
    }

    async fn set_copy(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let (scope, by) = (scope.clone(), by.to_owned());
        self.state.job(move |engine, now| engine.set_copy(now, &scope, state, &by)).await?
    }

    async fn ledger_copy(&self) -> Result<Option<CopyState>, StoreError> {
        self.state.job(|engine, _| engine.ledger_copy().cloned()).await
    }

    async fn export(
        &self,
        from: &TransferScope,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError> {
        validate::page(limit)?;
        let ids = self.state.ids.clone();
        let read: Box<dyn FnOnce(&Connection) -> rusqlite::Result<ExportPage> + Send> = match from {
            TransferScope::Queue(queue) => {
                let (queue, cursor) = (queue.clone(), Cursor::parse(after)?);
                let place = if let Cursor::Messages(place) = cursor { Some(place) } else { None };
                let of = self.page_of(queue, place, limit).await?;
                Box::new(move |db| match cursor {
                    Cursor::Messages(_) => messages(db, &ids, &of),
                    Cursor::Dedup(after) => dedup(db, &ids, &of, after, limit),
                })
            }
            TransferScope::Ledger => {
                let wrong = |_| StoreError::Invalid("after: use the `next` of an earlier page".into());
                let after = after.map(str::parse).transpose().map_err(wrong)?.unwrap_or(0);
                let now_ms = self.state.time.now().ms();
                Box::new(move |db| entries(db, after, limit, now_ms))
            }
        };
        Ok(self.read(read).await?)
    }

    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        validate::batch("items", items.len())?;
        let items = items.into_iter().map(PreparedItem::from).collect();
        let (reply, answer) = oneshot::channel();
        self.state.op_queue.push(Op::Import { to: to.clone(), items, reply })?;
        StoreState::answer(answer).await
    }
}

impl Embedded {
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let failed = |error| StoreError::Unavailable(format!("a read failed ({error})"));
        let job = Box::new(move |db: &Connection| drop(reply.send(read(db).map_err(failed))));
        self.threads.reader.lock().unwrap_or_else(PoisonError::into_inner).submit(job)?;
        StoreState::answer(answer).await
    }

    /// What memory knows of a page. What its groups wait for is read once per export.
    async fn page_of(
        &self,
        name: QueueName,
        after: Option<u64>,
        limit: usize,
    ) -> Result<PageMetadata, AdminError> {
        let mut read = None;
        loop {
            let (name, waits) = (name.clone(), read.take());
            let step = self.state.job(move |engine, now| engine.export(now, &name, after, limit, waits));
            match step.await?? {
                ExportStep::Page(page) => return Ok(page),
                ExportStep::ReadWaits { queue, name, undecided } => {
                    let ids = self.state.ids.clone();
                    read = Some(self.read(move |db| waits_of(db, &ids, queue, &name, undecided)).await?);
                }
            }
        }
    }
}

/// The messages of a page, and the places of dead letters that groups wait for.
fn messages(db: &Connection, ids: &Ids, of: &PageMetadata) -> rusqlite::Result<ExportPage> {
    let sql = format!("SELECT {} FROM message WHERE seq = ?1", storage::MESSAGE_COLUMNS);
    let mut statement = db.prepare_cached(&sql)?;
    let (mut placed, mut bytes, mut upto) = (Vec::new(), 0, of.upto);
    for &PageMessage { seq, order, undecided, damaged: broken } in &of.messages {
        let row = statement.query_row([seq as i64], storage::message).optional()?;
        // Settled or moved since the page was begun.
        let Some((row, sound)) = row.filter(|(row, sound)| !sound || row.queue == of.queue) else { continue };
        let items = if sound && !broken {
            exported(db, ids, of, &row, undecided)?
        } else {
            vec![damaged(ids, seq, "its row does not match its checksum")]
        };
        let size: usize = items.iter().map(|item| item.bytes() + 1).sum();
        if bytes > 0 && bytes + size > PAGE_BYTES_MAX {
            upto = Some(order);
            break;
        }
        bytes += size;
        placed.extend(items.into_iter().map(|item| (order, item)));
    }
    let own = of.waits.iter().filter(|wait| upto.is_none_or(|upto| wait.place < upto));
    placed.extend(own.map(|GroupWait { place, group, id, .. }| {
        (*place, ExportedItem::Undecided { group: group.clone(), id: *id })
    }));
    placed.sort_by_key(|(place, _)| *place);
    let items = placed.into_iter().map(|(_, item)| item).collect();
    let next = upto.map_or_else(|| "d".to_owned(), |upto| format!("m{}", upto - 1));
    Ok(ExportPage { items, next: Some(next) })
}

fn damaged(ids: &Ids, seq: u64, problem: &str) -> ExportedItem {
    ExportedItem::Damaged { what: format!("message {}", ids.id(seq)), problem: problem.to_owned() }
}

/// Messages outside of a queue that its groups wait for, by their places there; 0 if that is not known.
fn waits_of(
    db: &Connection,
    ids: &Ids,
    queue: u32,
    name: &QueueName,
    undecided: Undecided,
) -> rusqlite::Result<Vec<GroupWait>> {
    let mut waits = Vec::new();
    for (group, seqs) in undecided {
        for seq in seqs {
            let sql = "SELECT queue FROM message WHERE seq = ?1";
            let found: Option<u32> =
                db.prepare_cached(sql)?.query_row([seq as i64], |row| row.get(0)).optional()?;
            if found == Some(queue) {
                // It says so itself.
                continue;
            }
            let dead = storage::dead(db, seq)?.filter(|dead| dead.source == *name);
            let (place, id) = (dead.map_or(0, |dead| dead.source_order), found.map(|_| ids.id(seq)));
            waits.push(GroupWait { place, group: group.clone(), seq, id });
        }
    }
    waits.sort_by_key(|wait| wait.place);
    Ok(waits)
}

/// A message; and what else there is to report about it.
fn exported(
    db: &Connection,
    ids: &Ids,
    of: &PageMetadata,
    row: &MessageRow,
    undecided: bool,
) -> rusqlite::Result<Vec<ExportedItem>> {
    let entry = row.entry;
    let (id, seq) = (ids.id(entry.seq), entry.seq);
    let content = match storage::body(db, seq)? {
        FoundBody::Sound(body) => body.content,
        FoundBody::Damaged(problem) => return Ok(vec![damaged(ids, seq, &problem)]),
    };
    let mut items = Vec::new();
    let dead = if entry.flags & FLAG_DEAD == 0 { None } else { storage::dead(db, seq)? };
    if entry.flags & FLAG_DEAD != 0 && dead.is_none() {
        items.push(damaged(ids, seq, "where it died cannot be read; it is exported without that"));
    }
    let attributes = content.attributes.as_deref().map_or_else(Attributes::new, parse_attributes);
    let key = content.decided_key(&attributes, id);
    let message = ExportedMessage {
        id,
        sequence: entry.order,
        attributes,
        group: row.group.clone(),
        dedup: content.dedup.and_then(|dedup| dedup.parse().ok()),
        body: content.body,
        priority: Priority(entry.priority),
        key: key.key,
        key_source: key.source,
        sent_ms: entry.sent_ms,
        retained_from_ms: entry.base_ms,
        visible_ms: if entry.state == State::InFlight { of.paused_ms } else { entry.due_ms },
        first_received_ms: entry.first_ms,
        attempts: entry.attempts,
        deliveries: entry.deliveries,
        fence: Fence(entry.fence),
        parked: parked_cause(entry.flags).filter(|cause| *cause != FailureCause::Damaged),
        undecided,
        dead: dead.map(Into::into),
        history: if entry.flags & FLAG_HISTORY == 0 { Vec::new() } else { storage::history(db, seq)? },
        entries: if entry.flags & FLAG_KEYED == 0 {
            Vec::new()
        } else {
            storage::ledger::of_message(db, seq)?
        },
    };
    items.push(ExportedItem::Message(Box::new(message)));
    Ok(items)
}

/// Deduplication ids whose window is not over.
fn dedup(
    db: &Connection,
    ids: &Ids,
    of: &PageMetadata,
    after: Option<u128>,
    limit: usize,
) -> rusqlite::Result<ExportPage> {
    let sql = format!(
        "SELECT {} FROM dedup WHERE queue = ?1 AND key > ?2 ORDER BY key LIMIT ?3",
        storage::DEDUP_COLUMNS
    );
    let after = after.map(u128::to_be_bytes).map_or_else(Vec::new, |key| key.to_vec());
    let mut statement = db.prepare_cached(&sql)?;
    let mut rows = statement.query(params![of.queue, after, limit as i64])?;
    let (mut items, mut last, mut count) = (Vec::new(), None, 0);
    while let Some(row) = rows.next()? {
        count += 1;
        last = row.get_ref(0)?.as_blob().ok().and_then(|key| key.try_into().ok()).map(u128::from_be_bytes);
        let Some((_, row)) = storage::dedup(row)? else {
            let (what, problem) = ("a remembered deduplication id".into(), "its row is damaged".into());
            items.push(ExportedItem::Damaged { what, problem });
            continue;
        };
        if row.seq >= of.purged_before && policy::is_duplicate(row.sent_ms, of.dedup_window_ms, of.now_ms) {
            let (hash, id) = (format!("{:032x}", row.key), ids.id(row.seq));
            items.push(ExportedItem::Dedup(RememberedId { hash, id, sent_ms: row.sent_ms }));
        }
    }
    let next = last.filter(|_| count == limit).map(|key| format!("d{key:032x}"));
    Ok(ExportPage { items, next })
}

fn entries(db: &Connection, after: u64, limit: usize, now_ms: u64) -> rusqlite::Result<ExportPage> {
    let (rows, next) = storage::ledger::export(db, after, limit, PAGE_BYTES_MAX)?;
    let item = |(fence, row): (u64, Option<LedgerRow>)| match row {
        Some(row) => ExportedItem::Entry(Box::new(exported_entry(row, now_ms))),
        None => ExportedItem::Damaged {
            what: format!("the ledger's entry with fence {fence}"),
            problem: "its row does not match its checksum".into(),
        },
    };
    let (mut page, mut bytes, mut last) = (ExportPage::default(), 0, None);
    for row in rows {
        let (fence, item) = (row.0, item(row));
        bytes += item.bytes() + 1;
        if bytes > PAGE_BYTES_MAX && last.is_some() {
            page.next = last.map(|last: u64| last.to_string());
            return Ok(page);
        }
        last = Some(fence);
        page.items.push(item);
    }
    page.next = next.map(|next| next.to_string());
    Ok(page)
}

fn exported_entry(row: LedgerRow, now_ms: u64) -> ExportedEntry {
    let entry = row.entry;
    let stage = match entry.stage {
        Stage::Processing { until_ms, on_doubt, .. } => {
            ExportedStage::InDoubt { since_ms: until_ms.min(now_ms), on_doubt }
        }
        Stage::Completed { at_ms, ttl_ms, outcome } => ExportedStage::Completed { at_ms, ttl_ms, outcome },
    };
    ExportedEntry {
        id: row.id,
        owner: entry.owner,
        fingerprint: entry.fingerprint,
        claimed_ms: entry.claimed_ms,
        takeovers: entry.takeovers,
        stage,
    }
}

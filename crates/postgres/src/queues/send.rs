//! Sends. Messages of a standard queue that can be delivered at once, and ask for nothing else, are merged with those of other
//! calls (`merged`); everything else is a transaction per call.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::message::MessageKey;
use hapax_core::policy::{self, Visibility};
use hapax_core::store::QueueTotals;
use hapax_core::{
    Batch, DedupId, GroupId, IdempotencyKey, KeySource, MessageId, NewMessage, QueueName, SendError, Sent,
    StoreError, Tier, validate,
};
use sha2::{Digest as _, Sha256};
use sqlx::{PgConnection, Row as _};

use super::merged::Write;
use super::room::{Room, Size};
use super::row::{Message, Story, Table, halves, id_of, insert, low_of, new_high};
use super::write::{self, GroupOf};
use super::{Inner, Queue, entries};
use crate::BoxFuture;
use crate::error::Failure;

/// A batch of one call.
pub(super) struct Plain {
    pub queue: Arc<Queue>,
    pub messages: Vec<Prepared>,
}

/// A message, ready to be stored.
#[derive(Clone)]
pub(super) struct Prepared {
    pub high: u64,
    pub bytes: u64,
    pub key: Option<IdempotencyKey>,
    pub key_source: KeySource,
    pub attributes: Option<String>,
    pub body: Bytes,
    pub group: Option<GroupId>,
    pub dedup: Option<DedupId>,
    pub priority: hapax_core::Priority,
}

impl Prepared {
    fn new(queue: &Queue, message: &NewMessage) -> Self {
        let config = &queue.config;
        let content =
            || config.dedup.content_based.then(|| policy::content_id(&Sha256::digest(&message.body).into()));
        let dedup = message.dedup.clone().or_else(|| content().and_then(|id| DedupId::new(id).ok()));
        let explicit =
            MessageKey::explicit(&message.attributes, &message.body, config.key_pointer.as_deref());
        // An id is decided where the place is drawn; a key that is the id is not stored.
        let key = MessageKey::decide(explicit, dedup.as_ref().map(DedupId::as_str), MessageId(0));
        let attributes = (!message.attributes.is_empty())
            .then(|| serde_json::to_string(&message.attributes).expect("attributes are plain data"));
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            high: new_high(wall.unwrap_or_default().as_millis() as u64, fastrand::u64(..)),
            bytes: message.bytes(),
            key_source: key.source,
            key: (key.source != KeySource::MessageId).then_some(key.key),
            attributes,
            body: message.body.clone(),
            group: message.group.clone(),
            dedup,
            priority: message.priority,
        }
    }

    fn message(self, queue: &Queue, seq: u64, now_ms: u64, visible: Visibility) -> (Table, Message) {
        let hidden = visible.due_ms > now_ms;
        let table = match (queue.config.is_fifo(), hidden) {
            (true, _) => Table::Fifo,
            (false, true) => Table::Due,
            (false, false) => Table::Ready,
        };
        let message = Message {
            seq,
            id: id_of(self.high, low_of(seq)),
            pos: seq,
            sent_ms: now_ms,
            retained_ms: visible.retained_from_ms,
            fence: 0,
            until_ms: hidden.then_some(visible.due_ms),
            received_ms: None,
            first_ms: None,
            queue_id: queue.id,
            attempts: 0,
            deliveries: 0,
            bytes: self.bytes,
            lease_ms: None,
            priority: self.priority,
            key_source: self.key_source,
            own: false,
            group: self.group,
            dedup: self.dedup,
            key: self.key,
            consumer: None,
            story: Story::default(),
            attributes: self.attributes,
            body: self.body,
            damage: None,
        };
        (table, message)
    }
}

/// How often a call is repeated because its queue has changed.
const CHANGES_MAX: usize = 10;

impl Inner {
    pub(super) async fn send(
        self: &Arc<Self>,
        name: &QueueName,
        batch: Vec<NewMessage>,
    ) -> Batch<Sent, SendError> {
        if !hapax_core::mutant::is("unknown-commit-retried") {
            return self.send_once(name, batch).await;
        }
        let sent = self.send_once(name, batch.clone()).await;
        if !matches!(sent, Err(StoreError::OutcomeUnknown(_))) {
            return sent;
        }
        let again = |id: DedupId| DedupId::new(format!("{id}-again")).ok();
        let batch =
            batch.into_iter().map(|message| NewMessage { dedup: message.dedup.and_then(again), ..message });
        self.send_once(name, batch.collect()).await
    }

    async fn send_once(self: &Arc<Self>, name: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        validate::batch("messages", batch.len())?;
        for _ in 0..CHANGES_MAX {
            let queue = self.open_queue(name).await?;
            if batch.is_empty() {
                self.read_queue(name).await?;
                return Ok(Vec::new());
            }
            if !is_plain(&queue, &batch) {
                return self.send_careful(name, batch).await;
            }
            if let Some(answers) = self.send_plain(&queue, &batch).await? {
                return Ok(answers);
            }
            self.read_queue(name).await?;
        }
        Err(StoreError::Overloaded(format!("queue {name} changes all the time")))
    }

    async fn send_plain(
        &self,
        queue: &Arc<Queue>,
        batch: &[NewMessage],
    ) -> Result<Option<Vec<Result<Sent, SendError>>>, StoreError> {
        let check = |message: &NewMessage| validate::message(&queue.config, message.into(), 0).map(|_| ());
        let checked: Vec<Result<(), SendError>> = batch.iter().map(check).collect();
        let good = || batch.iter().zip(&checked).filter(|(_, checked)| checked.is_ok());
        let messages: Vec<Prepared> = good().map(|(message, _)| Prepared::new(queue, message)).collect();
        let highs: Vec<u64> = messages.iter().map(|message| message.high).collect();
        if messages.is_empty() {
            return Ok(Some(refused(checked)));
        }
        let weight = messages.iter().map(|message| 1 + message.bytes as usize / 1024).sum();
        let plain = Plain { queue: queue.clone(), messages };
        let Some(seqs) = self.writes.call(Write::Send(plain), weight).await?.sent() else { return Ok(None) };
        self.count(queue.id, &QueueTotals { sent: seqs.len() as u64, ..QueueTotals::default() });
        self.freed(queue.id);
        let mut sent = highs.into_iter().zip(seqs).map(|(high, sequence)| Sent {
            id: id_of(high, low_of(sequence)),
            sequence,
            duplicate: false,
        });
        let answer = |checked: Result<(), SendError>| checked.map(|()| sent.next().expect("one for each"));
        Ok(Some(checked.into_iter().map(answer).collect()))
    }

    async fn send_careful(&self, name: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        let (asked, batch) = (name.clone(), Arc::new(batch));
        let sent = self.transact("send", move |db| {
            let (name, batch) = (asked.clone(), batch.clone());
            Box::pin(async move { careful(db, &name, &batch).await }) as BoxFuture<'_, _>
        });
        let Careful { queue_id, answers, changed } = sent.await?;
        if changed {
            self.forget(name);
        }
        let of = |duplicate: bool| {
            answers.iter().flatten().filter(|sent| sent.duplicate == duplicate).count() as u64
        };
        let totals = QueueTotals { sent: of(false), duplicates: of(true), ..QueueTotals::default() };
        self.count(queue_id, &totals);
        if totals.sent > 0 {
            self.freed(queue_id);
        }
        Ok(answers)
    }
}

fn refused(checked: Vec<Result<(), SendError>>) -> Vec<Result<Sent, SendError>> {
    checked.into_iter().filter_map(Result::err).map(Err).collect()
}

/// Whether a batch can go into the merged statement.
fn is_plain(queue: &Queue, batch: &[NewMessage]) -> bool {
    let config = &queue.config;
    let known = |message: &NewMessage| {
        let bit = 1i32.checked_shl(u32::from(message.priority.0)).unwrap_or(0);
        let urgent = queue.priorities & bit != 0 || message.priority > hapax_core::Priority::MAX;
        urgent && (message.group.is_none() || queue.grouped)
    };
    let plain = |message: &NewMessage| {
        let at_once = message.delay_ms.unwrap_or(config.delay_ms) == 0 && message.deliver_at_ms.is_none();
        at_once && message.dedup.is_none() && known(message)
    };
    !config.is_fifo()
        && !config.dedup.content_based
        && config.quota == hapax_core::Quota::default()
        && !matches!(config.tier, Tier::EffectivelyOnce | Tier::Transactional)
        && batch.iter().all(plain)
}

/// What a careful send did.
struct Careful {
    queue_id: i32,
    answers: Vec<Result<Sent, SendError>>,
    /// The queue's row was changed.
    changed: bool,
}

/// A deduplication id that is remembered.
#[derive(Clone, Copy)]
struct First {
    id: MessageId,
    seq: u64,
}

async fn careful(db: &mut PgConnection, name: &QueueName, batch: &[NewMessage]) -> Result<Careful, Failure> {
    let queue = Queue::get_open(db, name).await?;
    if queue.config.is_fifo() {
        let groups: BTreeSet<GroupOf> =
            batch.iter().filter_map(|message| Some((queue.id, message.group.clone()?))).collect();
        write::lock_groups(db, &groups).await?;
    }
    let prepared: Vec<Prepared> = batch.iter().map(|message| Prepared::new(&queue, message)).collect();
    let bytes = prepared.iter().map(|message| message.bytes).sum();
    let mut room = Room::of(db, &queue, Size { messages: batch.len() as u64, bytes }).await?;
    let (now_ms, numbers) = write::draw(db, batch.len()).await?;
    let hash = |message: &Prepared| {
        let dedup = &queue.config.dedup;
        let id = message.dedup.as_ref().filter(|_| dedup.window_ms > 0)?;
        Some(policy::dedup_hash(dedup.scope, message.group.as_ref(), id.as_str()))
    };
    let hashes: Vec<Option<u128>> = prepared.iter().map(hash).collect();
    let mut known = remembered(db, &queue, hashes.iter().flatten(), now_ms).await?;

    let mut answers: Vec<Result<Sent, SendError>> = Vec::new();
    let mut new: Vec<(usize, Table, Message)> = Vec::new();
    for (at, ((message, prepared), seq)) in batch.iter().zip(prepared).zip(numbers).enumerate() {
        let visible = match validate::message(&queue.config, message.into(), now_ms) {
            Ok(visible) => visible,
            Err(error) => {
                answers.push(Err(error));
                continue;
            }
        };
        if let Some(first) = hashes[at].and_then(|hash| known.get(&hash)) {
            answers.push(Ok(Sent { id: first.id, sequence: first.seq, duplicate: true }));
            continue;
        }
        if let Err(error) = room.take(prepared.bytes) {
            answers.push(Err(error));
            continue;
        }
        let (table, message) = prepared.message(&queue, seq, now_ms, visible);
        answers.push(Ok(Sent { id: message.id, sequence: seq, duplicate: false }));
        known.extend(hashes[at].map(|hash| (hash, First { id: message.id, seq })));
        new.push((at, table, message));
    }
    let ids = new.iter().filter_map(|(at, _, message)| Some((hashes[*at]?, message)));
    let lost = remember(db, &queue, ids.collect(), now_ms).await?;
    new.retain(|(at, _, message)| {
        let first = hashes[*at].and_then(|hash| lost.get(&hash)).filter(|first| first.seq != message.seq);
        if let Some(first) = first {
            answers[*at] = Ok(Sent { id: first.id, sequence: first.seq, duplicate: true });
        }
        first.is_none()
    });
    // A repetition inside the batch of one that lost is a duplicate of what it lost against.
    for (at, hash) in hashes.iter().enumerate() {
        if let (Some(Ok(sent)), Some(first)) = (answers.get_mut(at), hash.and_then(|hash| lost.get(&hash))) {
            (sent.id, sent.sequence) = (first.id, first.seq);
        }
    }
    let changed = store(db, &queue, &new).await?;
    room.note(db).await?;
    Ok(Careful { queue_id: queue.id, answers, changed })
}

/// Writes new messages; says whether the queue's row was changed.
async fn store(
    db: &mut PgConnection,
    queue: &Queue,
    new: &[(usize, Table, Message)],
) -> Result<bool, Failure> {
    for table in [Table::Ready, Table::Due, Table::Fifo] {
        let here: Vec<&Message> =
            new.iter().filter(|(_, to, _)| *to == table).map(|(_, _, message)| message).collect();
        insert(db, table, &here).await?;
    }
    if queue.config.is_fifo() {
        let groups: BTreeSet<GroupOf> =
            new.iter().filter_map(|(_, _, message)| Some((queue.id, message.group.clone()?))).collect();
        write::announce(db, &groups, write::Change::default()).await?;
    }
    let all: Vec<&Message> = new.iter().map(|(_, _, message)| message).collect();
    entries::link_new(db, queue, &all).await?;
    Ok(write::mark(db, queue, &all).await?)
}

fn hash_bytes(hash: u128) -> Vec<u8> {
    hash.to_be_bytes().to_vec()
}

/// The ids that are remembered, of these.
async fn remembered(
    db: &mut PgConnection,
    queue: &Queue,
    hashes: impl Iterator<Item = &u128>,
    now_ms: u64,
) -> Result<HashMap<u128, First>, Failure> {
    let hashes: Vec<Vec<u8>> = hashes.map(|hash| hash_bytes(*hash)).collect();
    if hashes.is_empty() {
        return Ok(HashMap::new());
    }
    let sql =
        "SELECT hash, first_ms, id_hi, id_lo, seq FROM hapax.q_dedup WHERE queue_id = $1 AND hash = ANY($2)";
    let mut found = HashMap::new();
    for row in sqlx::query(sql).bind(queue.id).bind(hashes).fetch_all(db).await? {
        let number = |name: &str| row.try_get::<i64, _>(name).map(|number| number as u64);
        let hash: Vec<u8> = row.try_get("hash")?;
        let Ok(hash) = hash.try_into().map(u128::from_be_bytes) else { continue };
        if policy::is_duplicate(number("first_ms")?, queue.config.dedup.window_ms, now_ms) {
            let id = id_of(number("id_hi")?, number("id_lo")?);
            found.insert(hash, First { id, seq: number("seq")? });
        }
    }
    Ok(found)
}

/// Remembers ids. Gives those that another send has remembered meanwhile.
async fn remember(
    db: &mut PgConnection,
    queue: &Queue,
    mut ids: Vec<(u128, &Message)>,
    now_ms: u64,
) -> Result<HashMap<u128, First>, Failure> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    // In the order of the key, so that two batches cannot wait for each other.
    ids.sort_by_key(|(hash, _)| *hash);
    let sql = "INSERT INTO hapax.q_dedup AS d (queue_id, hash, first_ms, id_hi, id_lo, seq) \
               SELECT $1, u.hash, $2, u.high, u.low, u.seq FROM unnest($3::bytea[], $4::bigint[], $5::bigint[], $6::bigint[]) \
               u(hash, high, low, seq) ON CONFLICT (queue_id, hash) DO UPDATE SET first_ms = excluded.first_ms, \
               id_hi = excluded.id_hi, id_lo = excluded.id_lo, seq = excluded.seq WHERE d.first_ms + $7 <= $2 RETURNING d.hash";
    let ours: Vec<Vec<u8>> = sqlx::query_scalar(sql)
        .bind(queue.id)
        .bind(now_ms as i64)
        .bind(ids.iter().map(|(hash, _)| hash_bytes(*hash)).collect::<Vec<_>>())
        .bind(ids.iter().map(|(_, m)| halves(m.id).0 as i64).collect::<Vec<_>>())
        .bind(ids.iter().map(|(_, m)| halves(m.id).1 as i64).collect::<Vec<_>>())
        .bind(ids.iter().map(|(_, m)| m.seq as i64).collect::<Vec<_>>())
        .bind(queue.config.dedup.window_ms as i64)
        .fetch_all(&mut *db)
        .await?;
    let lost: Vec<u128> =
        ids.iter().map(|(hash, _)| *hash).filter(|hash| !ours.contains(&hash_bytes(*hash))).collect();
    remembered(db, queue, lost.iter(), now_ms).await
}

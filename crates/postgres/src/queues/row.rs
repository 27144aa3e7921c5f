//! A message as a row. The tables of waiting, leased, hidden and parked messages have the same columns.

use bytes::Bytes;
use hapax_core::store::FailedAttempt;
use hapax_core::{
    Attributes, DeadLetter, DedupId, Delivery, FailureCause, Fence, GroupId, IdempotencyKey, KeySource,
    MessageId, MessageState, MessageView, Priority, Receipt,
};
use serde::{Deserialize, Serialize};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::receipt::Named;
use crate::seal::Seal;

/// The columns of a message, in the order of the tables.
pub(super) const COLUMNS: &str = "seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, received_ms, first_ms, id_lo, \
     queue_id, attempts, deliveries, bytes, lease_ms, prio, key_source, own, grp, dedup, key, consumer, story, \
     attrs, body";

/// Where a message is, and in which table its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    Claim,
    Ready,
    Due,
    Fifo,
    Parked,
}

impl Table {
    pub(super) const ALL: [Self; 5] = [Self::Claim, Self::Ready, Self::Due, Self::Fifo, Self::Parked];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Claim => "hapax.q_claim",
            Self::Ready => "hapax.q_ready",
            Self::Due => "hapax.q_due",
            Self::Fifo => "hapax.q_fifo",
            Self::Parked => "hapax.q_parked",
        }
    }

    fn parse(letter: &str) -> Self {
        match letter {
            "c" => Self::Claim,
            "r" => Self::Ready,
            "d" => Self::Due,
            "f" => Self::Fifo,
            _ => Self::Parked,
        }
    }

    /// What [`parse`](Self::parse) reads.
    pub(super) fn letter(self) -> &'static str {
        match self {
            Self::Claim => "c",
            Self::Ready => "r",
            Self::Due => "d",
            Self::Fifo => "f",
            Self::Parked => "p",
        }
    }
}

/// What happened to a message beside its deliveries: nothing, for most.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Story {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<FailedAttempt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead: Option<DeadLetter>,
    /// Its place in the queue in which it died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub died_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked: Option<(FailureCause, Option<String>)>,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub seq: u64,
    pub id: MessageId,
    pub pos: u64,
    pub sent_ms: u64,
    pub retained_ms: u64,
    pub fence: u64,
    pub until_ms: Option<u64>,
    pub received_ms: Option<u64>,
    pub first_ms: Option<u64>,
    pub queue_id: i32,
    pub attempts: u32,
    pub deliveries: u32,
    pub bytes: u64,
    pub lease_ms: Option<u64>,
    pub priority: Priority,
    pub key_source: KeySource,
    pub own: bool,
    pub group: Option<GroupId>,
    pub dedup: Option<DedupId>,
    /// `None`: its id.
    pub key: Option<IdempotencyKey>,
    pub consumer: Option<String>,
    pub story: Story,
    /// As JSON.
    pub attributes: Option<String>,
    pub body: Bytes,
    /// Why its row cannot be read whole; what cannot be read is left out. Such a message is never delivered: the next
    /// transaction that holds it parks it.
    pub damage: Option<String>,
}

/// Reads columns whose text may be damaged.
#[derive(Default)]
struct TextReader {
    /// The first problem.
    damage: Option<String>,
}

impl TextReader {
    fn parse<T, E: std::fmt::Display>(
        &mut self,
        row: &PgRow,
        column: &str,
        parse: impl FnOnce(String) -> Result<T, E>,
    ) -> Result<Option<T>, sqlx::Error> {
        let Some(text) = row.try_get::<Option<String>, _>(column)? else { return Ok(None) };
        match parse(text) {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                self.damage.get_or_insert_with(|| unreadable(column, error));
                Ok(None)
            }
        }
    }
}

fn unreadable(column: &str, error: impl std::fmt::Display) -> String {
    format!("the column {column} of its row cannot be read: {error}")
}

/// The lower half of an id that is made of a place.
pub(super) fn low_of(seq: u64) -> u64 {
    1 << 63 | seq
}

/// An id of its halves.
pub(super) fn id_of(high: u64, low: u64) -> MessageId {
    MessageId(u128::from(high) << 64 | u128::from(low))
}

/// The halves of an id.
pub(super) fn halves(id: MessageId) -> (u64, u64) {
    ((id.0 >> 64) as u64, id.0 as u64)
}

/// The upper half of a new id: a time and some random bits, as a UUID of version 8.
pub(super) fn new_high(now_ms: u64, random: u64) -> u64 {
    now_ms << 16 | 0x8000 | (random & 0xfff)
}

pub(super) fn source_number(source: KeySource) -> i16 {
    match source {
        KeySource::Attribute => 0,
        KeySource::Body => 1,
        KeySource::DedupId => 2,
        KeySource::MessageId => 3,
    }
}

fn source_of(number: i16) -> KeySource {
    match number {
        0 => KeySource::Attribute,
        1 => KeySource::Body,
        2 => KeySource::DedupId,
        _ => KeySource::MessageId,
    }
}

impl Message {
    /// Reads the columns of [`COLUMNS`]. A damaged row is no error; see [`Message::damage`].
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let number = |name: &str| row.try_get::<i64, _>(name).map(|n| n as u64);
        let maybe = |name: &str| row.try_get::<Option<i64>, _>(name).map(|n| n.map(|n| n as u64));
        let text = |name: &str| row.try_get::<Option<String>, _>(name);
        let seq = number("seq")?;
        let low = maybe("id_lo")?.unwrap_or_else(|| low_of(seq));
        let mut reader = TextReader::default();
        let story = reader.parse(row, "story", |json| serde_json::from_str(&json))?.unwrap_or_default();
        let group = reader.parse(row, "grp", GroupId::new)?;
        let dedup = reader.parse(row, "dedup", DedupId::new)?;
        let key = reader.parse(row, "key", IdempotencyKey::new)?;
        Ok(Self {
            seq,
            id: id_of(number("id_hi")?, low),
            pos: number("pos")?,
            sent_ms: number("sent_ms")?,
            retained_ms: number("retained_ms")?,
            fence: number("fence")?,
            until_ms: maybe("until_ms")?,
            received_ms: maybe("received_ms")?,
            first_ms: maybe("first_ms")?,
            queue_id: row.try_get("queue_id")?,
            attempts: row.try_get::<i32, _>("attempts")? as u32,
            deliveries: row.try_get::<i32, _>("deliveries")? as u32,
            bytes: row.try_get::<i32, _>("bytes")? as u64,
            lease_ms: row.try_get::<Option<i32>, _>("lease_ms")?.map(|ms| ms as u64),
            priority: Priority(row.try_get::<i16, _>("prio")? as u8),
            key_source: source_of(row.try_get("key_source")?),
            own: row.try_get::<Option<bool>, _>("own")?.unwrap_or(false),
            group,
            dedup,
            key,
            consumer: text("consumer")?,
            story,
            attributes: text("attrs")?,
            body: row.try_get::<Vec<u8>, _>("body")?.into(),
            damage: reader.damage,
        })
    }

    /// Reads a row with the column `place`, which names its table.
    pub(super) fn read_placed(row: &PgRow) -> Result<(Table, Self), sqlx::Error> {
        Ok((Table::parse(row.try_get("place")?), Self::read(row)?))
    }

    pub(super) fn key(&self) -> IdempotencyKey {
        let own = || IdempotencyKey::new(self.id.to_string()).expect("a UUID is a valid key");
        self.key.clone().unwrap_or_else(own)
    }

    /// `Err`: why it is damaged.
    pub(super) fn attributes(&self) -> Result<Attributes, String> {
        match (&self.damage, &self.attributes) {
            (Some(damage), _) => Err(damage.clone()),
            (None, Some(json)) => serde_json::from_str(json).map_err(|error| unreadable("attrs", error)),
            (None, None) => Ok(Attributes::new()),
        }
    }

    /// The delivery that holds the message. `Err`: why it is damaged.
    pub(super) fn delivery(&self, seal: &Seal, now_ms: u64) -> Result<Delivery, String> {
        Ok(Delivery {
            id: self.id,
            body: self.body.clone(),
            attributes: self.attributes()?,
            receipt: self.receipt(seal),
            fence: Fence(self.fence),
            attempt: self.attempts,
            deliveries: self.deliveries,
            lease_ms: self.until_ms.unwrap_or(now_ms).saturating_sub(now_ms),
            sent_ms: self.sent_ms,
            first_received_ms: self.first_ms.unwrap_or(now_ms),
            sequence: self.seq,
            group: self.group.clone(),
            dedup: self.dedup.clone(),
            priority: self.priority,
            key: self.key(),
            key_source: self.key_source,
            dead: self.story.dead.clone(),
        })
    }

    pub(super) fn receipt(&self, seal: &Seal) -> Receipt {
        Named { queue_id: self.queue_id, id: self.id, seq: self.seq, fence: self.fence }.receipt(seal)
    }

    /// The message as an operator sees it.
    pub(super) fn view(&self, table: Table, now_ms: u64) -> MessageView {
        let (attributes, damage) = match self.attributes() {
            Ok(attributes) => (attributes, None),
            Err(damage) => (Attributes::new(), Some((FailureCause::Damaged, Some(damage)))),
        };
        let hidden = self.until_ms.filter(|until_ms| *until_ms > now_ms);
        let (state, due_ms) = match (table, hidden) {
            (Table::Claim, _) => (MessageState::InFlight, self.until_ms.unwrap_or(self.sent_ms)),
            (Table::Parked, _) => (MessageState::Parked, self.sent_ms),
            (_, Some(until_ms)) => (MessageState::Delayed, until_ms),
            (_, None) => (MessageState::Ready, self.sent_ms),
        };
        MessageView {
            id: self.id,
            state,
            body: Some(self.body.clone()),
            attributes,
            attempts: self.attempts,
            deliveries: self.deliveries,
            sent_ms: self.sent_ms,
            due_ms,
            sequence: self.seq,
            group: self.group.clone(),
            dedup: self.dedup.clone(),
            priority: self.priority,
            dead: self.story.dead.clone(),
            parked: self.story.parked.clone().or(damage),
            history: self.story.history.clone(),
        }
    }
}

/// A column of messages.
fn all<T>(messages: &[&Message], of: impl Fn(&Message) -> T) -> Vec<T> {
    messages.iter().map(|message| of(message)).collect()
}

/// Inserts messages into a table.
pub(super) async fn insert(
    db: &mut sqlx::PgConnection,
    table: Table,
    messages: &[&Message],
) -> Result<(), sqlx::Error> {
    if messages.is_empty() {
        return Ok(());
    }
    let low = |m: &Message| Some(halves(m.id).1).filter(|low| *low != low_of(m.seq)).map(|low| low as i64);
    let story = |m: &Message| {
        let told = m.story != Story::default();
        told.then(|| serde_json::to_string(&m.story).expect("a story is plain data"))
    };
    let own = |text: Option<&str>| text.map(str::to_owned);
    let sql = format!(
        "INSERT INTO {} ({COLUMNS}) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], \
         $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[], $11::int[], $12::int[], \
         $13::int[], $14::int[], $15::int[], $16::smallint[], $17::smallint[], $18::boolean[], $19::text[], \
         $20::text[], $21::text[], $22::text[], $23::text[], $24::text[], $25::bytea[])",
        table.name()
    );
    sqlx::query(&sql)
        .bind(all(messages, |m| m.seq as i64))
        .bind(all(messages, |m| halves(m.id).0 as i64))
        .bind(all(messages, |m| m.pos as i64))
        .bind(all(messages, |m| m.sent_ms as i64))
        .bind(all(messages, |m| m.retained_ms as i64))
        .bind(all(messages, |m| m.fence as i64))
        .bind(all(messages, |m| m.until_ms.map(|ms| ms as i64)))
        .bind(all(messages, |m| m.received_ms.map(|ms| ms as i64)))
        .bind(all(messages, |m| m.first_ms.map(|ms| ms as i64)))
        .bind(all(messages, low))
        .bind(all(messages, |m| m.queue_id))
        .bind(all(messages, |m| m.attempts as i32))
        .bind(all(messages, |m| m.deliveries as i32))
        .bind(all(messages, |m| m.bytes as i32))
        .bind(all(messages, |m| m.lease_ms.map(|ms| ms as i32)))
        .bind(all(messages, |m| i16::from(m.priority.0)))
        .bind(all(messages, |m| source_number(m.key_source)))
        .bind(all(messages, |m| m.own.then_some(true)))
        .bind(all(messages, |m| own(m.group.as_ref().map(GroupId::as_str))))
        .bind(all(messages, |m| own(m.dedup.as_ref().map(DedupId::as_str))))
        .bind(all(messages, |m| own(m.key.as_ref().map(IdempotencyKey::as_str))))
        .bind(all(messages, |m| m.consumer.clone()))
        .bind(all(messages, story))
        .bind(all(messages, |m| m.attributes.clone()))
        .bind(all(messages, |m| m.body.to_vec()))
        .execute(db)
        .await?;
    Ok(())
}

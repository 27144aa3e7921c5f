//! Messages as the scripts keep them.

use bytes::Bytes;
use hapax_core::store::FailedAttempt;
use hapax_core::{
    Attributes, DeadLetter, DedupId, Delivery, FailureCause, Fence, GroupId, IdempotencyKey, KeySource,
    MessageId, MessageState, MessageView, Priority, QueueName, Receipt, SettleError, StoreError,
};

use super::call::Fields;

/// A message with its place, as the scripts give it.
pub(super) struct Stored {
    pub sequence: u64,
    pub id: MessageId,
    pub state: MessageState,
    pub until_ms: u64,
    pub sent_ms: u64,
    pub retained_ms: u64,
    pub first_received_ms: u64,
    pub attempts: u32,
    pub deliveries: u32,
    pub group: Option<GroupId>,
    pub priority: Priority,
    pub dead: Option<DeadLetter>,
    /// The place that a dead letter returns to.
    pub died_at: u64,
    pub parked: Option<(FailureCause, Option<String>)>,
    pub history: Vec<FailedAttempt>,
    pub fence: u64,
    pub dedup: Option<DedupId>,
    pub key: IdempotencyKey,
    pub key_source: KeySource,
    /// The entries of the ledger that it needs: a queue of their shard, and the name.
    pub needs: Vec<String>,
    /// When an imported message could be received; 0 if it was sent here.
    pub visible_ms: u64,
    pub attributes: Attributes,
    pub body: Bytes,
}

fn cause(fields: &Fields, text: &str) -> Result<FailureCause, StoreError> {
    let all = [
        FailureCause::Retry,
        FailureCause::Expired,
        FailureCause::Rejected,
        FailureCause::Damaged,
        FailureCause::InDoubt,
    ];
    all.into_iter().find(|cause| cause.as_str() == text).ok_or_else(|| fields.unexpected())
}

fn optional<T: std::str::FromStr>(fields: &mut Fields) -> Result<Option<T>, StoreError> {
    match fields.text()?.as_str() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| fields.unexpected()),
    }
}

fn dead_letter(fields: &mut Fields) -> Result<Option<DeadLetter>, StoreError> {
    if fields.is_none() {
        return Ok(None);
    }
    let mut dead = fields.fields()?;
    let (source, why) = (dead.parsed()?, dead.text()?);
    Ok(Some(DeadLetter {
        source,
        cause: cause(&dead, &why)?,
        error: dead.maybe_text()?,
        attempts: dead.count()?,
        deliveries: dead.count()?,
        first_received_ms: dead.number()?,
        died_ms: dead.number()?,
    }))
}

fn failed_attempt(mut row: Fields) -> Result<FailedAttempt, StoreError> {
    let (attempt, deliveries, at_ms, why) = (row.count()?, row.count()?, row.number()?, row.text()?);
    let cause = cause(&row, &why)?;
    Ok(FailedAttempt {
        attempt,
        deliveries,
        at_ms,
        cause,
        error: row.maybe_text()?,
        consumer: row.maybe_text()?,
    })
}

impl Stored {
    /// Sequence, fields in the order of `common.lua`, and body.
    pub fn read(mut row: Fields) -> Result<Self, StoreError> {
        let (sequence, mut m) = (row.number()?, row.unpacked()?);
        let id = m.parsed()?;
        let state = match m.number()? {
            0 => MessageState::Ready,
            1 => MessageState::Delayed,
            2 => MessageState::InFlight,
            3 => MessageState::Parked,
            _ => return Err(m.unexpected()),
        };
        let (until_ms, _received, _own, sent_ms) = (m.number()?, m.number()?, m.number()?, m.number()?);
        let (retained_ms, first_received_ms) = (m.number()?, m.number()?);
        let (attempts, deliveries, group) = (m.count()?, m.count()?, optional(&mut m)?);
        let priority = Priority(m.number()?.try_into().map_err(|_| m.unexpected())?);
        let dead = dead_letter(&mut m)?;
        let died_at = m.number()?;
        let (why, problem) = (m.maybe_text()?, m.maybe_text()?);
        let parked = why.map(|why| cause(&m, &why)).transpose()?.map(|cause| (cause, problem));
        let history = m.rows()?.into_iter().map(failed_attempt).collect::<Result<_, _>>()?;
        let (_consumer, fence, _received_ms) = (m.maybe_text()?, m.number()?, m.number()?);
        let (_bytes, _turn, dedup, key) = (m.number()?, m.number()?, optional(&mut m)?, m.parsed()?);
        let key_source = source(&m.text()?).ok_or_else(|| m.unexpected())?;
        let (_halts, needs, visible_ms) = (m.texts()?, m.texts()?, m.number()?);
        let (attributes, body) = unpacked(&row.bytes()?.into()).ok_or_else(|| row.unexpected())?;
        Ok(Self {
            sequence,
            id,
            state,
            until_ms,
            sent_ms,
            retained_ms,
            first_received_ms,
            attempts,
            deliveries,
            group,
            priority,
            dead,
            died_at,
            parked,
            history,
            fence,
            dedup,
            key,
            key_source,
            needs,
            visible_ms,
            attributes,
            body,
        })
    }

    pub fn delivery(self, queue: &QueueName, now_ms: u64) -> Delivery {
        let named = DeliveryRef { id: self.id, sequence: self.sequence, fence: self.fence };
        Delivery {
            id: self.id,
            body: self.body,
            attributes: self.attributes,
            receipt: named.receipt(queue),
            fence: Fence(self.fence),
            attempt: self.attempts,
            deliveries: self.deliveries,
            lease_ms: self.until_ms.saturating_sub(now_ms),
            sent_ms: self.sent_ms,
            first_received_ms: self.first_received_ms,
            sequence: self.sequence,
            group: self.group,
            dedup: self.dedup,
            priority: self.priority,
            key: self.key,
            key_source: self.key_source,
            dead: self.dead,
        }
    }

    pub fn view(self) -> MessageView {
        let due_ms = match self.state {
            MessageState::Ready | MessageState::Parked => self.sent_ms,
            MessageState::Delayed | MessageState::InFlight => self.until_ms,
        };
        MessageView {
            id: self.id,
            state: self.state,
            body: Some(self.body),
            attributes: self.attributes,
            attempts: self.attempts,
            deliveries: self.deliveries,
            sent_ms: self.sent_ms,
            due_ms,
            sequence: self.sequence,
            group: self.group,
            dedup: self.dedup,
            priority: self.priority,
            dead: self.dead,
            parked: self.parked,
            history: self.history,
        }
    }
}

/// The source of a key, in one letter.
pub(super) fn source_letter(source: KeySource) -> &'static str {
    match source {
        KeySource::Attribute => "a",
        KeySource::Body => "b",
        KeySource::DedupId => "d",
        KeySource::MessageId => "m",
    }
}

fn source(letter: &str) -> Option<KeySource> {
    let all = [KeySource::Attribute, KeySource::Body, KeySource::DedupId, KeySource::MessageId];
    all.into_iter().find(|source| source_letter(*source) == letter)
}

/// Attributes and body as one value: the length of the attributes' JSON, the JSON, the body.
pub(super) fn packed(attributes: &Attributes, body: &[u8]) -> Vec<u8> {
    let json = if attributes.is_empty() {
        Vec::new()
    } else {
        serde_json::to_vec(attributes).expect("attributes are plain data")
    };
    let length = u32::try_from(json.len()).expect("a message has at most a mebibyte");
    [length.to_le_bytes().as_slice(), &json, body].concat()
}

fn unpacked(packed: &Bytes) -> Option<(Attributes, Bytes)> {
    let length = u32::from_le_bytes(*packed.first_chunk()?) as usize;
    let json = packed.get(4..4 + length)?;
    let attributes = if json.is_empty() { Attributes::new() } else { serde_json::from_slice(json).ok()? };
    Some((attributes, packed.slice(4 + length..)))
}

/// What a receipt names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeliveryRef {
    pub id: MessageId,
    pub sequence: u64,
    pub fence: u64,
}

impl DeliveryRef {
    fn receipt(self, queue: &QueueName) -> Receipt {
        let Self { id, sequence, fence } = self;
        Receipt::new(format!("{queue}|{id}|{sequence}|{fence}")).expect("it is short and printable")
    }

    /// Reads a receipt of this queue.
    pub fn of(queue: &QueueName, receipt: &Receipt) -> Result<Self, SettleError> {
        let mut parts = receipt.as_str().split('|');
        let mut part = || parts.next().ok_or(SettleError::Malformed);
        if part()? != queue.as_str() {
            return Err(SettleError::Malformed);
        }
        let id = part()?.parse().map_err(|_| SettleError::Malformed)?;
        let mut number = || part()?.parse::<u64>().map_err(|_| SettleError::Malformed);
        let named = Self { id, sequence: number()?, fence: number()? };
        if named.sequence >= 1 << 53 || named.fence >= 1 << 53 {
            return Err(SettleError::Malformed);
        }
        Ok(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_read_as_it_was_written_and_only_in_its_queue() {
        let (jobs, other): (QueueName, QueueName) = ("jobs".parse().unwrap(), "other".parse().unwrap());
        let named = DeliveryRef { id: MessageId(7), sequence: 1 << 40, fence: 1 << 52 };
        let receipt = named.receipt(&jobs);
        assert_eq!(DeliveryRef::of(&jobs, &receipt), Ok(named));
        assert_eq!(DeliveryRef::of(&other, &receipt), Err(SettleError::Malformed));
        let beyond = DeliveryRef { fence: 1 << 53, ..named }.receipt(&jobs);
        assert_eq!(DeliveryRef::of(&jobs, &beyond), Err(SettleError::Malformed));
    }

    #[test]
    fn attributes_and_body_are_read_as_they_were_written() {
        let some = Attributes::from([("a".to_owned(), hapax_core::Attribute::text("1"))]);
        for attributes in [Attributes::new(), some] {
            let read = unpacked(&packed(&attributes, b"\xffbody").into());
            assert_eq!(read, Some((attributes, Bytes::from_static(b"\xffbody"))));
        }
        assert_eq!(unpacked(&Bytes::from_static(b"\x09\0\0\0short")), None);
    }
}

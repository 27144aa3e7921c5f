//! Responses of SQS, independent of the protocol.

use std::borrow::Cow;
use std::collections::BTreeMap;

use hapax_core::{AttributeValue, Attributes};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::error::SqsError;

/// An action's result.
#[derive(Debug)]
pub(crate) enum Output {
    /// Success without content.
    Empty,
    /// Result of `CreateQueue` and `GetQueueUrl`.
    QueueUrl(String),
    /// Result of `ListQueues`.
    Queues(QueuePage),
    /// Result of `ListDeadLetterSourceQueues`, whose JSON spells its list differently.
    Sources(QueuePage),
    /// Result of `GetQueueAttributes`.
    Attributes(Vec<(&'static str, String)>),
    /// Result of `ListQueueTags`.
    Tags(BTreeMap<String, String>),
    /// Result of `SendMessage`.
    Sent(SentOutput),
    /// Result of `SendMessageBatch`.
    SentBatch(BatchOutput<SentOutput>),
    /// Result of `DeleteMessageBatch`.
    DeletedBatch(BatchOutput<()>),
    /// Result of `ChangeMessageVisibilityBatch`.
    ChangedBatch(BatchOutput<()>),
    /// Result of `ReceiveMessage`.
    Messages(Vec<MessageOutput>),
    /// Result of `StartMessageMoveTask`.
    MoveStarted(String),
    /// Result of `CancelMessageMoveTask`.
    MoveCancelled(u64),
    /// Result of `ListMessageMoveTasks`.
    Moves(Vec<MoveTaskOutput>),
}

/// One page of queue URLs.
#[derive(Debug)]
pub(crate) struct QueuePage {
    pub(crate) urls: Vec<String>,
    pub(crate) next: Option<String>,
}

/// An accepted message.
#[derive(Debug)]
pub(crate) struct SentOutput {
    pub(crate) id: String,
    pub(crate) md5_body: String,
    pub(crate) md5_attributes: Option<String>,
    pub(crate) md5_system_attributes: Option<String>,
    /// Only for FIFO queues.
    pub(crate) sequence: Option<String>,
}

/// A batch's result: successes and failures by entry id.
#[derive(Debug)]
pub(crate) struct BatchOutput<T> {
    pub(crate) successful: Vec<(String, T)>,
    pub(crate) failed: Vec<(String, SqsError)>,
}

/// A delivery.
#[derive(Debug)]
pub(crate) struct MessageOutput {
    pub(crate) id: String,
    pub(crate) receipt: String,
    pub(crate) md5_body: String,
    pub(crate) body: bytes::Bytes,
    pub(crate) system: Vec<(&'static str, String)>,
    pub(crate) md5_attributes: Option<String>,
    pub(crate) attributes: Attributes,
}

impl MessageOutput {
    /// The body as text. SQS accepts only text, but a message may have been sent through another API.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        text_of(&self.body)
    }
}

/// A move task.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct MoveTaskOutput {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) task_handle: Option<String>,
    pub(crate) status: &'static str,
    pub(crate) source_arn: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) destination_arn: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_number_of_messages_per_second: Option<u32>,
    pub(crate) approximate_number_of_messages_moved: u64,
    pub(crate) approximate_number_of_messages_to_move: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure_reason: Option<String>,
    pub(crate) started_timestamp: u64,
}

impl Serialize for Output {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        match self {
            Self::Empty => {}
            Self::QueueUrl(url) => map.serialize_entry("QueueUrl", url)?,
            Self::Queues(page) => {
                if !page.urls.is_empty() {
                    map.serialize_entry("QueueUrls", &page.urls)?;
                }
                if let Some(next) = &page.next {
                    map.serialize_entry("NextToken", next)?;
                }
            }
            Self::Sources(page) => {
                map.serialize_entry("queueUrls", &page.urls)?;
                if let Some(next) = &page.next {
                    map.serialize_entry("NextToken", next)?;
                }
            }
            Self::Attributes(attributes) if attributes.is_empty() => {}
            Self::Attributes(attributes) => map.serialize_entry("Attributes", &Pairs(attributes))?,
            Self::Tags(tags) if tags.is_empty() => {}
            Self::Tags(tags) => map.serialize_entry("Tags", tags)?,
            Self::Sent(sent) => sent.entries(&mut map)?,
            Self::SentBatch(batch) => batch.entries(&mut map)?,
            Self::DeletedBatch(batch) | Self::ChangedBatch(batch) => batch.entries(&mut map)?,
            Self::Messages(messages) if messages.is_empty() => {}
            Self::Messages(messages) => map.serialize_entry("Messages", messages)?,
            Self::MoveStarted(handle) => map.serialize_entry("TaskHandle", handle)?,
            Self::MoveCancelled(moved) => map.serialize_entry("ApproximateNumberOfMessagesMoved", moved)?,
            Self::Moves(moves) => map.serialize_entry("Results", moves)?,
        }
        map.end()
    }
}

/// Writes its entries into a map that also holds others.
trait WriteEntries {
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

impl WriteEntries for () {
    fn entries<M: SerializeMap>(&self, _: &mut M) -> Result<(), M::Error> {
        Ok(())
    }
}

impl WriteEntries for SentOutput {
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("MessageId", &self.id)?;
        map.serialize_entry("MD5OfMessageBody", &self.md5_body)?;
        for (name, value) in [
            ("MD5OfMessageAttributes", &self.md5_attributes),
            ("MD5OfMessageSystemAttributes", &self.md5_system_attributes),
            ("SequenceNumber", &self.sequence),
        ] {
            if let Some(value) = value {
                map.serialize_entry(name, value)?;
            }
        }
        Ok(())
    }
}

impl<T: WriteEntries> WriteEntries for BatchOutput<T> {
    /// Empty lists are left out, as in AWS.
    fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        if !self.successful.is_empty() {
            let entries: Vec<_> = self.successful.iter().map(|(id, entry)| Success { id, entry }).collect();
            map.serialize_entry("Successful", &entries)?;
        }
        if !self.failed.is_empty() {
            let entries: Vec<_> = self.failed.iter().map(|(id, error)| Failure { id, error }).collect();
            map.serialize_entry("Failed", &entries)?;
        }
        Ok(())
    }
}

struct Success<'a, T> {
    id: &'a str,
    entry: &'a T,
}

impl<T: WriteEntries> Serialize for Success<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("Id", self.id)?;
        self.entry.entries(&mut map)?;
        map.end()
    }
}

struct Failure<'a> {
    id: &'a str,
    error: &'a SqsError,
}

impl Serialize for Failure<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let wire = self.error.kind.wire();
        let mut map = to.serialize_map(Some(4))?;
        map.serialize_entry("Id", self.id)?;
        map.serialize_entry("SenderFault", &!wire.status.is_server_error())?;
        map.serialize_entry("Code", wire.code)?;
        map.serialize_entry("Message", &self.error.message)?;
        map.end()
    }
}

struct Pairs<'a>(&'a [(&'static str, String)]);

impl Serialize for Pairs<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Serialize for MessageOutput {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("MessageId", &self.id)?;
        map.serialize_entry("ReceiptHandle", &self.receipt)?;
        map.serialize_entry("MD5OfBody", &self.md5_body)?;
        map.serialize_entry("Body", &self.text())?;
        if !self.system.is_empty() {
            map.serialize_entry("Attributes", &Pairs(&self.system))?;
        }
        if let Some(md5) = &self.md5_attributes {
            map.serialize_entry("MD5OfMessageAttributes", md5)?;
            map.serialize_entry("MessageAttributes", &MessageAttributes(&self.attributes))?;
        }
        map.end()
    }
}

struct MessageAttributes<'a>(&'a Attributes);

impl Serialize for MessageAttributes<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "PascalCase")]
        struct Value<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            string_value: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            binary_value: Option<String>,
            data_type: &'a str,
        }
        to.collect_map(self.0.iter().map(|(name, attribute)| {
            let (string_value, binary_value) = match &attribute.value {
                AttributeValue::Text(text) => (Some(text.as_str()), None),
                AttributeValue::Binary(bytes) => (None, Some(base64(bytes))),
            };
            (name, Value { string_value, binary_value, data_type: &attribute.data_type })
        }))
    }
}

/// A body as text. The strict check handles many bytes at once, the lossy one byte by byte.
pub(crate) fn text_of(body: &[u8]) -> Cow<'_, str> {
    std::str::from_utf8(body).map_or_else(|_| String::from_utf8_lossy(body), Cow::Borrowed)
}

/// A sequence number in SQS's form: 20 digits, the first of them not zero. No run of zeros in it can be mistaken for
/// the default account.
pub(crate) fn sequence_number(sequence: u64) -> String {
    const FIRST: u64 = 11_111_111_111_000_000_000;
    FIRST.saturating_add(sequence).to_string()
}

/// Standard base64, as in both protocols.
pub(crate) fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

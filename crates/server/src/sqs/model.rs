//! Requests of clients, independent of the protocol. Names and types are SQS's own. Everything is optional here, so
//! that one place, the operation, reports what is missing.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as DeError, Visitor};

use super::error::{Result, SqsError};
use super::json;
use super::query::{Form, FromForm};

/// Text that borrows from the request if possible.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Text<'a>(pub(crate) Cow<'a, str>);

impl Text<'_> {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: DeError>(self, text: &'de str) -> std::result::Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: DeError>(self, text: &str) -> std::result::Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        from.deserialize_str(TextVisitor)
    }
}

/// A queue attribute's value: text in SQS, but clients also send numbers and booleans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextOrNumber(pub(crate) String);

impl<'de> Deserialize<'de> for TextOrNumber {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        match serde_json::Value::deserialize(from)? {
            serde_json::Value::String(text) => Ok(Self(text)),
            serde_json::Value::Null => Ok(Self(String::new())),
            other => Ok(Self(other.to_string())),
        }
    }
}

macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident : $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Default, Deserialize)]
            #[serde(rename_all = "PascalCase", default, bound(deserialize = "'de: 'a"))]
            pub(crate) struct $name<'a> {
                $($(#[$attribute])* pub(crate) $field: Option<$type>,)*
            }
        )*
    };
}

/// A message attribute as sent.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct AttributeInput<'a> {
    #[serde(borrow)]
    pub(crate) data_type: Option<Text<'a>>,
    #[serde(borrow)]
    pub(crate) string_value: Option<Text<'a>>,
    /// Base64 in both protocols.
    #[serde(borrow)]
    pub(crate) binary_value: Option<Text<'a>>,
    /// Reserved by SQS; rejected if set.
    pub(crate) string_list_values: Option<serde_json::Value>,
    /// Reserved by SQS; rejected if set.
    pub(crate) binary_list_values: Option<serde_json::Value>,
}

pub(crate) type AttributeInputs<'a> = BTreeMap<Text<'a>, AttributeInput<'a>>;
pub(crate) type Settings = BTreeMap<String, TextOrNumber>;

requests! {
    SendMessage {
        queue_url: Text<'a>,
        message_body: Text<'a>,
        delay_seconds: i64,
        message_attributes: AttributeInputs<'a>,
        message_system_attributes: AttributeInputs<'a>,
        message_deduplication_id: Text<'a>,
        message_group_id: Text<'a>,
    }
    SendEntry {
        id: Text<'a>,
        message_body: Text<'a>,
        delay_seconds: i64,
        message_attributes: AttributeInputs<'a>,
        message_system_attributes: AttributeInputs<'a>,
        message_deduplication_id: Text<'a>,
        message_group_id: Text<'a>,
    }
    SendMessageBatch { queue_url: Text<'a>, entries: Vec<SendEntry<'a>> }
    ReceiveMessage {
        queue_url: Text<'a>,
        attribute_names: Vec<Text<'a>>,
        message_system_attribute_names: Vec<Text<'a>>,
        message_attribute_names: Vec<Text<'a>>,
        max_number_of_messages: i64,
        visibility_timeout: i64,
        wait_time_seconds: i64,
        receive_request_attempt_id: Text<'a>,
    }
    DeleteMessage { queue_url: Text<'a>, receipt_handle: Text<'a> }
    /// Also used as the entry of a visibility change.
    SettleEntry { id: Text<'a>, receipt_handle: Text<'a>, visibility_timeout: i64 }
    /// Deletes or visibility changes.
    SettleBatch { queue_url: Text<'a>, entries: Vec<SettleEntry<'a>> }
    ChangeMessageVisibility { queue_url: Text<'a>, receipt_handle: Text<'a>, visibility_timeout: i64 }
    CreateQueue { queue_name: Text<'a>, attributes: Settings, #[serde(rename = "tags", alias = "Tags")] tags: Settings }
    GetQueueUrl { queue_name: Text<'a> }
    /// Requests with a queue as their only parameter.
    QueueOnly { queue_url: Text<'a> }
    ListQueues { queue_name_prefix: Text<'a>, max_results: i64, next_token: Text<'a> }
    ListDeadLetterSourceQueues { queue_url: Text<'a>, max_results: i64, next_token: Text<'a> }
    GetQueueAttributes { queue_url: Text<'a>, attribute_names: Vec<Text<'a>> }
    SetQueueAttributes { queue_url: Text<'a>, attributes: Settings }
    TagQueue { queue_url: Text<'a>, tags: Settings }
    UntagQueue { queue_url: Text<'a>, tag_keys: Vec<Text<'a>> }
    AddPermission {
        queue_url: Text<'a>,
        label: Text<'a>,
        #[serde(rename = "AWSAccountIds")]
        aws_account_ids: Vec<Text<'a>>,
        actions: Vec<Text<'a>>,
    }
    RemovePermission { queue_url: Text<'a>, label: Text<'a> }
    StartMessageMoveTask {
        source_arn: Text<'a>,
        destination_arn: Text<'a>,
        max_number_of_messages_per_second: i64,
    }
    ListMessageMoveTasks { source_arn: Text<'a>, max_results: i64 }
    CancelMessageMoveTask { task_handle: Text<'a> }
}

macro_rules! actions {
    ($($name:ident($type:ident)),* $(,)?) => {
        /// The 23 actions.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Action {
            $($name,)*
        }

        impl Action {
            #[cfg(test)]
            pub(crate) const ALL: &'static [Self] = &[$(Self::$name),*];

            pub(crate) fn from_name(name: &str) -> Option<Self> {
                match name {
                    $(stringify!($name) => Some(Self::$name),)*
                    _ => None,
                }
            }

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }
        }

        /// A decoded request.
        #[derive(Debug)]
        pub(crate) enum Call<'a> {
            $($name($type<'a>),)*
        }

        impl<'a> Call<'a> {
            /// Decodes AWS JSON 1.0.
            pub(crate) fn from_json(action: Action, body: &'a [u8]) -> Result<Self> {
                match action {
                    $(Action::$name => json::decode::<$type<'a>>(body).map(Self::$name),)*
                }
            }

            /// Decodes the Query protocol.
            pub(crate) fn from_form(action: Action, form: &Form<'a>) -> Result<Self> {
                match action {
                    $(Action::$name => <$type<'a> as FromForm<'a>>::from_form(form).map(Self::$name),)*
                }
            }
        }
    };
}

actions! {
    AddPermission(AddPermission),
    CancelMessageMoveTask(CancelMessageMoveTask),
    ChangeMessageVisibility(ChangeMessageVisibility),
    ChangeMessageVisibilityBatch(SettleBatch),
    CreateQueue(CreateQueue),
    DeleteMessage(DeleteMessage),
    DeleteMessageBatch(SettleBatch),
    DeleteQueue(QueueOnly),
    GetQueueAttributes(GetQueueAttributes),
    GetQueueUrl(GetQueueUrl),
    ListDeadLetterSourceQueues(ListDeadLetterSourceQueues),
    ListMessageMoveTasks(ListMessageMoveTasks),
    ListQueueTags(QueueOnly),
    ListQueues(ListQueues),
    PurgeQueue(QueueOnly),
    ReceiveMessage(ReceiveMessage),
    RemovePermission(RemovePermission),
    SendMessage(SendMessage),
    SendMessageBatch(SendMessageBatch),
    SetQueueAttributes(SetQueueAttributes),
    StartMessageMoveTask(StartMessageMoveTask),
    TagQueue(TagQueue),
    UntagQueue(UntagQueue),
}

/// A required parameter. Empty text counts as missing, as in SQS.
pub(crate) fn required<'t>(value: Option<&'t Text<'_>>, parameter: &str) -> Result<&'t str> {
    value.map(Text::as_str).filter(|text| !text.is_empty()).ok_or_else(|| SqsError::missing(parameter))
}

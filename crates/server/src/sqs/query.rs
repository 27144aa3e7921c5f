//! Parsing of the Query protocol: flattened lists and maps in a form.

use std::borrow::Cow;

use super::error::{Result, SqsError};
use super::form::form_pairs;
use super::model::{
    AddPermission, AttributeInput, AttributeInputs, CancelMessageMoveTask, ChangeMessageVisibility,
    CreateQueue, DeleteMessage, GetQueueAttributes, GetQueueUrl, ListDeadLetterSourceQueues,
    ListMessageMoveTasks, ListQueues, QueueOnly, ReceiveMessage, RemovePermission, SendEntry, SendMessage,
    SendMessageBatch, SetQueueAttributes, Settings, SettleBatch, SettleEntry, StartMessageMoveTask, TagQueue,
    Text, TextOrNumber, UntagQueue,
};

/// Maximum number of parameters per request: ten messages with ten attributes each take fewer than 600.
const PARAMETERS_MAX: usize = 4096;

/// A request's parameters, sorted by name.
#[derive(Debug)]
pub(crate) struct Form<'a> {
    pairs: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> Form<'a> {
    /// Reads parameters from the query and from the body. The first value of a name counts.
    pub(crate) fn read(query: &'a str, body: &'a str) -> Result<Self> {
        let mut pairs: Vec<_> = form_pairs(query).chain(form_pairs(body)).take(PARAMETERS_MAX + 1).collect();
        if pairs.len() > PARAMETERS_MAX {
            return Err(SqsError::invalid(format!("A request has at most {PARAMETERS_MAX} parameters.")));
        }
        // Stable, so that the first value of a name stays first.
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self { pairs })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Cow<'a, str>> {
        let at = self.pairs.partition_point(|(key, _)| key.as_ref() < name);
        self.pairs.get(at).filter(|(key, _)| key == name).map(|(_, value)| value)
    }

    fn text(&self, name: &str) -> Option<Text<'a>> {
        self.get(name).map(|value| Text(value.clone()))
    }

    fn int(&self, name: &str) -> Result<Option<i64>> {
        let Some(value) = self.get(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        let parsed = value.trim().parse();
        parsed.map(Some).map_err(|_| SqsError::value(name, value, "Must be an integer."))
    }

    /// The numbers N of all parameters `prefix.N` or `prefix.N.…`, in order.
    fn indices(&self, prefix: &str) -> Vec<u64> {
        let from = self.pairs.partition_point(|(key, _)| key.as_ref() < prefix);
        let mut indices: Vec<u64> = self.pairs[from..]
            .iter()
            .map_while(|(key, _)| key.strip_prefix(prefix))
            .filter_map(|rest| rest.strip_prefix('.')?.split('.').next()?.parse().ok())
            .collect();
        indices.sort_unstable();
        indices.dedup();
        indices
    }

    fn list<T>(&self, prefix: &str, read: impl Fn(&str) -> Result<T>) -> Result<Option<Vec<T>>> {
        let indices = self.indices(prefix);
        if indices.is_empty() {
            return Ok(None);
        }
        indices.iter().map(|index| read(&format!("{prefix}.{index}"))).collect::<Result<Vec<T>>>().map(Some)
    }

    /// A list of texts. A single one may come without a number, as in `AttributeName=All`.
    fn texts(&self, prefix: &str) -> Option<Vec<Text<'a>>> {
        let numbered: Vec<_> =
            self.indices(prefix).iter().filter_map(|index| self.text(&format!("{prefix}.{index}"))).collect();
        if numbered.is_empty() { self.text(prefix).map(|text| vec![text]) } else { Some(numbered) }
    }

    /// A flattened map, for example `Attribute.1.Name` and `Attribute.1.Value`.
    fn settings(&self, prefix: &str, key: &str) -> Option<Settings> {
        let indices = self.indices(prefix);
        if indices.is_empty() {
            return None;
        }
        let part = |index: &u64, part: &str| {
            self.get(&format!("{prefix}.{index}.{part}")).map(|text| text.as_ref().to_owned())
        };
        let pair =
            |index: &u64| Some((part(index, key)?, TextOrNumber(part(index, "Value").unwrap_or_default())));
        Some(indices.iter().filter_map(pair).collect())
    }

    fn message_attributes(&self, prefix: &str) -> Option<AttributeInputs<'a>> {
        let indices = self.indices(prefix);
        if indices.is_empty() {
            return None;
        }
        let attribute = |index: &u64| {
            let at = format!("{prefix}.{index}");
            let value = |part: &str| self.text(&format!("{at}.Value.{part}"));
            let list = |part: &str| {
                let there = !self.indices(&format!("{at}.Value.{part}")).is_empty();
                there.then_some(serde_json::Value::Bool(true))
            };
            let attribute = AttributeInput {
                data_type: value("DataType"),
                string_value: value("StringValue"),
                binary_value: value("BinaryValue"),
                string_list_values: list("StringListValue"),
                binary_list_values: list("BinaryListValue"),
            };
            Some((self.text(&format!("{at}.Name"))?, attribute))
        };
        Some(indices.iter().filter_map(attribute).collect())
    }
}

/// Decoded from a form.
pub(crate) trait FromForm<'a>: Sized {
    fn from_form(form: &Form<'a>) -> Result<Self>;
}

/// A parameter, parsed as the type that the request declares.
trait Parameter<'a>: Sized {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>>;
}

impl<'a> Parameter<'a> for Text<'a> {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>> {
        Ok(form.text(name))
    }
}

impl<'a> Parameter<'a> for i64 {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>> {
        form.int(name)
    }
}

impl<'a> Parameter<'a> for Vec<Text<'a>> {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>> {
        Ok(form.texts(name))
    }
}

impl<'a> Parameter<'a> for AttributeInputs<'a> {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>> {
        Ok(form.message_attributes(name))
    }
}

impl<'a> Parameter<'a> for Settings {
    fn read(form: &Form<'a>, name: &str) -> Result<Option<Self>> {
        Ok(form.settings(name, if name == "Tag" { "Key" } else { "Name" }))
    }
}

/// Most requests are a list of fields with the names of their parameters.
macro_rules! from_form {
    ($($type:ident { $($field:ident: $name:literal),* $(,)? })*) => {
        $(impl<'a> FromForm<'a> for $type<'a> {
            fn from_form(form: &Form<'a>) -> Result<Self> {
                Ok(Self { $($field: Parameter::read(form, $name)?,)* })
            }
        })*
    };
}

from_form! {
    ReceiveMessage {
        queue_url: "QueueUrl",
        attribute_names: "AttributeName",
        message_system_attribute_names: "MessageSystemAttributeName",
        message_attribute_names: "MessageAttributeName",
        max_number_of_messages: "MaxNumberOfMessages",
        visibility_timeout: "VisibilityTimeout",
        wait_time_seconds: "WaitTimeSeconds",
        receive_request_attempt_id: "ReceiveRequestAttemptId",
    }
    SendMessage {
        queue_url: "QueueUrl",
        message_body: "MessageBody",
        delay_seconds: "DelaySeconds",
        message_attributes: "MessageAttribute",
        message_system_attributes: "MessageSystemAttribute",
        message_deduplication_id: "MessageDeduplicationId",
        message_group_id: "MessageGroupId",
    }
    DeleteMessage { queue_url: "QueueUrl", receipt_handle: "ReceiptHandle" }
    ChangeMessageVisibility {
        queue_url: "QueueUrl",
        receipt_handle: "ReceiptHandle",
        visibility_timeout: "VisibilityTimeout",
    }
    CreateQueue {
        queue_name: "QueueName",
        attributes: "Attribute",
        tags: "Tag",
    }
    GetQueueUrl { queue_name: "QueueName" }
    QueueOnly { queue_url: "QueueUrl" }
    ListQueues {
        queue_name_prefix: "QueueNamePrefix",
        max_results: "MaxResults",
        next_token: "NextToken",
    }
    ListDeadLetterSourceQueues {
        queue_url: "QueueUrl",
        max_results: "MaxResults",
        next_token: "NextToken",
    }
    GetQueueAttributes { queue_url: "QueueUrl", attribute_names: "AttributeName" }
    SetQueueAttributes { queue_url: "QueueUrl", attributes: "Attribute" }
    TagQueue { queue_url: "QueueUrl", tags: "Tag" }
    UntagQueue { queue_url: "QueueUrl", tag_keys: "TagKey" }
    AddPermission {
        queue_url: "QueueUrl",
        label: "Label",
        aws_account_ids: "AWSAccountId",
        actions: "ActionName",
    }
    RemovePermission { queue_url: "QueueUrl", label: "Label" }
    StartMessageMoveTask {
        source_arn: "SourceArn",
        destination_arn: "DestinationArn",
        max_number_of_messages_per_second: "MaxNumberOfMessagesPerSecond",
    }
    ListMessageMoveTasks { source_arn: "SourceArn", max_results: "MaxResults" }
    CancelMessageMoveTask { task_handle: "TaskHandle" }
}

impl<'a> FromForm<'a> for SendMessageBatch<'a> {
    fn from_form(form: &Form<'a>) -> Result<Self> {
        let entries = form.list("SendMessageBatchRequestEntry", |at| {
            let text = |part: &str| form.text(&format!("{at}.{part}"));
            Ok(SendEntry {
                id: text("Id"),
                message_body: text("MessageBody"),
                delay_seconds: form.int(&format!("{at}.DelaySeconds"))?,
                message_attributes: form.message_attributes(&format!("{at}.MessageAttribute")),
                message_system_attributes: form.message_attributes(&format!("{at}.MessageSystemAttribute")),
                message_deduplication_id: text("MessageDeduplicationId"),
                message_group_id: text("MessageGroupId"),
            })
        })?;
        Ok(Self { queue_url: form.text("QueueUrl"), entries })
    }
}

impl<'a> FromForm<'a> for SettleBatch<'a> {
    fn from_form(form: &Form<'a>) -> Result<Self> {
        let entry = |at: &str| {
            let text = |part: &str| form.text(&format!("{at}.{part}"));
            Ok(SettleEntry {
                id: text("Id"),
                receipt_handle: text("ReceiptHandle"),
                visibility_timeout: form.int(&format!("{at}.VisibilityTimeout"))?,
            })
        };
        let entries = match form.list("DeleteMessageBatchRequestEntry", entry)? {
            None => form.list("ChangeMessageVisibilityBatchRequestEntry", entry)?,
            deletes => deletes,
        };
        Ok(Self { queue_url: form.text("QueueUrl"), entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_maps_are_flattened() {
        let body = "QueueUrl=q&SendMessageBatchRequestEntry.2.Id=b&SendMessageBatchRequestEntry.2.MessageBody=two\
            &SendMessageBatchRequestEntry.10.Id=c&SendMessageBatchRequestEntry.1.Id=a\
            &SendMessageBatchRequestEntry.1.MessageBody=one%20%26\
            &SendMessageBatchRequestEntry.1.MessageAttribute.1.Name=n\
            &SendMessageBatchRequestEntry.1.MessageAttribute.1.Value.DataType=Number\
            &SendMessageBatchRequestEntry.1.MessageAttribute.1.Value.StringValue=7";
        let batch = SendMessageBatch::from_form(&Form::read("", body).unwrap()).unwrap();
        let entries = batch.entries.unwrap();
        let ids: Vec<_> = entries.iter().map(|entry| entry.id.as_ref().unwrap().as_str()).collect();
        assert_eq!(ids, ["a", "b", "c"]);
        assert_eq!(entries[0].message_body.as_ref().unwrap().as_str(), "one &");
        let attributes = entries[0].message_attributes.as_ref().unwrap();
        let (name, value) = attributes.first_key_value().unwrap();
        assert_eq!((name.as_str(), value.data_type.as_ref().unwrap().as_str()), ("n", "Number"));
    }

    #[test]
    fn a_prefix_is_not_mistaken_for_another_list() {
        let form = Form::read("AttributeName.1=All&AttributeNames.1=x&AttributeName=y", "").unwrap();
        let names = form.texts("AttributeName").unwrap();
        assert_eq!(names.len(), 1);
        assert_eq!(names[0].as_str(), "All");
    }

    #[test]
    fn numbers_have_to_be_numbers() {
        let form = Form::read("WaitTimeSeconds=soon", "").unwrap();
        let error = ReceiveMessage::from_form(&form).unwrap_err();
        assert!(error.message.contains("WaitTimeSeconds"), "{error:?}");
    }
}

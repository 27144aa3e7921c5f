//! Responses of the Query protocol.

use std::fmt::Write as _;

use hapax_core::{AttributeValue, Attributes};

use super::error::{ErrorKind, SqsError};
use super::model::Action;
use super::output::{BatchOutput, MessageOutput, MoveTaskOutput, Output, QueuePage, SentOutput, base64};

const NAMESPACE: &str = "http://queue.amazonaws.com/doc/2012-11-05/";

pub(crate) fn encode(action: Action, output: &Output, request_id: &str) -> Vec<u8> {
    let mut xml = Xml(String::with_capacity(1024));
    let name = action.name();
    let _ = write!(xml.0, "<?xml version=\"1.0\"?><{name}Response xmlns=\"{NAMESPACE}\">");
    if !matches!(output, Output::Empty) {
        let from = xml.0.len();
        let _ = write!(xml.0, "<{name}Result>");
        let inner = xml.0.len();
        xml.output(output);
        if xml.0.len() == inner {
            xml.0.truncate(from);
            let _ = write!(xml.0, "<{name}Result/>");
        } else {
            let _ = write!(xml.0, "</{name}Result>");
        }
    }
    xml.0.push_str("<ResponseMetadata>");
    xml.element("RequestId", request_id);
    let _ = write!(xml.0, "</ResponseMetadata></{name}Response>");
    xml.0.into_bytes()
}

pub(crate) fn encode_error(error: &SqsError, request_id: &str) -> Vec<u8> {
    if error.kind == ErrorKind::UnknownOperation {
        // AWS responds like this before it determines the protocol.
        return b"<UnknownOperationException/>\n".to_vec();
    }
    let wire = error.kind.wire();
    let mut xml = Xml(String::with_capacity(512));
    let _ = write!(xml.0, "<?xml version=\"1.0\"?><ErrorResponse xmlns=\"{NAMESPACE}\"><Error>");
    xml.element("Type", wire.fault());
    xml.element("Code", wire.code);
    // The only message that differs between the two protocols in AWS.
    let message = match error.kind {
        ErrorKind::QueueDoesNotExist => "The specified queue does not exist for this wsdl version.",
        _ => &error.message,
    };
    xml.element("Message", message);
    xml.0.push_str("<Detail/></Error>");
    xml.element("RequestId", request_id);
    xml.0.push_str("</ErrorResponse>");
    xml.0.into_bytes()
}

struct Xml(String);

impl Xml {
    fn element(&mut self, name: &str, text: &str) {
        let _ = write!(self.0, "<{name}>");
        self.text(text);
        let _ = write!(self.0, "</{name}>");
    }

    fn within(&mut self, name: &str, inner: impl FnOnce(&mut Self)) {
        let _ = write!(self.0, "<{name}>");
        inner(self);
        let _ = write!(self.0, "</{name}>");
    }

    /// Escapes the text, and replaces characters that XML cannot represent (they may come from another protocol).
    fn text(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                // An XML parser would convert it to a line feed.
                '\r' => self.0.push_str("&#13;"),
                c if is_xml(c) => self.0.push(c),
                _ => self.0.push('\u{fffd}'),
            }
        }
    }

    fn pair(&mut self, element: &str, key: &str, name: &str, value: &str) {
        self.within(element, |xml| {
            xml.element(key, name);
            xml.element("Value", value);
        });
    }

    fn output(&mut self, output: &Output) {
        match output {
            Output::Empty => {}
            Output::QueueUrl(url) => self.element("QueueUrl", url),
            Output::Queues(page) | Output::Sources(page) => self.queues(page),
            Output::Attributes(attributes) => {
                for (name, value) in attributes {
                    self.pair("Attribute", "Name", name, value);
                }
            }
            Output::Tags(tags) => {
                for (key, value) in tags {
                    self.pair("Tag", "Key", key, value);
                }
            }
            Output::Sent(sent) => self.sent(sent),
            Output::SentBatch(batch) => self.batch("SendMessageBatchResultEntry", batch, Self::sent),
            Output::DeletedBatch(batch) => self.batch("DeleteMessageBatchResultEntry", batch, |_, ()| {}),
            Output::ChangedBatch(batch) => {
                self.batch("ChangeMessageVisibilityBatchResultEntry", batch, |_, ()| {});
            }
            Output::Messages(messages) => {
                for message in messages {
                    self.within("Message", |xml| xml.message(message));
                }
            }
            Output::MoveStarted(handle) => self.element("TaskHandle", handle),
            Output::MoveCancelled(moved) => {
                self.element("ApproximateNumberOfMessagesMoved", &moved.to_string());
            }
            Output::Moves(moves) => {
                for task in moves {
                    self.within("ListMessageMoveTasksResultEntry", |xml| xml.move_task(task));
                }
            }
        }
    }

    fn queues(&mut self, page: &QueuePage) {
        for url in &page.urls {
            self.element("QueueUrl", url);
        }
        if let Some(next) = &page.next {
            self.element("NextToken", next);
        }
    }

    fn sent(&mut self, sent: &SentOutput) {
        self.element("MessageId", &sent.id);
        self.element("MD5OfMessageBody", &sent.md5_body);
        for (name, value) in [
            ("MD5OfMessageAttributes", &sent.md5_attributes),
            ("MD5OfMessageSystemAttributes", &sent.md5_system_attributes),
            ("SequenceNumber", &sent.sequence),
        ] {
            if let Some(value) = value {
                self.element(name, value);
            }
        }
    }

    fn batch<T>(&mut self, element: &str, batch: &BatchOutput<T>, entry: impl Fn(&mut Self, &T)) {
        for (id, success) in &batch.successful {
            self.within(element, |xml| {
                xml.element("Id", id);
                entry(xml, success);
            });
        }
        for (id, error) in &batch.failed {
            let wire = error.kind.wire();
            self.within("BatchResultErrorEntry", |xml| {
                xml.element("Id", id);
                xml.element("SenderFault", if wire.status.is_server_error() { "false" } else { "true" });
                xml.element("Code", wire.code);
                xml.element("Message", &error.message);
            });
        }
    }

    fn message(&mut self, message: &MessageOutput) {
        self.element("MessageId", &message.id);
        self.element("ReceiptHandle", &message.receipt);
        self.element("MD5OfBody", &message.md5_body);
        self.element("Body", &message.text());
        for (name, value) in &message.system {
            self.pair("Attribute", "Name", name, value);
        }
        if let Some(md5) = &message.md5_attributes {
            self.element("MD5OfMessageAttributes", md5);
            self.attributes(&message.attributes);
        }
    }

    fn attributes(&mut self, attributes: &Attributes) {
        for (name, attribute) in attributes {
            self.within("MessageAttribute", |xml| {
                xml.element("Name", name);
                xml.within("Value", |xml| {
                    match &attribute.value {
                        AttributeValue::Text(text) => xml.element("StringValue", text),
                        AttributeValue::Binary(bytes) => xml.element("BinaryValue", &base64(bytes)),
                    }
                    xml.element("DataType", &attribute.data_type);
                });
            });
        }
    }

    fn move_task(&mut self, task: &MoveTaskOutput) {
        let number = |n: u64| Some(n.to_string());
        for (name, value) in [
            ("TaskHandle", task.task_handle.clone()),
            ("Status", Some(task.status.to_owned())),
            ("SourceArn", Some(task.source_arn.clone())),
            ("DestinationArn", task.destination_arn.clone()),
            ("MaxNumberOfMessagesPerSecond", task.max_number_of_messages_per_second.map(|n| n.to_string())),
            ("ApproximateNumberOfMessagesMoved", number(task.approximate_number_of_messages_moved)),
            ("ApproximateNumberOfMessagesToMove", number(task.approximate_number_of_messages_to_move)),
            ("FailureReason", task.failure_reason.clone()),
            ("StartedTimestamp", number(task.started_timestamp)),
        ] {
            if let Some(value) = value {
                self.element(name, &value);
            }
        }
    }
}

/// Whether XML 1.0 allows the character: #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF.
pub(crate) fn is_xml(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_have_aws_s_shape() {
        let output = Output::QueueUrl("http://h/1/q?a&b".into());
        assert_eq!(
            String::from_utf8(encode(Action::GetQueueUrl, &output, "id-1")).unwrap(),
            "<?xml version=\"1.0\"?><GetQueueUrlResponse xmlns=\"http://queue.amazonaws.com/doc/2012-11-05/\">\
             <GetQueueUrlResult><QueueUrl>http://h/1/q?a&amp;b</QueueUrl></GetQueueUrlResult>\
             <ResponseMetadata><RequestId>id-1</RequestId></ResponseMetadata></GetQueueUrlResponse>"
        );
    }

    #[test]
    fn errors_have_aws_s_shape() {
        let error = SqsError::new(ErrorKind::OverLimit, "no <queue>\u{0}");
        let xml = String::from_utf8(encode_error(&error, "id-2")).unwrap();
        assert!(xml.contains("<Type>Sender</Type><Code>OverLimit</Code>"), "{xml}");
        assert!(xml.contains("<Message>no &lt;queue&gt;\u{fffd}</Message><Detail/></Error>"), "{xml}");
    }
}

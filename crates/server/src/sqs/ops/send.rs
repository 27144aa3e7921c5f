//! SendMessage and SendMessageBatch.

use bytes::Bytes;
use hapax_core::policy::MESSAGE_BYTES_MAX;
use hapax_core::{
    Attribute, DedupId, GroupId, NewMessage, QueueName, SendError, Sent, TRACE_ATTRIBUTE, TRACE_BYTES_MAX,
};

use super::super::digest;
use super::super::error::{ErrorKind, Result, SqsError, too_large};
use super::super::message_attributes::{self, TRACE_HEADER, check_text};
use super::super::model::{AttributeInputs, SendMessage, SendMessageBatch, Text, required};
use super::super::output::{BatchOutput, Output, SentOutput, sequence_number};
use super::{CallContext, Operations, batch, in_range};

/// A message to send, from either action.
struct MessageInput<'a> {
    body: Option<&'a Text<'a>>,
    delay_seconds: Option<i64>,
    attributes: Option<&'a AttributeInputs<'a>>,
    system_attributes: Option<&'a AttributeInputs<'a>>,
    dedup: Option<&'a Text<'a>>,
    group: Option<&'a Text<'a>>,
    /// The `X-Amzn-Trace-Id` header of the HTTP request.
    http_trace: Option<&'a str>,
}

/// A message ready for the store, and the digests for its sender.
struct PreparedSend {
    message: NewMessage,
    md5_body: String,
    md5_attributes: Option<String>,
    md5_system_attributes: Option<String>,
}

impl PreparedSend {
    fn new(queue: &QueueName, parts: &MessageInput<'_>) -> Result<Self> {
        let body = required(parts.body, "MessageBody")?;
        check_text(body)?;
        let fifo = queue.is_fifo();
        let delay_ms = delay_ms(parts.delay_seconds, fifo)?;
        let group = parts.group.map(|text| group_id(text.as_str())).transpose()?;
        let dedup = parts.dedup.map(|text| dedup_id(text.as_str(), fifo)).transpose()?;
        if fifo && group.is_none() {
            return Err(SqsError::missing("MessageGroupId"));
        }
        let mut attributes = message_attributes::user(parts.attributes)?;
        let md5_attributes = digest::of_attributes(attributes.iter().map(|(name, a)| (name.as_str(), a)));
        let trace: Option<Attribute> = message_attributes::system(parts.system_attributes)?;
        let md5_system_attributes = digest::of_attributes(trace.iter().map(|a| (TRACE_HEADER, a)));
        // The sender's trace header takes precedence over the request's, whose digest is not returned.
        if let Some(trace) = trace.or_else(|| parts.http_trace.and_then(http_trace)) {
            attributes.insert(TRACE_ATTRIBUTE.to_owned(), trace);
        }
        let md5_body = digest::of_body(body.as_bytes());
        let body = Bytes::copy_from_slice(body.as_bytes());
        let message = NewMessage { body, attributes, delay_ms, group, dedup, ..NewMessage::default() };
        Ok(Self { message, md5_body, md5_attributes, md5_system_attributes })
    }
}

/// A trace header of HTTP as an attribute; `None` if it could not be returned unchanged.
fn http_trace(header: &str) -> Option<Attribute> {
    let fits = (1..=TRACE_BYTES_MAX).contains(&header.len());
    (fits && header.bytes().all(|b| b.is_ascii_graphic() || b == b' ')).then(|| Attribute::text(header))
}

/// The digests alone, kept after the message was handed to the store.
struct Digests {
    body: String,
    attributes: Option<String>,
    system_attributes: Option<String>,
}

fn split(prepared: PreparedSend) -> (NewMessage, Digests) {
    let digests = Digests {
        body: prepared.md5_body,
        attributes: prepared.md5_attributes,
        system_attributes: prepared.md5_system_attributes,
    };
    (prepared.message, digests)
}

fn sent_output(queue: &QueueName, sent: Sent, digests: Digests) -> SentOutput {
    SentOutput {
        id: sent.id.to_string(),
        md5_body: digests.body,
        md5_attributes: digests.attributes,
        md5_system_attributes: digests.system_attributes,
        sequence: queue.is_fifo().then(|| sequence_number(sent.sequence)),
    }
}

fn delay_ms(seconds: Option<i64>, fifo: bool) -> Result<Option<u64>> {
    match seconds {
        None => Ok(None),
        // On a FIFO queue only the queue itself has a delay; zero counts as not set.
        Some(0) if fifo => Ok(None),
        Some(seconds) if fifo => Err(SqsError::value(
            "DelaySeconds",
            seconds,
            "The request include parameter that is not valid for this queue type.",
        )),
        Some(seconds) => in_range("DelaySeconds", seconds, 0, 900, "DelaySeconds must be >= 0 and <= 900.")
            .map(|seconds| Some(seconds * 1000)),
    }
}

fn group_id(text: &str) -> Result<GroupId> {
    let reason =
        "MessageGroupId can only include alphanumeric and punctuation characters. 1 to 128 in length.";
    GroupId::new(text).map_err(|_| SqsError::value("MessageGroupId", text, reason))
}

fn dedup_id(text: &str, fifo: bool) -> Result<DedupId> {
    if !fifo {
        let reason = "The request include parameter that is not valid for this queue type.";
        return Err(SqsError::value("MessageDeduplicationId", text, reason));
    }
    let reason = "MessageDeduplicationId can only include alphanumeric and punctuation characters. 1 to 128 in length.";
    DedupId::new(text).map_err(|_| SqsError::value("MessageDeduplicationId", text, reason))
}

impl Operations {
    pub(super) async fn send_message(
        &self,
        context: &CallContext<'_>,
        request: &SendMessage<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "SendMessage", request.queue_url.as_ref())?;
        let prepared = PreparedSend::new(
            &queue,
            &MessageInput {
                body: request.message_body.as_ref(),
                delay_seconds: request.delay_seconds,
                attributes: request.message_attributes.as_ref(),
                system_attributes: request.message_system_attributes.as_ref(),
                dedup: request.message_deduplication_id.as_ref(),
                group: request.message_group_id.as_ref(),
                http_trace: context.trace,
            },
        )?;
        if prepared.message.bytes() > MESSAGE_BYTES_MAX {
            return Err(too_large(MESSAGE_BYTES_MAX));
        }
        if prepared.message.dedup.is_none() {
            self.check_dedup(&queue).await?;
        }
        let (message, digests) = split(prepared);
        let mut answers = self.store.send(&queue, vec![message]).await?;
        match answers.pop() {
            Some(Ok(sent)) => Ok(Output::Sent(sent_output(&queue, sent, digests))),
            Some(Err(error)) => Err(error.into()),
            None => Err(SqsError::new(ErrorKind::InternalFailure, "The store gave no result.")),
        }
    }

    pub(super) async fn send_message_batch(
        &self,
        context: &CallContext<'_>,
        request: &SendMessageBatch<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "SendMessage", request.queue_url.as_ref())?;
        let entries = request.entries.as_deref().unwrap_or_default();
        let ids = batch::entry_ids(entries.iter().map(|e| e.id.as_ref()), "SendMessageBatchRequestEntry")?;
        if queue.is_fifo() {
            if entries.iter().any(|entry| entry.message_group_id.is_none()) {
                return Err(SqsError::invalid("The request must contain the parameter MessageGroupId."));
            }
            if entries.iter().any(|entry| entry.message_deduplication_id.is_none()) {
                self.check_dedup(&queue).await?;
            }
        }
        let (mut failed, mut messages, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        let mut bytes = 0;
        for (entry, id) in entries.iter().zip(ids) {
            let parts = MessageInput {
                body: entry.message_body.as_ref(),
                delay_seconds: entry.delay_seconds,
                attributes: entry.message_attributes.as_ref(),
                system_attributes: entry.message_system_attributes.as_ref(),
                dedup: entry.message_deduplication_id.as_ref(),
                group: entry.message_group_id.as_ref(),
                http_trace: context.trace,
            };
            match PreparedSend::new(&queue, &parts) {
                Ok(prepared) => {
                    bytes += prepared.message.bytes();
                    let (message, digests) = split(prepared);
                    messages.push(message);
                    waiting.push((id.to_owned(), digests));
                }
                Err(error) => {
                    bytes += entry.message_body.as_ref().map_or(0, |body| body.as_str().len()) as u64;
                    failed.push((id.to_owned(), error));
                }
            }
        }
        if bytes > MESSAGE_BYTES_MAX {
            let text = format!(
                "Batch requests cannot be longer than {MESSAGE_BYTES_MAX} bytes. You have sent {bytes} bytes."
            );
            return Err(SqsError::new(ErrorKind::BatchRequestTooLong, text));
        }
        let mut successful = Vec::with_capacity(waiting.len());
        if !messages.is_empty() {
            let answers = self.store.send(&queue, messages).await?;
            for ((id, digests), answer) in waiting.into_iter().zip(answers) {
                match answer {
                    Ok(sent) => successful.push((id, sent_output(&queue, sent, digests))),
                    Err(error) => failed.push((id, entry_error(error))),
                }
            }
        }
        Ok(Output::SentBatch(BatchOutput { successful, failed }))
    }

    /// Fails if a message has no deduplication id and its FIFO queue does not derive one from the content.
    async fn check_dedup(&self, queue: &QueueName) -> Result<()> {
        if !queue.is_fifo() || self.store.queue(queue).await?.config.dedup.content_based {
            return Ok(());
        }
        Err(SqsError::invalid(
            "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided \
             explicitly",
        ))
    }
}

/// The error of a batch entry; SQS words it differently there.
fn entry_error(error: SendError) -> SqsError {
    match error {
        SendError::TooLarge { bytes_max, .. } => SqsError::invalid(format!(
            "One or more parameters cannot be validated. Reason: Message must be shorter than {bytes_max} bytes."
        )),
        other => other.into(),
    }
}

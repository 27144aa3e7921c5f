//! ReceiveMessage.

use hapax_core::message::IDEMPOTENCY_KEY_ATTRIBUTE;
use hapax_core::{Attribute, Delivery, KeySource, Receive, TRACE_ATTRIBUTE};

use super::super::digest;
use super::super::error::{ErrorKind, Result, SqsError};
use super::super::message_attributes::{TRACE_HEADER, select};
use super::super::model::{ReceiveMessage, Text};
use super::super::output::{MessageOutput, Output, sequence_number, text_of};
use super::{CallContext, Operations, in_range, visibility_ms};
use crate::deliveries::{give_back, response_bytes};

/// The system attributes that a receive may request, in the order of the response.
const SYSTEM_ATTRIBUTES: [&str; 9] = [
    "SenderId",
    "ApproximateFirstReceiveTimestamp",
    "ApproximateReceiveCount",
    "SentTimestamp",
    "SequenceNumber",
    "MessageDeduplicationId",
    "MessageGroupId",
    TRACE_HEADER,
    "DeadLetterQueueSourceArn",
];

/// The attributes to return.
struct WantedAttributes<'a> {
    fifo: bool,
    system: Vec<&'static str>,
    user: &'a [Text<'a>],
}

impl<'a> WantedAttributes<'a> {
    fn new(request: &'a ReceiveMessage<'_>, fifo: bool) -> Self {
        let lists = [&request.attribute_names, &request.message_system_attribute_names];
        let names = || lists.into_iter().flatten().flatten().map(Text::as_str);
        let system = if names().next().is_none() {
            Vec::new()
        } else {
            let all = names().any(|name| name == "All");
            SYSTEM_ATTRIBUTES.into_iter().filter(|known| all || names().any(|name| name == *known)).collect()
        };
        Self { fifo, system, user: request.message_attribute_names.as_deref().unwrap_or_default() }
    }
}

fn receive_of(request: &ReceiveMessage<'_>) -> Result<Receive> {
    let max = request.max_number_of_messages.unwrap_or(1);
    let max = in_range("MaxNumberOfMessages", max, 1, 10, "Must be between 1 and 10, if provided.")?;
    let wait = |seconds| {
        in_range("WaitTimeSeconds", seconds, 0, 20, "Must be >= 0 and <= 20, if provided.")
            .map(|seconds| seconds * 1000)
    };
    Ok(Receive {
        max: max as usize,
        lease_ms: request.visibility_timeout.map(visibility_ms).transpose()?,
        wait_ms: request.wait_time_seconds.map(wait).transpose()?,
        consumer: None,
        ack_on_receive: false,
        attempt_id: None,
    })
}

fn attempt_id(request: &ReceiveMessage<'_>, fifo: bool) -> Result<Option<String>> {
    let Some(id) = request.receive_request_attempt_id.as_ref().map(Text::as_str) else { return Ok(None) };
    if !fifo {
        let reason = "The request include parameter that is not valid for this queue type.";
        return Err(SqsError::value("ReceiveRequestAttemptId", id, reason));
    }
    if id.is_empty() || id.len() > 128 || !id.bytes().all(|b| b.is_ascii_graphic()) {
        let reason = "ReceiveRequestAttemptId can only include alphanumeric and punctuation characters. 1 to 128 \
                      in length.";
        return Err(SqsError::value("ReceiveRequestAttemptId", id, reason));
    }
    Ok(Some(id.to_owned()))
}

impl Operations {
    pub(super) async fn receive_message(
        &self,
        context: &CallContext<'_>,
        request: &ReceiveMessage<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "ReceiveMessage", request.queue_url.as_ref())?;
        let mut receive = receive_of(request)?;
        receive.attempt_id = attempt_id(request, queue.is_fifo())?;
        receive.consumer = Some(context.peer.address.to_string());
        let short = receive.wait_ms == Some(0);
        let repeatable = receive.attempt_id.is_some();
        let receiving = self.store.receive(&queue, receive);
        let deliveries = if short {
            receiving.await
        } else {
            tokio::select! {
                biased;
                deliveries = receiving => deliveries,
                // Dropping a receive leases nothing: the long poll ends as if no message had arrived.
                () = self.shutdown.requested() => Ok(Vec::new()),
            }
        };
        let deliveries = deliveries.map_err(|error| match error {
            hapax_core::StoreError::TooManyInFlight { .. } => SqsError::new(
                ErrorKind::OverLimit,
                "Too many messages are in flight. Delete some, or let their visibility timeout run out.",
            ),
            other => other.into(),
        })?;
        if !context.budget.fits(response_bytes(&deliveries)) {
            // Under an attempt id they stay for the repeat, which may have been answered already.
            if !repeatable {
                give_back(self.store.as_ref(), &queue, &deliveries).await;
            }
            let text = "Too many responses wait to be read by their clients; retry with backoff.";
            return Err(SqsError::new(ErrorKind::ServiceUnavailable, text));
        }
        let wanted = WantedAttributes::new(request, queue.is_fifo());
        let messages = deliveries.into_iter().map(|delivery| self.message(delivery, &wanted)).collect();
        Ok(Output::Messages(messages))
    }

    fn message(&self, mut delivery: Delivery, wanted: &WantedAttributes<'_>) -> MessageOutput {
        let id = delivery.id.to_string();
        if delivery.key_source == KeySource::MessageId && delivery.key.as_str() != id {
            // Redriven: its key is its id before the redrive, and SQS has no other field for that.
            let key = Attribute::text(delivery.key.as_str());
            delivery.attributes.insert(IDEMPOTENCY_KEY_ATTRIBUTE.to_owned(), key);
        }
        let system = wanted
            .system
            .iter()
            .filter_map(|name| Some((*name, self.system_attribute(name, &delivery, wanted.fifo)?)))
            .collect();
        let attributes = if wanted.user.is_empty() {
            hapax_core::Attributes::new()
        } else {
            select(delivery.attributes, wanted.user)
        };
        let text = text_of(&delivery.body);
        MessageOutput {
            id,
            receipt: delivery.receipt.as_str().to_owned(),
            md5_body: digest::of_body(text.as_bytes()),
            md5_attributes: digest::of_attributes(attributes.iter().map(|(name, a)| (name.as_str(), a))),
            system,
            attributes,
            body: delivery.body,
        }
    }

    fn system_attribute(&self, name: &str, delivery: &Delivery, fifo: bool) -> Option<String> {
        match name {
            "SenderId" => Some(self.names.account.clone()),
            "ApproximateFirstReceiveTimestamp" => {
                let first =
                    delivery.dead.as_ref().map_or(delivery.first_received_ms, |d| d.first_received_ms);
                Some(first.to_string())
            }
            // As in SQS, the count continues in the dead-letter queue.
            "ApproximateReceiveCount" => Some(delivery.deliveries.to_string()),
            "SentTimestamp" => Some(delivery.sent_ms.to_string()),
            "SequenceNumber" => fifo.then(|| sequence_number(delivery.sequence)),
            "MessageDeduplicationId" => delivery.dedup.as_ref().map(ToString::to_string),
            "MessageGroupId" => delivery.group.as_ref().map(ToString::to_string),
            TRACE_HEADER => {
                let stored = delivery.attributes.get(TRACE_ATTRIBUTE)?;
                stored.as_text().map(str::to_owned)
            }
            "DeadLetterQueueSourceArn" => delivery.dead.as_ref().map(|dead| self.names.arn(&dead.source)),
            _ => None,
        }
    }
}

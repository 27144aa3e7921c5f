//! DeleteMessage and ChangeMessageVisibility, single and in batches.

use hapax_core::{Extend, QueueName, Receipt, Settle, SettleError};

use super::super::error::{ErrorKind, Result, SqsError, settle_error};
use super::super::model::{ChangeMessageVisibility, DeleteMessage, SettleBatch, SettleEntry, Text, required};
use super::super::output::{BatchOutput, Output};
use super::{CallContext, Operations, batch, visibility_ms};

/// Parses a receipt. A malformed one gets SQS's error for invalid handles.
fn receipt_of(handle: Option<&Text<'_>>) -> Result<Receipt> {
    let text = required(handle, "ReceiptHandle")?;
    Receipt::new(text).map_err(|_| settle_error(&SettleError::Malformed, text))
}

/// SQS's result of a delete. A standard queue ignores a superseded receipt: a message held by a newer delivery is not
/// deleted, but the client gets no error. A FIFO queue reports it. Both report a dead letter: nothing was deleted, and
/// a redrive would repeat its effect, which a client would not expect after a success.
fn delete_result(queue: &QueueName, receipt: &Receipt, error: &SettleError) -> Result<()> {
    match error {
        SettleError::Gone => Ok(()),
        SettleError::Stale | SettleError::Expired | SettleError::NotInFlight if !queue.is_fifo() => Ok(()),
        SettleError::NotInFlight => Err(settle_error(&SettleError::Expired, receipt.as_str())),
        other => Err(settle_error(other, receipt.as_str())),
    }
}

/// SQS's result of a visibility change.
fn change_error(queue: &QueueName, extend: &Extend, error: &SettleError) -> SqsError {
    let receipt = extend.receipt.as_str();
    match error {
        // Another delivery holds the message: this one is no longer in flight.
        SettleError::Stale if !queue.is_fifo() => settle_error(&SettleError::NotInFlight, receipt),
        SettleError::Dead => settle_error(&SettleError::Gone, receipt),
        SettleError::NotInFlight if queue.is_fifo() => settle_error(&SettleError::Expired, receipt),
        SettleError::LeaseTooLong { .. } => SqsError::value(
            "VisibilityTimeout",
            extend.lease_ms / 1000,
            "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]",
        ),
        other => settle_error(other, receipt),
    }
}

fn extend_of(handle: Option<&Text<'_>>, seconds: Option<i64>) -> Result<Extend> {
    let receipt = receipt_of(handle)?;
    let seconds = seconds.ok_or_else(|| SqsError::missing("VisibilityTimeout"))?;
    Ok(Extend { receipt, lease_ms: visibility_ms(seconds)?, own_lease: true })
}

/// The valid entries of a batch with their ids, and the errors of the others.
type ValidAndFailed<T> = (Vec<(String, T)>, Vec<(String, SqsError)>);

fn split_valid<'e, T>(
    request: &'e SettleBatch<'e>,
    name: &str,
    read: impl Fn(&'e SettleEntry<'e>) -> Result<T>,
) -> Result<ValidAndFailed<T>> {
    let entries = request.entries.as_deref().unwrap_or_default();
    let ids = batch::entry_ids(entries.iter().map(|entry| entry.id.as_ref()), name)?;
    let (mut good, mut failed) = (Vec::with_capacity(entries.len()), Vec::new());
    for (entry, id) in entries.iter().zip(ids) {
        match read(entry) {
            Ok(read) => good.push((id.to_owned(), read)),
            Err(error) => failed.push((id.to_owned(), error)),
        }
    }
    Ok((good, failed))
}

fn no_result() -> SqsError {
    SqsError::new(ErrorKind::InternalFailure, "The store gave no result.")
}

impl Operations {
    pub(super) async fn delete_message(
        &self,
        context: &CallContext<'_>,
        request: &DeleteMessage<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "DeleteMessage", request.queue_url.as_ref())?;
        let receipt = receipt_of(request.receipt_handle.as_ref())?;
        let mut answers = self.store.settle(&queue, vec![Settle::ack(receipt.clone())]).await?;
        match answers.pop().ok_or_else(no_result)? {
            Ok(_) => Ok(Output::Empty),
            Err(error) => delete_result(&queue, &receipt, &error).map(|()| Output::Empty),
        }
    }

    pub(super) async fn delete_message_batch(
        &self,
        context: &CallContext<'_>,
        request: &SettleBatch<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "DeleteMessage", request.queue_url.as_ref())?;
        let (good, mut failed) = split_valid(request, "DeleteMessageBatchRequestEntry", |entry| {
            receipt_of(entry.receipt_handle.as_ref())
        })?;
        let mut successful = Vec::with_capacity(good.len());
        if !good.is_empty() {
            let settles = good.iter().map(|(_, receipt)| Settle::ack(receipt.clone())).collect();
            let answers = self.store.settle(&queue, settles).await?;
            for ((id, receipt), answer) in good.into_iter().zip(answers) {
                match answer.map(drop).or_else(|error| delete_result(&queue, &receipt, &error)) {
                    Ok(()) => successful.push((id, ())),
                    Err(error) => failed.push((id, error)),
                }
            }
        }
        Ok(Output::DeletedBatch(BatchOutput { successful, failed }))
    }

    pub(super) async fn change_visibility(
        &self,
        context: &CallContext<'_>,
        request: &ChangeMessageVisibility<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "ChangeMessageVisibility", request.queue_url.as_ref())?;
        let extend = extend_of(request.receipt_handle.as_ref(), request.visibility_timeout)?;
        let mut answers = self.store.extend(&queue, vec![extend.clone()]).await?;
        match answers.pop().ok_or_else(no_result)? {
            Ok(_) => Ok(Output::Empty),
            Err(error) => Err(change_error(&queue, &extend, &error)),
        }
    }

    pub(super) async fn change_visibility_batch(
        &self,
        context: &CallContext<'_>,
        request: &SettleBatch<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "ChangeMessageVisibility", request.queue_url.as_ref())?;
        let (good, mut failed) = split_valid(request, "ChangeMessageVisibilityBatchRequestEntry", |entry| {
            extend_of(entry.receipt_handle.as_ref(), entry.visibility_timeout)
        })?;
        let mut successful = Vec::with_capacity(good.len());
        if !good.is_empty() {
            let extends = good.iter().map(|(_, extend)| extend.clone()).collect();
            let answers = self.store.extend(&queue, extends).await?;
            for ((id, extend), answer) in good.into_iter().zip(answers) {
                match answer {
                    Ok(_) => successful.push((id, ())),
                    Err(error) => failed.push((id, change_error(&queue, &extend, &error))),
                }
            }
        }
        Ok(Output::ChangedBatch(BatchOutput { successful, failed }))
    }
}

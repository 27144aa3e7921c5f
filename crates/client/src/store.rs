//! The queue seam over HTTP.

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::{
    Batch, Capabilities, Delivery, Extend, NewMessage, QueueName, QueueStore, Receive, RemainingLease,
    SendError, Sent, Settle, SettleError, Settled, Settlement, StoreError, policy, validate,
};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Client;
use crate::transport::{Effect, Failure, encode};
use crate::wire::{
    ExtendItem, ExtendRequest, ItemResult, Problem, Results, SendItem, SendRequest, SettleItem, SettleKind,
    SettleRequest, SettledItem, SettledKind,
};

/// Requests stay below this, well within what the server reads (8 MiB); larger batches are sent in parts.
pub(crate) const REQUEST_BYTES_MAX: usize = 6 * 1024 * 1024;

/// The server's limit for one request. A larger message exceeds the limit of every queue.
const SERVER_BYTES_MAX: usize = 8 * 1024 * 1024;

#[async_trait]
impl QueueStore for Client {
    fn capabilities(&self) -> Capabilities {
        self.cached_capabilities()
    }

    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        validate::batch("messages", batch.len())?;
        let parts = split_sends(batch)?;
        let count = parts.len();
        let mut answers = Vec::new();
        for (at, SendPart { messages, bytes, size }) in parts.into_iter().enumerate() {
            if messages.len() == 1 && size > SERVER_BYTES_MAX {
                // The server would refuse the request with an error that suggests a smaller batch.
                answers.push(Err(SendError::TooLarge { bytes, bytes_max: policy::MESSAGE_BYTES_MAX }));
                continue;
            }
            let expected = messages.len();
            let sent = self.batch(queue, "messages", &SendRequest { messages }, expected).await;
            match sent.and_then(|results| {
                convert_results(results, |sent| sent, |problem| Ok(problem.to_send_error()))
            }) {
                Ok(part) => answers.extend(part),
                Err(error) => return Err(partial_failure(error, at, count)),
            }
        }
        Ok(answers)
    }

    async fn receive(&self, queue: &QueueName, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        crate::receive::receive(self, queue, receive).await
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        validate::batch("settle", batch.len())?;
        let parts = split_settles(batch.into_iter().map(settle_item).collect());
        let (count, mut answers) = (parts.len(), Vec::new());
        for (at, settle) in parts.into_iter().enumerate() {
            let expected = settle.len();
            let part = self.batch(queue, "settle", &SettleRequest { settle }, expected).await;
            match part.and_then(|results| convert_results(results, settled, settle_error)) {
                Ok(part) => answers.extend(part),
                Err(error) => return Err(partial_failure(error, at, count)),
            }
        }
        Ok(answers)
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        validate::batch("extend", batch.len())?;
        let expected = batch.len();
        let item = |extend: Extend| ExtendItem {
            receipt: extend.receipt.into(),
            lease_ms: extend.lease_ms,
            own: extend.own_lease,
        };
        let extend = batch.into_iter().map(item).collect();
        let results = self.batch(queue, "extend", &ExtendRequest { extend }, expected).await?;
        convert_results(results, |remaining| remaining, settle_error)
    }
}

impl Client {
    async fn batch<B: Serialize, T: DeserializeOwned>(
        &self,
        queue: &QueueName,
        what: &str,
        body: &B,
        expected: usize,
    ) -> Result<Results<T>, StoreError> {
        let path = format!("/v1/queues/{queue}/{what}");
        let answer: Result<Results<T>, Failure> = self.transport.post(&path, body).await;
        let answer = answer.map_err(|failure| failure.into_store_error(Effect::Change))?;
        if answer.results.len() == expected {
            return Ok(answer);
        }
        let why = format!("the server gave {} results for {expected} elements", answer.results.len());
        Err(StoreError::OutcomeUnknown(why))
    }
}

/// The content of one request.
#[derive(Default)]
struct SendPart {
    messages: Vec<SendItem>,
    /// Bytes of bodies and attributes.
    bytes: u64,
    /// Approximate length of the request.
    size: usize,
}

/// Splits a batch so that each request stays below the server's limit.
fn split_sends(batch: Vec<NewMessage>) -> Result<Vec<SendPart>, StoreError> {
    let (mut parts, mut part) = (Vec::new(), SendPart::default());
    for message in batch {
        // Attributes are small compared with a body; their escapes fit into the margin.
        let bytes = message.bytes();
        let size = bytes as usize;
        let item = SendItem::from(message);
        let body = item.body.as_deref().or(item.body_base64.as_deref()).map_or(0, str::len);
        let size = 256 + if size > 64 * 1024 { encoded_len(&item)? } else { size.max(body) * 2 };
        if part.size + size > REQUEST_BYTES_MAX && part.size > 0 {
            parts.push(std::mem::take(&mut part));
        }
        part.size += size;
        part.bytes += bytes;
        part.messages.push(item);
    }
    parts.push(part);
    Ok(parts)
}

/// If part of a batch was done, the whole is neither done nor undone.
pub(crate) fn partial_failure(error: StoreError, at: usize, count: usize) -> StoreError {
    if at == 0 {
        return error;
    }
    StoreError::OutcomeUnknown(format!("part {} of {count} of a large batch failed: {error}", at + 1))
}

/// Splits a batch with large outcomes; each outcome is at most 1 MiB.
fn split_settles(batch: Vec<SettleItem>) -> Vec<Vec<SettleItem>> {
    let (mut parts, mut part, mut size) = (Vec::new(), Vec::new(), 0);
    for item in batch {
        let words = [&item.error, &item.reason].into_iter().flatten().map(String::len).sum::<usize>();
        let completion = item.claim.as_ref().and_then(|claim| claim.complete.as_ref());
        let outcome = completion.and_then(|completion| completion.outcome.as_ref());
        // Names and tokens fit into 4 KiB even if every character is escaped.
        let bytes = 4096 + words * 6 + outcome.map_or(0, |json| json.as_str().len());
        if size + bytes > REQUEST_BYTES_MAX && size > 0 {
            parts.push(std::mem::take(&mut part));
            size = 0;
        }
        size += bytes;
        part.push(item);
    }
    parts.push(part);
    parts
}

fn encoded_len(item: &SendItem) -> Result<usize, StoreError> {
    encode(item).map(|json: Bytes| json.len()).map_err(|failure| failure.into_store_error(Effect::None))
}

pub(crate) fn settle_item(settle: Settle) -> SettleItem {
    let claim = settle.claim.map(Into::into);
    let item = |how| SettleItem {
        receipt: settle.receipt.into(),
        how,
        after_ms: None,
        error: None,
        reason: None,
        claim,
        parked_for: settle.parked_for,
    };
    match settle.settlement {
        Settlement::Ack => item(SettleKind::Ack),
        Settlement::Retry { after_ms, error } => SettleItem { after_ms, error, ..item(SettleKind::Retry) },
        Settlement::Defer { after_ms } => SettleItem { after_ms: Some(after_ms), ..item(SettleKind::Defer) },
        Settlement::Park { reason } => SettleItem { reason: Some(reason), ..item(SettleKind::Park) },
        Settlement::Reject { reason } => SettleItem { reason: Some(reason), ..item(SettleKind::Reject) },
    }
}

fn settled(item: SettledItem) -> Settled {
    match item.settled {
        SettledKind::Acked => Settled::Acked,
        SettledKind::Returned => Settled::Returned { after_ms: item.after_ms.unwrap_or_default() },
        SettledKind::Dead => Settled::Dead,
        SettledKind::Parked => Settled::Parked,
    }
}

/// A newer server may send a code that is unknown here; the refusal of the element must not get lost.
fn settle_error(problem: &Problem) -> Result<SettleError, StoreError> {
    let unknown = || StoreError::Invalid(format!("the server answered {}: {}", problem.code, problem.detail));
    problem.to_settle_error().ok_or_else(unknown)
}

fn convert_results<T, A, E>(
    results: Results<T>,
    done: impl Fn(T) -> A,
    failed: impl Fn(&Problem) -> Result<E, StoreError>,
) -> Batch<A, E> {
    let answer = |element| match element {
        ItemResult::Done(item) => Ok(Ok(done(item))),
        ItemResult::Failed { error } => failed(&error).map(Err),
    };
    results.results.into_iter().map(answer).collect()
}

/// Settles deliveries and ignores the results.
pub(crate) async fn settle_ignoring_errors(client: &Client, queue: &QueueName, settle: Vec<Settle>) {
    let body = SettleRequest { settle: settle.into_iter().map(settle_item).collect() };
    let Ok(body) = encode(&body) else { return };
    let path = format!("/v1/queues/{queue}/settle");
    let transport = &client.transport;
    let _: Result<Results<SettledItem>, Failure> =
        transport.call(Method::POST, &path, body, transport.timeout).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_batch_is_cut_and_a_small_one_is_not() {
        let batch = |count: usize, bytes: usize| vec![NewMessage::new(vec![b'x'; bytes]); count];
        let lens =
            |batch| split_sends(batch).unwrap().iter().map(|part| part.messages.len()).collect::<Vec<_>>();
        assert_eq!(lens(batch(1000, 100)), [1000]);
        assert_eq!(lens(batch(12, 1 << 20)), [5, 5, 2]);
        assert_eq!(lens(batch(0, 0)), [0]);
    }

    #[test]
    fn settles_with_large_outcomes_are_cut() {
        let settle = |bytes: usize| {
            let outcome =
                hapax_core::RecordedOutcome::done(hapax_core::Json::of(&"x".repeat(bytes)).unwrap());
            let ending = hapax_core::ClaimEnding::Complete { outcome, ttl_ms: 1000 };
            let id = hapax_core::EntryId::new("s".parse().unwrap(), "k".parse().unwrap());
            let claim = hapax_core::EndClaim { id, token: "t".parse().unwrap(), ending };
            settle_item(Settle { claim: Some(claim), ..Settle::ack("r".parse().unwrap()) })
        };
        let lens = |count: usize, bytes: usize| -> Vec<usize> {
            split_settles((0..count).map(|_| settle(bytes)).collect()).iter().map(Vec::len).collect()
        };
        assert_eq!(lens(0, 0), [0]);
        assert_eq!(lens(1000, 10), [1000]);
        assert_eq!(lens(12, 1_000_000), [6, 6]);
        for part in split_settles((0..12).map(|_| settle(1_000_000)).collect()) {
            assert!(encode(&SettleRequest { settle: part }).unwrap().len() < SERVER_BYTES_MAX);
        }
    }
}

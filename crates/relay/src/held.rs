//! Further attempts of messages that were set aside. They run beside the rounds, so that a message on which the sink hangs
//! delays only its own key.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::StoreError;
use hapax_core::outbox::{BucketLease, HeldMessage, OutboxMessage, PublishAnswer, SourceBucket};
use tokio::sync::watch;

use crate::options::RelayOptions;
use crate::watch::Shared;

/// Between two looks at what is due.
const LOOK: Duration = Duration::from_millis(250);
/// Messages of one look.
const DUE_MAX: usize = 32;
/// While the sink has accepted nothing for this long, attempts do not count.
const SINK_IS_UP: Duration = Duration::from_mins(1);
/// The delays of a sink that is down are those of this attempt, at least.
const ATTEMPT_DOWN: u32 = 5;

/// What a look found.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    /// Something that was published or postponed; there may be more.
    Some,
    /// The sink takes nothing.
    Unavailable,
}

/// Publishes what is due, until it is stopped.
pub async fn retry(shared: Arc<Shared>, mut stopped: watch::Receiver<bool>) {
    let mut failures = 0;
    while !*stopped.borrow() {
        let found = retry_due(&shared).await;
        // Whatever happened, no bucket is needed until the next look.
        shared.ownership.retry_only(BTreeSet::new());
        failures = if matches!(found, Ok(Found::Unavailable) | Err(_)) { failures + 1 } else { 0 };
        let wait = match found {
            Ok(Found::Some) => continue,
            Ok(Found::Nothing) => LOOK,
            Ok(Found::Unavailable) => shared.outage_delay(failures).max(LOOK),
            Err(error) => {
                shared.store_failed("retry what was set aside", &error);
                shared.outage_delay(failures).max(LOOK)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // The sender lives as long as this task.
            _ = stopped.wait_for(|stopped| *stopped) => {}
        }
    }
}

async fn retry_due(shared: &Shared) -> Result<Found, StoreError> {
    let leases = shared.ownership.leases_to_retry();
    if leases.is_empty() {
        return Ok(Found::Nothing);
    }
    let buckets: Vec<u16> = leases.iter().map(|lease| lease.bucket).collect();
    let due = shared.store.due(&shared.options.route, &buckets, DUE_MAX).await?;
    if due.is_empty() {
        return Ok(Found::Nothing);
    }
    shared.ownership.retry_only(due.iter().map(|held| held.message.bucket).collect());
    let batch: Vec<OutboxMessage> = due.iter().map(|held| held.message.clone()).collect();
    let of_batch = |lease: &&BucketLease| batch.iter().any(|message| message.bucket == lease.bucket);
    let buckets = leases.iter().filter(of_batch).map(|&lease| SourceBucket { lease, recorded: None });
    let buckets: Vec<SourceBucket> = buckets.collect();
    let answers = shared.sink.publish_from(&shared.source(&buckets, true), &batch).await;
    assert_eq!(answers.len(), batch.len(), "a sink answers for each message");
    let is_down = answers.iter().any(|answer| matches!(answer, PublishAnswer::Unavailable(_)));
    for (held, answer) in due.into_iter().zip(answers) {
        let lease = leases.iter().find(|lease| lease.bucket == held.message.bucket);
        let Some(lease) = lease.copied() else { continue };
        take_answer(shared, lease, held, answer).await;
    }
    Ok(if is_down { Found::Unavailable } else { Found::Some })
}

async fn take_answer(shared: &Shared, lease: BucketLease, held: HeldMessage, answer: PublishAnswer) {
    let counts = &shared.counts;
    let RelayOptions { route, relay, retry, .. } = &shared.options;
    let is_up = shared.has_accepted_within(SINK_IS_UP);
    let again = match answer {
        PublishAnswer::Published | PublishAnswer::Duplicate => {
            let counter =
                if answer == PublishAnswer::Published { &counts.published } else { &counts.duplicates };
            counter.add();
            shared.accepted();
            release(shared, lease, &held.message).await;
            return;
        }
        PublishAnswer::NotTried => return,
        PublishAnswer::Refused(error) => {
            counts.refused.add();
            HeldMessage { parked: true, attempts: held.attempts + 1, error: Some(error), ..held }
        }
        PublishAnswer::Failed(error) if is_up => {
            counts.failed.add();
            shared.failing(&error);
            let attempts = held.attempts + 1;
            let parked = retry.limit().is_some_and(|limit| attempts >= limit);
            let retry_after_ms = Some(retry.delay_ms(attempts, fastrand::u64(..)));
            HeldMessage { parked, attempts, retry_after_ms, error: Some(error), ..held }
        }
        PublishAnswer::Failed(error) | PublishAnswer::Unavailable(error) => {
            counts.failed.add();
            shared.failing(&error);
            let delay_ms = retry.delay_ms(held.attempts.max(ATTEMPT_DOWN), fastrand::u64(..));
            HeldMessage { retry_after_ms: Some(delay_ms), error: Some(error), ..held }
        }
    };
    if let Err(error) = shared.store.postpone(route, relay, lease, &again).await {
        shared.store_failed("postpone a message", &error);
    }
}

/// Removes a message that was published. It is tried until it succeeds or the bucket is lost, since the message would be
/// published again.
async fn release(shared: &Shared, lease: BucketLease, message: &OutboxMessage) {
    let RelayOptions { route, relay, .. } = &shared.options;
    while shared.ownership.lease(lease.bucket) == Some(lease) {
        // Decided under the lock: a message of the key that is read now waits behind this one or is published itself.
        let mut keys = shared.held.lock().await;
        match shared.store.release(route, relay, lease, message).await {
            Ok(None) => return shared.ownership.lose(&[lease.bucket]),
            Ok(Some(still_held)) => {
                shared.sink.released(message);
                if !still_held
                    && let Some(key) = message.ordered_key()
                    && let Some(of_bucket) = keys.get_mut(&lease.bucket)
                {
                    of_bucket.remove(key);
                }
                return;
            }
            Err(error) => shared.store_failed("remove a published message", &error),
        }
        drop(keys);
        tokio::time::sleep(LOOK).await;
    }
}

//! How deliveries end, and how their locks are renewed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_core::policy::{AfterFailure, after_failure};
use hapax_core::{
    Batch, Extend, FailureCause, RemainingLease, Settle, SettleError, Settled, Settlement, StoreError,
};
use tokio::task::JoinSet;

use super::engine::Engine;
use super::holds::Then;
use super::session::{AckError, Kind};
use super::state::Held;

/// The result of one element of a batch. An error of the store is one of the whole batch.
type OneResult<T> = Result<Result<T, SettleError>, StoreError>;

/// What a settlement means for a record.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Plan {
    Accept,
    Dead {
        cause: FailureCause,
        error: String,
    },
    /// Held under its lock, at most for the lock's time.
    Hold {
        after_ms: u64,
        then: Then,
    },
    /// Through the retry topic.
    Later {
        attempts: u32,
        after_ms: u64,
        error: Option<String>,
    },
}

/// The settings that a plan depends on.
struct Rules<'a> {
    retry: &'a hapax_core::policy::RetryPolicy,
    has_retry_topic: bool,
    lock_ms: u64,
    limit: u32,
    random: u64,
}

impl Rules<'_> {
    fn plan(&self, attempt: u32, delivery_count: u32, settlement: Settlement) -> Plan {
        match settlement {
            Settlement::Ack => Plan::Accept,
            Settlement::Reject { reason } => Plan::Dead { cause: FailureCause::Rejected, error: reason },
            // A topic has no place for it that is not delivered.
            Settlement::Park { reason } => Plan::Dead { cause: FailureCause::InDoubt, error: reason },
            Settlement::Retry { after_ms, error } => {
                match after_failure(self.retry, attempt, after_ms, self.random) {
                    AfterFailure::Dead => {
                        Plan::Dead { cause: FailureCause::Retry, error: error.unwrap_or_default() }
                    }
                    AfterFailure::Retry { after_ms } => self.failed(attempt, delivery_count, after_ms, error),
                }
            }
            // This attempt is not counted.
            Settlement::Defer { after_ms } if self.has_retry_topic && after_ms > self.lock_ms => {
                Plan::Later { attempts: attempt.saturating_sub(1), after_ms, error: None }
            }
            Settlement::Defer { after_ms } => {
                Plan::Hold { after_ms: after_ms.min(self.lock_ms), then: Then::Deliver }
            }
        }
    }

    fn failed(&self, attempt: u32, delivery_count: u32, after_ms: u64, error: Option<String>) -> Plan {
        // The broker's last delivery is not run.
        let is_last = delivery_count.saturating_add(1) >= self.limit;
        if self.has_retry_topic && (after_ms > self.lock_ms || is_last) {
            return Plan::Later { attempts: attempt, after_ms, error };
        }
        if is_last {
            return Plan::Dead { cause: FailureCause::Retry, error: error.unwrap_or_default() };
        }
        Plan::Hold { after_ms: after_ms.min(self.lock_ms), then: Then::Release }
    }
}

impl Engine {
    pub async fn settle(self: &Arc<Self>, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let count = batch.len();
        let mut tasks = JoinSet::new();
        for (place, settle) in batch.into_iter().enumerate() {
            let engine = self.clone();
            tasks.spawn(async move { (place, engine.settle_one(settle).await) });
        }
        // A settle that was answered is remembered, so that repeating all of them is safe.
        collect(tasks, count).await
    }

    async fn settle_one(self: &Arc<Self>, settle: Settle) -> OneResult<Settled> {
        let Some(held) = self.shared.delivered(&settle.receipt) else {
            return Ok(self.shared.answered(&settle.receipt).ok_or(SettleError::Stale));
        };
        let rules = Rules {
            retry: &self.options.retry,
            has_retry_topic: self.copies.retry_topic.is_some(),
            lock_ms: u64::try_from(self.shared.lock().as_millis()).unwrap_or(u64::MAX),
            limit: self.settings.limit,
            random: fastrand::u64(..),
        };
        match rules.plan(held.attempt, held.delivery_count, settle.settlement) {
            Plan::Accept => self.accept(&held, Settled::Acked).await,
            Plan::Dead { cause, error } => {
                if !held.copied.load(Ordering::SeqCst) {
                    self.copies.dead(&held, cause, &error).await?;
                    held.copied.store(true, Ordering::SeqCst);
                }
                self.accept(&held, Settled::Dead).await
            }
            Plan::Later { attempts, after_ms, error } => {
                let Some(topic) = &self.copies.retry_topic else { unreachable!("the plan has looked") };
                if !held.copied.load(Ordering::SeqCst) {
                    self.copies.later(topic, &held, attempts, after_ms, error.as_deref()).await?;
                    held.copied.store(true, Ordering::SeqCst);
                }
                self.accept(&held, Settled::Returned { after_ms }).await
            }
            Plan::Hold { after_ms, then } => {
                let settled = Settled::Returned { after_ms };
                self.shared.settled(&held, settled);
                self.hold(held, Duration::from_millis(after_ms), then);
                Ok(Ok(settled))
            }
        }
    }

    async fn accept(&self, held: &Arc<Held>, settled: Settled) -> OneResult<Settled> {
        match self.acknowledge(held, Kind::Accept).await {
            Ok(_) => {
                self.shared.settled(held, settled);
                self.shared.released(held);
                Ok(Ok(settled))
            }
            Err(AckError::Stale) => {
                self.shared.released(held);
                Ok(Err(SettleError::Stale))
            }
            Err(AckError::Again(problem)) => Err(StoreError::Unavailable(problem)),
        }
    }

    pub async fn extend(self: &Arc<Self>, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        let count = batch.len();
        let mut tasks = JoinSet::new();
        for (place, extend) in batch.into_iter().enumerate() {
            let engine = self.clone();
            tasks.spawn(async move { (place, engine.extend_one(extend).await) });
        }
        collect(tasks, count).await
    }

    async fn extend_one(&self, extend: Extend) -> OneResult<RemainingLease> {
        let Some(held) = self.shared.delivered(&extend.receipt) else {
            return Ok(Err(SettleError::Stale));
        };
        let done = if extend.lease_ms == 0 {
            let released = self.acknowledge(&held, Kind::Release).await.map(drop);
            if released.is_ok() {
                self.shared.released(&held);
            }
            released
        } else {
            self.renew(&held).await
        };
        match done {
            Ok(()) if extend.lease_ms == 0 => Ok(Ok(RemainingLease { lease_ms: 0 })),
            Ok(()) => Ok(Ok(RemainingLease { lease_ms: held.left_ms() })),
            Err(AckError::Stale) => {
                self.shared.released(&held);
                Ok(Err(SettleError::Stale))
            }
            Err(AckError::Again(problem)) => Err(StoreError::Unavailable(problem)),
        }
    }
}

/// The results in the order of the request, or the first error.
async fn collect<T: 'static>(
    mut tasks: JoinSet<(usize, OneResult<T>)>,
    count: usize,
) -> Batch<T, SettleError> {
    let mut results: Vec<Option<Result<T, SettleError>>> = (0..count).map(|_| None).collect();
    let mut failure = None;
    while let Some(done) = tasks.join_next().await {
        match done {
            Ok((place, Ok(result))) => results[place] = Some(result),
            Ok((_, Err(error))) => failure = failure.or(Some(error)),
            Err(error) => failure = failure.or(Some(StoreError::Unavailable(error.to_string()))),
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(results.into_iter().map(|result| result.unwrap_or(Err(SettleError::Stale))).collect()),
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::policy::{Jitter, RetryPolicy};

    use super::*;

    const RETRY: RetryPolicy =
        RetryPolicy { base_ms: 100, cap_ms: 100_000, jitter: Jitter::None, max_attempts: 4 };

    fn rules(has_retry_topic: bool) -> Rules<'static> {
        Rules { retry: &RETRY, has_retry_topic, lock_ms: 1_000, limit: 5, random: 0 }
    }

    fn retry(after_ms: Option<u64>) -> Settlement {
        Settlement::Retry { after_ms, error: Some("no".into()) }
    }

    #[test]
    fn a_delay_within_the_lock_is_held_and_a_longer_one_goes_through_the_retry_topic() {
        let held = Plan::Hold { after_ms: 200, then: Then::Release };
        assert_eq!(rules(true).plan(2, 2, retry(None)), held);
        assert_eq!(rules(false).plan(2, 2, retry(None)), held);
        let later = Plan::Later { attempts: 2, after_ms: 1_001, error: Some("no".into()) };
        assert_eq!(rules(true).plan(2, 2, retry(Some(1_001))), later);
        let cut = Plan::Hold { after_ms: 1_000, then: Then::Release };
        assert_eq!(rules(false).plan(2, 2, retry(Some(1_001))), cut);
    }

    #[test]
    fn the_last_attempt_and_the_brokers_last_delivery_are_not_released() {
        let dead = Plan::Dead { cause: FailureCause::Retry, error: "no".into() };
        assert_eq!(rules(true).plan(4, 1, retry(None)), dead);
        // Deliveries that were not attempts have used up the broker's limit.
        assert_eq!(rules(false).plan(2, 4, retry(None)), dead);
        let later = Plan::Later { attempts: 2, after_ms: 200, error: Some("no".into()) };
        assert_eq!(rules(true).plan(2, 4, retry(None)), later);
    }

    #[test]
    fn a_deferral_counts_no_attempt() {
        let held = Plan::Hold { after_ms: 7, then: Then::Deliver };
        assert_eq!(rules(true).plan(4, 4, Settlement::Defer { after_ms: 7 }), held);
        let later = Plan::Later { attempts: 3, after_ms: 5_000, error: None };
        assert_eq!(rules(true).plan(4, 4, Settlement::Defer { after_ms: 5_000 }), later);
    }
}

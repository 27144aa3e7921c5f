//! Makes an async function idempotent with one call, without a queue.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use hapax_claim::{ClaimResponse, Claims, EndError, HeldClaim, LeaseKeeper, Owners, Timer};
use hapax_core::ledger::{TTL_MS_DEFAULT, TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::{
    ClaimEnding, ClaimError, ClaimRequest, Clock, EntryId, Fence, Fingerprint, IdempotencyKey, Json, Ledger,
    OnDoubt, RecordedOutcome, StoreError, policy,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::guard::guard;
use crate::outcome::{OnError, RunResult};
use crate::stats::Stats;

/// Why an idempotent call returns no value.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IdempotentError<E> {
    /// This run failed. Unless [`Idempotent::on_error`] is set, the key is in doubt.
    #[error("{0}")]
    Failed(E),
    /// An earlier run failed permanently.
    #[error("it failed before, for good: {reason}")]
    FailedBefore {
        /// The recorded reason.
        reason: String,
    },
    /// Another holder is running, and did not end within the wait time.
    #[error("it is in progress elsewhere; ask again in {retry_after_ms} ms")]
    InProgress {
        /// When to retry.
        retry_after_ms: u64,
    },
    /// An earlier run may have caused the effect, and no operator has resolved the doubt.
    #[error("what became of a run before this one is in doubt; resolve the entry, or take over with `retry`")]
    InDoubt,
    /// The key was used for another request.
    #[error("the key was used before for a different request; use a new key for a new request")]
    Mismatch,
    /// The claim was lost while this ran: another holder may have the key. This run may have caused the effect.
    #[error("the claim was lost while it ran; someone else holds the key")]
    Lost,
    /// The effect happened earlier, but its value was too large to keep or is not of this type.
    #[error("it was done before, but its value cannot be given again: {0}")]
    NoValue(String),
    /// A setting or the key is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The ledger was unavailable: nothing was run.
    #[error("the ledger could not be asked, so nothing was run: {0}")]
    Ledger(StoreError),
    /// The run ended, but its end could not be recorded: the key is in doubt.
    #[error("it ran, but the ledger could not record its outcome: {0}")]
    NotRecorded(StoreError),
}

/// Runs `run` once for an entry of a ledger: claims the key, renews it by heartbeats, and completes it with the
/// returned value. Duplicates, including concurrent ones, get the same value and run nothing.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # let folder = tempfile::tempdir()?;
/// # let store = Arc::new(hapax_embedded::Embedded::open(folder.path(), hapax_embedded::Options::default())?);
/// use hapax_core::EntryId;
/// use hapax_worker::idempotent;
///
/// let id = EntryId::new("payments".parse()?, "order-7".parse()?);
/// let first = idempotent(store.clone(), id.clone(), || async { Ok::<_, std::io::Error>("charged".to_owned()) });
/// assert_eq!(first.await?, "charged");
///
/// let again = idempotent(store, id, || async { Err::<String, _>(std::io::Error::other("never run")) });
/// assert_eq!(again.await?, "charged");
/// # Ok(())
/// # }
/// ```
pub async fn idempotent<R, E, F, Fut>(
    ledger: Arc<dyn Ledger>,
    id: EntryId,
    run: F,
) -> Result<R, IdempotentError<E>>
where
    R: Serialize + DeserializeOwned + Send,
    E: fmt::Display + Send,
    F: FnOnce() -> Fut + Send,
    Fut: Future<Output = Result<R, E>> + Send,
{
    Idempotent::new(ledger, id).run(|_| run()).await
}

/// An idempotent call with settings; see [`idempotent`] for the short form.
#[derive(Clone)]
#[must_use = "call `run`"]
pub struct Idempotent {
    ledger: Arc<dyn Ledger>,
    id: EntryId,
    fingerprint: Option<Fingerprint>,
    lease_ms: u64,
    wait_ms: u64,
    ttl_ms: u64,
    on_doubt: OnDoubt,
    on_error: Option<OnError>,
    clock: Option<Arc<dyn Clock>>,
}

/// The context of an idempotent run.
#[derive(Clone)]
pub struct Run {
    id: EntryId,
    fence: Fence,
    takeover: bool,
}

impl Run {
    /// Grows with every run for the same key.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Whether an earlier run lapsed: its effect may have happened.
    pub fn is_takeover(&self) -> bool {
        self.takeover
    }

    /// The key for a call to another system on behalf of this run.
    pub fn derived_key(&self, label: &str) -> IdempotencyKey {
        self.id.derived_key(label)
    }
}

impl Idempotent {
    /// A call for an entry of a ledger: lease 30 s, waits 20 s for a running duplicate, outcome kept for 4 days.
    pub fn new(ledger: Arc<dyn Ledger>, id: EntryId) -> Self {
        Self {
            ledger,
            id,
            fingerprint: None,
            lease_ms: policy::LEASE_MS_DEFAULT,
            wait_ms: policy::WAIT_MS_MAX,
            ttl_ms: TTL_MS_DEFAULT,
            on_doubt: OnDoubt::Retry,
            on_error: None,
            clock: None,
        }
    }

    /// The content of the request; a different one under the same key is refused.
    pub fn fingerprint_of(mut self, request: impl AsRef<[u8]>) -> Self {
        let hash = blake3::hash(request.as_ref()).to_hex();
        self.fingerprint = Some(Fingerprint::new(hash).expect("hex digits"));
        self
    }

    /// How long the claim lasts without a heartbeat. After a crash the key is blocked for this time.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease_ms = lease.as_millis() as u64;
        self
    }

    /// How long to wait while another holder is running. At most 20 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait_ms = wait.as_millis() as u64;
        self
    }

    /// How long the outcome is kept. 1 s to 366 days.
    pub fn outcome_ttl(mut self, ttl: Duration) -> Self {
        self.ttl_ms = ttl.as_millis() as u64;
        self
    }

    /// What to do about a key whose last run may or may not have caused the effect. Default retry.
    pub fn on_doubt(mut self, on_doubt: OnDoubt) -> Self {
        self.on_doubt = on_doubt;
        self
    }

    /// The meaning of an `Err` of the run. Default [`OnError::InDoubt`]: the effect may have happened, so the next run
    /// is a takeover, or is refused with [`OnDoubt::Park`].
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = Some(on_error);
        self
    }

    /// The clock for the lease. Default the machine's; a test passes its own.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Runs the function, or returns the recorded outcome. A panic leaves the key in doubt and is propagated; if the
    /// future is dropped early, the key is in doubt once the lease has run out.
    pub async fn run<R, E, F, Fut>(self, run: F) -> Result<R, IdempotentError<E>>
    where
        R: Serialize + DeserializeOwned + Send,
        E: fmt::Display + Send,
        F: FnOnce(Run) -> Fut + Send,
        Fut: Future<Output = Result<R, E>> + Send,
    {
        if !(TTL_MS_MIN..=TTL_MS_MAX).contains(&self.ttl_ms) {
            let problem = format!("outcome_ttl: {} ms is out of range; use 1 s to 366 days", self.ttl_ms);
            return Err(IdempotentError::Invalid(problem));
        }
        let timer = self.clock.clone().map_or_else(Timer::system, Timer::new);
        let claims = Claims::new(self.ledger.clone(), timer.clone());
        let held = match self.claim(&claims, &timer).await? {
            KeyClaim::Held(held) => held,
            KeyClaim::Completed(outcome) => return replay(&outcome),
        };
        let known = Run { id: self.id.clone(), fence: held.fence(), takeover: held.is_takeover() };
        // The closure is called at the first poll, after the check of the lease: its synchronous part may also have
        // effects.
        let running = Box::pin(async move { run(known).await });
        let ended = guard(std::iter::once(held.lease()), &timer, &Stats::default(), || (), running).await;
        match ended {
            Ok(Ok(value)) => {
                let outcome =
                    RecordedOutcome { failed: false, value: Json::of(&value).ok(), omitted_bytes: None };
                recorded(held.end(ClaimEnding::Complete { outcome, ttl_ms: self.ttl_ms }).await)?;
                Ok(value)
            }
            Ok(Err(error)) => {
                // The caller gets its own error, whether or not it could be recorded.
                let _ = held.end(self.after_error(&error)).await;
                Err(IdempotentError::Failed(error))
            }
            Err(ended) => {
                // A run that never started had no effect.
                let ending = if let RunResult::NotStarted(_) = ended {
                    ClaimEnding::Release
                } else {
                    ClaimEnding::Doubt
                };
                let end_result = held.end(ending).await;
                if let RunResult::Panicked(text) = ended {
                    std::panic::resume_unwind(Box::new(text));
                }
                recorded(end_result)?;
                Err(IdempotentError::Lost)
            }
        }
    }

    fn after_error(&self, error: &impl fmt::Display) -> ClaimEnding {
        match self.on_error.unwrap_or(OnError::InDoubt) {
            OnError::Retry => ClaimEnding::Release,
            OnError::InDoubt => ClaimEnding::Doubt,
            OnError::Reject => {
                let reason = format!("{error:#}");
                let reason = policy::truncate(&reason, policy::ERROR_BYTES_MAX);
                let outcome = RecordedOutcome::failed(Json::of(reason).expect("a text is JSON"));
                ClaimEnding::Complete { outcome, ttl_ms: self.ttl_ms }
            }
        }
    }

    async fn claim<E>(&self, claims: &Claims, timer: &Timer) -> Result<KeyClaim, IdempotentError<E>> {
        static OWNERS: LazyLock<Owners> = LazyLock::new(|| Owners::new("once"));
        let no_thread = |error: std::io::Error| {
            IdempotentError::Ledger(StoreError::Unavailable(format!(
                "the heartbeat cannot be started: {error}"
            )))
        };
        let lease_keeper = LeaseKeeper::new(None, Some(self.ledger.clone()), timer.clone(), Arc::new(()))
            .map_err(no_thread)?;
        let request = ClaimRequest {
            fingerprint: self.fingerprint.clone(),
            wait_ms: self.wait_ms,
            on_doubt: self.on_doubt,
            ..ClaimRequest::new(self.id.clone(), OWNERS.next(), self.lease_ms)
        };
        match claims.claim(vec![request]).await.pop() {
            Some(ClaimResponse::Granted(granted)) => {
                Ok(KeyClaim::Held(claims.hold(&lease_keeper, granted, self.lease_ms)))
            }
            Some(ClaimResponse::Completed(outcome)) => Ok(KeyClaim::Completed(outcome)),
            Some(ClaimResponse::InProgress { retry_after_ms }) => {
                Err(IdempotentError::InProgress { retry_after_ms })
            }
            Some(ClaimResponse::InDoubt) => Err(IdempotentError::InDoubt),
            Some(ClaimResponse::Refused(ClaimError::Mismatch)) => Err(IdempotentError::Mismatch),
            Some(ClaimResponse::Refused(ClaimError::Store(error))) => Err(IdempotentError::Ledger(error)),
            Some(ClaimResponse::Refused(error @ ClaimError::TooManyInDoubt { .. })) => {
                Err(IdempotentError::Ledger(StoreError::Full(error.to_string())))
            }
            Some(ClaimResponse::Refused(error)) => Err(IdempotentError::Invalid(error.to_string())),
            Some(ClaimResponse::Unavailable(error) | ClaimResponse::Unconfirmed(error)) => {
                Err(IdempotentError::Ledger(error))
            }
            None => Err(IdempotentError::Ledger(StoreError::Unavailable("the ledger gave no result".into()))),
        }
    }
}

fn recorded<E>(ended: Result<(), EndError>) -> Result<(), IdempotentError<E>> {
    ended.map_err(|error| match error {
        EndError::Unrecorded(error) => IdempotentError::NotRecorded(error),
        _ => IdempotentError::Lost,
    })
}

enum KeyClaim {
    Held(HeldClaim),
    Completed(RecordedOutcome),
}

fn replay<R: DeserializeOwned, E>(outcome: &RecordedOutcome) -> Result<R, IdempotentError<E>> {
    let text = |json: &Json| json.get::<String>().unwrap_or_else(|_| json.as_str().to_owned());
    if outcome.failed {
        let reason = outcome.value.as_ref().map_or_else(|| "(not kept)".to_owned(), text);
        return Err(IdempotentError::FailedBefore { reason });
    }
    match &outcome.value {
        Some(json) => json.get().map_err(|error| IdempotentError::NoValue(error.to_string())),
        None => Err(IdempotentError::NoValue("it was not kept".into())),
    }
}

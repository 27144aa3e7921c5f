//! Requesting and ending claims, with retries until the result is known.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryState, Grant, Ledger, OnDoubt,
    RecordedOutcome, Renew, StoreError, TokenError,
};
use thiserror::Error;

use crate::heartbeat;
use crate::time::Timer;

/// Timeout of one ledger call, in addition to the requested wait.
const CALL_MS_MAX: u64 = 5_000;
/// Maximum number of retries of a claim whose answer was lost.
const CLAIM_TRIES: u32 = 5;
/// A grant whose answer took more than a quarter of its lease is renewed before anything runs under it.
const LATE_DIVISOR: u64 = 4;
/// Default time for which the end of a claim is retried while the ledger does not answer.
const END_MS_MAX_DEFAULT: u64 = 60_000;
/// Retry delay for a key whose claim is being released in the background.
const BEING_RELEASED_RETRY_MS: u64 = 1_000;
/// How long the release of an unused claim is retried.
const RELEASE_MS_MAX: u64 = 600_000;
/// The longest pause between two tries to give back a claim.
const RELEASE_PAUSE_MS_MAX: u64 = 5_000;

/// A claim that was given, and is known to be in time. Dropped before something ran under it, it is given back in the
/// background: nothing happened, so its key must not end in doubt.
pub struct Granted {
    /// The entry's lookup key.
    pub id: EntryId,
    /// Token, fence, and the remaining lease.
    pub grant: Grant,
    /// When it was requested, on the timer of the claims: the lease counts from then.
    pub asked_us: u64,
    claims: Claims,
    /// Nothing ran under it, and it has not been ended.
    unused: AtomicBool,
}

impl Granted {
    fn new(claims: &Claims, id: EntryId, grant: Grant, asked_us: u64) -> Self {
        Self { id, grant, asked_us, claims: claims.clone(), unused: AtomicBool::new(true) }
    }

    /// Something runs under it from now on, or it has been ended: it is not given back any more. `false` if that was so
    /// before.
    pub fn mark_used(&self) -> bool {
        self.unused.swap(false, Ordering::SeqCst)
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        if self.mark_used() {
            let (id, token) = (self.id.clone(), self.grant.token.clone());
            self.claims.release_in_background(ReleaseStep::Release(EndClaim {
                id,
                token,
                ending: ClaimEnding::Release,
            }));
        }
    }
}

impl std::fmt::Debug for Granted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Granted").field("id", &self.id).field("grant", &self.grant).finish_non_exhaustive()
    }
}

/// The answer to a claim.
#[derive(Debug)]
pub enum ClaimResponse {
    /// The caller holds the key: it may act.
    Granted(Granted),
    /// The effect ended earlier, with this outcome.
    Completed(RecordedOutcome),
    /// Another holder has the key.
    InProgress {
        /// Time left of that holder's lease.
        retry_after_ms: u64,
    },
    /// A claim lapsed, its holder may have caused the effect, and the caller asked not to take over.
    InDoubt,
    /// The ledger refused the claim: another request under the same key, a value out of range, a damaged entry, or too
    /// many keys of its scope in doubt.
    Refused(ClaimError),
    /// The ledger was unavailable. The handler must not run; a claim that may have been granted is released.
    Unavailable(StoreError),
    /// The ledger granted the claim late and did not confirm it: another holder may have the key. The handler must not
    /// run, not even if requests pass during a ledger outage; a claim that may have been granted is released.
    Unconfirmed(StoreError),
}

/// Why the end of a claim was not recorded.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum EndError {
    /// Another holder has the claim, or the entry is gone.
    #[error(transparent)]
    Superseded(TokenError),
    /// The ledger did not answer in time: the key will be in doubt.
    #[error("the ledger did not record the end of the claim: {0}")]
    Unrecorded(StoreError),
}

impl EndError {
    pub(crate) fn no_answer() -> Self {
        Self::Unrecorded(StoreError::OutcomeUnknown("the ledger gave no result".into()))
    }
}

/// The claims of one ledger. Clones are cheap.
#[derive(Clone)]
pub struct Claims {
    ledger: Arc<dyn Ledger>,
    timer: Timer,
    end_ms_max: u64,
}

impl Claims {
    /// Claims of this ledger, timed by this timer.
    pub fn new(ledger: Arc<dyn Ledger>, timer: Timer) -> Self {
        Self { ledger, timer, end_ms_max: END_MS_MAX_DEFAULT }
    }

    /// How long the end of a claim is retried while the ledger does not answer. Default 60 s; use less if a caller
    /// waits for it.
    #[must_use]
    pub fn end_within_ms(mut self, ms: u64) -> Self {
        self.end_ms_max = ms;
        self
    }

    /// Claims keys. A call without an answer is repeated: the same owner gets the same claim. A grant that came late is
    /// renewed first. A claim that may have been granted without the caller learning of it is released, also when the
    /// future is dropped early: nothing ran under it, so its key must not be left in doubt.
    pub async fn claim(&self, requests: Vec<ClaimRequest>) -> Vec<ClaimResponse> {
        let wait_ms = requests.iter().map(|request| request.wait_ms).max().unwrap_or(0);
        let began_us = self.timer.now_us();
        let mut pending = PendingClaims { claims: self, requests, may_be_claimed: false, asked_us: began_us };
        let mut tries = 0;
        let error = loop {
            let asked_us = self.timer.now_us();
            pending.asked_us = asked_us;
            let before = std::mem::replace(&mut pending.may_be_claimed, true);
            // Checked before and after the call: the release may finish while the call is running.
            let being_released =
                pending.requests.iter().map(|request| self.is_being_released(&request.id)).collect();
            let call = self.ledger.claim(pending.requests.clone());
            let error = match self.timer.timeout(CALL_MS_MAX + wait_ms, call).await {
                Some(Ok(answers)) if answers.len() == pending.requests.len() => {
                    pending.may_be_claimed = false;
                    let requests = std::mem::take(&mut pending.requests);
                    return self.answered(requests, answers, asked_us, being_released).await;
                }
                Some(Ok(answers)) => StoreError::OutcomeUnknown(format!(
                    "the ledger gave {} results for {} claims",
                    answers.len(),
                    pending.requests.len()
                )),
                Some(Err(error)) => error,
                None => StoreError::OutcomeUnknown("the ledger did not respond in time".into()),
            };
            let unknown = matches!(error, StoreError::OutcomeUnknown(_));
            // Any other error means that this call had no effect; an earlier call may have had one.
            pending.may_be_claimed = before || unknown;
            // A ledger that hangs is called at most twice, because a caller is waiting.
            let took_ms = (self.timer.now_us() - began_us) / 1000;
            if !unknown || tries == CLAIM_TRIES || took_ms > CALL_MS_MAX + wait_ms + CALL_MS_MAX / 2 {
                break error;
            }
            self.timer.sleep_ms(fastrand::u64(5..=20 << tries)).await;
            tries += 1;
        };
        let count = pending.requests.len();
        drop(pending);
        (0..count).map(|_| ClaimResponse::Unavailable(error.clone())).collect()
    }

    async fn answered(
        &self,
        requests: Vec<ClaimRequest>,
        answers: Vec<Result<Claim, ClaimError>>,
        asked_us: u64,
        being_released: Vec<bool>,
    ) -> Vec<ClaimResponse> {
        let took_us = self.timer.now_us().saturating_sub(asked_us);
        let mut late = Vec::new();
        let mut all = Vec::with_capacity(answers.len());
        for (at, ((request, answer), being_released)) in
            requests.into_iter().zip(answers).zip(being_released).enumerate()
        {
            all.push(match answer {
                Ok(Claim::Granted(grant)) => {
                    if took_us * LATE_DIVISOR > grant.lease_ms * 1000 {
                        late.push((at, request.lease_ms));
                    }
                    ClaimResponse::Granted(Granted::new(self, request.id, grant, asked_us))
                }
                Ok(Claim::Completed { outcome, .. }) => ClaimResponse::Completed(outcome),
                // The entry is the remains of this process's own claim, which is being released. Nothing ran under it,
                // so there is no doubt.
                Ok(Claim::InDoubt { .. }) if being_released || self.is_being_released(&request.id) => {
                    ClaimResponse::InProgress { retry_after_ms: BEING_RELEASED_RETRY_MS }
                }
                Ok(Claim::InProgress { retry_after_ms }) => ClaimResponse::InProgress { retry_after_ms },
                Ok(Claim::InDoubt { .. }) => ClaimResponse::InDoubt,
                Err(ClaimError::Store(error)) if error.is_retryable() => ClaimResponse::Unavailable(error),
                Err(error) => ClaimResponse::Refused(error),
            });
        }
        if !late.is_empty() {
            self.confirm(&mut all, late).await;
        }
        all
    }

    /// Renews grants whose answer took long. A claim that waited reports the lease that remained when the answer was
    /// sent, and the age of the answer is unknown. A grant that is not confirmed is released.
    async fn confirm(&self, answers: &mut [ClaimResponse], late: Vec<(usize, u64)>) {
        let mut renewals = Vec::new();
        let mut bound_ms = CALL_MS_MAX;
        for (at, lease_ms) in &late {
            let ClaimResponse::Granted(granted) = &answers[*at] else { continue };
            bound_ms = bound_ms.min((lease_ms / 3).max(1));
            let (id, token) = (granted.id.clone(), granted.grant.token.clone());
            renewals.push(Renew { id, token, lease_ms: *lease_ms });
        }
        let asked_us = self.timer.now_us();
        let renewed = self.timer.timeout(bound_ms, self.ledger.renew(renewals)).await;
        let mut renewed = match renewed {
            Some(Ok(renewed)) => renewed.into_iter(),
            _ => Vec::new().into_iter(),
        };
        for (at, _) in late {
            let ClaimResponse::Granted(granted) = &mut answers[at] else { continue };
            let why = match renewed.next() {
                Some(Ok(left)) => {
                    granted.grant.lease_ms = left.lease_ms;
                    granted.asked_us = asked_us;
                    continue;
                }
                Some(Err(error)) => {
                    granted.mark_used();
                    format!("the claim was lost before it was confirmed: {error}")
                }
                None => "the claim was not confirmed in time".to_owned(),
            };
            answers[at] = ClaimResponse::Unconfirmed(StoreError::Unavailable(why));
        }
    }

    /// Ends claims, with one result each; retries the call while the ledger does not answer.
    pub async fn end(&self, ends: Vec<EndClaim>) -> Vec<Result<(), EndError>> {
        self.end_until(ends, self.timer.now_us() + self.end_ms_max * 1000).await
    }

    async fn end_until(&self, ends: Vec<EndClaim>, until_us: u64) -> Vec<Result<(), EndError>> {
        let (mut unknown, mut pause_ms) = (false, 20);
        loop {
            let error = match self.timer.timeout(CALL_MS_MAX, self.ledger.end(ends.clone())).await {
                Some(Ok(answers)) if answers.len() == ends.len() => {
                    let ended = ends.iter().zip(answers);
                    return ended.map(|(end, answer)| end_result(end, answer, unknown)).collect();
                }
                Some(Ok(_)) => {
                    StoreError::OutcomeUnknown("the ledger did not give a result for each claim".into())
                }
                Some(Err(error)) => error,
                None => StoreError::OutcomeUnknown("the ledger did not respond in time".into()),
            };
            unknown |= matches!(error, StoreError::OutcomeUnknown(_));
            if !error.is_retryable() || self.timer.now_us() + pause_ms * 1000 >= until_us {
                return vec![Err(EndError::Unrecorded(error)); ends.len()];
            }
            self.timer.sleep_ms(fastrand::u64(pause_ms / 2..=pause_ms)).await;
            pause_ms = (pause_ms * 2).min(2_000);
        }
    }

    /// Whether a key is in doubt now.
    pub async fn is_in_doubt(&self, id: &EntryId) -> Result<bool, StoreError> {
        let unanswered = || Err(StoreError::Unavailable("the ledger did not respond in time".into()));
        let entry =
            self.timer.timeout(CALL_MS_MAX, self.ledger.entry(id)).await.unwrap_or_else(unanswered)?;
        Ok(entry.is_some_and(|entry| entry.state == EntryState::InDoubt))
    }

    /// Gives back a claim that may have been made, in the background: asks for it as the same owner, then releases it.
    /// `asked_us`: when it was asked for last.
    fn release_if_granted(&self, request: ClaimRequest, asked_us: u64) {
        // A ledger may keep waiting for a caller that has gone, at most until this.
        let waits_until_us = match request.wait_ms {
            0 => asked_us,
            wait_ms => asked_us + (wait_ms + CALL_MS_MAX) * 1000,
        };
        // Another holder's lapsed claim is not for this to take over.
        let request = ClaimRequest { wait_ms: 0, on_doubt: OnDoubt::Park, ..request };
        self.release_in_background(ReleaseStep::Claim { request, waits_until_us });
    }

    fn release_in_background(&self, mut step: ReleaseStep) {
        let timer = self.timer.clone();
        let mark = ReleaseMark::mark(&self.ledger, step.id());
        heartbeat::spawn(async move {
            let until_us = timer.now_us() + RELEASE_MS_MAX * 1000;
            let mut pause_ms = 50;
            loop {
                // Upgraded for one attempt only: this task must not keep open a store that its owner has closed.
                let Some(ledger) = mark.ledger.upgrade() else { return };
                step = match step.try_once(&*ledger, &timer).await {
                    Some(step) => step,
                    None => return,
                };
                drop(ledger);
                if timer.now_us() >= until_us {
                    let id = step.id();
                    tracing::error!(%id, "a claim that nothing ran under could not be given back; it may be in doubt");
                    return;
                }
                timer.sleep_ms(pause_ms).await;
                pause_ms = (pause_ms * 2).min(RELEASE_PAUSE_MS_MAX);
            }
        });
    }

    fn is_being_released(&self, id: &EntryId) -> bool {
        let marks = BEING_RELEASED.lock().unwrap_or_else(PoisonError::into_inner);
        !marks.is_empty() && marks.contains_key(&(address(&self.ledger), id.clone()))
    }
}

/// Whether the end was recorded. A release that is repeated after an unknown outcome finds its entry gone.
fn end_result(end: &EndClaim, answer: Result<(), TokenError>, unknown: bool) -> Result<(), EndError> {
    match answer {
        Err(TokenError::Gone) if unknown && end.ending == ClaimEnding::Release => Ok(()),
        // No other holder has it: its end is not recorded, and never will be.
        Err(TokenError::Damaged) => {
            Err(EndError::Unrecorded(StoreError::Damaged(format!("the ledger's entry {}", end.id))))
        }
        answer => answer.map_err(EndError::Superseded),
    }
}

/// Claims that are being requested. If dropped while one may have been granted, it releases them.
struct PendingClaims<'a> {
    claims: &'a Claims,
    requests: Vec<ClaimRequest>,
    may_be_claimed: bool,
    /// When they were asked for last.
    asked_us: u64,
}

impl Drop for PendingClaims<'_> {
    fn drop(&mut self) {
        if self.may_be_claimed {
            for request in self.requests.drain(..) {
                self.claims.release_if_granted(request, self.asked_us);
            }
        }
    }
}

/// Keys whose claims are being given back, by the address of their ledger: until that is done, another claim of this
/// process must not take the remains of its own for a duplicate at work, or for a doubt. With how many claims of the key
/// are being given back: only the last one ends the mark.
static BEING_RELEASED: LazyLock<Mutex<HashMap<(usize, EntryId), usize>>> = LazyLock::new(Mutex::default);

struct ReleaseMark {
    mark: (usize, EntryId),
    /// As long as it exists, no other ledger can have the same address.
    ledger: Weak<dyn Ledger>,
}

fn address(ledger: &Arc<dyn Ledger>) -> usize {
    Arc::as_ptr(ledger).cast::<()>() as usize
}

impl ReleaseMark {
    fn mark(ledger: &Arc<dyn Ledger>, id: &EntryId) -> Self {
        let mark = (address(ledger), id.clone());
        let mut marks = BEING_RELEASED.lock().unwrap_or_else(PoisonError::into_inner);
        *marks.entry(mark.clone()).or_default() += 1;
        Self { mark, ledger: Arc::downgrade(ledger) }
    }
}

impl Drop for ReleaseMark {
    fn drop(&mut self) {
        let mut marks = BEING_RELEASED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = marks.get_mut(&self.mark) {
            *count -= 1;
            if *count == 0 {
                marks.remove(&self.mark);
            }
        }
    }
}

/// The next step of releasing a claim under which nothing ran.
enum ReleaseStep {
    /// It may have been made: ask for it as the same owner. Until `waits_until_us` the ledger may still make it.
    Claim {
        request: ClaimRequest,
        waits_until_us: u64,
    },
    Release(EndClaim),
}

impl ReleaseStep {
    fn id(&self) -> &EntryId {
        match self {
            Self::Claim { request, .. } => &request.id,
            Self::Release(end) => &end.id,
        }
    }

    /// Runs the next step. `None`: nothing is left to do.
    async fn try_once(self, ledger: &dyn Ledger, timer: &Timer) -> Option<Self> {
        let end = match self {
            Self::Release(end) => end,
            Self::Claim { request, waits_until_us } => {
                let asked_us = timer.now_us();
                let asked = timer.timeout(CALL_MS_MAX, ledger.claim(vec![request.clone()])).await;
                match asked.map(|asked| asked.map(|mut answers| answers.pop())) {
                    Some(Ok(Some(Ok(Claim::Granted(Grant { token, .. }))))) => {
                        EndClaim { id: request.id, token, ending: ClaimEnding::Release }
                    }
                    // Another holder's: one that the ledger lets wait may still get it.
                    Some(Ok(Some(Ok(Claim::InProgress { .. } | Claim::InDoubt { .. }))))
                        if asked_us < waits_until_us =>
                    {
                        return Some(Self::Claim { request, waits_until_us });
                    }
                    // The store cannot tell about this one yet.
                    Some(Ok(Some(Err(ClaimError::Store(error))))) if error.is_retryable() => {
                        return Some(Self::Claim { request, waits_until_us });
                    }
                    Some(Ok(_)) => return None,
                    Some(Err(_)) | None => return Some(Self::Claim { request, waits_until_us }),
                }
            }
        };
        match timer.timeout(CALL_MS_MAX, ledger.end(vec![end.clone()])).await {
            Some(Ok(_)) => None,
            Some(Err(_)) | None => Some(Self::Release(end)),
        }
    }
}

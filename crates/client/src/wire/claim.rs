//! Claims: requests to make, renew and end them, and the ledger as operators see it.

use hapax_core::ledger::{TTL_MS_DEFAULT, TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryState, EntryView, Fence,
    Fingerprint, Grant, IdempotencyKey, Json, LedgerCapabilities, LedgerStats, OnDoubt, Owner, QueueName,
    Receipt, RecordedOutcome, Resolution, ResolveError, Scope, Token, TokenError, validate,
};
use serde::{Deserialize, Serialize};

use super::Problem;
use super::time::{from_rfc3339, to_rfc3339};

/// `PUT /v1/claims/{scope}/{key}`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimBody {
    /// A nonce of the caller; a repeated request with it gets the same claim. Random when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Hash of the request's content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// How long the claim lasts without a renewal. 1 ms to 12 h.
    pub lease_ms: u64,
    /// How long to wait while another owner holds the key. At most 20 s; default 0.
    #[serde(default)]
    pub wait_ms: u64,
    /// What to do about a lapsed claim. Default `retry`.
    #[serde(default)]
    pub on_doubt: OnDoubt,
    /// With `receipt`: the queue of the delivery that the claim is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// With `queue`: the delivery that the claim is for. The entry is kept as long as its message exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
}

impl From<ClaimRequest> for ClaimBody {
    fn from(request: ClaimRequest) -> Self {
        let ClaimRequest { id: _, owner, fingerprint, lease_ms, wait_ms, on_doubt, delivery } = request;
        let (queue, receipt) = delivery.unzip();
        Self { owner: Some(owner), fingerprint, lease_ms, wait_ms, on_doubt, queue, receipt }
    }
}

impl ClaimBody {
    /// The request for an entry; `owner` supplies the owner if the body has none.
    pub fn into_request(
        self,
        id: EntryId,
        owner: impl FnOnce() -> Owner,
    ) -> Result<ClaimRequest, ClaimError> {
        let delivery = match (self.queue, self.receipt) {
            (Some(queue), Some(receipt)) => Some((queue, receipt)),
            (None, None) => None,
            _ => return Err(ClaimError::Invalid("a claim has both queue and receipt, or neither".into())),
        };
        let request = ClaimRequest {
            id,
            owner: self.owner.unwrap_or_else(owner),
            fingerprint: self.fingerprint,
            lease_ms: self.lease_ms,
            wait_ms: self.wait_ms,
            on_doubt: self.on_doubt,
            delivery,
        };
        request.validate().map(|()| request)
    }
}

/// `POST /v1/claims`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimsRequest {
    /// The claims, at most 1,000. Two of them may name the same key: the second finds the first's claim.
    pub claims: Vec<ClaimItem>,
}

/// One claim of a batch: the fields of [`ClaimBody`], and which entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimItem {
    /// Tenant and route, or queue.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// See [`ClaimBody::owner`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// See [`ClaimBody::fingerprint`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// See [`ClaimBody::lease_ms`].
    pub lease_ms: u64,
    /// See [`ClaimBody::wait_ms`]. The answer comes when the last of the batch has its own.
    #[serde(default)]
    pub wait_ms: u64,
    /// See [`ClaimBody::on_doubt`].
    #[serde(default)]
    pub on_doubt: OnDoubt,
    /// See [`ClaimBody::queue`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// See [`ClaimBody::receipt`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
}

impl From<ClaimRequest> for ClaimItem {
    fn from(request: ClaimRequest) -> Self {
        let EntryId { scope, key } = request.id.clone();
        let ClaimBody { owner, fingerprint, lease_ms, wait_ms, on_doubt, queue, receipt } = request.into();
        Self { scope, key, owner, fingerprint, lease_ms, wait_ms, on_doubt, queue, receipt }
    }
}

impl ClaimItem {
    /// The entry, and the claim as a request for it alone would carry it.
    pub fn split(self) -> (EntryId, ClaimBody) {
        let Self { scope, key, owner, fingerprint, lease_ms, wait_ms, on_doubt, queue, receipt } = self;
        let body = ClaimBody { owner, fingerprint, lease_ms, wait_ms, on_doubt, queue, receipt };
        (EntryId::new(scope, key), body)
    }
}

/// `POST /v1/claims/renew`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenewsRequest {
    /// The claims to keep, at most 1,000.
    pub renew: Vec<RenewItem>,
}

/// One renewal of a batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenewItem {
    /// Tenant and route, or queue.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// The claim's token.
    pub token: String,
    /// How long from now. 1 ms to 12 h.
    pub lease_ms: u64,
}

/// `POST /v1/claims/end`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndsRequest {
    /// The claims to end, at most 1,000.
    pub end: Vec<ClaimEndItem>,
}

/// What a claim answers: a grant (201), or the outcome of the earlier effect (200).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimResponse {
    /// 201: needed to renew or end the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<Token>,
    /// 201: grows with every grant of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    /// 201: time left of the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// 201: the claim of an earlier holder lapsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub takeover: Option<bool>,
    /// 200: `completed`, or `failed` if it failed permanently.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<EntryState>,
    /// 200: the recorded outcome; `null` also if it was too large to keep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Json>,
    /// 200: the size of an outcome that was too large to keep; 0 if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
    /// 200: when it ended, in RFC 3339 format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<String>,
}

fn null() -> Json {
    Json::of(&()).expect("null is JSON")
}

/// The size of a value that was not kept. 0 means an outcome without a value, since no JSON text has 0 bytes.
fn omitted(outcome: &RecordedOutcome) -> Option<u64> {
    match outcome.value {
        Some(_) => None,
        None => Some(outcome.omitted_bytes.unwrap_or_default()),
    }
}

fn outcome_of(failed: bool, value: Option<Json>, omitted_bytes: Option<u64>) -> RecordedOutcome {
    match omitted_bytes {
        Some(bytes) => {
            RecordedOutcome { failed, value: None, omitted_bytes: Some(bytes).filter(|bytes| *bytes > 0) }
        }
        None => RecordedOutcome { failed, value: Some(value.unwrap_or_else(null)), omitted_bytes: None },
    }
}

impl ClaimResponse {
    /// Converts a store's answer; a claim that was not granted becomes a problem.
    pub fn new(claim: Claim) -> Result<Self, Box<Problem>> {
        match claim {
            Claim::Granted(Grant { token, fence, lease_ms, takeover }) => Ok(Self {
                token: Some(token),
                fence: Some(fence),
                lease_ms: Some(lease_ms),
                takeover: Some(takeover),
                ..Self::default()
            }),
            Claim::Completed { outcome, at_ms } => Ok(Self {
                state: Some(if outcome.failed { EntryState::Failed } else { EntryState::Completed }),
                omitted_bytes: omitted(&outcome),
                outcome: Some(outcome.value.unwrap_or_else(null)),
                completed_at: Some(to_rfc3339(at_ms)),
                ..Self::default()
            }),
            Claim::InProgress { retry_after_ms } => {
                let detail = "someone else holds this key; ask again later, or wait with wait_ms";
                let problem = Problem::new("in-progress", detail, true);
                Err(Box::new(problem.with_state("in_progress").with_retry_after(retry_after_ms)))
            }
            Claim::InDoubt { since_ms } => {
                let detail = "a claim of this key lapsed while its holder may have acted; find out whether it did, then resolve it";
                let problem = Problem::new("in-doubt", detail, false);
                Err(Box::new(Problem { since_ms: Some(since_ms), ..problem.with_state("in_doubt") }))
            }
        }
    }

    /// The original answer; `None` if it is not known here.
    pub fn into_claim(self) -> Option<Claim> {
        let failed = match self.state {
            None => {
                return Some(Claim::Granted(Grant {
                    token: self.token?,
                    fence: self.fence?,
                    lease_ms: self.lease_ms?,
                    takeover: self.takeover?,
                }));
            }
            Some(EntryState::Completed) => false,
            Some(EntryState::Failed) => true,
            Some(_) => return None,
        };
        let outcome = outcome_of(failed, self.outcome, self.omitted_bytes);
        Some(Claim::Completed { outcome, at_ms: from_rfc3339(&self.completed_at?)? })
    }
}

/// The outcome of an effect in a request.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Completion {
    /// Any JSON; `null` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Json>,
    /// How long it is kept. 1 s to 366 days; default 4 days.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// The effect failed permanently.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Instead of an outcome that is too large to keep: its size; 0 if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
}

impl Completion {
    /// Converts an outcome. Of an oversize outcome, only the size is sent.
    pub fn new(outcome: RecordedOutcome, ttl_ms: u64) -> Self {
        let outcome = outcome.without_oversize_value();
        let ttl_ms = Some(ttl_ms.clamp(TTL_MS_MIN, TTL_MS_MAX));
        Self { omitted_bytes: omitted(&outcome), failed: outcome.failed, outcome: outcome.value, ttl_ms }
    }

    /// The outcome and how long it is kept; or why the request is not valid.
    pub fn into_outcome(self) -> Result<(RecordedOutcome, u64), String> {
        let ttl_ms = self.ttl_ms.unwrap_or(TTL_MS_DEFAULT);
        validate::within("ttl_ms", ttl_ms, TTL_MS_MIN, TTL_MS_MAX).map_err(|error| error.to_string())?;
        if self.outcome.is_some() && self.omitted_bytes.is_some() {
            return Err("give either outcome or omitted_bytes".to_owned());
        }
        Ok((outcome_of(self.failed, self.outcome, self.omitted_bytes), ttl_ms))
    }
}

/// `POST /v1/claims/{scope}/{key}/complete`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompleteBody {
    /// The claim's token.
    pub token: String,
    /// Any JSON; `null` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Json>,
    /// How long it is kept. 1 s to 366 days; default 4 days.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// The effect failed permanently.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Instead of an outcome that is too large to keep: its size; 0 if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
}

impl CompleteBody {
    /// Completes the claim of this token.
    pub fn new(token: Token, completion: Completion) -> Self {
        let Completion { outcome, ttl_ms, failed, omitted_bytes } = completion;
        Self { token: token.into(), outcome, ttl_ms, failed, omitted_bytes }
    }

    /// The token and the outcome.
    pub fn split(self) -> (String, Completion) {
        let Self { token, outcome, ttl_ms, failed, omitted_bytes } = self;
        (token, Completion { outcome, ttl_ms, failed, omitted_bytes })
    }
}

/// `POST /v1/claims/{scope}/{key}/renew`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenewBody {
    /// The claim's token.
    pub token: String,
    /// The new lease, counted from now. 1 ms to 12 h.
    pub lease_ms: u64,
}

/// `POST /v1/claims/{scope}/{key}/release`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseBody {
    /// The claim's token.
    pub token: String,
    /// The effect may have happened: the entry is in doubt at once, instead of free.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
}

/// An entry's state after a request: `completed`, `failed`, `in_doubt`, or `absent`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateResponse {
    /// The name of the state.
    pub state: String,
}

impl StateResponse {
    /// The state after this end of a claim.
    pub fn after(ending: &ClaimEnding) -> Self {
        let state = match ending {
            ClaimEnding::Complete { outcome, .. } if outcome.failed => "failed",
            ClaimEnding::Complete { .. } => "completed",
            ClaimEnding::Release => "absent",
            ClaimEnding::Doubt => "in_doubt",
        };
        Self { state: state.to_owned() }
    }
}

/// An operator's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResolveAs {
    /// The effect happened.
    Completed,
    /// The effect did not happen.
    Absent,
}

/// `POST /v1/claims/{scope}/{key}/resolve`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolveBody {
    /// Whether the effect happened.
    #[serde(rename = "as")]
    pub how: ResolveAs,
    /// With `completed`: the outcome for duplicates; `null` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Json>,
    /// With `completed`: how long it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// With `completed`: the effect failed permanently.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// With `completed`, instead of an outcome that is too large to keep: its size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
    /// Who decides, for the audit; the server prefixes the key's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl ResolveBody {
    /// Converts a decision.
    pub fn new(resolution: Resolution, by: &str) -> Self {
        let (how, completion) = match resolution {
            Resolution::Absent => (ResolveAs::Absent, Completion::default()),
            Resolution::Completed { outcome, ttl_ms } => {
                (ResolveAs::Completed, Completion::new(outcome, ttl_ms))
            }
        };
        let Completion { outcome, ttl_ms, failed, omitted_bytes } = completion;
        Self { how, outcome, ttl_ms, failed, omitted_bytes, by: Some(by.to_owned()) }
    }

    /// The decision and who made it; or why the request is not valid.
    pub fn split(self) -> Result<(Resolution, Option<String>), String> {
        let Self { how, outcome, ttl_ms, failed, omitted_bytes, by } = self;
        let resolution = match how {
            ResolveAs::Absent
                if outcome.is_some() || ttl_ms.is_some() || failed || omitted_bytes.is_some() =>
            {
                return Err("outcome, ttl_ms, failed and omitted_bytes do not go with as = absent".to_owned());
            }
            ResolveAs::Absent => Resolution::Absent,
            ResolveAs::Completed => {
                let completion = Completion { outcome, ttl_ms, failed, omitted_bytes };
                let (outcome, ttl_ms) = completion.into_outcome()?;
                Resolution::Completed { outcome, ttl_ms }
            }
        };
        Ok((resolution, by))
    }
}

/// The end of a claim, alone or with the end of a delivery: exactly one of `complete`, `release` and `in_doubt`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimEndItem {
    /// The namespace of the key: tenant and route, or queue.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// The claim's token.
    pub token: String,
    /// The effect has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complete: Option<Completion>,
    /// The effect did not happen.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub release: bool,
    /// The effect may have happened.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
}

impl From<EndClaim> for ClaimEndItem {
    fn from(end: EndClaim) -> Self {
        let EntryId { scope, key } = end.id;
        let item =
            Self { scope, key, token: end.token.into(), complete: None, release: false, in_doubt: false };
        match end.ending {
            ClaimEnding::Complete { outcome, ttl_ms } => {
                Self { complete: Some(Completion::new(outcome, ttl_ms)), ..item }
            }
            ClaimEnding::Release => Self { release: true, ..item },
            ClaimEnding::Doubt => Self { in_doubt: true, ..item },
        }
    }
}

impl ClaimEndItem {
    /// The end of the claim; the inner error is about the token, the outer one about the request.
    pub fn into_end(self) -> Result<Result<EndClaim, TokenError>, String> {
        let ending = match (self.complete, self.release, self.in_doubt) {
            (Some(completion), false, false) => {
                let (outcome, ttl_ms) = completion.into_outcome()?;
                ClaimEnding::Complete { outcome, ttl_ms }
            }
            (None, true, false) => ClaimEnding::Release,
            (None, false, true) => ClaimEnding::Doubt,
            _ => return Err("claim: give exactly one of complete, release and in_doubt".to_owned()),
        };
        let id = EntryId::new(self.scope, self.key);
        let token = Token::new(self.token).map_err(|_| TokenError::Stale);
        Ok(token.map(|token| EndClaim { id, token, ending }))
    }
}

/// `GET /v1/claims`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EntriesPage {
    /// The entries, ordered by their last claim.
    pub entries: Vec<EntryView>,
    /// Pass it as `after` for the next page; absent at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// `GET /v1/ledger`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LedgerReport {
    /// The features of the ledger.
    pub capabilities: LedgerCapabilities,
    /// Its counters.
    pub stats: LedgerStats,
}

impl From<ClaimError> for Problem {
    fn from(error: ClaimError) -> Self {
        let problem = Self::new(error.code(), error.to_string(), error.is_retryable());
        match error {
            ClaimError::Invalid(reason) => problem.with_reason(&reason),
            ClaimError::TooManyInDoubt { scope, open, in_doubt, max } => Self {
                scope: Some(scope.to_string()),
                used: Some(open),
                in_doubt: Some(in_doubt),
                max: Some(max),
                ..problem
            },
            ClaimError::Store(error) => error.into(),
            _ => problem,
        }
    }
}

impl From<TokenError> for Problem {
    fn from(error: TokenError) -> Self {
        Self::new(error.code(), error.to_string(), false)
    }
}

impl From<ResolveError> for Problem {
    fn from(error: ResolveError) -> Self {
        let problem = Self::new(error.code(), error.to_string(), false);
        match error {
            ResolveError::Store(error) => error.into(),
            ResolveError::InProgress { retry_after_ms } => {
                Self { retryable: true, ..problem.with_state("in_progress").with_retry_after(retry_after_ms) }
            }
            ResolveError::Invalid(reason) => problem.with_reason(&reason),
            _ => problem,
        }
    }
}

impl Problem {
    fn with_state(self, state: &str) -> Self {
        Self { state: Some(state.to_owned()), ..self }
    }

    fn with_retry_after(self, retry_after_ms: u64) -> Self {
        Self { retry_after_ms: Some(retry_after_ms), ..self }
    }

    /// The original answer to a claim; `None` if its code is not known here.
    pub fn to_claim_result(&self) -> Option<Result<Claim, ClaimError>> {
        Some(match self.code.as_str() {
            "in-progress" => Ok(Claim::InProgress { retry_after_ms: self.retry_after_ms? }),
            "in-doubt" => Ok(Claim::InDoubt { since_ms: self.since_ms? }),
            "fingerprint-mismatch" => Err(ClaimError::Mismatch),
            "invalid" => Err(ClaimError::Invalid(self.reason.clone().unwrap_or_else(|| self.detail.clone()))),
            "too-many-in-doubt" => Err(ClaimError::TooManyInDoubt {
                scope: Scope::new(self.scope.as_ref()?).ok()?,
                open: self.used?,
                in_doubt: self.in_doubt?,
                max: self.max?,
            }),
            _ => return None,
        })
    }

    /// The original token error; `None` if its code is not known here.
    pub fn to_token_error(&self) -> Option<TokenError> {
        Some(match self.code.as_str() {
            "stale-token" => TokenError::Stale,
            "claim-gone" => TokenError::Gone,
            "claim-ended" => TokenError::Ended,
            "damaged-entry" => TokenError::Damaged,
            _ => return None,
        })
    }

    /// The original error of a resolve or forget of `id`; `None` if its code is not known here.
    pub fn to_resolve_error(&self, id: &EntryId) -> Option<ResolveError> {
        Some(match self.code.as_str() {
            "no-such-entry" => ResolveError::NotFound(id.clone()),
            "in-progress" => ResolveError::InProgress { retry_after_ms: self.retry_after_ms? },
            "not-in-doubt" => ResolveError::NotInDoubt,
            "invalid" => ResolveError::Invalid(self.reason.clone().unwrap_or_else(|| self.detail.clone())),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::SettleError;
    use serde::de::DeserializeOwned;

    use super::*;

    fn over_the_wire<T: Serialize + DeserializeOwned>(value: &T) -> T {
        serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
    }

    fn json(text: &str) -> Json {
        Json::parse(text).unwrap()
    }

    fn outcomes() -> [RecordedOutcome; 5] {
        [
            RecordedOutcome { failed: false, value: None, omitted_bytes: None },
            RecordedOutcome::done(json(r#"{"paid" : 1.10}"#)),
            RecordedOutcome::done(json("null")),
            RecordedOutcome::failed(json("\"no such account\"")),
            RecordedOutcome { failed: true, value: None, omitted_bytes: Some(2_000_000) },
        ]
    }

    fn id() -> EntryId {
        EntryId::new(Scope::new("queue/jobs").unwrap(), IdempotencyKey::new("k").unwrap())
    }

    #[test]
    fn every_response_to_a_claim_survives_the_wire() {
        let grant = Grant { token: Token::new("t").unwrap(), fence: Fence(7), lease_ms: 5, takeover: true };
        let completed = outcomes().map(|outcome| Claim::Completed { outcome, at_ms: 1_735_689_599_999 });
        for claim in completed.into_iter().chain([
            Claim::Granted(grant),
            Claim::InProgress { retry_after_ms: 9 },
            Claim::InDoubt { since_ms: 3 },
        ]) {
            let back = match ClaimResponse::new(claim.clone()) {
                Ok(answer) => over_the_wire(&answer).into_claim(),
                Err(problem) => over_the_wire(&problem).to_claim_result().map(Result::unwrap),
            };
            assert_eq!(back, Some(claim));
        }
        let full = ClaimError::TooManyInDoubt { scope: id().scope, open: 9, in_doubt: 7, max: 8 };
        for error in [ClaimError::Mismatch, ClaimError::Invalid("why".into()), full] {
            assert_eq!(over_the_wire(&Problem::from(error.clone())).to_claim_result(), Some(Err(error)));
        }
    }

    #[test]
    fn every_request_survives_the_wire() {
        let mut request = ClaimRequest::new(id(), Owner::new("o").unwrap(), 7);
        request.delivery = Some((QueueName::new("jobs").unwrap(), Receipt::new("r").unwrap()));
        request.on_doubt = OnDoubt::Park;
        request.fingerprint = Some(Fingerprint::new("f").unwrap());
        let body = over_the_wire(&ClaimBody::from(request.clone()));
        assert_eq!(body.into_request(id(), || unreachable!("it names itself")), Ok(request));
        let endings = outcomes().map(|outcome| ClaimEnding::Complete { outcome, ttl_ms: 5_000 });
        for ending in endings.into_iter().chain([ClaimEnding::Release, ClaimEnding::Doubt]) {
            let end = EndClaim { id: id(), token: Token::new("t").unwrap(), ending };
            assert_eq!(over_the_wire(&ClaimEndItem::from(end.clone())).into_end(), Ok(Ok(end)));
        }
        let resolutions = outcomes().map(|outcome| Resolution::Completed { outcome, ttl_ms: 5_000 });
        for resolution in resolutions.into_iter().chain([Resolution::Absent]) {
            let body = over_the_wire(&ResolveBody::new(resolution.clone(), "ann"));
            assert_eq!(body.split(), Ok((resolution, Some("ann".to_owned()))));
        }
    }

    #[test]
    fn every_refusal_survives_the_wire() {
        for error in [TokenError::Stale, TokenError::Gone, TokenError::Ended, TokenError::Damaged] {
            assert_eq!(over_the_wire(&Problem::from(error)).to_token_error(), Some(error));
            let settle = SettleError::Claim(error);
            assert_eq!(over_the_wire(&Problem::from(settle.clone())).to_settle_error(), Some(settle));
        }
        for error in [
            ResolveError::NotFound(id()),
            ResolveError::InProgress { retry_after_ms: 4 },
            ResolveError::NotInDoubt,
            ResolveError::Invalid("why".into()),
        ] {
            assert_eq!(over_the_wire(&Problem::from(error.clone())).to_resolve_error(&id()), Some(error));
        }
    }

    #[test]
    fn of_an_oversize_outcome_only_its_size_travels() {
        let large =
            RecordedOutcome::done(Json::of(&"x".repeat(hapax_core::ledger::OUTCOME_BYTES_MAX)).unwrap());
        let completion = Completion::new(large.clone(), 5_000);
        assert!(serde_json::to_string(&completion).unwrap().len() < 100);
        assert_eq!(over_the_wire(&completion).into_outcome(), Ok((large.without_oversize_value(), 5_000)));
    }

    #[test]
    fn an_end_of_a_claim_is_one_of_three() {
        for body in [
            r#"{"scope":"s","key":"k","token":"t"}"#,
            r#"{"scope":"s","key":"k","token":"t","release":true,"in_doubt":true}"#,
            r#"{"scope":"s","key":"k","token":"t","release":true,"complete":{}}"#,
        ] {
            let item: ClaimEndItem = serde_json::from_str(body).unwrap();
            assert!(item.into_end().unwrap_err().contains("exactly one"), "{body}");
        }
    }
}

//! The ledger: claim, renew, complete, release; for operators: show, list, resolve, forget.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse, Response};
use hapax_client::wire::{
    ClaimBody, ClaimEndItem, ClaimItem, ClaimResponse, ClaimsRequest, CompleteBody, EndsRequest, EntriesPage,
    LedgerReport, ReleaseBody, RenewBody, RenewItem, RenewsRequest, ResolveBody, Results, StateResponse,
};
use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::{
    Batch, Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryState,
    EntryView, IdempotencyKey, Owner, RemainingLease, Renew, Resolution, ResolveError, Scope, StoreError,
    Token, TokenError, validate,
};
use http::StatusCode;
use http::request::Parts;
use ring::rand::SecureRandom as _;
use serde::Deserialize;

use super::Api;
use super::input::{Caller, Json, Params};
use super::messages::call_valid_items;
use super::problem::{ApiError, JsonResult};

/// Entries of a page when nothing else is asked for.
const LIMIT_DEFAULT: usize = 100;

/// The entry that the path names, its parts percent-decoded.
pub(super) struct EntryPath(EntryId);

impl<S: Send + Sync> FromRequestParts<S> for EntryPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((scope, key)) = path.map_err(|rejection| ApiError::invalid(rejection.body_text()))?;
        let invalid = |error: hapax_core::name::NameError| ApiError::invalid(error.to_string());
        let (scope, key) = (Scope::new(scope).map_err(invalid)?, IdempotencyKey::new(key).map_err(invalid)?);
        Ok(Self(EntryId::new(scope, key)))
    }
}

/// The result of a batch with one element.
fn single_result<T, E>(batch: Batch<T, E>) -> Result<T, ApiError>
where
    ApiError: From<E>,
{
    let answer =
        batch?.pop().ok_or_else(|| StoreError::OutcomeUnknown("the ledger gave no result".into()))?;
    Ok(answer?)
}

/// Parses a token. A text that cannot be a token is reported as stale, like any unknown token.
fn token(text: String) -> Result<Token, ApiError> {
    Token::new(text).map_err(|_| TokenError::Stale.into())
}

/// A name for a caller that gave none. A client that knows it can repeat the claim, so it must be unguessable.
fn random_owner() -> Owner {
    let mut random = [0; 16];
    ring::rand::SystemRandom::new().fill(&mut random).expect("the operating system has random numbers");
    Owner::new(format!("{:032x}", u128::from_be_bytes(random))).expect("hex digits are a valid owner")
}

pub(super) async fn claim(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Json(body): Json<ClaimBody>,
) -> Result<Response, ApiError> {
    let claim = single_result(native.claim(vec![claim_request(&caller, id, body)?]).await)?;
    let status = if matches!(claim, Claim::Granted(_)) { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(ClaimResponse::new(claim).map_err(|problem| *problem)?)).into_response())
}

/// A claim, if the caller may make it.
fn claim_request(caller: &Caller, id: EntryId, body: ClaimBody) -> Result<ClaimRequest, ApiError> {
    caller.check_scope("ClaimKey", &id.scope)?;
    if let Some(queue) = &body.queue {
        caller.check_queue("ClaimKey", queue)?;
    }
    Ok(body.into_request(id, random_owner)?)
}

/// A renewal, if the caller may make it.
fn renewal(caller: &Caller, id: EntryId, by: String, lease_ms: u64) -> Result<Renew, ApiError> {
    caller.check_scope("ClaimKey", &id.scope)?;
    validate::within("lease_ms", lease_ms, 1, LEASE_MS_MAX)?;
    Ok(Renew { id, token: token(by)?, lease_ms })
}

impl Api {
    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        if batch.iter().all(|request| request.wait_ms == 0) {
            return self.store.claim(batch).await;
        }
        let waiting = self.waiting_receives.begin(None);
        let at_once = batch.iter().map(|request| ClaimRequest { wait_ms: 0, ..request.clone() }).collect();
        let claims = tokio::select! {
            biased;
            claims = self.store.claim(batch) => claims,
            // Asked again by the same owner, so that a claim that was given meanwhile does not get lost.
            () = self.shutdown.requested() => self.store.claim(at_once).await,
        };
        drop(waiting);
        claims
    }

    async fn end(&self, id: EntryId, by: String, ending: ClaimEnding) -> JsonResult<StateResponse> {
        let answer = StateResponse::after(&ending);
        single_result(self.store.end(vec![EndClaim { id, token: token(by)?, ending }]).await)?;
        Ok(axum::Json(answer))
    }
}

/// An element's answer, or why it has none.
type BatchResult<T> = JsonResult<Results<T>>;

/// Has the acceptable elements of a batch answered; the others keep their problems. Rights are checked element by element.
async fn call_valid_claims<A, T, E, F>(
    items: Vec<Result<A, ApiError>>,
    call: impl FnOnce(Vec<A>) -> F,
) -> Result<Vec<Result<T, ApiError>>, ApiError>
where
    F: Future<Output = Batch<T, E>>,
    ApiError: From<E>,
{
    let call = async |good| {
        let answers: Vec<Result<T, E>> = call(good).await?;
        Ok(answers.into_iter().map(|answer| answer.map_err(ApiError::from)).collect())
    };
    Ok(call_valid_items(items, call).await?)
}

pub(super) async fn claim_batch(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(request): Json<ClaimsRequest>,
) -> BatchResult<ClaimResponse> {
    validate::batch("claims", request.claims.len())?;
    let item = |item: ClaimItem| {
        let (id, body) = item.split();
        claim_request(&caller, id, body)
    };
    let items = request.claims.into_iter().map(item).collect();
    let answers = call_valid_claims(items, |batch| native.claim(batch)).await?;
    let answer = |answer: Result<Claim, ApiError>| {
        ClaimResponse::new(answer?).map_err(|problem| ApiError::from(*problem))
    };
    let answers: Vec<_> = answers.into_iter().map(answer).collect();
    Ok(axum::Json(Results::new(answers, |answer| answer)))
}

pub(super) async fn renew_batch(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(request): Json<RenewsRequest>,
) -> BatchResult<RemainingLease> {
    validate::batch("renew", request.renew.len())?;
    let item = |item: RenewItem| {
        let RenewItem { scope, key, token, lease_ms } = item;
        renewal(&caller, EntryId::new(scope, key), token, lease_ms)
    };
    let items = request.renew.into_iter().map(item).collect();
    let answers = call_valid_claims(items, |batch| native.store.renew(batch)).await?;
    Ok(axum::Json(Results::new(answers, |remaining| remaining)))
}

pub(super) async fn end_batch(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(request): Json<EndsRequest>,
) -> BatchResult<StateResponse> {
    validate::batch("end", request.end.len())?;
    let item = |item: ClaimEndItem| {
        caller.check_scope("ClaimKey", &item.scope)?;
        Ok(item.into_end().map_err(ApiError::invalid)??)
    };
    let items: Vec<Result<EndClaim, ApiError>> = request.end.into_iter().map(item).collect();
    let after =
        |item: &Result<EndClaim, ApiError>| item.as_ref().ok().map(|end| StateResponse::after(&end.ending));
    let states: Vec<_> = items.iter().map(after).collect();
    let answers = call_valid_claims(items, |batch| native.store.end(batch)).await?;
    let state = |(answer, state): (Result<(), ApiError>, Option<StateResponse>)| {
        answer.map(|()| state.expect("an element that was ended was acceptable"))
    };
    let answers: Vec<_> = answers.into_iter().zip(states).map(state).collect();
    Ok(axum::Json(Results::new(answers, |state| state)))
}

pub(super) async fn renew(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Json(RenewBody { token: by, lease_ms }): Json<RenewBody>,
) -> JsonResult<RemainingLease> {
    single_result(native.store.renew(vec![renewal(&caller, id, by, lease_ms)?]).await).map(axum::Json)
}

pub(super) async fn complete(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Json(body): Json<CompleteBody>,
) -> JsonResult<StateResponse> {
    caller.check_scope("ClaimKey", &id.scope)?;
    let (token, completion) = body.split();
    let (outcome, ttl_ms) = completion.into_outcome().map_err(ApiError::invalid)?;
    native.end(id, token, ClaimEnding::Complete { outcome, ttl_ms }).await
}

pub(super) async fn release(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Json(ReleaseBody { token, in_doubt }): Json<ReleaseBody>,
) -> JsonResult<StateResponse> {
    caller.check_scope("ClaimKey", &id.scope)?;
    native.end(id, token, if in_doubt { ClaimEnding::Doubt } else { ClaimEnding::Release }).await
}

pub(super) async fn resolve(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Json(body): Json<ResolveBody>,
) -> JsonResult<StateResponse> {
    caller.check_scope("ResolveClaims", &id.scope)?;
    let (resolution, by) = body.split().map_err(ApiError::invalid)?;
    hapax_http::check_resolution(&id.scope, &resolution)
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    let answer = StateResponse::after(&match &resolution {
        Resolution::Absent => ClaimEnding::Release,
        Resolution::Completed { outcome, ttl_ms } => {
            ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: *ttl_ms }
        }
    });
    native.store.resolve(&id, resolution, &caller.audit_name(by)).await?;
    Ok(axum::Json(answer))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ForgetParams {
    by: Option<String>,
}

pub(super) async fn forget(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
    Params(ForgetParams { by }): Params<ForgetParams>,
) -> Result<StatusCode, ApiError> {
    caller.check_scope("ForgetClaims", &id.scope)?;
    native.store.forget(&id, &caller.audit_name(by)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn show(
    State(native): State<Arc<Api>>,
    caller: Caller,
    EntryPath(id): EntryPath,
) -> JsonResult<EntryView> {
    caller.check_scope("BrowseClaims", &id.scope)?;
    let entry = native.store.entry(&id).await?;
    Ok(axum::Json(entry.ok_or(ResolveError::NotFound(id))?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ListParams {
    scope: Option<Scope>,
    state: Option<EntryState>,
    after: Option<u64>,
    limit: usize,
}

impl Default for ListParams {
    fn default() -> Self {
        Self { scope: None, state: None, after: None, limit: LIMIT_DEFAULT }
    }
}

/// Lists entries. Without a scope it lists all scopes that the caller may see, so a page may be short.
pub(super) async fn list(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Params(ListParams { scope, state, after, limit }): Params<ListParams>,
) -> JsonResult<EntriesPage> {
    match &scope {
        Some(scope) => caller.check_scope("BrowseClaims", scope)?,
        None => caller.check_action("BrowseClaims")?,
    }
    let page = native.store.entries(EntryFilter { scope, state, after, limit }).await?;
    let entries = page.items.into_iter().filter(|entry| caller.may_see_scope(&entry.id.scope)).collect();
    Ok(axum::Json(EntriesPage { entries, next: page.next }))
}

pub(super) async fn ledger(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<LedgerReport> {
    caller.check_operator("BrowseClaims")?;
    let stats = native.store.ledger_stats().await?;
    Ok(axum::Json(LedgerReport { capabilities: native.store.ledger_capabilities(), stats }))
}

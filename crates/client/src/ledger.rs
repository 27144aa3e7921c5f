//! The ledger seam over HTTP: a batch is one request, or a few where its outcomes are large.
//!
//! A claim may have been granted although its response was lost or its caller stopped waiting. The client does not
//! release it: the caller may have repeated the request with the same owner, and hold the claim by now.

use std::fmt::Write as _;
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, Page, RemainingLease, Renew, Resolution, ResolveError, StoreError,
    TokenError, validate,
};
use http::{Method, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Client;
use crate::store::{REQUEST_BYTES_MAX, partial_failure};
use crate::transport::{Effect, Failure, encode};
use crate::wire::{
    ClaimEndItem, ClaimItem, ClaimResponse, ClaimsRequest, EndsRequest, EntriesPage, ItemResult,
    LedgerReport, Problem, RenewItem, RenewsRequest, ResolveBody, Results, StateResponse,
};

fn path(id: &EntryId) -> String {
    let encode = |part: &str| utf8_percent_encode(part, NON_ALPHANUMERIC).to_string();
    format!("/v1/claims/{}/{}", encode(id.scope.as_str()), encode(id.key.as_str()))
}

#[async_trait]
impl Ledger for Client {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.cached_ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        let wait_ms = batch.iter().map(|request| request.wait_ms).max().unwrap_or_default();
        let call_guard = (wait_ms > 0).then(|| self.count_call());
        let wait = Duration::from_millis(wait_ms);
        let claims: Vec<_> = batch.into_iter().map(ClaimItem::from).collect();
        let expected = claims.len();
        let results = self.call_batch("/v1/claims", &ClaimsRequest { claims }, expected, wait).await?;
        drop(call_guard);
        let claimed = |answer: ClaimResponse| answer.into_claim().map(Ok);
        convert_results(results, claimed, |problem| {
            problem.to_claim_result().or_else(|| Some(Err(ClaimError::Store(problem.to_store_error()?))))
        })
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        validate::batch("renew", batch.len())?;
        let item = |Renew { id: EntryId { scope, key }, token, lease_ms }| {
            // A store takes what it can of a lease that is out of range; the server refuses it.
            let lease_ms = lease_ms.clamp(1, LEASE_MS_MAX);
            RenewItem { scope, key, token: token.into(), lease_ms }
        };
        let renew: Vec<_> = batch.into_iter().map(item).collect();
        let expected = renew.len();
        let body = RenewsRequest { renew };
        let results = self.call_batch("/v1/claims/renew", &body, expected, Duration::ZERO).await?;
        convert_results(results, |remaining| Some(Ok(remaining)), |problem| problem.to_token_error().map(Err))
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        let parts = split_ends(batch.into_iter().map(ClaimEndItem::from).collect());
        let (count, mut answers) = (parts.len(), Vec::new());
        for (at, end) in parts.into_iter().enumerate() {
            let expected = end.len();
            let body = EndsRequest { end };
            let results = self.call_batch("/v1/claims/end", &body, expected, Duration::ZERO).await;
            let part = results.and_then(|results: Results<StateResponse>| {
                convert_results(results, |_| Some(Ok(())), |problem| problem.to_token_error().map(Err))
            });
            answers.extend(part.map_err(|error| partial_failure(error, at, count))?);
        }
        Ok(answers)
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        match self.transport.get(&path(id)).await {
            Ok(entry) => Ok(Some(entry)),
            Err(Failure::Refused(StatusCode::NOT_FOUND, problem)) if problem.code == "no-such-entry" => {
                Ok(None)
            }
            Err(failure) => Err(failure.into_store_error(Effect::None)),
        }
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        let mut path = format!("/v1/claims?limit={}", filter.limit);
        if let Some(scope) = &filter.scope {
            let _ = write!(path, "&scope={}", utf8_percent_encode(scope.as_str(), NON_ALPHANUMERIC));
        }
        if let Some(state) = filter.state {
            let _ = write!(path, "&state={}", state.as_str());
        }
        if let Some(after) = filter.after {
            let _ = write!(path, "&after={after}");
        }
        let answer: Result<EntriesPage, Failure> = self.transport.get(&path).await;
        let answer = answer.map_err(|failure| failure.into_store_error(Effect::None))?;
        Ok(Page { items: answer.entries, next: answer.next })
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        let body = ResolveBody::new(resolution, by);
        let answer: Result<StateResponse, Failure> =
            self.transport.post(&format!("{}/resolve", path(id)), &body).await;
        answer.map(drop).map_err(|failure| resolve_error(failure, id))
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        let path = format!("{}?by={}", path(id), utf8_percent_encode(by, NON_ALPHANUMERIC));
        self.transport.delete(&path).await.map_err(|failure| resolve_error(failure, id))
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        let answer: Result<LedgerReport, Failure> = self.transport.get("/v1/ledger").await;
        answer.map(|report| report.stats).map_err(|failure| failure.into_store_error(Effect::None))
    }
}

impl Client {
    /// One request for all elements; `wait` is how long the server may take beyond the usual.
    async fn call_batch<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        expected: usize,
        wait: Duration,
    ) -> Result<Results<T>, StoreError> {
        if expected == 0 {
            return Ok(Results { failed: 0, results: Vec::new() });
        }
        let body = encode(body).map_err(|failure| failure.into_store_error(Effect::None))?;
        let timeout = self.transport.timeout + wait;
        let answer: Result<Results<T>, Failure> =
            self.transport.call(Method::POST, path, body, timeout).await;
        let answer = answer.map_err(|failure| failure.into_store_error(Effect::Change))?;
        if answer.results.len() == expected {
            return Ok(answer);
        }
        let why = format!("the server gave {} results for {expected} elements", answer.results.len());
        Err(StoreError::OutcomeUnknown(why))
    }
}

/// The answer to each element. One that is not known here says nothing about the others, which may have been done: the
/// whole is then neither done nor undone, unless it is the only one.
fn convert_results<T, A, E>(
    results: Results<T>,
    done: impl Fn(T) -> Option<Result<A, E>>,
    failed: impl Fn(&Problem) -> Option<Result<A, E>>,
) -> Batch<A, E> {
    let count = results.results.len();
    let answer = |(at, element)| match element {
        ItemResult::Done(answer) => done(answer)
            .ok_or_else(|| StoreError::OutcomeUnknown("the server's response cannot be read".into())),
        ItemResult::Failed { error } => failed(&error).ok_or_else(|| {
            let detail = format!("the server answered {}: {}", error.code, error.detail);
            match count {
                1 => StoreError::Invalid(detail),
                _ => StoreError::OutcomeUnknown(format!("element {} of {count}: {detail}", at + 1)),
            }
        }),
    };
    results.results.into_iter().enumerate().map(answer).collect()
}

/// Cuts a batch whose outcomes are large; each alone is at most 1 MiB.
fn split_ends(batch: Vec<ClaimEndItem>) -> Vec<Vec<ClaimEndItem>> {
    let (mut parts, mut part, mut size) = (Vec::new(), Vec::new(), 0);
    for item in batch {
        let outcome = item.complete.as_ref().and_then(|completion| completion.outcome.as_ref());
        // Names and tokens fit into the 4 KiB, however they are escaped.
        let bytes = 4096 + outcome.map_or(0, |json| json.as_str().len());
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

/// What a refusal says about one element, if it is about that; else why the whole failed.
fn refusal_or_error<T>(failure: Failure, read: impl Fn(&Problem) -> Option<T>) -> Result<T, StoreError> {
    if let Failure::Refused(_, problem) = &failure
        && let Some(answer) = read(problem)
    {
        return Ok(answer);
    }
    Err(failure.into_store_error(Effect::Change))
}

fn resolve_error(failure: Failure, id: &EntryId) -> ResolveError {
    refusal_or_error(failure, |problem| problem.to_resolve_error(id)).unwrap_or_else(ResolveError::Store)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(code: &str) -> ItemResult<RemainingLease> {
        ItemResult::Failed { error: Box::new(Problem::new(code, "why", false)) }
    }

    fn read(results: Vec<ItemResult<RemainingLease>>) -> Batch<RemainingLease, TokenError> {
        let failed = results.iter().filter(|element| matches!(element, ItemResult::Failed { .. })).count();
        let results = Results { failed, results };
        convert_results(results, |remaining| Some(Ok(remaining)), |problem| problem.to_token_error().map(Err))
    }

    #[test]
    fn each_element_has_its_result_and_an_unknown_one_leaves_the_rest_unknown() {
        let done = || ItemResult::Done(RemainingLease { lease_ms: 7 });
        let answers = read(vec![done(), problem("stale-token"), done()]).unwrap();
        let kept = Ok(RemainingLease { lease_ms: 7 });
        assert_eq!(answers, [kept, Err(TokenError::Stale), kept]);
        let half = read(vec![done(), problem("forbidden")]).unwrap_err();
        assert!(
            matches!(&half, StoreError::OutcomeUnknown(why) if why.contains("element 2 of 2: the server answered forbidden")),
            "{half}"
        );
        assert!(matches!(read(vec![problem("forbidden")]), Err(StoreError::Invalid(_))));
        assert_eq!(read(Vec::new()), Ok(Vec::new()));
    }

    #[test]
    fn a_batch_of_large_outcomes_is_cut() {
        let item = |bytes: usize| ClaimEndItem {
            scope: "s".parse().unwrap(),
            key: "k".parse().unwrap(),
            token: "t".into(),
            complete: Some(crate::wire::Completion {
                outcome: Some(hapax_core::Json::of(&"x".repeat(bytes)).unwrap()),
                ..Default::default()
            }),
            release: false,
            in_doubt: false,
        };
        let sizes =
            |batch: Vec<ClaimEndItem>| -> Vec<usize> { split_ends(batch).iter().map(Vec::len).collect() };
        assert_eq!(sizes((0..100).map(|_| item(10)).collect()), [100]);
        let large = sizes((0..20).map(|_| item(1_000_000)).collect());
        assert!(large.len() > 2 && large.iter().sum::<usize>() == 20, "{large:?}");
    }

    #[test]
    fn a_path_carries_any_scope_and_key() {
        let id = EntryId::new("tenant/ä".parse().unwrap(), "../a?b#c d%".parse().unwrap());
        assert_eq!(path(&id), "/v1/claims/tenant%2F%C3%A4/%2E%2E%2Fa%3Fb%23c%20d%25");
    }
}

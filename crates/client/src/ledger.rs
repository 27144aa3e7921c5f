//! The ledger seam over HTTP.
//!
//! The API claims one key a request, so that any language can call it. A batch is as many requests at once; those of
//! one key go one after the other, since the second is to find the first's claim.
//!
//! A claim whose answer got lost, or whose caller gave up waiting, may have been given. It is not given back from here:
//! the caller may have asked again with the same owner, and hold it by now.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::{
    Batch, Claim, ClaimEnd, ClaimError, ClaimRequest, Ending, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, Page, Remaining, Renew, Resolution, ResolveError, StoreError,
    TokenError,
};
use http::{Method, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::Client;
use crate::transport::{Effect, Failure, encode};
use crate::wire::{
    ClaimAnswer, ClaimBody, CompleteBody, Completion, Entries, LedgerReport, Problem, ReleaseBody, RenewBody,
    ResolveBody, StateAnswer,
};

/// Requests of one batch that are under way at the same time.
const AT_ONCE: usize = 64;

fn path(id: &EntryId) -> String {
    let encode = |part: &str| utf8_percent_encode(part, NON_ALPHANUMERIC).to_string();
    format!("/v1/claims/{}/{}", encode(id.scope.as_str()), encode(id.key.as_str()))
}

#[async_trait]
impl Ledger for Client {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.known_ledger()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        let client = self.clone();
        each(batch, |request| &request.id, move |request| client.clone().claim_one(request)).await
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<Remaining, TokenError> {
        let client = self.clone();
        let renew = move |renew: Renew| {
            let client = client.clone();
            async move {
                // A store takes what it can of a lease that is out of range; the server refuses it.
                let lease_ms = renew.lease_ms.clamp(1, LEASE_MS_MAX);
                let body = RenewBody { token: renew.token.into(), lease_ms };
                client.by_token(format!("{}/renew", path(&renew.id)), &body).await
            }
        };
        each(batch, |renew| &renew.id, renew).await
    }

    async fn end(&self, batch: Vec<ClaimEnd>) -> Batch<(), TokenError> {
        let client = self.clone();
        each(batch, |end| &end.id, move |end| client.clone().end_one(end)).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        match self.transport.get(&path(id)).await {
            Ok(entry) => Ok(Some(entry)),
            Err(Failure::Refused(StatusCode::NOT_FOUND, problem)) if problem.code == "no-such-entry" => {
                Ok(None)
            }
            Err(failure) => Err(failure.into_store(Effect::None)),
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
        let answer: Result<Entries, Failure> = self.transport.get(&path).await;
        let answer = answer.map_err(|failure| failure.into_store(Effect::None))?;
        Ok(Page { items: answer.entries, next: answer.next })
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        let body = ResolveBody::new(resolution, by);
        let answer: Result<StateAnswer, Failure> =
            self.transport.post(&format!("{}/resolve", path(id)), &body).await;
        answer.map(drop).map_err(|failure| not_resolved(failure, id))
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        let path = format!("{}?by={}", path(id), utf8_percent_encode(by, NON_ALPHANUMERIC));
        self.transport.delete(&path).await.map_err(|failure| not_resolved(failure, id))
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        let answer: Result<LedgerReport, Failure> = self.transport.get("/v1/ledger").await;
        answer.map(|report| report.stats).map_err(|failure| failure.into_store(Effect::None))
    }
}

impl Client {
    async fn claim_one(self, request: ClaimRequest) -> Result<Result<Claim, ClaimError>, StoreError> {
        let path = path(&request.id);
        let wait = Duration::from_millis(request.wait_ms);
        let under_way = (request.wait_ms > 0).then(|| self.begin_wait());
        let body = encode(&ClaimBody::from(request)).map_err(|failure| failure.into_store(Effect::None))?;
        let timeout = self.transport.timeout + wait;
        let answer: Result<ClaimAnswer, Failure> =
            self.transport.call(Method::PUT, &path, body, timeout).await;
        drop(under_way);
        match answer {
            Ok(answer) => answer.into_claim().map(Ok).ok_or_else(|| {
                StoreError::OutcomeUnknown("the server's answer is no answer to a claim".into())
            }),
            Err(failure) => refused(failure, Problem::to_claim),
        }
    }

    async fn end_one(self, end: ClaimEnd) -> Result<Result<(), TokenError>, StoreError> {
        let ClaimEnd { id, token, ending } = end;
        let path = path(&id);
        let answer: Result<Result<StateAnswer, _>, _> = match ending {
            Ending::Complete { outcome, ttl_ms } => {
                let body = CompleteBody::new(token, Completion::new(outcome, ttl_ms));
                self.by_token(format!("{path}/complete"), &body).await
            }
            Ending::Release | Ending::Doubt => {
                let body = ReleaseBody { token: token.into(), in_doubt: ending == Ending::Doubt };
                self.by_token(format!("{path}/release"), &body).await
            }
        };
        answer.map(|ended| ended.map(drop))
    }

    async fn by_token<B: Serialize, T: DeserializeOwned>(
        &self,
        path: String,
        body: &B,
    ) -> Result<Result<T, TokenError>, StoreError> {
        match self.transport.post(&path, body).await {
            Ok(answer) => Ok(Ok(answer)),
            Err(failure) => refused(failure, Problem::to_token).map(Err),
        }
    }
}

/// What a refusal says about one element, if it is about that; else why the whole failed.
fn refused<T>(failure: Failure, read: impl Fn(&Problem) -> Option<T>) -> Result<T, StoreError> {
    if let Failure::Refused(_, problem) = &failure
        && let Some(answer) = read(problem)
    {
        return Ok(answer);
    }
    Err(failure.into_store(Effect::Change))
}

fn not_resolved(failure: Failure, id: &EntryId) -> ResolveError {
    refused(failure, |problem| problem.to_resolve(id)).unwrap_or_else(ResolveError::Store)
}

/// Makes a request of each element. Where one has no answer although others were done, the whole is neither done nor
/// undone; every request may be repeated.
async fn each<A, T, E, F>(
    batch: Vec<A>,
    id: impl Fn(&A) -> &EntryId,
    call: impl Fn(A) -> F + Clone + Send + 'static,
) -> Batch<T, E>
where
    A: Send + 'static,
    T: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<Result<T, E>, StoreError>> + Send + 'static,
{
    let count = batch.len();
    let mut lanes: Vec<Vec<(usize, A)>> = Vec::new();
    let mut lane_of: HashMap<EntryId, usize> = HashMap::new();
    for (at, element) in batch.into_iter().enumerate() {
        let lane = *lane_of.entry(id(&element).clone()).or_insert(lanes.len());
        if lane == lanes.len() {
            lanes.push(Vec::new());
        }
        lanes[lane].push((at, element));
    }
    let run = |lane: Vec<(usize, A)>| {
        let call = call.clone();
        async move {
            let mut answers = Vec::with_capacity(lane.len());
            for (at, element) in lane {
                answers.push((at, call(element).await));
            }
            answers
        }
    };
    let mut answers = Vec::with_capacity(count);
    let mut lanes = lanes.into_iter();
    if lanes.len() == 1 {
        answers = run(lanes.next().expect("one")).await;
    }
    let mut under_way: JoinSet<_> = lanes.by_ref().take(AT_ONCE).map(run).collect();
    while let Some(lane) = under_way.join_next().await {
        let lane = lane.map_err(|_| StoreError::OutcomeUnknown("the runtime is shutting down".into()))?;
        answers.extend(lane);
        if let Some(next) = lanes.next() {
            under_way.spawn(run(next));
        }
    }
    answers.sort_unstable_by_key(|(at, _)| *at);
    let some_done = answers.iter().any(|(_, answer)| answer.is_ok());
    let answer = |(at, answer): (usize, Result<Result<T, E>, StoreError>)| match answer {
        Err(error) if some_done && !matches!(error, StoreError::OutcomeUnknown(_)) => {
            Err(StoreError::OutcomeUnknown(format!("element {} of {count} failed: {error}", at + 1)))
        }
        answer => answer,
    };
    answers.into_iter().map(answer).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    fn entry(key: usize) -> EntryId {
        EntryId::new("s".parse().unwrap(), key.to_string().parse().unwrap())
    }

    #[tokio::test]
    async fn a_batch_is_bounded_and_keeps_its_order_and_that_of_each_key() {
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let call = {
            let (now, most, seen) = (now.clone(), most.clone(), seen.clone());
            move |(id, at): (EntryId, usize)| {
                let (now, most, seen) = (now.clone(), most.clone(), seen.clone());
                async move {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    now.fetch_sub(1, Ordering::SeqCst);
                    seen.lock().unwrap().push((id, at));
                    Ok(Ok::<_, ()>(at))
                }
            }
        };
        let batch: Vec<_> = (0..600).map(|at| (entry(at % 200), at)).collect();
        let answers = each(batch, |element| &element.0, call).await.unwrap();
        assert_eq!(answers, (0..600).map(Ok).collect::<Vec<_>>());
        assert_eq!(most.load(Ordering::SeqCst), AT_ONCE);
        for key in 0..200 {
            let of_key: Vec<_> =
                seen.lock().unwrap().iter().filter(|(id, _)| *id == entry(key)).map(|(_, at)| *at).collect();
            assert_eq!(of_key, [key, key + 200, key + 400]);
        }
    }

    #[tokio::test]
    async fn what_is_half_done_is_unknown_and_what_is_not_done_says_why() {
        let fail = |from: usize| {
            move |(_, at): (EntryId, usize)| async move {
                if at < from { Ok(Ok::<_, ()>(at)) } else { Err(StoreError::Unavailable("down".into())) }
            }
        };
        let batch = || (0..3).map(|at| (entry(at), at)).collect::<Vec<_>>();
        let half = each(batch(), |element| &element.0, fail(2)).await.unwrap_err();
        assert!(matches!(&half, StoreError::OutcomeUnknown(why) if why.contains("element 3 of 3")), "{half}");
        let none = each(batch(), |element| &element.0, fail(0)).await.unwrap_err();
        assert_eq!(none, StoreError::Unavailable("down".into()));
        assert_eq!(each(Vec::new(), |element| &element.0, fail(0)).await, Ok(Vec::new()));
    }

    #[test]
    fn a_path_carries_any_scope_and_key() {
        let id = EntryId::new("tenant/ä".parse().unwrap(), "../a?b#c d%".parse().unwrap());
        assert_eq!(path(&id), "/v1/claims/tenant%2F%C3%A4/%2E%2E%2Fa%3Fb%23c%20d%25");
    }
}

//! One request with a key: claim, run, record, respond.
//!
//! Each runs in its own task, so that a client that disconnects cancels nothing: a run that has begun is finished and
//! recorded.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hapax_claim::{ClaimResponse, EndError, Granted, HeldClaim};
use hapax_core::{
    ClaimEnding, ClaimError, ClaimRequest, EntryId, Fingerprint, Grant, RecordedOutcome, TokenError,
};
use hapax_observe::trace::SpanContext;
use http::header::{CONTENT_TYPE, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, response};
use http_body::Body as HttpBody;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tower_service::Service;

use crate::body::{Body, BoxError, CompleteBody, ReadResult, read};
use crate::headers;
use crate::layer::{KeyedRun, LayerState};
use crate::policy::{EffectVerdict, OnOutage, Policy, ms};
use crate::problem::Problem;
use crate::span;
use crate::stored::{self, Replay};

/// Maximum time for retries to record a run's outcome, in milliseconds: its caller waits. The claim is renewed
/// meanwhile.
pub(crate) const RECORD_MS_MAX: u64 = 10_000;
/// Maximum number of concurrent requests with keys; each may hold a body of the policy's maximum size.
const RUNS_MAX: usize = 10_000;
/// The label from which a request's derived key is made.
const LABEL: &str = "http";
/// Why a request ended whose service was not called within the time of a run.
const NOT_READY_IN_TIME: &str = "the service did not become ready in time";
const NOT_READY_PANICKED: &str = "the service panicked before it was ready";

/// A request with a key, ready to run.
pub(crate) struct KeyedRequest {
    pub(crate) shared: Arc<LayerState>,
    pub(crate) id: EntryId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) policy: Arc<Policy>,
    pub(crate) parts: Parts,
    pub(crate) body: CompleteBody,
}

/// Counts the current runs.
#[derive(Default)]
pub(crate) struct RunCounter {
    count: AtomicUsize,
    none: Notify,
}

impl RunCounter {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    pub(crate) async fn idle(&self) {
        loop {
            let none = self.none.notified();
            tokio::pin!(none);
            none.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            none.await;
        }
    }
}

/// The right to be one of the requests that run under a claim; given back when it is dropped.
struct RunPermit(Arc<LayerState>);

impl RunPermit {
    /// `None`: as many are under way as may be.
    fn take(shared: &Arc<LayerState>) -> Option<Self> {
        let permit = Self(shared.clone());
        (shared.running.count.fetch_add(1, Ordering::SeqCst) < RUNS_MAX).then_some(permit)
    }
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        if self.0.running.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.running.none.notify_waiters();
        }
    }
}

/// The result of the service.
enum ServiceResult<E> {
    /// A response with its complete body.
    Complete(Box<response::Parts>, CompleteBody),
    /// A response whose body is streamed through, and the reason.
    Streamed(Box<response::Parts>, Body, &'static str),
    /// The service failed without a response.
    Failed(E),
    /// The response's body was interrupted.
    Interrupted(BoxError),
}

/// The result of waiting for the service.
enum RunEnd<E> {
    Finished(ServiceResult<E>),
    Panicked,
    TooLong,
    Lost,
}

impl KeyedRequest {
    /// Runs it in its own task and waits for the response.
    pub(crate) async fn spawn<S, R>(self, inner: S) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        R: HttpBody<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        // A run outlives its connection, so bounds on connections do not bound it.
        let Some(permit) = RunPermit::take(&self.shared) else { return Ok(overloaded().into_response()) };
        let task = tokio::spawn(async move {
            let answer = self.claim_and_run(inner).await;
            drop(permit);
            answer
        });
        match task.await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::error!(%error, "a request's task ended without a response; its key is in doubt");
                Ok(run_interrupted("it ended unexpectedly").into_response())
            }
        }
    }

    async fn claim_and_run<S, R>(self, inner: S) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        R: HttpBody<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        let counters = &self.shared.counters;
        let refused = match self.shared.claims.claim(vec![self.claim_request()]).await.pop() {
            Some(ClaimResponse::Granted(granted)) => return self.run(inner, granted).await,
            Some(ClaimResponse::Completed(outcome)) => return Ok(self.replay(&outcome)),
            Some(ClaimResponse::InProgress { retry_after_ms }) => {
                counters.refused_in_progress.add();
                in_progress(retry_after_ms)
            }
            Some(ClaimResponse::InDoubt) => {
                counters.refused_in_doubt.add();
                in_doubt(&self.id, self.shared.admin.as_deref())
            }
            Some(ClaimResponse::Refused(ClaimError::Mismatch)) => {
                counters.refused_mismatch.add();
                fingerprint_mismatch()
            }
            Some(ClaimResponse::Refused(ClaimError::TooManyInDoubt { scope, open, in_doubt, max })) => {
                tracing::warn!(%scope, open, in_doubt, max, "no claim: too many keys of this scope are in doubt");
                counters.refused_by_outage.add();
                too_many_in_doubt(in_doubt)
            }
            Some(ClaimResponse::Refused(error)) => {
                tracing::error!(id = %self.id, %error, "the ledger refused a claim");
                ledger_unavailable("the ledger refused the claim")
            }
            Some(ClaimResponse::Unconfirmed(error)) => {
                tracing::warn!(id = %self.id, %error, "no claim: the ledger did not confirm it");
                counters.refused_by_outage.add();
                ledger_unavailable("the ledger did not confirm the claim in time")
            }
            answer @ (Some(ClaimResponse::Unavailable(_)) | None) => {
                let error = match answer {
                    Some(ClaimResponse::Unavailable(error)) => error.to_string(),
                    _ => "no response".to_owned(),
                };
                tracing::warn!(id = %self.id, error, "no claim: the ledger cannot be reached");
                if self.policy.on_outage == OnOutage::Open {
                    return self.run_unprotected(inner).await;
                }
                counters.refused_by_outage.add();
                ledger_unavailable(
                    "the ledger cannot be reached, so it cannot be known whether this request has run before",
                )
            }
        };
        Ok(refused.into_response())
    }

    fn claim_request(&self) -> ClaimRequest {
        ClaimRequest {
            fingerprint: Some(self.fingerprint.clone()),
            wait_ms: ms(self.policy.wait),
            on_doubt: self.policy.on_doubt,
            ..ClaimRequest::new(self.id.clone(), self.shared.owners.next(), ms(self.policy.lease))
        }
    }

    fn replay(&self, outcome: &RecordedOutcome) -> Response<Body> {
        match stored::replay(outcome) {
            Replay::Response(response) => {
                self.shared.counters.replayed.add();
                *response
            }
            Replay::Omitted { status, why } => {
                self.shared.counters.refused_not_stored.add();
                response_not_stored(status, &why).into_response()
            }
        }
    }

    /// Runs the request without a claim, as `on_outage = open` requires. The usual timeout for the response applies.
    async fn run_unprotected<S, R>(mut self, inner: S) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        R: HttpBody<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        self.add_run_info(None);
        let run_max = self.policy.run_max;
        let request = Request::from_parts(self.parts, Body::from_complete(self.body));
        let decision = CallDecision::default();
        let _count = CountIfCalled { decision: decision.clone(), shared: self.shared.clone() };
        // A task of its own, so that a panic before the call can be told from one after it.
        let mut task = tokio::spawn(call_when_ready(inner, request, decision.clone()));
        let problem = match self.shared.timer.timeout(ms(run_max), &mut task).await {
            Some(Ok(answered)) => return answered.map(|response| response.map(Body::stream)),
            Some(Err(_)) if decision.try_give_up() => service_not_ready(NOT_READY_PANICKED),
            Some(Err(_)) => run_interrupted("the service panicked"),
            None if decision.try_give_up() => service_not_ready(NOT_READY_IN_TIME),
            None => run_too_long(run_max),
        };
        task.abort();
        Ok(problem.into_response())
    }

    /// Describes the run to the service, in headers and extensions. The derived key depends only on the entry: a
    /// service that honours it also recognises a run without a claim.
    fn add_run_info(&mut self, grant: Option<&Grant>) {
        let run = KeyedRun {
            derived_key: self.id.derived_key(LABEL),
            id: self.id.clone(),
            fence: grant.map(|grant| grant.fence),
            takeover: grant.is_some_and(|grant| grant.takeover),
        };
        headers::add_run_headers(&mut self.parts.headers, &run);
        self.parts.extensions.insert(run);
    }

    async fn run<S, R>(mut self, inner: S, granted: Granted) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        R: HttpBody<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        self.shared.counters.ran.add();
        if granted.grant.takeover {
            self.shared.counters.takeovers.add();
            tracing::warn!(id = %self.id, fence = %granted.grant.fence, "an earlier run was interrupted; running again");
        }
        self.add_run_info(Some(&granted.grant));
        let claim = self.shared.claims.hold(&self.shared.holder, granted, ms(self.policy.lease));
        let span = self.shared.tracer.is_some().then(|| span::context(&self.parts.headers)).flatten();
        let span = span.filter(|span| span.sampled);
        let held = HeldRun { shared: self.shared, policy: self.policy, claim, span };
        let method = self.parts.method.clone();
        let request = Request::from_parts(self.parts, Body::from_complete(self.body));
        held.run(inner, request, &method).await
    }
}

/// A run that holds its claim until the claim has ended.
struct HeldRun {
    shared: Arc<LayerState>,
    policy: Arc<Policy>,
    claim: HeldClaim,
    /// The span of the request, if it is recorded.
    span: Option<SpanContext>,
}

/// The result of ending a claim.
enum EndResult {
    Recorded,
    /// The claim has another holder, or is gone.
    Superseded(TokenError),
    /// The ledger could not be reached.
    Unreachable,
}

impl HeldRun {
    async fn run<S, R>(
        mut self,
        inner: S,
        request: Request<Body>,
        method: &Method,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        R: HttpBody<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        let decision = CallDecision::default();
        let task = tokio::spawn(call_service(inner, request, self.policy.clone(), decision.clone()));
        let end = self.wait_for_service(task).await;
        if decision.try_give_up() {
            return self.end_uncalled(end).await;
        }
        match end {
            RunEnd::Finished(ServiceResult::Complete(mut parts, read)) => {
                let length = Some(read.bytes.len() as u64);
                headers::correct_content_length(&mut parts.headers, method, parts.status, length);
                parts.headers.remove(TRANSFER_ENCODING);
                let verdict = self.verdict(&mut parts);
                let span = self.span;
                let record = || stored::outcome_with_body(method, &parts, &read, span);
                if let Err(problem) = self.record_result(verdict, record).await {
                    return Ok(problem.into_response());
                }
                Ok(Response::from_parts(*parts, Body::from_complete(read)))
            }
            RunEnd::Finished(ServiceResult::Streamed(mut parts, body, why)) => {
                let verdict = self.verdict(&mut parts);
                let record = || stored::outcome_without_body(&parts, why);
                if let Err(problem) = self.record_result(verdict, record).await {
                    return Ok(problem.into_response());
                }
                Ok(Response::from_parts(*parts, body))
            }
            RunEnd::Finished(ServiceResult::Failed(error)) => {
                self.end_in_doubt("the service failed").await;
                Err(error)
            }
            RunEnd::Finished(ServiceResult::Interrupted(error)) => {
                self.end_in_doubt("the response was interrupted").await;
                tracing::warn!(id = %self.claim.id(), %error, "a response was interrupted");
                Ok(run_interrupted("its response was interrupted").into_response())
            }
            RunEnd::Panicked => {
                self.end_in_doubt("the service panicked").await;
                Ok(run_interrupted("the service panicked").into_response())
            }
            RunEnd::TooLong => {
                self.end_in_doubt("it ran too long").await;
                Ok(run_too_long(self.policy.run_max).into_response())
            }
            RunEnd::Lost => {
                self.end_in_doubt("its claim was lost").await;
                Ok(run_interrupted("its claim on the key was lost").into_response())
            }
        }
    }

    /// Ends a run whose service was not called: it was not ready in time, or failed before it was. Nothing happened, so
    /// the key is free again.
    async fn end_uncalled<E>(&mut self, end: RunEnd<E>) -> Result<Response<Body>, E> {
        let why = match &end {
            RunEnd::Finished(_) => "the service failed before it was ready",
            RunEnd::Panicked => NOT_READY_PANICKED,
            RunEnd::TooLong => NOT_READY_IN_TIME,
            RunEnd::Lost => "the claim on the key was lost before the service was ready",
        };
        tracing::warn!(id = %self.claim.id(), fence = %self.claim.fence(), why, "nothing was run");
        let _ = self.end(ClaimEnding::Release).await;
        match end {
            RunEnd::Finished(ServiceResult::Failed(error)) => Err(error),
            _ => Ok(service_not_ready(why).into_response()),
        }
    }

    async fn wait_for_service<E>(&mut self, mut task: JoinHandle<ServiceResult<E>>) -> RunEnd<E> {
        let end = tokio::select! {
            biased;
            result = &mut task => match result {
                Ok(result) => RunEnd::Finished(result),
                Err(_) => RunEnd::Panicked,
            },
            () = self.claim.lost() => RunEnd::Lost,
            () = self.shared.timer.sleep_ms(ms(self.policy.run_max)) => RunEnd::TooLong,
        };
        if matches!(end, RunEnd::Lost | RunEnd::TooLong) {
            task.abort();
        }
        end
    }

    /// What the response says about the effect: the service's own verdict, or else the one by its status.
    fn verdict(&self, parts: &mut response::Parts) -> EffectVerdict {
        let verdict = parts.extensions.remove::<EffectVerdict>();
        verdict.unwrap_or_else(|| self.policy.verdict(parts.status))
    }

    /// Records the result of the run before the caller sees it.
    async fn record_result(
        &mut self,
        verdict: EffectVerdict,
        record: impl FnOnce() -> RecordedOutcome,
    ) -> Result<(), Problem> {
        let ttl_ms = ms(self.policy.ttl);
        let ending = match verdict {
            EffectVerdict::Final => ClaimEnding::Complete { outcome: record(), ttl_ms },
            EffectVerdict::NothingHappened => ClaimEnding::Release,
            EffectVerdict::InDoubt => {
                self.end_in_doubt("its status leaves open whether anything happened").await;
                return Ok(());
            }
        };
        match (self.end(ending).await, verdict) {
            (EndResult::Unreachable, EffectVerdict::Final) => {
                self.shared.counters.unrecorded.add();
                if self.policy.on_outage == OnOutage::Open { Ok(()) } else { Err(outcome_unrecorded()) }
            }
            (EndResult::Superseded(error), EffectVerdict::Final) => {
                self.shared.counters.unrecorded.add();
                tracing::warn!(id = %self.claim.id(), fence = %self.claim.fence(), %error, "a run was overtaken");
                Err(in_progress(0))
            }
            // Either the claim has ended, or nothing happened: then the caller is told so, and the claim expires by
            // itself.
            _ => Ok(()),
        }
    }

    async fn end_in_doubt(&mut self, why: &'static str) {
        self.shared.counters.ended_in_doubt.add();
        tracing::warn!(id = %self.claim.id(), fence = %self.claim.fence(), why, "a run is in doubt");
        let _ = self.end(ClaimEnding::Doubt).await;
    }

    /// Ends the claim; retries for a while if the ledger cannot be reached.
    async fn end(&mut self, ending: ClaimEnding) -> EndResult {
        match self.claim.end(ending).await {
            Ok(()) => EndResult::Recorded,
            Err(EndError::Superseded(error)) => EndResult::Superseded(error),
            Err(error) => {
                tracing::error!(id = %self.claim.id(), %error, "the outcome of a run cannot be recorded");
                EndResult::Unreachable
            }
        }
    }
}

/// Whether a service was called, decided once: either it is called, or its run is given up before that.
#[derive(Clone, Default)]
struct CallDecision(Arc<OnceLock<bool>>);

impl CallDecision {
    /// `false`: the run was given up; the service must not be called.
    fn try_call(&self) -> bool {
        *self.0.get_or_init(|| true)
    }

    /// `true`: the service was not called, and never will be.
    fn try_give_up(&self) -> bool {
        !*self.0.get_or_init(|| false)
    }
}

/// Counts a run without a claim when it ends in any way, unless the service was never called.
struct CountIfCalled {
    decision: CallDecision,
    shared: Arc<LayerState>,
}

impl Drop for CountIfCalled {
    fn drop(&mut self) {
        if self.decision.0.get() == Some(&true) {
            self.shared.counters.ran_unprotected.add();
        }
    }
}

async fn call_when_ready<S, R>(
    mut inner: S,
    request: Request<Body>,
    decision: CallDecision,
) -> Result<Response<R>, S::Error>
where
    S: Service<Request<Body>, Response = Response<R>>,
{
    std::future::poll_fn(|cx| inner.poll_ready(cx)).await?;
    if !decision.try_call() {
        // Its task is aborted.
        std::future::pending::<()>().await;
    }
    inner.call(request).await
}

/// Lets the service answer, and reads the answer as far as it is to be recorded.
async fn call_service<S, R>(
    inner: S,
    request: Request<Body>,
    policy: Arc<Policy>,
    decision: CallDecision,
) -> ServiceResult<S::Error>
where
    S: Service<Request<Body>, Response = Response<R>>,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let response = match call_when_ready(inner, request, decision).await {
        Ok(response) => response,
        Err(error) => return ServiceResult::Failed(error),
    };
    let (parts, body) = response.into_parts();
    if parts.status.is_informational() {
        // 101 switches the connection to another protocol: there is no response to store or to return.
        return ServiceResult::Interrupted(
            format!("it responded {}, which is no final response", parts.status).into(),
        );
    }
    let parts = Box::new(parts);
    if is_event_stream(&parts.headers) {
        return ServiceResult::Streamed(parts, Body::stream(body), "it was a stream of events");
    }
    match read(body, policy.response_bytes_max, policy.response_max).await {
        ReadResult::Complete(read) => ServiceResult::Complete(parts, read),
        ReadResult::TooLarge(body) => ServiceResult::Streamed(parts, body, "its body was too large to keep"),
        ReadResult::TooSlow(body) => ServiceResult::Streamed(parts, body, "its body came as a slow stream"),
        ReadResult::Broken(error) => ServiceResult::Interrupted(error),
    }
}

fn is_event_stream(headers: &http::HeaderMap) -> bool {
    const EVENTS: &[u8] = b"text/event-stream";
    let media_type = headers.get(CONTENT_TYPE).and_then(|kind| kind.as_bytes().get(..EVENTS.len()));
    media_type.is_some_and(|media_type| media_type.eq_ignore_ascii_case(EVENTS))
}

fn in_progress(retry_after_ms: u64) -> Problem {
    let detail =
        "a request with this Idempotency-Key is being worked on; send it again later to get its response";
    let title = "The same request is under way";
    let base_s = retry_after_ms.div_ceil(1000).clamp(1, 5);
    Problem::new("in-progress", StatusCode::CONFLICT, title, detail).retry_after(base_s, 2)
}

fn in_doubt(id: &EntryId, admin: Option<&str>) -> Problem {
    let endpoint = admin.map(|url| format!(" --endpoint {url}")).unwrap_or_default();
    let words = id.shell_words();
    let detail = format!(
        "a request with this Idempotency-Key was interrupted, and it is open whether it took effect; it is not run again until \
         an operator has found out and decided: if it did not take effect, with \
         `hapax ledger resolve --as absent{endpoint} {words}`; if it did, with `--as completed --outcome JSON` instead"
    );
    Problem::new("in-doubt", StatusCode::CONFLICT, "The request is in doubt", detail)
}

fn fingerprint_mismatch() -> Problem {
    let detail =
        "this Idempotency-Key was used before for a different request; use a new key for a new request";
    let title = "The Idempotency-Key belongs to another request";
    Problem::new("fingerprint-mismatch", StatusCode::UNPROCESSABLE_ENTITY, title, detail)
}

fn response_not_stored(status: Option<u16>, why: &str) -> Problem {
    let answered = status.map(|status| format!(" and was answered with {status}")).unwrap_or_default();
    let detail = format!(
        "the request with this Idempotency-Key has run{answered}; the response cannot be given again: {why}"
    );
    let problem = Problem::new(
        "response-not-stored",
        StatusCode::CONFLICT,
        "The request has run; its response was not kept",
        detail,
    );
    match status {
        Some(status) => problem.original_status(status),
        None => problem,
    }
}

fn ledger_unavailable(detail: &str) -> Problem {
    let title = "The idempotency ledger is unavailable";
    let detail = format!("{detail}; nothing was run, send it again later");
    Problem::new("ledger-unavailable", StatusCode::SERVICE_UNAVAILABLE, title, detail).retry_after(1, 9)
}

fn too_many_in_doubt(in_doubt: u64) -> Problem {
    let title = "Too many requests are in doubt";
    let detail = format!(
        "{in_doubt} requests of this caller to this route are in doubt, and one more could not be told from them; nothing \
         was run, send it again after some have been resolved (`hapax ledger resolve`)"
    );
    Problem::new("too-many-in-doubt", StatusCode::SERVICE_UNAVAILABLE, title, detail).retry_after(1, 9)
}

fn overloaded() -> Problem {
    let detail = format!("{RUNS_MAX} requests with keys are under way; nothing was run, send it again later");
    Problem::new("overloaded", StatusCode::SERVICE_UNAVAILABLE, "Too much at once", detail).retry_after(1, 9)
}

fn service_not_ready(why: &str) -> Problem {
    let detail = format!("{why}; nothing was run, send it again later");
    let title = "The service is not ready";
    Problem::new("service-not-ready", StatusCode::SERVICE_UNAVAILABLE, title, detail).retry_after(1, 9)
}

fn outcome_unrecorded() -> Problem {
    let detail =
        "the request has run, but its outcome could not be recorded; send it again later with the same key";
    let title = "The outcome could not be recorded";
    Problem::new("outcome-unrecorded", StatusCode::SERVICE_UNAVAILABLE, title, detail).retry_after(1, 9)
}

fn run_interrupted(how: &str) -> Problem {
    let detail = format!("{how}; it is open whether the request took effect");
    Problem::new("run-interrupted", StatusCode::BAD_GATEWAY, "The request was interrupted", detail)
}

fn run_too_long(run_max: Duration) -> Problem {
    let ms = run_max.as_millis();
    let detail = format!("the request was cut off after {ms} ms; it is open whether it took effect");
    Problem::new("run-too-long", StatusCode::GATEWAY_TIMEOUT, "The request ran too long", detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IdempotencyLayer;

    #[tokio::test]
    async fn no_more_runs_begin_than_may_be_under_way() {
        let clock = Arc::new(hapax_core::SystemClock::default());
        let ledger = hapax_conformance::MemoryStore::new(clock);
        let shared = IdempotencyLayer::builder("shop", ledger).build().unwrap().0;
        let mut runs: Vec<_> =
            (0..RUNS_MAX).map(|_| RunPermit::take(&shared).expect("there is room")).collect();
        assert!(RunPermit::take(&shared).is_none());
        assert_eq!(shared.running.count(), RUNS_MAX, "one that was refused does not count");
        drop(runs.pop());
        assert!(RunPermit::take(&shared).is_some());
    }
}

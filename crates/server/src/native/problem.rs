//! Errors as `application/problem+json`: a stable code, a sentence with the remedy, the matching status.

use axum::response::{IntoResponse, Response};
use hapax_client::wire::Problem;
use hapax_core::{AdminError, ClaimError, DocumentError, ResolveError, StoreError, TokenError};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};

/// Why a request failed.
#[derive(Debug)]
pub(super) struct ApiError(StatusCode, Box<Problem>);

/// A JSON response, or why there is none.
pub(super) type JsonResult<T> = Result<axum::Json<T>, ApiError>;

impl ApiError {
    pub(super) fn new(status: StatusCode, problem: Problem) -> Self {
        Self(status, Box::new(problem))
    }

    /// A value in the request is not acceptable.
    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        StoreError::Invalid(detail.into()).into()
    }

    /// `on` is the subject of the action, for example `queue payments`.
    pub(super) fn forbidden(action: &str, on: Option<String>) -> Self {
        let on = on.map(|on| format!(" on {on}")).unwrap_or_default();
        let detail = format!("the key has no right to {action}{on}; add it to the key's actions and queues");
        Self::new(StatusCode::FORBIDDEN, Problem::new("forbidden", detail, false))
    }

    pub(super) fn unauthenticated() -> Self {
        let detail = "use the header Authorization: Bearer ID:SECRET";
        Self::new(StatusCode::UNAUTHORIZED, Problem::new("unauthenticated", detail, false))
    }

    pub(super) fn no_such_path() -> Self {
        let detail = "there is nothing at this path; GET /v1/openapi.json lists what there is";
        Self::new(StatusCode::NOT_FOUND, Problem::new("no-such-path", detail, false))
    }

    pub(super) fn method_not_allowed() -> Self {
        let detail = "this path has other methods; see the Allow header and /v1/openapi.json";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, Problem::new("method-not-allowed", detail, false))
    }

    pub(super) fn not_implemented(detail: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, Problem::new("not-supported", detail, false))
    }
}

/// The status for an error code.
fn status(code: &str) -> StatusCode {
    match code {
        "no-such-queue" | "not-found" | "no-such-entry" => StatusCode::NOT_FOUND,
        "queue-exists" | "redrive-running" | "revision-conflict" | "refused" | "stale-token"
        | "claim-gone" | "claim-ended" | "in-progress" | "in-doubt" | "not-in-doubt" => StatusCode::CONFLICT,
        "invalid" => StatusCode::BAD_REQUEST,
        "config" | "fingerprint-mismatch" => StatusCode::UNPROCESSABLE_ENTITY,
        "too-large" => StatusCode::PAYLOAD_TOO_LARGE,
        "overloaded" | "too-many-in-flight" | "too-soon" => StatusCode::TOO_MANY_REQUESTS,
        "unavailable" | "full" | "paused" | "moved" | "too-many-in-doubt" => StatusCode::SERVICE_UNAVAILABLE,
        // Outcome unknown, damaged (data or entry), and whatever is added to the core without a line here.
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

macro_rules! from_errors {
    ($($error:ty),+) => {$(
        impl From<$error> for ApiError {
            fn from(error: $error) -> Self {
                Problem::from(error).into()
            }
        }
    )+};
}

from_errors!(StoreError, AdminError, DocumentError, ClaimError, TokenError, ResolveError);

/// For an element of a batch, which has no status of its own.
impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Self {
        *error.1
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self::new(status(&problem.code), problem)
    }
}

/// The time until a retry in whole seconds: never too early, and randomised, so that clients rejected together do not
/// retry together.
fn retry_after_s(ms: u64, random: u64) -> u64 {
    let seconds = ms.div_ceil(1000).max(1);
    seconds + random % (1 + (seconds / 4).clamp(1, 30))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self(status, mut problem) = self;
        problem.status = Some(status.as_u16());
        let json = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, json).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        let turned_away = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        if let Some(ms) = problem.retry_after_ms.or(turned_away.then_some(1000)) {
            headers.insert(RETRY_AFTER, retry_after_s(ms, fastrand::u64(..)).into());
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(http::header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn retry_after_is_never_too_early_and_is_spread() {
        for (ms, first, last) in [(0, 1, 2), (1, 1, 2), (1000, 1, 2), (1001, 2, 3), (40_000, 40, 50)] {
            let all: std::collections::BTreeSet<u64> = (0..1000).map(|n| retry_after_s(ms, n)).collect();
            assert_eq!((all.first(), all.last()), (Some(&first), Some(&last)), "{ms}");
        }
        assert!(retry_after_s(12 * 3600 * 1000, u64::MAX) <= 12 * 3600 + 30);
    }
}

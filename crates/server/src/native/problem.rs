//! Errors as `application/problem+json`: a stable code, a sentence that says what to do, the right status.

use axum::response::{IntoResponse, Response};
use hapax_client::wire::Problem;
use hapax_core::{AdminError, StoreError};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};

/// Why a request was not done.
#[derive(Debug)]
pub(super) struct ApiError(StatusCode, Box<Problem>);

impl ApiError {
    pub(super) fn new(status: StatusCode, problem: Problem) -> Self {
        Self(status, Box::new(problem))
    }

    /// A value of the request is not acceptable.
    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        StoreError::Invalid(detail.into()).into()
    }

    pub(super) fn forbidden(action: &str, queue: Option<&str>) -> Self {
        let on = queue.map(|queue| format!(" on queue {queue}")).unwrap_or_default();
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

/// The status for a code, wherever the error comes from.
fn status(code: &str) -> StatusCode {
    match code {
        "no-such-queue" | "not-found" => StatusCode::NOT_FOUND,
        "queue-exists" | "redrive-running" | "refused" => StatusCode::CONFLICT,
        "invalid" => StatusCode::BAD_REQUEST,
        "config" => StatusCode::UNPROCESSABLE_ENTITY,
        "overloaded" | "too-many-in-flight" => StatusCode::TOO_MANY_REQUESTS,
        "unavailable" | "full" | "paused" => StatusCode::SERVICE_UNAVAILABLE,
        // Outcome unknown, damaged, and whatever is added to the core without a line here.
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::new(status(error.code()), error.into())
    }
}

impl From<AdminError> for ApiError {
    fn from(error: AdminError) -> Self {
        Self::new(status(error.code()), error.into())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self(status, mut problem) = self;
        problem.status = Some(status.as_u16());
        let json = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, json).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(http::header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

//! Error responses as `application/problem+json` (RFC 9457) with a stable code.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use serde::Serialize;

use crate::body::Body;

/// Why a request was not forwarded, or its response not returned.
#[derive(Debug, Clone)]
pub struct Problem {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    detail: String,
    retry_after_s: Option<u64>,
    original_status: Option<u16>,
}

#[derive(Serialize)]
struct ProblemJson<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
}

impl Problem {
    /// A problem; `code` has a page in `docs/errors`.
    pub fn new(
        code: &'static str,
        status: StatusCode,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        Self { status, code, title, detail: detail.into(), retry_after_s: None, original_status: None }
    }

    /// Tells the caller to retry after `base_s` to `base_s + spread_s` seconds: at random, so that callers that were
    /// refused together do not return together.
    #[must_use]
    pub fn retry_after(mut self, base_s: u64, spread_s: u64) -> Self {
        self.retry_after_s = Some(base_s + fastrand::u64(0..=spread_s));
        self
    }

    /// Adds the status of the recorded response that cannot be returned again.
    #[must_use]
    pub fn original_status(mut self, status: u16) -> Self {
        self.original_status = Some(status);
        self
    }

    /// The HTTP response for this problem.
    pub fn into_response(self) -> Response<Body> {
        let wire = ProblemJson {
            r#type: format!("urn:hapax:problem:{}", self.code),
            title: self.title,
            status: self.status.as_u16(),
            detail: &self.detail,
            code: self.code,
            original_status: self.original_status,
        };
        let json = serde_json::to_vec(&wire).expect("strings and numbers are JSON");
        let mut response = Response::new(Body::complete(Bytes::from(json)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Too many responses are unread, and there is no memory for more.
pub fn overloaded() -> Problem {
    let detail = "too many responses wait to be read by their clients; retry with backoff";
    Problem::new("overloaded", StatusCode::SERVICE_UNAVAILABLE, "There is no room for more responses", detail)
        .retry_after(1, 4)
}

//! Hop-by-hop headers, and the headers that Hapax sets.

use http::header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, Method, StatusCode};

use crate::key::{IDEMPOTENCY_KEY, X_IDEMPOTENCY_KEY};

/// The fence of the claim under which a request runs; it grows with every claim of its key.
pub const HAPAX_FENCE: HeaderName = HeaderName::from_static("hapax-fence");
/// `true` if an earlier run of the same key was interrupted and may have had an effect.
pub const HAPAX_TAKEOVER: HeaderName = HeaderName::from_static("hapax-takeover");

/// Headers that concern one connection, not the message.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    // Compared as text: an array of names would be rebuilt for every name.
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Further headers that `Connection` declares as hop-by-hop.
pub(crate) fn names_in_connection_header(headers: &HeaderMap) -> Vec<HeaderName> {
    let lines = headers.get_all(CONNECTION).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}

/// Whether the only transfer coding, if any, is `chunked`. The payload of any other is coded, and the header that says so
/// belongs to one connection: passed on, it could not be read.
#[cfg(feature = "proxy")]
pub(crate) fn has_supported_transfer_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"),
        (Some(_), Some(_)) => false,
    }
}

/// Makes a response's `Content-Length` agree with its body, whose length is `length` if known. A service may send a
/// length beside `Transfer-Encoding`, which overrides it (RFC 9112, 6.3), or several lengths. If such a length were
/// forwarded, the caller could no longer separate the responses on its connection.
pub(crate) fn correct_content_length(
    headers: &mut HeaderMap,
    method: &Method,
    status: StatusCode,
    length: Option<u64>,
) {
    let mut sent = headers.get_all(CONTENT_LENGTH).iter();
    let (first, more) = (sent.next(), sent.next().is_some());
    let Some(first) = first else { return };
    let named = first.to_str().ok().and_then(|text| text.parse::<u64>().ok()).filter(|_| !more);
    let without_body = *method == Method::HEAD || status == StatusCode::NOT_MODIFIED;
    // Without a body the length is information of its own, unless it is ambiguous. 204 and 1xx never have one.
    let fits = match named {
        Some(_) if without_body => !headers.contains_key(TRANSFER_ENCODING),
        Some(named) => Some(named) == length && status != StatusCode::NO_CONTENT,
        None => false,
    };
    if fits {
        return;
    }
    headers.remove(CONTENT_LENGTH);
    if let Some(length) = length.filter(|_| !without_body && status != StatusCode::NO_CONTENT) {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// Headers that only Hapax may send to the service. Many services read `Hapax_Fence` as `Hapax-Fence` (CGI, WSGI,
/// Rack).
pub(crate) fn is_reserved(name: &HeaderName) -> bool {
    let name = name.as_str().as_bytes();
    name.starts_with(b"hapax-") || name.starts_with(b"hapax_") || name == IDEMPOTENCY_KEY.as_str().as_bytes()
}

/// Removes the headers that only Hapax may send, except the key, which belongs to the caller until there is a claim.
pub(crate) fn strip_reserved(headers: &mut HeaderMap) {
    let ours: Vec<HeaderName> =
        headers.keys().filter(|name| is_reserved(name) && **name != IDEMPOTENCY_KEY).cloned().collect();
    for name in ours {
        headers.remove(name);
    }
}

/// Adds the headers that describe the run to the service.
pub(crate) fn add_run_headers(headers: &mut HeaderMap, run: &crate::KeyedRun) {
    headers.remove(X_IDEMPOTENCY_KEY);
    // Many services read this as the same name; see `is_reserved`.
    headers.remove("idempotency_key");
    let key = HeaderValue::from_str(&format!("\"{}\"", run.derived_key)).expect("hex digits");
    headers.insert(IDEMPOTENCY_KEY, key);
    if let Some(fence) = run.fence {
        headers.insert(HAPAX_FENCE, HeaderValue::from(fence.0));
    }
    if run.takeover {
        headers.insert(HAPAX_TAKEOVER, HeaderValue::from_static("true"));
    }
}

//! Headers that belong to one connection, and those that are ours.

use http::HeaderMap;
use http::header::{CONNECTION, HeaderName, HeaderValue};

use crate::key::{IDEMPOTENCY_KEY, X_IDEMPOTENCY_KEY};

/// The fence of the claim that a request runs under: grows with every claim of its key.
pub const HAPAX_FENCE: HeaderName = HeaderName::from_static("hapax-fence");
/// `true` where an earlier run of the same key broke off and may have acted.
pub const HAPAX_TAKEOVER: HeaderName = HeaderName::from_static("hapax-takeover");

/// Headers that are about one connection, not about the message.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    // By their text: an array of names would be built anew for every name that is looked at.
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

/// Further headers that `Connection` declares to be about the connection.
pub(crate) fn listed_in_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let lines = headers.get_all(CONNECTION).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}

/// Headers that only we may say to the service. Many services read `Hapax_Fence` as `Hapax-Fence` (CGI, WSGI, Rack).
pub(crate) fn is_ours(name: &HeaderName) -> bool {
    let name = name.as_str().as_bytes();
    name.starts_with(b"hapax-") || name.starts_with(b"hapax_") || name == IDEMPOTENCY_KEY.as_str().as_bytes()
}

/// Takes out what only we may say to the service, but for the key, which is the caller's until there is a claim.
pub(crate) fn strip_ours(headers: &mut HeaderMap) {
    let ours: Vec<HeaderName> =
        headers.keys().filter(|name| is_ours(name) && **name != IDEMPOTENCY_KEY).cloned().collect();
    for name in ours {
        headers.remove(name);
    }
}

/// Puts in what the service is told of its run.
pub(crate) fn add_ours(headers: &mut HeaderMap, run: &crate::KeyedRun) {
    headers.remove(X_IDEMPOTENCY_KEY);
    // Read as the same name by many services; see `is_ours`.
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

//! Only the proxy describes the claim to the service: callers can neither remove nor add to the description.
#![cfg(feature = "proxy")]

mod common;

use axum::Router;
use axum::routing::any;
use common::proxied::Proxied;
use common::{Client, Store, post};
use hapax_http::proxy::ProxyConfig;
use http::{HeaderMap, HeaderValue};

/// Returns the names and values of the headers that look like Hapax's, with their CGI names.
fn echo() -> Router {
    Router::new().fallback(any(|headers: HeaderMap| async move {
        let cgi = |name: &str| name.replace('-', "_").to_uppercase();
        let ours = |name: &str| name.starts_with("HAPAX_") || name == "IDEMPOTENCY_KEY";
        let named = headers.iter().map(|(name, value)| (cgi(name.as_str()), value.to_str().unwrap_or("?")));
        let mut lines: Vec<String> = named
            .filter(|(name, _)| ours(name))
            .map(|(name, value)| format!("{name}={}", if value == "999" { "forged" } else { "ours" }))
            .collect();
        lines.sort();
        lines.join(" ")
    }))
}

const TOLD: &str = "HAPAX_FENCE=ours IDEMPOTENCY_KEY=ours";

async fn told(name: &'static str, value: &'static str) -> String {
    let store = Store::new();
    let proxy = Proxied::router(echo(), store.ledger(), ProxyConfig::default()).await;
    let mut request = post(proxy.address, "/orders", "k", "{}");
    request.headers_mut().insert(name, HeaderValue::from_static(value));
    let answer = Client::new().send(request).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.text()
}

#[tokio::test]
async fn connection_does_not_take_it_out() {
    assert_eq!(told("connection", "idempotency-key, hapax-fence, hapax-takeover").await, TOLD);
}

#[tokio::test]
async fn another_spelling_does_not_add_to_it() {
    for name in ["hapax-fence", "hapax_fence", "idempotency_key"] {
        assert_eq!(told(name, "999").await, TOLD, "{name}");
    }
}

//! The HTTP layer as used through the crate `hapax`: one feature, one call.
#![cfg(all(feature = "http", feature = "embedded"))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::post;
use hapax::Hapax;
use hapax::http::IdempotencyLayer;
use tower_service::Service as _;

#[tokio::test]
async fn a_request_that_is_sent_twice_takes_effect_once() {
    let folder = tempfile::tempdir().unwrap();
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await.unwrap();
    let payments = Arc::new(AtomicUsize::new(0));
    let counted = payments.clone();
    let pay = move || async move { format!("payment {}", counted.fetch_add(1, Ordering::SeqCst) + 1) };
    let mut app = Router::new().route("/payments", post(pay)).layer(IdempotencyLayer::new(hapax.ledger()));
    for (caller, key, replayed) in
        [("a", "order-7", false), ("a", "order-7", true), ("b", "order-7", false), ("a", "order-8", false)]
    {
        let request =
            Request::post("/payments").header("idempotency-key", key).header("authorization", caller);
        let answer = app.call(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers().contains_key("idempotent-replayed"), replayed, "{caller} {key}");
    }
    assert_eq!(payments.load(Ordering::SeqCst), 3);
}

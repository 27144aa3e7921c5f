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
use hapax_observe::trace::{Span, SpanContext, Tracer};
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

/// Without a proxy in front: the service's own layer continues the caller's trace, and links a replay to the run.
#[tokio::test]
async fn requests_are_in_the_traces_of_their_callers() {
    let folder = tempfile::tempdir().unwrap();
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await.unwrap();
    let (tracer, mut spans) = Tracer::new(0.0);
    let layer = IdempotencyLayer::builder("shop", hapax.ledger()).tracer(Arc::new(tracer)).build().unwrap();
    // The service answers with the context that it got.
    let pay = |request: Request<Body>| async move {
        request
            .headers()
            .get("traceparent")
            .map(|value| value.to_str().unwrap().to_owned())
            .unwrap_or_default()
    };
    let mut app = Router::new().route("/payments", post(pay)).layer(layer);
    let mut call = async |context: Option<SpanContext>| {
        let mut request = Request::post("/payments?card=secret").header("idempotency-key", "order-7");
        if let Some(context) = context {
            request = request.header("traceparent", context.to_string());
        }
        let answer = app.call(request.body(Body::empty()).unwrap()).await.unwrap();
        let body = axum::body::to_bytes(answer.into_body(), 1_000).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    };
    let first = SpanContext::root();
    let seen = SpanContext::parse(&call(Some(first)).await).expect("the service got a context");
    let run: Span = spans.recv().await.unwrap();
    assert_eq!((run.parent, run.context, run.name.as_str()), (Some(first.span), seen, "POST"));
    assert_eq!(seen.trace, first.trace);
    let attribute = |span: &Span, name: &str| {
        let found = span.attributes.iter().find(|(known, _)| *known == name);
        found.map_or_else(|| panic!("no {name} in {span:?}"), |(_, value)| value.clone())
    };
    assert_eq!(attribute(&run, "url.path"), "/payments", "without the query");
    assert_eq!(attribute(&run, "hapax.replayed"), "false");

    let second = SpanContext::root();
    call(Some(second)).await;
    let replay = spans.recv().await.unwrap();
    assert_eq!((replay.context.trace, replay.parent), (second.trace, Some(second.span)));
    assert_eq!(
        (attribute(&replay, "hapax.replayed").as_str(), &replay.links[..]),
        ("true", &[run.context][..])
    );

    // What is not sampled leaves no span.
    call(None).await;
    call(Some(SpanContext { sampled: false, ..SpanContext::root() })).await;
    assert!(spans.try_recv().is_err());
}

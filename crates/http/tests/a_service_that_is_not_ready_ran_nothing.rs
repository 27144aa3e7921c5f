//! A service that was never called took no effect: its key is free for the next request, not in doubt.

mod common;

use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use common::outage::SwitchedLedger;
use common::{soon, until};
use hapax_conformance::MemoryStore;
use hapax_core::{EntryFilter, Ledger as _, ManualClock, OnDoubt};
use hapax_http::{Body, IdempotencyLayer, OnOutage, Policy};
use http::{Request, Response, StatusCode};
use tower_layer::Layer as _;
use tower_service::Service;

/// What the service says when it is asked whether it is ready.
#[derive(Clone, Copy, PartialEq)]
enum Says {
    Nothing,
    Error,
    Panic,
}

/// A service that says that it is not ready until it is let.
#[derive(Clone)]
struct Moody {
    says: Says,
    is_ready: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
    called: Arc<AtomicUsize>,
}

impl Service<Request<Body>> for Moody {
    type Response = Response<String>;
    type Error = &'static str;
    type Future = Ready<Result<Response<String>, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.says {
            _ if self.is_ready.load(Ordering::SeqCst) => Poll::Ready(Ok(())),
            Says::Nothing => Poll::Pending,
            Says::Error => Poll::Ready(Err("no connection")),
            Says::Panic => panic!("told so"),
        }
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.called.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new("done".to_owned())))
    }
}

fn request() -> Request<String> {
    Request::post("/orders").header("idempotency-key", "k").body("{}".to_owned()).unwrap()
}

/// `outage`: the ledger cannot be reached, and the policy lets requests pass then.
async fn nothing_ran(says: Says, outage: bool) -> Result<Response<Body>, &'static str> {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let ledger = SwitchedLedger::new(MemoryStore::new(clock.clone()));
    ledger.down(outage);
    let (run_max, on_outage) = (Duration::from_mins(10), OnOutage::Open);
    let policy = Policy { run_max, on_doubt: OnDoubt::Park, on_outage, ..Policy::default() };
    let builder = IdempotencyLayer::builder("shop", ledger.clone()).policy(policy).clock(clock.clone());
    let layer = builder.build().unwrap();
    let (asked, called) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let moody = Moody { says, is_ready: Arc::default(), asked: asked.clone(), called: called.clone() };
    let is_ready = moody.is_ready.clone();
    let mut service = layer.layer(moody);
    let answer = tokio::spawn(service.call(request()));
    // A ledger that cannot be reached is asked a few times first, with pauses.
    until("it is asked", || {
        clock.advance_ms(if outage { 20 } else { 0 });
        asked.load(Ordering::SeqCst) > 0
    })
    .await;
    if says == Says::Nothing {
        // It renews its claim meanwhile, and gives up in the end.
        clock.advance_ms(run_max.as_millis() as u64);
    }
    let answer = soon(answer).await.unwrap();
    ledger.down(false);
    let filter = EntryFilter { limit: 1, ..EntryFilter::default() };
    let entries = ledger.entries(filter).await.unwrap().items;
    assert!(entries.is_empty(), "it was never called: {entries:?}");
    assert_eq!((layer.counters().ended_in_doubt, called.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(layer.counters().ran_unprotected, 0, "it did not run");

    is_ready.store(true, Ordering::SeqCst);
    let again = soon(service.call(request())).await.unwrap();
    assert_eq!((again.status(), called.load(Ordering::SeqCst)), (StatusCode::OK, 1));
    answer
}

#[tokio::test]
async fn it_does_not_become_ready() {
    for outage in [false, true] {
        let answer = nothing_ran(Says::Nothing, outage).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key("retry-after"), "{answer:?}");
    }
}

#[tokio::test]
async fn it_fails_before_it_is_ready() {
    for outage in [false, true] {
        assert_eq!(nothing_ran(Says::Error, outage).await.unwrap_err(), "no connection");
    }
}

#[tokio::test]
async fn it_panics_before_it_is_ready() {
    for outage in [false, true] {
        let answer = nothing_ran(Says::Panic, outage).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "outage: {outage}");
    }
}

//! A receive that is dropped takes nothing, wherever it was dropped.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hapax_core::cancel_safe::{self, Fetch};
use hapax_core::{
    Delivery, Fence, IdempotencyKey, KeySource, MessageId, Priority, Receipt, Receive, StoreError,
};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

/// What happened to a receive, and the word that lets the store answer.
#[derive(Default)]
struct Log {
    answer: Notify,
    asked: AtomicBool,
    saw_gone: AtomicBool,
    answered: AtomicBool,
    over: AtomicBool,
    given_back: Mutex<Vec<MessageId>>,
    changed: Notify,
}

impl Log {
    fn set(&self, flag: &AtomicBool) {
        flag.store(true, SeqCst);
        self.changed.notify_one();
    }

    async fn until(&self, flag: &AtomicBool) {
        let set = async {
            while !flag.load(SeqCst) {
                self.changed.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), set).await.expect("it happens");
    }

    fn given_back(&self) -> Vec<MessageId> {
        self.given_back.lock().unwrap().clone()
    }
}

struct Request {
    log: Arc<Log>,
    /// Ends the request when the caller is gone; otherwise it runs to its end.
    cancels: bool,
    result: Result<Vec<Delivery>, StoreError>,
}

impl Fetch for Request {
    async fn fetch(&self, gone: impl Future<Output = ()> + Send) -> Result<Vec<Delivery>, StoreError> {
        self.log.set(&self.log.asked);
        let answer = self.log.answer.notified();
        let mut answer = pin!(answer);
        tokio::select! {
            () = answer.as_mut() => {}
            () = gone => {
                self.log.set(&self.log.saw_gone);
                if !self.cancels {
                    answer.await;
                }
            }
        }
        self.log.set(&self.log.answered);
        self.result.clone()
    }

    async fn give_back(&self, deliveries: Vec<Delivery>) {
        // It is over only when this has ended.
        tokio::task::yield_now().await;
        self.log.given_back.lock().unwrap().extend(deliveries.iter().map(|delivery| delivery.id));
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.log.set(&self.log.over);
    }
}

fn delivery(id: u128) -> Delivery {
    Delivery {
        id: MessageId(id),
        body: "x".into(),
        attributes: hapax_core::Attributes::default(),
        receipt: Receipt::new("r").unwrap(),
        fence: Fence(1),
        attempt: 1,
        deliveries: 1,
        lease_ms: 1_000,
        sent_ms: 0,
        first_received_ms: 0,
        sequence: 1,
        group: None,
        dedup: None,
        priority: Priority::default(),
        key: IdempotencyKey::new("k").unwrap(),
        key_source: KeySource::MessageId,
        dead: None,
    }
}

type Receiving = Pin<Box<dyn Future<Output = Result<Vec<Delivery>, StoreError>> + Send>>;

fn two() -> Vec<MessageId> {
    vec![MessageId(1), MessageId(2)]
}

fn begin(receive: Receive, cancels: bool, runtime: Handle) -> (Receiving, Arc<Log>) {
    begin_with(receive, cancels, runtime, Ok(vec![delivery(1), delivery(2)]))
}

/// A receive whose task has been started, and that waits for the answer.
fn begin_with(
    receive: Receive,
    cancels: bool,
    runtime: Handle,
    result: Result<Vec<Delivery>, StoreError>,
) -> (Receiving, Arc<Log>) {
    let log = Arc::new(Log::default());
    let request = Request { log: log.clone(), cancels, result };
    let spawn = move |work| drop(runtime.spawn(work));
    let mut receiving: Receiving =
        Box::pin(async move { cancel_safe::receive(&receive, request, spawn).await });
    let first = receiving.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(first, Poll::Pending));
    (receiving, log)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Dropped {
    BeforeItsTaskRan,
    BeforeTheAnswer,
    BetweenAnswerAndHandOver,
    Never,
}

fn plain() -> Receive {
    Receive::up_to(10)
}

fn named() -> Receive {
    Receive { attempt_id: Some("a".into()), ..plain() }
}

fn acked() -> Receive {
    Receive { ack_on_receive: true, ..plain() }
}

#[tokio::test]
async fn what_a_dropped_receive_was_given_goes_back_unless_a_repeat_may_hold_it() {
    use Dropped::{BeforeItsTaskRan, BeforeTheAnswer, BetweenAnswerAndHandOver, Never};
    for at in [BeforeItsTaskRan, BeforeTheAnswer, BetweenAnswerAndHandOver, Never] {
        for (kind, returns) in [(plain(), true), (named(), false), (acked(), false)] {
            for cancels in [true, false] {
                let case = format!("dropped {at:?}, {kind:?}, cancels: {cancels}");
                let log = drop_at(at, kind.clone(), cancels).await;
                log.until(&log.over).await;
                let lost = matches!(at, BeforeTheAnswer | BetweenAnswerAndHandOver);
                let expected = if returns && lost { two() } else { Vec::new() };
                assert_eq!(log.given_back(), expected, "{case}");
                assert_eq!(log.asked.load(SeqCst), at != BeforeItsTaskRan, "{case}");
                assert_eq!(log.saw_gone.load(SeqCst), at == BeforeTheAnswer, "{case}");
            }
        }
    }
}

async fn drop_at(at: Dropped, kind: Receive, cancels: bool) -> Arc<Log> {
    let (receiving, log) = begin(kind, cancels, Handle::current());
    if at == Dropped::BeforeItsTaskRan {
        return log;
    }
    log.until(&log.asked).await;
    match at {
        Dropped::BeforeTheAnswer => {
            drop(receiving);
            log.until(&log.saw_gone).await;
            log.answer.notify_one();
        }
        Dropped::BetweenAnswerAndHandOver => {
            log.answer.notify_one();
            log.until(&log.answered).await;
            assert!(!log.over.load(SeqCst), "the deliveries wait for their caller");
        }
        _ => {
            log.answer.notify_one();
            let ids: Vec<_> = receiving.await.unwrap().iter().map(|delivery| delivery.id).collect();
            assert_eq!(ids, two());
        }
    }
    log
}

#[tokio::test]
async fn an_error_and_an_empty_answer_are_handed_over_and_give_nothing_back() {
    let refused = StoreError::Invalid("max: 0 is out of range".into());
    for result in [Err(refused), Ok(Vec::new())] {
        for drops in [false, true] {
            let (receiving, log) = begin_with(plain(), false, Handle::current(), result.clone());
            log.until(&log.asked).await;
            if drops {
                drop(receiving);
                log.answer.notify_one();
            } else {
                log.answer.notify_one();
                assert_eq!(receiving.await, result);
            }
            log.until(&log.over).await;
            assert_eq!(log.given_back(), []);
        }
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn a_runtime_that_shuts_down_leaves_the_outcome_unknown() {
    let (here, other) = (runtime(), runtime());
    let (receiving, log) = begin(plain(), false, other.handle().clone());
    other.block_on(log.until(&log.asked));
    drop(other);
    let answer = here.block_on(receiving);
    assert_eq!(answer, Err(StoreError::OutcomeUnknown("the runtime is shutting down".into())));
    assert!(log.over.load(SeqCst));
    assert_eq!(log.given_back(), []);
}

#[test]
fn a_receive_that_begins_on_a_runtime_that_is_gone_fails() {
    let (here, other) = (runtime(), runtime());
    let handle = other.handle().clone();
    drop(other);
    let request = Request { log: Arc::default(), cancels: false, result: Ok(Vec::new()) };
    let answer = here.block_on(cancel_safe::receive(&plain(), request, move |work| drop(handle.spawn(work))));
    assert_eq!(answer, Err(StoreError::OutcomeUnknown("the runtime is shutting down".into())));
}

#[test]
fn an_answer_that_came_before_the_shutdown_is_handed_over() {
    let (here, other) = (runtime(), runtime());
    let (receiving, log) = begin(plain(), false, other.handle().clone());
    log.answer.notify_one();
    other.block_on(log.until(&log.answered));
    drop(other);
    assert_eq!(here.block_on(receiving).unwrap().len(), 2);
}

#[test]
fn deliveries_dropped_after_the_shutdown_are_left_to_their_leases() {
    let other = runtime();
    let (receiving, log) = begin(plain(), false, other.handle().clone());
    log.answer.notify_one();
    other.block_on(log.until(&log.answered));
    drop(other);
    drop(receiving);
    assert!(log.over.load(SeqCst));
    assert_eq!(log.given_back(), []);
}

#[test]
fn deliveries_dropped_outside_of_every_runtime_are_given_back_on_theirs() {
    let other = runtime();
    let (receiving, log) = begin(plain(), false, other.handle().clone());
    log.answer.notify_one();
    other.block_on(log.until(&log.answered));
    std::thread::spawn(move || drop(receiving)).join().unwrap();
    other.block_on(log.until(&log.over));
    assert_eq!(log.given_back(), two());
}

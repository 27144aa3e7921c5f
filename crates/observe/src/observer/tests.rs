use hapax_core::{
    DedupId, Extend, GroupId, ManualClock, NewMessage, QueueAdmin as _, QueueConfig, QueueStore as _,
    Receive, Settle, Settlement,
};
use hapax_embedded::{Embedded, Options};
use tempfile::TempDir;

use super::*;
use crate::ObservedStore;
use crate::life::ERROR_BYTES_MAX;

struct Rig {
    clock: Arc<ManualClock>,
    /// The store itself, as another process uses it.
    inner: Arc<Embedded>,
    store: ObservedStore,
    queue: QueueName,
    _folder: TempDir,
}

impl Rig {
    async fn new(config: QueueConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let options = Options { clock: clock.clone(), ..Options::default() };
        let inner = Arc::new(Embedded::open(folder.path().join("store"), options).unwrap());
        let observer = Arc::new(Observer::with_clock(clock.clone()));
        let store = ObservedStore::with_observer(inner.clone(), observer);
        let queue = QueueName::new(if config.is_fifo() { "jobs.fifo" } else { "jobs" }).unwrap();
        store.create_queue(&queue, config).await.unwrap();
        Self { clock, inner, store, queue, _folder: folder }
    }

    async fn send(&self, messages: Vec<NewMessage>) {
        for sent in self.store.send(&self.queue, messages).await.unwrap() {
            sent.unwrap();
        }
    }

    async fn receive(&self, max: usize) -> Vec<Delivery> {
        let receive = Receive { max, wait_ms: Some(0), ..Receive::default() };
        self.store.receive(&self.queue, receive).await.unwrap()
    }

    async fn settle(&self, delivery: &Delivery, settlement: Settlement) -> Result<Settled, SettleError> {
        let settle = Settle::new(delivery.receipt.clone(), settlement);
        self.store.settle(&self.queue, vec![settle]).await.unwrap().remove(0)
    }

    async fn extend(&self, delivery: &Delivery, lease_ms: u64) -> Result<RemainingLease, SettleError> {
        let extend = Extend { receipt: delivery.receipt.clone(), lease_ms, own_lease: false };
        self.store.extend(&self.queue, vec![extend]).await.unwrap().remove(0)
    }

    fn figures(&self) -> DeliveryFigures {
        self.store.observer().figures(&self.queue)
    }

    /// Deliveries that are remembered, and messages whose latest delivery is.
    fn remembered(&self) -> (usize, usize) {
        let state = self.store.observer().state();
        (state.given.len(), state.latest.len())
    }
}

fn config() -> QueueConfig {
    let retry = hapax_core::policy::RetryPolicy::exponential(0, 0);
    QueueConfig { lease_ms: 1_000, retry, ..QueueConfig::default() }
}

fn fifo() -> QueueConfig {
    let retry = hapax_core::policy::RetryPolicy::exponential(0, 0);
    QueueConfig { lease_ms: 1_000, retry, ..QueueConfig::fifo() }
}

fn in_group(body: &'static str) -> NewMessage {
    NewMessage::new(body).group(GroupId::new("g").unwrap()).dedup(DedupId::new(body).unwrap())
}

#[tokio::test]
async fn late_settles_leave_nothing_in_memory() {
    let rig = Rig::new(config()).await;
    rig.send(vec![NewMessage::new("a"), NewMessage::new("b"), NewMessage::new("c")]).await;
    let got = rig.receive(10).await;
    assert_eq!(rig.remembered(), (3, 3));
    // Another process has the first message meanwhile, and the others are purged.
    rig.clock.advance_ms(1_500);
    let receive = Receive { max: 1, wait_ms: Some(0), ..Receive::default() };
    let elsewhere = rig.inner.receive(&rig.queue, receive).await.unwrap().remove(0);
    let stale = got.iter().find(|delivery| delivery.id == elsewhere.id).unwrap();
    assert_eq!(rig.settle(stale, Settlement::Ack).await, Err(SettleError::Stale));
    rig.inner.purge(&rig.queue).await.unwrap();
    for delivery in got.iter().filter(|delivery| delivery.id != elsewhere.id) {
        assert_eq!(rig.settle(delivery, Settlement::Ack).await, Err(SettleError::Gone));
    }
    assert_eq!(rig.remembered(), (0, 0));
    assert_eq!(rig.figures().late, 3);
}

#[tokio::test]
async fn an_extension_that_asks_for_too_much_is_not_late() {
    let rig = Rig::new(config()).await;
    rig.send(vec![NewMessage::new("a")]).await;
    let got = rig.receive(1).await.remove(0);
    let refused = rig.extend(&got, 13 * 3_600_000).await;
    assert!(matches!(refused, Err(SettleError::LeaseTooLong { .. })), "{refused:?}");
    assert_eq!(rig.figures().late, 0);
    assert_eq!(rig.settle(&got, Settlement::Ack).await, Ok(Settled::Acked));
    assert_eq!(rig.remembered(), (0, 0));
    let seen = rig.store.observer().window(&rig.queue).unwrap();
    assert_eq!((seen.held_count, seen.late), (1, 0), "the ack counts");
}

#[tokio::test]
async fn a_delivery_whose_settle_came_too_late_was_not_given_back() {
    let rig = Rig::new(fifo()).await;
    rig.send(vec![in_group("a")]).await;
    let got = rig.receive(1).await.remove(0);
    rig.clock.advance_ms(1_500);
    for _ in 0..2 {
        assert_eq!(rig.settle(&got, Settlement::Ack).await, Err(SettleError::Expired));
    }
    assert_eq!(rig.figures().late, 1, "a repeated call is the same late settle");
    assert_eq!(rig.receive(1).await.remove(0).deliveries, 2);
    // Waits until the causes are looked up.
    rig.store.write_history().await;
    let figures = rig.figures();
    assert_eq!((figures.repeated_after_expiry, figures.repeated_after_return), (1, 0), "{figures:?}");
    let life = rig.store.observer().life(&Subject::Message(got.id)).unwrap();
    let events: Vec<_> = life.moments.iter().map(|moment| &moment.event).collect();
    assert!(
        matches!(
            events[..],
            [
                Event::Delivered { delivery: 1, .. },
                Event::Expired { delivery: 1, .. },
                Event::Refused { delivery: 1, .. },
                Event::Delivered { delivery: 2, .. },
            ]
        ),
        "{events:?}"
    );
}

#[tokio::test]
async fn a_delivery_elsewhere_is_not_taken_for_one_that_was_given_back() {
    let rig = Rig::new(fifo()).await;
    rig.send(vec![in_group("a")]).await;
    // The copy is suppressed, and so the message has a life here.
    rig.send(vec![in_group("a")]).await;
    let receive = Receive { max: 1, wait_ms: Some(0), ..Receive::default() };
    assert_eq!(rig.inner.receive(&rig.queue, receive).await.unwrap().len(), 1);
    rig.clock.advance_ms(1_500);
    assert_eq!(rig.receive(1).await.remove(0).deliveries, 2);
    rig.store.write_history().await;
    let figures = rig.figures();
    assert_eq!((figures.repeated_after_expiry, figures.repeated_after_return), (1, 0), "{figures:?}");
}

#[tokio::test]
async fn long_errors_are_shortened() {
    let rig = Rig::new(config()).await;
    rig.send(vec![NewMessage::new("a")]).await;
    let got = rig.receive(1).await.remove(0);
    let error = Some("é".repeat(1_000_000));
    rig.settle(&got, Settlement::Retry { after_ms: Some(0), error }).await.unwrap();
    let life = rig.store.observer().life(&Subject::Message(got.id)).unwrap();
    let Some(Event::Returned { error: Some(error), .. }) = life.moments.back().map(|moment| &moment.event)
    else {
        panic!("{life:?}");
    };
    assert_eq!(*error, format!("{}…", "é".repeat(ERROR_BYTES_MAX / 2)));
    // The store's record of the attempt is longer; it is looked up after the next one.
    let receive = Receive { max: 1, wait_ms: Some(0), ..Receive::default() };
    assert_eq!(rig.inner.receive(&rig.queue, receive).await.unwrap().len(), 1);
    rig.clock.advance_ms(1_500);
    assert_eq!(rig.receive(1).await.remove(0).deliveries, 3);
    rig.store.write_history().await;
    let life = rig.store.observer().life(&Subject::Message(got.id)).unwrap();
    assert_eq!(life.record[0].error.as_ref(), Some(error), "{life:?}");
}

#[test]
fn lives_that_are_long_are_fewer() {
    let mut state = State::default();
    let lives = 2 * EVENTS_TOTAL_MAX / crate::life::EVENTS_MAX;
    for number in 0..lives as u128 {
        let subject = Subject::Message(MessageId(number));
        for at_ms in 0..crate::life::EVENTS_MAX as u64 {
            state.life(&subject, None).push(at_ms, Event::InProgress);
        }
    }
    let events: usize = state.lives.values().map(Life::kept_events).sum();
    assert!(events <= EVENTS_TOTAL_MAX + LOOK_EVERY, "{events}");
    assert!(events > EVENTS_TOTAL_MAX / 2, "{events}");
    assert_eq!(state.lives.len() as u64 + state.history.dropped, lives as u64);
    assert_eq!(state.unwritten.len(), state.lives.len());
    assert!(
        state.lives.contains_key(&Subject::Message(MessageId(lives as u128 - 1))),
        "the oldest were dropped"
    );
}

#[test]
fn lives_are_copied_in_parts() {
    let observer = Observer::default();
    for number in 0..2_500 {
        observer.state().life(&Subject::Message(MessageId(number)), None).push(0, Event::InProgress);
    }
    let parts = [(); 4].map(|()| observer.take_unwritten().len());
    assert_eq!(parts, [COPIED_MAX, COPIED_MAX, 500, 0]);
    assert!(!observer.has_unwritten());
}

#[tokio::test]
async fn a_deferred_delivery_did_not_run() {
    let rig = Rig::new(config()).await;
    rig.send(vec![NewMessage::new("a")]).await;
    let got = rig.receive(1).await.remove(0);
    rig.clock.advance_ms(900);
    rig.settle(&got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    let seen = rig.store.observer().window(&rig.queue).unwrap();
    assert_eq!((seen.held_count, rig.figures().near_expiry), (0, 0), "{seen:?}");
    let got = rig.receive(1).await.remove(0);
    rig.clock.advance_ms(900);
    rig.settle(&got, Settlement::Ack).await.unwrap();
    let seen = rig.store.observer().window(&rig.queue).unwrap();
    assert_eq!((seen.held_count, rig.figures().near_expiry), (1, 1), "{seen:?}");
}

#[tokio::test]
async fn a_queue_that_is_made_again_begins_without_figures() {
    let rig = Rig::new(config()).await;
    for _ in 0..2 {
        rig.send(vec![NewMessage::new("a")]).await;
        let got = rig.receive(1).await.remove(0);
        rig.settle(&got, Settlement::Retry { after_ms: Some(0), error: None }).await.unwrap();
        rig.receive(1).await;
        assert_eq!(rig.figures().repeated_after_return, 1);
        rig.store.delete_queue(&rig.queue).await.unwrap();
        assert!(rig.store.observer().window(&rig.queue).is_none());
        rig.store.create_queue(&rig.queue, config()).await.unwrap();
        assert_eq!(rig.figures(), DeliveryFigures::default());
    }
}

#[tokio::test]
async fn a_death_counts_where_its_settle_comes_not_where_it_was_delivered() {
    let rig = Rig::new(config()).await;
    let dead = QueueName::new("dead").unwrap();
    rig.store.create_queue(&dead, QueueConfig::default()).await.unwrap();
    let dead_letter = Some(hapax_core::DeadLetterPolicy { queue: dead });
    rig.store.set_queue(&rig.queue, QueueConfig { dead_letter, ..config() }, None).await.unwrap();
    rig.send(vec![NewMessage::new("a")]).await;
    let receive = Receive { max: 1, wait_ms: Some(0), ..Receive::default() };
    let elsewhere = rig.inner.receive(&rig.queue, receive).await.unwrap().remove(0);
    let reject = Settlement::Reject { reason: "no such card".into() };
    assert_eq!(rig.settle(&elsewhere, reject).await, Ok(Settled::Dead));
    assert_eq!(rig.figures().died, 1);
}

/// Nothing has to be looked up: no other process can have settled the delivery.
#[tokio::test]
async fn alone_a_repeat_of_an_open_delivery_is_an_expiry_at_once() {
    let rig = Rig::new(config()).await;
    let rig = Rig { store: rig.store.only_process(), ..rig };
    rig.send(vec![NewMessage::new("a")]).await;
    rig.receive(1).await.remove(0);
    rig.clock.advance_ms(1_500);
    assert_eq!(rig.receive(1).await.remove(0).deliveries, 2);
    let figures = rig.figures();
    assert_eq!((figures.repeated_after_expiry, figures.repeated_cause_unknown), (1, 0), "{figures:?}");
}

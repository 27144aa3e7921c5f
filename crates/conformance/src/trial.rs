//! The run of one case: the harness with helpers for the cases.
//!
//! Every wait for the store has a timeout in real time. Helpers that assert report where the case called them.

use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::{
    AdminError, Browse, Delivery, Extend, Ledger, MessageView, NewMessage, QueueAdmin, QueueConfig,
    QueueName, QueueStats, Receive, RedriveRequest, RedriveState, RedriveTask, RemainingLease, SendError,
    Sent, Settle, SettleError, Settled, Settlement, StoreError,
};
use tokio::task::JoinHandle;

use crate::values::{bodies, config, dying, fifo_config, in_group, now, queue, retry};
use crate::{Case, Harness};

/// The lease of queues in cases: short, for stores that run on real time.
pub(crate) const LEASE_MS: u64 = 2_000;

/// Timeout for any operation, in real time; only an operation that is stuck reaches it.
const TIMEOUT: Duration = Duration::from_mins(3);

/// The same for a store that runs on real time: shorter than the longest wait, so that a wait which ran to its end is told
/// apart from one that was woken.
const TIMEOUT_OF_REAL_TIME: Duration = Duration::from_secs(15);

/// Time that a real clock and a busy machine may add, in ms.
pub(crate) const SLACK_MS: u64 = 300;

pub(crate) type Received = Result<Vec<Delivery>, StoreError>;

pub(crate) struct Trial {
    pub(crate) case: &'static Case,
    pub(crate) harness: Box<dyn Harness>,
}

impl Trial {
    pub(crate) fn new(case: &'static Case, harness: Box<dyn Harness>) -> Self {
        Self { case, harness }
    }

    pub(crate) fn store(&self) -> Arc<dyn QueueAdmin> {
        self.harness.store()
    }

    /// Whether only the case moves the store's time, so that exact milliseconds can be expected.
    pub(crate) fn exact(&self) -> bool {
        self.harness.exact_time()
    }

    /// Timeout for any operation, in real time.
    pub(crate) fn timeout(&self) -> Duration {
        if self.exact() { TIMEOUT } else { TIMEOUT_OF_REAL_TIME }
    }

    pub(crate) async fn advance(&self, ms: u64) {
        self.harness.advance_ms(ms).await;
    }

    /// Advances the time by at least `ms`, with the slack that a real clock needs.
    pub(crate) async fn pass(&self, ms: u64) {
        self.advance(if self.exact() { ms } else { ms + SLACK_MS }).await;
    }

    pub(crate) async fn restart(&mut self) {
        let (case, harness) = (self.case, &mut self.harness);
        let over = tokio::time::timeout(TIMEOUT, harness.restart()).await;
        over.unwrap_or_else(|_| panic!("{case}: restart took over {TIMEOUT:?}"));
    }

    pub(crate) async fn crash(&mut self) {
        let (case, harness) = (self.case, &mut self.harness);
        let over = tokio::time::timeout(TIMEOUT, harness.crash()).await;
        over.unwrap_or_else(|_| panic!("{case}: crash and reopen took over {TIMEOUT:?}"));
    }

    /// Waits until every started call has reached the store.
    pub(crate) async fn quiet(&self) {
        self.within("quiet", self.harness.quiet()).await;
    }

    /// The same store through its second handle.
    pub(crate) fn other_handle(&self) -> Trial {
        let store = self.harness.second_store().expect("the case needs a second handle");
        let ledger = self.harness.second_ledger();
        Trial::new(self.case, Box::new(OtherHandle { store, ledger, exact_time: self.exact() }))
    }

    pub(crate) fn set_wall_back(&self, ms: u64) {
        self.harness.set_wall_back(ms);
    }

    /// Waits for the store with a timeout.
    #[track_caller]
    pub(crate) fn within<F: Future + Send>(
        &self,
        what: &str,
        future: F,
    ) -> impl Future<Output = F::Output> + Send {
        let (case, at, timeout) = (self.case, Location::caller(), self.timeout());
        async move {
            let over = tokio::time::timeout(timeout, future).await;
            over.unwrap_or_else(|_| panic!("{case}: {what} took over {timeout:?} (at {at})"))
        }
    }

    // Queues.

    pub(crate) async fn create(&self, name: &str, config: QueueConfig) -> QueueName {
        let name = queue(name);
        let created = self.within("create", self.store().create_queue(&name, config)).await;
        assert_eq!(created, Ok(true), "creating {name}");
        name
    }

    /// A standard queue with the suite's lease.
    pub(crate) async fn standard(&self, name: &str) -> QueueName {
        self.create(name, config()).await
    }

    /// A FIFO queue with the suite's lease.
    pub(crate) async fn fifo(&self, name: &str) -> QueueName {
        self.create(&format!("{name}.fifo"), fifo_config()).await
    }

    /// A queue and its dead-letter queue of the same kind: (`jobs`, `jobs-dead`).
    pub(crate) async fn with_dead(&self, max_attempts: u32, config: QueueConfig) -> (QueueName, QueueName) {
        let end = if config.is_fifo() { ".fifo" } else { "" };
        let own = if config.is_fifo() { fifo_config() } else { crate::values::config() };
        let dead = self.create(&format!("jobs-dead{end}"), own).await;
        let config = dying(&dead, max_attempts, config);
        let jobs = self.create(&format!("jobs{end}"), config).await;
        (jobs, dead)
    }

    pub(crate) async fn set(&self, name: &QueueName, config: QueueConfig) {
        let set = self.within("set", self.store().set_queue(name, config, None)).await;
        assert!(set.is_ok(), "setting {name}: {set:?}");
    }

    pub(crate) async fn config_of(&self, name: &QueueName) -> QueueConfig {
        self.within("queue", self.store().queue(name)).await.expect("the queue exists").config
    }

    pub(crate) async fn stats(&self, name: &QueueName) -> QueueStats {
        self.within("stats", self.store().stats(name)).await.expect("stats")
    }

    /// The store's time, read from a new message.
    pub(crate) async fn now_ms(&self) -> u64 {
        let probe = self.create("clock-probe", crate::values::config()).await;
        self.send_all(&probe, &["now"]).await;
        let now_ms = self.browse(&probe).await[0].sent_ms;
        self.store().delete_queue(&probe).await.expect("the probe is there");
        now_ms
    }

    // Sending.

    pub(crate) async fn send_batch(
        &self,
        to: &QueueName,
        batch: Vec<NewMessage>,
    ) -> Vec<Result<Sent, SendError>> {
        let count = batch.len();
        let answers = self.within("send", self.store().send(to, batch)).await.expect("send");
        assert_eq!(answers.len(), count, "one answer per message");
        answers
    }

    pub(crate) async fn try_send(&self, to: &QueueName, message: NewMessage) -> Result<Sent, SendError> {
        self.send_batch(to, vec![message]).await.remove(0)
    }

    pub(crate) async fn send(&self, to: &QueueName, message: NewMessage) -> Sent {
        self.try_send(to, message).await.expect("the message is accepted")
    }

    /// Sends a message for each body; all must be accepted and new.
    pub(crate) async fn send_all(&self, to: &QueueName, bodies: &[&str]) -> Vec<Sent> {
        let batch = bodies.iter().map(|body| NewMessage::new((*body).to_owned())).collect();
        let sent: Result<Vec<Sent>, SendError> = self.send_batch(to, batch).await.into_iter().collect();
        sent.expect("all are accepted")
    }

    /// Sends to one group of a FIFO queue; each body is its own deduplication id.
    pub(crate) async fn send_group(&self, to: &QueueName, group: &str, bodies: &[&str]) -> Vec<Sent> {
        let batch = bodies.iter().map(|body| in_group(group, body)).collect();
        let sent: Result<Vec<Sent>, SendError> = self.send_batch(to, batch).await.into_iter().collect();
        sent.expect("all are accepted")
    }

    // Receiving.

    pub(crate) async fn receive_with(&self, from: &QueueName, receive: Receive) -> Vec<Delivery> {
        let max = receive.max;
        let got = self.within("receive", self.store().receive(from, receive)).await.expect("receive");
        assert!(got.len() <= max, "{} deliveries, {max} asked for", got.len());
        got
    }

    pub(crate) async fn receive(&self, from: &QueueName, max: usize) -> Vec<Delivery> {
        self.receive_with(from, now(max)).await
    }

    /// Receives the only available message.
    #[track_caller]
    pub(crate) fn one(&self, from: &QueueName) -> impl Future<Output = Delivery> + Send {
        let at = Location::caller();
        async move {
            let mut got = self.receive(from, 10).await;
            assert_eq!(
                got.len(),
                1,
                "{}: one message can be received from {from}, got {:?} (at {at})",
                self.case,
                bodies(&got)
            );
            got.remove(0)
        }
    }

    /// Checks that nothing can be received.
    #[track_caller]
    pub(crate) fn none(&self, from: &QueueName) -> impl Future<Output = ()> + Send {
        let at = Location::caller();
        async move {
            let got = self.receive(from, 10).await;
            assert!(
                got.is_empty(),
                "{}: nothing can be received from {from}, got {:?} (at {at})",
                self.case,
                bodies(&got)
            );
        }
    }

    /// Checks that nothing can be received until `ms` have passed; afterwards they have.
    #[track_caller]
    pub(crate) fn hidden_for(&self, from: &QueueName, ms: u64) -> impl Future<Output = ()> + Send {
        let at = Location::caller();
        async move {
            let early = self.receive(from, 10).await;
            assert!(early.is_empty(), "{}: hidden for {ms} ms, received at once (at {at})", self.case);
            if !self.exact() {
                return self.pass(ms).await;
            }
            self.advance(ms - 1).await;
            let early = self.receive(from, 10).await;
            assert!(early.is_empty(), "{}: hidden for {ms} ms, received 1 ms before (at {at})", self.case);
            self.advance(1).await;
        }
    }

    // Settling.

    pub(crate) async fn settle(
        &self,
        queue: &QueueName,
        d: &Delivery,
        settlement: Settlement,
    ) -> Result<Settled, SettleError> {
        let settle = Settle::new(d.receipt.clone(), settlement);
        let mut answers =
            self.within("settle", self.store().settle(queue, vec![settle])).await.expect("settle");
        assert_eq!(answers.len(), 1, "one answer per settle");
        answers.remove(0)
    }

    #[track_caller]
    pub(crate) fn ack(&self, queue: &QueueName, d: &Delivery) -> impl Future<Output = ()> + Send {
        let at = Location::caller();
        async move {
            let settled = self.settle(queue, d, Settlement::Ack).await;
            assert_eq!(settled, Ok(Settled::Acked), "{}: ack of {:?} (at {at})", self.case, d.body);
        }
    }

    /// Fails a delivery; the queue's policy decides what happens.
    pub(crate) async fn fail(&self, queue: &QueueName, d: &Delivery, error: &str) -> Settled {
        self.settle(queue, d, retry(error)).await.expect("the delivery can be retried")
    }

    pub(crate) async fn extend(
        &self,
        queue: &QueueName,
        d: &Delivery,
        ms: u64,
    ) -> Result<RemainingLease, SettleError> {
        let extend = Extend { receipt: d.receipt.clone(), lease_ms: ms, own_lease: false };
        let mut answers =
            self.within("extend", self.store().extend(queue, vec![extend])).await.expect("extend");
        assert_eq!(answers.len(), 1, "one answer per extend");
        answers.remove(0)
    }

    /// Changes the lease of this delivery alone, as SQS's visibility change does.
    pub(crate) async fn set_visibility(&self, queue: &QueueName, d: &Delivery, ms: u64) {
        let extend = Extend { receipt: d.receipt.clone(), lease_ms: ms, own_lease: true };
        let answers = self.within("extend", self.store().extend(queue, vec![extend])).await.expect("extend");
        assert_eq!(answers, [Ok(RemainingLease { lease_ms: ms })]);
    }

    // Looking.

    /// All messages of a queue.
    pub(crate) async fn browse(&self, name: &QueueName) -> Vec<MessageView> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let browse = Browse { after, limit: 1000, ..Browse::default() };
            let page = self.within("browse", self.store().browse(name, browse)).await.expect("browse");
            all.extend(page.items);
            after = page.next;
            if after.is_none() {
                return all;
            }
        }
    }

    /// Waits until a queue holds exactly this many messages, which must happen after some time.
    #[track_caller]
    pub(crate) fn holds(
        &self,
        name: &QueueName,
        count: usize,
    ) -> impl Future<Output = Vec<MessageView>> + Send {
        let at = Location::caller();
        async move {
            let start = std::time::Instant::now();
            loop {
                let all = self.browse(name).await;
                if all.len() == count {
                    return all;
                }
                let case = self.case;
                assert!(
                    start.elapsed() < self.timeout(),
                    "{case}: {name} holds {}, not {count} (at {at})",
                    all.len()
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Advances the time in small steps until a redrive has ended.
    pub(crate) async fn redriven(&self, task: &RedriveTask) -> RedriveTask {
        let start = std::time::Instant::now();
        loop {
            let now = self.redrive_now(task).await;
            if now.state != RedriveState::Running {
                return now;
            }
            assert!(start.elapsed() < self.timeout(), "{}: the redrive does not end: {now:?}", self.case);
            self.advance(50).await;
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn redrive_now(&self, task: &RedriveTask) -> RedriveTask {
        let all = self.within("redrives", self.store().redrives(&task.from)).await.expect("redrives");
        all.into_iter().find(|other| other.id == task.id).expect("the redrive is listed")
    }

    pub(crate) async fn try_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.within("start_redrive", self.store().start_redrive(request)).await
    }

    /// Redrives and waits for the end.
    pub(crate) async fn redrive(&self, request: RedriveRequest) -> RedriveTask {
        let task = self.try_redrive(request).await.expect("the redrive starts");
        let ended = self.redriven(&task).await;
        assert_eq!(ended.state, RedriveState::Completed, "{ended:?}");
        ended
    }

    // Waiting.

    /// Starts a waiting receive, and lets it reach the store.
    pub(crate) async fn wait(&self, from: &QueueName, receive: Receive) -> Waiting {
        let (store, queue) = (self.store(), from.clone());
        let task = tokio::spawn(async move { store.receive(&queue, receive).await });
        // The runtime has one thread: after a yield the new task has been polled.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        self.quiet().await;
        Waiting { task }
    }

    /// The deliveries of a waiting receive.
    #[track_caller]
    pub(crate) fn woken(&self, waiting: Waiting) -> impl Future<Output = Vec<Delivery>> + Send {
        let ended = self.ended(waiting);
        async move { ended.await.expect("receive") }
    }

    /// The result of a waiting receive.
    #[track_caller]
    pub(crate) fn ended(&self, waiting: Waiting) -> impl Future<Output = Received> + Send {
        let ended = self.within("a waiting receive", waiting.task);
        async move { ended.await.expect("the receive was not aborted") }
    }
}

/// The second handle of a harness. Operations on the store as a whole go through the harness itself.
struct OtherHandle {
    store: Arc<dyn QueueAdmin>,
    ledger: Option<Arc<dyn Ledger>>,
    exact_time: bool,
}

#[async_trait]
impl Harness for OtherHandle {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.store.clone()
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        self.ledger.clone()
    }

    async fn quiet(&self) {
        unreachable!("cases wait through the first handle")
    }

    async fn advance_ms(&self, _ms: u64) {
        unreachable!("time passes through the first handle")
    }

    async fn restart(&mut self) {
        unreachable!("the first handle restarts the store")
    }

    async fn crash(&mut self) {
        unreachable!("the first handle crashes the store")
    }

    fn fast_time(&self) -> bool {
        false
    }

    fn exact_time(&self) -> bool {
        self.exact_time
    }
}

/// A receive that waits in its own task.
pub(crate) struct Waiting {
    task: JoinHandle<Received>,
}

impl Waiting {
    pub(crate) fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// Drops the receive and waits until it is dropped.
    pub(crate) async fn cancel(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Polls a future once, so that it reaches the store, and leaves it pending.
pub(crate) fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

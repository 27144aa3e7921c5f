//! Receives of one queue wait together: one task per queue with waiting calls asks for all of them at once. While its look
//! takes long, because the server waits for its disk or for a lock, other looks serve the calls that came later.
//!
//! It asks when something has changed: by a call of this process, by a hint of another one, or because the sweeper, which
//! looks at all queues by one statement, has found that there is something to receive (see `sweep`).

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hapax_core::{Delivery, QueueName, Receive, StoreError};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, oneshot};

use super::receipt::Named;
use super::{Inner, lock};
use crate::hints::Topic;
use crate::merge;

/// Time between two checks whether the store was closed, while no hint arrives.
const CLOSED_EVERY: Duration = Duration::from_secs(1);

/// How long calls that came during a look wait for its end, before they get a look of their own.
const PATIENCE: Duration = Duration::from_millis(3);
/// Looks of one queue that are under way beside the first.
const HELPERS_MAX: usize = 3;

/// A receive.
pub(super) struct Call {
    pub ask: Receive,
    pub wait_ms: u64,
    /// The end of its wait by the process's clock.
    pub deadline: Instant,
    /// The store's time when it was first looked for.
    pub from_ms: Option<u64>,
    /// It was looked for in this round.
    pub looked: bool,
    pub reply: oneshot::Sender<Result<Handed, StoreError>>,
}

impl Call {
    /// Whether its wait is over by our clock.
    pub(super) fn is_over(&self) -> bool {
        self.deadline <= Instant::now()
    }

    pub(super) fn answer_nothing(self) {
        // Its caller may be gone.
        let _ = self.reply.send(Ok(Handed { deliveries: Vec::new(), back: None }));
    }
}

/// Deliveries on their way to a receiver. If they do not arrive, they are given back.
pub(super) struct Handed {
    pub deliveries: Vec<Delivery>,
    pub back: Option<(Arc<Inner>, QueueName)>,
}

impl Handed {
    /// They have arrived.
    pub(super) fn arrived(mut self) -> Vec<Delivery> {
        self.back = None;
        std::mem::take(&mut self.deliveries)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        let Some((inner, name)) = self.back.take() else { return };
        let named: Vec<Named> =
            self.deliveries.iter().filter_map(|d| Named::parse(&inner.base.seal, &d.receipt)).collect();
        if !named.is_empty() && !inner.is_closed() {
            let runtime = inner.base.pool.runtime().clone();
            runtime.spawn(async move { inner.give_back(&name, named).await });
        }
    }
}

#[derive(Default)]
struct State {
    new: Vec<Call>,
    /// Calls that a look beside the first has not answered.
    left: Vec<Call>,
    /// The task runs.
    runs: bool,
    /// It is looking, or will look.
    busy: bool,
    /// Looks that are under way for calls that came during another one.
    helpers: usize,
}

impl State {
    fn has_calls(&self) -> bool {
        !self.new.is_empty() || !self.left.is_empty()
    }
}

/// The waiting receives of a queue.
#[derive(Default)]
pub(super) struct Feed {
    state: Mutex<State>,
    wake: Notify,
}

impl Feed {
    /// Has the calls look again.
    pub(super) fn kick(&self) {
        let mut state = lock(&self.state);
        state.busy |= state.runs;
        drop(state);
        self.wake.notify_one();
    }

    /// Waits until the calls have to look: something has changed, or it is time to. Ends those whose wait is over by our
    /// clock; that takes no statement.
    async fn wait(&self, calls: &mut Vec<Call>, look: Duration) {
        let look = Instant::now() + look;
        while let Some(over) = calls.iter().map(|call| call.deadline).min() {
            let until = tokio::time::Instant::from_std(look.min(over));
            if tokio::time::timeout_at(until, self.wake.notified()).await.is_ok() || Instant::now() >= look {
                return;
            }
            let (over, left): (Vec<Call>, Vec<Call>) =
                std::mem::take(calls).into_iter().partition(Call::is_over);
            *calls = left;
            over.into_iter().for_each(Call::answer_nothing);
        }
    }

    /// Whether calls wait here.
    pub(super) fn is_waited_for(&self) -> bool {
        lock(&self.state).runs
    }

    /// Whether no call is about to look.
    pub(super) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        !state.busy && state.helpers == 0 && !state.has_calls()
    }
}

impl Inner {
    /// Adds a call to those that wait.
    pub(super) fn wait_for(self: &Arc<Self>, queue_id: i32, name: &QueueName, call: Call) {
        let feed = lock(&self.feeds).entry(queue_id).or_default().clone();
        let mut state = lock(&feed.state);
        state.new.push(call);
        self.attend(&mut state, queue_id, name, &feed);
        drop(state);
        feed.wake.notify_one();
    }

    /// There are new calls: the task runs.
    fn attend(self: &Arc<Self>, state: &mut State, queue_id: i32, name: &QueueName, feed: &Arc<Feed>) {
        if !state.runs {
            (state.runs, state.busy) = (true, true);
            self.base.pool.runtime().spawn(run(self.clone(), queue_id, name.clone(), feed.clone()));
        }
    }
}

/// One look for the calls that came during another one. Those that it does not answer wait with all others.
async fn help(mut helper: Helper) {
    helper.inner.serve(helper.queue_id, &helper.name, &mut helper.calls).await;
}

/// Calls of a look beside the first. At its end, in whatever way, the calls that are left wait with all others.
struct Helper {
    inner: Arc<Inner>,
    queue_id: i32,
    name: QueueName,
    feed: Arc<Feed>,
    calls: Vec<Call>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut state = lock(&self.feed.state);
        state.helpers -= 1;
        if !self.calls.is_empty() {
            state.left.append(&mut self.calls);
            self.inner.attend(&mut state, self.queue_id, &self.name, &self.feed);
        }
        drop(state);
        self.feed.wake.notify_one();
    }
}

/// Looks for calls; if that takes long, others look for those that come meanwhile.
async fn serve(
    inner: &Arc<Inner>,
    queue_id: i32,
    name: &QueueName,
    feed: &Arc<Feed>,
    calls: &mut Vec<Call>,
) -> Duration {
    let mut look = std::pin::pin!(inner.serve(queue_id, name, calls));
    loop {
        if let Ok(next) = tokio::time::timeout(PATIENCE, look.as_mut()).await {
            return next;
        }
        let mut state = lock(&feed.state);
        if !state.new.is_empty() && state.helpers < HELPERS_MAX {
            state.helpers += 1;
            let calls = std::mem::take(&mut state.new);
            let (name, feed) = (name.clone(), feed.clone());
            let helper = Helper { inner: inner.clone(), queue_id, name, feed, calls };
            inner.base.pool.runtime().spawn(help(helper));
        }
    }
}

/// The task of a queue. If it is interrupted by a panic, the calls that wait for it fail, and the next call starts another.
struct Running {
    feed: Arc<Feed>,
    ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let mut state = lock(&self.feed.state);
            (state.runs, state.busy) = (false, false);
            state.new.clear();
            state.left.clear();
        }
    }
}

async fn run(inner: Arc<Inner>, queue_id: i32, name: QueueName, feed: Arc<Feed>) {
    let mut calls: Vec<Call> = Vec::new();
    let mut running = Running { feed: feed.clone(), ended: false };
    loop {
        merge::gather(|| lock(&feed.state).new.len()).await;
        {
            let mut state = lock(&feed.state);
            calls.append(&mut state.left);
            calls.append(&mut state.new);
            calls.retain(|call| !call.reply.is_closed());
            state.busy = !calls.is_empty();
            if calls.is_empty() {
                // In the same step as the check that no call waits: the next call has to start a task.
                (state.runs, running.ended) = (false, true);
                return;
            }
        }
        let look = serve(&inner, queue_id, &name, &feed, &mut calls).await;
        {
            let mut state = lock(&feed.state);
            if state.has_calls() {
                continue;
            }
            state.busy = false;
        }
        feed.wait(&mut calls, look.max(Duration::from_millis(1))).await;
    }
}

/// Passes hints of other processes on to the calls that wait.
pub(super) async fn listen(inner: Weak<Inner>) {
    let Some(mut heard) = inner.upgrade().map(|inner| inner.base.hints.subscribe()) else { return };
    loop {
        let hint = tokio::time::timeout(CLOSED_EVERY, heard.recv()).await;
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_closed()) else { return };
        match hint {
            Ok(Ok(hint)) if hint.topic == Topic::Queues => match hint.keys {
                Some(ids) => ids.into_iter().for_each(|id| inner.kick(id as i32)),
                None => lock(&inner.feeds).values().for_each(|feed| feed.kick()),
            },
            Ok(Err(RecvError::Lagged(_))) => lock(&inner.feeds).values().for_each(|feed| feed.kick()),
            Ok(Err(RecvError::Closed)) => return,
            Ok(Ok(_)) | Err(_) => {}
        }
    }
}

//! Receives of one queue wait together: one task per queue with waiting calls asks for all of them at once.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hapax_core::{Delivery, QueueName, Receive, StoreError};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, oneshot};

use super::receipt::Named;
use super::{Inner, lock};
use crate::hints::Topic;

/// Time between two looks while calls wait: other processes may have sent, and a hint may be lost.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

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
    /// The task runs.
    runs: bool,
    /// It is looking, or will look.
    busy: bool,
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

    /// Whether no call is about to look.
    pub(super) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        !state.busy && state.new.is_empty()
    }
}

impl Inner {
    /// Adds a call to those that wait.
    pub(super) fn wait_for(self: &Arc<Self>, queue_id: i32, name: &QueueName, call: Call) {
        let feed = lock(&self.feeds).entry(queue_id).or_default().clone();
        let mut state = lock(&feed.state);
        state.new.push(call);
        if !state.runs {
            (state.runs, state.busy) = (true, true);
            self.base.pool.runtime().spawn(run(self.clone(), name.clone(), feed.clone()));
        }
        drop(state);
        feed.wake.notify_one();
    }
}

async fn run(inner: Arc<Inner>, name: QueueName, feed: Arc<Feed>) {
    let mut calls: Vec<Call> = Vec::new();
    let mut pause = PAUSE_MIN;
    loop {
        {
            let mut state = lock(&feed.state);
            calls.append(&mut state.new);
            calls.retain(|call| !call.reply.is_closed());
            state.busy = !calls.is_empty();
            if calls.is_empty() {
                state.runs = false;
                return;
            }
        }
        let look = inner.serve(&name, &mut calls).await;
        {
            let mut state = lock(&feed.state);
            if !state.new.is_empty() {
                continue;
            }
            state.busy = false;
        }
        if calls.is_empty() {
            continue;
        }
        let wait = look.min(pause).max(Duration::from_millis(1));
        match tokio::time::timeout(wait, feed.wake.notified()).await {
            Ok(()) => pause = PAUSE_MIN,
            Err(_) => pause = (pause * 2).min(PAUSE_MAX),
        }
    }
}

/// Passes hints of other processes on to the calls that wait.
pub(super) async fn listen(inner: Weak<Inner>) {
    let Some(mut heard) = inner.upgrade().map(|inner| inner.base.hints.subscribe()) else { return };
    loop {
        let hint = tokio::time::timeout(PAUSE_MAX, heard.recv()).await;
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

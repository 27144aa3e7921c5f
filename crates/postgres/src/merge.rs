//! Merges the calls of one process: calls of a kind that wait are handed to the database as one batch, so that they share
//! its statements, its round trips and its commit.
//!
//! A batch is mostly a wait for the disk, so the rate is decided by how many calls share one. Therefore one batch of a kind
//! is under way, and the next one gathers its calls ([`gather`]) instead of taking only those that came during the last
//! one. A second batch starts beside it if [`PLENTY`] waits, so that the server works on one while the other is synced.
//! A batch may also wait for a lock: a call that has waited for longer than batches take starts another one.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hapax_core::StoreError;
use sqlx::PgConnection;
use tokio::sync::{Notify, oneshot};

use crate::BoxFuture;
use crate::error::{Access, Failure, broken, late};
use crate::pool::{Bounds, Pool};
use crate::transaction::repeat_conflicts;

/// Batches of a kind that are under way at the same time, if there are calls for several or one takes long. Two kinds leave
/// connections of the pool to others.
const UNDER_WAY_MAX: usize = 4;
/// Batches that are under way at the same time because there are many calls.
const UNDER_WAY_BUSY: usize = 2;
/// Weight of waiting calls that is worth another batch: the work for it takes about as long as a sync.
const PLENTY: usize = 100;
/// How long a call waits at least before another batch is started for it, while one is under way.
const PATIENCE_MIN: Duration = Duration::from_millis(3);
/// And at most.
const PATIENCE_MAX: Duration = Duration::from_millis(50);
/// Calls of a kind that wait. Beyond that the store is overloaded.
const WAITING_MAX: usize = 100_000;

/// Handles a batch: one answer per call, in the same order.
///
/// After an error nothing of the batch was done, or its outcome is unknown: every call of the batch gets the error. It
/// must leave no transaction open when it returns `Ok`. If it fails with a conflict (a deadlock, or a transaction that could
/// not be serialized), it is called again with the same calls, on the same connection.
pub(crate) type Handler<In, Out> = dyn for<'c> Fn(&'c mut PgConnection, Arc<Vec<In>>) -> BoxFuture<'c, Result<Vec<Out>, Failure>>
    + Send
    + Sync;

/// Steps in which [`gather`] waits for more calls at most.
const GATHER_STEPS: usize = 8;

/// Lets the clients that were answered a moment ago make their next calls, so that one batch serves them all. Takes no
/// time: it returns when all that can run has run, and no further call has come. `waiting` counts the calls.
pub(crate) async fn gather(waiting: impl Fn() -> usize) {
    let mut before = 0;
    for _ in 0..GATHER_STEPS {
        let now = waiting();
        if now == before {
            return;
        }
        before = now;
        tokio::task::yield_now().await;
    }
}

struct Call<In, Out> {
    number: u64,
    input: In,
    weight: usize,
    answer: oneshot::Sender<Result<Out, StoreError>>,
}

struct State<In, Out> {
    waiting: VecDeque<Call<In, Out>>,
    /// The sum of their weights.
    waiting_weight: usize,
    /// Batches under way.
    under_way: usize,
    /// How long batches take: a moving average.
    took: Duration,
    /// Another batch starts soon, if calls still wait then.
    another: bool,
    /// The number of the last call.
    last: u64,
    /// The numbers of the calls that were not answered yet.
    open: BTreeSet<u64>,
}

struct Inner<In, Out> {
    what: &'static str,
    access: Access,
    weight_max: usize,
    pool: Pool,
    handler: Box<Handler<In, Out>>,
    state: Mutex<State<In, Out>>,
    progress: Notify,
}

/// Merges calls of one kind.
pub(crate) struct Merger<In, Out> {
    inner: Arc<Inner<In, Out>>,
}

impl<In: Send + Sync + 'static, Out: Send + 'static> Merger<In, Out> {
    /// `what` names the operation in errors. A batch takes calls until their weights reach `weight_max`; it has at least
    /// one call.
    pub fn new<F>(pool: Pool, what: &'static str, access: Access, weight_max: usize, handler: F) -> Self
    where
        F: for<'c> Fn(&'c mut PgConnection, Arc<Vec<In>>) -> BoxFuture<'c, Result<Vec<Out>, Failure>>
            + Send
            + Sync
            + 'static,
    {
        let state = State {
            waiting: VecDeque::new(),
            waiting_weight: 0,
            under_way: 0,
            took: Duration::ZERO,
            another: false,
            last: 0,
            open: BTreeSet::new(),
        };
        let (handler, state, progress) = (Box::new(handler), Mutex::new(state), Notify::new());
        Self { inner: Arc::new(Inner { what, access, weight_max, pool, handler, state, progress }) }
    }

    /// Makes a call. A caller that is dropped takes its call back if no batch has taken it; otherwise the batch continues
    /// without it, and the other calls of the batch are not affected.
    pub async fn call(&self, input: In, weight: usize) -> Result<Out, StoreError> {
        let inner = &self.inner;
        let (answer, answered) = oneshot::channel();
        let number = inner.accept(input, weight, answer)?;
        // A batch ends within its own bounds; this bounds the wait behind other batches.
        let Bounds { connect, operation, .. } = inner.pool.bounds();
        let limit = 2 * (connect + operation);
        match tokio::time::timeout(limit, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(broken(inner.what, "the operation was interrupted", inner.access)),
            Err(_) if inner.take_back(number) => {
                let (what, ms) = (inner.what, limit.as_millis());
                Err(StoreError::Overloaded(format!("{what}: the call waited for {ms} ms and was not begun")))
            }
            Err(_) => Err(late(inner.what, limit, inner.access)),
        }
    }

    /// Waits until all calls that were made before have been answered.
    pub async fn passed(&self) {
        let last = self.inner.state().last;
        loop {
            let mut progress = std::pin::pin!(self.inner.progress.notified());
            progress.as_mut().enable();
            if self.inner.state().open.first().is_none_or(|first| *first > last) {
                return;
            }
            progress.await;
        }
    }
}

impl<In: Send + Sync + 'static, Out: Send + 'static> Inner<In, Out> {
    fn state(&self) -> MutexGuard<'_, State<In, Out>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(
        self: &Arc<Self>,
        input: In,
        weight: usize,
        answer: oneshot::Sender<Result<Out, StoreError>>,
    ) -> Result<u64, StoreError> {
        let mut state = self.state();
        if state.waiting.len() >= WAITING_MAX {
            return Err(StoreError::Overloaded(format!("{}: {WAITING_MAX} calls are waiting", self.what)));
        }
        state.last += 1;
        let number = state.last;
        state.open.insert(number);
        state.waiting.push_back(Call { number, input, weight, answer });
        state.waiting_weight += weight;
        if state.under_way == 0 || (state.waiting_weight >= PLENTY && state.under_way < UNDER_WAY_BUSY) {
            self.start(&mut state);
        } else {
            self.start_later(&mut state);
        }
        Ok(number)
    }

    fn start(self: &Arc<Self>, state: &mut State<In, Out>) {
        state.under_way += 1;
        let driver = Driver { inner: self.clone(), taken: Vec::new(), runs: true };
        self.pool.runtime().spawn(driver.run());
    }

    /// Starts another batch soon, if calls still wait then.
    fn start_later(self: &Arc<Self>, state: &mut State<In, Out>) {
        if state.another || state.under_way >= UNDER_WAY_MAX {
            return;
        }
        state.another = true;
        let inner = self.clone();
        let patience = (2 * state.took).clamp(PATIENCE_MIN, PATIENCE_MAX);
        self.pool.runtime().spawn(async move {
            tokio::time::sleep(patience).await;
            let mut state = inner.state();
            state.another = false;
            if !state.waiting.is_empty() && state.under_way < UNDER_WAY_MAX {
                inner.start(&mut state);
            }
        });
    }

    /// Removes a call that no batch has taken; `false` if one has.
    fn take_back(&self, number: u64) -> bool {
        let mut state = self.state();
        let Some(at) = state.waiting.iter().position(|call| call.number == number) else { return false };
        let call = state.waiting.remove(at);
        state.waiting_weight -= call.map_or(0, |call| call.weight);
        state.open.remove(&number);
        drop(state);
        self.progress.notify_waiters();
        true
    }
}

/// Where the answers of a batch go.
type Callers<Out> = Vec<oneshot::Sender<Result<Out, StoreError>>>;

/// Runs one batch after the other until no call waits.
struct Driver<In, Out> {
    inner: Arc<Inner<In, Out>>,
    taken: Vec<u64>,
    /// It counts as under way.
    runs: bool,
}

impl<In: Send + Sync + 'static, Out: Send + 'static> Driver<In, Out> {
    async fn run(mut self) {
        for number in 0u64.. {
            gather(|| self.inner.state().waiting.len()).await;
            let (inputs, callers) = self.take_batch(number > 0);
            if inputs.is_empty() {
                return;
            }
            let start = Instant::now();
            let answers = self.run_batch(Arc::new(inputs)).await;
            self.note_time(start.elapsed());
            match answers {
                Ok(answers) => {
                    for (caller, answer) in callers.into_iter().zip(answers) {
                        // The caller may have been dropped.
                        let _ = caller.send(Ok(answer));
                    }
                }
                Err(error) => {
                    for caller in callers {
                        let _ = caller.send(Err(error.clone()));
                    }
                }
            }
            self.note_answered();
        }
    }

    fn take_batch(&mut self, began: bool) -> (Vec<In>, Callers<Out>) {
        let (mut inputs, mut callers, mut weight) = (Vec::new(), Vec::new(), 0);
        let inner = self.inner.clone();
        let mut state = inner.state();
        // One beyond the usual number has helped out, and ends.
        let usual = if state.waiting_weight >= PLENTY { UNDER_WAY_BUSY } else { 1 };
        let surplus = began && state.under_way > usual;
        while let Some(call) = state.waiting.front().filter(|_| !surplus) {
            let fits = inputs.is_empty() || weight + call.weight <= self.inner.weight_max;
            if !fits {
                break;
            }
            let Some(call) = state.waiting.pop_front() else { break };
            state.waiting_weight -= call.weight;
            if call.answer.is_closed() {
                state.open.remove(&call.number);
                continue;
            }
            weight += call.weight;
            inputs.push(call.input);
            self.taken.push(call.number);
            callers.push(call.answer);
        }
        if inputs.is_empty() {
            // In the same step as the check that no call waits: the next call has to start a driver.
            state.under_way -= 1;
            self.runs = false;
            if !state.waiting.is_empty() {
                inner.start_later(&mut state);
            }
        }
        drop(state);
        (inputs, callers)
    }

    async fn run_batch(&self, inputs: Arc<Vec<In>>) -> Result<Vec<Out>, StoreError> {
        let (inner, count) = (self.inner.clone(), inputs.len());
        let answers = self.inner.pool.run_here(inner.what, inner.access, move |connection| {
            Box::pin(async move {
                repeat_conflicts(connection, &|connection| (inner.handler)(connection, inputs.clone())).await
            })
        });
        let answers = answers.await?;
        assert_eq!(answers.len(), count, "{}: one answer per call", self.inner.what);
        Ok(answers)
    }

    fn note_time(&self, took: Duration) {
        let mut state = self.inner.state();
        state.took = (state.took * 7 + took) / 8;
    }

    fn note_answered(&mut self) {
        let mut state = self.inner.state();
        for number in self.taken.drain(..) {
            state.open.remove(&number);
        }
        drop(state);
        self.inner.progress.notify_waiters();
    }
}

impl<In, Out> Drop for Driver<In, Out> {
    /// If it was interrupted by a panic or by the end of the runtime, the calls that wait for it fail.
    fn drop(&mut self) {
        if self.runs {
            let mut state = self.inner.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.under_way -= 1;
            state.waiting.clear();
            state.waiting_weight = 0;
            state.open.clear();
            drop(state);
        }
        self.inner.progress.notify_waiters();
    }
}

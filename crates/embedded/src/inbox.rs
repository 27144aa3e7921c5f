//! What callers hand to the writer thread: a bounded list that is taken whole, one lock per wave.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::StoreError;

use crate::writer::Op;

/// The most operations that may wait.
const OPS_MAX: usize = 50_000;
/// The most bytes of bodies that may wait.
const BYTES_MAX: usize = 256 * 1024 * 1024;

#[derive(Default)]
struct Waiting {
    ops: Vec<Op>,
    bytes: usize,
    /// The writer sleeps and wants to be woken.
    asleep: bool,
    /// The clock was moved by hand.
    nudged: bool,
    closed: Option<StoreError>,
}

#[derive(Default)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, op: Op) -> Result<(), StoreError> {
        let (takes_room, bytes) = (op.takes_room(), op.bytes());
        self.add(takes_room, bytes, std::iter::once(op))
    }

    /// Adds all or none, side by side: they are applied in one wave, but where that is full.
    pub fn push_all(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        let takes_room = ops.iter().any(Op::takes_room);
        let bytes = ops.iter().map(Op::bytes).sum();
        self.add(takes_room, bytes, ops.into_iter())
    }

    fn add(&self, takes_room: bool, bytes: usize, ops: impl Iterator<Item = Op>) -> Result<(), StoreError> {
        let mut waiting = self.lock();
        if let Some(error) = &waiting.closed {
            return Err(error.clone());
        }
        // What frees room is never turned away for lack of it.
        if takes_room && (waiting.ops.len() >= OPS_MAX || waiting.bytes + bytes > BYTES_MAX) {
            return Err(StoreError::Overloaded(format!(
                "{} operations wait to be written",
                waiting.ops.len()
            )));
        }
        waiting.bytes += bytes;
        waiting.ops.extend(ops);
        if waiting.asleep {
            waiting.asleep = false;
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Has the writer look at its timers.
    pub fn nudge(&self) {
        let mut waiting = self.lock();
        waiting.nudged = true;
        if waiting.asleep {
            waiting.asleep = false;
            self.wake.notify_one();
        }
    }

    /// Turns further operations away and wakes the writer.
    pub fn close(&self, error: StoreError) {
        let mut waiting = self.lock();
        waiting.closed.get_or_insert(error);
        waiting.asleep = false;
        self.wake.notify_one();
    }

    /// Why operations are turned away, if they are.
    pub fn closed(&self) -> Option<StoreError> {
        self.lock().closed.clone()
    }

    /// Adds what has come meanwhile to `into`, without sleeping; tells how much that was.
    pub fn take_more(&self, into: &mut Vec<Op>) -> usize {
        let mut waiting = self.lock();
        waiting.bytes = 0;
        let count = waiting.ops.len();
        into.append(&mut waiting.ops);
        count
    }

    /// Everything that waits, into `into`; sleeps until there is something, the clock moves, the time is over
    /// (`None`: for ever) or the inbox is closed. `false` when it is closed and empty.
    pub fn take(&self, into: &mut Vec<Op>, sleep: Option<Duration>) -> bool {
        let mut waiting = self.lock();
        let idle = |w: &Waiting| w.ops.is_empty() && !w.nudged && w.closed.is_none();
        if idle(&waiting) && sleep != Some(Duration::ZERO) {
            waiting.asleep = true;
            let asleep = |w: &mut Waiting| w.asleep && idle(w);
            waiting = match sleep {
                None => self.wake.wait_while(waiting, asleep).unwrap_or_else(PoisonError::into_inner),
                Some(sleep) => {
                    let slept = self.wake.wait_timeout_while(waiting, sleep, asleep);
                    slept.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            waiting.asleep = false;
        }
        waiting.nudged = false;
        waiting.bytes = 0;
        std::mem::swap(&mut waiting.ops, into);
        !into.is_empty() || waiting.closed.is_none()
    }
}

//! Operations for the writer thread: a bounded list that the writer takes as a whole, one lock per wave.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::StoreError;

use crate::writer::Op;

/// Maximum number of pending operations.
const OPS_MAX: usize = 50_000;
/// Maximum bytes of pending bodies.
const BYTES_MAX: usize = 256 * 1024 * 1024;

#[derive(Default)]
struct Waiting {
    ops: Vec<Op>,
    bytes: usize,
    /// The writer sleeps and must be woken.
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

    /// Adds all operations or none. They are applied in one wave, unless the wave is full.
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
        // Operations that free space are never refused for lack of it.
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

    /// Makes the writer check its timers.
    pub fn nudge(&self) {
        let mut waiting = self.lock();
        waiting.nudged = true;
        if waiting.asleep {
            waiting.asleep = false;
            self.wake.notify_one();
        }
    }

    /// Rejects further operations and wakes the writer.
    pub fn close(&self, error: StoreError) {
        let mut waiting = self.lock();
        waiting.closed.get_or_insert(error);
        waiting.asleep = false;
        self.wake.notify_one();
    }

    /// Why operations are rejected, or `None`.
    pub fn closed(&self) -> Option<StoreError> {
        self.lock().closed.clone()
    }

    /// Moves the operations that arrived meanwhile to `into`, without sleeping. Returns their count.
    pub fn take_more(&self, into: &mut Vec<Op>) -> usize {
        let mut waiting = self.lock();
        waiting.bytes = 0;
        let count = waiting.ops.len();
        into.append(&mut waiting.ops);
        count
    }

    /// Moves all pending operations to `into`. Sleeps until there is one, the clock is moved, `sleep` has passed
    /// (`None`: no limit) or the inbox is closed. Returns `false` if it is closed and empty.
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

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
struct PendingOps {
    ops: Vec<Op>,
    bytes: usize,
    /// The writer sleeps and must be woken.
    asleep: bool,
    /// The clock was moved by hand.
    nudged: bool,
    closed: Option<StoreError>,
}

#[derive(Default)]
pub(crate) struct OpQueue {
    pending: Mutex<PendingOps>,
    wake: Condvar,
}

impl OpQueue {
    fn lock(&self) -> MutexGuard<'_, PendingOps> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, op: Op) -> Result<(), StoreError> {
        let (adds_data, bytes) = (op.adds_data(), op.bytes());
        self.add(adds_data, bytes, std::iter::once(op))
    }

    /// Adds all operations or none. They are applied in one wave, unless the wave is full.
    pub fn push_all(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        let adds_data = ops.iter().any(Op::adds_data);
        let bytes = ops.iter().map(Op::bytes).sum();
        self.add(adds_data, bytes, ops.into_iter())
    }

    fn add(&self, adds_data: bool, bytes: usize, ops: impl Iterator<Item = Op>) -> Result<(), StoreError> {
        let mut pending = self.lock();
        if let Some(error) = &pending.closed {
            return Err(error.clone());
        }
        // Operations that free space are never refused for lack of it.
        if adds_data && (pending.ops.len() >= OPS_MAX || pending.bytes + bytes > BYTES_MAX) {
            return Err(StoreError::Overloaded(format!(
                "{} operations wait to be written",
                pending.ops.len()
            )));
        }
        pending.bytes += bytes;
        pending.ops.extend(ops);
        if pending.asleep {
            pending.asleep = false;
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Makes the writer check its timers.
    pub fn nudge(&self) {
        let mut pending = self.lock();
        pending.nudged = true;
        if pending.asleep {
            pending.asleep = false;
            self.wake.notify_one();
        }
    }

    /// Rejects further operations and wakes the writer.
    pub fn close(&self, error: StoreError) {
        let mut pending = self.lock();
        pending.closed.get_or_insert(error);
        pending.asleep = false;
        self.wake.notify_one();
    }

    /// Why operations are rejected, or `None`.
    pub fn closed(&self) -> Option<StoreError> {
        self.lock().closed.clone()
    }

    /// Moves the operations that arrived meanwhile to `into`, without sleeping. Returns their count.
    pub fn take_more(&self, into: &mut Vec<Op>) -> usize {
        let mut pending = self.lock();
        pending.bytes = 0;
        let count = pending.ops.len();
        into.append(&mut pending.ops);
        count
    }

    /// Moves all pending operations to `into`. Sleeps until there is one, the clock is moved, `sleep` has passed
    /// (`None`: no limit) or the queue is closed. Returns `false` if it is closed and empty.
    pub fn take(&self, into: &mut Vec<Op>, sleep: Option<Duration>) -> bool {
        let mut pending = self.lock();
        let idle = |w: &PendingOps| w.ops.is_empty() && !w.nudged && w.closed.is_none();
        if idle(&pending) && sleep != Some(Duration::ZERO) {
            pending.asleep = true;
            let asleep = |w: &mut PendingOps| w.asleep && idle(w);
            pending = match sleep {
                None => self.wake.wait_while(pending, asleep).unwrap_or_else(PoisonError::into_inner),
                Some(sleep) => {
                    let slept = self.wake.wait_timeout_while(pending, sleep, asleep);
                    slept.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            pending.asleep = false;
        }
        pending.nudged = false;
        pending.bytes = 0;
        std::mem::swap(&mut pending.ops, into);
        !into.is_empty() || pending.closed.is_none()
    }
}

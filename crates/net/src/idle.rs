//! Timeouts without a timer per wait, for stalled bodies and missing responses.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use crate::body::BoxError;

/// Maximum number of unused timers that are kept.
const SPARE_MAX: usize = 256;

/// A pool of timers with the same duration. A new timer costs an allocation and two operations on the runtime's timer
/// wheel; moving the deadline of a running timer is one atomic store.
pub struct TimerPool {
    timeout: Duration,
    spare: Mutex<Vec<Pin<Box<Sleep>>>>,
}

impl TimerPool {
    /// A pool of timers with this duration.
    pub fn new(timeout: Duration) -> Arc<Self> {
        Arc::new(Self { timeout, spare: Mutex::default() })
    }

    /// The duration of each timer.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A timer that expires one duration from now.
    fn take(&self) -> Pin<Box<Sleep>> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(mut timer) = spare else { return Box::pin(sleep(self.timeout)) };
        timer.as_mut().reset(Instant::now() + self.timeout);
        timer
    }

    /// Returns a timer to the pool. It stays armed; when it expires, it wakes its last task once, without effect.
    fn give_back(&self, timer: Pin<Box<Sleep>>) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_MAX {
            spare.push(timer);
        }
    }
}

/// A stall detector: its timer is armed only while the task waits.
pub struct StallDetector {
    timers: Arc<TimerPool>,
    timer: Option<Pin<Box<Sleep>>>,
    armed: bool,
}

impl StallDetector {
    /// A stall detector that is not armed yet.
    pub fn new(timers: Arc<TimerPool>) -> Self {
        Self { timers, timer: None, armed: false }
    }

    /// Records progress.
    fn progressed(&mut self) {
        self.armed = false;
    }

    /// Records that there was no progress; returns whether the stall has lasted too long.
    pub fn poll_stalled(&mut self, cx: &mut Context<'_>) -> bool {
        let armed = std::mem::replace(&mut self.armed, true);
        let timer = match &mut self.timer {
            Some(timer) => {
                if !armed {
                    timer.as_mut().reset(Instant::now() + self.timers.timeout);
                }
                timer
            }
            none => none.insert(self.timers.take()),
        };
        timer.as_mut().poll(cx).is_ready()
    }

    /// Waits until this time instead; to be followed by [`poll_stalled`](Self::poll_stalled), which has the task woken then.
    pub fn wait_until(&mut self, deadline: Instant) {
        self.armed = true;
        self.timer.get_or_insert_with(|| self.timers.take()).as_mut().reset(deadline);
    }
}

impl Drop for StallDetector {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.timers.give_back(timer);
        }
    }
}

/// The error of a body that stalled for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StallError {
    /// How long it stalled.
    pub timeout: Duration,
}

impl std::fmt::Display for StallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the body stalled for {} ms", self.timeout.as_millis())
    }
}

impl std::error::Error for StallError {}

/// A body that ends with an error when it stalls.
pub struct StallTimeoutBody<B> {
    body: B,
    stall: StallDetector,
}

impl<B> StallTimeoutBody<B> {
    /// Limits how long `body` may stall.
    pub fn new(body: B, timers: &Arc<TimerPool>) -> Self {
        Self { body, stall: StallDetector::new(timers.clone()) }
    }
}

impl<B> Body for StallTimeoutBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self { body, stall } = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            stall.progressed();
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if stall.poll_stalled(cx) {
            return Poll::Ready(Some(Err(StallError { timeout: stall.timers.timeout }.into())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test]
    async fn a_reused_timer_has_its_whole_duration() {
        let timers = TimerPool::new(Duration::from_millis(30));
        // The second round reuses a timer that has expired, the third one that is still armed.
        for end in [true, false, true] {
            let mut stall = StallDetector::new(timers.clone());
            let begun = std::time::Instant::now();
            assert!(!poll_fn(|cx| Poll::Ready(stall.poll_stalled(cx))).await, "it ended before it began");
            assert!(timers.spare.lock().unwrap().is_empty(), "it is used twice at once");
            if end {
                poll_fn(|cx| if stall.poll_stalled(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
                assert!(begun.elapsed() >= timers.timeout(), "{:?}", begun.elapsed());
            }
            drop(stall);
            assert_eq!(timers.spare.lock().unwrap().len(), 1, "it was not kept");
        }
    }
}

//! Runs a handler under its leases.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

use hapax_claim::{HeartbeatEvents as _, Lease, Timer};

use crate::outcome::{RunResult, panic_text};
use crate::stats::Stats;

/// Runs a handler until it ends, panics, or is stopped at an await because all of its leases have stopped.
///
/// It looks at the clock itself before each step: a process that slept past its lease wakes all of its threads at once,
/// and the handler must not act before the heartbeat has looked. `begin` is called right before the handler's first step;
/// without it nothing has run.
pub(crate) async fn guard<T>(
    leases: impl Iterator<Item = &Lease> + Clone,
    timer: &Timer,
    stats: &Stats,
    begin: impl FnOnce(),
    handler: Pin<Box<dyn Future<Output = T> + Send + '_>>,
) -> Result<T, RunResult> {
    let mut handler = Some(handler);
    let mut begin = Some(begin);
    // User code may panic when it is dropped, too.
    let forget = |handler: Option<_>| drop(catch_unwind(AssertUnwindSafe(|| drop(handler))));
    poll_fn(move |cx| {
        let now_us = timer.now_us();
        for lease in leases.clone() {
            lease.register_waker(cx.waker());
            if let Some(stop) = lease.check(now_us) {
                stats.stopped(stop);
            }
        }
        let stop = leases.clone().map(Lease::stop).reduce(Option::and).flatten();
        if let Some(stop) = stop {
            forget(handler.take());
            return Poll::Ready(Err(if begin.is_none() {
                RunResult::Stopped(stop)
            } else {
                RunResult::NotStarted(stop)
            }));
        }
        if let Some(begin) = begin.take() {
            begin();
        }
        let Some(running) = handler.as_mut() else { return Poll::Pending };
        match catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(ended)) => {
                forget(handler.take());
                Poll::Ready(Ok(ended))
            }
            Err(panic) => {
                forget(handler.take());
                Poll::Ready(Err(RunResult::Panicked(panic_text(&*panic))))
            }
        }
    })
    .await
}

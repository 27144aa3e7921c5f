//! A future that costs nothing while it waits.
//!
//! The task of a connection is polled several times for each request, and would each time ask again whether the connection
//! has to close and whether the listener shuts down. Both are asked only when one of them has woken the task.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Wakes the task, and remembers that it was for the inner future.
struct InnerWaker {
    woken: AtomicBool,
    task: Waker,
}

impl Wake for InnerWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.task.wake_by_ref();
    }
}

/// Polls `future` at first, and then only after it has been woken or has moved to another task.
pub(crate) async fn when_woken<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut last: Option<(Arc<InnerWaker>, Waker)> = None;
    poll_fn(move |cx| {
        let known = last.take().filter(|(inner, _)| inner.task.will_wake(cx.waker()));
        let (inner, waker) = match known {
            Some(known) if !known.0.woken.load(Ordering::SeqCst) => {
                last = Some(known);
                return Poll::Pending;
            }
            Some(known) => known,
            None => {
                let inner = Arc::new(InnerWaker { woken: AtomicBool::new(false), task: cx.waker().clone() });
                let waker = Waker::from(inner.clone());
                (inner, waker)
            }
        };
        // Before the poll: a wake-up during it counts for the next one.
        inner.woken.store(false, Ordering::SeqCst);
        let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
        last = Some((inner, waker));
        poll
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::Notify;

    use super::*;

    /// A task that counts how often it is woken.
    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn it_is_polled_once_until_it_is_woken_or_moves() {
        let (notify, polls) = (Notify::new(), AtomicUsize::new(0));
        let mut notified = pin!(notify.notified());
        let counted = poll_fn(|cx| {
            polls.fetch_add(1, Ordering::SeqCst);
            notified.as_mut().poll(cx)
        });
        let mut waiting = pin!(when_woken(counted));
        let tasks = [Arc::new(Task::default()), Arc::new(Task::default())];
        let wakers = tasks.clone().map(Waker::from);
        let woken = || tasks.each_ref().map(|task| task.0.load(Ordering::SeqCst));
        let polls = || polls.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
            assert_eq!(polls(), 1, "nothing has woken it");
        }
        for _ in 0..3 {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_pending());
            assert_eq!(polls(), 2, "it moved to another task, which is woken from now on");
        }
        notify.notify_waiters();
        assert_eq!(woken(), [0, 1]);
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_ready());
        assert_eq!(polls(), 3);
    }

    #[test]
    fn a_wake_up_during_its_poll_is_not_lost() {
        let mut polls = 0;
        let twice = poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls < 3 { Poll::Pending } else { Poll::Ready(()) }
        });
        let mut waiting = pin!(when_woken(twice));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(waiting.as_mut().poll(&mut cx).is_ready());
    }
}

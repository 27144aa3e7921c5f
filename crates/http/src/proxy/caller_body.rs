//! A caller's body on its way to the upstream, which remembers when it was the caller that was slow or broke it off.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;

use super::idle::{StallError, StallTimeoutBody};
use crate::body::{Body, BoxError};

/// How far a caller's body has come, as seen by the one who waits for the upstream's answer.
#[derive(Clone)]
pub(crate) struct UploadProgress(Arc<Mutex<State>>);

struct State {
    /// The upstream takes more than the caller has sent so far.
    waiting_for_caller: bool,
    /// When that last changed, or a part of the body was last passed on.
    last_progress: Instant,
    /// Why the body ended early, and whether it was only too slow.
    failure: Option<(String, bool)>,
}

impl UploadProgress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the upstream has had `response_max` for its answer. The time in which the caller was waited for is not the
    /// upstream's; the body itself ends it after `idle_max`, hence before this deadline.
    pub(crate) fn deadline(&self, response_max: Duration, idle_max: Duration) -> Instant {
        let state = self.state();
        let deadline = state.last_progress + response_max;
        if state.waiting_for_caller { deadline + idle_max } else { deadline }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state().failure.is_some()
    }

    pub(crate) fn take_failure(&self) -> (String, bool) {
        self.state().failure.take().unwrap_or_default()
    }
}

pub(crate) struct CallerBody {
    body: StallTimeoutBody<Body>,
    progress: UploadProgress,
}

impl CallerBody {
    pub(crate) fn new(body: StallTimeoutBody<Body>) -> (Self, UploadProgress) {
        let state = State { waiting_for_caller: false, last_progress: Instant::now(), failure: None };
        let progress = UploadProgress(Arc::new(Mutex::new(state)));
        (Self { body, progress: progress.clone() }, progress)
    }
}

impl HttpBody for CallerBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        let mut state = this.progress.state();
        if polled.is_ready() || !state.waiting_for_caller {
            state.last_progress = Instant::now();
        }
        state.waiting_for_caller = polled.is_pending();
        if let Poll::Ready(Some(Err(error))) = &polled {
            state.failure = Some((error.to_string(), error.is::<StallError>()));
        }
        drop(state);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

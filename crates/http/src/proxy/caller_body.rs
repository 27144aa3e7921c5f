//! A caller's body on its way to the upstream, which remembers when it was the caller that broke it off.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::idle::{IdleBody, StoodStill};
use crate::body::{Body, BoxError};

/// Why a caller's body ended early, and whether it was only too slow.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<(String, bool)>>>);

impl Failure {
    pub(crate) fn is_known(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(crate) fn take(&self) -> (String, bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }
}

pub(crate) struct CallerBody {
    body: IdleBody<Body>,
    failure: Failure,
}

impl CallerBody {
    pub(crate) fn new(body: IdleBody<Body>) -> (Self, Failure) {
        let failure = Failure::default();
        (Self { body, failure: failure.clone() }, failure)
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
        if let Poll::Ready(Some(Err(error))) = &polled {
            let known = (error.to_string(), error.is::<StoodStill>());
            *this.failure.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

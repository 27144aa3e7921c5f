//! Nothing stands still for ever: bodies that stop coming, and callers that stop reading.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep, sleep};

use crate::body::BoxError;

/// A timer that is armed only while something is waited for.
struct Stall {
    bound: Duration,
    sleep: Option<Pin<Box<Sleep>>>,
    armed: bool,
}

impl Stall {
    fn new(bound: Duration) -> Self {
        Self { bound, sleep: None, armed: false }
    }

    /// Something moved.
    fn moved(&mut self) {
        self.armed = false;
    }

    /// Nothing moved; whether that has been so for too long.
    fn waited(&mut self, cx: &mut Context<'_>) -> bool {
        let bound = self.bound;
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep(bound)));
        if !std::mem::replace(&mut self.armed, true) {
            sleep.as_mut().reset(Instant::now() + bound);
        }
        sleep.as_mut().poll(cx).is_ready()
    }
}

/// A body that ends with an error when it stands still.
pub(crate) struct IdleBody<B> {
    body: B,
    stall: Stall,
}

impl<B> IdleBody<B> {
    pub(crate) fn new(body: B, bound: Duration) -> Self {
        Self { body, stall: Stall::new(bound) }
    }
}

impl<B> Body for IdleBody<B>
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
            stall.moved();
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if stall.waited(cx) {
            let ms = stall.bound.as_millis();
            return Poll::Ready(Some(Err(format!("the body stood still for {ms} ms").into())));
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

/// A caller's connection that breaks when the caller does not read what it is sent.
pub(crate) struct IdleIo<S> {
    io: S,
    stall: Stall,
}

impl<S> IdleIo<S> {
    pub(crate) fn new(io: S, bound: Duration) -> Self {
        Self { io, stall: Stall::new(bound) }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stall.moved();
            return poll;
        }
        if self.stall.waited(cx) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the caller does not read")));
        }
        Poll::Pending
    }
}

impl<S: Read + Unpin> Read for IdleIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<S: Write + Unpin> Write for IdleIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.watch(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_flush(cx);
        self.watch(cx, poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_shutdown(cx);
        self.watch(cx, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.watch(cx, poll)
    }
}

//! HTTP bodies, complete in memory or streamed, and reading a body within limits.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;

/// An error of a body, of any type.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a request or a response: complete in memory, or streamed through unchanged.
pub struct Body(Kind);

enum Kind {
    /// The bytes that were already read, then the rest.
    Parts { first: Option<Bytes>, rest: Option<UnsyncBoxBody<Bytes, BoxError>>, trailers: Option<HeaderMap> },
    /// A stream of another body type.
    Stream(UnsyncBoxBody<Bytes, BoxError>),
}

impl Body {
    /// No body.
    pub fn empty() -> Self {
        Self::complete(Bytes::new())
    }

    /// A body that is complete in memory.
    pub fn complete(bytes: Bytes) -> Self {
        Self::parts(bytes, None, None)
    }

    /// A body that is still arriving.
    pub fn stream<B>(body: B) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut body = Some(body);
        // Already a `Body`: do not wrap it again.
        if let Some(ours) = (&mut body as &mut dyn std::any::Any).downcast_mut::<Option<Self>>() {
            return ours.take().unwrap_or_default();
        }
        let body = body.expect("it is of another type and was not taken");
        Self(Kind::Stream(body.map_err(Into::into).boxed_unsync()))
    }

    /// A body that may be complete although its type does not say so: if its only chunk is ready, it is taken out.
    pub fn ready_or_stream<B>(mut body: B) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        let Some(length) = body.size_hint().exact() else { return Self::stream(body) };
        if length == 0 && body.is_end_stream() {
            return Self::empty();
        }
        let mut cx = Context::from_waker(Waker::noop());
        match Pin::new(&mut body).poll_frame(&mut cx) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if data.len() as u64 == length && body.is_end_stream() => Self::complete(data),
                Ok(data) => Self::parts(data, Some(body.map_err(Into::into).boxed_unsync()), None),
                Err(frame) => Self::parts(Bytes::new(), None, frame.into_trailers().ok()),
            },
            Poll::Ready(Some(Err(error))) => Self::stream(Failed(Some(error.into()))),
            Poll::Ready(None) => Self::empty(),
            // The next poll registers its own waker.
            Poll::Pending => Self::stream(body),
        }
    }

    /// A body that fails before its first byte: the response is cut off.
    pub(crate) fn failed(error: &'static str) -> Self {
        Self::stream(Failed(Some(error.into())))
    }

    /// A body that was read to its end.
    pub fn from_complete(read: CompleteBody) -> Self {
        Self::parts(read.bytes, None, read.trailers)
    }

    /// Number of its bytes that are already in memory.
    pub fn bytes_in_memory(&self) -> usize {
        match &self.0 {
            Kind::Stream(_) => 0,
            Kind::Parts { first, .. } => first.as_ref().map_or(0, Bytes::len),
        }
    }

    /// Whether part of it is still to arrive.
    pub fn is_streamed(&self) -> bool {
        match &self.0 {
            Kind::Stream(_) => true,
            Kind::Parts { rest, .. } => rest.is_some(),
        }
    }

    fn parts(
        first: Bytes,
        rest: Option<UnsyncBoxBody<Bytes, BoxError>>,
        trailers: Option<HeaderMap>,
    ) -> Self {
        Self(Kind::Parts { first: (!first.is_empty()).then_some(first), rest, trailers })
    }
}

impl Default for Body {
    fn default() -> Self {
        Self::empty()
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Body").field("size", &self.size_hint()).finish()
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.get_mut().0 {
            Kind::Stream(body) => Pin::new(body).poll_frame(cx),
            Kind::Parts { first, rest, trailers } => {
                if let Some(bytes) = first.take() {
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                if let Some(rest) = rest {
                    return Pin::new(rest).poll_frame(cx);
                }
                Poll::Ready(trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Stream(body) => body.is_end_stream(),
            Kind::Parts { first, rest, trailers } => {
                first.is_none() && trailers.is_none() && rest.as_ref().is_none_or(HttpBody::is_end_stream)
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Stream(body) => body.size_hint(),
            Kind::Parts { first, rest, .. } => {
                let first = first.as_ref().map_or(0, |bytes| bytes.len() as u64);
                let Some(rest) = rest else { return SizeHint::with_exact(first) };
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower() + first);
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper + first);
                }
                hint
            }
        }
    }
}

/// A body that fails on the first poll.
struct Failed(Option<BoxError>);

impl HttpBody for Failed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.get_mut().0.take().map(Err))
    }
}

/// A body that was read to its end.
#[derive(Debug, Default)]
pub struct CompleteBody {
    /// Its data.
    pub bytes: Bytes,
    /// The trailers after the data.
    pub trailers: Option<HeaderMap>,
}

/// The result of reading a body within bounds.
pub enum ReadResult {
    /// The complete body.
    Complete(CompleteBody),
    /// It exceeds the size limit: the part that was read, followed by the rest.
    TooLarge(Body),
    /// It exceeds the time limit: the part that was read, followed by the rest.
    TooSlow(Body),
    /// The connection broke before the end of the body.
    Broken(BoxError),
}

/// The chunks of a body. Most bodies consist of one chunk, which is not copied.
#[derive(Default)]
struct Chunks {
    first: Bytes,
    more: BytesMut,
}

impl Chunks {
    fn push(&mut self, data: Bytes) {
        if self.first.is_empty() {
            self.first = data;
            return;
        }
        if self.more.is_empty() {
            self.more.extend_from_slice(&self.first);
        }
        self.more.extend_from_slice(&data);
    }

    fn len(&self) -> usize {
        self.first.len().max(self.more.len())
    }

    fn joined(self) -> Bytes {
        if self.more.is_empty() { self.first } else { self.more.freeze() }
    }
}

/// Reads a body of at most `bytes_max`, in at most `time_max`.
pub async fn read<B>(body: B, bytes_max: usize, time_max: Duration) -> ReadResult
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let mut body = body.map_err(Into::into).boxed_unsync();
    if body.is_end_stream() {
        return ReadResult::Complete(CompleteBody::default());
    }
    if body.size_hint().lower() > bytes_max as u64 {
        return ReadResult::TooLarge(Body(Kind::Stream(body)));
    }
    let timer = tokio::time::sleep(time_max);
    tokio::pin!(timer);
    let mut chunks = Chunks::default();
    loop {
        let frame = tokio::select! {
            biased;
            frame = body.frame() => frame,
            () = &mut timer => return ReadResult::TooSlow(Body::parts(chunks.joined(), Some(body), None)),
        };
        match frame {
            None => return ReadResult::Complete(CompleteBody { bytes: chunks.joined(), trailers: None }),
            Some(Err(error)) => return ReadResult::Broken(error),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    chunks.push(data);
                    if chunks.len() > bytes_max {
                        return ReadResult::TooLarge(Body::parts(chunks.joined(), Some(body), None));
                    }
                }
                Err(frame) => {
                    let trailers = frame.into_trailers().ok();
                    return ReadResult::Complete(CompleteBody { bytes: chunks.joined(), trailers });
                }
            },
        }
    }
}

/// How much of an unwanted body is read and discarded. Most clients read a response only after they have sent the whole
/// request: if the connection is closed earlier, they see a broken connection and retry.
pub const DISCARDED_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Reads a body to its end and discards it, unless it is very large.
pub async fn discard<B>(body: &mut B)
where
    B: HttpBody<Data = Bytes> + Unpin,
{
    let mut left = DISCARDED_BYTES_MAX;
    while left > 0
        && body.size_hint().lower() <= left
        && let Some(Ok(frame)) = body.frame().await
    {
        left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
    }
}

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyError {
    /// Larger than allowed.
    TooLarge,
    /// It did not arrive in time.
    Timeout,
    /// All requests together exceed the limit on arriving bytes.
    Overloaded,
    /// The connection broke or the framing is wrong.
    Broken,
}

/// Size limits for one body, and for all bodies that arrive at the same time.
#[derive(Debug)]
pub struct BodyLimits {
    body_bytes_max: usize,
    total_bytes_max: usize,
    arriving_bytes: Arc<AtomicUsize>,
}

impl BodyLimits {
    /// Limits in bytes, for one body and for all together.
    pub fn new(body_bytes_max: usize, total_bytes_max: usize) -> Self {
        Self { body_bytes_max, total_bytes_max, arriving_bytes: Arc::default() }
    }

    /// The same shared limit for all together, with another limit for one body.
    #[must_use]
    pub fn with_body_bytes_max(&self, body_bytes_max: usize) -> Self {
        let (total_bytes_max, arriving_bytes) = (self.total_bytes_max, self.arriving_bytes.clone());
        Self { body_bytes_max, total_bytes_max, arriving_bytes }
    }
}

/// A body that is being read. Only bytes that have arrived count; a `Content-Length` alone takes no room.
struct ArrivingBody<'a> {
    limits: &'a BodyLimits,
    bytes: usize,
}

impl ArrivingBody<'_> {
    fn add(&mut self, bytes: usize) -> Result<(), BodyError> {
        self.bytes += bytes;
        let all = self.limits.arriving_bytes.fetch_add(bytes, Relaxed) + bytes;
        if self.bytes > self.limits.body_bytes_max {
            Err(BodyError::TooLarge)
        } else if all > self.limits.total_bytes_max {
            Err(BodyError::Overloaded)
        } else {
            Ok(())
        }
    }
}

impl Drop for ArrivingBody<'_> {
    fn drop(&mut self) {
        self.limits.arriving_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// Reads a whole body within the limits, in at most `timeout`. A body that is too large is read to its end and dropped.
pub async fn read_within<B>(mut body: B, limits: &BodyLimits, timeout: Duration) -> Result<Bytes, BodyError>
where
    B: HttpBody<Data = Bytes> + Unpin,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let fits = body.size_hint().lower() <= limits.body_bytes_max as u64;
    let result = if fits {
        // Polls the body first: the timer is armed only if the body has not arrived yet.
        tokio::time::timeout(timeout, collect(&mut body, limits)).await.unwrap_or(Err(BodyError::Timeout))
    } else {
        Err(BodyError::TooLarge)
    };
    if matches!(result, Err(BodyError::TooLarge | BodyError::Overloaded)) {
        let _ = tokio::time::timeout(timeout, discard(&mut body)).await;
    }
    result
}

async fn collect<B>(body: &mut B, limits: &BodyLimits) -> Result<Bytes, BodyError>
where
    B: HttpBody<Data = Bytes> + Unpin,
{
    let mut arriving = ArrivingBody { limits, bytes: 0 };
    let mut chunks = Chunks::default();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        arriving.add(data.len())?;
        chunks.push(data);
    }
    Ok(chunks.joined())
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    #[tokio::test]
    async fn a_body_is_bounded() {
        let second = Duration::from_secs(1);
        let body = || Full::new(Bytes::from_static(b"four"));
        let limits = BodyLimits::new(4, 8);
        assert_eq!(read_within(body(), &limits, second).await.unwrap(), "four");
        assert_eq!(read_within(body(), &BodyLimits::new(3, 8), second).await, Err(BodyError::TooLarge));
        let mut others = ArrivingBody { limits: &limits, bytes: 0 };
        let _ = others.add(5);
        assert_eq!(read_within(body(), &limits, second).await, Err(BodyError::Overloaded));
        drop(others);
        assert_eq!(read_within(body(), &limits, second).await.unwrap(), "four");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_comes_times_out() {
        assert_eq!(
            read_within(Never, &BodyLimits::new(4, 4), Duration::from_secs(5)).await,
            Err(BodyError::Timeout)
        );
    }

    struct Never;

    impl HttpBody for Never {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_ready_body_is_in_memory() {
        let at_hand = Body::ready_or_stream(Full::new(Bytes::from_static(b"four")));
        assert_eq!((at_hand.bytes_in_memory(), at_hand.is_streamed()), (4, false));
        let streamed = Body::ready_or_stream(Never);
        assert_eq!((streamed.bytes_in_memory(), streamed.is_streamed()), (0, true));
        let empty = Body::ready_or_stream(Full::new(Bytes::new()));
        assert!(empty.is_end_stream());
        let read = at_hand.collect().await.unwrap().to_bytes();
        assert_eq!(read, "four");
    }
}

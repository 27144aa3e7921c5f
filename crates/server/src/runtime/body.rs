//! Request bodies, bounded in size and time; response bodies, whole or streamed.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Larger than allowed.
    TooLarge,
    /// It did not arrive in time.
    Timeout,
    /// Too much is arriving at once.
    Overloaded,
    /// The connection broke or the framing is wrong.
    Broken,
}

/// How much may be read: by one request, and by all at once.
pub(crate) struct BodyLimits {
    one_bytes_max: usize,
    all_bytes_max: usize,
    arriving_bytes: Arc<AtomicUsize>,
}

impl BodyLimits {
    pub(crate) fn new(one_bytes_max: usize, all_bytes_max: usize) -> Self {
        Self { one_bytes_max, all_bytes_max, arriving_bytes: Arc::default() }
    }

    /// Another bound for one request, the same for all at once.
    pub(crate) fn with_one(&self, one_bytes_max: usize) -> Self {
        let (all_bytes_max, arriving_bytes) = (self.all_bytes_max, self.arriving_bytes.clone());
        Self { one_bytes_max, all_bytes_max, arriving_bytes }
    }
}

/// A body on its way in. What has arrived counts; a client that only promises bytes takes no one's room.
struct Arriving<'a> {
    limits: &'a BodyLimits,
    bytes: usize,
}

impl Arriving<'_> {
    fn add(&mut self, bytes: usize) -> Result<(), BodyError> {
        self.bytes += bytes;
        let all = self.limits.arriving_bytes.fetch_add(bytes, Relaxed) + bytes;
        if self.bytes > self.limits.one_bytes_max {
            Err(BodyError::TooLarge)
        } else if all > self.limits.all_bytes_max {
            Err(BodyError::Overloaded)
        } else {
            Ok(())
        }
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.limits.arriving_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// How much of a body that is not wanted is read and thrown away. Most clients look for an answer only once they have
/// sent all: closing on them before that, they see a broken connection and try again, instead of an error.
const DISCARDED_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Reads a whole body within the limits, in at most `timeout`.
pub(crate) async fn read_body<B>(
    mut body: B,
    limits: &BodyLimits,
    timeout: Duration,
) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let fits = body.size_hint().lower() <= limits.one_bytes_max as u64;
    let result = if fits {
        // The timer is armed only when the body is not there yet.
        tokio::time::timeout(timeout, collect(&mut body, limits)).await.unwrap_or(Err(BodyError::Timeout))
    } else {
        Err(BodyError::TooLarge)
    };
    if matches!(result, Err(BodyError::TooLarge | BodyError::Overloaded)) {
        let _ = tokio::time::timeout(timeout, discard(&mut body)).await;
    }
    result
}

async fn discard<B>(body: &mut B)
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut left = DISCARDED_BYTES_MAX;
    while left > 0
        && body.size_hint().lower() <= left
        && let Some(Ok(frame)) = body.frame().await
    {
        left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
    }
}

async fn collect<B>(body: &mut B, limits: &BodyLimits) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut arriving = Arriving { limits, bytes: 0 };
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        arriving.add(data.len())?;
        if first.is_empty() {
            // Most bodies come in one frame and are not copied.
            first = data;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&first);
            }
            rest.extend_from_slice(&data);
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

/// A response body: bytes at hand, or a stream from the router.
pub enum ResponseBody {
    /// All of it; `None` once it is taken.
    Whole(Option<Bytes>),
    /// From the router.
    Stream(axum::body::Body),
}

impl ResponseBody {
    /// A body that is at hand.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self::Whole((!bytes.is_empty()).then_some(bytes))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Stream(body) => body.size_hint(),
        }
    }
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
        assert_eq!(read_body(body(), &limits, second).await.unwrap(), "four");
        assert_eq!(read_body(body(), &BodyLimits::new(3, 8), second).await, Err(BodyError::TooLarge));
        let mut others = Arriving { limits: &limits, bytes: 0 };
        let _ = others.add(5);
        assert_eq!(read_body(body(), &limits, second).await, Err(BodyError::Overloaded));
        drop(others);
        assert_eq!(read_body(body(), &limits, second).await.unwrap(), "four");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_comes_times_out() {
        assert_eq!(
            read_body(Never, &BodyLimits::new(4, 4), Duration::from_secs(5)).await,
            Err(BodyError::Timeout)
        );
    }

    struct Never;

    impl Body for Never {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Pending
        }
    }
}

//! Request bodies, bounded in size and time; response bodies, whole or streamed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Larger than allowed.
    TooLarge,
    /// It did not arrive in time.
    Timeout,
    /// The connection broke or the framing is wrong.
    Broken,
}

/// How much of a body that is too large is read and thrown away. Most clients look for an answer only once they have
/// sent all: closing on them before that, they see a broken connection and try again, instead of an error.
const DISCARDED_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Reads a whole body of at most `bytes_max` bytes, in at most `timeout`.
pub(crate) async fn read_body<B>(mut body: B, bytes_max: usize, timeout: Duration) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let read = async {
        let fits = body.size_hint().lower() <= bytes_max as u64;
        let result = if fits { collect(&mut body, bytes_max).await } else { Err(BodyError::TooLarge) };
        if result == Err(BodyError::TooLarge) {
            discard(&mut body).await;
        }
        result
    };
    // The timer is armed only when the body is not there yet.
    tokio::time::timeout(timeout, read).await.unwrap_or(Err(BodyError::Timeout))
}

async fn discard<B>(body: &mut B)
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut left = DISCARDED_BYTES_MAX;
    while body.size_hint().lower() <= left
        && let Some(Ok(frame)) = body.frame().await
    {
        left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
        if left == 0 {
            return;
        }
    }
}

async fn collect<B>(body: &mut B, bytes_max: usize) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        if first.len() + rest.len() + data.len() > bytes_max {
            return Err(BodyError::TooLarge);
        }
        if first.is_empty() {
            first = data;
        } else {
            // Most bodies come in one frame and are not copied.
            rest.extend_from_slice(data.chunk());
        }
    }
    if rest.is_empty() {
        return Ok(first);
    }
    let mut whole = BytesMut::with_capacity(first.len() + rest.len());
    whole.extend_from_slice(&first);
    whole.extend_from_slice(&rest);
    Ok(whole.freeze())
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
        assert_eq!(read_body(body(), 4, second).await.unwrap(), "four");
        assert_eq!(read_body(body(), 3, second).await, Err(BodyError::TooLarge));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_comes_times_out() {
        assert_eq!(read_body(Never, 4, Duration::from_secs(5)).await, Err(BodyError::Timeout));
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

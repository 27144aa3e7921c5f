//! Bodies: at hand or streamed; and reading one within its bounds.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;

/// An error of whatever is around the layer.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a request or an answer that went through the layer: at hand, or streamed through untouched.
pub struct Body(Kind);

enum Kind {
    /// What was read of it already, then the rest.
    Parts { first: Option<Bytes>, rest: Option<UnsyncBoxBody<Bytes, BoxError>>, trailers: Option<HeaderMap> },
    /// Someone else's.
    Stream(UnsyncBoxBody<Bytes, BoxError>),
}

impl Body {
    /// No body.
    pub fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    /// A body that is at hand.
    pub fn whole(bytes: Bytes) -> Self {
        Self::parts(bytes, None, None)
    }

    /// A body that is on its way.
    pub fn stream<B>(body: B) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut body = Some(body);
        // One of ours already: not wrapped again.
        if let Some(ours) = (&mut body as &mut dyn std::any::Any).downcast_mut::<Option<Self>>() {
            return ours.take().unwrap_or_default();
        }
        let body = body.expect("nobody took it");
        Self(Kind::Stream(body.map_err(Into::into).boxed_unsync()))
    }

    pub(crate) fn read(read: Read) -> Self {
        Self::parts(read.bytes, None, read.trailers)
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

/// A body that was read to its end.
#[derive(Debug, Default)]
pub(crate) struct Read {
    pub(crate) bytes: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

/// What reading a body within bounds came to.
pub(crate) enum Bounded {
    /// All of it.
    Whole(Read),
    /// It is larger than asked for: what came of it, and then the rest.
    Large(Body),
    /// It is slower than asked for: what came of it, and then the rest.
    Slow(Body),
    /// It broke off.
    Broken(BoxError),
}

/// Reads a body of at most `bytes_max`, in at most `time_max`.
pub(crate) async fn read<B>(body: B, bytes_max: usize, time_max: Duration) -> Bounded
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let mut body = body.map_err(Into::into).boxed_unsync();
    if body.is_end_stream() {
        return Bounded::Whole(Read::default());
    }
    if body.size_hint().lower() > bytes_max as u64 {
        return Bounded::Large(Body(Kind::Stream(body)));
    }
    let timer = tokio::time::sleep(time_max);
    tokio::pin!(timer);
    let (mut first, mut more) = (Bytes::new(), BytesMut::new());
    let joined = |first: Bytes, more: BytesMut| if more.is_empty() { first } else { more.freeze() };
    loop {
        let frame = tokio::select! {
            biased;
            frame = body.frame() => frame,
            () = &mut timer => return Bounded::Slow(Body::parts(joined(first, more), Some(body), None)),
        };
        match frame {
            None => return Bounded::Whole(Read { bytes: joined(first, more), trailers: None }),
            Some(Err(error)) => return Bounded::Broken(error),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    if first.is_empty() {
                        // Most bodies come in one piece and are not copied.
                        first = data;
                    } else {
                        if more.is_empty() {
                            more.extend_from_slice(&first);
                        }
                        more.extend_from_slice(&data);
                    }
                    if first.len().max(more.len()) > bytes_max {
                        return Bounded::Large(Body::parts(joined(first, more), Some(body), None));
                    }
                }
                Err(frame) => {
                    let trailers = frame.into_trailers().ok();
                    return Bounded::Whole(Read { bytes: joined(first, more), trailers });
                }
            },
        }
    }
}

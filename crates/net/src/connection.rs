//! One connection: handshake, protocol detection, requests, close.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;

use crate::body::Body;
use crate::listen::{ListenerState, Shutdown};
use crate::tracker::{Connection, Registration, RequestGuard};
use crate::unread::{self, ResponseBody};
use crate::when_woken::when_woken;

/// A request with its body still arriving.
pub type Request = http::Request<Incoming>;

/// Serves the requests of one connection.
pub trait RequestHandler: Send + Sync + 'static {
    /// Serves one request. Never fails: every error becomes a response.
    fn handle(&self, request: Request, guard: &RequestGuard) -> impl Future<Output = Response<Body>> + Send;

    /// Whether a request starts only while the budget for unread responses has room. A health check need not wait: its response is
    /// tiny and shows whether the listener works.
    fn needs_unread_budget(&self, _: &Request) -> bool {
        true
    }

    /// The response to a request that was not started because too many earlier responses are still unread: 503 with
    /// `Retry-After`.
    fn refuse_request(&self, request: &Request) -> Response<Body>;

    /// The replacement for a large response that exceeds the budget: the same error, in the format of that response.
    fn replace_response(&self, response: &Response<Body>) -> Response<Body>;
}

/// Both ends of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// The client's address.
    pub address: SocketAddr,
    /// The address that it connected to.
    pub local: SocketAddr,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

/// The first bytes of every HTTP/2 connection; no HTTP/1 request begins with them.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serves one connection until it closes.
pub(crate) async fn serve<A, C>(
    stream: TcpStream,
    address: SocketAddr,
    registration: Registration,
    listener_state: Arc<ListenerState<C>>,
) where
    A: RequestHandler,
    C: Fn(Peer) -> A + Send + Sync + 'static,
{
    let connection = registration.connection.clone();
    tokio::select! {
        biased;
        () = when_woken(connection.closed()) => tracing::debug!(%address, "connection closed: idle, slow, or no room"),
        () = handshake_and_serve(stream, address, &connection, &listener_state) => {}
    }
    drop(registration);
}

async fn handshake_and_serve<A, C>(
    stream: TcpStream,
    address: SocketAddr,
    connection: &Arc<Connection>,
    listener_state: &Arc<ListenerState<C>>,
) where
    A: RequestHandler,
    C: Fn(Peer) -> A + Send + Sync + 'static,
{
    let Ok(local) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let peer = Peer { address, local, tls: listener_state.tls.is_some() };
    let Some(tls) = &listener_state.tls else {
        let http2 = speaks_http2(&stream, connection).await;
        return serve_http(TokioIo::new(stream), http2, peer, connection, listener_state).await;
    };
    // The sweeper limits the time of the handshake as it limits the time of a request head.
    connection.on_bytes_read();
    match tls.accept(stream).await {
        Ok(stream) => {
            let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            serve_http(TokioIo::new(stream), http2, peer, connection, listener_state).await;
        }
        Err(error) => tracing::debug!(%address, %error, "TLS handshake failed"),
    }
}

/// Peeks at the first bytes. hyper-util's own detection waits for them without a timeout, and copies through a buffer
/// for the whole life of the connection; this one has no cost afterwards.
async fn speaks_http2(stream: &TcpStream, connection: &Connection) -> bool {
    let mut first = [0; HTTP2_PREFACE.len()];
    loop {
        match stream.peek(&mut first).await {
            Ok(length) if length == HTTP2_PREFACE.len() => return first == *HTTP2_PREFACE,
            Ok(length) if length > 0 && first[..length] == HTTP2_PREFACE[..length] => {
                // Only part of the preface has arrived, and there is no wake-up for the rest. The sweeper closes the
                // connection if the rest never comes.
                connection.on_bytes_read();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            _ => return false,
        }
    }
}

async fn serve_http<S, A, C>(
    io: S,
    http2: bool,
    peer: Peer,
    connection: &Arc<Connection>,
    listener_state: &Arc<ListenerState<C>>,
) where
    S: Read + Write + Unpin + Send + 'static,
    A: RequestHandler,
    C: Fn(Peer) -> A + Send + Sync + 'static,
{
    let handler = Arc::new((listener_state.new_handler)(peer));
    let budget_wait = listener_state.budget_wait;
    let tracked = connection.clone();
    let service = service_fn(move |request: Request| {
        let (guard, handler) = (tracked.begin_request(), handler.clone());
        async move { Ok::<_, Infallible>(handle(&*handler, request, guard, budget_wait).await) }
    });
    let limits = &listener_state.limits;
    if http2 {
        // A frame outside of any request, such as a ping, does not start a request head.
        let io = TrackedIo { io, connection: connection.clone(), tracks_heads: false };
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(256)
            .max_header_list_size(limits.header_bytes_max.try_into().unwrap_or(u32::MAX))
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(20));
        let serving = builder.serve_connection(io, service);
        tokio::pin!(serving);
        drive(serving.as_mut(), http2::Connection::graceful_shutdown, &listener_state.shutdown, peer).await;
    } else {
        let io = TrackedIo { io, connection: connection.clone(), tracks_heads: true };
        let mut builder = http1::Builder::new();
        // No `pipeline_flush`: it delays a response while there is more input to read, and loses it on close. No
        // `header_read_timeout`: the sweeper enforces it without a timer per request.
        builder.header_read_timeout(None).max_buf_size(limits.header_bytes_max);
        let serving = builder.serve_connection(io, service);
        tokio::pin!(serving);
        drive(serving.as_mut(), http1::Connection::graceful_shutdown, &listener_state.shutdown, peer).await;
    }
}

async fn handle<A: RequestHandler>(
    handler: &A,
    request: Request,
    guard: RequestGuard,
    budget_wait: Duration,
) -> Response<ResponseBody> {
    let needs_unread_budget = handler.needs_unread_budget(&request);
    let response = if !needs_unread_budget || unread::wait_for_budget(guard.connection(), budget_wait).await {
        handler.handle(request, &guard).await
    } else {
        handler.refuse_request(&request)
    };
    ResponseBody::wrap(response, guard, |unsent| handler.replace_response(unsent))
}

/// Runs a connection. When the listener shuts down, running requests finish and no new ones start.
async fn drive<C, E>(mut serving: Pin<&mut C>, end: impl Fn(Pin<&mut C>), shutdown: &Shutdown, peer: Peer)
where
    C: Future<Output = Result<(), E>>,
    E: std::fmt::Display,
{
    let result = tokio::select! {
        biased;
        result = serving.as_mut() => result,
        () = when_woken(shutdown.requested()) => {
            end(serving.as_mut());
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(address = %peer.address, %error, "connection ended");
    }
}

/// Tells the tracker when bytes arrive, to detect an incomplete request head, and when the socket accepts bytes, to
/// detect a client that does not read.
struct TrackedIo<S> {
    io: S,
    connection: Arc<Connection>,
    /// Whether arriving bytes start a request head.
    tracks_heads: bool,
}

impl<S> TrackedIo<S> {
    fn record_write(&self, poll: Poll<std::io::Result<usize>>) -> Poll<std::io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &poll {
            self.connection.on_written(*bytes);
        }
        poll
    }
}

impl<S: Read + Unpin> Read for TrackedIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_read(cx, buffer);
        if self.tracks_heads && poll.is_ready() {
            self.connection.on_bytes_read();
        }
        poll
    }
}

impl<S: Write + Unpin> Write for TrackedIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.record_write(poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write_vectored(cx, parts);
        self.record_write(poll)
    }
}

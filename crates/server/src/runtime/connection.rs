//! One connection: handshake, protocol, requests, end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;

use super::body::ResponseBody;
use super::tracker::{Connection, Registration};
use super::{Accepting, Shutdown};

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// The client's address.
    pub(crate) address: SocketAddr,
    /// The address that it connected to.
    pub(crate) local: SocketAddr,
    /// Whether the connection is encrypted.
    pub(crate) tls: bool,
}

/// What an HTTP/2 client opens a connection with; no HTTP/1 request begins like it.
const PREFACE: &[u8] = b"PRI";

/// Serves one connection to its end.
pub(crate) async fn serve(
    stream: TcpStream,
    address: SocketAddr,
    registration: Registration,
    accepting: Arc<Accepting>,
) {
    let connection = registration.connection.clone();
    tokio::select! {
        biased;
        () = connection.closed() => tracing::debug!(%address, "connection closed: idle, slow, or no room"),
        () = handshake_and_serve(stream, address, &connection, &accepting) => {}
    }
    drop(registration);
}

async fn handshake_and_serve(
    stream: TcpStream,
    address: SocketAddr,
    connection: &Arc<Connection>,
    accepting: &Arc<Accepting>,
) {
    let Ok(local) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let read_timeout = Duration::from_millis(accepting.limits.read_timeout_ms);
    if let Some(tls) = &accepting.tls {
        let peer = Peer { address, local, tls: true };
        match tokio::time::timeout(read_timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                serve_http(TokioIo::new(stream), http2, peer, connection, accepting).await;
            }
            Ok(Err(error)) => tracing::debug!(%address, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%address, "TLS handshake timed out"),
        }
    } else {
        let peer = Peer { address, local, tls: false };
        let http2 = speaks_http2(&stream, connection).await;
        serve_http(TokioIo::new(stream), http2, peer, connection, accepting).await;
    }
}

/// Looks at the first bytes without taking them. hyper-util's own detection copies through a buffer for the whole life
/// of the connection; this one costs nothing afterwards.
async fn speaks_http2(stream: &TcpStream, connection: &Connection) -> bool {
    let mut first = [0; PREFACE.len()];
    loop {
        match stream.peek(&mut first).await {
            Ok(length) if length == PREFACE.len() => return first == *PREFACE,
            Ok(length) if length > 0 && first[..length] == PREFACE[..length] => {
                // Only part of it: the sweeper ends this if the rest never comes.
                connection.on_bytes();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            _ => return false,
        }
    }
}

async fn serve_http<S>(
    io: S,
    http2: bool,
    peer: Peer,
    connection: &Arc<Connection>,
    accepting: &Arc<Accepting>,
) where
    S: Read + Write + Unpin + Send + 'static,
{
    let io = Watched { io, connection: connection.clone() };
    let (tracked, app) = (connection.clone(), accepting.app.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let (guard, app) = (tracked.begin(), app.clone());
        async move { Ok::<Response<ResponseBody>, Infallible>(app.handle(request, peer, guard).await) }
    });
    if http2 {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(256)
            .max_header_list_size(32 * 1024)
            .keep_alive_interval(Duration::from_secs(30));
        let serving = builder.serve_connection(io, service);
        tokio::pin!(serving);
        drive(
            serving.as_mut(),
            hyper::server::conn::http2::Connection::graceful_shutdown,
            &accepting.shutdown,
            peer,
        )
        .await;
    } else {
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder.header_read_timeout(None).max_buf_size(64 * 1024).pipeline_flush(true);
        let serving = builder.serve_connection(io, service);
        tokio::pin!(serving);
        drive(
            serving.as_mut(),
            hyper::server::conn::http1::Connection::graceful_shutdown,
            &accepting.shutdown,
            peer,
        )
        .await;
    }
}

/// Runs a connection; when the server goes down, lets the requests under way finish and no more begin.
async fn drive<C, E>(mut serving: Pin<&mut C>, end: impl Fn(Pin<&mut C>), shutdown: &Shutdown, peer: Peer)
where
    C: Future<Output = Result<(), E>>,
    E: std::fmt::Display,
{
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = shutdown.requested() => {
            end(serving.as_mut());
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(address = %peer.address, %error, "connection ended");
    }
}

/// Tells the tracker when bytes arrive, so that a half-sent head is noticed.
struct Watched<S> {
    io: S,
    connection: Arc<Connection>,
}

impl<S: Read + Unpin> Read for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_read(cx, buffer);
        if poll.is_ready() {
            self.connection.on_bytes();
        }
        poll
    }
}

impl<S: Write + Unpin> Write for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
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
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
    }
}

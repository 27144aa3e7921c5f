//! The reverse proxy: any HTTP service behind an [`IdempotencyLayer`], in any language.
//!
//! Requests without a key are streamed through, both ways. HTTP/1.1 and HTTP/2, with and without TLS, from callers; to
//! the upstream HTTP/1.1, or over TLS whichever it offers. Upgrades (WebSocket) and `CONNECT` are refused.
//!
//! ```no_run
//! # async fn example(ledger: std::sync::Arc<dyn hapax_core::Ledger>) -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_http::proxy::{Proxy, ProxyConfig};
//!
//! let config = ProxyConfig { upstream: "http://127.0.0.1:8080".into(), ..ProxyConfig::default() };
//! let proxy = Proxy::new(config, ledger)?;
//! let listener = proxy.bind().await?;
//! proxy.run(listener, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```

mod config;
mod forward;
mod idle;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Ledger;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tower_layer::Layer as _;
use tower_service::Service as _;

pub use self::config::{HostPolicy, ProxyConfig, ProxyLimits, RoutePolicy, TlsFiles};
use self::forward::{Forward, ForwardFor, Peer, refused};
use self::idle::IdleIo;
use crate::body::Body;
use crate::layer::{Idempotency, IdempotencyLayer};
use crate::policy::ConfigError;
use crate::stored::IDEMPOTENT_REPLAYED;
use crate::tls::{self, TlsError};

/// Why the proxy does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The configuration cannot be meant.
    #[error("proxy {name}: {source}")]
    Config {
        /// Which proxy.
        name: String,
        /// What is wrong.
        source: ConfigError,
    },
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
}

/// A proxy that is configured but does not listen yet.
pub struct Proxy {
    config: ProxyConfig,
    layer: IdempotencyLayer,
    forward: Forward,
    tls: Option<TlsAcceptor>,
}

impl Proxy {
    /// Checks the configuration and loads the certificate.
    pub fn new(config: ProxyConfig, ledger: Arc<dyn Ledger>) -> Result<Self, ProxyError> {
        let refused = |source| ProxyError::Config { name: config.name.clone(), source };
        config.validate().map_err(refused)?;
        let tls =
            config.tls.as_ref().map(|files| tls::acceptor(&files.cert_file, &files.key_file)).transpose()?;
        let mut layer = IdempotencyLayer::builder(&config.name, ledger)
            .tenant(config.tenant.clone())
            .policy(config.policy.clone());
        for route in &config.routes {
            layer = layer.route(&route.path, route.policy.clone());
        }
        let layer = layer.build().map_err(refused)?;
        let forward = Forward::new(&config).map_err(refused)?;
        Ok(Self { config, layer, forward, tls })
    }

    /// How it is configured.
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// The layer, for its counters.
    pub fn layer(&self) -> IdempotencyLayer {
        self.layer.clone()
    }

    /// Listens on the configured address.
    pub async fn bind(&self) -> Result<TcpListener, ProxyError> {
        let address = self.config.listen;
        TcpListener::bind(address).await.map_err(|source| ProxyError::Bind { address, source })
    }

    /// Serves until `shutdown` resolves; then stops accepting, lets requests under way finish, those of callers that
    /// hung up too, and returns within the configured bound. What is cut off then is in doubt.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()>) {
        let (begin_shutdown, stop) = watch::channel(false);
        let bound = Duration::from_millis(self.config.limits.shutdown_timeout_ms);
        let layer = self.layer.clone();
        let shared = Arc::new(ProxyState {
            room: Arc::new(Semaphore::new(self.config.limits.connections_max)),
            layer: self.layer,
            forward: self.forward,
            tls: self.tls,
            config: self.config,
            stop,
        });
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                accepted = accept(&listener, &shared) => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Ok((stream, address, permit)) => {
                    let shared = shared.clone();
                    connections.spawn(async move {
                        shared.serve(stream, address).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    // Out of file descriptors, most likely: closing something takes a moment.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(listener);
        tracing::info!(connections = connections.len(), running = layer.running(), "shutting down");
        begin_shutdown.send_replace(true);
        let drained = async {
            while connections.join_next().await.is_some() {}
            layer.idle().await;
        };
        if tokio::time::timeout(bound, drained).await.is_err() {
            tracing::warn!(running = layer.running(), "requests cut off at the end of the shutdown's time");
            connections.shutdown().await;
        }
        tracing::info!(counters = ?layer.counters(), "stopped");
    }
}

type Permit = tokio::sync::OwnedSemaphorePermit;

async fn accept(
    listener: &TcpListener,
    shared: &ProxyState,
) -> std::io::Result<(TcpStream, SocketAddr, Permit)> {
    let permit = shared.room.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, address) = listener.accept().await?;
    Ok((stream, address, permit))
}

struct ProxyState {
    config: ProxyConfig,
    layer: IdempotencyLayer,
    forward: Forward,
    tls: Option<TlsAcceptor>,
    room: Arc<Semaphore>,
    stop: watch::Receiver<bool>,
}

impl ProxyState {
    async fn serve(self: &Arc<Self>, stream: TcpStream, address: SocketAddr) {
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else {
            if let Some(http2) = self.opening(speaks_http2(&stream)).await {
                self.serve_http(TokioIo::new(stream), http2, Peer::new(address, false)).await;
            } else {
                tracing::debug!(%address, "no request in time");
            }
            return;
        };
        match self.opening(tls.accept(stream)).await {
            Some(Ok(stream)) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                self.serve_http(TokioIo::new(stream), http2, Peer::new(address, true)).await;
            }
            Some(Err(error)) => tracing::debug!(%address, %error, "TLS handshake failed"),
            None => tracing::debug!(%address, "no TLS handshake in time"),
        }
    }

    /// Waits for how a connection begins, within its bound. A shutdown ends it: nothing is under way there yet.
    async fn opening<T>(&self, first: impl Future<Output = T>) -> Option<T> {
        let bound = Duration::from_millis(self.config.limits.read_timeout_ms);
        let mut stop = self.stop.clone();
        tokio::select! {
            biased;
            first = tokio::time::timeout(bound, first) => first.ok(),
            _ = stop.wait_for(|stop| *stop) => None,
        }
    }

    async fn serve_http<S>(self: &Arc<Self>, io: S, http2: bool, peer: Peer)
    where
        S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let limits = &self.config.limits;
        let io = IdleIo::new(io, self.forward.bodies());
        let peer = Arc::new(peer);
        let behind = self.layer.layer(self.forward.of(peer.clone()));
        let caller = Arc::new(Caller { shared: self.clone(), peer: peer.clone(), behind });
        let service = service_fn(move |request| {
            let caller = caller.clone();
            async move { Ok::<_, Infallible>(caller.answer(request).await) }
        });
        if http2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(256)
                .max_header_list_size(limits.header_bytes_max.try_into().unwrap_or(u32::MAX))
                .keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20));
            let connection = builder.serve_connection(io, service);
            tokio::pin!(connection);
            self.drive(connection.as_mut(), http2::Connection::graceful_shutdown, &peer).await;
        } else {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_millis(limits.read_timeout_ms))
                // No `pipeline_flush`: it holds an answer back while more is there to read, and drops it on closing.
                .max_buf_size(limits.header_bytes_max);
            let connection = builder.serve_connection(io, service);
            tokio::pin!(connection);
            self.drive(connection.as_mut(), http1::Connection::graceful_shutdown, &peer).await;
        }
    }

    /// Runs a connection; when the proxy goes down, lets the requests under way finish and no more begin.
    async fn drive<C>(&self, mut connection: Pin<&mut C>, end: impl Fn(Pin<&mut C>), peer: &Peer)
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let mut stop = self.stop.clone();
        let stopping = async move {
            // An error means that the proxy itself is gone: that is a shutdown too.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stopping => {
                end(connection.as_mut());
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(address = %peer.address, %error, "connection ended");
        }
    }
}

/// A connection, for its requests.
struct Caller {
    shared: Arc<ProxyState>,
    peer: Arc<Peer>,
    behind: Idempotency<ForwardFor>,
}

impl Caller {
    async fn answer(&self, mut request: Request<Incoming>) -> Response<Body> {
        // Without the query: it may hold what is not for logs.
        let told = tracing::enabled!(tracing::Level::INFO)
            .then(|| (Instant::now(), request.method().clone(), request.uri().path().to_owned()));
        let response = match self.shared.forward.admit(&mut request) {
            Ok(()) => {
                let Ok(response) = self.behind.clone().call(request).await;
                response
            }
            Err(problem) => refused(problem, request.version()),
        };
        if let Some((begun, method, path)) = told {
            let replayed = response.headers().contains_key(IDEMPOTENT_REPLAYED);
            let ms = begun.elapsed().as_millis() as u64;
            let status = response.status().as_u16();
            tracing::info!(proxy = %self.shared.config.name, peer = %self.peer.address, %method, path, status, ms, replayed, "request");
        }
        response
    }
}

/// What an HTTP/2 client opens a connection with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Looks at the first bytes without taking them. hyper-util's own detection waits for them without a bound, and copies
/// through a buffer for the whole life of the connection.
async fn speaks_http2(stream: &TcpStream) -> bool {
    let mut first = [0; PREFACE.len()];
    loop {
        match stream.peek(&mut first).await {
            Ok(length) if length == PREFACE.len() => return first == *PREFACE,
            Ok(length) if length > 0 && first[..length] == PREFACE[..length] => {
                // Only part of it, and nothing tells when the rest is there.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            _ => return false,
        }
    }
}

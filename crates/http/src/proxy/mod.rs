//! The reverse proxy: puts an [`IdempotencyLayer`] in front of any HTTP service, in any language.
//!
//! Requests without a key are streamed through in both directions. Callers may use HTTP/1.1 and HTTP/2, with and
//! without TLS. The upstream is called over HTTP/1.1, or over TLS with the version that it offers. Upgrades (WebSocket)
//! and `CONNECT` are refused.
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

mod caller_body;
mod config;
mod forward;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Ledger;
use hapax_net::connection::{Request, RequestHandler};
use hapax_net::listen::{Limits, Runtime};
use hapax_net::tls::{self, TlsError};
use hapax_net::tracker::RequestGuard;
use hapax_net::unread::UnreadBudget;
use hapax_net::{idle, problem};
use hapax_observe::trace::Tracer;
use http::Response;
use tokio::net::TcpListener;

pub use self::config::{HostPolicy, ProxyConfig, ProxyLimits, RoutePolicy, TlsFiles};
use self::forward::{CallerInfo, ConnectionForwarder, Forwarder, refused};
use crate::body::Body;
use crate::layer::{IdempotencyLayer, Prepared};
use crate::policy::ConfigError;
use crate::span::RequestSpan;
use crate::stored::IDEMPOTENT_REPLAYED;

/// Why the proxy did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The configuration is invalid.
    #[error("proxy {name}: {source}")]
    Config {
        /// The name of the proxy.
        name: String,
        /// The problem.
        source: ConfigError,
    },
    /// The certificate is unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The proxy cannot listen on the address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
}

/// What a process has for its proxies beside their configuration.
#[derive(Debug, Clone, Default)]
pub struct ProxyOptions {
    /// Where operators reach the ledger: callers whose key is in doubt are told ([`Builder::admin`](crate::Builder::admin)).
    pub admin: Option<String>,
    /// Takes a span for each request of a recorded trace ([`Builder::tracer`](crate::Builder::tracer)).
    pub tracer: Option<Arc<Tracer>>,
}

/// A proxy that is configured but does not listen yet.
pub struct Proxy {
    config: ProxyConfig,
    layer: IdempotencyLayer,
    forward: Forwarder,
    runtime: Runtime,
}

impl Proxy {
    /// Checks the configuration and loads the certificate.
    pub fn new(config: ProxyConfig, ledger: Arc<dyn Ledger>) -> Result<Self, ProxyError> {
        Self::with_options(config, ledger, ProxyOptions::default())
    }

    /// The same with what the process has beside the configuration.
    pub fn with_options(
        config: ProxyConfig,
        ledger: Arc<dyn Ledger>,
        options: ProxyOptions,
    ) -> Result<Self, ProxyError> {
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
        if let Some(url) = options.admin {
            layer = layer.admin(url);
        }
        if let Some(tracer) = options.tracer {
            layer = layer.tracer(tracer);
        }
        let layer = layer.build().map_err(refused)?;
        let forward = Forwarder::new(&config).map_err(refused)?;
        let runtime = Runtime::new(limits(&config.limits), tls);
        Ok(Self { config, layer, forward, runtime })
    }

    /// Its configuration.
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// The layer, for its counters.
    pub fn layer(&self) -> IdempotencyLayer {
        self.layer.clone()
    }

    /// Bytes of responses that callers have not read yet.
    pub fn unread_budget(&self) -> Arc<UnreadBudget> {
        self.runtime.unread_budget()
    }

    /// Listens on the configured address.
    pub async fn bind(&self) -> Result<TcpListener, ProxyError> {
        let address = self.config.listen;
        TcpListener::bind(address).await.map_err(|source| ProxyError::Bind { address, source })
    }

    /// Serves until `shutdown` resolves. Then it stops accepting connections, lets running requests finish, including
    /// those of disconnected callers, and returns within the configured timeout. Requests aborted then are in doubt.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()> + Send) {
        self.run_until(listener, pin!(shutdown)).await;
    }

    /// Has no type parameter, so that the code of requests is compiled once, in this crate and with its settings.
    async fn run_until(self, listener: TcpListener, shutdown: Pin<&mut (dyn Future<Output = ()> + Send)>) {
        let timeout = self.config.limits.shutdown_timeout;
        let layer = self.layer.clone();
        let shared = Arc::new(ProxyState { config: self.config, layer: self.layer, forward: self.forward });
        let connect = move |peer: hapax_net::connection::Peer| {
            let peer = Arc::new(CallerInfo::new(peer.address, peer.tls));
            let forward = shared.forward.for_caller(peer.clone());
            CallerConnection { shared: shared.clone(), peer, forward }
        };
        let mut end = None;
        let noted = async {
            shutdown.await;
            end = Some(Instant::now() + timeout);
        };
        self.runtime.run(vec![listener], connect, noted).await;
        let left = end.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
        if tokio::time::timeout(left, layer.idle()).await.is_err() {
            tracing::warn!(running = layer.running(), "requests cut off at the end of the shutdown's time");
        }
        tracing::info!(counters = ?layer.counters(), "stopped");
    }
}

fn limits(config: &ProxyLimits) -> Limits {
    Limits {
        connections_max: config.connections_max,
        header_bytes_max: config.header_bytes_max,
        read_timeout: config.read_timeout,
        idle_timeout: config.read_timeout,
        write_timeout: config.idle_timeout,
        unread_bytes_max: config.unread_bytes_max,
        shutdown_timeout: config.shutdown_timeout,
    }
}

struct ProxyState {
    config: ProxyConfig,
    layer: IdempotencyLayer,
    forward: Forwarder,
}

/// A caller's connection.
struct CallerConnection {
    shared: Arc<ProxyState>,
    peer: Arc<CallerInfo>,
    forward: ConnectionForwarder,
}

impl CallerConnection {
    /// What the layer's service does, without its clones and boxes for each request.
    async fn serve(&self, request: Request) -> Response<Body> {
        match self.shared.layer.0.prepare(request).await {
            // Boxed: its state is large, and would be moved with the state of every request.
            Prepared::Pass(request) => Box::pin(self.forward.forward(request)).await,
            Prepared::Refused(problem) => problem.into_response(),
            Prepared::Keyed(run) => {
                let Ok(response) = run.spawn(self.forward.clone()).await;
                response
            }
        }
    }
}

impl RequestHandler for CallerConnection {
    async fn handle(&self, mut request: Request, guard: &RequestGuard) -> Response<Body> {
        // Bodies are streamed: the upstream is already working.
        guard.mark_body_read();
        // Without the query, which may contain data that does not belong in logs.
        let told = tracing::enabled!(tracing::Level::INFO)
            .then(|| (Instant::now(), request.method().clone(), request.uri().path().to_owned()));
        let span = self.shared.layer.0.begin_span(&mut request);
        let response = match self.shared.forward.admit(&mut request) {
            Ok(()) => self.serve(request).await,
            Err(problem) => refused(problem, request.version()),
        };
        let trace = span.as_ref().map(RequestSpan::trace_id);
        if let Some(span) = span {
            span.end(&response);
        }
        if let Some((begun, method, path)) = told {
            let replayed = response.headers().contains_key(IDEMPOTENT_REPLAYED);
            let ms = begun.elapsed().as_millis() as u64;
            let status = response.status().as_u16();
            tracing::info!(proxy = %self.shared.config.name, peer = %self.peer.address, %method, path, status, ms, replayed, trace, "request");
        }
        response
    }

    fn refuse_request(&self, request: &Request) -> Response<Body> {
        refused(problem::overloaded(), request.version())
    }

    fn replace_response(&self, _: &Response<Body>) -> Response<Body> {
        problem::overloaded().into_response()
    }
}

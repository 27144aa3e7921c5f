//! What a relay shows over HTTP: `/metrics`, `/readyz` and `/healthz`.

use std::net::SocketAddr;

use anyhow::Context as _;
use hapax::core::metrics;
use hapax::relay::RelayWatch;
use hapax_net::body::Body;
use hapax_net::connection::{Peer, Request, RequestHandler};
use hapax_net::guard::BrowserGuard;
use hapax_net::listen::{Limits, Runtime};
use hapax_net::problem;
use hapax_net::tracker::RequestGuard;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use std::sync::Arc;
use tokio::net::TcpListener;

use crate::output::raw;
use crate::serve::url_of;

/// Prometheus, a probe and an operator.
const CONNECTIONS_MAX: usize = 64;
const TEXT: &str = "text/plain; charset=utf-8";

/// The listener, bound.
pub struct Page {
    listener: TcpListener,
    insecure: bool,
}

impl Page {
    /// Listens, and prints where.
    pub async fn bind(address: SocketAddr, insecure: bool) -> anyhow::Result<Self> {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("--listen {address} cannot be used"))?;
        let url = url_of(listener.local_addr()?, false);
        if let Err(error) = raw(&format!("  Metrics {url}/metrics, readiness {url}/readyz\n")) {
            // Standard output is closed; publish anyway.
            tracing::debug!("standard output: {error:#}");
        }
        Ok(Self { listener, insecure })
    }

    /// Answers until `shutdown` resolves.
    pub async fn run(self, watch: RelayWatch, shutdown: impl Future<Output = ()>) {
        let limits = Limits { connections_max: CONNECTIONS_MAX, ..Limits::default() };
        let guard = BrowserGuard { allowed_hosts: Vec::new(), has_keys: false, insecure: self.insecure };
        let shown = Arc::new(Shown { watch, guard });
        let new_handler = move |peer| Connection { shown: shown.clone(), peer };
        Runtime::new(limits, None).run(vec![self.listener], new_handler, shutdown).await;
    }
}

struct Shown {
    watch: RelayWatch,
    guard: BrowserGuard,
}

struct Connection {
    shown: Arc<Shown>,
    peer: Peer,
}

fn response(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(Body::complete(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

impl RequestHandler for Connection {
    async fn handle(&self, request: Request, _: &RequestGuard) -> Response<Body> {
        let text = |status, text: &str| response(status, TEXT, format!("{text}\n"));
        if let Err(reason) = self.shown.guard.check(&request, self.peer.local, || false) {
            return text(StatusCode::FORBIDDEN, reason);
        }
        let watch = &self.shown.watch;
        match request.uri().path() {
            "/healthz" => text(StatusCode::OK, "ok"),
            "/readyz" => match watch.readiness() {
                Ok(()) => text(StatusCode::OK, "ready"),
                Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, &why),
            },
            "/metrics" => response(StatusCode::OK, metrics::CONTENT_TYPE, metrics::page(&watch.samples())),
            _ => text(StatusCode::NOT_FOUND, "not found: /metrics, /readyz and /healthz are here"),
        }
    }

    fn refuse_request(&self, _: &Request) -> Response<Body> {
        problem::overloaded().into_response()
    }

    fn replace_response(&self, _: &Response<Body>) -> Response<Body> {
        problem::overloaded().into_response()
    }
}

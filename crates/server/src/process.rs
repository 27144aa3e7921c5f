//! A listener for the counters of one process: `/metrics`, `/healthz` and `/readyz`, and nothing else. For a worker, and
//! for a proxy whose ledger is a server.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use hapax_core::Store;
use hapax_core::metrics::{self, Sample};
use hapax_net::body::Body;
use hapax_net::connection::{Peer, Request, RequestHandler};
use hapax_net::guard::BrowserGuard;
use hapax_net::listen::{Limits, Runtime};
use hapax_net::problem::overloaded;
use hapax_net::tracker::RequestGuard;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Response, StatusCode};
use tokio::net::TcpListener;

use crate::app::text_response;
use crate::error::ServerError;

/// Maximum number of connections: scrapers and health checks.
const CONNECTIONS_MAX: usize = 64;

/// Why the process is not ready, if it is not.
pub type Readiness = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

/// What a process shows of itself.
pub struct ProcessPage {
    samples: Box<dyn Fn() -> Vec<Sample> + Send + Sync>,
    ready: Box<dyn Fn() -> Readiness + Send + Sync>,
}

impl ProcessPage {
    /// A page with these counters; `ready` tells whether the process can do its work now.
    pub fn new(
        samples: impl Fn() -> Vec<Sample> + Send + Sync + 'static,
        ready: impl Fn() -> Readiness + Send + Sync + 'static,
    ) -> Self {
        Self { samples: Box::new(samples), ready: Box::new(ready) }
    }

    /// Listens. There are no keys, so an address beyond loopback has to be wanted by `insecure`.
    pub async fn bind(address: SocketAddr, insecure: bool) -> Result<TcpListener, ServerError> {
        if !address.ip().is_loopback() && !insecure {
            return Err(ServerError::Exposed(address));
        }
        TcpListener::bind(address).await.map_err(|source| ServerError::Bind { address, source })
    }

    /// Serves until `shutdown` resolves.
    pub async fn run(self, listener: TcpListener, insecure: bool, shutdown: impl Future<Output = ()>) {
        let limits = Limits { connections_max: CONNECTIONS_MAX, ..Limits::default() };
        let guard = BrowserGuard { allowed_hosts: Vec::new(), has_keys: false, insecure };
        let shared = Arc::new((self, guard));
        let handler = move |peer| PageHandler { shared: shared.clone(), peer };
        Runtime::new(limits, None).run(vec![listener], handler, shutdown).await;
    }
}

/// Whether a store hands out and accepts messages now; else why not.
pub async fn store_readiness(store: &dyn Store) -> Result<(), String> {
    match store.status().await {
        Ok(status) => match status.stopped.or(status.paused).or(status.refuses_sends) {
            Some(why) => Err(why),
            None => Ok(()),
        },
        Err(error) => Err(error.to_string()),
    }
}

struct PageHandler {
    shared: Arc<(ProcessPage, BrowserGuard)>,
    peer: Peer,
}

impl RequestHandler for PageHandler {
    async fn handle(&self, request: Request, _: &RequestGuard) -> Response<Body> {
        let (page, guard) = &*self.shared;
        if let Err(reason) = guard.check(&request, self.peer.local, || false) {
            return text_response(StatusCode::FORBIDDEN, reason);
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text_response(StatusCode::METHOD_NOT_ALLOWED, "use GET");
        }
        match request.uri().path() {
            "/healthz" => text_response(StatusCode::OK, "ok"),
            "/readyz" => match (page.ready)().await {
                Ok(()) => text_response(StatusCode::OK, "ready"),
                Err(why) => text_response(StatusCode::SERVICE_UNAVAILABLE, why),
            },
            "/metrics" => {
                let text = metrics::page(&(page.samples)());
                let mut response = Response::new(Body::complete(text.into()));
                let content_type = HeaderValue::from_static(metrics::CONTENT_TYPE);
                response.headers_mut().insert(CONTENT_TYPE, content_type);
                response
            }
            _ => text_response(StatusCode::NOT_FOUND, "not found; there are /metrics, /healthz and /readyz"),
        }
    }

    fn refuse_request(&self, _: &Request) -> Response<Body> {
        overloaded().into_response()
    }

    fn replace_response(&self, _: &Response<Body>) -> Response<Body> {
        overloaded().into_response()
    }
}

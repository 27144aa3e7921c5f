//! Dispatches requests: to the health checks, to SQS, or to the router.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::wire::Problem;
use hapax_core::store::SharedStore;
use hapax_net::body::{Body, BodyError, BodyLimits, read_within};
use hapax_net::connection::{Peer, Request, RequestHandler};
use hapax_net::guard::BrowserGuard;
use hapax_net::listen::Shutdown;
use hapax_net::tracker::RequestGuard;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Method, Response, StatusCode};
use tower_service::Service as _;

use crate::auth::Authenticator;
use crate::config::ServerConfig;
use crate::error::ServerError;
use crate::process::store_readiness;
use crate::sqs::{self, Sqs};

/// What a listener is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// SQS, and what the router adds to it.
    SqsAndRouter,
    /// The router alone.
    Router,
}

/// Says why a part of the process is not ready, if it is not.
pub(crate) type ReadinessCheck = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Everything that answers requests.
pub(crate) struct App {
    pub(crate) auth: Arc<Authenticator>,
    pub(crate) router: Option<axum::Router>,
    pub(crate) public: Vec<String>,
    /// What runs beside the server and must make progress, too.
    pub(crate) readiness: Vec<ReadinessCheck>,
    guard: BrowserGuard,
    /// `None` on a listener for operators: everything goes to the router.
    sqs: Option<Sqs>,
    store: SharedStore,
    shutdown: Shutdown,
    read_timeout: Duration,
    request_timeout: Duration,
    bodies: BodyLimits,
    /// The router's body limits; its bodies share the same budget.
    router_bodies: BodyLimits,
}

impl App {
    pub(crate) fn new(
        config: &ServerConfig,
        store: SharedStore,
        auth: Authenticator,
        shutdown: Shutdown,
        kind: ListenerKind,
    ) -> Result<Self, ServerError> {
        let auth = Arc::new(auth);
        let sqs = match kind {
            ListenerKind::SqsAndRouter => {
                Some(Sqs::new(&config.sqs, store.clone(), auth.clone(), shutdown.clone())?)
            }
            ListenerKind::Router => None,
        };
        let bodies = BodyLimits::new(config.limits.body_bytes_max, config.limits.arriving_bytes_max);
        Ok(Self {
            guard: BrowserGuard {
                allowed_hosts: config.auth.allowed_hosts.clone(),
                has_keys: auth.has_keys(),
                insecure: config.auth.insecure,
            },
            sqs,
            auth,
            router: None,
            public: Vec::new(),
            readiness: Vec::new(),
            store,
            shutdown,
            read_timeout: Duration::from_millis(config.limits.read_timeout_ms),
            request_timeout: Duration::from_millis(config.limits.request_timeout_ms),
            router_bodies: bodies
                .with_body_bytes_max(config.limits.body_bytes_max.max(crate::native::BODY_BYTES_MAX)),
            bodies,
        })
    }

    async fn handle(&self, request: Request, peer: Peer, guard: &RequestGuard) -> Response<Body> {
        let path = request.uri().path();
        let has_side_effect = || request.method() == Method::GET && sqs::names_action(request.uri());
        if let Err(reason) = self.guard.check(&request, peer.local, has_side_effect) {
            tracing::warn!(address = %peer.address, path, reason, "request refused");
            return if self.is_sqs(&request) {
                Sqs::refused(request.headers(), reason)
            } else {
                problem_response(StatusCode::FORBIDDEN, "forbidden", reason)
            };
        }
        match path {
            "/healthz" => text_response(StatusCode::OK, "ok"),
            "/readyz" => self.readiness().await,
            _ => match &self.sqs {
                Some(sqs) if self.is_sqs(&request) || self.router.is_none() => {
                    self.sqs(sqs, request, peer, guard).await
                }
                _ => self.route(request, guard).await,
            },
        }
    }

    /// Whether a request is answered in the form of SQS.
    fn is_sqs(&self, request: &Request) -> bool {
        self.sqs.is_some() && sqs::is_sqs(request)
    }

    /// Ready means: hands out and accepts messages, and what runs beside it makes progress.
    async fn readiness(&self) -> Response<Body> {
        if self.shutdown.is_requested() {
            return text_response(StatusCode::SERVICE_UNAVAILABLE, "shutting down");
        }
        let work = store_readiness(self.store.as_ref()).await;
        let ready = work.and_then(|()| self.readiness.iter().try_for_each(|check| check()));
        match ready {
            Err(why) => text_response(StatusCode::SERVICE_UNAVAILABLE, why),
            Ok(()) => text_response(StatusCode::OK, "ready"),
        }
    }

    async fn sqs(&self, sqs: &Sqs, request: Request, peer: Peer, guard: &RequestGuard) -> Response<Body> {
        let (parts, body) = request.into_parts();
        // A client without a known key cannot send a body.
        if let Err(error) = self.auth.names_known_key(&parts) {
            return Sqs::unauthenticated(&parts.headers, error);
        }
        let body = match read_within(body, &self.bodies, self.read_timeout).await {
            Ok(body) => body,
            Err(error) => return Sqs::unreadable(&parts.headers, error),
        };
        guard.mark_body_read();
        let answer = sqs.handle(&parts, &body, peer, guard.budget());
        match tokio::time::timeout(self.request_timeout, answer).await {
            Ok(response) => response,
            Err(_) => Sqs::timed_out(&parts.headers),
        }
    }

    async fn route(&self, mut request: Request, guard: &RequestGuard) -> Response<Body> {
        let Some(router) = &self.router else { return text_response(StatusCode::NOT_FOUND, "not found") };
        let path = request.uri().path();
        if !self.public.iter().any(|prefix| path.starts_with(prefix.as_str())) {
            match self.auth.bearer(request.headers()) {
                Ok(identity) => request.extensions_mut().insert(identity),
                Err(error) => {
                    let mut refusal =
                        problem_response(StatusCode::UNAUTHORIZED, "unauthenticated", error.to_string());
                    let challenge = HeaderValue::from_static("Bearer");
                    refusal.headers_mut().insert(http::header::WWW_AUTHENTICATE, challenge);
                    return refusal;
                }
            };
        }
        let (parts, body) = request.into_parts();
        let body = match read_within(body, &self.router_bodies, self.read_timeout).await {
            Ok(body) => body,
            Err(error) => return body_error_response(error),
        };
        guard.mark_body_read();
        let mut request = http::Request::from_parts(parts, axum::body::Body::from(body));
        request.extensions_mut().insert(guard.budget().clone());
        match router.clone().call(request).await {
            Ok(response) => response.map(Body::ready_or_stream),
            Err(never) => match never {},
        }
    }
}

/// A connection to the server.
pub(crate) struct ConnectionHandler {
    pub(crate) app: Arc<App>,
    pub(crate) peer: Peer,
}

impl RequestHandler for ConnectionHandler {
    async fn handle(&self, request: Request, guard: &RequestGuard) -> Response<Body> {
        self.app.handle(request, self.peer, guard).await
    }

    fn needs_unread_budget(&self, request: &Request) -> bool {
        !matches!(request.uri().path(), "/healthz" | "/readyz")
    }

    fn refuse_request(&self, request: &Request) -> Response<Body> {
        if self.app.is_sqs(request) { Sqs::overloaded(request.headers()) } else { overloaded() }
    }

    fn replace_response(&self, response: &Response<Body>) -> Response<Body> {
        if Sqs::is_sqs_response(response) { Sqs::overloaded(response.headers()) } else { overloaded() }
    }
}

fn overloaded() -> Response<Body> {
    let detail = "too many responses wait to be read by their clients; retry with backoff";
    let mut response = problem_response(StatusCode::SERVICE_UNAVAILABLE, "overloaded", detail);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(1 + fastrand::u64(0..=4)));
    response
}

fn body_error_response(error: BodyError) -> Response<Body> {
    let (status, code, detail) = match error {
        BodyError::TooLarge => (
            StatusCode::PAYLOAD_TOO_LARGE,
            "request-too-large",
            "the body is too large; send smaller batches",
        ),
        BodyError::Timeout => {
            (StatusCode::REQUEST_TIMEOUT, "request-timeout", "the body did not arrive in time; send it again")
        }
        BodyError::Overloaded => (
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded",
            "too much is arriving at once; retry with backoff",
        ),
        BodyError::Broken => (StatusCode::BAD_REQUEST, "invalid", "the body could not be read"),
    };
    problem_response(status, code, detail)
}

/// A refusal on the router's paths, in the same form as its other errors.
fn problem_response(status: StatusCode, code: &str, detail: impl Into<String>) -> Response<Body> {
    let mut problem = Problem::new(code, detail, false);
    problem.status = Some(status.as_u16());
    let mut response =
        text_response(status, serde_json::to_string(&problem).expect("a problem is plain data"));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// A short response in plain text, for paths that are not part of SQS.
pub(crate) fn text_response(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut text = text.into();
    text.push('\n');
    let mut response = Response::new(Body::complete(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

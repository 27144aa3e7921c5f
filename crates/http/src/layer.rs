//! The tower layer: which requests it handles, and its responses to callers.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_claim::{Claims, LeaseKeeper, Owners, Timer};
use hapax_core::metrics::{Metrics as _, Sample};
use hapax_core::{Clock, EntryId, Fence, Fingerprint, IdempotencyKey, Ledger};
use hapax_observe::trace::Tracer;
use http::header::EXPECT;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body as HttpBody;
use tower_layer::Layer;
use tower_service::Service;

use crate::body::{Body, BoxError, CompleteBody, ReadResult, discard, read};
use crate::canonical::Node;
use crate::counters::{Cells, Counters};
use crate::fingerprint::fingerprint;
use crate::media::MediaType;
use crate::policy::{ConfigError, Policy, Routes};
use crate::problem::Problem;
use crate::run::{KeyedRequest, RECORD_MS_MAX, RunCounter};
use crate::scope::{METHOD_BYTES_MAX, Tenant, check_service_name, scope};
use crate::span::RequestSpan;
use crate::{headers, key, path};

/// Information about the run of a request with a key; in the request's extensions and headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyedRun {
    /// The caller's key and its scope.
    pub id: EntryId,
    /// A key for calls to other systems on behalf of this request: the same for every run, with or without the ledger.
    /// Header `Idempotency-Key`.
    pub derived_key: IdempotencyKey,
    /// Grows with every claim of the key: a sink that remembers the largest fence can refuse a superseded run. `None`
    /// if the request runs without a claim ([`OnOutage::Open`](crate::OnOutage::Open)). Header `Hapax-Fence`.
    pub fence: Option<Fence>,
    /// An earlier run was interrupted and may have had an effect. Unknown without a claim. Header `Hapax-Takeover`.
    pub takeover: bool,
}

/// Returns the name of a request's route, for its scope.
type RouteFunction = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// Builds an [`IdempotencyLayer`].
pub struct Builder {
    service: String,
    ledger: Arc<dyn Ledger>,
    tenant: Tenant,
    route_name: Option<RouteFunction>,
    policy: Policy,
    routes: Vec<(String, Policy)>,
    admin: Option<String>,
    tracer: Option<Arc<Tracer>>,
    clock: Option<Arc<dyn Clock>>,
}

impl Builder {
    /// The URL at which operators reach the ledger, with `hapax ledger … --endpoint URL`. A caller whose key is in doubt is
    /// told the command that decides, with this address in it. By default it is told the command alone.
    #[must_use]
    pub fn admin(mut self, url: impl Into<String>) -> Self {
        self.admin = Some(url.into());
        self
    }

    /// Takes a span for each request of a recorded trace (`traceparent`), and for the tracer's share of those without one. The
    /// service gets the context of this span; the span of a replay is linked to that of the run whose response it repeats.
    #[must_use]
    pub fn tracer(mut self, tracer: Arc<Tracer>) -> Self {
        self.tracer = Some(tracer);
        self
    }

    /// Who is calling; see [`Tenant`] for what the default means.
    #[must_use]
    pub fn tenant(mut self, tenant: Tenant) -> Self {
        self.tenant = tenant;
        self
    }

    /// The policy for routes without their own.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// The policy for a route: a path with `{name}` for one segment and `{*rest}` for the rest. The same key on two
    /// paths of one route is the caller's mistake (422); on two routes it is two keys.
    #[must_use]
    pub fn route(mut self, pattern: impl Into<String>, policy: Policy) -> Self {
        self.routes.push((pattern.into(), policy));
        self
    }

    /// How to name the routes that [`Builder::route`] does not name; by default each path is its own route. With axum:
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # let ledger = hapax_conformance::MemoryStore::new(Arc::new(hapax_core::SystemClock::default()));
    /// use axum::extract::MatchedPath;
    ///
    /// hapax_http::IdempotencyLayer::builder("shop", ledger)
    ///     .route_name(|parts| parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned()));
    /// ```
    #[must_use]
    pub fn route_name(mut self, name: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.route_name = Some(Arc::new(name));
        self
    }

    /// The clock by which leases and the time limit of a run are counted. Default the machine's; a test passes its own.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Checks everything and makes the layer.
    pub fn build(self) -> Result<IdempotencyLayer, ConfigError> {
        check_service_name(&self.service).map_err(ConfigError)?;
        let timer = self.clock.map_or_else(Timer::system, Timer::new);
        let holder = LeaseKeeper::new(None, Some(self.ledger.clone()), timer.clone(), Arc::new(()))
            .map_err(|error| ConfigError(format!("the heartbeat cannot be started: {error}")))?;
        Ok(IdempotencyLayer(Arc::new(LayerState {
            service: self.service,
            claims: Claims::new(self.ledger, timer.clone()).end_within_ms(RECORD_MS_MAX),
            timer,
            owners: Owners::new("http"),
            holder,
            tenant: self.tenant,
            route_name: self.route_name,
            routes: Routes::new(self.policy, self.routes)?,
            counters: Cells::default(),
            running: RunCounter::default(),
            admin: self.admin,
            tracer: self.tracer,
        })))
    }
}

/// Makes requests with an `Idempotency-Key` take effect once: the first one runs, its duplicates get its response.
///
/// ```
/// use std::sync::Arc;
/// use axum::{Router, routing::post};
/// use hapax_http::{IdempotencyLayer, Policy};
///
/// # let ledger = hapax_conformance::MemoryStore::new(Arc::new(hapax_core::SystemClock::default()));
/// let layer = IdempotencyLayer::builder("shop", ledger)
///     .route("/payments", Policy { key_required: true, ..Policy::default() })
///     .build()?;
/// let app: Router = Router::new().route("/payments", post(|| async { "paid" })).layer(layer);
/// # Ok::<(), hapax_http::ConfigError>(())
/// ```
///
/// Place it outside of everything that must not run twice, and inside of the authentication. Clones share all state.
#[derive(Clone)]
pub struct IdempotencyLayer(pub(crate) Arc<LayerState>);

pub(crate) struct LayerState {
    service: String,
    pub(crate) claims: Claims,
    pub(crate) timer: Timer,
    pub(crate) owners: Owners,
    /// Renews the claims of running requests.
    pub(crate) holder: Arc<LeaseKeeper>,
    tenant: Tenant,
    route_name: Option<RouteFunction>,
    routes: Routes,
    pub(crate) counters: Cells,
    pub(crate) running: RunCounter,
    /// Where operators reach the ledger.
    pub(crate) admin: Option<String>,
    pub(crate) tracer: Option<Arc<Tracer>>,
}

impl IdempotencyLayer {
    /// A layer with all defaults: `POST` and `PATCH` requests with a key take effect once per caller, an interrupted
    /// run is parked, and nothing runs while the ledger is down. See [`Policy`] and [`Tenant`].
    ///
    /// ```
    /// use axum::{Router, body::Body, routing::post};
    /// use hapax_http::IdempotencyLayer;
    /// use http::Request;
    /// use tower_service::Service as _;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # let clock = std::sync::Arc::new(hapax_core::SystemClock::default());
    /// # let ledger = hapax_conformance::MemoryStore::new(clock);
    /// let layer = IdempotencyLayer::new(ledger); // with the crate hapax: `hapax.ledger()`
    /// let mut app: Router = Router::new().route("/payments", post(|| async { "paid" })).layer(layer);
    ///
    /// let pay = || Request::post("/payments").header("idempotency-key", "order-7").body(Body::empty()).unwrap();
    /// let first = app.call(pay()).await.unwrap();
    /// assert!(!first.headers().contains_key("idempotent-replayed"));
    /// let again = app.call(pay()).await.unwrap();
    /// assert_eq!(again.headers()["idempotent-replayed"], "true");
    /// # }
    /// ```
    ///
    /// The service is named `http` in the ledger. Services that share a ledger need different names: see
    /// [`IdempotencyLayer::builder`].
    pub fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self::builder("http", ledger)
            .build()
            .expect("the defaults are valid, and the heartbeat has its thread")
    }

    /// Starts building a layer. `service` is part of every scope: services that share a ledger need different names,
    /// and a service that changes its name loses its keys.
    pub fn builder(service: impl Into<String>, ledger: Arc<dyn Ledger>) -> Builder {
        Builder {
            service: service.into(),
            ledger,
            tenant: Tenant::default(),
            route_name: None,
            policy: Policy::default(),
            routes: Vec::new(),
            admin: None,
            tracer: None,
            clock: None,
        }
    }

    /// Counters since the layer was built.
    pub fn counters(&self) -> Counters {
        self.0.counters.read()
    }

    /// The same, as a page of metrics shows it: labelled with the name of the service.
    pub fn samples(&self) -> Vec<Sample> {
        self.counters().samples(&[&self.0.service])
    }

    /// How many requests run under a claim now, whether or not their clients are still there.
    pub fn running(&self) -> usize {
        self.0.running.count()
    }

    /// Resolves when no request runs under a claim. A server waits for this at shutdown, with its own timeout: a run
    /// that is aborted is in doubt.
    pub async fn idle(&self) {
        self.0.running.idle().await;
    }
}

impl std::fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdempotencyLayer").field("service", &self.0.service).finish_non_exhaustive()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency { inner, shared: self.0.clone() }
    }
}

/// A service behind an [`IdempotencyLayer`].
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    shared: Arc<LayerState>,
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The ready service is used; the clone replaces it.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let shared = self.shared.clone();
        Box::pin(async move {
            let span = shared.begin_span(&mut request);
            let response = match shared.prepare(request).await {
                Prepared::Pass(request) => {
                    inner.call(request).await.map(|response| response.map(Body::stream))
                }
                Prepared::Refused(problem) => Ok(problem.into_response()),
                Prepared::Keyed(run) => run.spawn(inner).await,
            };
            if let (Some(span), Ok(response)) = (span, &response) {
                span.end(response);
            }
            response
        })
    }
}

#[expect(clippy::large_enum_variant, reason = "requests without a key are the most frequent ones")]
pub(crate) enum Prepared {
    /// Not handled by the layer.
    Pass(Request<Body>),
    Refused(Problem),
    Keyed(Box<KeyedRequest>),
}

impl LayerState {
    /// The span of a request, if it is recorded. The request gets its context.
    pub(crate) fn begin_span<B>(&self, request: &mut Request<B>) -> Option<RequestSpan> {
        RequestSpan::begin(self.tracer.as_ref()?, request)
    }

    /// Decides how to handle a request, and counts it; reads its body if it has a key.
    pub(crate) async fn prepare<B>(self: &Arc<Self>, request: Request<B>) -> Prepared
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let prepared = self.decide(request).await;
        match &prepared {
            Prepared::Pass(_) => self.counters.passed.add(),
            Prepared::Refused(_) => self.counters.refused_invalid.add(),
            Prepared::Keyed(_) => {}
        }
        prepared
    }

    async fn decide<B>(self: &Arc<Self>, request: Request<B>) -> Prepared
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (mut parts, body) = request.into_parts();
        headers::strip_reserved(&mut parts.headers);
        let route = path::normalize(parts.uri.path());
        let (pattern, policy) = self.routes.find(&route);
        let pass = |parts, body| Prepared::Pass(Request::from_parts(parts, Body::stream(body)));
        if !policy.methods.contains(&parts.method) || parts.method.as_str().len() > METHOD_BYTES_MAX {
            return pass(parts, body);
        }
        let key = match key::from_headers(&parts.headers) {
            Ok(key) => key,
            Err(key::KeyError(why)) => return Prepared::Refused(key_invalid(why)),
        };
        let without_key = |parts, body| {
            if policy.key_required { Prepared::Refused(key_missing(policy)) } else { pass(parts, body) }
        };
        if key.is_none() && policy.key_pointer.is_none() {
            return without_key(parts, body);
        }
        let media = MediaType::of(&parts.headers);
        let key_in_body = policy.key_pointer.as_deref().filter(|_| key.is_none() && media.is_json());
        if key.is_none() && key_in_body.is_none() {
            return without_key(parts, body);
        }
        let read = match self.read_body(&parts, policy, body).await {
            Ok(read) => read,
            Err(problem) => return Prepared::Refused(problem),
        };
        let json = if media.is_json() { Node::parse(&read.bytes) } else { None };
        let key = match (key, key_in_body) {
            (Some(key), _) => Ok(Some(key)),
            (None, pointer) => key::from_body(json.as_ref(), pointer.unwrap_or_default()),
        };
        let key = match key {
            Ok(Some(key)) => key,
            Ok(None) if policy.key_required => return Prepared::Refused(key_missing(policy)),
            Ok(None) => {
                return Prepared::Pass(Request::from_parts(parts, Body::from_complete(read)));
            }
            Err(key::KeyError(why)) => return Prepared::Refused(key_invalid(why)),
        };
        let fingerprint = if hapax_core::mutant::is("answer-of-another-tenant") {
            Fingerprint::new("0").expect("a valid fingerprint")
        } else {
            fingerprint(&parts, policy, &media, &read, json)
        };
        match self.entry(&parts, pattern, &route, key) {
            Ok(id) => Prepared::Keyed(self.run(id, fingerprint, policy.clone(), parts, read)),
            Err(problem) => Prepared::Refused(problem),
        }
    }

    fn run(
        self: &Arc<Self>,
        id: EntryId,
        fingerprint: Fingerprint,
        policy: Arc<Policy>,
        parts: Parts,
        body: CompleteBody,
    ) -> Box<KeyedRequest> {
        Box::new(KeyedRequest { shared: self.clone(), id, fingerprint, policy, parts, body })
    }

    fn entry(
        &self,
        parts: &Parts,
        pattern: Option<&str>,
        path: &str,
        key: IdempotencyKey,
    ) -> Result<EntryId, Problem> {
        let named = match pattern {
            Some(pattern) => Some(pattern.to_owned()),
            None => self.route_name.as_ref().and_then(|name| name(parts)),
        };
        let route = named.as_deref().unwrap_or(path);
        let scope = scope(&self.service, &self.tenant, route, parts).map_err(|missing| {
            let detail = format!("a request with an Idempotency-Key needs {missing}");
            Problem::new("tenant-missing", StatusCode::BAD_REQUEST, "It is not clear who is calling", detail)
        })?;
        Ok(EntryId::new(scope, key))
    }

    async fn read_body<B>(&self, parts: &Parts, policy: &Policy, body: B) -> Result<CompleteBody, Problem>
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let time_max = policy.read_max;
        match read(body, policy.request_bytes_max, time_max).await {
            ReadResult::Complete(read) => Ok(read),
            ReadResult::TooLarge(mut rest) => {
                // A client that waits for `100 Continue` is told not to send, so there is no body to discard.
                if !parts.headers.contains_key(EXPECT) {
                    let _ = tokio::time::timeout(time_max, discard(&mut rest)).await;
                }
                let max = policy.request_bytes_max;
                let detail =
                    format!("a request with an Idempotency-Key may have a body of at most {max} bytes");
                let title = "The body is too large";
                Err(Problem::new("body-too-large", StatusCode::PAYLOAD_TOO_LARGE, title, detail))
            }
            ReadResult::TooSlow(_) => {
                let detail = format!(
                    "the body did not arrive within {} ms; nothing was run",
                    policy.read_max.as_millis()
                );
                let title = "The body took too long";
                Err(Problem::new("body-too-slow", StatusCode::REQUEST_TIMEOUT, title, detail))
            }
            ReadResult::Broken(error) => {
                let detail = format!("the body could not be read: {error}; nothing was run");
                Err(Problem::new(
                    "body-incomplete",
                    StatusCode::BAD_REQUEST,
                    "The body was interrupted",
                    detail,
                ))
            }
        }
    }
}

fn key_invalid(why: String) -> Problem {
    Problem::new("key-invalid", StatusCode::BAD_REQUEST, "The Idempotency-Key is not valid", why)
}

fn key_missing(policy: &Policy) -> Problem {
    let mut detail =
        "this operation needs an Idempotency-Key: a new one, such as a UUID, for every request that \
                      you mean, and the same one when you send it again"
            .to_owned();
    if let Some(pointer) = &policy.key_pointer {
        detail = format!("{detail}; as a header, or in the body at {pointer}");
    }
    Problem::new("key-missing", StatusCode::BAD_REQUEST, "Idempotency-Key is missing", detail)
}

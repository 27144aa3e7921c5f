//! Forwarding to the upstream: connections, headers, and the interpretation of failures.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version, response};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::Instant;
use tokio_rustls::rustls;
use tower_service::Service;

use super::caller_body::{CallerBody, UploadProgress};
use super::config::{HostPolicy, ProxyConfig};
use super::idle::{StallDetector, StallTimeoutBody, TimerPool};
use crate::body::{Body, BoxError};
use crate::headers::{
    correct_content_length, has_supported_transfer_coding, is_hop_by_hop, is_reserved,
    names_in_connection_header,
};
use crate::key::X_IDEMPOTENCY_KEY;
use crate::policy::{ConfigError, EffectVerdict};
use crate::problem::Problem;
use crate::scope::Tenant;

/// Maximum number of headers in an upstream's response. hyper's default, 100, is less than real services send, and a
/// rejected response leaves its key in doubt. Each response pays for the maximum, about 10 instructions a header.
const RESPONSE_HEADERS_MAX: usize = 160;

/// The largest chunk that is read from an upstream at once, and so the most by which one streamed response exceeds the
/// budget for unread responses. A response's head fits into it as well.
const CHUNK_BYTES_MAX: usize = hapax_net::unread::SMALL_BYTES_MAX;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The caller of a connection, and how it is described to the upstream.
#[derive(Debug)]
pub(crate) struct CallerInfo {
    pub(crate) address: SocketAddr,
    proto: HeaderValue,
    /// For `X-Forwarded-For`.
    ip: HeaderValue,
    /// For `Forwarded`; the host is appended.
    element: String,
    /// The host of the connection's first request, and `Forwarded` with it: most callers use one host per connection.
    first_host: OnceLock<(HeaderValue, HeaderValue)>,
}

impl CallerInfo {
    pub(crate) fn new(address: SocketAddr, tls: bool) -> Self {
        let ip = address.ip().to_canonical();
        let proto = if tls { "https" } else { "http" };
        let node = if ip.is_ipv6() { format!("\"[{ip}]\"") } else { ip.to_string() };
        Self {
            address,
            proto: HeaderValue::from_static(proto),
            ip: HeaderValue::from_str(&ip.to_string()).expect("digits, dots and colons"),
            element: format!("for={node};proto={proto}"),
            first_host: OnceLock::new(),
        }
    }

    /// The caller as an element of `Forwarded`.
    fn forwarded(&self, host: Option<&HeaderValue>) -> Option<HeaderValue> {
        let Some(host) = host else { return self.forwarded_element(None) };
        match self.first_host.get() {
            Some((first, element)) if first == host => Some(element.clone()),
            Some(_) => self.forwarded_element(Some(host)),
            None => {
                let element = self.forwarded_element(Some(host))?;
                let _ = self.first_host.set((host.clone(), element.clone()));
                Some(element)
            }
        }
    }

    fn forwarded_element(&self, host: Option<&HeaderValue>) -> Option<HeaderValue> {
        let plain =
            |text: &&str| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\".contains(&byte));
        let host = host.and_then(|host| host.to_str().ok()).filter(plain);
        let element = match host {
            Some(host) => format!("{};host=\"{host}\"", self.element),
            None => self.element.clone(),
        };
        HeaderValue::from_maybe_shared(Bytes::from(element)).ok()
    }
}

/// The upstream's address.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    scheme: Scheme,
    authority: Authority,
    /// Put before every path; has no trailing slash.
    prefix: String,
}

impl Target {
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        // The message is logged and shown: without what may be a password.
        let shown = match (url.split_once("://"), url.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, rest))) => format!("{scheme}://{rest}"),
            (None, Some((_, rest))) => rest.to_owned(),
            (_, None) => url.to_owned(),
        };
        let bad = |problem: &str| {
            ConfigError(format!("upstream: {shown:?} {problem}; write it as http://127.0.0.1:8080"))
        };
        let uri: Uri = url.parse().map_err(|error| bad(&format!("is no URL ({error})")))?;
        let parts = uri.into_parts();
        let scheme = parts.scheme.filter(|scheme| [Scheme::HTTP, Scheme::HTTPS].contains(scheme));
        let scheme = scheme.ok_or_else(|| bad("has neither http:// nor https://"))?;
        let authority = parts.authority.ok_or_else(|| bad("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("carries credentials, which are not sent on"));
        }
        let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        if path.query().is_some() {
            return Err(bad("has a query, which is not sent on"));
        }
        Ok(Self { scheme, authority, prefix: path.path().trim_end_matches('/').to_owned() })
    }

    fn uri(&self, uri: &Uri) -> Option<Uri> {
        let path = uri.path_and_query();
        let path = if self.prefix.is_empty() || uri.path() == "*" {
            path.cloned().unwrap_or_else(|| PathAndQuery::from_static("/"))
        } else {
            format!("{}{}", self.prefix, path.map_or("/", PathAndQuery::as_str)).parse().ok()?
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).ok()
    }
}

/// Sends requests to the upstream.
#[derive(Clone)]
pub(crate) struct Forwarder(Arc<ForwarderState>);

/// Sends the requests of one connection to the upstream.
#[derive(Clone)]
pub(crate) struct ConnectionForwarder {
    inner: Arc<ForwarderState>,
    peer: Arc<CallerInfo>,
}

struct ForwarderState {
    target: Target,
    client: Client<TimeoutConnector, CallerBody>,
    host: HostPolicy,
    trust_forwarded: bool,
    tenant: Tenant,
    responses: Arc<TimerPool>,
    bodies: Arc<TimerPool>,
}

impl Forwarder {
    pub(crate) fn new(config: &ProxyConfig) -> Result<Self, ConfigError> {
        let limits = &config.limits;
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let https = hyper_rustls::HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(provider)
            .map_err(|error| ConfigError(format!("the machine's certificates cannot be read: {error}")))?
            .https_or_http()
            .enable_all_versions()
            .wrap_connector(http);
        let connector = TimeoutConnector { inner: https, timeout: limits.connect_timeout };
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(limits.pool_idle_timeout)
            .pool_max_idle_per_host(limits.pool_idle_connections_max)
            .http2_keep_alive_interval(Duration::from_secs(30))
            .http1_max_headers(RESPONSE_HEADERS_MAX)
            .http1_max_buf_size(CHUNK_BYTES_MAX)
            .build(connector);
        Ok(Self(Arc::new(ForwarderState {
            target: Target::parse(&config.upstream)?,
            client,
            host: config.host,
            trust_forwarded: config.trust_forwarded,
            tenant: config.tenant.clone(),
            responses: TimerPool::new(limits.response_timeout),
            bodies: TimerPool::new(limits.idle_timeout),
        })))
    }

    pub(crate) fn for_caller(&self, peer: Arc<CallerInfo>) -> ConnectionForwarder {
        ConnectionForwarder { inner: self.0.clone(), peer }
    }

    /// Refuses a request that cannot be forwarded unchanged in meaning, and removes the hop-by-hop headers. It runs
    /// before the idempotency layer, so that the tenant and the fingerprint are derived from what the upstream sees.
    pub(crate) fn admit<B>(&self, request: &mut Request<B>) -> Result<(), Problem> {
        // Most requests have no such header, and then there is nothing to look up.
        let hop_by_hop = request.headers().keys().any(is_hop_by_hop);
        if *request.method() == Method::CONNECT || (hop_by_hop && asks_for_upgrade(request.headers())) {
            let detail =
                "this proxy passes on requests and responses; upgrades and CONNECT need a way around it";
            let title = "Other protocols are not passed on";
            return Err(Problem::new("upgrade-not-supported", StatusCode::NOT_IMPLEMENTED, title, detail));
        }
        if hop_by_hop && !has_supported_transfer_coding(request.headers()) {
            let detail =
                "the only transfer coding that this proxy understands is chunked, once; nothing was run";
            let title = "The transfer coding is not known";
            return Err(Problem::new(
                "transfer-coding-not-supported",
                StatusCode::NOT_IMPLEMENTED,
                title,
                detail,
            ));
        }
        check_target(request).map_err(|problem| {
            let detail = format!("{problem}; nothing was run");
            Problem::new("target-invalid", StatusCode::BAD_REQUEST, "The target is not valid", detail)
        })?;
        let headers = request.headers_mut();
        if hop_by_hop {
            let wants_trailers = wants_trailers(headers);
            remove_hop_by_hop(headers, |name| self.0.is_end_to_end(name));
            if wants_trailers {
                headers.insert(TE, HeaderValue::from_static("trailers"));
            }
        }
        join_cookies(headers);
        Ok(())
    }
}

impl ForwarderState {
    async fn forward(&self, request: Request<Body>, peer: &CallerInfo) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let Some(uri) = self.target.uri(&parts.uri) else {
            let detail = format!("the target {:?} cannot be sent on", parts.uri.path());
            let title = "The target is not valid";
            let problem = Problem::new("target-invalid", StatusCode::BAD_REQUEST, title, detail);
            return problem_with_verdict(problem, EffectVerdict::NothingHappened);
        };
        self.prepare(&mut parts, peer);
        set_framing(&parts.method, &mut parts.headers, &body);
        parts.uri = uri;
        parts.version = Version::HTTP_11;
        let method = parts.method.clone();
        let (body, progress) = CallerBody::new(StallTimeoutBody::new(body, &self.bodies));
        let mut answer = pin!(self.client.request(Request::from_parts(parts, body)));
        let mut stall = StallDetector::new(self.responses.clone());
        let answered = poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(Some(answer));
            }
            // The deadline is asked for only when the timer ends: a body that moves does not have to set it again.
            while stall.poll_stalled(cx) {
                let (now, timeout) = (Instant::now(), self.responses.timeout());
                let deadline = progress.deadline(timeout, self.bodies.timeout());
                if deadline <= now {
                    return Poll::Ready(None);
                }
                // The deadline comes closer when the caller sends the rest, but not closer than this.
                stall.wait_until(deadline.min(now + timeout));
            }
            Poll::Pending
        });
        match answered.await {
            Some(Ok(response)) => {
                let (parts, body) = response.into_parts();
                self.convert_response(&method, parts, body)
            }
            Some(Err(error)) if error.is_connect() => {
                tracing::warn!(upstream = %self.target.authority, error = %error_chain(&error), "upstream unreachable");
                let detail = "the upstream cannot be reached; nothing was sent to it";
                let title = "The upstream is unreachable";
                let problem = Problem::new("upstream-unreachable", StatusCode::BAD_GATEWAY, title, detail);
                problem_with_verdict(problem.retry_after(1, 4), EffectVerdict::NothingHappened)
            }
            // The request was interrupted before the upstream did.
            Some(Err(_)) if progress.has_failed() => caller_body_failed(&progress),
            Some(Err(error)) if is_parse_error(&error) => self.upstream_invalid(&error_chain(&error)),
            Some(Err(error)) => {
                tracing::warn!(upstream = %self.target.authority, error = %error_chain(&error), "upstream was interrupted");
                let detail =
                    "the connection to the upstream broke; it is open whether the request took effect";
                let title = "The upstream was interrupted";
                problem_with_verdict(
                    Problem::new("upstream-interrupted", StatusCode::BAD_GATEWAY, title, detail),
                    EffectVerdict::InDoubt,
                )
            }
            None => {
                let ms = self.responses.timeout().as_millis();
                tracing::warn!(upstream = %self.target.authority, ms, "upstream does not respond");
                let detail = format!(
                    "the upstream did not respond in {ms} ms; it is open whether the request took effect"
                );
                let title = "The upstream does not respond";
                problem_with_verdict(
                    Problem::new("upstream-timeout", StatusCode::GATEWAY_TIMEOUT, title, detail),
                    EffectVerdict::InDoubt,
                )
            }
        }
    }

    /// Converts the upstream's response to one for the caller.
    fn convert_response(
        &self,
        method: &Method,
        mut parts: response::Parts,
        body: Incoming,
    ) -> Response<Body> {
        if parts.status.is_informational() {
            return self.upstream_invalid(&format!("it is {}, which was not asked for", parts.status));
        }
        let hop_by_hop = parts.headers.keys().any(is_hop_by_hop);
        if hop_by_hop && !has_supported_transfer_coding(&parts.headers) {
            return self.upstream_invalid("its transfer coding is not chunked");
        }
        correct_content_length(&mut parts.headers, method, parts.status, body.size_hint().exact());
        if hop_by_hop {
            remove_hop_by_hop(&mut parts.headers, |_| false);
        }
        parts.version = Version::default();
        let body = if body.is_end_stream() {
            Body::empty()
        } else {
            Body::stream(StallTimeoutBody::new(body, &self.bodies))
        };
        Response::from_parts(parts, body)
    }

    /// The upstream responded, but the response cannot be forwarded.
    fn upstream_invalid(&self, why: &str) -> Response<Body> {
        tracing::warn!(upstream = %self.target.authority, why, "a response of the upstream cannot be passed on");
        let detail = format!(
            "the upstream's response cannot be passed on: {why}; it is open whether the request took effect"
        );
        let title = "The upstream's response is not valid";
        problem_with_verdict(
            Problem::new("upstream-invalid", StatusCode::BAD_GATEWAY, title, detail),
            EffectVerdict::InDoubt,
        )
    }

    /// Headers that a caller cannot remove by listing them in `Connection`: they determine the caller and the content
    /// of the request, or an earlier hop vouches for them.
    fn is_end_to_end(&self, name: &HeaderName) -> bool {
        let text = name.as_str();
        let described = text.starts_with("content-") || text.starts_with("x-forwarded-");
        let named = [HOST, FORWARDED, X_IDEMPOTENCY_KEY].contains(name);
        described || named || is_reserved(name) || self.tenant.uses_header(name)
    }

    /// Converts a caller's headers to those of a request to the upstream.
    fn prepare(&self, parts: &mut Parts, peer: &CallerInfo) {
        let host = parts.headers.get(HOST).cloned().or_else(|| {
            parts.uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
        });
        let headers = &mut parts.headers;
        // Handled by the proxy: the caller is told to continue when its body is read.
        headers.remove(EXPECT);
        add_forwarded_headers(headers, peer, host.as_ref(), self.trust_forwarded);
        let host = match self.host {
            HostPolicy::Preserve => host,
            HostPolicy::Upstream => HeaderValue::from_str(self.target.authority.as_str()).ok(),
        };
        if let Some(host) = host {
            headers.insert(HOST, host);
        }
    }
}

/// The answer to a caller whose body ended before it was complete. The upstream has got the beginning of it.
fn caller_body_failed(progress: &UploadProgress) -> Response<Body> {
    let (why, slow) = progress.take_failure();
    tracing::debug!(why, "a caller's body was interrupted");
    let detail = format!("the body could not be read: {why}; the upstream has seen only a part of it");
    let problem = if slow {
        Problem::new("body-too-slow", StatusCode::REQUEST_TIMEOUT, "The body took too long", detail)
    } else {
        Problem::new("body-incomplete", StatusCode::BAD_REQUEST, "The body was interrupted", detail)
    };
    problem_with_verdict(problem, EffectVerdict::InDoubt)
}

impl Service<Request<Body>> for ConnectionForwarder {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { Ok(this.forward(request).await) })
    }
}

impl ConnectionForwarder {
    /// Sends a request to the upstream. Never fails: every error becomes a response.
    pub(crate) async fn forward(&self, request: Request<Body>) -> Response<Body> {
        self.inner.forward(request, &self.peer).await
    }
}

fn problem_with_verdict(problem: Problem, verdict: EffectVerdict) -> Response<Body> {
    let mut response = problem.into_response();
    response.extensions_mut().insert(verdict);
    response
}

/// The response to a request that is not forwarded. It closes an HTTP/1 connection, because other parties may read the
/// following bytes as part of the request.
pub(crate) fn refused(problem: Problem, version: Version) -> Response<Body> {
    let mut response = problem_with_verdict(problem, EffectVerdict::NothingHappened);
    if version <= Version::HTTP_11 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Whether the response could not be parsed as HTTP.
fn is_parse_error(error: &hyper_util::client::legacy::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Checks that a request has a path and only one host: services and proxies differ in which of two hosts they use.
fn check_target<B>(request: &Request<B>) -> Result<(), String> {
    if !request.uri().path().starts_with('/') && request.method() != Method::OPTIONS {
        return Err(format!("the target {:?} has no path", request.uri().to_string()));
    }
    let mut hosts = request.headers().get_all(HOST).iter();
    let (host, more) = (hosts.next(), hosts.next().is_some());
    if more {
        return Err("the header Host came more than once".into());
    }
    match (host, request.uri().authority()) {
        (Some(host), Some(authority)) if !is_same_host(host.as_bytes(), authority.as_str().as_bytes()) => {
            Err("the header Host and the target name different hosts".into())
        }
        (None, None) if request.version() == Version::HTTP_11 => Err("the header Host is missing".into()),
        _ => Ok(()),
    }
}

fn is_same_host(one: &[u8], other: &[u8]) -> bool {
    let bare = |host: &[u8]| {
        let port = [&b":80"[..], b":443"].into_iter().find_map(|port| host.strip_suffix(port));
        port.unwrap_or(host).to_ascii_lowercase()
    };
    bare(one) == bare(other)
}

/// Sets the framing of a request's body where hyper would not. hyper drops a body of unknown length from methods that
/// rarely have one, and sends no length for an empty body, although many services require one (411).
fn set_framing(method: &Method, headers: &mut HeaderMap, body: &Body) {
    if body.is_end_stream() {
        let usual = [Method::POST, Method::PUT, Method::PATCH].contains(method);
        if usual && !headers.contains_key(CONTENT_LENGTH) {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
        }
    } else if body.size_hint().exact().is_none() && [Method::GET, Method::HEAD].contains(method) {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

fn wants_trailers(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(TE).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// Removes hop-by-hop headers: the standard ones, and those listed in `Connection` unless they must be kept.
fn remove_hop_by_hop(headers: &mut HeaderMap, keep: impl Fn(&HeaderName) -> bool) {
    let listed =
        if headers.contains_key(CONNECTION) { names_in_connection_header(headers) } else { Vec::new() };
    let dropped = |name: &HeaderName| is_hop_by_hop(name) || (listed.contains(name) && !keep(name));
    let present: Vec<HeaderName> = headers.keys().filter(|name| dropped(name)).cloned().collect();
    for name in present {
        headers.remove(name);
    }
}

/// Joins cookies: HTTP/2 may split them over several fields, HTTP/1 allows one.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().count() > 1 {
        let lines: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&lines.join(&b"; "[..])) {
            headers.insert(COOKIE, joined);
        }
    }
}

/// Adds the headers that describe the caller to the upstream.
fn add_forwarded_headers(
    headers: &mut HeaderMap,
    peer: &CallerInfo,
    host: Option<&HeaderValue>,
    trust: bool,
) {
    if !trust {
        let forged: Vec<HeaderName> =
            headers.keys().filter(|name| name.as_str().starts_with("x-forwarded-")).cloned().collect();
        for name in forged {
            headers.remove(name);
        }
        headers.remove(FORWARDED);
    }
    // Grows the map once instead of twice. If it cannot grow, the headers are not added.
    let _ = headers.try_reserve(4);
    append_to_list(headers, &X_FORWARDED_FOR, peer.ip.clone());
    // The value of an earlier, trusted hop is closer to the caller.
    headers.entry(X_FORWARDED_PROTO).or_insert_with(|| peer.proto.clone());
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
    if let Some(element) = peer.forwarded(host) {
        append_to_list(headers, &FORWARDED, element);
    }
}

/// Appends to a list header, as one line.
fn append_to_list(headers: &mut HeaderMap, name: &HeaderName, item: HeaderValue) {
    let lines = headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let lines: Vec<&[u8]> = lines.filter(|line| line.is_ascii()).collect();
    if lines.is_empty() {
        headers.insert(name, item);
        return;
    }
    let joined = [lines.join(&b", "[..]).as_slice(), b", ", item.as_bytes()].concat();
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(joined)) {
        headers.insert(name, value);
    }
}

/// Whether a request asks for a protocol that the proxy does not support. An offer of HTTP/2 may be ignored, and is.
fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(UPGRADE).iter().filter_map(|line| line.to_str().ok());
    let mut protocols = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|name| !name.is_empty());
    protocols.any(|protocol| !protocol.eq_ignore_ascii_case("h2c"))
}

/// Connects with a timeout that includes the TLS handshake.
#[derive(Clone)]
struct TimeoutConnector {
    inner: HttpsConnector<HttpConnector>,
    timeout: Duration,
}

impl Service<Uri> for TimeoutConnector {
    type Response = <HttpsConnector<HttpConnector> as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(self.timeout, self.inner.call(uri));
        let ms = self.timeout.as_millis();
        Box::pin(async move {
            connecting.await.unwrap_or_else(|_| Err(format!("no connection within {ms} ms").into()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_join_paths() {
        let uri = |upstream: &str, path: &str| {
            Target::parse(upstream).unwrap().uri(&path.parse().unwrap()).unwrap().to_string()
        };
        assert_eq!(uri("http://u:1", "/a?b=c"), "http://u:1/a?b=c");
        assert_eq!(uri("http://u:1/", "/a"), "http://u:1/a");
        assert_eq!(uri("https://u/api/", "/a"), "https://u/api/a");
        assert_eq!(uri("http://u", "http://other/a"), "http://u/a");
        for bad in ["", "u:1", "ftp://u", "http://", "http://a:b@u", "http://u?x"] {
            assert!(Target::parse(bad).is_err(), "{bad}");
        }
    }

    fn peer() -> CallerInfo {
        CallerInfo::new("[2001:db8::1]:7".parse().unwrap(), true)
    }

    #[test]
    fn forged_forwarding_is_replaced_and_trusted_is_added_to() {
        let sent = || {
            let mut headers = HeaderMap::new();
            headers.insert(X_FORWARDED_FOR, HeaderValue::from_static("10.0.0.1"));
            headers.insert("x-forwarded-user", HeaderValue::from_static("root"));
            headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
            headers.insert(FORWARDED, HeaderValue::from_static("for=10.0.0.1"));
            headers
        };
        let host = HeaderValue::from_static("shop.example");
        let mut headers = sent();
        add_forwarded_headers(&mut headers, &peer(), Some(&host), false);
        assert_eq!(headers[X_FORWARDED_FOR], "2001:db8::1");
        assert_eq!(headers[X_FORWARDED_PROTO], "https");
        assert_eq!(headers[X_FORWARDED_HOST], "shop.example");
        assert_eq!(headers[FORWARDED], "for=\"[2001:db8::1]\";proto=https;host=\"shop.example\"");
        assert!(!headers.contains_key("x-forwarded-user"));
        let mut headers = sent();
        add_forwarded_headers(&mut headers, &peer(), Some(&host), true);
        assert_eq!(headers[X_FORWARDED_FOR], "10.0.0.1, 2001:db8::1");
        assert_eq!(headers[X_FORWARDED_PROTO], "http");
        assert!(headers[FORWARDED].to_str().unwrap().starts_with("for=10.0.0.1, for="));
    }

    #[test]
    fn each_request_of_a_connection_has_its_own_host_in_forwarded() {
        let peer = peer();
        let forwarded = |host: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            let host = host.map(HeaderValue::from_static);
            add_forwarded_headers(&mut headers, &peer, host.as_ref(), false);
            headers[FORWARDED].to_str().unwrap().replace("for=\"[2001:db8::1]\";proto=https", "")
        };
        assert_eq!(forwarded(None), "");
        for _ in 0..2 {
            assert_eq!(forwarded(Some("a.example")), ";host=\"a.example\"");
            assert_eq!(forwarded(Some("b.example:8443")), ";host=\"b.example:8443\"");
            assert_eq!(forwarded(Some("a\"b")), "", "it cannot be quoted");
            assert_eq!(forwarded(None), "");
        }
    }

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "1"),
            ("te", "gzip"),
            ("x-end", "1"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers, |_| false);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-end"]);
        let offers = |value: &'static str| {
            asks_for_upgrade(&HeaderMap::from_iter([(UPGRADE, HeaderValue::from_static(value))]))
        };
        assert!(offers("websocket") && !offers("h2c") && offers("h2c, websocket"));
    }
}

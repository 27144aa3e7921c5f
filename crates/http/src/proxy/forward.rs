//! The way to the upstream: connections, headers, and what it means when one fails.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONNECTION, COOKIE, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, TE, UPGRADE};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio_rustls::rustls;
use tower_service::Service;

use super::config::{HostPolicy, ProxyConfig};
use super::idle::IdleBody;
use crate::body::{Body, BoxError};
use crate::headers::{is_hop_by_hop, is_ours, listed_in_connection};
use crate::policy::{ConfigError, Verdict};
use crate::problem::Problem;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Who is calling, on which connection; in the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) tls: bool,
}

/// Where requests go.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    scheme: Scheme,
    authority: Authority,
    /// Put before every path; without a slash at its end.
    prefix: String,
}

impl Target {
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        let bad = |problem: &str| {
            ConfigError(format!("upstream: {url:?} {problem}; write it as http://127.0.0.1:8080"))
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
        let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let path: PathAndQuery = if self.prefix.is_empty() {
            path.parse().ok()?
        } else {
            format!("{}{path}", self.prefix).parse().ok()?
        };
        let uri = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
        uri.path_and_query(path).build().ok()
    }
}

/// Sends requests to the upstream.
#[derive(Clone)]
pub(crate) struct Forward(Arc<Inner>);

struct Inner {
    target: Target,
    client: Client<Timed, Body>,
    host: HostPolicy,
    trust_forwarded: bool,
    answer_timeout: Duration,
    idle_timeout: Duration,
}

impl Forward {
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
        let connector = Timed { inner: https, bound: Duration::from_millis(limits.connect_timeout_ms) };
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_millis(limits.pool_idle_ms))
            .pool_max_idle_per_host(limits.pool_idle_max)
            .http2_keep_alive_interval(Duration::from_secs(30))
            .build(connector);
        Ok(Self(Arc::new(Inner {
            target: Target::parse(&config.upstream)?,
            client,
            host: config.host,
            trust_forwarded: config.trust_forwarded,
            answer_timeout: Duration::from_millis(limits.answer_timeout_ms),
            idle_timeout: Duration::from_millis(limits.idle_timeout_ms),
        })))
    }
}

impl Inner {
    async fn forward(&self, request: Request<Body>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let Some(uri) = self.target.uri(&parts.uri) else {
            let detail = format!("the target {:?} cannot be sent on", parts.uri.path());
            let title = "The target is not valid";
            return refused(Problem::new("target-invalid", StatusCode::BAD_REQUEST, title, detail));
        };
        self.prepare(&mut parts);
        parts.uri = uri;
        parts.version = Version::HTTP_11;
        let body =
            if body.is_end_stream() { body } else { Body::stream(IdleBody::new(body, self.idle_timeout)) };
        let answer = self.client.request(Request::from_parts(parts, body));
        match tokio::time::timeout(self.answer_timeout, answer).await {
            Ok(Ok(response)) => {
                let (mut parts, body) = response.into_parts();
                remove_hop_by_hop(&mut parts.headers);
                parts.version = Version::default();
                let body = if body.is_end_stream() {
                    Body::empty()
                } else {
                    Body::stream(IdleBody::new(body, self.idle_timeout))
                };
                Response::from_parts(parts, body)
            }
            Ok(Err(error)) if error.is_connect() => {
                tracing::warn!(upstream = %self.target.authority, error = %chain(&error), "upstream unreachable");
                let detail = "the upstream cannot be reached; nothing was sent to it";
                let title = "The upstream is unreachable";
                let problem = Problem::new("upstream-unreachable", StatusCode::BAD_GATEWAY, title, detail);
                with(problem.retry_after(1, 4), Verdict::NothingHappened)
            }
            Ok(Err(error)) => {
                tracing::warn!(upstream = %self.target.authority, error = %chain(&error), "upstream broke off");
                let detail =
                    "the connection to the upstream broke; it is open whether the request took effect";
                let title = "The upstream broke off";
                with(
                    Problem::new("upstream-broken", StatusCode::BAD_GATEWAY, title, detail),
                    Verdict::InDoubt,
                )
            }
            Err(_) => {
                let ms = self.answer_timeout.as_millis();
                tracing::warn!(upstream = %self.target.authority, ms, "upstream does not answer");
                let detail = format!(
                    "the upstream did not answer in {ms} ms; it is open whether the request took effect"
                );
                let title = "The upstream does not answer";
                with(
                    Problem::new("upstream-timeout", StatusCode::GATEWAY_TIMEOUT, title, detail),
                    Verdict::InDoubt,
                )
            }
        }
    }

    /// Makes a caller's headers those of a request to the upstream.
    fn prepare(&self, parts: &mut Parts) {
        let peer = parts.extensions.get::<Peer>().copied();
        let host = parts.headers.get(HOST).cloned().or_else(|| {
            parts.uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
        });
        let wants_trailers =
            parts.headers.get(TE).is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
        let headers = &mut parts.headers;
        remove_hop_by_hop(headers);
        if wants_trailers {
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        // Ours to answer: the caller is told to go on when its body is read.
        headers.remove(EXPECT);
        join_cookies(headers);
        if let Some(peer) = peer {
            forwarded(headers, peer, host.as_ref(), self.trust_forwarded);
        }
        let host = match self.host {
            HostPolicy::Preserve => host,
            HostPolicy::Upstream => HeaderValue::from_str(self.target.authority.as_str()).ok(),
        };
        if let Some(host) = host {
            headers.insert(HOST, host);
        }
    }
}

impl Service<Request<Body>> for Forward {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let inner = self.0.clone();
        Box::pin(async move { Ok(inner.forward(request).await) })
    }
}

fn with(problem: Problem, verdict: Verdict) -> Response<Body> {
    let mut response = problem.into_response();
    response.extensions_mut().insert(verdict);
    response
}

/// An answer to a request that was not sent on.
pub(crate) fn refused(problem: Problem) -> Response<Body> {
    with(problem, Verdict::NothingHappened)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed = if headers.contains_key(CONNECTION) { listed_in_connection(headers) } else { Vec::new() };
    // What we tell the service of its claim is not the caller's to take out.
    let dropped = |name: &HeaderName| is_hop_by_hop(name) || (listed.contains(name) && !is_ours(name));
    let present: Vec<HeaderName> = headers.keys().filter(|name| dropped(name)).cloned().collect();
    for name in present {
        headers.remove(name);
    }
}

/// HTTP/2 may split cookies over several fields; HTTP/1 knows one.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().count() > 1 {
        let lines: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&lines.join(&b"; "[..])) {
            headers.insert(COOKIE, joined);
        }
    }
}

/// Tells the upstream who is calling.
fn forwarded(headers: &mut HeaderMap, peer: Peer, host: Option<&HeaderValue>, trust: bool) {
    if !trust {
        let forged: Vec<HeaderName> =
            headers.keys().filter(|name| name.as_str().starts_with("x-forwarded-")).cloned().collect();
        for name in forged {
            headers.remove(name);
        }
        headers.remove(FORWARDED);
    }
    let ip = peer.address.ip().to_canonical();
    let proto = if peer.tls { "https" } else { "http" };
    append(headers, &X_FORWARDED_FOR, &ip.to_string());
    // What an earlier, trusted hop saw is nearer to the caller.
    headers.entry(X_FORWARDED_PROTO).or_insert_with(|| HeaderValue::from_static(proto));
    let node = if ip.is_ipv6() { format!("\"[{ip}]\"") } else { ip.to_string() };
    let mut element = format!("for={node};proto={proto}");
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
        let plain =
            |text: &&str| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\".contains(&byte));
        if let Some(host) = host.to_str().ok().filter(plain) {
            element = format!("{element};host=\"{host}\"");
        }
    }
    append(headers, &FORWARDED, &element);
}

/// Adds to a list, as one line.
fn append(headers: &mut HeaderMap, name: &HeaderName, item: &str) {
    let mut lines: Vec<&str> = headers.get_all(name).iter().filter_map(|line| line.to_str().ok()).collect();
    lines.push(item);
    if let Ok(value) = HeaderValue::from_str(&lines.join(", ")) {
        headers.insert(name, value);
    }
}

/// Whether a request asks for another protocol that we do not speak. An offer of HTTP/2 may be ignored, and is.
pub(crate) fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(UPGRADE).iter().filter_map(|line| line.to_str().ok());
    let mut protocols = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|name| !name.is_empty());
    protocols.any(|protocol| !protocol.eq_ignore_ascii_case("h2c"))
}

/// Connects within a bound, handshake included.
#[derive(Clone)]
struct Timed {
    inner: HttpsConnector<HttpConnector>,
    bound: Duration,
}

impl Service<Uri> for Timed {
    type Response = <HttpsConnector<HttpConnector> as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(self.bound, self.inner.call(uri));
        let ms = self.bound.as_millis();
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

    fn peer() -> Peer {
        Peer { address: "[2001:db8::1]:7".parse().unwrap(), tls: true }
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
        forwarded(&mut headers, peer(), Some(&host), false);
        assert_eq!(headers[X_FORWARDED_FOR], "2001:db8::1");
        assert_eq!(headers[X_FORWARDED_PROTO], "https");
        assert_eq!(headers[X_FORWARDED_HOST], "shop.example");
        assert_eq!(headers[FORWARDED], "for=\"[2001:db8::1]\";proto=https;host=\"shop.example\"");
        assert!(!headers.contains_key("x-forwarded-user"));
        let mut headers = sent();
        forwarded(&mut headers, peer(), Some(&host), true);
        assert_eq!(headers[X_FORWARDED_FOR], "10.0.0.1, 2001:db8::1");
        assert_eq!(headers[X_FORWARDED_PROTO], "http");
        assert!(headers[FORWARDED].to_str().unwrap().starts_with("for=10.0.0.1, for="));
    }

    #[test]
    fn what_belongs_to_a_connection_stays_there() {
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
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-end"]);
        let offers = |value: &'static str| {
            asks_for_upgrade(&HeaderMap::from_iter([(UPGRADE, HeaderValue::from_static(value))]))
        };
        assert!(offers("websocket") && !offers("h2c") && offers("h2c, websocket"));
    }
}

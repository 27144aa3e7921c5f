//! Requests and responses over pooled connections, and the meaning of their failures.

use std::collections::VecDeque;
use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{AdminError, StoreError};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_rustls::rustls;

use crate::connect::{ConnectError, Options};
use crate::wire::Problem;

/// Whether a call may have changed something if its response is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    None,
    Change,
}

/// Why a call has no usable response.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No connection could be opened.
    Unreachable(String),
    /// The request was not sent.
    NotSent(String),
    /// The request may have reached the server.
    Lost(String),
    /// The server refused the request.
    Refused(StatusCode, Box<Problem>),
}

impl Failure {
    pub(crate) fn into_store_error(self, effect: Effect) -> StoreError {
        match self {
            Self::Unreachable(why) | Self::NotSent(why) => StoreError::Unavailable(why),
            Self::Lost(why) => lost_response_error(why, effect),
            Self::Refused(status, problem) => match problem.to_store_error() {
                Some(error) => error,
                None if status == StatusCode::TOO_MANY_REQUESTS => StoreError::Overloaded(problem.detail),
                None if status == StatusCode::SERVICE_UNAVAILABLE => StoreError::Unavailable(problem.detail),
                None if status.is_server_error() => lost_response_error(problem.detail, effect),
                None => StoreError::Invalid(problem.detail),
            },
        }
    }

    pub(crate) fn into_admin_error(self, effect: Effect) -> AdminError {
        if let Self::Refused(_, problem) = &self
            && let Some(error) = problem.to_admin_error()
        {
            return error;
        }
        self.into_store_error(effect).into()
    }
}

fn lost_response_error(why: String, effect: Effect) -> StoreError {
    match effect {
        Effect::None => StoreError::Unavailable(why),
        Effect::Change if hapax_core::mutant::is("unknown-send-failed") => StoreError::Unavailable(why),
        Effect::Change => StoreError::OutcomeUnknown(why),
    }
}

type Http = HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Maximum number of runtimes whose connection pools are kept.
const POOLS_MAX: usize = 16;

pub(crate) struct Transport {
    /// One pool per calling runtime. A connection's task runs on the runtime that opened it: with a shared pool, a
    /// heartbeat could wait for a runtime whose threads are blocked by handlers.
    pools: Mutex<VecDeque<(tokio::runtime::Id, Http)>>,
    connector: HttpsConnector<HttpConnector>,
    idle_timeout: Duration,
    /// Scheme, host, port and path prefix, without a trailing slash.
    base: String,
    authorization: Option<HeaderValue>,
    pub(crate) timeout: Duration,
    closed: AtomicBool,
}

impl Transport {
    pub(crate) fn new(endpoint: &str, options: Options) -> Result<Self, ConnectError> {
        let (endpoint, in_url) = split_token(endpoint);
        let bad = |problem: String| ConnectError::Endpoint { endpoint: endpoint.clone(), problem };
        let uri: Uri = endpoint.parse().map_err(|error: http::uri::InvalidUri| bad(error.to_string()))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(bad("its scheme is neither http nor https".to_owned()));
        }
        if uri.query().is_some() {
            return Err(bad("it has a query".to_owned()));
        }
        let token = options.token.map(|token| token.0).or(in_url);
        let authorization = match token {
            None => None,
            Some(token) => {
                let mut value =
                    HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| ConnectError::Token)?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let connector = connector(&uri, options.connect_timeout).map_err(|error| bad(error.to_string()))?;
        let base = endpoint.trim_end_matches('/').to_owned();
        let (pools, idle_timeout) = (Mutex::default(), options.idle_timeout);
        let (timeout, closed) = (options.timeout, AtomicBool::new(false));
        Ok(Self { pools, connector, idle_timeout, base, authorization, timeout, closed })
    }

    /// The pool of the calling runtime.
    fn http(&self) -> Http {
        let id = tokio::runtime::Handle::current().id();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, http)) = pools.iter().find(|(known, _)| *known == id) {
            return http.clone();
        }
        let http = HttpClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(self.idle_timeout)
            .build(self.connector.clone());
        if pools.len() == POOLS_MAX {
            pools.pop_front();
        }
        pools.push_back((id, http.clone()));
        http
    }

    /// Refuses further calls and drops the idle connections.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.base
    }

    pub(crate) fn has_token(&self) -> bool {
        self.authorization.is_some()
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.call(Method::GET, path, Bytes::new(), self.timeout).await
    }

    pub(crate) async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.call(Method::DELETE, path, Bytes::new(), self.timeout).await
    }

    pub(crate) async fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, Failure> {
        self.post_within(path, body, self.timeout).await
    }

    pub(crate) async fn post_within<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        timeout: Duration,
    ) -> Result<T, Failure> {
        self.call(Method::POST, path, encode(body)?, timeout).await
    }

    pub(crate) async fn put<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, Failure> {
        self.call(Method::PUT, path, encode(body)?, self.timeout).await
    }

    /// Sends one request and reads its response.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        timeout: Duration,
    ) -> Result<T, Failure> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Failure::NotSent("the client is closed".to_owned()));
        }
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body)).map_err(|error| Failure::NotSent(error.to_string()))?;
        let answer = tokio::time::timeout(timeout, self.exchange(request)).await;
        let (status, body) =
            answer.unwrap_or_else(|_| Err(Failure::Lost(format!("no response within {timeout:?}"))))?;
        if !status.is_success() {
            return Err(Failure::Refused(status, Box::new(problem(status, &body))));
        }
        let json = if body.is_empty() { b"null" } else { &body[..] };
        serde_json::from_slice(json)
            .map_err(|error| Failure::Lost(format!("the server's response cannot be read: {error}")))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), Failure> {
        let response = self.http().request(request).await.map_err(|error| {
            let why = format!("{}: {}", self.base, error_chain(&error));
            if error.is_connect() && is_unreachable(&error) {
                return Failure::Unreachable(why);
            }
            // hyper cancels a request that it has not begun to write, for example on a connection that is closing.
            let unsent = error.is_connect()
                || error
                    .source()
                    .and_then(|e| e.downcast_ref::<hyper::Error>())
                    .is_some_and(hyper::Error::is_canceled);
            if unsent { Failure::NotSent(why) } else { Failure::Lost(why) }
        })?;
        let status = response.status();
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| Failure::Lost(format!("{}: {}", self.base, error_chain(&error))))?;
        Ok((status, body.to_bytes()))
    }
}

/// Whether the connection itself failed, in contrast to TLS on an open connection.
fn is_unreachable(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};
    std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<std::io::Error>())
        .any(|e| matches!(e.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable | TimedOut))
}

/// A connector for an endpoint: TLS with this machine's certificates for HTTPS, and plain TCP for HTTP.
pub fn connector(
    endpoint: &Uri,
    connect_timeout: Duration,
) -> std::io::Result<HttpsConnector<HttpConnector>> {
    connector_of(endpoint, connect_timeout, false)
}

/// The same, offering HTTP/2 alone over TLS if `http2`.
pub(crate) fn connector_of(
    endpoint: &Uri,
    connect_timeout: Duration,
    http2: bool,
) -> std::io::Result<HttpsConnector<HttpConnector>> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(connect_timeout));
    // Only HTTPS needs the machine's root certificates; reading them is slow.
    if endpoint.scheme_str() != Some("https") {
        return Ok(http_only_connector(tcp));
    }
    let builder = hyper_rustls::HttpsConnectorBuilder::new()
        .with_provider_and_native_roots(rustls::crypto::ring::default_provider())
        .map_err(|error| {
            std::io::Error::other(format!("this machine's certificates cannot be read: {error}"))
        })?;
    let builder = builder.https_only();
    Ok(if http2 {
        builder.enable_http2().wrap_connector(tcp)
    } else {
        builder.enable_http1().wrap_connector(tcp)
    })
}

/// Plain HTTP, with the same connector type.
fn http_only_connector(tcp: HttpConnector) -> HttpsConnector<HttpConnector> {
    let config = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring knows the default versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(tcp)
}

pub(crate) fn encode<B: Serialize>(body: &B) -> Result<Bytes, Failure> {
    let json = serde_json::to_vec(body);
    json.map(Bytes::from).map_err(|error| Failure::NotSent(format!("the request cannot be written: {error}")))
}

/// The server's error; the response of a proxy in between may have no problem details.
fn problem(status: StatusCode, body: &[u8]) -> Problem {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) if !problem.code.is_empty() => problem,
        _ => {
            let text: String = String::from_utf8_lossy(body).trim().chars().take(300).collect();
            Problem::new("", format!("the server answered {status}: {text}"), false)
        }
    }
}

/// The text of an error with its causes: hyper's own text alone says little.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Removes `ID:SECRET@` from an endpoint.
fn split_token(endpoint: &str) -> (String, Option<String>) {
    let Some((scheme, rest)) = endpoint.split_once("://") else { return (endpoint.to_owned(), None) };
    let authority = rest.split('/').next().unwrap_or_default();
    match authority.rsplit_once('@') {
        None => (endpoint.to_owned(), None),
        Some((token, _)) => {
            let decoded = percent_encoding::percent_decode_str(token).decode_utf8_lossy().into_owned();
            (format!("{scheme}://{}", &rest[token.len() + 1..]), Some(decoded))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_in_the_endpoint_is_taken_out_of_it() {
        let (endpoint, token) = split_token("https://AK:s%2Fcret@queues.example:1/base");
        assert_eq!(
            (endpoint.as_str(), token.as_deref()),
            ("https://queues.example:1/base", Some("AK:s/cret"))
        );
        assert_eq!(split_token("http://h:1"), ("http://h:1".to_owned(), None));
    }

    #[test]
    fn a_bad_endpoint_says_what_to_use() {
        for bad in ["", "localhost", "ftp://x", "http://x?y"] {
            let error = Transport::new(bad, Options::default()).err().unwrap().to_string();
            assert!(error.contains("http://HOST:PORT"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_unsent_request_is_unavailable_and_a_lost_one_is_unknown() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let transport = Transport::new(&endpoint, Options::default()).unwrap();
        let accept = tokio::spawn(async move {
            use tokio::io::AsyncReadExt as _;
            let (mut stream, _) = listener.accept().await.unwrap();
            // The request has arrived; then the connection breaks.
            stream.read_exact(&mut [0; 4]).await.unwrap();
        });
        let lost = transport.post::<_, ()>("/", &7).await.unwrap_err();
        assert!(matches!(lost.into_store_error(Effect::Change), StoreError::OutcomeUnknown(_)));
        accept.await.unwrap();
        let refused = transport.post::<_, ()>("/", &7).await.unwrap_err();
        assert!(matches!(refused.into_store_error(Effect::Change), StoreError::Unavailable(_)));
    }
}

//! Shared by the tests: a counting service, a client, ledgers.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use bytes::Bytes;
use hapax_conformance::MemoryStore;
use hapax_core::{Ledger, SystemClock};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::Semaphore;

pub mod naive;
pub mod outage;
#[cfg(feature = "proxy")]
pub mod proxied;
pub mod raw;

/// Maximum time of every wait: only a broken test reaches it.
pub const SOON: Duration = Duration::from_mins(3);

/// Waits with that timeout.
pub async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("it took too long")
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A ledger in memory, and a folder that goes away with the test.
pub struct Store {
    pub folder: tempfile::TempDir,
    memory: Arc<MemoryStore>,
}

impl Store {
    pub fn new() -> Self {
        let memory = MemoryStore::new(Arc::new(SystemClock::default()));
        Self { folder: tempfile::tempdir().unwrap(), memory }
    }

    pub fn ledger(&self) -> Arc<dyn Ledger> {
        self.memory.clone()
    }
}

/// Serves a router on a free port until the test's runtime ends.
pub async fn serve(router: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

/// Counts the requests that reached a service, and holds them until the test releases them.
pub struct Gate {
    arrived: AtomicUsize,
    open: Semaphore,
}

impl Gate {
    /// A gate that holds every request.
    pub fn closed() -> Arc<Self> {
        Arc::new(Self { arrived: AtomicUsize::new(0), open: Semaphore::new(0) })
    }

    /// A gate that lets every request pass.
    pub fn opened() -> Arc<Self> {
        let gate = Self::closed();
        gate.open();
        gate
    }

    /// Called by the service.
    pub async fn pass(&self) -> usize {
        let number = self.arrived.fetch_add(1, Ordering::SeqCst) + 1;
        let _permit = self.open.acquire().await.unwrap();
        number
    }

    /// Number of requests that have arrived.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// Lets all requests pass from now on.
    pub fn open(&self) {
        self.open.add_permits(1 << 20);
    }

    /// Waits until `count` requests have arrived.
    pub async fn wait(&self, count: usize) {
        until(&format!("{count} requests at the service"), || self.arrived() >= count).await;
    }
}

/// A response with its complete body.
#[derive(Debug, Clone)]
pub struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl TestResponse {
    pub fn is_replay(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|value| value == "true")
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The code of a problem; panics if it is malformed.
    pub fn problem(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/problem+json", "{self:?}");
        let json: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(json["status"], self.status.as_u16(), "{json}");
        assert!(json["detail"].as_str().is_some_and(|detail| detail.len() > 20), "{json}");
        assert!(json["title"].is_string() && json["type"].is_string(), "{json}");
        json["code"].as_str().unwrap().to_owned()
    }
}

/// A client that reads complete responses.
#[derive(Clone)]
pub struct Client(Pool<HttpConnector, Full<Bytes>>);

impl Client {
    pub fn new() -> Self {
        Self(Pool::builder(TokioExecutor::new()).build_http())
    }

    /// Uses HTTP/2 with prior knowledge.
    pub fn http2() -> Self {
        Self(Pool::builder(TokioExecutor::new()).http2_only(true).build_http())
    }

    pub async fn try_send(&self, request: Request<Full<Bytes>>) -> Result<TestResponse, String> {
        let sent = async {
            let response = self.0.request(request).await.map_err(|error| format!("{error:?}"))?;
            let (parts, body) = response.into_parts();
            let body = body.collect().await.map_err(|error| format!("{error:?}"))?.to_bytes();
            Ok(TestResponse { status: parts.status, headers: parts.headers, body })
        };
        soon(sent).await
    }

    pub async fn send(&self, request: Request<Full<Bytes>>) -> TestResponse {
        self.try_send(request).await.unwrap()
    }

    /// POSTs JSON with a key.
    pub async fn post(&self, to: SocketAddr, path: &str, key: &str, body: &str) -> TestResponse {
        self.send(post(to, path, key, body)).await
    }
}

/// A POST of JSON with a key.
pub fn post(to: SocketAddr, path: &str, key: &str, body: &str) -> Request<Full<Bytes>> {
    Request::post(format!("http://{to}{path}"))
        .header("content-type", "application/json")
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap()
}

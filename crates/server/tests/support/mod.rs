//! A server over a real embedded store on a free port, and a client on bare sockets.
#![allow(dead_code, missing_docs, reason = "each test uses its part")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::ManualClock;
use hapax_embedded::{Embedded, Options};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Maximum time of every wait: only a broken server reaches it.
const PATIENCE: Duration = Duration::from_mins(2);

pub struct Running {
    pub address: SocketAddr,
    pub unread: Arc<hapax_net::unread::UnreadBudget>,
    stop: Option<oneshot::Sender<()>>,
    done: JoinHandle<()>,
    _folder: TempDir,
}

impl Running {
    pub async fn start(config: ServerConfig) -> Self {
        Self::start_with(config, |server| server).await
    }

    pub async fn start_with(config: ServerConfig, with: impl FnOnce(Server) -> Server) -> Self {
        Self::start_over(Options::default(), config, with).await
    }

    /// Starts a server over a store with these options.
    pub async fn start_over(
        options: Options,
        config: ServerConfig,
        with: impl FnOnce(Server) -> Server,
    ) -> Self {
        Self::start_built(options, config, |server, _| with(server)).await
    }

    /// With the native API beside SQS.
    pub async fn start_native(config: ServerConfig) -> Self {
        let with = |server: Server, store: Arc<Embedded>| {
            let native = Native::new(store, server.shutdown(), None);
            server.with_router(native.router(), &[])
        };
        Self::start_built(Options::default(), config, with).await
    }

    async fn start_built(
        options: Options,
        mut config: ServerConfig,
        with: impl FnOnce(Server, Arc<Embedded>) -> Server,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Embedded::open(folder.path(), options).unwrap());
        config.listen = vec!["127.0.0.1:0".parse().unwrap()];
        let server = with(Server::new(config, store.clone()).unwrap(), store);
        let unread = server.unread_budget();
        let listeners = server.bind().await.unwrap();
        let address = listeners[0].local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let done = tokio::spawn(server.run(listeners, async {
            let _ = stopped.await;
        }));
        Self { address, unread, stop: Some(stop), done, _folder: folder }
    }

    /// Begins the shutdown.
    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits for the end of the shutdown.
    pub async fn stopped(self) {
        tokio::time::timeout(PATIENCE, self.done).await.expect("stops within its bound").unwrap();
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// One request on its own connection.
    pub async fn send(&self, request: &str) -> TestResponse {
        exchange(self.connect().await, request).await
    }

    pub async fn json(&self, action: &str, body: &str) -> TestResponse {
        self.send(&json(action, body)).await
    }

    pub async fn query(&self, path: &str, form: &str) -> TestResponse {
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        let kind = "content-type: application/x-www-form-urlencoded\r\n";
        self.send(&format!("{head}{kind}content-length: {}\r\n\r\n{form}", form.len())).await
    }
}

/// A request of AWS JSON 1.0.
pub fn json(action: &str, body: &str) -> String {
    format!(
        "POST / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-amz-target: AmazonSQS.{action}\r\n\
         content-type: application/x-amz-json-1.0\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[derive(Debug)]
pub struct TestResponse {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Sends a request and reads to the end of the connection.
pub async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> TestResponse {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    // A TLS peer may close without a close notification.
    let _ = tokio::time::timeout(PATIENCE, read).await.expect("an answer in time");
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    TestResponse { status, head: head.to_owned(), body: body.to_owned() }
}

/// A server with the native API and a manual clock.
pub struct Api {
    pub address: SocketAddr,
    pub clock: Arc<ManualClock>,
    pub native: Native,
    stop: Mutex<Option<oneshot::Sender<()>>>,
    _folder: TempDir,
}

/// Start of the clock of an [`Api`]: 2027-01-15T08:00:00Z.
pub const START_MS: u64 = 1_800_000_000_000;

impl Api {
    pub async fn start() -> Self {
        Self::start_with(ServerConfig::default()).await
    }

    pub async fn start_with(config: ServerConfig) -> Self {
        Self::start_over(Options::default(), config).await
    }

    /// Over a store with these options, on a clock that is moved by hand.
    pub async fn start_over(options: Options, mut config: ServerConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at_ms(START_MS));
        let options = Options { clock: clock.clone(), ..options };
        let store = Arc::new(Embedded::open(folder.path(), options).unwrap());
        config.listen = vec!["127.0.0.1:0".parse().unwrap()];
        let server = Server::new(config, store.clone()).unwrap();
        let native = Native::new(store, server.shutdown(), None);
        let server = server.with_router(native.router(), &[]);
        let listeners = server.bind().await.unwrap();
        let address = listeners[0].local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(server.run(listeners, async { drop(stopped.await) }));
        Self { address, clock, native, stop: Mutex::new(Some(stop)), _folder: folder }
    }

    /// Begins the shutdown.
    pub fn stop(&self) {
        drop(self.stop.lock().unwrap().take());
    }

    /// Waits until `count` calls wait at the store.
    pub async fn waiting(&self, count: usize) {
        let reached = async {
            while self.native.waiting_calls() != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.expect("they are there");
    }

    pub async fn call(&self, method: &str, path: &str, body: Value) -> Reply {
        self.call_as(method, path, body, None).await
    }

    /// One request on its own connection; `token` is `ID:SECRET`.
    pub async fn call_as(&self, method: &str, path: &str, body: Value, token: Option<&str>) -> Reply {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{token}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let stream = TcpStream::connect(self.address).await.unwrap();
        let answer = exchange(stream, &request).await;
        let json =
            if answer.body.is_empty() { Value::Null } else { serde_json::from_str(&answer.body).unwrap() };
        Reply { status: answer.status, head: answer.head.to_lowercase(), text: answer.body, json }
    }
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// The response's head in lower case.
    pub head: String,
    pub text: String,
    pub json: Value,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        let start = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&start))
    }

    /// The names of the response's fields, sorted.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<_> = self.json.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    /// Returns the JSON; panics unless the status and the matching media type are as expected.
    #[track_caller]
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        let problem = self.status >= 400;
        let kind = if problem { "application/problem+json" } else { "application/json" };
        assert!(self.text.is_empty() || self.header("content-type") == Some(kind), "{self:?}");
        self.json
    }

    /// Returns the problem's detail; panics unless it is this problem.
    #[track_caller]
    pub fn problem(self, status: u16, code: &str) -> String {
        let json = self.expect(status);
        assert_eq!(
            (json["status"].as_u64(), json["code"].as_str()),
            (Some(status.into()), Some(code)),
            "{json}"
        );
        json["detail"].as_str().unwrap().to_owned()
    }
}

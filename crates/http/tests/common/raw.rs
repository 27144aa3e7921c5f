//! HTTP/1.1 by hand: the bytes on the wire, not a library's view of them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::soon;

/// A message as received: its first line, its headers in order, and its body without framing.
#[derive(Debug, Clone)]
pub struct Message {
    pub first_line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Number of the upstream's connection on which it arrived; 0 for responses.
    pub connection: usize,
}

impl Message {
    /// Every value of a header, by its name in lower case.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let found = self.headers.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str()).collect()
    }

    pub fn status(&self) -> u16 {
        self.first_line.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line")
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn is_replay(&self) -> bool {
        self.all("idempotent-replayed") == ["true"]
    }

    /// The code of a problem.
    pub fn problem(&self) -> String {
        let json: serde_json::Value =
            serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no problem: {self:?}"));
        json["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// One end of a connection; reads messages one after another.
pub struct Wire {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Wire {
    pub async fn connect(to: SocketAddr) -> Self {
        Self::over(soon(TcpStream::connect(to)).await.unwrap())
    }

    fn over(stream: TcpStream) -> Self {
        Self { stream, read: Vec::new() }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon(self.stream.write_all(bytes.as_ref())).await.unwrap();
    }

    /// Reads some more; `false` at the end of the connection.
    /// Sends nothing more; answers can still be read.
    pub async fn end(&mut self) {
        tokio::io::AsyncWriteExt::shutdown(&mut self.stream).await.unwrap();
    }

    async fn fill(&mut self) -> bool {
        soon(self.stream.read_buf(&mut self.read)).await.unwrap_or(0) > 0
    }

    /// The next line, without its end.
    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line).into_owned();
                return Some(line.trim_end_matches(['\r', '\n']).to_owned());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn bytes(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.read.len() < length {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.read.drain(..length).collect())
    }

    async fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let size = self.line().await?;
            let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
            if size == 0 {
                while !self.line().await?.is_empty() {}
                return Some(body);
            }
            body.extend(self.bytes(size).await?);
            assert_eq!(self.line().await?, "", "the end of a chunk");
        }
    }

    /// A first line and headers; `None` at the end of the connection.
    pub async fn head(&mut self) -> Option<Message> {
        let first_line = self.line().await?;
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no header: {line:?}"));
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
        Some(Message { first_line, headers, body: Vec::new(), connection: 0 })
    }

    /// Reads the body that a head announces. No peer may be sent both framings at once.
    async fn body(&mut self, message: &mut Message, until_close: bool) -> Option<()> {
        let (lengths, codings) = (message.all("content-length"), message.all("transfer-encoding"));
        assert!(lengths.len() <= 1, "several lengths: {message:?}");
        assert!(lengths.is_empty() || codings.is_empty(), "two framings: {message:?}");
        message.body = match (lengths.first(), codings.first()) {
            (Some(length), _) => self.bytes(length.parse().ok()?).await?,
            (None, Some(coding)) => {
                assert!(coding.eq_ignore_ascii_case("chunked"), "{message:?}");
                self.chunks().await?
            }
            (None, None) if until_close => {
                while self.fill().await {}
                std::mem::take(&mut self.read)
            }
            (None, None) => Vec::new(),
        };
        Some(())
    }

    /// The next final response to a request with this method.
    pub async fn answer(&mut self, method: &str) -> Message {
        self.try_response(method).await.expect("the connection ended before its answer")
    }

    /// The same; `None` if the connection ends first.
    pub async fn try_response(&mut self, method: &str) -> Option<Message> {
        loop {
            let mut message = self.head().await?;
            let status = message.status();
            if status / 100 == 1 {
                continue;
            }
            if method != "HEAD" && status != 204 && status != 304 {
                self.body(&mut message, true).await?;
            }
            return Some(message);
        }
    }

    /// All bytes until the other side closes.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.read)
    }
}

/// Returns the bytes that an upstream sends for a request.
pub type Script = dyn Fn(&Message) -> Vec<u8> + Send + Sync;

/// An upstream that responds with bytes chosen by the test.
pub struct Upstream {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Message>>>,
}

impl Upstream {
    /// Responds to every request by the script. A response without a defined end closes the connection.
    pub async fn start(script: impl Fn(&Message) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<Message>>>::default();
        let (script, record): (Arc<Script>, _) = (Arc::new(script), seen.clone());
        let connections = AtomicUsize::new(0);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let number = connections.fetch_add(1, Ordering::SeqCst) + 1;
                let (script, record) = (script.clone(), record.clone());
                tokio::spawn(async move { serve(Wire::over(stream), number, &*script, &record).await });
            }
        });
        Self { address, seen }
    }

    /// Sends the same response to every request.
    pub async fn responding(response: impl Into<Vec<u8>>) -> Self {
        let response = response.into();
        Self::start(move |_| response.clone()).await
    }

    /// The requests received so far.
    pub fn seen(&self) -> Vec<Message> {
        self.seen.lock().unwrap().clone()
    }
}

async fn serve(mut wire: Wire, number: usize, script: &Script, record: &Mutex<Vec<Message>>) {
    while let Some(mut request) = wire.head().await {
        request.connection = number;
        if wire.body(&mut request, false).await.is_none() {
            return;
        }
        record.lock().unwrap().push(request.clone());
        let answer = script(&request);
        let closes = answer.is_empty() || !has_an_end(&answer);
        if wire.stream.write_all(&answer).await.is_err() || closes {
            return;
        }
    }
}

/// Whether a response declares where its body ends; if not, the body ends with the connection.
fn has_an_end(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer).to_ascii_lowercase();
    let head = text.split("\r\n\r\n").next().unwrap_or_default();
    let bodiless = [" 204 ", " 304 ", " 101 "].iter().any(|status| head.contains(status));
    bodiless || head.contains("\r\ncontent-length:") || head.contains("\r\ntransfer-encoding:")
}

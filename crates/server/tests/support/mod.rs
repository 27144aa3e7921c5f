//! A server over a real embedded store on a free port, and a client of bare sockets.
#![allow(dead_code, missing_docs, reason = "each test uses its part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax_embedded::{Embedded, Options};
use hapax_server::{Server, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub struct Running {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    done: JoinHandle<()>,
    _folder: TempDir,
}

impl Running {
    pub async fn start(config: ServerConfig) -> Self {
        Self::start_with(config, |server| server).await
    }

    pub async fn start_with(mut config: ServerConfig, with: impl FnOnce(Server) -> Server) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
        config.listen = vec!["127.0.0.1:0".parse().unwrap()];
        let server = with(Server::new(config, store).unwrap());
        let listeners = server.bind().await.unwrap();
        let address = listeners[0].local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let done = tokio::spawn(server.run(listeners, async {
            let _ = stopped.await;
        }));
        Self { address, stop: Some(stop), done, _folder: folder }
    }

    /// Begins the shutdown.
    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits for the end of the shutdown.
    pub async fn stopped(self) {
        tokio::time::timeout(Duration::from_secs(20), self.done)
            .await
            .expect("stops within its bound")
            .unwrap();
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// One request on its own connection.
    pub async fn send(&self, request: &str) -> Answer {
        exchange(self.connect().await, request).await
    }

    pub async fn json(&self, action: &str, body: &str) -> Answer {
        self.send(&json(action, body)).await
    }

    pub async fn query(&self, path: &str, form: &str) -> Answer {
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
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Sends a request and reads to the end of the connection.
pub async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> Answer {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    // A TLS peer may close without saying so.
    let _ = tokio::time::timeout(Duration::from_secs(30), read).await.expect("an answer in time");
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

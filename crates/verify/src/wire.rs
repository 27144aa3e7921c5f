//! Small HTTP/1.1 messages with JSON bodies: between the processes of a run and the recorder.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// Timeout of a call to the recorder. The recorder is never a target of faults, so only a stuck run reaches it.
const CALL: Duration = Duration::from_secs(20);
const HEAD_BYTES_MAX: usize = 8 * 1024;
const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// A request or response: its first line's path or status, and its body.
pub struct Message {
    /// The path of a request; empty for a response.
    pub path: String,
    /// The status of a response; 0 for a request.
    pub status: u16,
    pub body: Vec<u8>,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Message {
    /// The value of a header by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
    }
}

/// A connection that carries one message after another.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub fn new(stream: TcpStream) -> Self {
        let _ = stream.set_nodelay(true);
        Self { stream, buffer: Vec::new() }
    }

    /// Reads the next message; `None` if the peer has closed the connection before it.
    pub async fn read(&mut self) -> anyhow::Result<Option<Message>> {
        loop {
            if let Some((message, length)) = parse(&self.buffer)? {
                self.buffer.drain(..length);
                return Ok(Some(message));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                if self.buffer.is_empty() {
                    return Ok(None);
                }
                bail!("the connection ended within a message");
            }
        }
    }

    /// Writes a response.
    pub async fn answer(&mut self, status: u16, body: &[u8]) -> anyhow::Result<()> {
        let head = format!(
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        Ok(self.stream.write_all(&[head.as_bytes(), body].concat()).await?)
    }

    /// Writes a request.
    pub async fn ask(&mut self, path: &str, body: &[u8]) -> anyhow::Result<()> {
        self.ask_with(path, "", body).await
    }

    /// Writes a request with more headers, each with its end of line.
    pub async fn ask_with(&mut self, path: &str, headers: &str, body: &[u8]) -> anyhow::Result<()> {
        let length = body.len();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {length}\r\n\r\n");
        Ok(self.stream.write_all(&[head.as_bytes(), body].concat()).await?)
    }
}

/// The first message of a buffer and its length, once it is complete.
fn parse(buffer: &[u8]) -> anyhow::Result<Option<(Message, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let is_response = buffer.starts_with(b"HTTP/");
    let (head, path, status) = if is_response {
        let mut response = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(head) = response.parse(buffer)? else { return incomplete(buffer) };
        (head, String::new(), response.code.unwrap_or_default())
    } else {
        let mut request = httparse::Request::new(&mut headers);
        let httparse::Status::Complete(head) = request.parse(buffer)? else { return incomplete(buffer) };
        (head, request.path.unwrap_or_default().to_owned(), 0)
    };
    let length = headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.map_or("0", |header| std::str::from_utf8(header.value).unwrap_or("0"));
    let length: usize = length.trim().parse().context("content-length")?;
    if length > BODY_BYTES_MAX {
        bail!("a body of {length} bytes is too long");
    }
    let Some(body) = buffer.get(head..head + length) else { return Ok(None) };
    let text = |header: &httparse::Header<'_>| {
        let value = String::from_utf8_lossy(header.value).trim().to_owned();
        (header.name.to_ascii_lowercase(), value)
    };
    let headers = headers.iter().filter(|header| !header.name.is_empty()).map(text).collect();
    Ok(Some((Message { path, status, body: body.to_vec(), headers }, head + length)))
}

fn incomplete(buffer: &[u8]) -> anyhow::Result<Option<(Message, usize)>> {
    if buffer.len() > HEAD_BYTES_MAX {
        bail!("a head of more than {HEAD_BYTES_MAX} bytes is too long");
    }
    Ok(None)
}

/// A client of the recorder. Connections are kept and reused.
pub struct Caller {
    address: SocketAddr,
    idle: Mutex<Vec<Connection>>,
}

impl Caller {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, idle: Mutex::default() }
    }

    /// Sends a request and reads its response.
    pub async fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        let body = serde_json::to_vec(body)?;
        let exchange = async {
            let idle = self.idle.lock().await.pop();
            let mut connection = match idle {
                Some(connection) => connection,
                None => Connection::new(TcpStream::connect(self.address).await?),
            };
            connection.ask(path, &body).await?;
            let answer = connection.read().await?.context("the recorder has closed the connection")?;
            self.idle.lock().await.push(connection);
            anyhow::Ok(answer)
        };
        let answer = tokio::time::timeout(CALL, exchange).await.context("the recorder does not answer")??;
        if answer.status != 200 {
            bail!("the recorder answered {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
        }
        Ok(serde_json::from_slice(&answer.body)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        let wire =
            b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n";
        let (first, length) = parse(wire).unwrap().unwrap();
        assert_eq!((first.path.as_str(), first.status, first.body.as_slice()), ("/a", 0, &b"ok"[..]));
        let (second, rest) = parse(&wire[length..]).unwrap().unwrap();
        assert_eq!((second.path.as_str(), second.status, second.body.len()), ("", 200, 0));
        assert_eq!(length + rest, wire.len());
        assert!(parse(&wire[..length - 1]).unwrap().is_none(), "the body is not complete");
    }
}

//! Stands between a command and its server, and refuses what a test wants refused.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use super::Server;

/// What a relay answers instead of the server.
const OVERLOADED: &str = r#"{"code":"overloaded","detail":"too much","retryable":true}"#;

/// Passes each request on to the server unless `refuses` says so of its first line; then it answers 503 `overloaded`.
/// Returns its URL.
pub fn relay(server: &Server, refuses: impl FnMut(&str) -> bool + Send + 'static) -> String {
    relay_altered(server, refuses, |answer| answer)
}

/// The same, with a change to what the server answers; its length must stay.
pub fn relay_altered(
    server: &Server,
    mut refuses: impl FnMut(&str) -> bool + Send + 'static,
    alter: impl Fn(String) -> String + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, to) = (format!("http://{}", listener.local_addr().unwrap()), server.address().to_owned());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let Some(request) = read(&stream) else { continue };
            let answer = if refuses(request.lines().next().unwrap_or_default()) {
                let length = OVERLOADED.len();
                let head =
                    "HTTP/1.1 503 Refused\r\ncontent-type: application/problem+json\r\nconnection: close";
                format!("{head}\r\ncontent-length: {length}\r\n\r\n{OVERLOADED}").into_bytes()
            } else {
                let mut server = TcpStream::connect(&to).unwrap();
                server.write_all(request.as_bytes()).unwrap();
                let mut answer = Vec::new();
                server.read_to_end(&mut answer).unwrap();
                alter(String::from_utf8(answer).unwrap()).into_bytes()
            };
            let _ = stream.write_all(&answer);
        }
    });
    url
}

/// One request, made the last one of its connection.
fn read(stream: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream);
    let (mut request, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        request += &line;
    }
    request += "connection: close\r\n\r\n";
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(request + &String::from_utf8(body).unwrap())
}

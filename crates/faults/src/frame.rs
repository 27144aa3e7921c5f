//! Splits a byte stream into requests and responses.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The direction of bytes on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Request,
    /// From the server to the client.
    Answer,
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Unknown: the bytes of each read are a frame, without a label.
    Bytes,
    /// HTTP/1.1. A frame is a whole request or response. Its label is the request line; that of a response is the
    /// request line of its request, followed by the status.
    Http,
    /// PostgreSQL, without encryption. The label is the SQL of the request, also on its answer.
    Postgres,
    /// Redis, without encryption. The label is the name of the command, also on its reply.
    Redis,
    /// Kafka, without encryption. The label is the name of the request with its `transactional.id`, or with the client's id
    /// if it has none (`EndTxn orders-1`, `Fetch reader`), also on its answer.
    Kafka,
}

/// A part of a connection that is forwarded, or not, as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub label: String,
    /// The version of a Kafka request, also on its answer.
    pub version: i16,
    pub bytes: Vec<u8>,
}

/// A request without a response yet.
#[derive(Debug)]
pub(crate) struct Expected {
    /// That of a Kafka request, by which its answer is found.
    number: i32,
    version: i16,
    label: String,
}

/// The requests without a response yet, oldest first; shared by both directions of one connection.
pub(crate) type Pending = Arc<Mutex<VecDeque<Expected>>>;
/// For protocols whose requests have no number.
const UNNUMBERED: i32 = 0;

/// Splits one direction of one connection into frames.
pub(crate) struct Framer {
    protocol: Protocol,
    direction: Direction,
    pending: Pending,
    buffer: Vec<u8>,
    /// The rest of the connection is one response without a declared length.
    unframed: bool,
    postgres: crate::postgres_frames::Requests,
}

impl Framer {
    pub fn new(protocol: Protocol, direction: Direction, pending: Pending) -> Self {
        Self { protocol, direction, pending, buffer: Vec::new(), unframed: false, postgres: <_>::default() }
    }

    /// Adds bytes that were read.
    pub fn read(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame.
    pub fn next(&mut self) -> Option<Frame> {
        if self.buffer.is_empty() {
            return None;
        }
        if self.protocol == Protocol::Bytes || self.unframed {
            return Some(self.rest());
        }
        match (self.protocol, self.direction) {
            (Protocol::Postgres, Direction::Request) => self.postgres_request(),
            (Protocol::Postgres, Direction::Answer) => self.postgres_answer(),
            (Protocol::Redis, Direction::Request) => self.redis_request(),
            (Protocol::Redis, Direction::Answer) => self.redis_answer(),
            (Protocol::Kafka, Direction::Request) => self.kafka_request(),
            (Protocol::Kafka, Direction::Answer) => self.kafka_answer(),
            (_, Direction::Request) => self.request(),
            (_, Direction::Answer) => self.answer(),
        }
    }

    fn postgres_request(&mut self) -> Option<Frame> {
        let found = self.postgres.next(&self.buffer)?;
        if found.answered {
            self.expect_answer(&found.label);
        }
        Some(self.cut(found.label, found.bytes))
    }

    fn postgres_answer(&mut self) -> Option<Frame> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let label = pending.front().map(|expected| expected.label.clone());
        let (bytes, ends) = crate::postgres_frames::answer(&self.buffer, label.as_deref())?;
        if ends {
            pending.pop_front();
        }
        drop(pending);
        Some(self.cut(label.unwrap_or_default(), bytes))
    }

    fn redis_request(&mut self) -> Option<Frame> {
        let (label, bytes) = crate::redis_frames::request(&self.buffer)?;
        self.expect_answer(&label);
        Some(self.cut(label, bytes))
    }

    fn redis_answer(&mut self) -> Option<Frame> {
        let (bytes, answers) = crate::redis_frames::answer(&self.buffer)?;
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let label = answers.then(|| pending.pop_front()).flatten();
        drop(pending);
        Some(self.cut(label.map_or_else(String::new, |expected| expected.label), bytes))
    }

    fn kafka_request(&mut self) -> Option<Frame> {
        let crate::kafka_frames::Request { label, number, version, bytes } =
            crate::kafka_frames::request(&self.buffer)?;
        let expected = Expected { number, version, label: label.clone() };
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push_back(expected);
        Some(Frame { version, ..self.cut(label, bytes) })
    }

    fn kafka_answer(&mut self) -> Option<Frame> {
        let (number, bytes) = crate::kafka_frames::answer(&self.buffer)?;
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        // A request that was dropped on the way has none.
        let place = pending.iter().position(|pending| pending.number == number);
        let request = place.and_then(|place| pending.remove(place));
        drop(pending);
        let (label, version) =
            request.map_or_else(Default::default, |expected| (expected.label, expected.version));
        Some(Frame { version, ..self.cut(label, bytes) })
    }

    fn expect_answer(&self, label: &str) {
        let expected = Expected { number: UNNUMBERED, version: 0, label: label.to_owned() };
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push_back(expected);
    }

    /// The remaining bytes when the connection ends in the middle of a frame.
    pub fn rest(&mut self) -> Frame {
        Frame { label: String::new(), version: 0, bytes: std::mem::take(&mut self.buffer) }
    }

    fn request(&mut self) -> Option<Frame> {
        let mut headers = [httparse::EMPTY_HEADER; 128];
        let mut head = httparse::Request::new(&mut headers);
        let status = head.parse(&self.buffer);
        let Ok(httparse::Status::Complete(head_bytes)) = status else { return self.partial(status.is_err()) };
        let label = format!("{} {}", head.method.unwrap_or_default(), head.path.unwrap_or_default());
        let length = match body_of(head.headers) {
            Length::Bytes(bytes) => head_bytes + bytes,
            Length::Chunked => head_bytes + chunked_bytes(&self.buffer[head_bytes..])?,
            Length::UntilClose => head_bytes,
        };
        if self.buffer.len() < length {
            return None;
        }
        self.expect_answer(&label);
        Some(self.cut(label, length))
    }

    fn answer(&mut self) -> Option<Frame> {
        let mut headers = [httparse::EMPTY_HEADER; 128];
        let mut head = httparse::Response::new(&mut headers);
        let status = head.parse(&self.buffer);
        let Ok(httparse::Status::Complete(head_bytes)) = status else { return self.partial(status.is_err()) };
        let code = head.code.unwrap_or_default();
        let interim = (100..200).contains(&code) && code != 101;
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let request = pending.front().map(|expected| expected.label.clone()).unwrap_or_default();
        let bodiless = interim || matches!(code, 204 | 304) || request.starts_with("HEAD ");
        let length = match body_of(head.headers) {
            _ if bodiless => head_bytes,
            Length::Bytes(bytes) => head_bytes + bytes,
            Length::Chunked => head_bytes + chunked_bytes(&self.buffer[head_bytes..])?,
            Length::UntilClose => {
                self.unframed = true;
                self.buffer.len()
            }
        };
        if self.buffer.len() < length {
            return None;
        }
        if !interim {
            pending.pop_front();
        }
        drop(pending);
        Some(self.cut(format!("{request} {code}"), length))
    }

    /// No complete frame yet; input that is not HTTP is forwarded as it is.
    fn partial(&mut self, broken: bool) -> Option<Frame> {
        self.unframed |= broken;
        broken.then(|| self.rest())
    }

    fn cut(&mut self, label: String, length: usize) -> Frame {
        let rest = self.buffer.split_off(length);
        Frame { label, version: 0, bytes: std::mem::replace(&mut self.buffer, rest) }
    }
}

enum Length {
    Bytes(usize),
    Chunked,
    UntilClose,
}

fn body_of(headers: &[httparse::Header<'_>]) -> Length {
    let named = |name: &str| {
        let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok()
    };
    if named("transfer-encoding").is_some_and(|value| value.to_ascii_lowercase().contains("chunked")) {
        return Length::Chunked;
    }
    match named("content-length").and_then(|value| value.trim().parse().ok()) {
        Some(bytes) => Length::Bytes(bytes),
        None => Length::UntilClose,
    }
}

/// The length of a chunked body with its trailers, once it is complete.
fn chunked_bytes(body: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let Ok(httparse::Status::Complete((line, size))) = httparse::parse_chunk_size(&body[at..]) else {
            return None;
        };
        at += line;
        if size == 0 {
            return trailer_bytes(&body[at..]).map(|bytes| at + bytes);
        }
        at = at.checked_add(usize::try_from(size).ok()?)?.checked_add(2)?;
        if at > body.len() {
            return None;
        }
    }
}

fn trailer_bytes(body: &[u8]) -> Option<usize> {
    if body.starts_with(b"\r\n") {
        return Some(2);
    }
    body.windows(4).position(|window| window == b"\r\n\r\n").map(|place| place + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(direction: Direction, pending: &[&str], wire: &str) -> Vec<(String, String)> {
        let expected = |&label: &&str| Expected { number: UNNUMBERED, version: 0, label: label.to_owned() };
        let pending: Pending = Arc::new(Mutex::new(pending.iter().map(expected).collect()));
        let mut framer = Framer::new(Protocol::Http, direction, pending);
        let mut found = Vec::new();
        // Byte by byte: the frames must not depend on the network's packets.
        for byte in wire.as_bytes() {
            framer.read(&[*byte]);
            while let Some(frame) = framer.next() {
                found.push((frame.label, String::from_utf8(frame.bytes).unwrap()));
            }
        }
        assert!(framer.buffer.is_empty(), "{:?}", framer.buffer);
        found
    }

    #[test]
    fn pipelined_requests_are_told_apart() {
        let (one, two, three) = (
            "POST /a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
            "POST /b HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n",
            "GET /c HTTP/1.1\r\n\r\n",
        );
        let found = frames(Direction::Request, &[], &format!("{one}{two}{three}"));
        let expected = [("POST /a", one), ("POST /b", two), ("GET /c", three)];
        assert_eq!(found, expected.map(|(label, bytes)| (label.to_owned(), bytes.to_owned())));
    }

    #[test]
    fn answers_carry_the_request_that_they_answer() {
        let (interim, one, two) = (
            "HTTP/1.1 100 Continue\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n",
        );
        let found = frames(Direction::Answer, &["POST /a", "HEAD /b"], &format!("{interim}{one}{two}"));
        let expected = [("POST /a 100", interim), ("POST /a 200", one), ("HEAD /b 200", two)];
        assert_eq!(found, expected.map(|(label, bytes)| (label.to_owned(), bytes.to_owned())));
    }
}

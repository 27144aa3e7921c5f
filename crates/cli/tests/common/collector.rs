//! An OpenTelemetry collector that takes OTLP over HTTP.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::PATIENCE;

#[derive(Debug, Clone, Default)]
pub struct Span {
    pub trace: Vec<u8>,
    pub id: Vec<u8>,
    pub parent: Vec<u8>,
    pub name: String,
    pub kind: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub attributes: BTreeMap<String, String>,
    /// Trace and span of each link.
    pub links: Vec<(Vec<u8>, Vec<u8>)>,
}

/// One field of a protobuf message: its number, a number if it has one, and the bytes if it has some.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return value;
            }
            shift += 7;
        }
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        match key & 7 {
            0 => found.push((key >> 3, varint(&mut bytes), &[][..])),
            1 => {
                let (fixed, rest) = bytes.split_at(8);
                found.push((key >> 3, u64::from_le_bytes(fixed.try_into().unwrap()), &[][..]));
                bytes = rest;
            }
            2 => {
                let length = usize::try_from(varint(&mut bytes)).unwrap();
                let (part, rest) = bytes.split_at(length);
                found.push((key >> 3, 0, part));
                bytes = rest;
            }
            other => panic!("wire type {other}"),
        }
    }
    found
}

fn inside(bytes: &[u8], field: u64) -> impl Iterator<Item = &[u8]> {
    fields(bytes).into_iter().filter(move |(number, ..)| *number == field).map(|(_, _, part)| part)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn span(bytes: &[u8]) -> Span {
    let mut span = Span::default();
    for (number, value, part) in fields(bytes) {
        match number {
            1 => span.trace = part.to_vec(),
            2 => span.id = part.to_vec(),
            4 => span.parent = part.to_vec(),
            5 => span.name = text(part),
            6 => span.kind = value,
            7 => span.start_ns = value,
            8 => span.end_ns = value,
            9 => {
                let value = inside(part, 2).next().and_then(|any| inside(any, 1).next().map(text));
                span.attributes.insert(text(inside(part, 1).next().unwrap()), value.unwrap_or_default());
            }
            13 => {
                let id = |field| inside(part, field).next().unwrap().to_vec();
                span.links.push((id(1), id(2)));
            }
            _ => {}
        }
    }
    span
}

/// A collector that takes OTLP over HTTP.
pub struct Collector {
    pub url: String,
    pub spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let spans = Arc::new(Mutex::new(Vec::new()));
        let taken = spans.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, taken) = (stream.unwrap(), taken.clone());
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    loop {
                        let mut head = Vec::new();
                        for line in
                            reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty())
                        {
                            head.push(line.to_lowercase());
                        }
                        if head.is_empty() {
                            return;
                        }
                        assert_eq!(head[0], "post /v1/traces http/1.1");
                        assert!(
                            head.contains(&"content-type: application/x-protobuf".to_owned()),
                            "{head:?}"
                        );
                        let length =
                            head.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                        let mut body = vec![0; length.parse().unwrap()];
                        reader.read_exact(&mut body).unwrap();
                        for resource in inside(&body, 1) {
                            for scope in inside(resource, 2) {
                                taken.lock().unwrap().extend(inside(scope, 2).map(span));
                            }
                        }
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                    }
                });
            }
        });
        Self { url, spans }
    }

    /// The first span with this name that fulfils the condition.
    #[track_caller]
    pub fn wait_for(&self, name: &str, is: impl Fn(&Span) -> bool) -> Span {
        let start = Instant::now();
        loop {
            let spans = self.spans.lock().unwrap().clone();
            if let Some(found) = spans.iter().find(|span| span.name == name && is(span)) {
                return found.clone();
            }
            assert!(start.elapsed() < PATIENCE, "no such {name:?} among {spans:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

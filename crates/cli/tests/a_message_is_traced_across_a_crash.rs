//! A collector gets the spans of one message: its send, the delivery to a worker that is killed, and, in a trace of their own that
//! is linked to the send, the second delivery with its claim, run and settle.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Server, hapax};

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(2);

#[derive(Debug, Clone, Default)]
struct Span {
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
    kind: u64,
    start_ns: u64,
    end_ns: u64,
    attributes: BTreeMap<String, String>,
    /// Trace and span of each link.
    links: Vec<(Vec<u8>, Vec<u8>)>,
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
struct Collector {
    url: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    fn start() -> Self {
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
    fn wait_for(&self, name: &str, is: impl Fn(&Span) -> bool) -> Span {
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

#[test]
fn send_crash_redelivery_claim_run_and_settle() {
    let collector = Collector::start();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_in(folder, &["--otlp", &collector.url, "--traces-per-mille", "1000"]);
    let create =
        ["queue", "create", "pay", "--tier", "effectively-once", "--lease", "1s", "--retry-base", "0"];
    server.run(&create).ok();
    server.run(&["send", "pay", "one"]).ok();
    let send = collector.wait_for("send pay", |_| true);
    assert!(send.parent.is_empty() && send.kind == 4 && send.end_ns >= send.start_ns, "{send:?}");
    assert_eq!(send.attributes["messaging.system"], "hapax");
    let id = send.attributes["messaging.message.id"].clone();

    let work = |command: &str| {
        let args = ["work", "pay", "--once", "--otlp", &collector.url, "--", "sh", "-c", command];
        let mut child = hapax(&server.folder, &args);
        child.env("HAPAX_ENDPOINT", &server.endpoint).stdout(Stdio::piped()).stderr(Stdio::null());
        child.spawn().unwrap()
    };
    let mut killed = work("sleep 600");
    let first = collector.wait_for("receive pay", |span| span.trace == send.trace);
    assert_eq!((&first.parent, &first.attributes["hapax.delivery"]), (&send.id, &"1".to_owned()));
    let claim = collector.wait_for("claim pay", |span| span.trace == send.trace);
    assert_eq!((&claim.parent, &claim.attributes["hapax.result"]), (&first.id, &"granted".to_owned()));
    killed.kill().unwrap();
    killed.wait().unwrap();

    let mut second = work("echo $HAPAX_ATTR_TRACEPARENT");
    assert!(second.wait().unwrap().success());
    let again = collector.wait_for("receive pay", |span| span.attributes["hapax.delivery"] == "2");
    assert_ne!(again.trace, send.trace, "a trace of its own");
    assert!(again.parent.is_empty() && again.links == [(send.trace.clone(), send.id.clone())], "{again:?}");
    assert_eq!(again.attributes["messaging.message.id"], id);
    let is_child = |span: &Span| span.trace == again.trace && span.parent == again.id;
    let has = |span: &Span, result: &str| is_child(span) && span.attributes["hapax.result"] == result;
    collector.wait_for("claim pay", |span| has(span, "taken over"));
    collector.wait_for("settle pay", |span| has(span, "acked"));
    let run = collector.wait_for("process pay", is_child);
    assert!(
        run.kind == 5 && run.end_ns > run.start_ns && run.attributes["messaging.message.id"] == id,
        "{run:?}"
    );
}

/// A sender that is instrumented decides: its context stays in the message, and its choice not to record is kept.
#[test]
fn the_context_of_the_sender_is_kept() {
    let collector = Collector::start();
    let server = Server::start_in(tempfile::tempdir().unwrap(), &["--otlp", &collector.url]);
    server.run(&["queue", "create", "pay"]).ok();
    let context =
        |flags: &str| format!("traceparent=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
    server.run(&["send", "pay", "quiet", "--attribute", &context("00")]).ok();
    server.run(&["send", "pay", "traced", "--attribute", &context("01")]).ok();
    server.run(&["receive", "pay", "--max", "10", "--ack"]).ok();
    let parent = vec![0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7];
    let send = collector.wait_for("send pay", |_| true);
    let received = collector.wait_for("receive pay", |_| true);
    assert_eq!((&send.parent, &received.parent), (&parent, &parent));
    assert_eq!((send.trace[0], &received.trace), (0x4b, &send.trace));
    collector.wait_for("settle pay", |span| span.parent == received.id);
    let sends = collector.spans.lock().unwrap().iter().filter(|span| span.name == "send pay").count();
    assert_eq!(sends, 1, "the other sender did not record");
}

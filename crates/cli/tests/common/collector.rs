//! An OpenTelemetry collector that takes OTLP over HTTP, or over gRPC with TLS.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_net::body::{Body, BodyLimits, read_within};
use hapax_net::connection::{Request, RequestHandler};
use hapax_net::listen::{Limits, Runtime};
use hapax_net::tracker::RequestGuard;
use http::Response;

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

/// The spans of an export.
fn spans_of(export: &[u8]) -> Vec<Span> {
    let scopes = inside(export, 1).flat_map(|resource| inside(resource, 2));
    scopes.flat_map(|scope| inside(scope, 2)).map(span).collect()
}

/// A collector, and the spans that it has taken.
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
                        taken.lock().unwrap().extend(spans_of(&body));
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                    }
                });
            }
        });
        Self { url, spans }
    }

    /// One that takes OTLP over gRPC with TLS, by a certificate of its own; gives the file of that certificate, too.
    pub fn start_grpcs(folder: &Path) -> (Self, PathBuf) {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let (cert, key) = (folder.join("collector.pem"), folder.join("collector.key"));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let tls = hapax_net::tls::acceptor(&cert, &key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("grpcs://{}", listener.local_addr().unwrap());
        let spans = Arc::new(Mutex::new(Vec::new()));
        let taken = spans.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let handler = move |_| GrpcCollector(taken.clone());
                Runtime::new(Limits::default(), Some(tls))
                    .run(vec![listener], handler, std::future::pending())
                    .await;
            });
        });
        (Self { url, spans }, cert)
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

/// The method of a collector that takes traces over gRPC.
struct GrpcCollector(Arc<Mutex<Vec<Span>>>);

impl RequestHandler for GrpcCollector {
    async fn handle(&self, request: Request, _: &RequestGuard) -> Response<Body> {
        let is_export = request.version() == http::Version::HTTP_2
            && request.uri().path() == "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            && request.headers().get("content-type").is_some_and(|value| value == "application/grpc");
        let limits = BodyLimits::new(1 << 20, 1 << 20);
        let body = read_within(request.into_body(), &limits, PATIENCE).await;
        let status = match body {
            Ok(body) if is_export && body.len() >= 5 => {
                self.0.lock().unwrap().extend(spans_of(&body[5..]));
                "0"
            }
            _ => "12",
        };
        let response = Response::builder().header("content-type", "application/grpc");
        response.header("grpc-status", status).body(Body::empty()).unwrap()
    }

    fn refuse_request(&self, _: &Request) -> Response<Body> {
        hapax_net::problem::overloaded().into_response()
    }

    fn replace_response(&self, _: &Response<Body>) -> Response<Body> {
        hapax_net::problem::overloaded().into_response()
    }
}

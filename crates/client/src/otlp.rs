//! Traces to a collector: OTLP over HTTP or over gRPC, in protobuf.
//!
//! An export over gRPC is one request of HTTP/2 with a message of five bytes more, and a status in the trailers. That is written here:
//! a library for gRPC would be larger than all that traces take.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_observe::trace::{BATCH_MAX, Span, Tracer, encode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;

use crate::transport::connector_of;

/// How long spans are collected for one export.
const COLLECT: Duration = Duration::from_secs(1);
/// Timeout of one export; its spans are lost then.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a process waits for the last export.
const FINISH_MAX: Duration = Duration::from_secs(3);
/// Where collectors take traces over HTTP.
const HTTP_PATH: &str = "/v1/traces";
/// The method of collectors that takes traces over gRPC.
const GRPC_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// OpenTelemetry's variable that names the protocol where the address does not.
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
/// Maximum response of a collector; it is an error of a few words, or nothing.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;

/// Why a collector's address is not usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// It is no address.
    #[error(
        "{0:?} is not a collector's address; write it as http://127.0.0.1:4318, or grpc://127.0.0.1:4317 for gRPC"
    )]
    Address(String),
    /// The machine's certificates cannot be read.
    #[error("{0}")]
    Certificates(std::io::Error),
}

/// The task that exports the spans of a tracer.
pub struct Exporter(tokio::task::JoinHandle<()>);

impl Exporter {
    /// Waits until the last spans are exported, at most three seconds. The tracer has to be dropped before.
    pub async fn finish(self) {
        let _ = tokio::time::timeout(FINISH_MAX, self.0).await;
    }
}

/// A collector.
pub struct OtlpEndpoint {
    uri: http::Uri,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    service: String,
    grpc: bool,
}

impl OtlpEndpoint {
    /// The collector at a base address, as in `OTEL_EXPORTER_OTLP_ENDPOINT`; `service` is the name under which spans appear.
    /// `http://` and `https://` mean OTLP over HTTP, or over gRPC if `OTEL_EXPORTER_OTLP_PROTOCOL` is `grpc`; `grpc://` and
    /// `grpcs://` (with TLS) mean gRPC.
    pub fn new(endpoint: &str, service: &str) -> Result<Self, ExportError> {
        Self::with_protocol(endpoint, service, std::env::var(PROTOCOL).is_ok_and(|name| name == "grpc"))
    }

    fn with_protocol(endpoint: &str, service: &str, grpc: bool) -> Result<Self, ExportError> {
        let bad = || ExportError::Address(endpoint.to_owned());
        let base = endpoint.trim_end_matches('/');
        let (scheme, rest) = base.split_once("://").ok_or_else(bad)?;
        let (scheme, grpc) = match scheme {
            "http" | "https" => (scheme, grpc),
            "grpc" => ("http", true),
            "grpcs" => ("https", true),
            _ => return Err(bad()),
        };
        let path = if grpc { GRPC_PATH } else { HTTP_PATH };
        let rest = rest.strip_suffix(path).unwrap_or(rest);
        let uri: http::Uri = format!("{scheme}://{rest}{path}").parse().map_err(|_| bad())?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(bad());
        }
        let connector = connector_of(&uri, TIMEOUT, grpc).map_err(ExportError::Certificates)?;
        let client = Client::builder(TokioExecutor::new()).http2_only(grpc).build(connector);
        Ok(Self { uri, client, service: service.to_owned(), grpc })
    }

    /// A tracer of this share of messages (0 to 1) whose spans are exported by a task of this runtime, until the tracer is
    /// dropped.
    pub fn trace(self, sampled: f64) -> (Arc<Tracer>, Exporter) {
        let (tracer, spans) = Tracer::new(sampled);
        (Arc::new(tracer), Exporter(tokio::spawn(self.export_all(spans))))
    }

    async fn export_all(self, mut spans: mpsc::Receiver<Span>) {
        let mut batch = Vec::new();
        let mut failing = false;
        while spans.recv_many(&mut batch, BATCH_MAX).await > 0 {
            // A few spans wait for others; the end of the tracer ends the wait.
            let deadline = tokio::time::Instant::now() + COLLECT;
            while batch.len() < BATCH_MAX {
                match tokio::time::timeout_at(deadline, spans.recv()).await {
                    Ok(Some(span)) => batch.push(span),
                    Ok(None) | Err(_) => break,
                }
            }
            let sent = self.export(&batch).await;
            match &sent {
                Err(error) if !failing => {
                    tracing::warn!(error, endpoint = %self.uri, "traces cannot be exported");
                }
                Ok(()) if failing => tracing::info!(endpoint = %self.uri, "traces are exported again"),
                _ => {}
            }
            failing = sent.is_err();
            batch.clear();
        }
    }

    async fn export(&self, spans: &[Span]) -> Result<(), String> {
        let message = encode(&self.service, spans);
        let request = http::Request::post(self.uri.clone());
        let (request, body) = if self.grpc {
            let request = request.header("content-type", "application/grpc").header("te", "trailers");
            (request, grpc_frame(&message).ok_or("too many spans for one export")?)
        } else {
            (request.header("content-type", "application/x-protobuf"), message)
        };
        let request = request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
        match tokio::time::timeout(TIMEOUT, self.request(request)).await {
            Ok(answered) => answered,
            Err(_) => Err("no response in time".to_owned()),
        }
    }

    async fn request(&self, request: http::Request<Full<Bytes>>) -> Result<(), String> {
        let response = self.client.request(request).await.map_err(|error| error.to_string())?;
        let (head, body) = response.into_parts();
        if !head.status.is_success() {
            return Err(format!("the collector answers {}", head.status));
        }
        if !self.grpc {
            return Ok(());
        }
        let body =
            Limited::new(body, RESPONSE_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
        // A response without a message has its status in the head.
        let status = |name: &str| {
            let trailers = body.trailers().and_then(|trailers| trailers.get(name));
            trailers.or_else(|| head.headers.get(name)).and_then(|value| value.to_str().ok())
        };
        match status("grpc-status") {
            Some("0") => Ok(()),
            Some(code) => Err(format!(
                "the collector answers gRPC status {code}: {}",
                status("grpc-message").unwrap_or("")
            )),
            None => Err("the collector does not speak gRPC".to_owned()),
        }
    }
}

/// A message as gRPC sends it: uncompressed, with its length.
fn grpc_frame(message: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(message.len()).ok()?;
    let mut frame = Vec::with_capacity(5 + message.len());
    frame.push(0);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(message);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Mutex;

    use http::{HeaderMap, Request, Response, Version};
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use hyper_util::server::conn::auto;

    use super::*;

    type Taken = Arc<Mutex<Vec<(http::request::Parts, Bytes)>>>;

    /// A collector that answers with these trailers, and what it was sent.
    async fn collector(trailers: &'static [(&'static str, &'static str)]) -> (String, Taken) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let taken = Taken::default();
        let kept = taken.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let kept = kept.clone();
                let serve = service_fn(move |request: Request<Incoming>| {
                    let kept = kept.clone();
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.unwrap().to_bytes();
                        kept.lock().unwrap().push((head, body));
                        let mut map = HeaderMap::new();
                        for (name, value) in trailers {
                            map.insert(*name, value.parse().unwrap());
                        }
                        let body = Full::new(Bytes::new()).with_trailers(async move { Some(Ok(map)) });
                        Ok::<_, Infallible>(Response::new(body))
                    }
                });
                tokio::spawn(async move {
                    let serving = auto::Builder::new(TokioExecutor::new());
                    serving.serve_connection(TokioIo::new(stream), serve).await.unwrap();
                });
            }
        });
        (address, taken)
    }

    fn span() -> Span {
        let (_, mut spans) = {
            let (tracer, spans) = Tracer::new(1.0);
            let context = tracer.begin(None).unwrap();
            tracer.finish(Span {
                context,
                parent: None,
                links: Vec::new(),
                name: "send jobs".to_owned(),
                kind: hapax_observe::trace::SpanKind::Producer,
                start_ns: 1,
                end_ns: 2,
                attributes: Vec::new(),
                error: None,
            });
            (tracer, spans)
        };
        spans.try_recv().unwrap()
    }

    #[tokio::test]
    async fn an_export_over_grpc_is_a_call_of_the_collectors_method() {
        let (address, taken) = collector(&[("grpc-status", "0")]).await;
        let spans = [span()];
        for (url, by_variable) in [(format!("grpc://{address}"), false), (format!("http://{address}/"), true)]
        {
            let endpoint = OtlpEndpoint::with_protocol(&url, "shop", by_variable).unwrap();
            assert_eq!(endpoint.export(&spans).await, Ok(()));
            let (head, body) = taken.lock().unwrap().pop().unwrap();
            assert_eq!((head.version, head.uri.path()), (Version::HTTP_2, GRPC_PATH));
            assert_eq!(
                (&head.headers["content-type"], &head.headers["te"]),
                (&"application/grpc".parse().unwrap(), &"trailers".parse().unwrap())
            );
            let message = encode("shop", &spans);
            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
            assert_eq!(body[..], [&[0][..], &length[..], &message[..]].concat());
        }
        let endpoint = OtlpEndpoint::with_protocol(&format!("http://{address}"), "shop", false).unwrap();
        assert_eq!(endpoint.export(&spans).await, Ok(()));
        let (head, body) = taken.lock().unwrap().pop().unwrap();
        assert_eq!((head.version, head.uri.path()), (Version::HTTP_11, HTTP_PATH));
        assert_eq!(body[..], encode("shop", &spans));
    }

    #[tokio::test]
    async fn a_refusal_over_grpc_is_told() {
        let (address, _) = collector(&[("grpc-status", "14"), ("grpc-message", "busy")]).await;
        let endpoint = OtlpEndpoint::new(&format!("grpc://{address}"), "shop").unwrap();
        let refused = endpoint.export(&[span()]).await.unwrap_err();
        assert_eq!(refused, "the collector answers gRPC status 14: busy");
        let (address, _) = collector(&[]).await;
        let endpoint = OtlpEndpoint::new(&format!("grpc://{address}"), "shop").unwrap();
        assert_eq!(endpoint.export(&[span()]).await.unwrap_err(), "the collector does not speak gRPC");
    }

    #[test]
    fn addresses() {
        for bad in ["", "127.0.0.1:4317", "grpc://", "ftp://host", "http:///v1/traces"] {
            let error = OtlpEndpoint::with_protocol(bad, "shop", false).err().map(|error| error.to_string());
            assert!(error.is_some_and(|error| error.contains("grpc://127.0.0.1:4317")), "{bad:?}");
        }
        let uri = |text: &str| OtlpEndpoint::with_protocol(text, "shop", false).unwrap().uri.to_string();
        assert_eq!(uri("http://c:4318/"), "http://c:4318/v1/traces");
        assert_eq!(uri("http://c:4318/v1/traces"), "http://c:4318/v1/traces");
        assert_eq!(uri("grpc://c:4317"), format!("http://c:4317{GRPC_PATH}"));
    }
}

//! Traces to a collector: OTLP over HTTP, in protobuf.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_observe::trace::{BATCH_MAX, Span, Tracer, encode};
use http_body_util::Full;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;

use crate::transport::connector;

/// How long spans are collected for one export.
const COLLECT: Duration = Duration::from_secs(1);
/// Timeout of one export; its spans are lost then.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a process waits for the last export.
const FINISH_MAX: Duration = Duration::from_secs(3);
/// Where collectors take traces.
const PATH: &str = "/v1/traces";

/// Why a collector's address is not usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// It is no address.
    #[error("{0:?} is not a collector's address; write it as http://127.0.0.1:4318")]
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
}

impl OtlpEndpoint {
    /// The collector at a base address, as in `OTEL_EXPORTER_OTLP_ENDPOINT`; `service` is the name under which spans appear.
    pub fn new(endpoint: &str, service: &str) -> Result<Self, ExportError> {
        let bad = || ExportError::Address(endpoint.to_owned());
        let base = endpoint.trim_end_matches('/');
        let text = if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") };
        let uri: http::Uri = text.parse().map_err(|_| bad())?;
        if uri.host().is_none() || !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(bad());
        }
        let connector = connector(&uri, TIMEOUT).map_err(ExportError::Certificates)?;
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { uri, client, service: service.to_owned() })
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
        let request = http::Request::post(self.uri.clone())
            .header("content-type", "application/x-protobuf")
            .body(Full::new(Bytes::from(encode(&self.service, spans))))
            .map_err(|error| error.to_string())?;
        match tokio::time::timeout(TIMEOUT, self.client.request(request)).await {
            Ok(Ok(response)) if response.status().is_success() => Ok(()),
            Ok(Ok(response)) => Err(format!("the collector answers {}", response.status())),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no response in time".to_owned()),
        }
    }
}

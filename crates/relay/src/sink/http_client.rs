//! HTTP requests of sinks.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::SinkError;

/// Maximum bytes of a response that are read.
const RESPONSE_BYTES_MAX: usize = 256 * 1024;
/// How long an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// Why there is no response.
#[derive(Debug)]
pub enum NoResponse {
    /// The request did not reach the server.
    Unreachable(String),
    /// It may have.
    Lost(String),
}

#[derive(Clone)]
pub struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    timeout: Duration,
}

impl Http {
    /// A client for one endpoint.
    pub fn new(endpoint: &Uri, timeout: Duration) -> Result<Self, SinkError> {
        let connector = hapax_client::connector(endpoint, timeout.min(Duration::from_secs(5)));
        let connector = connector.map_err(|error| SinkError(format!("{endpoint}: {error}")))?;
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Ok(Self { client, timeout })
    }

    /// Sends a request and reads its response.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), NoResponse> {
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| {
                let text = chain(&error);
                if error.is_connect() { NoResponse::Unreachable(text) } else { NoResponse::Lost(text) }
            })?;
            let status = response.status();
            let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
            // The status says it all; a body that is too long or breaks off is left.
            Ok((status, body.map(http_body_util::Collected::to_bytes).unwrap_or_default()))
        };
        let late = || NoResponse::Lost(format!("no response within {} ms", self.timeout.as_millis()));
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(|_| Err(late()))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The beginning of a response's body, for error messages.
pub fn excerpt(body: &[u8]) -> String {
    String::from_utf8_lossy(body).chars().filter(|char| !char.is_control()).take(200).collect()
}

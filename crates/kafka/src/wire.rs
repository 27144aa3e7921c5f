//! Requests to Kafka brokers: each has a time limit, each response a maximum size.
//!
//! A connection carries one request at a time. A call takes a connection out of the pool and returns it only after a
//! complete response, so a call that failed, timed out or was cancelled closes its connection, and no later call can
//! read its response.

mod api;
mod bounded;
mod cluster;
mod connection;
mod error;
mod sasl;
mod tls;

pub use api::Call;
pub use cluster::{Cluster, CoordinatorKind, Leader, Lookup};
pub use connection::{Connection, Versions};
pub use error::WireError;
pub use sasl::{Sasl, SaslMechanism};
pub use tls::Tls;

use std::time::Duration;

use kafka_protocol::protocol::StrBytes;

/// How brokers are reached.
#[derive(Debug, Clone)]
pub struct Connect {
    /// Addresses `host:port` of some brokers of the cluster.
    pub bootstrap: Vec<String>,
    /// The name of this client in the broker's log and quotas.
    pub client_id: String,
    /// Encryption. `None`: plain TCP.
    pub tls: Option<Tls>,
    /// Authentication. `None`: none.
    pub sasl: Option<Sasl>,
    /// Bound of a connection with its TLS and SASL handshakes. Default 10 s.
    pub connect_timeout: Duration,
    /// Bound of one request and its response. Default 10 s.
    pub request_timeout: Duration,
    /// Maximum size of a response. Default 4 MiB. Memory for what it claims to have is bounded by this, see `wire/bounded.rs`.
    pub response_bytes_max: usize,
    /// How long the partitions and leaders of a topic are known before a broker is asked again. Default 5 minutes. An error of a
    /// leader asks at once.
    pub metadata_age_max: Duration,
}

impl Connect {
    /// Plain TCP, with the default bounds.
    ///
    /// ```
    /// let connect = hapax_kafka::wire::Connect::plain(["localhost:9092"]);
    /// assert_eq!(connect.bootstrap, ["localhost:9092"]);
    /// ```
    pub fn plain<A: Into<String>>(bootstrap: impl IntoIterator<Item = A>) -> Self {
        Self {
            bootstrap: bootstrap.into_iter().map(Into::into).collect(),
            client_id: "hapax".to_owned(),
            tls: None,
            sasl: None,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
            response_bytes_max: 4 << 20,
            metadata_age_max: Duration::from_mins(5),
        }
    }
}

/// A text as the codec wants it.
pub(crate) fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// Waits between attempts: 5 ms to 1 s, doubled each time, with jitter.
#[derive(Debug)]
pub(crate) struct Backoff {
    wait_ms: u64,
}

impl Backoff {
    const WAIT_MS_MAX: u64 = 1_000;

    pub fn new() -> Self {
        Self { wait_ms: 5 }
    }

    pub async fn wait(&mut self) {
        let jittered = self.wait_ms / 2 + fastrand::u64(0..=self.wait_ms / 2);
        self.wait_ms = (self.wait_ms * 2).min(Self::WAIT_MS_MAX);
        tokio::time::sleep(Duration::from_millis(jittered)).await;
    }
}

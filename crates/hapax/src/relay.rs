//! Relays by URL: from an outbox to a sink.
//!
//! ```no_run
//! # async fn example() -> Result<(), hapax::Error> {
//! use hapax::relay::{self, RelayConfig};
//!
//! let config = RelayConfig {
//!     from: Some("postgres://localhost/shop".to_owned()),
//!     to: Some("http://127.0.0.1:9324".to_owned()),
//!     queue: Some("orders.fifo".parse()?),
//!     ..RelayConfig::default()
//! };
//! let relay = relay::open(&config, None, None).await?;
//! relay.run(std::future::pending()).await?;
//! # Ok(())
//! # }
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::QueueName;
use hapax_core::outbox::{OutboxStore, Publisher};
use hapax_core::store::SharedStore;
use hapax_observe::trace::{TracedPublisher, Tracer};
use serde::{Deserialize, Serialize, Serializer};

pub use hapax_core::outbox::{NewOutboxMessage, RouteStatus, SinkDedup, SinkDescription};
pub use hapax_relay::sink::{
    NatsSink, QueueSink, SinkError, SqsKey, SqsSink, WebhookOptions, WebhookSink, webhook,
};
pub use hapax_relay::{Relay, RelayCounts, RelayOptions, RelayWatch};

use crate::{Error, Hapax, StoreUrl, without_secrets};

/// How a URL of a webhook begins, before `http://` or `https://`.
const WEBHOOK: &str = "webhook+";
/// How a URL of an SQS queue begins.
const SQS: &str = "sqs+";
/// How the URL of a NATS server begins.
const NATS: &str = "nats://";
/// How the URLs of Kafka clusters begin, without and with TLS.
const KAFKA: [&str; 2] = ["kafka://", "kafkas://"];
/// How the URL of an outbox in a SQLite file begins.
const SQLITE: &str = "sqlite:";

/// The variable with the secret of a webhook's signature.
pub const WEBHOOK_SECRET: &str = "HAPAX_WEBHOOK_SECRET";

/// A relay of one route, as it is configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelayConfig {
    /// The route's name: what it has published is remembered under it. Relays with the same name share the work.
    pub name: String,
    /// The outbox: `postgres://HOST/DATABASE` or `sqlite:PATH`; the server's own store if it is not given.
    #[serde(serialize_with = "shown", skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The sink: a store or server with a queue, `webhook+https://HOST/PATH`, `sqs+https://HOST/ACCOUNT/QUEUE`, or
    /// `nats://HOST/PREFIX`, or `kafka://HOST/PREFIX`; the server's own store if it is not given.
    #[serde(serialize_with = "shown", skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The queue, if the sink is a store or server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// Patterns of the topics; `*` stands for any characters.
    pub topics: Vec<String>,
    /// A file with the secret of a webhook's signature; `HAPAX_WEBHOOK_SECRET` if it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<PathBuf>,
    /// How long the buckets of a relay that does not answer stay its own, in milliseconds; 1,000 to 600,000.
    pub lease_ms: u64,
    /// After how many failed attempts a message is parked; 0: never.
    pub max_attempts: u32,
    /// The relay is not ready when it has made no progress for this long, in milliseconds; 1,000 to 3,600,000.
    pub stalled_ms: u64,
}

#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn shown<S: Serializer>(url: &Option<String>, to: S) -> Result<S::Ok, S::Error> {
    url.as_deref().map(without_secrets).serialize(to)
}

impl Default for RelayConfig {
    fn default() -> Self {
        let options = RelayOptions::route("default");
        Self {
            name: options.route,
            from: None,
            to: None,
            queue: None,
            topics: options.topics,
            secret_file: None,
            lease_ms: options.lease.as_millis() as u64,
            max_attempts: options.retry.max_attempts,
            stalled_ms: options.stalled.as_millis() as u64,
        }
    }
}

impl RelayConfig {
    /// What is wrong with it, as the field and a sentence.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let name = &self.name;
        if name.is_empty() || name.len() > 80 || name.chars().any(char::is_control) {
            found.push(("name", format!("name: {name:?} is not 1 to 80 bytes without control characters")));
        }
        if !(1_000..=600_000).contains(&self.lease_ms) {
            found.push((
                "lease_ms",
                format!("lease_ms: {} is out of range; use 1000 to 600000", self.lease_ms),
            ));
        }
        if !(1_000..=3_600_000).contains(&self.stalled_ms) {
            found.push((
                "stalled_ms",
                format!("stalled_ms: {} is out of range; use 1000 to 3600000", self.stalled_ms),
            ));
        }
        if self.topics.is_empty() {
            found.push(("topics", "topics: none would be published; leave it out for all".to_owned()));
        }
        let to = self.to.as_deref().unwrap_or_default();
        let is_queue = ![WEBHOOK, SQS, NATS].iter().chain(&KAFKA).any(|scheme| to.starts_with(scheme));
        if is_queue && self.queue.is_none() {
            found.push(("queue", "queue: a store or server needs the name of a queue".to_owned()));
        }
        if !is_queue && self.queue.is_some() {
            found.push(("queue", "queue: only a store or server has one".to_owned()));
        }
        found
    }

    fn options(&self) -> RelayOptions {
        let mut options = RelayOptions::route(&self.name).topics(self.topics.clone());
        options.lease = Duration::from_millis(self.lease_ms);
        options.retry = options.retry.attempts(self.max_attempts);
        options.stalled = Duration::from_millis(self.stalled_ms);
        options
    }
}

/// A relay as it is configured. What the configuration does not give is `outbox`, or a queue of `store`.
pub async fn open(
    config: &RelayConfig,
    outbox: Option<Arc<dyn OutboxStore>>,
    store: Option<SharedStore>,
) -> Result<Relay, Error> {
    open_traced(config, outbox, store, None).await
}

/// The same, with a span for each message that was enqueued in a recorded trace.
pub async fn open_traced(
    config: &RelayConfig,
    outbox: Option<Arc<dyn OutboxStore>>,
    store: Option<SharedStore>,
    tracer: Option<Arc<Tracer>>,
) -> Result<Relay, Error> {
    if let Some((_, problem)) = config.problems().into_iter().next() {
        return Err(SinkError(problem).into());
    }
    let outbox = match (&config.from, outbox) {
        (Some(url), _) => open_outbox(url).await?,
        (None, Some(outbox)) => outbox,
        (None, None) => return Err(SinkError("from: the outbox is missing".to_owned()).into()),
    };
    let mut sink = open_sink(config, store).await?;
    if let Some(tracer) = tracer {
        sink = Arc::new(TracedPublisher::new(sink, tracer));
    }
    Ok(Relay::new(outbox, sink, config.options()))
}

/// The outbox of a URL: `postgres://HOST/DATABASE` or `sqlite:PATH`.
pub async fn open_outbox(url: &str) -> Result<Arc<dyn OutboxStore>, Error> {
    if let Some(path) = url.strip_prefix(SQLITE) {
        return Ok(Arc::new(hapax_sqlite::SqliteOutbox::open(path)?));
    }
    match url.parse()? {
        StoreUrl::Postgres(url) => {
            let options = hapax_postgres::Options::default();
            let store = hapax_postgres::PostgresStore::open(&url, options).await;
            Ok(Arc::new(store.map_err(crate::OpenError::from)?.outbox()?))
        }
        other => {
            Err(SinkError(format!("{other} has no outbox; use postgres://HOST/DATABASE or sqlite:PATH"))
                .into())
        }
    }
}

/// The sink of a configuration; `store`: the one whose queue is meant if it names none.
pub async fn open_sink(
    config: &RelayConfig,
    store: Option<SharedStore>,
) -> Result<Arc<dyn Publisher>, Error> {
    let to = config.to.as_deref();
    if let Some(url) = to.and_then(|to| to.strip_prefix(WEBHOOK)) {
        let options = WebhookOptions { secret: webhook_secret(config)?, ..WebhookOptions::default() };
        return Ok(Arc::new(WebhookSink::new(url, &options)?));
    }
    if let Some(url) = to.and_then(|to| to.strip_prefix(SQS)) {
        return Ok(Arc::new(SqsSink::new(url, sqs_key()?)?));
    }
    if let Some(url) = to.filter(|to| to.starts_with(NATS)) {
        return Ok(Arc::new(NatsSink::open(url).await?));
    }
    if let Some(url) = to.filter(|to| KAFKA.iter().any(|scheme| to.starts_with(scheme))) {
        return open_kafka(url).await;
    }
    let queue =
        config.queue.clone().ok_or_else(|| SinkError("queue: the queue's name is missing".to_owned()))?;
    let (store, place) = match (to, store) {
        (Some(to), _) => (Hapax::open(to).await?.store().clone(), without_secrets(to)),
        (None, Some(store)) => (store, "this server".to_owned()),
        (None, None) => return Err(SinkError("to: the sink is missing".to_owned()).into()),
    };
    Ok(Arc::new(QueueSink::open(store, queue, &place).await?))
}

#[cfg(feature = "kafka")]
async fn open_kafka(url: &str) -> Result<Arc<dyn Publisher>, Error> {
    Ok(Arc::new(hapax_relay::sink::KafkaSink::open(url).await?))
}

#[cfg(not(feature = "kafka"))]
async fn open_kafka(_url: &str) -> Result<Arc<dyn Publisher>, Error> {
    let text = "to: this program was built without Kafka; build it with --features kafka";
    Err(SinkError(text.to_owned()).into())
}

fn webhook_secret(config: &RelayConfig) -> Result<Option<String>, SinkError> {
    let secret = match &config.secret_file {
        Some(file) => {
            let read = std::fs::read_to_string(file);
            Some(read.map_err(|error| SinkError(format!("secret_file {}: {error}", file.display())))?)
        }
        None => std::env::var(WEBHOOK_SECRET).ok(),
    };
    Ok(secret.map(|secret| secret.trim().to_owned()).filter(|secret| !secret.is_empty()))
}

fn sqs_key() -> Result<SqsKey, SinkError> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let needed =
        |name: &str| variable(name).ok_or_else(|| SinkError(format!("{name} is not set: SQS needs a key")));
    Ok(SqsKey {
        id: needed("AWS_ACCESS_KEY_ID")?,
        secret: needed("AWS_SECRET_ACCESS_KEY")?,
        session_token: variable("AWS_SESSION_TOKEN"),
        region: variable("AWS_REGION")
            .or_else(|| variable("AWS_DEFAULT_REGION"))
            .unwrap_or("us-east-1".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_named() {
        let fine = RelayConfig { queue: Some("q".parse().unwrap()), ..RelayConfig::default() };
        assert_eq!(fine.problems(), []);
        let webhook = RelayConfig { to: Some("webhook+http://x".to_owned()), ..RelayConfig::default() };
        assert_eq!(webhook.problems(), []);
        let kafka = RelayConfig { to: Some("kafka://x".to_owned()), ..RelayConfig::default() };
        assert_eq!(kafka.problems(), []);
        for (wrong, field) in [
            (RelayConfig { queue: None, ..fine.clone() }, "queue"),
            (RelayConfig { queue: fine.queue.clone(), ..webhook }, "queue"),
            (RelayConfig { queue: fine.queue.clone(), ..kafka }, "queue"),
            (RelayConfig { name: String::new(), ..fine.clone() }, "name"),
            (RelayConfig { lease_ms: 10, ..fine.clone() }, "lease_ms"),
            (RelayConfig { stalled_ms: 10, ..fine.clone() }, "stalled_ms"),
            (RelayConfig { topics: vec![], ..fine }, "topics"),
        ] {
            let problems = wrong.problems();
            assert!(problems.len() == 1 && problems[0].0 == field, "{field}: {problems:?}");
        }
    }
}

//! The configuration of `hapax serve`: the file, overridden by environment and flags.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hapax::embedded::{Options, StoreQuota};
use hapax::relay::RelayConfig;
use hapax::{AdminError, QueueConfig, QueueName, StoreUrl, postgres, redis, without_secrets};
use hapax_client::otlp::{Exporter, OtlpEndpoint};
use hapax_http::proxy::ProxyConfig;
use hapax_observe::trace::Tracer;
use hapax_server::config::{AuthConfig, KeyConfig, LimitsConfig, SqsConfig, TlsConfig};
use hapax_server::{ServerConfig, ServerError};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, DeserializeSeed, IntoDeserializer as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::logs::level_mistake;
use crate::config_file::Problem;
use crate::store::StoreOptions;

/// Replaces a secret in a printed configuration.
const REDACTED: &str = "(redacted)";

/// The whole configuration of `hapax serve`: the server's own sections, and those of the store and the logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Addresses to listen on: one, or a list.
    #[serde(deserialize_with = "one_or_more")]
    pub listen: Vec<SocketAddr>,
    /// The store of the messages.
    pub store: StoreConfig,
    /// Level and format of the logs.
    pub log: LogConfig,
    /// Where traces go.
    pub trace: TraceConfig,
    /// The certificate.
    pub tls: Option<TlsConfig>,
    /// Keys and their rights.
    pub auth: AuthConfig,
    /// Limits on connections and requests.
    pub limits: LimitsConfig,
    /// Account and region, as AWS SDKs see them.
    pub sqs: SqsConfig,
    /// Queues that are created, or changed to this configuration, at start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queue: Vec<DeclaredQueue>,
    /// Idempotency proxies that run in the same process, with the server's store as their ledger.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub proxy: Vec<ProxyConfig>,
    /// Relays that run in the same process, from an outbox to a sink.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub relay: Vec<RelayConfig>,
}

impl Default for Config {
    fn default() -> Self {
        let ServerConfig { listen, tls, auth, limits, sqs } = ServerConfig::default();
        let (store, log) = (StoreConfig::default(), LogConfig::default());
        Self {
            listen,
            store,
            log,
            trace: TraceConfig::default(),
            tls,
            auth,
            limits,
            sqs,
            queue: Vec::new(),
            proxy: Vec::new(),
            relay: Vec::new(),
        }
    }
}

/// The store of the messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// The store: `embedded:PATH`, `postgres://HOST/DATABASE`, or `redis://HOST`. It is printed without its password.
    #[serde(serialize_with = "serialize_without_secrets")]
    pub url: String,
    /// Options of the embedded store only.
    pub embedded: EmbeddedConfig,
    /// Options of the PostgreSQL store only.
    pub postgres: PostgresConfig,
    /// Options of the Redis store only. Its other options are parameters of the URL.
    pub redis: RedisConfig,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            url: "embedded:./hapax-data".to_owned(),
            embedded: EmbeddedConfig::default(),
            postgres: PostgresConfig::default(),
            redis: RedisConfig::default(),
        }
    }
}

/// What is printed is read by others: a password is left out. It can be given in `PGPASSWORD`, `REDISCLI_AUTH` or a file.
fn serialize_without_secrets<S: Serializer>(url: &str, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&without_secrets(url))
}

#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn serialize_some_without_secrets<S: Serializer>(url: &Option<String>, to: S) -> Result<S::Ok, S::Error> {
    url.as_deref().map(without_secrets).serialize(to)
}

impl StoreConfig {
    /// The options to open the store with.
    pub fn options(&self) -> StoreOptions {
        StoreOptions {
            embedded: self.embedded.options(),
            postgres: self.postgres.options(),
            redis: self.redis.options(),
            tracer: None,
        }
    }

    /// Whether the URL names a PostgreSQL database.
    pub fn is_postgres(&self) -> bool {
        matches!(self.url.parse(), Ok(StoreUrl::Postgres(_)))
    }

    /// The maximum count of open claims in one scope, in the section of the store that the URL names.
    pub fn in_doubt_per_scope_max(&mut self) -> &mut u64 {
        match self.url.parse() {
            Ok(StoreUrl::Postgres(_)) => &mut self.postgres.in_doubt_per_scope_max,
            Ok(StoreUrl::Redis(_)) => &mut self.redis.in_doubt_per_scope_max,
            _ => &mut self.embedded.in_doubt_per_scope_max,
        }
    }

    fn problems(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        let own = match self.url.parse() {
            Ok(StoreUrl::Embedded(_)) => "embedded",
            Ok(StoreUrl::Postgres(_)) => "postgres",
            Ok(StoreUrl::Redis(_)) => "redis",
            _ => {
                let problem = format!(
                    "store.url: {:?} names no store; use embedded:PATH, postgres://HOST/DATABASE or redis://HOST",
                    without_secrets(&self.url)
                );
                return vec![Problem::at("store.url", problem)];
            }
        };
        // An option of another kind would be ignored, and its user would not notice.
        let kinds = [("embedded", "embedded"), ("postgres", "PostgreSQL"), ("redis", "Redis")];
        for (other, kind) in kinds.into_iter().filter(|(section, _)| *section != own) {
            for field in self.changed_fields(other) {
                let path = format!("store.{other}.{field}");
                let problem =
                    format!("{path}: only the {kind} store has it, and store.url names another one");
                found.push(Problem::at(path, problem));
            }
        }
        let claims = [
            ("embedded", self.embedded.in_doubt_per_scope_max),
            ("postgres", self.postgres.in_doubt_per_scope_max),
            ("redis", self.redis.in_doubt_per_scope_max),
        ];
        for (section, _) in claims.into_iter().filter(|(_, max)| *max == 0) {
            let path = format!("store.{section}.in_doubt_per_scope_max");
            found.push(Problem::at(
                path.clone(),
                format!("{path}: 0 would refuse every claim; use at least 1"),
            ));
        }
        found
    }

    /// The fields of a section that differ from their defaults.
    fn changed_fields(&self, section: &str) -> Vec<String> {
        let fields = |config: &Self| -> toml::Table {
            let table = toml::Table::try_from(config).unwrap_or_default();
            table.get(section).and_then(toml::Value::as_table).cloned().unwrap_or_default()
        };
        let (ours, defaults) = (fields(self), fields(&Self::default()));
        ours.into_iter()
            .filter(|(field, value)| defaults.get(field) != Some(value))
            .map(|(field, _)| field)
            .collect()
    }
}

/// Connections of the PostgreSQL store. A parameter of the URL beats the option of its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PostgresConfig {
    /// Maximum count of connections of this server, in addition to one that listens for changes; 2 to 1,000.
    pub connections_max: usize,
    /// Time to wait for a connection, in milliseconds; 100 to 60,000.
    pub connect_timeout_ms: u64,
    /// Time to wait for an operation, in milliseconds; 1,000 to 300,000.
    pub operation_timeout_ms: u64,
    /// The connections lead to a pooler that assigns a session per transaction, for example PgBouncer.
    pub pooler: bool,
    /// A URL that does not lead through the pooler, for the connection that listens for changes.
    #[serde(serialize_with = "serialize_some_without_secrets")]
    pub listen_url: Option<String>,
    /// A file whose first line is the password; the URL's password, else `PGPASSWORD`, if `None`.
    pub password_file: Option<PathBuf>,
    /// Applies missing migrations of the schema at start.
    pub migrate: bool,
    /// Maximum count of open claims in one scope of the ledger, held or in doubt; at least 1.
    pub in_doubt_per_scope_max: u64,
}

impl Default for PostgresConfig {
    fn default() -> Self {
        let options = postgres::Options::default();
        Self {
            connections_max: options.connections_max,
            connect_timeout_ms: options.connect_timeout.as_millis() as u64,
            operation_timeout_ms: options.operation_timeout.as_millis() as u64,
            pooler: options.pooler,
            listen_url: options.listen_url,
            password_file: options.password_file,
            migrate: options.migrate,
            in_doubt_per_scope_max: options.in_doubt_per_scope_max,
        }
    }
}

impl PostgresConfig {
    /// The options to open the store with.
    pub fn options(&self) -> postgres::Options {
        postgres::Options {
            connections_max: self.connections_max,
            connect_timeout: Duration::from_millis(self.connect_timeout_ms),
            operation_timeout: Duration::from_millis(self.operation_timeout_ms),
            pooler: self.pooler,
            listen_url: self.listen_url.clone(),
            password_file: self.password_file.clone(),
            migrate: self.migrate,
            in_doubt_per_scope_max: self.in_doubt_per_scope_max,
            ..postgres::Options::default()
        }
    }
}

/// Limits of the Redis store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RedisConfig {
    /// Maximum count of open claims in one scope of the ledger, held or in doubt; at least 1.
    pub in_doubt_per_scope_max: u64,
}

impl Default for RedisConfig {
    fn default() -> Self {
        Self { in_doubt_per_scope_max: redis::Options::default().in_doubt_per_scope_max }
    }
}

impl RedisConfig {
    /// The options to open the store with.
    pub fn options(&self) -> redis::Options {
        redis::Options { in_doubt_per_scope_max: self.in_doubt_per_scope_max, ..redis::Options::default() }
    }
}

/// Limits and exceptions of the embedded store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EmbeddedConfig {
    /// Free space on the disk, in bytes, below which sends are refused.
    pub reserve_bytes: u64,
    /// Maximum number of messages in all queues together.
    pub messages_max: Option<u64>,
    /// Maximum bytes of bodies and attributes in all queues together.
    pub bytes_max: Option<u64>,
    /// Maximum memory for messages, in bytes.
    pub memory_bytes_max: Option<u64>,
    /// Maximum count of open claims in one scope of the ledger, held or in doubt; at least 1.
    pub in_doubt_per_scope_max: u64,
    /// Opens a store on a network file system, whose locks and syncs cannot be relied on.
    pub allow_network_file_system: bool,
    /// The only folder that the server writes backups into; `backups` in the store's folder if `None`.
    pub backup_folder: Option<PathBuf>,
}

impl Default for EmbeddedConfig {
    fn default() -> Self {
        let Options { quota, reserve_bytes, in_doubt_per_scope_max, allow_network_file_system, .. } =
            Options::default();
        let StoreQuota { messages_max, bytes_max, memory_bytes_max } = quota;
        Self {
            reserve_bytes,
            messages_max,
            bytes_max,
            memory_bytes_max,
            in_doubt_per_scope_max,
            allow_network_file_system,
            backup_folder: None,
        }
    }
}

impl EmbeddedConfig {
    /// The options to open the store with.
    pub fn options(&self) -> Options {
        let Self {
            reserve_bytes,
            messages_max,
            bytes_max,
            memory_bytes_max,
            in_doubt_per_scope_max,
            allow_network_file_system,
            // Opening needs no backups.
            backup_folder: _,
        } = *self;
        let quota = StoreQuota { messages_max, bytes_max, memory_bytes_max };
        let bounds = Options { quota, reserve_bytes, in_doubt_per_scope_max, ..Options::default() };
        Options { allow_network_file_system, ..bounds }
    }
}

/// Level and format of the logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Text for people or JSON for collectors.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`; or by module: `info,hapax_server=debug`.
    pub level: String,
}

/// Traces of messages, to an OpenTelemetry collector.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TraceConfig {
    /// The collector's address for OTLP over HTTP, as `http://127.0.0.1:4318`. Default none: no traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Of a thousand messages that come without a context, how many are traced: 0 to 1,000. Default 10.
    pub sampled_per_mille: u16,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { endpoint: None, sampled_per_mille: 10 }
    }
}

impl TraceConfig {
    pub fn problems(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        if self.sampled_per_mille > 1_000 {
            let problem = format!("trace.sampled_per_mille: {} is more than 1000", self.sampled_per_mille);
            found.push(Problem::at("trace.sampled_per_mille", problem));
        }
        if let Some(Err(error)) = self.endpoint.as_deref().map(|url| OtlpEndpoint::new(url, "hapax")) {
            found.push(Problem::at("trace.endpoint", format!("trace.endpoint: {error}")));
        }
        found
    }

    /// The tracer, if traces are wanted, and its exporter.
    pub fn tracer(&self, service: &str) -> anyhow::Result<Option<(Arc<Tracer>, Exporter)>> {
        let Some(endpoint) = &self.endpoint else { return Ok(None) };
        let collector = OtlpEndpoint::new(endpoint, service)?;
        Ok(Some(collector.trace(f64::from(self.sampled_per_mille) / 1_000.0)))
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// The format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// A queue declared in the configuration: a name and the fields of its policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredQueue {
    /// Its name.
    pub name: QueueName,
    /// Its policy.
    pub config: QueueConfig,
}

// Written by hand: `flatten` would accept unknown keys, and lose the line number of a wrong value.
impl<'de> Deserialize<'de> for DeclaredQueue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Queue;
        impl<'de> Visitor<'de> for Queue {
            type Value = DeclaredQueue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table with the queue's name")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut fields: M) -> Result<DeclaredQueue, M::Error> {
                let mut name = None;
                let policy = PolicyFields { fields: &mut fields, name: &mut name, kind: Kind::Unknown };
                let config = QueueConfig::deserialize(MapAccessDeserializer::new(policy))?;
                let name = name.ok_or_else(|| de::Error::missing_field("name"))?;
                Ok(DeclaredQueue { name, config })
            }
        }
        from.deserialize_map(Queue)
    }
}

/// The fields of a declared queue: the name is taken out, and the kind, which follows from the name, is added.
struct PolicyFields<'a, M> {
    fields: &'a mut M,
    name: &'a mut Option<QueueName>,
    kind: Kind,
}

#[derive(PartialEq)]
enum Kind {
    /// Not seen in the file so far.
    Unknown,
    /// The next value is the kind that follows from the name.
    Implied,
    /// Seen in the file, or added from the name.
    Known,
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for PolicyFields<'_, M> {
    type Error = M::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, M::Error> {
        let mut seed = Some(seed);
        loop {
            let key = PolicyKey { seed: &mut seed, kind: &mut self.kind };
            match self.fields.next_key_seed(key)? {
                Some(Some(key)) => return Ok(Some(key)),
                Some(None) => *self.name = Some(self.fields.next_value()?),
                None => break,
            }
        }
        let is_fifo = self.name.as_ref().is_some_and(QueueName::is_fifo);
        match seed {
            Some(seed) if is_fifo && self.kind == Kind::Unknown => {
                self.kind = Kind::Implied;
                seed.deserialize("kind".into_deserializer()).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, M::Error> {
        if self.kind == Kind::Implied {
            self.kind = Kind::Known;
            return seed.deserialize("fifo".into_deserializer());
        }
        self.fields.next_value_seed(seed)
    }
}

/// A key of the policy; `None` for the name.
struct PolicyKey<'a, K> {
    seed: &'a mut Option<K>,
    kind: &'a mut Kind,
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for PolicyKey<'_, K> {
    type Value = Option<K::Value>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        let key = String::deserialize(from)?;
        if key == "kind" {
            *self.kind = Kind::Known;
        }
        match self.seed.take_if(|_| key != "name") {
            Some(seed) => seed.deserialize(key.into_deserializer()).map(Some),
            None => Ok(None),
        }
    }
}

impl Serialize for DeclaredQueue {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut table = toml::Table::new();
        table.insert("name".into(), self.name.as_str().into());
        table.extend(toml::Table::try_from(&self.config).map_err(serde::ser::Error::custom)?);
        table.serialize(to)
    }
}

fn one_or_more<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SocketAddr>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Addresses {
        One(String),
        More(Vec<String>),
    }
    let addresses = match Addresses::deserialize(from)? {
        Addresses::One(address) => vec![address],
        Addresses::More(addresses) => addresses,
    };
    addresses.iter().map(|address| parse_address(address).map_err(de::Error::custom)).collect()
}

/// An address with its port.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("{text:?} is no address; write it with its port, as 127.0.0.1:9324"))
}

impl Config {
    /// All problems with the values themselves, independent of the machine.
    pub fn problems(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        found.extend(self.store.problems());
        found.extend(level_problem(&self.log));
        found.extend(self.trace.problems());
        found.extend(redacted_problems(&self.auth.keys, "auth.keys"));
        found.extend(queue_problems(&self.queue));
        found.extend(proxy_problems(&self.proxy));
        found.extend(self.relay_problems());
        let own = self.listen.iter().map(|address| ("listen".to_owned(), *address));
        found.extend(address_problems(own, &self.proxy));
        found
    }

    fn relay_problems(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        for (at, relay) in self.relay.iter().enumerate() {
            for (field, problem) in relay.problems() {
                found.push(Problem::at(
                    format!("relay.{at}.{field}"),
                    format!("relay {}: {problem}", relay.name),
                ));
            }
            if relay.from.is_none() && !self.store.is_postgres() {
                let problem = format!(
                    "relay {}: from: the server's own store has no outbox; name a database",
                    relay.name
                );
                found.push(Problem::at(format!("relay.{at}"), problem));
            }
            if let Some(first) =
                self.relay[..at].iter().position(|other| other.name == relay.name && other.from == relay.from)
            {
                let path = |at: usize| format!("relay.{at}.name");
                let problem = format!("two relays are named {:?}: each would publish a part", relay.name);
                found.push(Problem::conflict(path(at), path(first), problem));
            }
        }
        found
    }

    /// All problems that also depend on this machine: secrets and certificates that cannot be read.
    pub fn machine_problems(&self) -> Vec<Problem> {
        let located = |error: &ServerError| match error {
            ServerError::Exposed(_) => "listen".to_owned(),
            ServerError::Tls { .. } => "tls".to_owned(),
            ServerError::Config { field, .. } => {
                let at = field.strip_prefix("auth.keys.");
                let at = at.and_then(|id| self.auth.keys.iter().position(|key| key.id == id));
                at.map_or_else(|| field.clone(), |at| format!("auth.keys.{at}"))
            }
            _ => String::new(),
        };
        let server = self.server().problems();
        let of_server = server.iter().map(|error| Problem::at(located(error), error));
        of_server.chain(certificate_problems(&self.proxy)).collect()
    }

    /// The server's part.
    pub fn server(&self) -> ServerConfig {
        ServerConfig {
            listen: self.listen.clone(),
            tls: self.tls.clone(),
            auth: self.auth.clone(),
            limits: self.limits.clone(),
            sqs: self.sqs.clone(),
        }
    }

    /// The configuration as an equivalent file; secrets are redacted.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        toml::to_string(self).context("the configuration cannot be written as TOML")
    }
}

/// Secrets that were left out when the configuration was printed.
pub fn redacted_problems(keys: &[KeyConfig], path: &str) -> Vec<Problem> {
    let redacted = |key: &KeyConfig| key.secret.as_ref().is_some_and(|key| key.expose() == REDACTED);
    let problem = |(at, key): (usize, &KeyConfig)| {
        let problem = format!("the secret of key {} was redacted; use secret_file or secret_env", key.id);
        Problem::at(format!("{path}.{at}"), problem)
    };
    keys.iter().enumerate().filter(|(_, key)| redacted(key)).map(problem).collect()
}

/// An unknown level.
pub fn level_problem(log: &LogConfig) -> Option<Problem> {
    level_mistake(&log.level).map(|problem| Problem::at("log.level", format!("log.level: {problem}")))
}

fn queue_problems(queues: &[DeclaredQueue]) -> Vec<Problem> {
    let mut found = Vec::new();
    for (at, DeclaredQueue { name, config }) in queues.iter().enumerate() {
        if let Some(first) = queues[..at].iter().position(|other| other.name == *name) {
            let path = |at: usize| format!("queue.{at}.name");
            found.push(Problem::conflict(path(at), path(first), format!("queue {name} is declared twice")));
        }
        match config.validate(name) {
            Ok(()) => {}
            Err(AdminError::Config { field, problem }) => {
                let message = format!("queue {name}: {field}: {problem}");
                found.push(Problem::at(format!("queue.{at}.{field}"), message));
            }
            Err(error) => found.push(Problem::at(format!("queue.{at}"), format!("queue {name}: {error}"))),
        }
    }
    found
}

/// Problems with each proxy, and conflicts between proxies.
pub fn proxy_problems(proxies: &[ProxyConfig]) -> Vec<Problem> {
    let mut found = Vec::new();
    for (at, proxy) in proxies.iter().enumerate() {
        let clashes = |other: &ProxyConfig| other.name == proxy.name && other.upstream != proxy.upstream;
        if let Some(first) = proxies[..at].iter().position(clashes) {
            let problem = format!(
                "two proxies before different services are both named {:?}; their keys would meet",
                proxy.name
            );
            let path = |at: usize| format!("proxy.{at}.name");
            found.push(Problem::conflict(path(at), path(first), problem));
        }
        if let Err(error) = proxy.validate() {
            let message = error.to_string();
            let field = message.split(':').next().unwrap_or_default();
            // Messages about a policy name its fields without the section.
            let policy = toml::Table::try_from(&proxy.policy).unwrap_or_default();
            let section = if policy.contains_key(field) { "policy." } else { "" };
            let path = format!("proxy.{at}.{section}{field}");
            found.push(Problem::at(path, format!("proxy {}: {message}", proxy.name)));
        }
    }
    found
}

/// Proxy certificates that cannot be read.
pub fn certificate_problems(proxies: &[ProxyConfig]) -> Vec<Problem> {
    let mut found = Vec::new();
    for (at, proxy) in proxies.iter().enumerate() {
        let mut files =
            proxy.tls.iter().flat_map(|tls| [("cert_file", &tls.cert_file), ("key_file", &tls.key_file)]);
        // Report only the first: if a folder is wrong, both files are.
        let unread = files.find_map(|(field, file)| Some((field, file, std::fs::File::open(file).err()?)));
        if let Some((field, file, error)) = unread {
            let message = format!("proxy {}: tls.{field} {}: {error}", proxy.name, file.display());
            found.push(Problem::at(format!("proxy.{at}.tls.{field}"), message));
        }
    }
    found
}

/// Addresses that are used twice. Port 0 (a free port) may be used any number of times.
pub fn address_problems(
    own: impl Iterator<Item = (String, SocketAddr)>,
    proxies: &[ProxyConfig],
) -> Vec<Problem> {
    let of_proxy = |(at, proxy): (usize, &ProxyConfig)| (format!("proxy.{at}.listen"), proxy.listen);
    let all: Vec<(String, SocketAddr)> = own.chain(proxies.iter().enumerate().map(of_proxy)).collect();
    let mut found = Vec::new();
    for (at, (path, address)) in all.iter().enumerate().filter(|(_, (_, address))| address.port() != 0) {
        if let Some((first, _)) = all[..at].iter().find(|(_, other)| other == address) {
            let problem = format!("{address} is listened on twice; give each its own port");
            found.push(Problem::conflict(path, first, problem));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file::{ConfigFile, Problems};

    const EXAMPLE: &str = include_str!("../../../../packaging/hapax.example.toml");

    fn parse(text: &str) -> Result<Config, Problems> {
        let (config, file) = ConfigFile::parse::<Config>(text, "hapax.toml")?;
        file.check(config.problems(), |_| false)?;
        Ok(config)
    }

    fn refused(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_example_file_holds_every_key_with_its_default() {
        assert_eq!(parse(EXAMPLE).unwrap(), Config::default());
        let mut defaults = toml::Table::try_from(Config::default()).unwrap();
        // An array of tables has no empty form; the example has its keys commented out.
        defaults["auth"].as_table_mut().unwrap().remove("keys");
        let example: toml::Table = EXAMPLE.parse().unwrap();
        assert_eq!(example, defaults, "a key is missing in the example, or has another value");
    }

    #[test]
    fn the_commented_keys_of_the_example_file_are_valid() {
        // Prose lines are `# text`, example lines `#key = value`. The sections of the stores exclude each other.
        let uncommented = |text: &str| {
            let line = |line: &str| match line.strip_prefix('#') {
                Some(code) if !code.starts_with(' ') => code.to_owned(),
                _ => line.to_owned(),
            };
            text.lines().map(line).collect::<Vec<_>>().join("\n")
        };
        let (before, rest) = EXAMPLE.split_once("[store.postgres]").unwrap();
        let (postgres, after) = rest.split_once("[log]").unwrap();
        let url = "[store]\nurl = \"postgres://db/shop\"\n[store.postgres]";
        let on_postgres = parse(&format!("{url}{}", uncommented(postgres))).unwrap().store.postgres;
        assert!(on_postgres.listen_url.is_some() && on_postgres.password_file.is_some(), "{on_postgres:?}");
        let config = parse(&uncommented(&format!("{before}[log]{after}"))).unwrap();
        assert!(config.tls.is_some() && config.store.embedded.messages_max.is_some(), "{config:?}");
        assert!(config.auth.keys.len() == 2 && config.queue.len() == 2, "{config:?}");
        assert_eq!(config.proxy[0].routes.len(), 1, "{config:?}");
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line_and_what_was_meant() {
        assert_eq!(refused("lissen = []"), "hapax.toml:1: unknown key `lissen`; did you mean `listen`?");
        let error = refused("[limits]\nread_timeout_ms = 1\nconections_max = 7\n");
        assert_eq!(error, "hapax.toml:3: unknown key `conections_max`; did you mean `connections_max`?");
        let error = refused("[[queue]]\nname = \"a\"\nlease = 7\n");
        assert!(error.ends_with("unknown key `lease`; did you mean `lease_ms`?"), "{error}");
        assert!(refused("[log]\nformat = \"jsn\"").contains("unknown value `jsn`; did you mean `json`?"));
        assert!(refused("zebra = 1").contains("known here: listen, store"), "{}", refused("zebra = 1"));
    }

    #[test]
    fn options_of_the_store_that_is_not_used_are_refused_and_its_password_is_not_printed() {
        let error = refused("[store]\nurl = \"postgres://db/shop\"\n[store.embedded]\nbytes_max = 7\n");
        assert!(error.contains("hapax.toml:4: store.embedded.bytes_max: only the embedded store"), "{error}");
        let error = refused("[store.postgres]\npooler = true\n");
        assert!(error.contains("hapax.toml:2: store.postgres.pooler: only the PostgreSQL store"), "{error}");
        let error = refused("[store]\nurl = \"mysql://ann:hunter2@db/shop\"\n");
        assert!(error.contains("postgres://HOST/DATABASE") && !error.contains("hunter2"), "{error}");
        let text = "[store]\nurl = \"postgres://ann:hunter2@db/shop?sslmode=require\"\n\
                    [store.postgres]\nlisten_url = \"postgres://ann:hunter2@direct/shop\"\n";
        let printed = parse(text).unwrap().to_toml().unwrap();
        assert!(printed.contains("postgres://ann@db/shop?sslmode=require"), "{printed}");
        assert!(printed.contains("postgres://ann@direct/shop") && !printed.contains("hunter2"), "{printed}");
    }

    #[test]
    fn a_bad_value_is_named() {
        let error = refused("[[queue]]\nname = \"a\"\nlease_ms = 99999999\n");
        assert!(error.contains("queue a: lease_ms: 99999999 is out of range"), "{error}");
        let error = refused("listen = \"localhost\"");
        assert!(error.contains("write it with its port"), "{error}");
    }

    #[test]
    fn a_printed_configuration_means_the_same_without_its_secrets() {
        let text = "listen = \"127.0.0.1:1\"\n[store.embedded]\nbytes_max = 7\n[[queue]]\nname = \"a.fifo\"\n\
                    dead_letter = { queue = \"b.fifo\" }\n\
                    [[auth.keys]]\nid = \"AK\"\nsecret_env = \"S\"\n";
        let config = parse(text).unwrap();
        let fifo = QueueConfig::fifo().dead_letters_to("b.fifo".parse().unwrap());
        assert_eq!(config.queue[0].config, fifo, "the name implies the kind, and the kind the defaults");
        assert_eq!(parse(&config.to_toml().unwrap()).unwrap(), config);

        let secret = parse("[[auth.keys]]\nid = \"AK\"\nsecret = \"hunter2\"\n").unwrap();
        let printed = secret.to_toml().unwrap();
        assert!(!printed.contains("hunter2"), "{printed}");
        assert!(refused(&printed).contains("key AK was redacted"));
    }
}

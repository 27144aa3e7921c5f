//! The server's configuration: every field with its meaning, unit and default. Unknown keys are rejected.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use crate::auth::Authenticator;
use crate::error::ServerError;
use crate::runtime::tls_acceptor;
use crate::sqs::Names;

/// All settings of the server, except those of its store.
///
/// ```
/// let config = hapax_server::ServerConfig::default();
/// assert_eq!(config.listen[0].to_string(), "127.0.0.1:9324");
/// assert!(config.auth.keys.is_empty());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Addresses to listen on. Any address other than loopback requires `auth.keys` (or `auth.insecure`). Default
    /// `127.0.0.1:9324`.
    pub listen: Vec<SocketAddr>,
    /// Serve HTTPS with this certificate. Default none: plain HTTP.
    pub tls: Option<TlsConfig>,
    /// Keys and their rights.
    pub auth: AuthConfig,
    /// Bounds on connections and requests.
    pub limits: LimitsConfig,
    /// How the server presents itself to AWS SDKs.
    pub sqs: SqsConfig,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 9324))],
            tls: None,
            auth: AuthConfig::default(),
            limits: LimitsConfig::default(),
            sqs: SqsConfig::default(),
        }
    }
}

impl ServerConfig {
    /// Every reason why a server would not start with this configuration, found before anything is opened or bound.
    /// Reads secrets and certificates.
    ///
    /// ```
    /// let mut config = hapax_server::ServerConfig::default();
    /// assert!(config.problems().is_empty());
    /// config.sqs.account = "12".into();
    /// config.listen = vec!["0.0.0.0:9324".parse().unwrap()];
    /// let codes: Vec<_> = config.problems().iter().map(|problem| problem.code()).collect();
    /// assert_eq!(codes, ["exposed-without-keys", "config"]);
    /// ```
    pub fn problems(&self) -> Vec<ServerError> {
        let mut found = Vec::new();
        if self.auth.keys.is_empty() && !self.auth.insecure {
            let exposed = self.listen.iter().filter(|address| !address.ip().is_loopback());
            found.extend(exposed.map(|address| ServerError::Exposed(*address)));
        }
        if self.listen.is_empty() {
            found.push(ServerError::Config {
                field: "listen".to_owned(),
                problem: "the list is empty; name at least one address".to_owned(),
            });
        }
        found.extend(self.tls.as_ref().and_then(|tls| tls_acceptor(tls).err()));
        found.extend(Authenticator::problems(&self.auth));
        found.extend(self.limits.problems());
        found.extend(Names::new(&self.sqs.account, &self.sqs.region).err());
        found
    }
}

/// The location of the certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// PEM file with the certificate chain; the server's own certificate comes first.
    pub cert_file: PathBuf,
    /// PEM file with the private key.
    pub key_file: PathBuf,
}

/// Keys and their rights.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Keys with which requests must be signed. Default none: on loopback any credentials are accepted.
    pub keys: Vec<KeyConfig>,
    /// Listen beyond loopback even without keys: anyone who can reach the port may do anything. Default off.
    pub insecure: bool,
    /// Host names (without port) that clients may use for a server without keys, besides the names of loopback; for
    /// example `host.docker.internal`. Other host names are refused, so that a web page cannot reach the server through
    /// its own name that resolves to this machine. Default none.
    pub allowed_hosts: Vec<String>,
}

/// One key and its rights. Give the secret in exactly one of `secret`, `secret_file` and `secret_env`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyConfig {
    /// The access key id: `aws_access_key_id` of AWS SDKs.
    pub id: String,
    /// The secret itself; prefer a file or the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<Secret>,
    /// A file that contains the secret; surrounding white space is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<PathBuf>,
    /// An environment variable that contains the secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_env: Option<String>,
    /// Queues that the key may use, with the wildcards `*` and `?`. Default all.
    #[serde(default = "everything")]
    pub queues: Vec<String>,
    /// Actions that the key may call, by SQS name (`SendMessage`, `Receive*`), with wildcards. Default all.
    #[serde(default = "everything")]
    pub actions: Vec<String>,
}

fn everything() -> Vec<String> {
    vec!["*".to_owned()]
}

/// A secret. `Debug` does not show it, and it is never serialized.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The secret itself, for signing.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(redacted)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str("(redacted)")
    }
}

/// Bounds on connections and requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Maximum number of connections. At the limit, the longest idle connection is closed for a new one. Default 4096.
    pub connections_max: usize,
    /// Maximum time for a request's head, a TLS handshake or a body to arrive, in milliseconds. Default 30,000.
    pub read_timeout_ms: u64,
    /// Maximum time that a connection may stay open without a request, in milliseconds. Default 120,000.
    pub idle_timeout_ms: u64,
    /// Maximum time for a request once it has arrived, in milliseconds; more than the longest poll of 20 s. Default
    /// 60,000.
    pub request_timeout_ms: u64,
    /// Maximum size of a request body, in bytes. A message of 1 MiB grows when it is escaped. Default 6 MiB.
    pub body_bytes_max: usize,
    /// Maximum bytes of arriving bodies that the server holds at once; above it, clients are told to retry. Default 256
    /// MiB.
    pub arriving_bytes_max: usize,
    /// Maximum time that a client may leave a response unread, in milliseconds. While `unread_bytes_max` is nearly
    /// reached, it is a tenth of this, and at most 3 s. Default 30,000.
    pub write_timeout_ms: u64,
    /// Maximum bytes of unread responses of all clients together. Above it, requests wait briefly and are then told to
    /// retry, and clients that read slowly are disconnected. Responses up to 256 KiB of requests that are under way when it
    /// is reached may use as much again; beyond that a response is cut off. Default 256 MiB.
    pub unread_bytes_max: usize,
    /// Maximum time that a shutdown waits for running requests, in milliseconds. Default 10,000.
    pub shutdown_timeout_ms: u64,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            read_timeout_ms: 30_000,
            idle_timeout_ms: 120_000,
            request_timeout_ms: 60_000,
            body_bytes_max: 6 * 1024 * 1024,
            arriving_bytes_max: 256 * 1024 * 1024,
            write_timeout_ms: 30_000,
            unread_bytes_max: 256 * 1024 * 1024,
            shutdown_timeout_ms: 10_000,
        }
    }
}

impl LimitsConfig {
    /// Limits of zero, which would refuse everything.
    fn problems(&self) -> Vec<ServerError> {
        let limits = [
            ("connections_max", self.connections_max as u64),
            ("read_timeout_ms", self.read_timeout_ms),
            ("idle_timeout_ms", self.idle_timeout_ms),
            ("request_timeout_ms", self.request_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("unread_bytes_max", self.unread_bytes_max as u64),
            ("body_bytes_max", self.body_bytes_max as u64),
            ("arriving_bytes_max", self.arriving_bytes_max as u64),
        ];
        let zero = limits.iter().filter(|(_, value)| *value == 0);
        let problem = |(field, _): &(&str, u64)| ServerError::Config {
            field: format!("limits.{field}"),
            problem: "0 would let nothing through; use 1 or more".to_owned(),
        };
        zero.map(problem).collect()
    }
}

/// How the server presents itself to AWS SDKs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SqsConfig {
    /// The account id in queue URLs and ARNs: 12 digits. Default `000000000000`.
    pub account: String,
    /// The region in ARNs. Requests signed for any region are accepted; all regions share one namespace. Default
    /// `us-east-1`.
    pub region: String,
    /// Refuse a second purge of a queue within this time, in milliseconds (SQS: 60,000). Maximum 300,000. Default 0:
    /// never refuse.
    pub purge_interval_ms: u64,
    /// Refuse to create a queue whose name was deleted within this time, in milliseconds (SQS: 60,000). Maximum
    /// 300,000. Default 0: never refuse.
    pub recreate_interval_ms: u64,
}

impl Default for SqsConfig {
    fn default() -> Self {
        Self {
            account: "000000000000".to_owned(),
            region: "us-east-1".to_owned(),
            purge_interval_ms: 0,
            recreate_interval_ms: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_never_shown() {
        let json = r#"{"auth":{"keys":[{"id":"AK","secret":"hunter2"}]}}"#;
        let config: ServerConfig = serde_json::from_str(json).unwrap();
        assert_eq!(config.auth.keys[0].secret.as_ref().unwrap().expose(), "hunter2");
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(!serde_json::to_string(&config).unwrap().contains("hunter2"));
    }

    #[test]
    fn limits_that_let_nothing_through_are_refused() {
        for field in ["connections_max", "idle_timeout_ms", "write_timeout_ms", "unread_bytes_max"] {
            let limits: LimitsConfig = serde_json::from_str(&format!(r#"{{"{field}":0}}"#)).unwrap();
            let problems: Vec<_> = limits.problems().iter().map(ToString::to_string).collect();
            assert!(problems.len() == 1 && problems[0].contains(field), "{field}: {problems:?}");
        }
        assert!(LimitsConfig::default().problems().is_empty());
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(serde_json::from_str::<ServerConfig>(r#"{"lissen":[]}"#).is_err());
        assert!(serde_json::from_str::<ServerConfig>(r#"{"limits":{"conections_max":1}}"#).is_err());
    }
}

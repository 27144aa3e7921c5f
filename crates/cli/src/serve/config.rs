//! The configuration of `hapax serve`: the file, and what is in effect once flags and environment are laid over it.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use hapax::embedded::{Options, StoreQuota};
use hapax::{QueueConfig, QueueName};
use hapax_http::proxy::ProxyConfig;
use hapax_server::ServerConfig;
use hapax_server::config::{AuthConfig, LimitsConfig, SqsConfig, TlsConfig};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::text::escape;

/// What stands in a printed configuration where a secret was.
const REDACTED: &str = "(redacted)";

/// Everything that `hapax serve` can be told. The server's own sections stand beside those of the store and the logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Addresses to listen on: one, or a list.
    #[serde(deserialize_with = "one_or_more")]
    pub listen: Vec<SocketAddr>,
    /// Where messages are kept.
    pub store: StoreConfig,
    /// What is logged, and how.
    pub log: LogConfig,
    /// The certificate.
    pub tls: Option<TlsConfig>,
    /// Who may do what.
    pub auth: AuthConfig,
    /// Bounds on connections and requests.
    pub limits: LimitsConfig,
    /// How the server presents itself to AWS SDKs.
    pub sqs: SqsConfig,
    /// Queues that are created, or changed to this, at start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queue: Vec<DeclaredQueue>,
    /// Idempotency proxies that run beside the server, with its store as their ledger.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub proxy: Vec<ProxyConfig>,
}

impl Default for Config {
    fn default() -> Self {
        let ServerConfig { listen, tls, auth, limits, sqs } = ServerConfig::default();
        let (store, log) = (StoreConfig::default(), LogConfig::default());
        Self { listen, store, log, tls, auth, limits, sqs, queue: Vec::new(), proxy: Vec::new() }
    }
}

/// Where messages are kept, and how much.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// The store: `embedded:PATH`.
    pub url: String,
    /// Sends are refused when the disk has less room than this, in bytes.
    pub reserve_bytes: u64,
    /// The most messages in all queues together.
    pub messages_max: Option<u64>,
    /// The most bytes of bodies and attributes in all queues together.
    pub bytes_max: Option<u64>,
    /// The most memory that messages may take, in bytes.
    pub memory_bytes_max: Option<u64>,
    /// Opens a store on a network file system, whose locks and syncs cannot be relied on.
    pub allow_network_file_system: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        let Options { quota, reserve_bytes, allow_network_file_system, .. } = Options::default();
        let StoreQuota { messages_max, bytes_max, memory_bytes_max } = quota;
        let url = "embedded:./hapax-data".to_owned();
        Self { url, reserve_bytes, messages_max, bytes_max, memory_bytes_max, allow_network_file_system }
    }
}

impl StoreConfig {
    /// How the embedded store is to be opened.
    pub fn options(&self) -> Options {
        let Self {
            url: _,
            reserve_bytes,
            messages_max,
            bytes_max,
            memory_bytes_max,
            allow_network_file_system,
        } = *self;
        let quota = StoreQuota { messages_max, bytes_max, memory_bytes_max };
        Options { quota, reserve_bytes, allow_network_file_system, ..Options::default() }
    }
}

/// What is logged, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Text for people or JSON for collectors.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`; or by module: `info,hapax_server=debug`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A queue that the configuration declares: a name beside the fields of its policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredQueue {
    /// Its name.
    pub name: QueueName,
    /// Its policy.
    pub config: QueueConfig,
}

// By hand: `flatten` would switch off the refusal of unknown keys.
impl<'de> Deserialize<'de> for DeclaredQueue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut table = toml::Table::deserialize(from)?;
        let name = table.remove("name").ok_or_else(|| de::Error::missing_field("name"))?;
        let name = QueueName::deserialize(name).map_err(de::Error::custom)?;
        if name.is_fifo() {
            table.entry("kind").or_insert_with(|| "fifo".into());
        }
        let config = QueueConfig::deserialize(table).map_err(|error| de::Error::custom(error.message()))?;
        config.validate(&name).map_err(|error| de::Error::custom(format!("queue {name}: {error}")))?;
        Ok(Self { name, config })
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
    /// Reads a file. Errors name the file, the line, the key and the key that was probably meant.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
        Self::parse(&text, &file.display().to_string())
    }

    /// Parses a file's text; `file` is how errors call it.
    pub fn parse(text: &str, file: &str) -> anyhow::Result<Self> {
        let config: Self = parse_toml(text, file)?;
        let redacted = |key: &&hapax_server::config::KeyConfig| {
            key.secret.as_ref().is_some_and(|secret| secret.expose() == REDACTED)
        };
        if let Some(key) = config.auth.keys.iter().find(redacted) {
            bail!("{file}: the secret of key {} was redacted; use secret_file or secret_env", key.id);
        }
        Ok(config)
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

    /// The configuration as a file that means the same; secrets are redacted.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        toml::to_string(self).context("the configuration cannot be written as TOML")
    }
}

/// Parses a file's text; errors name the line, the key and the key that was probably meant.
pub fn parse_toml<T: de::DeserializeOwned>(text: &str, file: &str) -> anyhow::Result<T> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
        let place = line.map_or_else(|| file.to_owned(), |line| format!("{file}:{line}"));
        anyhow!("{place}: {}", explain(error.message()))
    })
}

/// Turns serde's "unknown field `x`, expected one of `a`, `b`" into words that help.
fn explain(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let unknown = message.starts_with("unknown field") || message.starts_with("unknown variant");
    let (Some((given, known)), true) = (quoted.split_first(), unknown) else {
        return message.trim().replace('\n', "; ");
    };
    let what = if message.starts_with("unknown field") { "key" } else { "value" };
    let mut text = format!("unknown {what} `{}`", escape(given));
    match nearest(given, known) {
        Some(meant) => write!(text, "; did you mean `{meant}`?"),
        None => write!(text, "; known here: {}", known.join(", ")),
    }
    .expect("a string takes everything");
    text
}

/// The known word that a misspelt one probably stands for.
fn nearest<'a>(given: &str, known: &[&'a str]) -> Option<&'a str> {
    let likeness = |word: &str| {
        // A unit left out (`lease` for `lease_ms`) is the most common slip, and far by edit distance.
        let stem = word.strip_prefix(given).is_some_and(|rest| rest.starts_with('_'));
        if stem { 1.0 } else { strsim::jaro_winkler(given, word) }
    };
    let best = known.iter().map(|word| (likeness(word), *word)).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(likeness, _)| *likeness > 0.8).map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../../packaging/hapax.example.toml");

    fn refused(text: &str) -> String {
        Config::parse(text, "hapax.toml").unwrap_err().to_string()
    }

    #[test]
    fn the_example_file_holds_every_key_with_its_default() {
        assert_eq!(Config::parse(EXAMPLE, "example").unwrap(), Config::default());
        let mut defaults = toml::Table::try_from(Config::default()).unwrap();
        // An array of tables has no empty form; the keys are commented out.
        defaults["auth"].as_table_mut().unwrap().remove("keys");
        let example: toml::Table = EXAMPLE.parse().unwrap();
        assert_eq!(example, defaults, "a key is missing in the example, or has another value");
    }

    #[test]
    fn what_the_example_file_comments_out_is_valid_too() {
        // Prose is `# text`, an example `#key = value`.
        let uncommented = |line: &str| match line.strip_prefix('#') {
            Some(code) if !code.starts_with(' ') => code.to_owned(),
            _ => line.to_owned(),
        };
        let text: Vec<String> = EXAMPLE.lines().map(uncommented).collect();
        let config = Config::parse(&text.join("\n"), "example").unwrap();
        assert!(config.tls.is_some() && config.store.messages_max.is_some(), "{config:?}");
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
    fn a_bad_value_is_named() {
        let error = refused("[[queue]]\nname = \"a\"\nlease_ms = 99999999\n");
        assert!(error.contains("queue a: lease_ms: 99999999 is out of range"), "{error}");
        let error = refused("listen = \"localhost\"");
        assert!(error.contains("write it with its port"), "{error}");
    }

    #[test]
    fn a_printed_configuration_means_the_same_without_its_secrets() {
        let text = "listen = \"127.0.0.1:1\"\n[store]\nbytes_max = 7\n[[queue]]\nname = \"a.fifo\"\n\
                    dead_letter = { queue = \"b.fifo\" }\n\
                    [[auth.keys]]\nid = \"AK\"\nsecret_env = \"S\"\n";
        let config = Config::parse(text, "a").unwrap();
        assert_eq!(config.queue[0].config.kind, hapax::QueueKind::Fifo);
        assert_eq!(Config::parse(&config.to_toml().unwrap(), "b").unwrap(), config);

        let secret = Config::parse("[[auth.keys]]\nid = \"AK\"\nsecret = \"hunter2\"\n", "a").unwrap();
        let printed = secret.to_toml().unwrap();
        assert!(!printed.contains("hunter2"), "{printed}");
        assert!(refused(&printed).contains("key AK was redacted"));
    }
}

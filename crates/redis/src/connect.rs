//! What a store's URL and options say about its connections.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Clock;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisConnectionInfo};
use thiserror::Error;

/// The URL's parameters that are ours. There are no others.
const PREFIX: &str = "hapax_";

/// Variable with the password, as `redis-cli` reads it.
const PASSWORD: &str = "REDISCLI_AUTH";

/// When a change counts as done. What the servers cannot offer is refused when the store is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// When the server's process has it. A crash of the machine loses about the last second, a failover what the
    /// replica had not received. The ledger declares that it is not durable, and the tier `effectively-once` refuses it.
    Process,
    /// When it is in the append-only file on the disk of the node: needs `appendonly yes` and `appendfsync always`. A failover
    /// loses what the replica had not received, so that with replicas the ledger declares that fences may repeat.
    #[default]
    Local,
    /// When all replicas that may be promoted have confirmed it (`WAIT`). With fewer confirmations the outcome is unknown.
    Replicated,
}

impl Durability {
    /// The level's name in a URL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Local => "local",
            Self::Replicated => "replicated",
        }
    }
}

/// Options for opening a store. The URL may set most of them, as `hapax_` and their name; the URL wins.
#[derive(Clone)]
pub struct Options {
    /// When a change counts as done. Default `local`. In the URL: `hapax_durability`.
    pub durability: Durability,
    /// Begin of all keys: several stores may share one Redis. Default `hapax`. In the URL: `hapax_prefix`.
    pub prefix: String,
    /// Time to wait for a connection. Default 2 s. In the URL, in milliseconds: `hapax_connect_timeout_ms`.
    pub connect_timeout: Duration,
    /// Time to wait for an answer; after it the outcome is unknown. Default 5 s. In the URL, in milliseconds:
    /// `hapax_operation_timeout_ms`.
    pub operation_timeout: Duration,
    /// With `replicated`: time to wait for the replicas, less than the operation's. Default 1 s. In the URL, in
    /// milliseconds: `hapax_replication_timeout_ms`.
    pub replication_timeout: Duration,
    /// With `replicated`: the number of replicas that must confirm. Default: all that may be promoted, as a Cluster or a
    /// Sentinel knows them; without either, those that are connected when the store is opened. In the URL: `hapax_replicas`.
    pub replicas: Option<usize>,
    /// With `replicated`: connections per node, since each waits for its own writes. 1 to 1,000, default 16. In the URL:
    /// `hapax_connections_max`.
    pub connections_max: usize,
    /// A file whose first line is the password. Default: the URL's password, else the variable `REDISCLI_AUTH`. In the URL:
    /// `hapax_password_file`.
    pub password_file: Option<PathBuf>,
    /// Maximum count of open claims in one scope, held or in doubt: a claim beyond it is refused, other scopes are not
    /// affected. At least 1, default 100,000.
    pub in_doubt_per_scope_max: u64,
    /// For tests: a clock instead of that of Redis.
    #[doc(hidden)]
    pub clock: Option<Arc<dyn Clock>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            prefix: "hapax".to_owned(),
            connect_timeout: Duration::from_secs(2),
            operation_timeout: Duration::from_secs(5),
            replication_timeout: Duration::from_secs(1),
            replicas: None,
            connections_max: 16,
            password_file: None,
            in_doubt_per_scope_max: 100_000,
            clock: None,
        }
    }
}

impl Options {
    /// The time of one call with all its attempts.
    pub(crate) fn call_limit(&self) -> Duration {
        self.connect_timeout + self.operation_timeout
    }
}

/// Why a URL or an option is not acceptable. It never contains the password.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct UrlError(pub(crate) String);

/// How the servers are organised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Single,
    Cluster,
    /// The name that the Sentinels know the master by.
    Sentinel(String),
}

/// Where to connect to, after the URL was read.
#[derive(Clone)]
pub(crate) struct Target {
    pub options: Options,
    pub kind: Kind,
    /// Addresses, `host:port`.
    pub seeds: Vec<String>,
    /// With TLS, a node is called by its host name, if it has one: its certificate names that.
    pub tls: bool,
    settings: RedisConnectionInfo,
}

impl Target {
    /// Reads a URL.
    pub fn new(url: &str, options: &Options) -> Result<Self, UrlError> {
        let mut options = options.clone();
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            set(&mut options, pair)?;
        }
        check(&options)?;
        let (scheme, rest) = base.split_once("://").unwrap_or(("", base));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (tls, plain) = match scheme.strip_prefix("rediss") {
            Some(rest) => (true, format!("redis{rest}")),
            None => (false, scheme.to_owned()),
        };
        let (name, db) = match plain.as_str() {
            "redis+sentinel" => path.split_once('/').unwrap_or((path, "")),
            _ => ("", path),
        };
        let kind = match plain.as_str() {
            "redis" => Kind::Single,
            "redis+cluster" => Kind::Cluster,
            "redis+sentinel" if !name.is_empty() => Kind::Sentinel(name.to_owned()),
            "redis+sentinel" => {
                return Err(UrlError(
                    "write redis+sentinel://HOST:PORT,HOST:PORT/NAME-OF-THE-MASTER".to_owned(),
                ));
            }
            _ => {
                return Err(UrlError(
                    "a Redis store's URL begins with redis://, rediss://, redis+cluster:// or redis+sentinel://".to_owned(),
                ));
            }
        };
        let port = if matches!(kind, Kind::Sentinel(_)) { 26_379 } else { 6_379 };
        let seeds: Vec<String> =
            hosts.split(',').map(|host| address(host, port)).collect::<Result<_, _>>()?;
        if kind == Kind::Single && seeds.len() > 1 {
            return Err(UrlError(
                "redis:// names one node; use redis+cluster:// or redis+sentinel:// for several".to_owned(),
            ));
        }
        let settings = settings(user, db, &kind, &options)?;
        Ok(Self { options, kind, seeds, tls, settings })
    }

    /// How a node is connected to. A Sentinel has no databases.
    pub fn info(&self, address: &str, is_sentinel: bool) -> Result<ConnectionInfo, UrlError> {
        let (host, port) = split(address)?;
        let address = if self.tls {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let info =
            address.into_connection_info().map_err(|error| UrlError(format!("the Redis URL: {error}")))?;
        let settings = if is_sentinel { self.settings.clone().set_db(0) } else { self.settings.clone() };
        Ok(info.set_redis_settings(settings))
    }
}

fn decoded(what: &str, text: &str) -> Result<String, UrlError> {
    let text = percent_encoding::percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|_| UrlError(format!("{what}: its value is not UTF-8")))
}

fn settings(user: &str, db: &str, kind: &Kind, options: &Options) -> Result<RedisConnectionInfo, UrlError> {
    let mut settings = RedisConnectionInfo::default().set_lib_name("hapax", env!("CARGO_PKG_VERSION"));
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    if !name.is_empty() {
        settings = settings.set_username(decoded("the user", name)?);
    }
    let password = match (&options.password_file, password) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file);
            let text =
                text.map_err(|error| UrlError(format!("the password file {}: {error}", file.display())))?;
            Some(text.lines().next().unwrap_or_default().to_owned())
        }
        (None, "") => std::env::var(PASSWORD).ok(),
        (None, password) => Some(decoded("the password", password)?),
    };
    if let Some(password) = password.filter(|password| !password.is_empty()) {
        settings = settings.set_password(password);
    }
    let db: i64 = match db {
        "" => 0,
        db => db.parse().map_err(|_| UrlError(format!("the database {db:?} is not a number")))?,
    };
    if *kind == Kind::Cluster && db != 0 {
        return Err(UrlError(format!(
            "a Redis Cluster has no database {db}; use hapax_prefix to separate stores"
        )));
    }
    Ok(settings.set_db(db))
}

fn address(host: &str, port: u16) -> Result<String, UrlError> {
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
    let address = if has_port { host.to_owned() } else { format!("{host}:{port}") };
    split(&address)?;
    Ok(address)
}

fn split(address: &str) -> Result<(String, u16), UrlError> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() => Ok((host.trim_matches(['[', ']']).to_owned(), port)),
        _ => Err(UrlError(format!("{address:?} is not an address; write HOST:PORT"))),
    }
}

/// Sets one of our parameters, `hapax_name=value`.
fn set(options: &mut Options, pair: &str) -> Result<(), UrlError> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    let value = decoded(name, value)?;
    let number = || value.parse::<u64>().map_err(|_| UrlError(format!("{name}: {value:?} is not a number")));
    let ms = || number().map(Duration::from_millis);
    match name.strip_prefix(PREFIX).unwrap_or_default() {
        "durability" => {
            let levels = [Durability::Process, Durability::Local, Durability::Replicated];
            let level = levels.into_iter().find(|level| level.as_str() == value);
            options.durability = level
                .ok_or_else(|| UrlError(format!("{name}: {value:?} is not process, local or replicated")))?;
        }
        "prefix" => options.prefix = value,
        "connect_timeout_ms" => options.connect_timeout = ms()?,
        "operation_timeout_ms" => options.operation_timeout = ms()?,
        "replication_timeout_ms" => options.replication_timeout = ms()?,
        "replicas" => options.replicas = Some(number()? as usize),
        "connections_max" => options.connections_max = number()? as usize,
        "password_file" => options.password_file = Some(value.into()),
        _ => {
            return Err(UrlError(format!(
                "{name} is not a parameter; use {PREFIX}durability, {PREFIX}prefix, {PREFIX}connect_timeout_ms, \
                 {PREFIX}operation_timeout_ms, {PREFIX}replication_timeout_ms, {PREFIX}replicas, \
                 {PREFIX}connections_max or {PREFIX}password_file"
            )));
        }
    }
    Ok(())
}

fn check(options: &Options) -> Result<(), UrlError> {
    let ms = |limit: Duration| limit.as_millis().min(u128::from(u64::MAX)) as u64;
    let operation_ms = ms(options.operation_timeout);
    let bounds = [
        ("connect_timeout_ms", ms(options.connect_timeout), 100, 60_000),
        ("operation_timeout_ms", operation_ms, 200, 300_000),
        ("replication_timeout_ms", ms(options.replication_timeout), 50, operation_ms.saturating_sub(100)),
        ("replicas", options.replicas.unwrap_or(1) as u64, 1, 100),
        ("connections_max", options.connections_max as u64, 1, 1_000),
        ("in_doubt_per_scope_max", options.in_doubt_per_scope_max, 1, u64::MAX),
        ("prefix's length", options.prefix.len() as u64, 1, 100),
    ];
    for (field, value, min, max) in bounds {
        hapax_core::validate::within(field, value, min, max).map_err(|error| UrlError(error.to_string()))?;
    }
    if options.prefix.contains(['{', '}']) || options.prefix.chars().any(char::is_control) {
        return Err(UrlError(format!("prefix: {:?} has a brace or a control character", options.prefix)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, UrlError> {
        Target::new(url, &Options::default())
    }

    #[test]
    fn a_url_says_how_the_servers_are_organised() {
        for (url, kind, seeds) in [
            ("redis://cache", Kind::Single, vec!["cache:6379"]),
            ("redis://ann:secret@cache:7000/3", Kind::Single, vec!["cache:7000"]),
            ("redis://[::1]:7000", Kind::Single, vec!["[::1]:7000"]),
            ("redis+cluster://a:1,b,c:3", Kind::Cluster, vec!["a:1", "b:6379", "c:3"]),
            ("redis+sentinel://a,b:2/main/4", Kind::Sentinel("main".to_owned()), vec!["a:26379", "b:2"]),
        ] {
            let target = target(url).unwrap();
            assert_eq!(
                (target.kind, target.seeds),
                (kind, seeds.iter().map(|&s| s.to_owned()).collect()),
                "{url}"
            );
        }
        let info = target("rediss://ann:s%2Fcret@cache/3").unwrap().info("cache:6379", false).unwrap();
        assert!(matches!(info.addr(), ConnectionAddr::TcpTls { insecure: false, .. }));
        let settings = info.redis_settings();
        assert_eq!(
            (settings.username(), settings.password(), settings.db()),
            (Some("ann"), Some("s/cret"), 3)
        );
    }

    #[test]
    fn our_parameters_are_read() {
        let url = "redis://cache?hapax_durability=replicated&hapax_prefix=shop&hapax_replicas=2&hapax_operation_timeout_ms=900&hapax_replication_timeout_ms=300";
        let options = target(url).unwrap().options;
        assert_eq!((options.durability, options.prefix.as_str()), (Durability::Replicated, "shop"));
        assert_eq!((options.replicas, options.operation_timeout.as_millis()), (Some(2), 900));
    }

    #[test]
    fn what_is_wrong_is_named_and_the_password_is_not() {
        for (url, named) in [
            ("mysql://ann:secret@db", "redis://"),
            ("redis://ann:secret@a,b", "redis+cluster://"),
            ("redis+sentinel://ann:secret@a", "NAME-OF-THE-MASTER"),
            ("redis+cluster://ann:secret@a/1", "database 1"),
            ("redis://ann:secret@a/x", "\"x\""),
            ("redis://ann:secret@a:port", "a:port"),
            ("redis://ann:secret@a?hapax_durabilty=local", "hapax_durabilty"),
            ("redis://ann:secret@a?hapax_durability=strong", "strong"),
            ("redis://ann:secret@a?hapax_replication_timeout_ms=9000", "replication_timeout_ms"),
            ("redis://ann:secret@a?hapax_prefix=%7Bx%7D", "{x}"),
            ("redis://ann:secret@a?hapax_password_file=%2Fnot%2Fthere", "/not/there"),
        ] {
            let error = target(url).err().unwrap_or_else(|| panic!("{url} was accepted")).to_string();
            assert!(error.contains(named), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}

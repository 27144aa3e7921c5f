//! What a store's URL and options say about its connections.

use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use thiserror::Error;

use crate::pool::Bounds;
use crate::pooled;

/// The URL's parameters that are ours; all others are PostgreSQL's.
const PREFIX: &str = "hapax_";

/// Options for opening a store. The URL may set some of them, as `hapax_` and their name; the URL wins.
#[derive(Debug, Clone)]
pub struct Options {
    /// Maximum count of connections of this process, in addition to one that listens for changes. 2 to 1,000, default 10.
    /// In the URL: `hapax_connections_max`.
    pub connections_max: usize,
    /// Time to wait for a connection. Default 5 s. In the URL, in milliseconds: `hapax_connect_timeout_ms`.
    pub connect_timeout: Duration,
    /// Time to wait for an operation; after it the outcome is unknown. The server ends statements a little earlier.
    /// Default 20 s. In the URL, in milliseconds: `hapax_operation_timeout_ms`.
    pub operation_timeout: Duration,
    /// The connections lead to a pooler that assigns a server per transaction, for example PgBouncer: no prepared
    /// statements, no settings of the session, no LISTEN except through [`listen_url`](Self::listen_url). Default: no. In
    /// the URL: `hapax_pooler=true`.
    pub pooler: bool,
    /// Another URL for the connection that listens for changes, which must not lead through a pooler. Default: the
    /// store's own URL, or none behind a pooler. In the URL: `hapax_listen_url`, percent-encoded.
    pub listen_url: Option<String>,
    /// A file whose first line is the password. Default: the URL's password, else `PGPASSWORD`. In the URL:
    /// `hapax_password_file`.
    pub password_file: Option<PathBuf>,
    /// A receive is answered only once its deliveries are on disk, and on the standbys that the server waits for. Without,
    /// receives of standard queues and extensions of leases do not wait for that: faster, and a crash of the database's
    /// server (not of this process) forgets those of its last 0.6 s, so that their messages come back early, attempts
    /// uncounted, and their receipts are stale. Sends, settles, claims and FIFO queues always wait. Behind a pooler
    /// everything waits. Default: yes. In the URL: `hapax_sync_receives=false`.
    pub sync_receives: bool,
    /// The portable form of the schema: a ledger and documents on databases that speak PostgreSQL's protocol without its
    /// sequences, advisory locks, `SKIP LOCKED` and LISTEN. Slower; without queues. It is chosen when the schema is made.
    /// Default: no. In the URL: `hapax_portable=true`.
    pub portable: bool,
    /// Applies missing migrations when the store is opened. Default: no; a store with an older schema is refused.
    pub migrate: bool,
    /// Maximum count of open claims in one scope, held or in doubt: a claim beyond it is refused, other scopes are not
    /// affected. At least 1, default 100,000. Several processes may together exceed it a little.
    pub in_doubt_per_scope_max: u64,
}

impl Options {
    /// Whether receives and extensions wait for the disk. Behind a pooler no session of the server is ours, so none can know
    /// of a crash.
    pub(crate) fn syncs_receives(&self) -> bool {
        self.sync_receives || self.pooler
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connections_max: 10,
            connect_timeout: Duration::from_secs(5),
            operation_timeout: Duration::from_secs(20),
            pooler: false,
            listen_url: None,
            password_file: None,
            sync_receives: true,
            portable: false,
            migrate: false,
            in_doubt_per_scope_max: 100_000,
        }
    }
}

/// Why a URL or an option is not acceptable. It never contains the password.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct UrlError(pub(crate) String);

/// Where to connect to, after the URL was read.
#[derive(Clone)]
pub(crate) struct Target {
    pub options: Options,
    pub connect: PgConnectOptions,
    /// For the connection that listens; `None`: changes of other processes are found by polling.
    pub listen: Option<PgConnectOptions>,
    pub bounds: Bounds,
}

impl Target {
    /// Reads a URL.
    pub fn new(url: &str, options: &Options) -> Result<Self, UrlError> {
        let mut options = options.clone();
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut theirs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.strip_prefix(PREFIX) {
                Some(ours) => set(&mut options, ours)?,
                None => theirs.push(pair),
            }
        }
        check(&options)?;
        let url = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        let connect = session(parse(&url)?, &options)?;
        let listen = match &options.listen_url {
            _ if options.portable => None,
            Some(url) => Some(with_password(parse(url)?, &options)?),
            None => (!options.pooler).then(|| connect.clone()),
        };
        let (connections_max, connect_limit) = (options.connections_max, options.connect_timeout);
        let bounds = Bounds { connections_max, connect: connect_limit, operation: options.operation_timeout };
        Ok(Self { options, connect, listen, bounds })
    }
}

fn parse(url: &str) -> Result<PgConnectOptions, UrlError> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(UrlError("a PostgreSQL store's URL begins with postgres://".to_owned()));
    }
    check_files(url)?;
    let parsed = PgConnectOptions::from_str(url);
    let parsed = parsed.map_err(|error| UrlError(format!("the PostgreSQL URL cannot be read: {error}")))?;
    // Otherwise the server would choose the one with the name of the user.
    if parsed.get_database().is_none_or(str::is_empty) {
        let remedy = "add it, as in postgres://USER@HOST/DATABASE, or set `PGDATABASE`";
        return Err(UrlError(format!("the PostgreSQL URL names no database; {remedy}")));
    }
    Ok(parsed)
}

/// Files that a URL names for TLS: whether they can be read. A failed connect would not name the file.
fn check_files(url: &str) -> Result<(), UrlError> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy();
        if ["sslrootcert", "sslcert", "sslkey"].contains(&name) && !value.starts_with("-----BEGIN") {
            std::fs::File::open(&*value).map_err(|error| UrlError(format!("{name}: {value}: {error}")))?;
        }
    }
    Ok(())
}

/// Sets one of our parameters, `name=value`.
fn set(options: &mut Options, pair: &str) -> Result<(), UrlError> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    let value = percent_encoding::percent_decode_str(value).decode_utf8();
    let value = value.map_err(|_| UrlError(format!("{PREFIX}{name}: its value is not UTF-8")))?;
    let number = || {
        let parsed = value.parse::<u64>();
        parsed.map_err(|_| UrlError(format!("{PREFIX}{name}: {value:?} is not a number")))
    };
    match name {
        "connections_max" => options.connections_max = number()? as usize,
        "connect_timeout_ms" => options.connect_timeout = Duration::from_millis(number()?),
        "operation_timeout_ms" => options.operation_timeout = Duration::from_millis(number()?),
        "pooler" => options.pooler = boolean(name, &value)?,
        "sync_receives" => options.sync_receives = boolean(name, &value)?,
        "portable" => options.portable = boolean(name, &value)?,
        "listen_url" => options.listen_url = Some(value.into_owned()),
        "password_file" => options.password_file = Some(value.into_owned().into()),
        _ => {
            return Err(UrlError(format!(
                "{PREFIX}{name} is not a parameter; use {PREFIX}connections_max, {PREFIX}connect_timeout_ms, \
                 {PREFIX}operation_timeout_ms, {PREFIX}pooler, {PREFIX}sync_receives, {PREFIX}portable, {PREFIX}listen_url or {PREFIX}password_file"
            )));
        }
    }
    Ok(())
}

fn boolean(name: &str, value: &str) -> Result<bool, UrlError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(UrlError(format!("{PREFIX}{name}: {value:?} is neither true nor false"))),
    }
}

fn check(options: &Options) -> Result<(), UrlError> {
    let ms = |limit: Duration| limit.as_millis().min(u128::from(u64::MAX)) as u64;
    let bounds = [
        ("connections_max", options.connections_max as u64, 2, 1_000),
        ("connect_timeout_ms", ms(options.connect_timeout), 100, 60_000),
        ("operation_timeout_ms", ms(options.operation_timeout), 1_000, 300_000),
        ("in_doubt_per_scope_max", options.in_doubt_per_scope_max, 1, u64::MAX),
    ];
    for (field, value, min, max) in bounds {
        hapax_core::validate::within(field, value, min, max).map_err(|error| UrlError(error.to_string()))?;
    }
    Ok(())
}

fn with_password(connect: PgConnectOptions, options: &Options) -> Result<PgConnectOptions, UrlError> {
    let Some(file) = &options.password_file else { return Ok(connect) };
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|error| UrlError(format!("the password file {}: {error}", file.display())))?;
    Ok(connect.password(text.lines().next().unwrap_or_default()))
}

/// The settings of every session. Behind a pooler a session belongs to several clients, so it keeps its own settings, and every
/// transaction makes them.
fn session(connect: PgConnectOptions, options: &Options) -> Result<PgConnectOptions, UrlError> {
    let connect = with_password(connect, options)?.application_name("hapax");
    if options.pooler {
        return Ok(connect.statement_cache_capacity(0).extra_float_digits(None));
    }
    let settings = pooled::settings(options.operation_timeout);
    let keepalives =
        [("tcp_keepalives_idle", "30"), ("tcp_keepalives_interval", "10"), ("tcp_keepalives_count", "3")];
    Ok(connect.options(settings.iter().map(|(name, value)| (*name, value.as_str())).chain(keepalives)))
}

const CERTIFICATE_AUTHORITY: &str =
    "name the file of the authority that signed the server's certificate: `sslrootcert=FILE`";

const ADDRESS: &str = "check host and port of the URL, and whether the server runs";

/// Why a connection was refused, and what to do about it.
pub(crate) fn refusal(error: &sqlx::Error) -> String {
    let text = error.to_string();
    let remedies = [
        ("unsupported startup parameter", "the URL leads to a pooler: set `hapax_pooler=true`"),
        ("server does not support TLS", "enable TLS on the server (`ssl = on`), or choose another `sslmode`"),
        (
            "no encryption",
            "the server asks for TLS, or for another rule in pg_hba.conf: set `sslmode=require`",
        ),
        ("UnknownIssuer", CERTIFICATE_AUTHORITY),
        ("BadSignature", CERTIFICATE_AUTHORITY),
        ("not valid for name", "connect by a name that the server's certificate has"),
        ("Expired", "renew the server's certificate, and check the clocks of both machines"),
        ("permission denied for database", "let the role connect: GRANT CONNECT ON DATABASE … TO …"),
        ("Connection refused", ADDRESS),
        ("failed to lookup address", ADDRESS),
        (
            "password authentication failed",
            "check the user and the password: `PGPASSWORD`, `hapax_password_file`, ~/.pgpass or the URL",
        ),
    ];
    // By its code, since the text may be in another language.
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    match code.as_deref() {
        Some("3D000") => return format!("{text}; check the URL, or create it: CREATE DATABASE"),
        Some("28000") if text.contains("does not exist") => {
            return format!("{text}; check the user of the URL, or create it: CREATE ROLE … LOGIN");
        }
        _ => {}
    }
    match remedies.iter().find(|(sign, _)| text.contains(sign)) {
        Some((_, remedy)) => format!("{text}; {remedy}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, UrlError> {
        Target::new(url, &Options::default())
    }

    #[test]
    fn our_parameters_are_read_and_theirs_passed_on() {
        let url = "postgres://ann:secret@db.example:6432/shop?sslmode=require&hapax_connections_max=3&hapax_pooler=true";
        let target = target(url).unwrap();
        assert_eq!((target.options.connections_max, target.options.pooler), (3, true));
        assert_eq!((target.connect.get_host(), target.connect.get_port()), ("db.example", 6432));
        assert_eq!((target.connect.get_username(), target.connect.get_database()), ("ann", Some("shop")));
        assert!(target.listen.is_none(), "a pooler passes no notifications on");
    }

    #[test]
    fn settings_of_the_url_are_kept_beside_ours() {
        let url =
            "postgres://db/shop?options[default_transaction_isolation]=serializable&hapax_portable=true";
        let target = target(url).unwrap();
        let settings = target.connect.get_options().unwrap();
        for setting in
            ["default_transaction_isolation=serializable", "statement_timeout=16000", "lock_timeout=5000"]
        {
            assert!(settings.contains(setting), "{setting} is not in {settings}");
        }
        assert!(target.options.portable && target.listen.is_none(), "the portable form does not listen");
    }

    #[test]
    fn a_pooler_may_be_passed_by_to_listen() {
        let url = "postgres://pooler/shop?hapax_pooler=true&hapax_listen_url=postgres%3A%2F%2Fdb%2Fshop";
        assert_eq!(target(url).unwrap().listen.unwrap().get_host(), "db");
    }

    #[test]
    fn what_is_wrong_is_named_and_the_password_is_not() {
        for (url, named) in [
            ("mysql://ann:secret@db/shop", "postgres://"),
            ("postgres://ann:secret@db/shop?hapax_conections=3", "hapax_conections"),
            ("postgres://ann:secret@db/shop?hapax_pooler=maybe", "maybe"),
            ("postgres://ann:secret@db/shop?hapax_connections_max=1", "connections_max"),
            ("postgres://ann:secret@db/shop?hapax_connections_max=many", "many"),
            ("postgres://ann:secret@db:port/shop", "URL"),
            ("postgres://ann:secret@db/shop?hapax_password_file=%2Fnot%2Fthere", "/not/there"),
        ] {
            let error = target(url).err().unwrap_or_else(|| panic!("{url} was accepted")).to_string();
            assert!(error.contains(named), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}

//! The URL of a store: which kind it names, how it is opened, and how it is shown without its secrets.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use hapax_core::store::SharedStore;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use thiserror::Error;

/// Why a store could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL names a store that this build does not support.
    #[error("{url:?} names no store; use one of: {known}")]
    Unknown {
        /// The URL, without its secret.
        url: String,
        /// The URLs that this build supports.
        known: String,
    },
    /// The embedded store could not be opened.
    #[cfg(feature = "embedded")]
    #[error(transparent)]
    Embedded(#[from] hapax_embedded::OpenError),
    /// The PostgreSQL store could not be opened.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    Postgres(#[from] hapax_postgres::OpenError),
    /// The Redis store could not be opened.
    #[cfg(feature = "redis")]
    #[error("{0}; {remedy}", remedy = .0.remedy())]
    Redis(hapax_redis::OpenError),
    /// The server could not be reached, or is not a Hapax server.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Client(#[from] hapax_client::ConnectError),
    /// The thread that opens the store could not be started.
    #[error("no thread could be started: {0}")]
    Thread(std::io::Error),
}

/// Not as the source: its message is a part of this one.
#[cfg(feature = "redis")]
impl From<hapax_redis::OpenError> for OpenError {
    fn from(error: hapax_redis::OpenError) -> Self {
        Self::Redis(error)
    }
}

impl OpenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "unknown-store",
            #[cfg(feature = "embedded")]
            Self::Embedded(error) => error.code(),
            #[cfg(feature = "postgres")]
            Self::Postgres(error) => error.code(),
            #[cfg(feature = "redis")]
            Self::Redis(error) => error.code(),
            #[cfg(feature = "client")]
            Self::Client(error) => error.code(),
            Self::Thread(_) => "cannot-open",
        }
    }
}

/// A store's URL, by the kind of store that it names. It is shown without passwords and keys.
///
/// ```
/// use hapax::StoreUrl;
///
/// let url: StoreUrl = "postgres://ann:secret@db.example/shop?sslmode=require".parse()?;
/// assert!(matches!(url, StoreUrl::Postgres(_)));
/// assert_eq!(url.to_string(), "postgres://ann@db.example/shop?sslmode=require");
/// assert!("mongodb://x".parse::<StoreUrl>().is_err());
/// # Ok::<(), hapax::OpenError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// `embedded:PATH`: a local folder.
    Embedded(PathBuf),
    /// `postgres://…` or `postgresql://…`: a PostgreSQL database.
    Postgres(String),
    /// `redis://…`, `rediss://…`, `redis+cluster://…`, `redis+sentinel://…`: Redis or Valkey.
    Redis(String),
    /// `http://…` or `https://…`: a Hapax server.
    Server(String),
}

impl FromStr for StoreUrl {
    type Err = OpenError;

    fn from_str(url: &str) -> Result<Self, OpenError> {
        let begins_with = |schemes: &[&str]| schemes.iter().any(|scheme| url.starts_with(scheme));
        match url.strip_prefix("embedded:").filter(|path| !path.is_empty()) {
            Some(path) => Ok(Self::Embedded(path.into())),
            None if begins_with(POSTGRES) => Ok(Self::Postgres(url.to_owned())),
            None if begins_with(REDIS) => Ok(Self::Redis(url.to_owned())),
            None if begins_with(&["http://", "https://"]) => Ok(Self::Server(url.to_owned())),
            None => Err(unknown(url)),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded(path) => write!(f, "embedded:{}", path.display()),
            Self::Postgres(url) | Self::Redis(url) | Self::Server(url) => f.write_str(&without_secrets(url)),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

const POSTGRES: &[&str] = &["postgres://", "postgresql://"];

const REDIS: &[&str] = &[
    "redis://",
    "rediss://",
    "redis+cluster://",
    "rediss+cluster://",
    "redis+sentinel://",
    "rediss+sentinel://",
];

/// The URLs that this build supports.
const KNOWN_URLS: &[&str] = &[
    #[cfg(feature = "embedded")]
    "embedded:PATH",
    #[cfg(feature = "postgres")]
    "postgres://HOST/DATABASE",
    #[cfg(feature = "redis")]
    "redis://HOST",
    #[cfg(feature = "client")]
    "http://HOST:PORT",
    #[cfg(feature = "client")]
    "https://HOST:PORT",
];

fn unknown(url: &str) -> OpenError {
    let known = match KNOWN_URLS {
        [] => "(none: enable a feature)".to_owned(),
        known => known.join(", "),
    };
    OpenError::Unknown { url: without_secrets(url), known }
}

pub(crate) async fn open(url: &str) -> Result<SharedStore, OpenError> {
    match url.parse()? {
        #[cfg(feature = "embedded")]
        StoreUrl::Embedded(path) => open_embedded(path).await,
        #[cfg(feature = "postgres")]
        StoreUrl::Postgres(url) => {
            let options = hapax_postgres::Options::default();
            Ok(Arc::new(hapax_postgres::PostgresStore::open(&url, options).await?))
        }
        #[cfg(feature = "redis")]
        StoreUrl::Redis(url) => {
            let options = hapax_redis::Options::default();
            Ok(Arc::new(hapax_redis::RedisStore::open(&url, options).await?))
        }
        #[cfg(feature = "client")]
        StoreUrl::Server(url) => Ok(Arc::new(hapax_client::Client::connect(&url, None).await?)),
        #[expect(clippy::allow_attributes, reason = "which stores there are depends on the features")]
        #[allow(unreachable_patterns, reason = "with all features there is no other store")]
        _ => Err(unknown(url)),
    }
}

/// A URL for messages, logs and printed configurations: without the password of a database or the key of a server, in
/// whichever place it stands. What is left of a database's URL is itself a URL of that database.
///
/// ```
/// assert_eq!(hapax::without_secrets("https://id:secret@host/x"), "https://host/x");
/// assert_eq!(hapax::without_secrets("postgres://ann:secret@db/shop"), "postgres://ann@db/shop");
/// ```
pub fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    // A password with one of the characters above, not encoded as it should be, has moved the borders of the parts.
    let is_ambiguous = path.contains('@') || query.contains('@');
    if is_ambiguous {
        return format!("{scheme}://…");
    }
    let is_database = POSTGRES.iter().any(|known| known.strip_suffix("://") == Some(scheme));
    // The name before a server's key is part of the key, that of a database's user is not.
    let user = match user.split(':').next() {
        Some(name) if is_database && !name.is_empty() => format!("{name}@"),
        _ => String::new(),
    };
    let parameters: Vec<String> = query.split('&').filter_map(parameter_without_secrets).collect();
    let query = if parameters.is_empty() { String::new() } else { format!("?{}", parameters.join("&")) };
    format!("{scheme}://{user}{host}{path}{query}")
}

/// A parameter of a URL, `name=value`; `None`: it is a secret, or empty.
fn parameter_without_secrets(pair: &str) -> Option<String> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    let value = percent_decode_str(value).decode_utf8_lossy();
    if name.is_empty() || (name.contains("password") && !name.ends_with("_file")) {
        return None;
    }
    if value.contains("://") {
        let url = without_secrets(&value);
        return Some(format!("{name}={}", utf8_percent_encode(&url, NON_ALPHANUMERIC)));
    }
    Some(pair.to_owned())
}

/// Recovery reads the metadata of every message, so it runs on its own thread and does not block the runtime.
#[cfg(feature = "embedded")]
async fn open_embedded(path: PathBuf) -> Result<SharedStore, OpenError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let open = move || {
        let opened = hapax_embedded::Embedded::open(path, hapax_embedded::Options::default());
        // If the caller has stopped waiting, the store is dropped, which closes it.
        drop(tell.send(opened));
    };
    std::thread::Builder::new().name("hapax-open".into()).spawn(open).map_err(OpenError::Thread)?;
    match told.await {
        Ok(opened) => Ok(Arc::new(opened?)),
        Err(_) => Err(OpenError::Thread(std::io::Error::other("the opening thread died"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_in_a_url_is_not_shown() {
        for (url, shown) in [
            ("redis://id:hunter2@host:1/x", "redis://host:1/x"),
            ("redis+cluster://id:hunter2@a:1,b:2", "redis+cluster://a:1,b:2"),
            ("http://id:hunter2@host:1/x", "http://host:1/x"),
            ("embedded:a@b", "embedded:a@b"),
            ("postgres://ann:hunter2@db:1/shop", "postgres://ann@db:1/shop"),
            ("postgresql://ann:hunter2@db", "postgresql://ann@db"),
            ("postgres://ann@db/shop?sslmode=require", "postgres://ann@db/shop?sslmode=require"),
            ("postgres:///shop?host=/run/pg&password=hunter2", "postgres:///shop?host=/run/pg"),
            ("postgres://db/s?hapax_password_file=%2Fpw", "postgres://db/s?hapax_password_file=%2Fpw"),
            (
                "postgres://db/s?hapax_listen_url=postgres%3A%2F%2Fann%3Ahunter2%40direct%2Fs&sslmode=prefer",
                "postgres://db/s?hapax_listen_url=postgres%3A%2F%2Fann%40direct%2Fs&sslmode=prefer",
            ),
            // Not encoded as they should be.
            ("postgres://ann:hunter2@x@db/shop", "postgres://ann@db/shop"),
            ("postgres://ann:h/unter2@db/shop", "postgres://…"),
            ("postgres://ann:h?unter2@db/shop", "postgres://…"),
            ("postgres://ann:h#unter2@db/shop", "postgres://…"),
            ("postgres://db/shop?password=a@b", "postgres://…"),
        ] {
            assert_eq!(without_secrets(url), shown);
            assert_eq!(without_secrets(shown), shown, "what is shown can be shown again");
        }
    }

    #[test]
    fn a_url_says_which_store_it_names() {
        let parse = |url: &str| url.parse::<StoreUrl>();
        assert_eq!(parse("embedded:a/b").unwrap(), StoreUrl::Embedded("a/b".into()));
        for url in ["postgres://db/shop", "postgresql:///shop?host=/run"] {
            assert_eq!(parse(url).unwrap(), StoreUrl::Postgres(url.to_owned()));
        }
        for url in ["redis://a", "rediss://a:1/2", "redis+cluster://a,b:2", "redis+sentinel://a/main"] {
            assert_eq!(parse(url).unwrap(), StoreUrl::Redis(url.to_owned()));
        }
        for url in ["http://host:1", "https://id:key@host"] {
            assert_eq!(parse(url).unwrap(), StoreUrl::Server(url.to_owned()));
        }
        for url in ["", "embedded:", "postgres:shop", "mysql://id:hunter2@db"] {
            let error = parse(url).unwrap_err();
            assert!(error.code() == "unknown-store" && !error.to_string().contains("hunter2"), "{error}");
        }
    }
}

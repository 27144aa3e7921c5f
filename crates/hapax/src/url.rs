use hapax_core::store::SharedStore;
use std::sync::Arc;

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
    /// The server could not be reached, or is not a Hapax server.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Client(#[from] hapax_client::ConnectError),
    /// The thread that opens the store could not be started.
    #[error("no thread could be started: {0}")]
    Thread(std::io::Error),
}

impl OpenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "unknown-store",
            #[cfg(feature = "embedded")]
            Self::Embedded(error) => error.code(),
            #[cfg(feature = "client")]
            Self::Client(error) => error.code(),
            Self::Thread(_) => "cannot-open",
        }
    }
}

pub(crate) async fn open(url: &str) -> Result<SharedStore, OpenError> {
    #[cfg(feature = "embedded")]
    if let Some(path) = url.strip_prefix("embedded:").filter(|path| !path.is_empty()) {
        return open_embedded(path.to_owned()).await;
    }
    #[cfg(feature = "client")]
    if url.starts_with("http://") || url.starts_with("https://") {
        return Ok(Arc::new(hapax_client::Client::connect(url, None).await?));
    }
    let known = match KNOWN_URLS {
        [] => "(none: enable a feature)".to_owned(),
        known => known.join(", "),
    };
    Err(OpenError::Unknown { url: redacted(url), known })
}

/// The URLs that this build supports.
const KNOWN_URLS: &[&str] = &[
    #[cfg(feature = "embedded")]
    "embedded:PATH",
    #[cfg(feature = "client")]
    "http://HOST:PORT",
    #[cfg(feature = "client")]
    "https://HOST:PORT",
];

/// A URL for messages and logs: the part before an `@` is removed, because it may be a key.
fn redacted(url: &str) -> String {
    match url.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1))) {
        Some((scheme, rest)) => format!("{scheme}://…@{rest}"),
        None => url.to_owned(),
    }
}

/// Recovery reads the metadata of every message, so it runs on its own thread and does not block the runtime.
#[cfg(feature = "embedded")]
async fn open_embedded(path: String) -> Result<SharedStore, OpenError> {
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
    fn a_key_in_a_url_is_not_shown() {
        assert_eq!(redacted("redis://id:secret@host:1/x"), "redis://…@host:1/x");
        assert_eq!(redacted("embedded:a@b"), "embedded:a@b");
    }
}

use std::sync::Arc;

use hapax_core::QueueAdmin;
use thiserror::Error;

/// Why a store could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL names no store that this build knows.
    #[error("{url:?} names no store; use one of: {known}")]
    Unknown {
        /// The URL.
        url: String,
        /// What there is in this build.
        known: String,
    },
    /// The embedded store could not be opened.
    #[cfg(feature = "embedded")]
    #[error(transparent)]
    Embedded(#[from] hapax_embedded::OpenError),
    /// No thread could be started to open the store on.
    #[error("no thread could be started: {0}")]
    Thread(std::io::Error),
}

pub(crate) async fn open(url: &str) -> Result<Arc<dyn QueueAdmin>, OpenError> {
    #[cfg(feature = "embedded")]
    if let Some(path) = url.strip_prefix("embedded:").filter(|path| !path.is_empty()) {
        return open_embedded(path.to_owned()).await;
    }
    let known = if cfg!(feature = "embedded") { "embedded:PATH" } else { "(none: enable a feature)" };
    Err(OpenError::Unknown { url: url.to_owned(), known: known.to_owned() })
}

/// Recovery reads every message's metadata, so it has a thread of its own and does not hold up the runtime.
#[cfg(feature = "embedded")]
async fn open_embedded(path: String) -> Result<Arc<dyn QueueAdmin>, OpenError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let open = move || {
        let opened = hapax_embedded::Embedded::open(path, hapax_embedded::Options::default());
        // Nobody waits any more: dropping the store closes it.
        drop(tell.send(opened));
    };
    std::thread::Builder::new().name("hapax-open".into()).spawn(open).map_err(OpenError::Thread)?;
    match told.await {
        Ok(opened) => Ok(Arc::new(opened?)),
        Err(_) => Err(OpenError::Thread(std::io::Error::other("the opening thread died"))),
    }
}

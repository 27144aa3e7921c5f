//! Which store a command talks to: a server by its address, or a store of this machine by its URL.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use hapax::core::QueueAdmin;
use hapax::embedded::{Embedded, Options};

/// A store opened by URL, with what only the embedded one can do kept at hand.
pub struct Store {
    admin: Arc<dyn QueueAdmin>,
    embedded: Option<Arc<Embedded>>,
    place: String,
}

/// The folder that an `embedded:` URL names.
pub fn folder(url: &str) -> Option<&Path> {
    url.strip_prefix("embedded:").filter(|path| !path.is_empty()).map(Path::new)
}

impl Store {
    /// Opens the store that a URL names.
    pub async fn open(url: &str, options: Options) -> anyhow::Result<Self> {
        let Some(path) = folder(url) else {
            // The library knows the other stores, and what to say of a URL that names none.
            let admin = hapax::Hapax::open(url).await?.store().clone();
            return Ok(Self { admin, embedded: None, place: url.to_owned() });
        };
        let folder = std::path::absolute(path).with_context(|| path.display().to_string())?;
        let place = folder.display().to_string();
        let opened = tokio::task::spawn_blocking(move || Embedded::open(folder, options)).await??;
        let embedded = Arc::new(opened);
        Ok(Self { admin: embedded.clone(), embedded: Some(embedded), place })
    }

    /// The store's seams.
    pub fn admin(&self) -> &Arc<dyn QueueAdmin> {
        &self.admin
    }

    /// Where its data lives, for people.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Writes a backup to a file of this machine. Blocks.
    pub fn backup(&self, to: &Path) -> anyhow::Result<()> {
        match &self.embedded {
            Some(embedded) => Ok(embedded.backup(to)?),
            None => bail!("{} has no backup of its own; use the database's", self.place),
        }
    }

    /// Closes the store. Blocks.
    pub fn close(&self) {
        if let Some(embedded) = &self.embedded {
            embedded.close();
        }
    }
}

//! The store that a command uses: a server by its address, or a local store by its URL.

use hapax::core::store::SharedStore;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use hapax::embedded::{Embedded, Options};
use hapax_server::native::{Backup, Backups};

/// The file that identifies a folder as an embedded store.
const DATABASE: &str = "hapax.db";

/// The folder for backups inside an embedded store's folder.
const BACKUPS: &str = "backups";

/// A store opened by URL, with what only the embedded one can do kept at hand.
pub struct Store {
    admin: SharedStore,
    embedded: Option<Arc<Embedded>>,
    place: String,
}

/// The folder of an `embedded:` URL.
pub fn folder(url: &str) -> Option<&Path> {
    url.strip_prefix("embedded:").filter(|path| !path.is_empty()).map(Path::new)
}

impl Store {
    /// Opens the store of a URL.
    pub async fn open(url: &str, options: Options) -> anyhow::Result<Self> {
        let Some(path) = folder(url) else {
            // The library knows the other stores, and the error for an unknown URL.
            let admin = hapax::Hapax::open(url).await?.store().clone();
            return Ok(Self { admin, embedded: None, place: url.to_owned() });
        };
        let folder = std::path::absolute(path).with_context(|| path.display().to_string())?;
        let place = folder.display().to_string();
        let opened = tokio::task::spawn_blocking(move || Embedded::open(folder, options)).await??;
        let embedded = Arc::new(opened);
        Ok(Self { admin: embedded.clone(), embedded: Some(embedded), place })
    }

    /// Opens the store of a URL; fails if it does not exist.
    pub async fn open_existing(url: &str, options: Options) -> anyhow::Result<Self> {
        if let Some(path) = folder(url) {
            let place = path.display();
            if !path.join(DATABASE).try_exists().with_context(|| place.to_string())? {
                bail!("no store in {place}; `hapax serve --store embedded:{place}` makes one");
            }
        }
        Self::open(url, options).await
    }

    /// The store's seams.
    pub fn admin(&self) -> &SharedStore {
        &self.admin
    }

    /// The location of its data, for people.
    pub fn location(&self) -> &str {
        &self.place
    }

    /// The function that writes a backup to a local file, if the store supports it. It blocks.
    pub fn backup_function(&self) -> Option<Backup> {
        let embedded = self.embedded.clone()?;
        Some(Arc::new(move |to: &Path| embedded.backup(to).map_err(|error| error.to_string())))
    }

    /// How a server writes backups of it: into the folder that the setting of this name gives, or else into one inside
    /// its own.
    pub fn backups(&self, folder: Option<&Path>, setting: &'static str) -> anyhow::Result<Option<Backups>> {
        let Some(write) = self.backup_function() else { return Ok(None) };
        let folder = match folder {
            Some(folder) => std::path::absolute(folder).with_context(|| folder.display().to_string())?,
            None => Path::new(&self.place).join(BACKUPS),
        };
        Ok(Some(Backups { folder, setting, write }))
    }

    /// Tells other processes that try to open the store at which URL this one answers for it.
    pub fn announce(&self, url: &str) {
        if let Some(embedded) = &self.embedded {
            embedded.announce(url);
        }
    }

    /// Closes the store. Blocks.
    pub fn close(&self) {
        if let Some(embedded) = &self.embedded {
            embedded.close();
        }
    }
}

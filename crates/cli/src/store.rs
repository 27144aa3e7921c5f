//! The store that a command uses: a server by its address, or a store by its URL.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::StoreUrl;
use hapax::core::outbox::OutboxStore;
use hapax::core::store::SharedStore;
use hapax::embedded::Embedded;
use hapax::postgres::PostgresStore;
use hapax::redis::RedisStore;
use hapax::{embedded, postgres, redis};
use hapax_observe::trace::Tracer;
use hapax_observe::{ObservedStore, Observer};
use hapax_server::native::{Backup, Backups};

/// The file that identifies a folder as an embedded store.
const DATABASE: &str = "hapax.db";

/// The folder for backups inside an embedded store's folder.
const BACKUPS: &str = "backups";

/// Timeout for closing the store. Every confirmed change is on disk before that: closing only cleans up.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// Options of each kind of store; those of the other kinds are not used.
#[derive(Clone, Default)]
pub struct StoreOptions {
    pub embedded: embedded::Options,
    pub postgres: postgres::Options,
    pub redis: redis::Options,
    /// Makes spans of sampled messages.
    pub tracer: Option<Arc<Tracer>>,
}

/// A store opened by URL, with what only the embedded one can do kept at hand.
pub struct Store {
    admin: SharedStore,
    observer: Arc<Observer>,
    embedded: Option<Arc<Embedded>>,
    postgres: Option<PostgresStore>,
    place: String,
}

/// The folder of an `embedded:` URL.
pub fn folder(url: &str) -> Option<PathBuf> {
    match url.parse() {
        Ok(StoreUrl::Embedded(path)) => Some(path),
        _ => None,
    }
}

/// Whether a URL names a store itself, and not the server of one.
pub fn is_store(url: &str) -> bool {
    matches!(url.parse(), Ok(StoreUrl::Embedded(_) | StoreUrl::Postgres(_) | StoreUrl::Redis(_)))
}

impl Store {
    /// Opens the store of a URL.
    pub async fn open(url: &str, options: StoreOptions) -> anyhow::Result<Self> {
        match url.parse()? {
            StoreUrl::Embedded(path) => Self::open_embedded(&path, options).await,
            named @ StoreUrl::Postgres(_) => {
                let opened = PostgresStore::open(url, options.postgres).await;
                let place = named.to_string();
                let store = opened.with_context(|| place.clone())?;
                Ok(Self {
                    postgres: Some(store.clone()),
                    ..Self::observed(ObservedStore::new(Arc::new(store)), place, options.tracer)
                })
            }
            named @ StoreUrl::Redis(_) => {
                let opened = RedisStore::open(url, options.redis).await;
                let place = named.to_string();
                let store = opened.map_err(hapax::OpenError::from).with_context(|| place.clone())?;
                Ok(Self::observed(ObservedStore::new(Arc::new(store)), place, options.tracer))
            }
            named => {
                let admin = hapax::Hapax::open(url).await?.store().clone();
                Ok(Self {
                    admin,
                    observer: Arc::default(),
                    embedded: None,
                    postgres: None,
                    place: named.to_string(),
                })
            }
        }
    }

    /// A store whose calls are observed.
    fn observed(mut store: ObservedStore, place: String, tracer: Option<Arc<Tracer>>) -> Self {
        if let Some(tracer) = tracer {
            store = store.traced(tracer);
        }
        let observer = store.observer().clone();
        Self { admin: Arc::new(store), observer, embedded: None, postgres: None, place }
    }

    async fn open_embedded(path: &Path, options: StoreOptions) -> anyhow::Result<Self> {
        let folder = std::path::absolute(path).with_context(|| path.display().to_string())?;
        let place = folder.display().to_string();
        let tracer = options.tracer.clone();
        let opened = tokio::task::spawn_blocking(move || Embedded::open(folder, options.embedded)).await??;
        let embedded = Arc::new(opened);
        let store = ObservedStore::new(embedded.clone()).only_process();
        Ok(Self { embedded: Some(embedded), ..Self::observed(store, place, tracer) })
    }

    /// Opens the store of a URL; fails if it does not exist.
    pub async fn open_existing(url: &str, options: StoreOptions) -> anyhow::Result<Self> {
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

    /// What this process has seen of the store.
    pub fn observer(&self) -> &Arc<Observer> {
        &self.observer
    }

    /// The outbox in the same database, if it has one.
    pub fn outbox(&self) -> anyhow::Result<Option<Arc<dyn OutboxStore>>> {
        let Some(store) = &self.postgres else { return Ok(None) };
        Ok(Some(Arc::new(store.outbox()?)))
    }

    /// The location of its data, for people; it contains no secret.
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

    /// Closes the store, with a timeout.
    pub async fn close(self) {
        let closing = tokio::time::timeout(CLOSE_MAX, self.admin.close()).await;
        match closing {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("the store was not closed in order: {error}"),
            Err(_) => tracing::warn!("the store takes long to close; leaving it, the next start recovers it"),
        }
    }
}

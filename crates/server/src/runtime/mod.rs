//! Listeners, connections and their end. `run(listeners, shutdown)`, hence testable in process.

mod body;
mod connection;
mod files;
pub(crate) mod tls;
mod tracker;

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::SharedStore;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

pub use self::body::ResponseBody;
pub(crate) use self::body::{BodyError, BodyLimits, read_body};
pub(crate) use self::connection::Peer;
pub use self::files::raise_file_limit;
pub(crate) use self::tracker::RequestGuard;
use self::tracker::Tracker;
use crate::app::App;
use crate::auth::Authenticator;
use crate::config::{LimitsConfig, ServerConfig};
use crate::error::ServerError;

/// Tells whether the server is going down. Long polls watch it, so that they answer empty instead of being cut off.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<bool>);

#[cfg(test)]
impl From<watch::Receiver<bool>> for Shutdown {
    fn from(requested: watch::Receiver<bool>) -> Self {
        Self(requested)
    }
}

impl Shutdown {
    /// Whether the shutdown has begun.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when the shutdown begins.
    pub async fn requested(&self) {
        // An error means that the server itself is gone: that is a shutdown too.
        let _ = self.0.clone().wait_for(|requested| *requested).await;
    }
}

/// A server that is configured but does not listen yet.
pub struct Server {
    app: App,
    config: ServerConfig,
    tls: Option<TlsAcceptor>,
    begin_shutdown: watch::Sender<bool>,
}

impl Server {
    /// Checks the configuration and loads keys and certificate.
    pub fn new(config: ServerConfig, store: SharedStore) -> Result<Self, ServerError> {
        let tls = config.tls.as_ref().map(tls::acceptor).transpose()?;
        let authenticator = Authenticator::new(&config.auth)?;
        let (begin_shutdown, shutdown) = watch::channel(false);
        let app = App::new(&config, store, authenticator, Shutdown(shutdown))?;
        Ok(Self { app, config, tls, begin_shutdown })
    }

    /// Adds what is not SQS: `/v1`, metrics, the dashboard. Each request to it must carry a bearer token or a
    /// signature of a configured key, and finds its [`Identity`](crate::auth::Identity) in its extensions; except on
    /// paths that begin with one of `public`, which anyone may read.
    #[must_use]
    pub fn with_router(mut self, router: axum::Router, public: &[&str]) -> Self {
        self.app.router = Some(router);
        self.app.public = public.iter().map(|prefix| (*prefix).to_owned()).collect();
        self
    }

    /// The signal that long polls have to watch.
    pub fn shutdown(&self) -> Shutdown {
        Shutdown(self.begin_shutdown.subscribe())
    }

    /// Listens on the configured addresses; refuses one beyond loopback without keys.
    pub async fn bind(&self) -> Result<Vec<TcpListener>, ServerError> {
        let mut listeners = Vec::with_capacity(self.config.listen.len());
        for &address in &self.config.listen {
            if !address.ip().is_loopback() && !self.app.auth.has_keys() && !self.config.auth.insecure {
                return Err(ServerError::Exposed(address));
            }
            let bound = TcpListener::bind(address).await;
            listeners.push(bound.map_err(|source| ServerError::Bind { address, source })?);
        }
        Ok(listeners)
    }

    /// Serves until `shutdown` resolves; then stops accepting, lets long polls answer empty and requests under way
    /// finish, and returns within the configured bound.
    pub async fn run(self, listeners: Vec<TcpListener>, shutdown: impl Future<Output = ()>) {
        let mut limits = self.config.limits.clone();
        limits.connections_max = files::connections_max(limits.connections_max);
        let tracker = Tracker::new(limits.read_timeout_ms, limits.idle_timeout_ms);
        let accepting = Arc::new(Accepting {
            app: Arc::new(self.app),
            tls: self.tls,
            tracker: tracker.clone(),
            shutdown: Shutdown(self.begin_shutdown.subscribe()),
            limits: limits.clone(),
        });
        let mut tasks = tokio::task::JoinSet::new();
        for listener in listeners {
            tasks.spawn(accept(listener, accepting.clone()));
        }
        tasks.spawn(sweep(tracker.clone()));
        shutdown.await;
        tracing::info!(connections = tracker.len(), "shutting down");
        self.begin_shutdown.send_replace(true);
        tasks.shutdown().await;
        let bound = Duration::from_millis(limits.shutdown_timeout_ms);
        if tokio::time::timeout(bound, drain(&tracker)).await.is_err() {
            tracing::warn!(
                connections = tracker.len(),
                "requests still under way at the end of the shutdown's time"
            );
            tracker.close_all();
        }
    }
}

/// What every accepted connection needs.
pub(crate) struct Accepting {
    app: Arc<App>,
    tls: Option<TlsAcceptor>,
    tracker: Arc<Tracker>,
    shutdown: Shutdown,
    limits: LimitsConfig,
}

async fn accept(listener: TcpListener, accepting: Arc<Accepting>) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                // Only once someone is there: an idle connection harms no one before.
                accepting.tracker.make_room(accepting.limits.connections_max).await;
                let registration = accepting.tracker.register();
                tokio::spawn(connection::serve(stream, address, registration, accepting.clone()));
            }
            Err(error) => {
                // Out of file descriptors, most likely: closing something takes a moment.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Waits until the last connection is gone; half-open ones are not waited for.
async fn drain(tracker: &Tracker) {
    let quiet = Duration::from_millis(500);
    while tokio::time::timeout(quiet / 5, tracker.empty()).await.is_err() {
        tracker.close_quiet(quiet);
    }
}

async fn sweep(tracker: Arc<Tracker>) {
    loop {
        tokio::time::sleep(tracker.sweep()).await;
    }
}

//! The server's lifecycle: configure, bind, run until a signal, drain. [`hapax_net`] handles the connections.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::SharedStore;
pub use hapax_net::listen::Shutdown;
use hapax_net::listen::{Limits, Runtime};
use hapax_net::tls::{self, TlsAcceptor};
use hapax_net::unread::UnreadBudget;
use tokio::net::TcpListener;

use crate::app::{App, ConnectionHandler, ListenerKind};
use crate::auth::Authenticator;
use crate::config::{LimitsConfig, ServerConfig, TlsConfig};
use crate::error::ServerError;
use crate::native::{Backups, Native};

/// A server that is configured but does not listen yet.
pub struct Server {
    app: App,
    config: ServerConfig,
    runtime: Runtime,
}

impl Server {
    /// Checks the configuration and loads keys and certificate.
    pub fn new(config: ServerConfig, store: SharedStore) -> Result<Self, ServerError> {
        Self::with_kind(config, store, ListenerKind::SqsAndRouter)
    }

    /// A listener for the operators of a ledger, such as that of a standalone proxy: the part of the native API with which
    /// `hapax ledger`, `doctor`, `backup` and `resume` work, and `/metrics`. Every other path is 404. What else the process
    /// counts is added to the returned API.
    pub fn for_operators(
        config: ServerConfig,
        store: SharedStore,
        backups: Option<Backups>,
    ) -> Result<(Self, Native), ServerError> {
        let server = Self::with_kind(config, store.clone(), ListenerKind::Router)?;
        let native = Native::new(store, server.shutdown(), backups);
        Ok((server.with_router(native.operator_router(), &[]), native))
    }

    fn with_kind(config: ServerConfig, store: SharedStore, kind: ListenerKind) -> Result<Self, ServerError> {
        let tls = config.tls.as_ref().map(tls_acceptor).transpose()?;
        let authenticator = Authenticator::new(&config.auth)?;
        let runtime = Runtime::new(limits(&config.limits), tls);
        let app = App::new(&config, store, authenticator, runtime.shutdown(), kind)?;
        Ok(Self { app, config, runtime })
    }

    /// Adds a router for everything that is not SQS: `/v1`, metrics, the dashboard. Each request to it must have a
    /// bearer token or a signature of a configured key, and gets its [`Identity`](crate::auth::Identity) in its
    /// extensions. Paths that begin with one of `public` are exempt: anyone may read them.
    #[must_use]
    pub fn with_router(mut self, router: axum::Router, public: &[&str]) -> Self {
        self.app.router = Some(router);
        self.app.public = public.iter().map(|prefix| (*prefix).to_owned()).collect();
        self
    }

    /// `/readyz` fails with what `check` says, too: for what runs beside the server in the same process.
    pub fn add_readiness(&mut self, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.app.readiness.push(Box::new(check));
    }

    /// The signal that long polls must watch.
    pub fn shutdown(&self) -> Shutdown {
        self.runtime.shutdown()
    }

    /// Bytes of responses that clients have not read yet.
    pub fn unread_budget(&self) -> Arc<UnreadBudget> {
        self.runtime.unread_budget()
    }

    /// Listens on the configured addresses. Fails for an address beyond loopback if there are no keys.
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

    /// Serves until `shutdown` resolves. Then it stops accepting connections, lets long polls return empty and running
    /// requests finish, and returns within the configured timeout.
    pub async fn run(self, listeners: Vec<TcpListener>, shutdown: impl Future<Output = ()> + Send) {
        self.run_until(listeners, pin!(shutdown)).await;
    }

    /// Has no type parameter, so that the code of requests is compiled once, in this crate and with its settings.
    async fn run_until(
        self,
        listeners: Vec<TcpListener>,
        shutdown: Pin<&mut (dyn Future<Output = ()> + Send)>,
    ) {
        let app = Arc::new(self.app);
        self.runtime.run(listeners, move |peer| ConnectionHandler { app: app.clone(), peer }, shutdown).await;
    }
}

/// Loads the certificate and key.
pub(crate) fn tls_acceptor(config: &TlsConfig) -> Result<TlsAcceptor, ServerError> {
    tls::acceptor(&config.cert_file, &config.key_file)
        .map_err(|error| ServerError::Tls { file: error.file, problem: error.problem })
}

fn limits(config: &LimitsConfig) -> Limits {
    Limits {
        connections_max: config.connections_max,
        read_timeout: Duration::from_millis(config.read_timeout_ms),
        idle_timeout: Duration::from_millis(config.idle_timeout_ms),
        write_timeout: Duration::from_millis(config.write_timeout_ms),
        unread_bytes_max: config.unread_bytes_max,
        shutdown_timeout: Duration::from_millis(config.shutdown_timeout_ms),
        ..Limits::default()
    }
}

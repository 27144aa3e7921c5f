//! What a relay shows over HTTP: `/metrics`, `/readyz` and `/healthz`.

use std::net::SocketAddr;

use anyhow::Context as _;
use hapax::relay::RelayWatch;
use hapax_server::process::ProcessPage;
use tokio::net::TcpListener;

use crate::output::raw;
use crate::serve::url_of;

/// The listener, bound.
pub struct Page {
    listener: TcpListener,
    insecure: bool,
}

impl Page {
    /// Listens, and prints where.
    pub async fn bind(address: SocketAddr, insecure: bool) -> anyhow::Result<Self> {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("--listen {address} cannot be used"))?;
        let url = url_of(listener.local_addr()?, false);
        if let Err(error) = raw(&format!("  Metrics {url}/metrics, readiness {url}/readyz\n")) {
            // Standard output is closed; publish anyway.
            tracing::debug!("standard output: {error:#}");
        }
        Ok(Self { listener, insecure })
    }

    /// Answers until `shutdown` resolves.
    pub async fn run(self, watch: RelayWatch, shutdown: impl Future<Output = ()>) {
        let asked = watch.clone();
        let ready = move || -> hapax_server::process::Readiness {
            let ready = asked.readiness();
            Box::pin(async move { ready })
        };
        ProcessPage::new(move || watch.samples(), ready).run(self.listener, self.insecure, shutdown).await;
    }
}

//! A proxy in front of a service, both on real sockets.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use hapax_core::Ledger;
use hapax_http::IdempotencyLayer;
use hapax_http::proxy::{Proxy, ProxyConfig};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{serve, soon};

/// A running proxy.
pub struct Proxied {
    pub address: SocketAddr,
    pub layer: IdempotencyLayer,
    /// Bytes that callers have not read yet.
    pub unread: Arc<hapax_net::unread::UnreadBudget>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Proxied {
    /// Starts a proxy with these settings in front of an address.
    pub async fn before(upstream: SocketAddr, ledger: Arc<dyn Ledger>, config: ProxyConfig) -> Self {
        let config = ProxyConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            upstream: format!("http://{upstream}"),
            ..config
        };
        let proxy = Proxy::new(config, ledger).unwrap();
        let listener = proxy.bind().await.unwrap();
        let address = listener.local_addr().unwrap();
        let (layer, unread) = (proxy.layer(), proxy.unread_budget());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(proxy.run(listener, async {
            let _ = stopped.await;
        }));
        Self { address, layer, unread, stop: Some(stop), task }
    }

    /// The same in front of a router.
    pub async fn router(router: Router, ledger: Arc<dyn Ledger>, config: ProxyConfig) -> Self {
        Self::before(serve(router).await, ledger, config).await
    }

    /// Shuts it down and waits.
    pub async fn stop(mut self) {
        self.begin_stop();
        soon(&mut self.task).await.unwrap();
    }

    /// Begins the shutdown.
    pub fn begin_stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
}

/// Settings with a policy.
pub fn with_policy(policy: hapax_http::Policy) -> ProxyConfig {
    ProxyConfig { policy, ..ProxyConfig::default() }
}

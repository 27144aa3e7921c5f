//! The native API preserves all semantics of the store's traits: client, HTTP, server and embedded store together pass
//! the suite that the embedded store passes alone.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax_client::Client;
use hapax_conformance::{Factory, Harness};
use hapax_core::store::SharedStore;
use hapax_core::{Clock, Documents, Ledger, ManualClock, QueueAdmin};
use hapax_embedded::{Embedded, Options};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

struct Fresh;

/// A server on its own port in this process, and its client.
struct Running {
    client: Client,
    /// A second process would have its own client.
    second: Client,
    native: Native,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Running {
    async fn start(store: SharedStore) -> Self {
        let listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let server = Server::new(ServerConfig { listen, ..ServerConfig::default() }, store.clone()).unwrap();
        let native = Native::new(store, server.shutdown(), None);
        let server = server.with_router(native.router(), &[]);
        let listeners = server.bind().await.unwrap();
        let endpoint = format!("http://{}", listeners[0].local_addr().unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(server.run(listeners, async { drop(stopped.await) }));
        let client = Client::connect(&endpoint, None).await.unwrap();
        let second = Client::connect(&endpoint, None).await.unwrap();
        Self { client, second, native, stop, serving }
    }

    async fn stop(self) {
        drop(self.stop);
        self.serving.await.unwrap();
    }

    /// Waits until every waiting receive and claim is at the store: the suite's clock must not advance while one is
    /// still on the network.
    async fn quiet(&self) {
        while self.client.waiting_calls() + self.second.waiting_calls() != self.native.waiting_calls() {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }
}

struct Remote {
    clock: Arc<ManualClock>,
    root: TempDir,
    folder: PathBuf,
    crashes: u32,
    store: Option<Arc<Embedded>>,
    running: Option<Running>,
}

fn open(folder: &Path, clock: &Arc<ManualClock>) -> Arc<Embedded> {
    let options = Options { clock: clock.clone(), ..Options::default() };
    Arc::new(Embedded::open(folder, options).unwrap())
}

impl Remote {
    async fn start(&mut self) {
        let store = open(&self.folder, &self.clock);
        self.running = Some(Running::start(store.clone()).await);
        self.store = Some(store);
    }
}

#[async_trait]
impl Factory for Fresh {
    async fn fresh(&self) -> Box<dyn Harness> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("0");
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let mut remote = Remote { clock, root, folder, crashes: 0, store: None, running: None };
        remote.start().await;
        Box::new(remote)
    }
}

#[async_trait]
impl Harness for Remote {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        Arc::new(self.running.as_ref().unwrap().client.clone())
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.running.as_ref().unwrap().client.clone()))
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(Arc::new(self.running.as_ref().unwrap().client.clone()))
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(Arc::new(self.running.as_ref().unwrap().second.clone()))
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.running.as_ref().unwrap().second.clone()))
    }

    async fn quiet(&self) {
        self.running.as_ref().unwrap().quiet().await;
        // The writer answers in order: once it answers this, it has processed everything that is at the store.
        self.store.as_ref().unwrap().ledger_stats().await.unwrap();
    }

    async fn advance_ms(&self, ms: u64) {
        self.running.as_ref().unwrap().quiet().await;
        self.clock.advance_ms(ms);
    }

    async fn restart(&mut self) {
        self.running.take().unwrap().stop().await;
        self.store.take().unwrap().close();
        self.start().await;
    }

    /// A killed process leaves the current content of its files.
    async fn crash(&mut self) {
        self.crashes += 1;
        let after = self.root.path().join(self.crashes.to_string());
        std::fs::create_dir(&after).unwrap();
        for file in ["hapax.db", "hapax.db-wal"] {
            std::fs::copy(self.folder.join(file), after.join(file)).unwrap();
        }
        self.running.take().unwrap().serving.abort();
        self.folder = after;
        self.start().await;
    }

    fn fast_time(&self) -> bool {
        true
    }

    fn exact_time(&self) -> bool {
        true
    }

    fn can_set_wall_back(&self) -> bool {
        true
    }

    fn set_wall_back(&self, ms: u64) {
        self.clock.set_wall_ms(self.clock.wall_ms() - ms);
    }
}

fn main() -> ExitCode {
    hapax_conformance::main(
        Fresh,
        &[hapax_conformance::cases(), hapax_conformance::ledger_cases(), hapax_conformance::document_cases()],
        &[],
    )
}

//! SIGTERM and SIGINT: the first one starts an orderly shutdown, the second one exits at once.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Watches both signals from its creation on.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts watching.
    pub fn new() -> anyhow::Result<Self> {
        let watch = |kind| signal(kind).context("signals cannot be watched");
        Ok(Self { terminate: watch(SignalKind::terminate())?, interrupt: watch(SignalKind::interrupt())? })
    }

    /// Waits for either signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Resolves at the first signal; after that a second one ends the process.
    pub async fn shutdown(mut self) {
        self.next().await;
        tokio::spawn(async move {
            self.next().await;
            tracing::warn!("second signal: exiting at once");
            std::process::exit(1);
        });
    }
}

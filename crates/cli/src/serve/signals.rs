//! SIGTERM and SIGINT: the first asks for a shutdown in good order, the second exits at once.

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Watches both signals from the moment it is made.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts to watch.
    pub fn new() -> anyhow::Result<Self> {
        let watch = |kind| signal(kind).context("signals cannot be watched");
        Ok(Self { terminate: watch(SignalKind::terminate())?, interrupt: watch(SignalKind::interrupt())? })
    }

    /// Waits for either.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Resolves at the first signal; from then on a second one ends the process.
    pub async fn shutdown(mut self) {
        self.next().await;
        tokio::spawn(async move {
            self.next().await;
            tracing::warn!("second signal: exiting at once");
            std::process::exit(1);
        });
    }
}

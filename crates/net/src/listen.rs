//! Listeners: accept, serve, drain. The listeners and the shutdown signal are arguments, so tests can run it in
//! process.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::connection::{self, Peer, RequestHandler};
use crate::files;
use crate::tracker::{ConnectionTimeouts, Tracker};
use crate::unread::UnreadBudget;

/// How long a connection without a request may stay open once the shutdown has begun.
const SHUTDOWN_IDLE_MAX: Duration = Duration::from_millis(500);
/// How long a connection may take to end after the shutdown has closed it.
const SHUTDOWN_CLOSE_MAX: Duration = Duration::from_secs(1);

/// Limits on the connections of a listener.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum number of connections. Above it, a new connection closes the one that has been idle longest.
    pub connections_max: usize,
    /// The largest head of a request, in bytes; 8 KiB or more.
    pub header_bytes_max: usize,
    /// How long a TLS handshake or a request's head may take to arrive.
    pub read_timeout: Duration,
    /// How long a connection may stay open without a request.
    pub idle_timeout: Duration,
    /// How long a client may leave a response unread. While the budget is low: a tenth of it, at most 3 s.
    pub write_timeout: Duration,
    /// Maximum bytes of unread responses, over all clients. Small responses of requests that are under way when it is
    /// reached may use as much again ([`unread`](crate::unread)).
    pub unread_bytes_max: usize,
    /// How long a shutdown waits for running requests.
    pub shutdown_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            header_bytes_max: 64 * 1024,
            read_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_mins(2),
            write_timeout: Duration::from_secs(30),
            unread_bytes_max: 256 * 1024 * 1024,
            shutdown_timeout: Duration::from_secs(10),
        }
    }
}

/// The shutdown signal of a listener. Long polls watch it, so that they return empty instead of being cut off.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<bool>);

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
        // An error means that the listener was dropped: that is a shutdown too.
        let _ = self.0.clone().wait_for(|requested| *requested).await;
    }
}

/// Configuration and shared state of a server that does not listen yet.
pub struct Runtime {
    limits: Limits,
    tls: Option<TlsAcceptor>,
    budget: Arc<UnreadBudget>,
    begin_shutdown: watch::Sender<bool>,
}

/// The state shared by all accepted connections.
pub(crate) struct ListenerState<C> {
    pub(crate) new_handler: C,
    pub(crate) limits: Limits,
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) shutdown: Shutdown,
    /// How long a request waits for the budget.
    pub(crate) budget_wait: Duration,
    tracker: Arc<Tracker>,
}

impl Runtime {
    /// A runtime with these limits; `tls` encrypts its connections.
    pub fn new(limits: Limits, tls: Option<TlsAcceptor>) -> Self {
        let budget = UnreadBudget::new(limits.unread_bytes_max);
        Self { limits, tls, budget, begin_shutdown: watch::Sender::new(false) }
    }

    /// The signal that long polls watch.
    pub fn shutdown(&self) -> Shutdown {
        Shutdown(self.begin_shutdown.subscribe())
    }

    /// The counter of response bytes that clients have not read.
    pub fn unread_budget(&self) -> Arc<UnreadBudget> {
        self.budget.clone()
    }

    /// Serves until `shutdown` resolves; then stops accepting, lets running requests finish, and returns within the
    /// configured timeout: `false` if requests were cut off. `new_handler` creates the request handler of a connection.
    pub async fn run<A, C>(
        self,
        listeners: Vec<TcpListener>,
        new_handler: C,
        shutdown: impl Future<Output = ()>,
    ) -> bool
    where
        A: RequestHandler,
        C: Fn(Peer) -> A + Send + Sync + 'static,
    {
        let stop = self.shutdown();
        let mut limits = self.limits;
        limits.connections_max = files::connections_max(limits.connections_max);
        let timeouts = ConnectionTimeouts {
            head_ms_max: ms(limits.read_timeout),
            idle_ms_max: ms(limits.idle_timeout),
            write_ms_max: ms(limits.write_timeout),
        };
        let tracker = Tracker::new(timeouts, self.budget);
        let shutdown_timeout = limits.shutdown_timeout;
        let listener_state = Arc::new(ListenerState {
            new_handler,
            limits,
            tls: self.tls,
            shutdown: stop,
            // A slow reader is closed within this time: one sweep detects it, and the next one closes it.
            budget_wait: Duration::from_millis(timeouts.write_ms_when_low()) + 2 * tracker.sweep(),
            tracker: tracker.clone(),
        });
        let mut tasks = JoinSet::new();
        for listener in listeners {
            tasks.spawn(accept(listener, listener_state.clone()));
        }
        tasks.spawn(sweep(tracker.clone()));
        shutdown.await;
        tracing::info!(connections = tracker.len(), "shutting down");
        self.begin_shutdown.send_replace(true);
        tasks.shutdown().await;
        if tokio::time::timeout(shutdown_timeout, drain(&tracker)).await.is_ok() {
            return true;
        }
        tracing::warn!(
            connections = tracker.len(),
            "requests still under way at the end of the shutdown's time are cut off"
        );
        tracker.close_all();
        let _ = tokio::time::timeout(SHUTDOWN_CLOSE_MAX, tracker.all_closed()).await;
        false
    }
}

/// Converts to whole milliseconds.
fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

async fn accept<A, C>(listener: TcpListener, listener_state: Arc<ListenerState<C>>)
where
    A: RequestHandler,
    C: Fn(Peer) -> A + Send + Sync + 'static,
{
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                // Only after accepting a client: before that, there is no need to close idle connections.
                listener_state.tracker.free_slot(listener_state.limits.connections_max).await;
                let registration = listener_state.tracker.register();
                tokio::spawn(connection::serve(stream, address, registration, listener_state.clone()));
            }
            Err(error) => {
                // Most likely out of file descriptors: wait until some are closed.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Waits until the last connection is closed; closes half-open ones itself.
async fn drain(tracker: &Tracker) {
    // The sweep also closes clients that do not read their response, as during normal operation.
    while tokio::time::timeout(SHUTDOWN_IDLE_MAX / 5, tracker.all_closed()).await.is_err() {
        tracker.close_idle(SHUTDOWN_IDLE_MAX);
        tracker.sweep();
    }
}

async fn sweep(tracker: Arc<Tracker>) {
    loop {
        tokio::time::sleep(tracker.sweep()).await;
    }
}

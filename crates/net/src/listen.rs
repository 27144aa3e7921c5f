//! Listeners: accept, serve, drain. `run(listeners, connect, shutdown)`, hence testable in process.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::connection::{self, Answer, Peer};
use crate::files;
use crate::tracker::{Patience, Tracker};
use crate::unread::Room;

/// How long a connection without a request may linger once the shutdown has begun.
const QUIET: Duration = Duration::from_millis(500);
/// How long a connection that is cut off may take to end.
const CUT_OFF: Duration = Duration::from_secs(1);

/// Bounds on the connections of a listener.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The most connections at once; past it the one that has been idle longest is closed for a new one.
    pub connections_max: usize,
    /// The largest head of a request, in bytes; 8 KiB or more.
    pub header_bytes_max: usize,
    /// How long a TLS handshake or a request's head may take to arrive, in milliseconds.
    pub read_timeout_ms: u64,
    /// How long a connection may stay open without a request, in milliseconds.
    pub idle_timeout_ms: u64,
    /// How long a client may leave an answer unread, in milliseconds; a tenth of it, and 3 s at most, while room for
    /// answers is short.
    pub write_timeout_ms: u64,
    /// How many bytes of answers may wait to be read by all clients together.
    pub unread_bytes_max: usize,
    /// How long a shutdown waits for requests under way, in milliseconds.
    pub shutdown_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            header_bytes_max: 64 * 1024,
            read_timeout_ms: 30_000,
            idle_timeout_ms: 120_000,
            write_timeout_ms: 30_000,
            unread_bytes_max: 256 * 1024 * 1024,
            shutdown_timeout_ms: 10_000,
        }
    }
}

/// Tells whether the listener is going down. Long polls watch it, so that they answer empty instead of being cut off.
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
        // An error means that the listener itself is gone: that is a shutdown too.
        let _ = self.0.clone().wait_for(|requested| *requested).await;
    }
}

/// What serves connections; it does not listen yet.
pub struct Runtime {
    limits: Limits,
    tls: Option<TlsAcceptor>,
    room: Arc<Room>,
    begin_shutdown: watch::Sender<bool>,
}

/// What every accepted connection needs.
pub(crate) struct Listening<C> {
    pub(crate) connect: C,
    pub(crate) limits: Limits,
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) shutdown: Shutdown,
    /// How long a request waits for room for its answer.
    pub(crate) room_wait: Duration,
    tracker: Arc<Tracker>,
}

impl Runtime {
    /// Bounds, and TLS if connections are to be encrypted.
    pub fn new(limits: Limits, tls: Option<TlsAcceptor>) -> Self {
        let room = Room::new(limits.unread_bytes_max);
        Self { limits, tls, room, begin_shutdown: watch::Sender::new(false) }
    }

    /// The signal that long polls have to watch.
    pub fn shutdown(&self) -> Shutdown {
        Shutdown(self.begin_shutdown.subscribe())
    }

    /// How much is waiting to be read by clients.
    pub fn unread(&self) -> Arc<Room> {
        self.room.clone()
    }

    /// Serves until `shutdown` resolves; then stops accepting, lets requests under way finish, and returns within the
    /// configured bound: `false` if requests were cut off. `connect` makes what answers the requests of a connection.
    pub async fn run<A, C>(
        self,
        listeners: Vec<TcpListener>,
        connect: C,
        shutdown: impl Future<Output = ()>,
    ) -> bool
    where
        A: Answer,
        C: Fn(Peer) -> A + Send + Sync + 'static,
    {
        let stop = self.shutdown();
        let mut limits = self.limits;
        limits.connections_max = files::connections_max(limits.connections_max);
        let patience = Patience {
            head_ms_max: limits.read_timeout_ms,
            idle_ms_max: limits.idle_timeout_ms,
            write_ms_max: limits.write_timeout_ms,
        };
        let tracker = Tracker::new(patience, self.room);
        let bound = Duration::from_millis(limits.shutdown_timeout_ms);
        let listening = Arc::new(Listening {
            connect,
            limits,
            tls: self.tls,
            shutdown: stop,
            // A slow reader is closed within this: it takes a sweep to find it slow, and one more to close it.
            room_wait: Duration::from_millis(patience.short_ms()) + 2 * tracker.sweep(),
            tracker: tracker.clone(),
        });
        let mut tasks = JoinSet::new();
        for listener in listeners {
            tasks.spawn(accept(listener, listening.clone()));
        }
        tasks.spawn(sweep(tracker.clone()));
        shutdown.await;
        tracing::info!(connections = tracker.len(), "shutting down");
        self.begin_shutdown.send_replace(true);
        tasks.shutdown().await;
        if tokio::time::timeout(bound, drain(&tracker)).await.is_ok() {
            return true;
        }
        tracing::warn!(
            connections = tracker.len(),
            "requests still under way at the end of the shutdown's time are cut off"
        );
        tracker.close_all();
        let _ = tokio::time::timeout(CUT_OFF, tracker.empty()).await;
        false
    }
}

async fn accept<A, C>(listener: TcpListener, listening: Arc<Listening<C>>)
where
    A: Answer,
    C: Fn(Peer) -> A + Send + Sync + 'static,
{
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                // Only once a client is there: an idle connection does no harm before.
                listening.tracker.make_room(listening.limits.connections_max).await;
                let registration = listening.tracker.register();
                tokio::spawn(connection::serve(stream, address, registration, listening.clone()));
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
    // A client that does not read its answer is closed as at any other time.
    while tokio::time::timeout(QUIET / 5, tracker.empty()).await.is_err() {
        tracker.close_quiet(QUIET);
        tracker.sweep();
    }
}

async fn sweep(tracker: Arc<Tracker>) {
    loop {
        tokio::time::sleep(tracker.sweep()).await;
    }
}

//! Which connections are open and what each is waiting for, so that slow and half-open ones can be told from working
//! ones without a timer per request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Open, with no request begun.
const IDLE: u8 = 0;
/// A request's head has begun to arrive.
const HEAD: u8 = 1;
/// At least one request is being read or answered.
const BUSY: u8 = 2;

/// One connection's state. Shared by its socket, its requests and the sweeper.
pub(crate) struct Connection {
    start: Instant,
    phase: AtomicU8,
    /// When the phase began, in microseconds since the tracker's start.
    since_us: AtomicU64,
    /// Requests between their head and their answer.
    requests: AtomicU32,
    /// Requests whose body has arrived: the server's turn.
    working: AtomicU32,
    close: Notify,
}

impl Connection {
    fn enter(&self, phase: u8) {
        self.since_us.store(self.start.elapsed().as_micros() as u64, Relaxed);
        self.phase.store(phase, Relaxed);
    }

    /// Bytes have arrived.
    pub(crate) fn on_bytes(&self) {
        if self.phase.load(Relaxed) == IDLE {
            self.enter(HEAD);
        }
    }

    /// A request's head has arrived; it is under way until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> RequestGuard {
        self.requests.fetch_add(1, Relaxed);
        self.enter(BUSY);
        RequestGuard { connection: self.clone(), working: false }
    }

    /// Resolves when the connection has to go.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }
}

/// One request under way.
pub(crate) struct RequestGuard {
    connection: Arc<Connection>,
    working: bool,
}

impl RequestGuard {
    /// The body is complete: from here on it is the server that takes the time.
    pub(crate) fn body_read(&mut self) {
        if !self.working {
            self.working = true;
            self.connection.working.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if self.working {
            self.connection.working.fetch_sub(1, Relaxed);
        }
        if self.connection.requests.fetch_sub(1, Relaxed) == 1 {
            self.connection.enter(IDLE);
        }
    }
}

/// All open connections.
pub(crate) struct Tracker {
    start: Instant,
    open: Mutex<(u64, HashMap<u64, Arc<Connection>>)>,
    /// Told whenever a connection has gone.
    gone: Notify,
    head_ms_max: u64,
    idle_ms_max: u64,
}

/// Keeps a connection registered.
pub(crate) struct Registration {
    tracker: Arc<Tracker>,
    id: u64,
    pub(crate) connection: Arc<Connection>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.tracker.lock().1.remove(&self.id);
        self.tracker.gone.notify_waiters();
    }
}

impl Tracker {
    pub(crate) fn new(head_ms_max: u64, idle_ms_max: u64) -> Arc<Self> {
        let start = Instant::now();
        Arc::new(Self { start, open: Mutex::default(), gone: Notify::new(), head_ms_max, idle_ms_max })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (u64, HashMap<u64, Arc<Connection>>)> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn register(self: &Arc<Self>) -> Registration {
        let connection = Arc::new(Connection {
            start: self.start,
            phase: AtomicU8::new(IDLE),
            since_us: AtomicU64::new(self.start.elapsed().as_micros() as u64),
            requests: AtomicU32::new(0),
            working: AtomicU32::new(0),
            close: Notify::new(),
        });
        let mut open = self.lock();
        open.0 += 1;
        let id = open.0;
        open.1.insert(id, connection.clone());
        Registration { tracker: self.clone(), id, connection }
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().1.len()
    }

    /// Waits until there is room below `max`, closing the connection that has waited longest for its client.
    pub(crate) async fn make_room(&self, max: usize) {
        loop {
            let gone = self.gone.notified();
            tokio::pin!(gone);
            gone.as_mut().enable();
            if self.len() < max {
                return;
            }
            self.evict_one();
            // Every connection may be at work: then one of them must end first.
            let _ = tokio::time::timeout(Duration::from_millis(100), gone).await;
        }
    }

    fn evict_one(&self) {
        let open = self.lock();
        let waiting = open.1.values().filter(|c| c.working.load(Relaxed) == 0);
        if let Some(oldest) = waiting.min_by_key(|c| c.since_us.load(Relaxed)) {
            tracing::warn!(
                connections = open.1.len(),
                "connection limit reached; closing the idlest connection"
            );
            oldest.close.notify_one();
        }
    }

    /// Closes connections that have kept the server waiting too long. Returns when the next sweep is due.
    pub(crate) fn sweep(&self) -> Duration {
        let now_us = self.start.elapsed().as_micros() as u64;
        for connection in self.lock().1.values() {
            let limit_ms = match connection.phase.load(Relaxed) {
                IDLE => self.idle_ms_max,
                HEAD => self.head_ms_max,
                _ => continue,
            };
            if now_us.saturating_sub(connection.since_us.load(Relaxed)) >= limit_ms * 1000 {
                connection.close.notify_one();
            }
        }
        Duration::from_millis((self.head_ms_max.min(self.idle_ms_max) / 4).clamp(20, 1000))
    }

    /// Closes connections that have been without a whole request for `quiet`: long enough for the last answer to have
    /// been written.
    pub(crate) fn close_quiet(&self, quiet: Duration) {
        let now_us = self.start.elapsed().as_micros() as u64;
        let quiet_us = quiet.as_micros() as u64;
        for connection in self.lock().1.values() {
            let since_us = connection.since_us.load(Relaxed);
            if connection.requests.load(Relaxed) == 0 && now_us.saturating_sub(since_us) >= quiet_us {
                connection.close.notify_one();
            }
        }
    }

    /// Closes every connection, whatever it is doing.
    pub(crate) fn close_all(&self) {
        for connection in self.lock().1.values() {
            connection.close.notify_one();
        }
    }

    /// Resolves when no connection is left.
    pub(crate) async fn empty(&self) {
        loop {
            let gone = self.gone.notified();
            tokio::pin!(gone);
            gone.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            gone.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_idlest_connection_makes_room_and_a_working_one_does_not() {
        let tracker = Tracker::new(1000, 1000);
        let working = tracker.register();
        let mut request = working.connection.begin();
        request.body_read();
        let idle = tracker.register();
        let closing = idle.connection.clone();
        let room = tokio::spawn({
            let tracker = tracker.clone();
            async move { tracker.make_room(2).await }
        });
        closing.closed().await;
        drop(idle);
        room.await.unwrap();
        assert_eq!(tracker.len(), 1);
    }

    #[tokio::test]
    async fn a_half_sent_head_is_closed_and_a_request_under_way_is_not() {
        let tracker = Tracker::new(0, 1_000_000);
        let (slow, busy) = (tracker.register(), tracker.register());
        slow.connection.on_bytes();
        let _request = busy.connection.begin();
        tracker.sweep();
        slow.connection.closed().await;
        let still_open = tokio::time::timeout(Duration::from_millis(20), busy.connection.closed()).await;
        assert!(still_open.is_err());
    }
}

//! The open connections and the state of each one. Slow and half-open connections are detected without a timer per
//! request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::unread::{self, UnreadBudget};

/// Open, without a request.
const IDLE: u8 = 0;
/// A request's head has begun to arrive.
const HEAD: u8 = 1;
/// At least one request is being read or answered.
const BUSY: u8 = 2;

/// Timeouts of a connection, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionTimeouts {
    /// From the first byte of a request head to its last.
    pub(crate) head_ms_max: u64,
    /// Without a request.
    pub(crate) idle_ms_max: u64,
    /// Without reading any byte of a response that is ready.
    pub(crate) write_ms_max: u64,
}

impl ConnectionTimeouts {
    /// The write timeout while little of the budget is left.
    pub(crate) fn write_ms_when_low(self) -> u64 {
        (self.write_ms_max / 10).clamp(1, 3_000)
    }
}

/// One connection's state. Shared by its socket, its requests, its responses and the sweeper.
#[derive(Debug)]
pub(crate) struct Connection {
    start: Instant,
    phase: AtomicU8,
    /// When the phase began, in microseconds since the tracker's start.
    since_us: AtomicU64,
    /// Requests between their head and the end of their response.
    requests: AtomicU32,
    /// Requests whose body has arrived: the client waits for the listener.
    working: AtomicU32,
    /// Bytes that the socket has accepted.
    written: AtomicU64,
    /// Bytes of responses that the socket has not accepted yet.
    pub(crate) unread: AtomicUsize,
    pub(crate) budget: Arc<UnreadBudget>,
    close: Notify,
}

impl Connection {
    fn new(start: Instant, now_us: u64, budget: Arc<UnreadBudget>) -> Self {
        Self {
            start,
            phase: AtomicU8::new(IDLE),
            since_us: AtomicU64::new(now_us),
            requests: AtomicU32::new(0),
            working: AtomicU32::new(0),
            written: AtomicU64::new(0),
            unread: AtomicUsize::new(0),
            budget,
            close: Notify::new(),
        }
    }

    fn enter(&self, phase: u8) {
        self.since_us.store(self.start.elapsed().as_micros() as u64, Relaxed);
        self.phase.store(phase, Relaxed);
    }

    /// Bytes have arrived at a point where a request head may start.
    pub(crate) fn on_bytes_read(&self) {
        if self.phase.load(Relaxed) == IDLE {
            self.enter(HEAD);
        }
    }

    /// The socket has accepted bytes. Only the connection's own task writes.
    pub(crate) fn on_written(&self, bytes: usize) {
        self.written.store(self.written.load(Relaxed) + bytes as u64, Relaxed);
    }

    /// A request's head has arrived. The request counts as running until the guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.requests.fetch_add(1, Relaxed);
        self.enter(BUSY);
        RequestGuard { budget: ConnectionBudget(self.clone()), working: AtomicBool::new(false) }
    }

    /// Resolves when the connection has to close.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }

    /// Whether no request is running and no response is unread.
    fn is_idle(&self) -> bool {
        self.requests.load(Relaxed) == 0 && self.unread.load(Relaxed) == 0
    }
}

/// One running request: from its head to the end of its response.
#[derive(Debug)]
pub struct RequestGuard {
    budget: ConnectionBudget,
    working: AtomicBool,
}

impl RequestGuard {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.budget.0
    }

    /// Marks the body as complete or as forwarded while it arrives. From then on the connection is not closed to make
    /// room for another one.
    pub fn mark_body_read(&self) {
        if !self.working.swap(true, Relaxed) {
            self.connection().working.fetch_add(1, Relaxed);
        }
    }

    /// The budget for this request's response.
    pub fn budget(&self) -> &ConnectionBudget {
        &self.budget
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let connection = &self.budget.0;
        if *self.working.get_mut() {
            connection.working.fetch_sub(1, Relaxed);
        }
        if connection.requests.fetch_sub(1, Relaxed) == 1 {
            connection.enter(IDLE);
        }
    }
}

/// The budget for unread responses on one connection.
#[derive(Debug, Clone)]
pub struct ConnectionBudget(Arc<Connection>);

impl ConnectionBudget {
    /// An unlimited budget, for responses that are not sent over a connection.
    pub fn unbounded() -> Self {
        Self(Arc::new(Connection::new(Instant::now(), 0, UnreadBudget::new(usize::MAX))))
    }

    /// Whether a response of about this size can be sent now: see [`unread`](crate::unread).
    pub fn fits(&self, bytes: usize) -> bool {
        unread::fits(&self.0, bytes)
    }
}

/// An open connection, and its client's progress at the last sweep.
struct OpenConnection {
    connection: Arc<Connection>,
    written: u64,
    /// Start of the slow reading, in microseconds since the tracker's start.
    slow_since_us: u64,
}

impl OpenConnection {
    /// Whether the client has been reading too slowly for too long. `since_us` is the time of the last sweep.
    fn reads_too_slowly(&mut self, now_us: u64, since_us: u64, timeouts: ConnectionTimeouts) -> bool {
        let unread = self.connection.unread.load(Relaxed) as u64;
        let written = self.connection.written.load(Relaxed);
        let progress_bytes = written - std::mem::replace(&mut self.written, written);
        let short = self.connection.budget.is_low_for(&self.connection);
        let enough = if short {
            // At this speed, the client would read all ready bytes within the write timeout.
            u128::from(progress_bytes) * u128::from(timeouts.write_ms_max) * 1000
                >= u128::from(unread) * u128::from(now_us.saturating_sub(since_us))
        } else {
            progress_bytes > 0
        };
        if unread == 0 || enough {
            self.slow_since_us = now_us;
            return false;
        }
        let limit_ms = if short { timeouts.write_ms_when_low() } else { timeouts.write_ms_max };
        now_us.saturating_sub(self.slow_since_us) >= limit_ms * 1000
    }
}

#[derive(Default)]
struct Connections {
    last_id: u64,
    swept_us: u64,
    open: HashMap<u64, OpenConnection>,
}

/// All open connections of a listener.
pub(crate) struct Tracker {
    start: Instant,
    connections: Mutex<Connections>,
    /// Notified whenever a connection has closed.
    connection_closed: Notify,
    timeouts: ConnectionTimeouts,
    budget: Arc<UnreadBudget>,
}

/// Keeps a connection registered.
pub(crate) struct Registration {
    tracker: Arc<Tracker>,
    id: u64,
    pub(crate) connection: Arc<Connection>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.tracker.lock().open.remove(&self.id);
        self.tracker.connection_closed.notify_waiters();
    }
}

impl Tracker {
    pub(crate) fn new(timeouts: ConnectionTimeouts, budget: Arc<UnreadBudget>) -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            connections: Mutex::default(),
            connection_closed: Notify::new(),
            timeouts,
            budget,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    pub(crate) fn register(self: &Arc<Self>) -> Registration {
        let now_us = self.now_us();
        let connection = Arc::new(Connection::new(self.start, now_us, self.budget.clone()));
        let mut connections = self.lock();
        connections.last_id += 1;
        let id = connections.last_id;
        let open = OpenConnection { connection: connection.clone(), written: 0, slow_since_us: now_us };
        connections.open.insert(id, open);
        Registration { tracker: self.clone(), id, connection }
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().open.len()
    }

    /// Waits until there are fewer than `max` connections; closes the one that has waited longest for its client.
    pub(crate) async fn free_slot(&self, max: usize) {
        loop {
            let connection_closed = self.connection_closed.notified();
            tokio::pin!(connection_closed);
            connection_closed.as_mut().enable();
            if self.len() < max {
                return;
            }
            self.evict_one();
            // All connections may be busy: then one of them must end first.
            let _ = tokio::time::timeout(Duration::from_millis(100), connection_closed).await;
        }
    }

    fn evict_one(&self) {
        let connections = self.lock();
        // A connection with an unread response is left to the sweeper.
        let is_waiting = |c: &&Arc<Connection>| c.working.load(Relaxed) == 0 && c.unread.load(Relaxed) == 0;
        let waiting = connections.open.values().map(|open| &open.connection).filter(is_waiting);
        if let Some(oldest) = waiting.min_by_key(|c| c.since_us.load(Relaxed)) {
            tracing::warn!(
                connections = connections.open.len(),
                "connection limit reached; closing the idlest connection"
            );
            oldest.close.notify_one();
        }
    }

    /// Closes connections that have exceeded a timeout. Returns the time until the next sweep.
    pub(crate) fn sweep(&self) -> Duration {
        let ConnectionTimeouts { head_ms_max, idle_ms_max, write_ms_max } = self.timeouts;
        let mut connections = self.lock();
        let now_us = self.now_us();
        let since_us = std::mem::replace(&mut connections.swept_us, now_us);
        for open in connections.open.values_mut() {
            if open.reads_too_slowly(now_us, since_us, self.timeouts) {
                tracing::warn!("closing a connection that does not read its response");
                open.connection.close.notify_one();
                continue;
            }
            let limit_ms = match open.connection.phase.load(Relaxed) {
                IDLE => idle_ms_max,
                HEAD => head_ms_max,
                _ => continue,
            };
            let waited_us = now_us.saturating_sub(open.connection.since_us.load(Relaxed));
            if open.connection.unread.load(Relaxed) == 0 && waited_us >= limit_ms * 1000 {
                open.connection.close.notify_one();
            }
        }
        let shortest_ms = head_ms_max.min(idle_ms_max).min(write_ms_max);
        Duration::from_millis((shortest_ms / 4).clamp(20, 1000))
    }

    /// Closes connections that have had no complete request for `idle_min` and no unread response.
    pub(crate) fn close_idle(&self, idle_min: Duration) {
        let (now_us, idle_min_us) = (self.now_us(), idle_min.as_micros() as u64);
        for OpenConnection { connection, .. } in self.lock().open.values() {
            let since_us = connection.since_us.load(Relaxed);
            if connection.is_idle() && now_us.saturating_sub(since_us) >= idle_min_us {
                connection.close.notify_one();
            }
        }
    }

    /// Closes every connection in any state.
    pub(crate) fn close_all(&self) {
        for open in self.lock().open.values() {
            open.connection.close.notify_one();
        }
    }

    /// Resolves when no connection is left.
    pub(crate) async fn all_closed(&self) {
        loop {
            let connection_closed = self.connection_closed.notified();
            tokio::pin!(connection_closed);
            connection_closed.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            connection_closed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(head_ms_max: u64, idle_ms_max: u64) -> Arc<Tracker> {
        let timeouts = ConnectionTimeouts { head_ms_max, idle_ms_max, write_ms_max: 1_000_000 };
        Tracker::new(timeouts, UnreadBudget::new(1_000_000))
    }

    #[tokio::test]
    async fn the_idlest_connection_makes_room_and_a_working_one_does_not() {
        let tracker = tracker(1000, 1000);
        let working = tracker.register();
        let request = working.connection.begin_request();
        request.mark_body_read();
        let idle = tracker.register();
        let closing = idle.connection.clone();
        let slot = tokio::spawn({
            let tracker = tracker.clone();
            async move { tracker.free_slot(2).await }
        });
        closing.closed().await;
        drop(idle);
        slot.await.unwrap();
        assert_eq!(tracker.len(), 1);
    }

    /// Its request is over, but the client is in the middle of the answer.
    #[tokio::test]
    async fn a_connection_with_an_unread_response_is_not_evicted() {
        let tracker = tracker(1000, 1000);
        let reading = tracker.register();
        let answer = unread::tests::charge(&reading.connection, 10);
        tracker.evict_one();
        let closed = tokio::time::timeout(Duration::from_millis(20), reading.connection.closed()).await;
        assert!(closed.is_err(), "it is closed in the middle of its answer");
        drop(answer);
        tracker.evict_one();
        tokio::time::timeout(Duration::from_secs(10), reading.connection.closed())
            .await
            .expect("it is idle now");
    }

    #[tokio::test]
    async fn a_half_sent_head_is_closed_and_a_request_under_way_is_not() {
        let tracker = tracker(0, 1_000_000);
        let (slow, busy) = (tracker.register(), tracker.register());
        slow.connection.on_bytes_read();
        let _request = busy.connection.begin_request();
        tracker.sweep();
        slow.connection.closed().await;
        let still_open = tokio::time::timeout(Duration::from_millis(20), busy.connection.closed()).await;
        assert!(still_open.is_err());
    }

    /// One sweep per second: `read` holds the bytes that the client reads before each; returns whether each one closes
    /// it.
    fn slow_reader(unread: usize, short: bool, read: &[u64]) -> Vec<bool> {
        let timeouts = ConnectionTimeouts { head_ms_max: 1000, idle_ms_max: 1000, write_ms_max: 10_000 };
        let tracker = Tracker::new(timeouts, UnreadBudget::new(if short { unread } else { unread * 100 }));
        let registration = tracker.register();
        let connection = registration.connection.clone();
        let _answer = unread::tests::charge(&connection, unread);
        let mut open = OpenConnection { connection: connection.clone(), written: 0, slow_since_us: 0 };
        let second = |(at, bytes): (usize, &u64)| {
            connection.on_written(*bytes as usize);
            let at_us = (at as u64 + 1) * 1_000_000;
            open.reads_too_slowly(at_us, at_us - 1_000_000, timeouts)
        };
        read.iter().enumerate().map(second).collect()
    }

    /// The requests of a connection that fills its share wait. A client that reads slowly beside it is not hurried by that.
    #[tokio::test]
    async fn a_greedy_connection_does_not_make_room_short_for_others() {
        let timeouts = ConnectionTimeouts { head_ms_max: 1000, idle_ms_max: 1000, write_ms_max: 10_000 };
        let tracker = Tracker::new(timeouts, UnreadBudget::new(8_000));
        let (greedy, other) = (tracker.register(), tracker.register());
        let _large = unread::tests::charge(&greedy.connection, 2_000);
        let _small = unread::tests::charge(&other.connection, 100);
        let waits = greedy.connection.clone();
        let waiting =
            tokio::spawn(async move { unread::wait_for_budget(&waits, Duration::from_mins(1)).await });
        while !tracker.budget.has_waiters() {
            tokio::task::yield_now().await;
        }
        let closed = |registration: &Registration| {
            let connection = registration.connection.clone();
            let mut open = OpenConnection { connection, written: 0, slow_since_us: 0 };
            open.reads_too_slowly(2_000_000, 1_000_000, timeouts)
        };
        assert!(closed(&greedy), "it fills more than its share and reads nothing");
        assert!(!closed(&other), "there is room enough for it");
        waiting.abort();
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_closed_and_one_that_reads_little_only_when_room_is_short() {
        let closed_at = |closed: Vec<bool>| closed.iter().position(|closed| *closed);
        assert_eq!(closed_at(slow_reader(1000, false, &[0; 12])), Some(9), "the whole write timeout");
        assert_eq!(closed_at(slow_reader(1000, false, &[1; 60])), None, "a trickle is enough");
        assert_eq!(closed_at(slow_reader(1000, true, &[1; 60])), Some(0), "a tenth of the write timeout");
        assert_eq!(
            closed_at(slow_reader(1000, true, &[100; 60])),
            None,
            "all of it within the write timeout"
        );
    }
}

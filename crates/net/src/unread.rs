//! Responses that clients have not read yet: counted in bytes from their creation until they are written to the socket,
//! with a limit over all connections of a listener.
//!
//! Three rules enforce the limit. A request starts only while the budget has room; it waits briefly, and is then told to
//! retry. A large response that does not fit after it was created is replaced by an error. The next chunk of a streamed
//! response is polled only while the budget has room. Room becomes free because a connection that reads too slowly is
//! closed (see [`tracker`](crate::tracker)), much sooner when the budget is low. A connection that uses more than its share
//! is closed just as soon if it reads slowly.
//!
//! Small responses of requests that are already under way may exceed the limit, up to twice the limit. Beyond that a
//! response is cut off: its client learns no result, as after any broken connection. Responses of at most 1 KiB, such as
//! those of health checks and of single sends and settles, are never cut off.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::Response;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use crate::body::{Body, BoxError};
use crate::tracker::{Connection, RequestGuard};

/// Responses up to this size are sent even if the budget is used up: refusing them would save almost no memory, and most of them
/// confirm a completed operation.
pub const SMALL_BYTES_MAX: usize = 256 * 1024;

/// How many times the budget small responses may use, and everything that was sent although the budget was used up.
const EXCESS: usize = 2;

/// A response of at most this size is always sent.
const TINY_BYTES_MAX: usize = 1024;

/// One connection may use 1/8 of the budget.
const SHARES: usize = 8;

/// The memory budget for unread responses of one listener.
#[derive(Debug)]
pub struct UnreadBudget {
    bytes_max: usize,
    used: AtomicUsize,
    peak: AtomicUsize,
    waiting: AtomicUsize,
    freed: Arc<Notify>,
}

impl UnreadBudget {
    /// A budget of `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            used: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            freed: Arc::default(),
        })
    }

    /// Bytes of responses that are unread now.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Highest value of [`used`](Self::used) so far.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    /// Whether slow readers have to be closed soon: at least half of the budget is used.
    fn is_low(&self) -> bool {
        self.used() >= self.bytes_max / 2
    }

    /// Whether this connection has to be closed soon if it reads slowly: the budget is low, or it uses more than its share.
    pub(crate) fn is_low_for(&self, connection: &Connection) -> bool {
        self.is_low() || connection.unread.load(Relaxed) > self.bytes_max / SHARES
    }

    #[cfg(test)]
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    fn admits(&self, connection: &Connection) -> bool {
        self.used.load(SeqCst) < self.bytes_max && connection.unread.load(SeqCst) <= self.bytes_max / SHARES
    }

    /// Whether a response of this size can be created. It always can if no other response is unread.
    fn fits(&self, connection: &Connection, bytes: usize) -> bool {
        let (used, own) = (self.used(), connection.unread.load(Relaxed));
        let fits = |used: usize, max: usize| used == 0 || used.saturating_add(bytes) <= max;
        fits(used, self.bytes_max) && fits(own, self.bytes_max / SHARES)
    }

    /// Whether there is no memory left even for a small response.
    fn is_exhausted(&self, bytes: usize) -> bool {
        let used = self.used();
        bytes > TINY_BYTES_MAX
            && used > 0
            && used.saturating_add(bytes) > self.bytes_max.saturating_mul(EXCESS)
    }

    fn add(&self, bytes: usize) {
        let used = self.used.fetch_add(bytes, SeqCst) + bytes;
        if used > self.peak.load(Relaxed) {
            self.peak.fetch_max(used, Relaxed);
        }
    }

    fn remove(&self, bytes: usize) {
        self.used.fetch_sub(bytes, SeqCst);
        if self.waiting.load(SeqCst) > 0 {
            self.freed.notify_waiters();
        }
    }
}

/// Waits for the budget on behalf of one connection. Counts as waiting until it is dropped.
struct BudgetWait {
    connection: Arc<Connection>,
    freed: Pin<Box<OwnedNotified>>,
}

impl BudgetWait {
    fn new(connection: Arc<Connection>) -> Self {
        connection.budget.waiting.fetch_add(1, SeqCst);
        let freed = Box::pin(connection.budget.freed.clone().notified_owned());
        Self { connection, freed }
    }

    fn poll_admitted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            self.freed.as_mut().enable();
            if self.connection.budget.admits(&self.connection) {
                return Poll::Ready(());
            }
            ready!(self.freed.as_mut().poll(cx));
            self.freed = Box::pin(self.connection.budget.freed.clone().notified_owned());
        }
    }
}

impl Drop for BudgetWait {
    fn drop(&mut self) {
        self.connection.budget.waiting.fetch_sub(1, SeqCst);
    }
}

/// Waits until a request may start, at most `wait`; `false` after that.
pub(crate) async fn wait_for_budget(connection: &Arc<Connection>, wait: Duration) -> bool {
    if connection.budget.admits(connection) {
        return true;
    }
    let mut waiting = BudgetWait::new(connection.clone());
    tokio::time::timeout(wait, std::future::poll_fn(|cx| waiting.poll_admitted(cx))).await.is_ok()
}

/// Whether a response of about this size can be created for this connection now.
pub(crate) fn fits(connection: &Connection, bytes: usize) -> bool {
    bytes <= SMALL_BYTES_MAX || connection.budget.fits(connection, bytes)
}

/// Bytes of a response, counted until this is dropped.
#[derive(Debug)]
struct Charge {
    connection: Arc<Connection>,
    bytes: usize,
}

impl Charge {
    fn new(connection: Arc<Connection>, bytes: usize) -> Self {
        connection.unread.fetch_add(bytes, SeqCst);
        connection.budget.add(bytes);
        Self { connection, bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.connection.unread.fetch_sub(self.bytes, SeqCst);
        self.connection.budget.remove(self.bytes);
    }
}

/// A chunk of a response on its way to the socket.
#[derive(Debug)]
pub struct Chunk {
    bytes: Bytes,
    _charge: Charge,
}

impl Buf for Chunk {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

/// Marks a response that is sent even if the budget is used up, because its result cannot be requested again. While its handler
/// could still undo the operation, it checked with [`ConnectionBudget::fits`](crate::tracker::ConnectionBudget::fits).
#[derive(Debug, Clone, Copy)]
pub struct AlwaysSent;

/// The body of a response that is being sent; its request counts as running until this is dropped.
pub(crate) struct ResponseBody {
    body: Body,
    guard: RequestGuard,
    charge: Option<Charge>,
    /// It fails at once instead of waiting for room.
    cut_off: bool,
    waiting: Option<Box<BudgetWait>>,
}

impl ResponseBody {
    /// Counts the bytes of a response that are in memory, or those of `refusal` if there is no room for it.
    pub(crate) fn wrap(
        response: Response<Body>,
        guard: RequestGuard,
        refusal: impl FnOnce(&Response<Body>) -> Response<Body>,
    ) -> Response<Self> {
        let held = response.body().bytes_in_memory();
        let always_sent = response.extensions().get::<AlwaysSent>().is_some();
        let may_be_sent = always_sent || fits(guard.connection(), held);
        let response = if may_be_sent { response } else { refusal(&response) };
        let held = response.body().bytes_in_memory();
        let cut_off = !always_sent && guard.connection().budget.is_exhausted(held);
        let response = if cut_off {
            tracing::debug!(bytes = held, "a response is cut off: too many bytes of responses are unread");
            response.map(|_| Body::failed("too many bytes of responses are unread"))
        } else {
            response
        };
        let held = response.body().bytes_in_memory();
        let charge = (held > 0).then(|| Charge::new(guard.connection().clone(), held));
        response.map(|body| Self { body, guard, charge, cut_off, waiting: None })
    }
}

impl HttpBody for ResponseBody {
    type Data = Chunk;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Chunk>, BoxError>>> {
        let this = self.get_mut();
        let connection = this.guard.connection();
        if this.charge.is_none() && this.body.is_streamed() && !this.cut_off {
            if this.waiting.is_none() && !connection.budget.admits(connection) {
                this.waiting = Some(Box::new(BudgetWait::new(connection.clone())));
            }
            if let Some(waiting) = &mut this.waiting {
                ready!(waiting.poll_admitted(cx));
                this.waiting = None;
            }
        }
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)) else { return Poll::Ready(None) };
        let frame = match frame?.into_data() {
            Ok(bytes) => {
                let charge = this.charge.take();
                let charge = charge.unwrap_or_else(|| Charge::new(connection.clone(), bytes.len()));
                Frame::data(Chunk { bytes, _charge: charge })
            }
            Err(other) => match other.into_trailers() {
                Ok(trailers) => Frame::trailers(trailers),
                Err(_) => return Poll::Ready(None),
            },
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Counts an unread response of this size.
    pub(crate) fn charge(connection: &Arc<Connection>, bytes: usize) -> impl Sized + use<> {
        Charge::new(connection.clone(), bytes)
    }

    fn connection(budget: &Arc<UnreadBudget>) -> Arc<Connection> {
        let timeouts =
            crate::tracker::ConnectionTimeouts { head_ms_max: 1000, idle_ms_max: 1000, write_ms_max: 1000 };
        crate::tracker::Tracker::new(timeouts, budget.clone()).register().connection.clone()
    }

    #[tokio::test]
    async fn one_connection_fills_no_more_than_its_share() {
        let budget = UnreadBudget::new(80_000_000);
        let (greedy, other) = (connection(&budget), connection(&budget));
        assert!(fits(&greedy, 20_000_000), "an answer that is alone may be larger than the share");
        let unread = charge(&greedy, 20_000_000);
        assert!(!fits(&greedy, 1_000_000) && fits(&greedy, SMALL_BYTES_MAX));
        assert!(fits(&other, 10_000_000) && fits(&other, 60_000_000) && !fits(&other, 60_000_001));
        assert!(wait_for_budget(&other, Duration::ZERO).await);
        assert!(!wait_for_budget(&greedy, Duration::from_millis(10)).await);
        assert!(budget.is_low_for(&greedy) && !budget.is_low_for(&other));
        drop(unread);
        assert!(wait_for_budget(&greedy, Duration::ZERO).await);
        assert_eq!((budget.used(), budget.peak()), (0, 20_000_000));
    }

    #[tokio::test]
    async fn a_waiting_request_starts_when_a_response_was_read() {
        let budget = UnreadBudget::new(1000);
        let (slow, other) = (connection(&budget), connection(&budget));
        let unread = charge(&slow, 1000);
        let waiting = tokio::spawn(async move { wait_for_budget(&other, Duration::from_secs(10)).await });
        while budget.waiting.load(SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(budget.is_low());
        drop(unread);
        assert!(waiting.await.unwrap());
        assert!(!budget.is_low());
    }
}

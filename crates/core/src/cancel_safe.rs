//! A receive that leaves no trace when it is dropped, for stores behind a network.
//!
//! A store in this process sees that its caller is gone. A server, a database or a broker does so only by the closed
//! connection, and by then its answer may be on the wire: the messages would stay leased although no caller has them.
//! So the request runs in a task of its own. When the caller is gone, the task still waits for the answer and gives back
//! what it brings.
//!
//! No runtime is chosen here: the caller hands over a function that starts a task.
//!
//! ```
//! use hapax_core::cancel_safe::{self, Fetch};
//! use hapax_core::{Delivery, Receive, StoreError};
//!
//! struct Request;
//!
//! impl Fetch for Request {
//!     async fn fetch(&self, gone: impl Future<Output = ()> + Send) -> Result<Vec<Delivery>, StoreError> {
//!         // Ask the store here. When `gone` is ready, the answer is no longer needed.
//!         drop(gone);
//!         Ok(Vec::new())
//!     }
//!
//!     async fn give_back(&self, deliveries: Vec<Delivery>) {
//!         // Tell the store to return these at once, uncounted.
//!         drop(deliveries);
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let runtime = tokio::runtime::Handle::current();
//! let spawn = move |work| drop(runtime.spawn(work));
//! let deliveries = cancel_safe::receive(&Receive::up_to(10), Request, spawn).await.unwrap();
//! assert_eq!(deliveries, []);
//! # }
//! ```

use std::pin::Pin;

use tokio::sync::oneshot;

use crate::error::StoreError;
use crate::message::Delivery;
use crate::store::Receive;

/// Work that runs to its end without its caller.
pub type DetachedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// One receive of a store. It is dropped when the receive is over: its deliveries were handed to the caller or given
/// back, or there were none.
pub trait Fetch: Send + Sync + 'static {
    /// Asks for deliveries, and must end within bounded time. Once `gone` is ready, the caller is gone: the request may be
    /// cancelled, and what it brings nevertheless is given back. It may also be left to run to its end.
    fn fetch(
        &self,
        gone: impl Future<Output = ()> + Send,
    ) -> impl Future<Output = Result<Vec<Delivery>, StoreError>> + Send;

    /// Puts messages back as if they had not been received. Must end within bounded time; where it fails, their leases
    /// run out.
    fn give_back(&self, deliveries: Vec<Delivery>) -> impl Future<Output = ()> + Send;
}

/// Runs `fetch` in a task of its own. If this future is dropped before it is ready, what the task fetches is given back;
/// it stays leased where the receive names its attempt (a repeat may hold the same deliveries already), and is gone where
/// it was acked as it was received.
///
/// `spawn` starts a task, on any thread, also on one that is not of the runtime. A runtime that is shutting down may drop
/// the task instead: then the outcome is unknown, and leases run out.
pub async fn receive<F: Fetch>(
    receive: &Receive,
    fetch: F,
    spawn: impl Fn(DetachedTask) + Clone + Send + 'static,
) -> Result<Vec<Delivery>, StoreError> {
    let (sender, receiver) = oneshot::channel();
    let give_back = !receive.ack_on_receive && receive.attempt_id.is_none();
    spawn(Box::pin(run(fetch, give_back, spawn.clone(), sender)));
    match receiver.await {
        Ok(fetched) => fetched.map(GiveBackGuard::take),
        Err(_) => Err(StoreError::OutcomeUnknown("the runtime is shutting down".into())),
    }
}

async fn run<F: Fetch, S: Fn(DetachedTask) + Send + 'static>(
    fetch: F,
    give_back: bool,
    spawn: S,
    mut sender: oneshot::Sender<Result<GiveBackGuard<F, S>, StoreError>>,
) {
    if sender.is_closed() {
        return;
    }
    let fetched = fetch.fetch(sender.closed()).await;
    let guard =
        fetched.map(|deliveries| GiveBackGuard { fetched: Some((fetch, deliveries)), give_back, spawn });
    // Without a caller this is handed back and dropped, and so given back.
    drop(sender.send(guard));
}

/// Deliveries on their way to the caller. Dropped, they are given back.
struct GiveBackGuard<F: Fetch, S: Fn(DetachedTask)> {
    fetched: Option<(F, Vec<Delivery>)>,
    give_back: bool,
    spawn: S,
}

impl<F: Fetch, S: Fn(DetachedTask)> GiveBackGuard<F, S> {
    fn take(mut self) -> Vec<Delivery> {
        self.fetched.take().map(|(_, deliveries)| deliveries).unwrap_or_default()
    }
}

impl<F: Fetch, S: Fn(DetachedTask)> Drop for GiveBackGuard<F, S> {
    fn drop(&mut self) {
        let Some((fetch, deliveries)) = self.fetched.take() else { return };
        if self.give_back && !deliveries.is_empty() {
            (self.spawn)(Box::pin(async move { fetch.give_back(deliveries).await }));
        }
    }
}

//! Runs handlers: lease, heartbeat, claim, retry, settle, drain.
//!
//! A handler is an async function of a typed message and its context; what it returns is a value that says what became
//! of the effect. [`Worker::builder`] puts a worker together, [`Worker::run`] runs it.
//!
//! What becomes of a delivery, and at `effectively-once` of the claim that was made for its idempotency key:
//!
//! | the handler | the delivery | the claim |
//! |---|---|---|
//! | returns a value | acked | completed with the value: duplicates get it |
//! | returns [`HandlerOutcome::Retry`] | returns by policy, or after the delay asked for | released: nothing happened |
//! | returns [`HandlerOutcome::Reject`] | goes to the dead letters | completed as failed: duplicates are rejected too |
//! | returns [`HandlerOutcome::Defer`] | put back for a while, uncounted | released: nothing happened |
//! | returns an `Err` | by [`OnError`]: returns by policy, or is parked | by [`OnError`]: in doubt unless it is told otherwise |
//! | returns [`HandlerOutcome::Interrupted`] | put back uncounted, or is parked | in doubt at once |
//! | returns [`HandlerOutcome::InDoubt`], panics, exceeds `run_max`, loses its lease | returns by policy, or is parked | in doubt at once |
//! | is stopped by the end of the worker | put back uncounted, or is parked | in doubt at once |
//! | does not fit the body | goes to the dead letters | released |
//! | does not run: the key has an outcome | acked, or rejected as recorded | as it was |
//! | does not run: the key is in progress | waits for the other run to end, up to 20 s; then it is put back for a second, uncounted | as it was |
//! | does not run: the key is in doubt, and doubt means parking | parked | as it was |
//! | does not run: the ledger cannot be asked | put back for a while, uncounted | as it was |
//!
//! **What a lost lease can and cannot do.** A worker counts its lease on its own clock from before it asked for it. When
//! that runs out, or the store says that the lease has passed on, the handler is dropped at its next `await`, and what it
//! tries to record or settle is refused by the store. Code that blocks its thread cannot be stopped, nor can tasks that
//! the handler spawned, nor a third party that it has called: pass those the fence or the derived key.

mod auto;
mod builder;
mod claiming;
mod cx;
mod decide;
mod guard;
mod handler;
mod idempotent;
mod lane;
mod limits;
mod observe;
mod outcome;
mod point;
mod settle;
mod state;
mod stats;
pub mod testing;
mod transactional;
mod worker;

pub use auto::{AutoLease, TimeSketch};
pub use builder::{BuildError, WorkerBuilder};
pub use cx::Cx;
pub use idempotent::{Idempotent, IdempotentError, Run, idempotent};
pub use observe::{OnSettled, Settlement, StopWhen};
pub use outcome::{HandlerOutcome, IntoOutcome, OnError};
pub use point::{Hook, Point};
pub use stats::Counts;
pub use transactional::TxFuture;
pub use worker::{Report, Stopped, Watch, Worker};

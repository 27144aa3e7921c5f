//! Runs handlers: lease, heartbeat, claim, retry, settle, drain.
//!
//! A handler is an async function of a typed message and its context; its return value tells whether the effect
//! happened. [`Worker::builder`] configures a worker, [`Worker::run`] runs it.
//!
//! The fate of a delivery, and at `effectively-once` of the claim on its idempotency key:
//!
//! | the handler | the delivery | the claim |
//! |---|---|---|
//! | returns a value | acked | completed with the value: duplicates get it |
//! | returns [`HandlerOutcome::Retry`] | returns by policy, or after the requested delay | released: nothing happened |
//! | returns [`HandlerOutcome::Reject`] | goes to the dead letters | completed as failed: duplicates are rejected too |
//! | returns [`HandlerOutcome::Defer`] | put back for a while, not counted | released: nothing happened |
//! | returns an `Err` | by [`OnError`]: returns by policy, or is parked | by [`OnError`]: in doubt by default |
//! | returns [`HandlerOutcome::Interrupted`] | put back without counting, or is parked | in doubt at once |
//! | returns [`HandlerOutcome::InDoubt`], panics, exceeds `run_max`, loses its lease | returns by policy, or is parked | in doubt at once |
//! | is stopped by the shutdown of the worker | put back without counting, or is parked | in doubt at once |
//! | cannot parse the body | goes to the dead letters | released |
//! | does not run: the key has an outcome | acked, or rejected as recorded | unchanged |
//! | does not run: the key is in progress | waits for the other run to end, up to 20 s; then it is put back for a second, not counted | unchanged |
//! | does not run: the key is in doubt, and the policy is to park | parked | unchanged |
//! | does not run: the ledger is unavailable | put back for a while, not counted | unchanged |
//!
//! **The effect of a lost lease.** A worker counts its lease on its own clock from before it requested it. When the
//! lease runs out, or the store reports another holder, the handler is dropped at its next `await`, and the store
//! refuses its records and settles. Code that blocks its thread cannot be stopped, nor can tasks that the handler
//! spawned, nor a third party that it has called: pass the fence or the derived key to those.

mod auto;
mod builder;
mod claiming;
mod cx;
mod decide;
mod group_queue;
mod guard;
mod handler;
mod idempotent;
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
pub use observe::{OnSettled, SettledDelivery, StopWhen};
pub use outcome::{HandlerOutcome, IntoOutcome, OnError};
pub use point::{Hook, Point};
pub use stats::Counts;
pub use transactional::TxFuture;
pub use worker::{Stopped, Watch, Worker, WorkerReport};

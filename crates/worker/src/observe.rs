//! What a worker tells about its deliveries, and when it stops by itself.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Delivery, How, IdempotencyKey, Settled};

/// How one delivery ended, as the store answered.
#[derive(Debug)]
#[non_exhaustive]
pub struct Settlement<'a> {
    /// The delivery.
    pub delivery: &'a Delivery,
    /// Its idempotency key.
    pub key: &'a IdempotencyKey,
    /// The handler was started for it; `false` for a replay, a deferral behind a duplicate at work, and the like.
    pub ran: bool,
    /// How long this worker has had it.
    pub held: Duration,
    /// How the worker settled it; at `at-most-once`, how it would have.
    pub how: &'a How,
    /// The store's answer. `None`: refused, or never given; see `error`. At `at-most-once` it is acked from the start.
    pub settled: Option<Settled>,
    /// Why it was not settled.
    pub error: Option<String>,
}

/// Called for each delivery that ended; see [`WorkerBuilder::on_settled`](crate::WorkerBuilder::on_settled).
pub type OnSettled = Arc<dyn Fn(&Settlement<'_>) + Send + Sync>;

/// When a worker stops without being told to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StopWhen {
    /// Only when it is told to.
    #[default]
    Told,
    /// After one delivery that was not merely put back.
    AfterOne,
    /// When nothing can be received and nothing is being worked on here. Delayed messages are not waited for.
    Empty,
}

/// How far a worker is that stops after one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum One {
    Free,
    Taken,
    Done,
}

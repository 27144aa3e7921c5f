//! A worker's events for its deliveries, and the conditions to stop by itself.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Delivery, IdempotencyKey, Settled, Settlement};

/// The end of one delivery, with the store's answer.
#[derive(Debug)]
#[non_exhaustive]
pub struct SettledDelivery<'a> {
    /// The delivery.
    pub delivery: &'a Delivery,
    /// Its idempotency key.
    pub key: &'a IdempotencyKey,
    /// The handler was started; `false` for a replay, a deferral behind a running duplicate, and similar ends.
    pub ran: bool,
    /// How long this worker has held it.
    pub held: Duration,
    /// How the worker settled it; at `at-most-once`, how it would have settled it.
    pub settlement: &'a Settlement,
    /// The store's answer. `None`: refused or missing; see `error`. At `at-most-once` the delivery is acked on receive.
    pub settled: Option<Settled>,
    /// Why it was not settled.
    pub error: Option<String>,
}

/// Called for each ended delivery; see [`WorkerBuilder::on_settled`](crate::WorkerBuilder::on_settled).
pub type OnSettled = Arc<dyn Fn(&SettledDelivery<'_>) + Send + Sync>;

/// When a worker stops by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StopWhen {
    /// Only when it is told to.
    #[default]
    Never,
    /// After one delivery that was not just put back.
    AfterOne,
    /// When the queue is empty and nothing is running here. The worker does not wait for delayed messages.
    Empty,
}

/// The progress of a worker that stops after one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SingleDelivery {
    Free,
    Taken,
    Done,
}

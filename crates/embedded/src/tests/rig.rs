//! A writer on any storage, driven by hand: no thread, no waiting, and a manual clock.

use std::sync::Arc;

use hapax_core::{
    Extend, GroupId, ManualClock, Priority, QueueConfig, QueueName, Receipt, RemainingLease, SendError, Sent,
    SettleError, Settled, Settlement, StoreError,
};
use tokio::sync::oneshot;

use crate::engine::{Engine, Loader, PreparedMessage, ReceiveRequest, StoreQuota};
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::record::Content;
use crate::storage::Storage;
use crate::time::{Now, StoreTime};
use crate::writer::{Op, RawDelivery, SettleOp, Writer};

/// Start time of every run.
pub(super) const START_MS: u64 = 1_800_000_000_000;
/// Sends are refused if less space is left, in bytes.
pub(super) const RESERVE_BYTES: u64 = 1_000;

/// A pending answer.
pub(super) type ReplyReceiver<T> = oneshot::Receiver<Result<T, StoreError>>;
pub(super) type Sends = Vec<Result<Sent, SendError>>;
pub(super) type Settles = Vec<Result<Settled, SettleError>>;
pub(super) type Extends = Vec<Result<RemainingLease, SettleError>>;

/// Opens a store as `Embedded::open` does, on any storage.
pub(super) fn open<S: Storage>(mut storage: S, clock: &Arc<ManualClock>, ids: Ids, seed: u64) -> Writer<S> {
    let header = storage.header().expect("a header");
    let time = StoreTime::start(clock.clone(), header.clock_ms);
    let mut loader = Loader::new(header, StoreQuota::default(), time.now());
    storage.load(&mut loader).expect("rows");
    assert_eq!(loader.damaged, 0);
    let engine = loader.finish();
    engine.check();
    Writer::new(engine, storage, Arc::new(time), ids, seed, RESERVE_BYTES)
}

pub(super) fn name(name: &str) -> QueueName {
    QueueName::new(name).expect("a valid name")
}

pub(super) fn group(number: u8) -> GroupId {
    GroupId::new(format!("g{number}")).expect("a valid group")
}

pub(super) fn outgoing(body: &str, dedup: Option<&str>, group: Option<GroupId>) -> PreparedMessage {
    PreparedMessage {
        content: Content::new(dedup.map(str::to_owned), None, None, body.to_owned().into()),
        bytes: body.len() as u64,
        delay_ms: None,
        deliver_at_ms: None,
        group,
        priority: Priority::default(),
        attributes: 0,
        content_id: None,
        sender_key: None,
    }
}

pub(super) fn send(queue: &QueueName, batch: Vec<PreparedMessage>) -> (Op, ReplyReceiver<Sends>) {
    let (reply, answer) = oneshot::channel();
    (Op::Send { queue: queue.clone(), batch: batch.into_iter().map(Ok).collect(), reply }, answer)
}

pub(super) fn request(max: usize, lease_ms: Option<u64>) -> ReceiveRequest {
    ReceiveRequest { max, lease_ms, consumer: Some("c".into()), ack_on_receive: false, attempt_id: None }
}

pub(super) fn receive(
    id: u64,
    queue: &QueueName,
    request: ReceiveRequest,
    asked: Now,
    wait_ms: u64,
) -> (Op, ReplyReceiver<Vec<RawDelivery>>) {
    let (reply, answer) = oneshot::channel();
    (Op::Receive { id, queue: queue.clone(), request, wait_ms: Some(wait_ms), asked, reply }, answer)
}

/// The writer gets decoded receipts and does not read the sealed one.
fn unread() -> Receipt {
    Receipt::new("unread").expect("a valid receipt")
}

pub(super) fn settle(
    queue: &QueueName,
    batch: Vec<(Option<DeliveryRef>, Settlement)>,
) -> (Op, ReplyReceiver<Settles>) {
    let (reply, answer) = oneshot::channel();
    let batch = batch
        .into_iter()
        .map(|(delivery, settlement)| SettleOp { delivery, settlement, claim: None, parked_for: None })
        .collect();
    (Op::Settle { queue: queue.clone(), batch, reply }, answer)
}

pub(super) fn extend(
    queue: &QueueName,
    batch: Vec<(Option<DeliveryRef>, u64, bool)>,
) -> (Op, ReplyReceiver<Extends>) {
    let (reply, answer) = oneshot::channel();
    let batch = batch
        .into_iter()
        .map(|(delivery, lease_ms, own_lease)| (delivery, Extend { receipt: unread(), lease_ms, own_lease }))
        .collect();
    (Op::Extend { queue: queue.clone(), batch, reply }, answer)
}

/// A job on the engine inside a wave.
pub(super) fn job<T: Send + 'static>(
    job: impl FnOnce(&mut Engine, Now) -> T + Send + 'static,
) -> (Op, ReplyReceiver<T>) {
    let (reply, answer) = oneshot::channel();
    let job = move |engine: &mut Engine, now: Now| -> crate::writer::AfterWave {
        let value = job(engine, now);
        Box::new(move |failed| drop(reply.send(failed.map_or(Ok(value), Err))))
    };
    (Op::Job(Box::new(job)), answer)
}

/// Runs one job alone; it must succeed.
pub(super) fn now<S: Storage, T: Send + 'static>(
    writer: &mut Writer<S>,
    run: impl FnOnce(&mut Engine, Now) -> T + Send + 'static,
) -> T {
    let (op, mut answer) = job(run);
    writer.run(&mut vec![op]);
    answer.try_recv().expect("an answer").expect("no fault")
}

pub(super) fn create<S: Storage>(writer: &mut Writer<S>, queue: &QueueName, config: QueueConfig) {
    let queue = queue.clone();
    now(writer, move |engine, at| engine.create_queue(at, &queue, config, 0)).expect("a valid configuration");
}

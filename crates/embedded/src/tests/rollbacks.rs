//! A wave that a full disk refuses leaves no trace in memory.

use std::sync::Arc;

use hapax_core::{
    DeadLetterPolicy, ExportedItem, ManualClock, MessageId, OnDead, QueueConfig, QueueName, RememberedId,
    Settlement, TransferScope,
};

use super::rig;
use super::sim_storage::{Fault, SimStorage};
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::time::Now;
use crate::writer::{Op, Writer};

fn open() -> Writer<SimStorage> {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1)
}

fn send(writer: &mut Writer<SimStorage>, queue: &QueueName, groups: &[u8]) {
    let message = |(number, group): (usize, &u8)| {
        rig::outgoing("x", Some(&format!("d{number}")), Some(rig::group(*group)))
    };
    writer.run(&mut vec![rig::send(queue, groups.iter().enumerate().map(message).collect()).0]);
}

fn receive(writer: &mut Writer<SimStorage>, queue: &QueueName, max: usize) -> Vec<DeliveryRef> {
    let (op, mut answer) = rig::receive(1, queue, rig::request(max, None), Now { us: 0 }, 0);
    writer.run(&mut vec![op]);
    let raw = answer.try_recv().expect("an answer").expect("no fault");
    raw.iter().map(|raw| raw.leased.delivery).collect()
}

fn run(writer: &mut Writer<SimStorage>, fault: Option<Fault>, op: Op) {
    writer.storage.fault = fault;
    writer.run(&mut vec![op]);
    assert_eq!(writer.storage.fault, None, "something was to be committed");
    writer.engine.check();
}

/// The operation is refused and must leave no trace; then it is done.
fn refused_then_done(writer: &mut Writer<SimStorage>, op: impl Fn() -> Op) {
    let now = Now { us: rig::START_MS * 1000 };
    let before = writer.engine.snapshot(now);
    run(writer, Some(Fault::Full), op());
    assert_eq!(writer.engine.snapshot(now), before);
    run(writer, None, op());
    assert_ne!(writer.engine.snapshot(now), before);
}

/// A nack that was refused does not send the message, or its group, to the end.
#[test]
fn a_refused_retry_changes_no_order() {
    let retry = || Settlement::Retry { after_ms: Some(0), error: None };
    for (name, config) in [("q", QueueConfig::sqs()), ("q.fifo", QueueConfig::sqs_fifo())] {
        let (mut writer, queue) = (open(), rig::name(name));
        rig::create(&mut writer, &queue, config);
        send(&mut writer, &queue, &[0, 1, 2]);
        // Once without an earlier requeue order, once with one.
        for _ in 0..2 {
            let first = receive(&mut writer, &queue, 1)[0];
            run(&mut writer, Some(Fault::Full), rig::settle(&queue, vec![(Some(first), retry())]).0);
            // What is given back keeps its place.
            run(&mut writer, None, Op::GiveBack(vec![first]));
            let again = receive(&mut writer, &queue, 1)[0];
            assert_eq!(again.seq, first.seq, "{name}: it comes first again");
            run(&mut writer, None, rig::settle(&queue, vec![(Some(again), retry())]).0);
            let other = receive(&mut writer, &queue, 1)[0];
            assert_ne!(other.seq, first.seq, "{name}: one that failed waits behind");
            run(&mut writer, None, rig::settle(&queue, vec![(Some(other), Settlement::Ack)]).0);
        }
    }
}

#[test]
fn a_full_disk_leaves_two_groups_as_they_were() {
    let (mut writer, queue, dead) = (open(), rig::name("q.fifo"), rig::name("dead.fifo"));
    rig::create(&mut writer, &dead, QueueConfig::sqs_fifo());
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    let config = QueueConfig { on_dead: OnDead::HaltGroup, dead_letter, ..QueueConfig::sqs_fifo() };
    rig::create(&mut writer, &queue, config);
    send(&mut writer, &queue, &[0, 1, 0, 1]);

    let heads = receive(&mut writer, &queue, 10);
    assert_eq!(heads.len(), 4);
    // Both groups are halted for their heads; what was in flight behind them is taken back.
    let heads: Vec<_> = heads.into_iter().filter(|delivery| delivery.seq < 5).collect();
    let reject = |delivery: &DeliveryRef| (Some(*delivery), Settlement::Reject { reason: "bad".into() });
    refused_then_done(&mut writer, || rig::settle(&queue, heads.iter().map(reject).collect()).0);
    assert!(receive(&mut writer, &queue, 10).is_empty());
    // A purge of the dead letters decides about both.
    let purged = dead.clone();
    refused_then_done(&mut writer, || {
        let purged = purged.clone();
        rig::job(move |engine, now| engine.purge(now, &purged, 0).map(drop)).0
    });
    let held = receive(&mut writer, &queue, 10);
    assert_eq!(held.len(), 2);
    let park = |delivery: &DeliveryRef| (Some(*delivery), Settlement::Park { reason: "in doubt".into() });
    refused_then_done(&mut writer, || rig::settle(&queue, held.iter().map(park).collect()).0);
    let seqs: Vec<u64> = held.iter().map(|delivery| delivery.seq).collect();
    refused_then_done(&mut writer, || {
        let (queue, seqs) = (queue.clone(), seqs.clone());
        rig::job(move |engine, now| {
            let id = engine.find(&queue).expect("the queue is there");
            engine.release(now, id, &seqs)
        })
        .0
    });
    assert_eq!(receive(&mut writer, &queue, 10).len(), 2);
}

/// An import brings deduplication ids of several minutes in one wave, in no order of time.
#[test]
fn a_full_disk_leaves_no_imported_deduplication_id() {
    let (mut writer, queue) = (open(), rig::name("q.fifo"));
    rig::create(&mut writer, &queue, QueueConfig::sqs_fifo());
    send(&mut writer, &queue, &[0, 1]);
    let remembered = |(number, minutes_ago): (u128, u64)| {
        ExportedItem::Dedup(RememberedId {
            hash: format!("{number:032x}"),
            id: MessageId(1_000 + number),
            sent_ms: rig::START_MS - minutes_ago * 60_000,
        })
    };
    let items: Vec<_> = [(3, 1), (1, 4), (2, 0), (4, 4), (5, 2)].map(remembered).into();
    refused_then_done(&mut writer, || {
        let items = items.iter().cloned().map(Into::into).collect();
        let to = TransferScope::Queue(queue.clone());
        Op::Import { to, items, reply: tokio::sync::oneshot::channel().0 }
    });
    // The next ones are counted with those of their minute.
    send(&mut writer, &queue, &[0, 1, 2]);
    writer.engine.check();
}

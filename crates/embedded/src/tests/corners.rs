//! Corner cases that were wrong once, each as small as possible.

use std::sync::Arc;

use hapax_core::{ManualClock, QueueConfig, Quota, Settled, Settlement};

use super::rig::{self, ReplyReceiver};
use super::sim_storage::{Fault, SimStorage};
use crate::ids::Ids;
use crate::time::Now;
use crate::writer::{AfterWave, Op, RawDelivery, Writer};

fn receive(writer: &mut Writer<SimStorage>, attempt_id: Option<&str>) -> Option<Vec<RawDelivery>> {
    let mut request = rig::request(1, None);
    request.attempt_id = attempt_id.map(str::to_owned);
    let (op, mut answer) = rig::receive(1, &rig::name("q.fifo"), request, Now { us: 0 }, 0);
    writer.run(&mut vec![op]);
    answer.try_recv().expect("an answer").ok()
}

#[test]
fn a_refused_receive_repeated_does_not_give_another_ones_delivery() {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let queue = rig::name("q.fifo");
    rig::create(&mut writer, &queue, QueueConfig::sqs_fifo());
    let send = |number: u8| rig::outgoing("x", Some(&format!("d{number}")), Some(rig::group(number)));
    writer.run(&mut vec![rig::send(&queue, vec![send(1), send(2)]).0]);
    // After a restart the fences are ahead of the clock for a while, so that time alone does not distinguish them.
    assert!(receive(&mut writer, None).is_some());
    let mut writer = rig::open(writer.storage.after_process_death(), &clock, Ids::fixed(1), 1);

    writer.storage.fault = Some(Fault::Full);
    assert!(receive(&mut writer, Some("mine")).is_none());
    let theirs = receive(&mut writer, None).expect("no fault");
    assert_eq!(theirs.len(), 1);
    assert!(receive(&mut writer, Some("mine")).expect("no fault").is_empty());
}

#[test]
fn a_repeated_receive_gives_no_delivery_whose_lease_is_over() {
    let (mut writer, _clock) = with_groups(1);
    let queue = rig::name("q.fifo");
    let (over_ms, again) = rig::now(&mut writer, move |engine, now| {
        let id = engine.find(&queue).unwrap();
        let request =
            crate::engine::ReceiveRequest { attempt_id: Some("mine".into()), ..rig::request(1, Some(2_000)) };
        let first = engine.receive(now, id, &request);
        engine.remember_receive(now, id, "mine", &[first[0].delivery]);
        // No timer has looked yet. From its receive on, no lease may be this long.
        let later = Now { us: now.us + 3_000_000 };
        let request =
            crate::engine::ReceiveRequest { lease_ms: Some(hapax_core::policy::LEASE_MS_MAX), ..request };
        (first[0].entry.due_ms.max(later.ms()), engine.receive(later, id, &request))
    });
    assert!(again.iter().all(|leased| leased.entry.due_ms > over_ms), "{again:?}");
}

/// A FIFO queue with a message in each of several groups.
fn with_groups(groups: u8) -> (Writer<SimStorage>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let queue = rig::name("q.fifo");
    rig::create(&mut writer, &queue, QueueConfig { lease_ms: 3_600_000, ..QueueConfig::sqs_fifo() });
    let send = |number: u8| rig::outgoing("x", Some(&format!("d{number}")), Some(rig::group(number)));
    writer.run(&mut vec![rig::send(&queue, (0..groups).map(send).collect()).0]);
    (writer, clock)
}

fn delivery(raw: &[RawDelivery]) -> Vec<crate::receipt::DeliveryRef> {
    raw.iter().map(|raw| raw.leased.delivery).collect()
}

fn attempts(writer: &mut Writer<SimStorage>) -> usize {
    let queue = rig::name("q.fifo");
    rig::now(writer, move |engine, _| engine.queue(engine.find(&queue).unwrap()).attempts.len())
}

#[test]
fn an_attempt_is_not_forgotten_for_many_others() {
    let (mut writer, clock) = with_groups(2);
    let queue = rig::name("q.fifo");
    let first = receive(&mut writer, Some("first")).expect("no fault");
    for number in 0..30_000 {
        let raw = receive(&mut writer, Some(&format!("{number}"))).expect("no fault");
        assert_eq!(raw.len(), 1);
        // Visible again at once.
        writer.run(&mut vec![rig::extend(&queue, vec![(Some(raw[0].leased.delivery), 0, false)]).0]);
    }
    assert!(attempts(&mut writer) < 12_000, "attempts that tell nothing are forgotten");
    assert_eq!(delivery(&receive(&mut writer, Some("first")).expect("no fault")), delivery(&first));
    let rows = writer.storage.committed.attempts.len();
    assert_eq!(rows, attempts(&mut writer), "rows and memory agree");

    let mut writer = rig::open(writer.storage.after_process_death(), &clock, Ids::fixed(1), 1);
    assert_eq!(delivery(&receive(&mut writer, Some("first")).expect("no fault")), delivery(&first));
    // When they are too old to be repeated, nothing of them is left.
    clock.advance_ms(400_000);
    while attempts(&mut writer) > 0 {
        writer.run(&mut Vec::new());
    }
    assert!(writer.storage.committed.attempts.is_empty());
}

#[test]
fn an_attempt_that_was_rolled_back_is_not_remembered() {
    let (mut writer, clock) = with_groups(3);
    let first = receive(&mut writer, Some("kept")).expect("no fault");
    writer.storage.fault = Some(Fault::Full);
    assert!(receive(&mut writer, Some("refused")).is_none());
    assert_eq!(attempts(&mut writer), 1);
    // Nor is one forgotten that a wave which was rolled back forgot.
    clock.advance_ms(400_000);
    writer.storage.fault = Some(Fault::Full);
    writer.run(&mut Vec::new());
    assert_eq!(writer.storage.fault, None, "something was to be committed");
    assert_eq!(writer.storage.committed.attempts.len(), 1);
    assert_eq!(delivery(&first).len(), 1);
    clock.advance_ms(1_000);
    writer.run(&mut Vec::new());
    assert_eq!(attempts(&mut writer), 0);
}

#[test]
fn a_power_cut_takes_delivery_and_attempt_together() {
    let (mut writer, clock) = with_groups(2);
    let first = receive(&mut writer, Some("mine")).expect("no fault");
    // Deliveries alone do not wait for the disk.
    let second = receive(&mut writer, Some("lost")).expect("no fault");
    assert_eq!((first.len(), second.len()), (1, 1));
    assert!(writer.storage.unsynced() > 0);
    let mut writer = rig::open(writer.storage.after_power_loss(1), &clock, Ids::fixed(1), 1);
    assert_eq!(delivery(&receive(&mut writer, Some("mine")).expect("no fault")), delivery(&first));
    let again = receive(&mut writer, Some("lost")).expect("no fault");
    assert_eq!(again[0].leased.delivery.seq, second[0].leased.delivery.seq);
    assert!(again[0].leased.delivery.fence > second[0].leased.delivery.fence);
}

#[test]
fn what_replaces_a_damaged_message_is_repeated_too() {
    let (mut writer, _) = with_groups(3);
    let damaged = *writer.storage.committed.bodies.keys().next().expect("there are messages");
    writer.storage.committed.bodies.remove(&damaged);
    let first = receive(&mut writer, Some("mine")).expect("no fault");
    assert_eq!(first.len(), 1);
    assert_eq!(delivery(&receive(&mut writer, Some("mine")).expect("no fault")), delivery(&first));
}

#[test]
fn a_damaged_message_acked_on_receive_is_parked() {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let queue = rig::name("q");
    rig::create(&mut writer, &queue, QueueConfig::sqs());
    let outgoing = |body: &str| rig::outgoing(body, None, None);
    writer.run(&mut vec![rig::send(&queue, vec![outgoing("damaged"), outgoing("sound")]).0]);
    writer.storage.committed.bodies.retain(|_, row| row.content.body == "sound");

    let mut request = rig::request(2, None);
    request.ack_on_receive = true;
    let (op, mut answer) = rig::receive(1, &queue, request, Now { us: 0 }, 0);
    writer.run(&mut vec![op]);
    let raw = answer.try_recv().expect("an answer").expect("no fault");
    assert_eq!(raw.len(), 1);
    let stats =
        rig::now(&mut writer, move |engine, _| engine.find(&queue).map(|id| engine.queue(id).stats()));
    let stats = stats.expect("the queue is there");
    assert_eq!((stats.parked, stats.in_flight, stats.ready), (1, 0, 0));
    assert_eq!((stats.totals.acked, stats.totals.delivered, stats.totals.damaged), (1, 1, 1));
}

#[test]
fn a_repeated_send_to_a_full_queue_is_still_a_duplicate() {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let queue = rig::name("q");
    let quota = Quota { messages_max: Some(1), bytes_max: None };
    rig::create(&mut writer, &queue, QueueConfig { quota, ..QueueConfig::sqs() });
    for duplicate in [false, true] {
        let (op, mut answer) = rig::send(&queue, vec![rig::outgoing("x", Some("id"), None)]);
        writer.run(&mut vec![op]);
        let sent = answer.try_recv().expect("an answer").expect("no fault").remove(0);
        assert_eq!(sent.map(|sent| sent.duplicate), Ok(duplicate));
    }
}

/// The answer of a receive under the attempt id `mine`, and the operation that asks for it.
fn repeatable(id: u64, wait_ms: u64) -> (Op, ReplyReceiver<Vec<RawDelivery>>) {
    let request = crate::engine::ReceiveRequest { attempt_id: Some("mine".into()), ..rig::request(1, None) };
    let asked = Now { us: rig::START_MS * 1000 };
    rig::receive(id, &rig::name("q.fifo"), request, asked, wait_ms)
}

/// Its caller goes away within the wave that answers it.
fn leaves<T: Send + 'static>(answer: ReplyReceiver<T>) -> Op {
    rig::job(move |_, _| drop(answer)).0
}

/// The delivery that this answer has is held: no other receive gets its message, and it can be acked.
fn is_held(writer: &mut Writer<SimStorage>, mut answer: ReplyReceiver<Vec<RawDelivery>>) {
    let raw = answer.try_recv().expect("an answer").expect("no fault");
    assert_eq!(raw.len(), 1);
    writer.run(&mut Vec::new());
    assert!(receive(writer, None).expect("no fault").is_empty(), "the message was given back");
    let ack = vec![(Some(raw[0].leased.delivery), Settlement::Ack)];
    let (op, mut settled) = rig::settle(&rig::name("q.fifo"), ack);
    writer.run(&mut vec![op]);
    assert_eq!(settled.try_recv().expect("an answer").expect("no fault"), [Ok(Settled::Acked)]);
}

#[test]
fn a_receive_whose_caller_left_takes_nothing_from_its_repeat() {
    let (mut writer, _clock) = with_groups(1);
    let (first, left) = repeatable(1, 0);
    let (again, answer) = repeatable(2, 0);
    writer.run(&mut vec![first, again, leaves(left)]);
    is_held(&mut writer, answer);
}

#[test]
fn a_waiting_repeat_whose_caller_left_takes_nothing_from_the_other() {
    for first_leaves in [true, false] {
        let (mut writer, _clock) = with_groups(0);
        let (one, first) = repeatable(1, 20_000);
        let (two, second) = repeatable(2, 20_000);
        writer.run(&mut vec![one, two]);
        let message = rig::outgoing("x", Some("d"), Some(rig::group(1)));
        let (send, _sent) = rig::send(&rig::name("q.fifo"), vec![message]);
        let (left, answer) = if first_leaves { (first, second) } else { (second, first) };
        // Receives that wait are served at the end of the wave, so their caller leaves when the wave is being committed.
        let leave = Op::Job(Box::new(move |_, _| -> AfterWave {
            let leave = move |_| drop(left);
            Box::new(leave)
        }));
        writer.run(&mut vec![leave, send]);
        is_held(&mut writer, answer);
    }
}

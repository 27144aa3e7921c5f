//! A receive that a full disk refused must not come to hold what someone else was given meanwhile.

use std::sync::Arc;

use hapax_core::{ManualClock, QueueConfig};

use super::rig;
use super::sim_storage::{Fault, SimStorage};
use crate::ids::Ids;
use crate::writer::{Raw, Writer};

fn receive(writer: &mut Writer<SimStorage>, attempt_id: Option<&str>) -> Option<Vec<Raw>> {
    let mut request = rig::request(1, None);
    request.attempt_id = attempt_id.map(str::to_owned);
    let (op, mut answer) = rig::receive(1, &rig::name("q.fifo"), request, crate::time::Now { us: 0 }, 0);
    writer.run(&mut vec![op]);
    answer.try_recv().expect("an answer").ok()
}

#[test]
fn a_refused_receive_repeated_does_not_give_another_ones_delivery() {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let queue = rig::name("q.fifo");
    rig::create(&mut writer, &queue, QueueConfig::fifo());
    let send = |number: u8| rig::outgoing("x", Some(&format!("d{number}")), Some(rig::group(number)));
    writer.run(&mut vec![rig::send(&queue, vec![send(1), send(2)]).0]);
    // After a restart the fences are ahead of the clock for a while, so that time alone does not tell them apart.
    assert!(receive(&mut writer, None).is_some());
    let mut writer = rig::open(writer.storage.after_process_death(), &clock, Ids::fixed(1), 1);

    writer.storage.fault = Some(Fault::Full);
    assert!(receive(&mut writer, Some("mine")).is_none());
    let theirs = receive(&mut writer, None).expect("no fault");
    assert_eq!(theirs.len(), 1);
    assert!(receive(&mut writer, Some("mine")).expect("no fault").is_empty());
}

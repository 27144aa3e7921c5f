//! Power loss and process death at every point: acknowledged operations survive.

use hapax_core::{
    Batch, ExportedItem, ExportedMessage, FailureCause, Imported, MessageId, SendError, TransferScope,
};
use tokio::sync::oneshot;

use super::{Rig, say, scale, seeds, sweep};
use crate::writer::Op;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Crash {
    Power,
    Process,
}

/// Arms a crash at the nth change of the disk from now.
fn arm(rig: &Rig, crash: Crash, nth: u64) {
    match crash {
        Crash::Power => rig.disk.power_loss_at(nth),
        Crash::Process => rig.disk.process_crash_at(nth),
    }
}

/// Reopens the store after a crash and checks it.
fn recover(rig: &mut Rig, crash: Crash) {
    rig.disk.clear_faults();
    match crash {
        Crash::Power => rig.ledger.latest.clear(),
        Crash::Process => rig.rewrite_wal(),
    }
    rig.open().unwrap();
    rig.create_queues().unwrap();
    rig.verify().unwrap();
}

/// A store from its first write: creation, queues, work, checkpoints; it crashes at the nth change.
fn crash_at(seed: u64, crash: Crash, nth: u64) -> bool {
    let mut rig = Rig::new(seed);
    rig.wal_pages_max = 25;
    arm(&rig, crash, nth);
    let _ = rig.open().is_ok() && rig.create_queues().is_ok() && rig.steps(16).is_none();
    let crashed = !rig.disk.faults_pending();
    recover(&mut rig, crash);
    assert_eq!(rig.steps(5), None);
    rig.verify().unwrap();
    crashed
}

fn crash_everywhere(crash: Crash, name: &str) {
    for seed in seeds(1) {
        say(seed, name);
        sweep(seed, 4, 100, |nth| crash_at(seed, crash, nth));
    }
}

#[test]
fn power_lost_at_any_change_of_the_disk() {
    crash_everywhere(Crash::Power, "power loss sweep");
}

#[test]
fn process_killed_at_any_change_of_the_disk() {
    crash_everywhere(Crash::Process, "process death sweep");
}

#[test]
fn a_store_that_crashes_again_and_again() {
    for seed in seeds(6) {
        say(seed, "many crashes");
        let mut rig = Rig::started(seed);
        for _ in 0..30 * scale().min(4) {
            let crash = if rig.rng.bool() { Crash::Power } else { Crash::Process };
            let nth = rig.rng.u64(1..150);
            arm(&rig, crash, nth);
            rig.steps(60);
            if rig.disk.faults_pending() {
                match crash {
                    Crash::Power => rig.power_loss(),
                    Crash::Process => rig.disk.process_crash(),
                }
            }
            // Sometimes recovery itself is interrupted.
            if rig.rng.u8(..3) == 0 {
                rig.disk.clear_faults();
                let nth = rig.rng.u64(1..20);
                arm(&rig, Crash::Power, nth);
                rig.ledger.latest.clear();
                if rig.open().is_ok() {
                    rig.power_loss();
                }
            }
            recover(&mut rig, crash);
        }
        assert!(rig.ledger.gone.len() > 10 && rig.ledger.next > 100, "little happened");
    }
}

#[test]
fn a_disk_that_lies_about_fsync_is_found_out() {
    // Proves that the checks above can fail: the guarantee cannot hold on such a disk.
    let found_out = |seed: u64| {
        let mut rig = Rig::started(seed);
        rig.disk.lie_on_sync(true);
        rig.steps(30);
        rig.power_loss();
        rig.disk.clear_faults();
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rig.open().map_err(|error| error.to_string()).and_then(|()| rig.verify())
        }));
        !matches!(checked, Ok(Ok(())))
    };
    let count = (0..20).filter(|seed| found_out(*seed)).count();
    assert!(count >= 10, "only {count} of 20 runs on a lying disk were found to lose something");
}

/// Messages as another store exports them: waiting, parked, and dead letters with a history.
fn exported() -> Vec<ExportedItem> {
    let message = |number: u64| {
        let mut message: ExportedMessage = serde_json::from_value(serde_json::json!({
            "id": MessageId(u128::from(number) << 80), "sequence": number, "body": {"text": format!("body {number}")},
            "key": format!("key-{number}"), "key_source": "body", "sent_ms": 1, "retained_from_ms": 1, "visible_ms": 1,
            "first_received_ms": 1, "attempts": 1, "deliveries": 2, "fence": 5,
            "history": [{"attempt": 1, "deliveries": 1, "at_ms": 1, "cause": "retry", "error": "boom"}],
        }))
        .unwrap();
        message.parked = number.is_multiple_of(3).then_some(FailureCause::Rejected);
        ExportedItem::Message(Box::new(message))
    };
    (1..=8).map(message).collect()
}

fn import(rig: &mut Rig, items: &[ExportedItem]) -> Batch<Imported, SendError> {
    let to = TransferScope::Queue(super::rig::queue_name(0));
    let (reply, mut answer) = oneshot::channel();
    let items = items.iter().cloned().map(Into::into).collect();
    rig.writer().run(&mut vec![Op::Import { to, items, reply }]);
    answer.try_recv().expect("an import is answered")
}

fn held(rig: &mut Rig) -> u64 {
    rig.stats().iter().map(|queue| queue.ready + queue.parked + queue.delayed + queue.in_flight).sum()
}

/// An import in batches of two that crashes at the nth change, and is repeated from its beginning.
fn import_crashes_at(seed: u64, crash: Crash, nth: u64) -> bool {
    let (mut rig, all) = (Rig::started(seed), exported());
    arm(&rig, crash, nth);
    let mut taken = 0;
    for batch in all.chunks(2) {
        let Ok(answers) = import(&mut rig, batch) else { break };
        assert_eq!(answers, vec![Ok(Imported::Added); batch.len()]);
        taken += batch.len() as u64;
    }
    let crashed = !rig.disk.faults_pending();
    rig.disk.clear_faults();
    if crash == Crash::Process {
        rig.rewrite_wal();
    }
    rig.open().unwrap();
    // What was answered is there; of the batch that was not, both or none.
    let there = held(&mut rig);
    assert!(there == taken || there == taken + 2, "{there} are there, {taken} were answered");
    let answers = import(&mut rig, &all).unwrap();
    let known = answers.iter().filter(|answer| **answer == Ok(Imported::AlreadyThere)).count() as u64;
    assert!(answers.iter().all(Result::is_ok) && known == there, "{answers:?}");
    assert_eq!(held(&mut rig), all.len() as u64, "each of them once");
    rig.open().unwrap();
    assert_eq!(held(&mut rig), all.len() as u64);
    crashed
}

#[test]
fn an_import_that_crashes_is_repeated_without_loss_or_copies() {
    for crash in [Crash::Power, Crash::Process] {
        for seed in seeds(2) {
            say(seed, "import");
            sweep(seed, 1, 10, |nth| import_crashes_at(seed, crash, nth));
        }
    }
}

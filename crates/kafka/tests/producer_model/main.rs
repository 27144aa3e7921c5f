//! Every interleaving of the real producer machine with a coordinator, two partitions, the group's offsets and a
//! network that delays, repeats and loses requests.
//!
//! The application copies inputs 0, 1, … to both partitions, with the input's offset in the same transaction. It aborts,
//! loses answers, gives up on commits, crashes and starts again at the committed offset; the coordinator times
//! transactions out. The invariants look only at what a read_committed reader sees and at what the application was
//! told, never at the machine.

mod broker;
mod world;

use broker::Unchecked;
use stateright::{Checker as _, Model as _};
use world::{Bounds, Broken, Copier};

fn check(bounds: Bounds, broken: Option<Broken>, unchecked: Option<Unchecked>) -> Vec<&'static str> {
    let model = Copier { bounds, broken, unchecked };
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    let mut violated: Vec<&'static str> =
        checker.discoveries().keys().copied().filter(|name| !name.starts_with("reached: ")).collect();
    if violated.is_empty() {
        // Without these the run proves nothing.
        for property in checker.model().properties() {
            if property.name.starts_with("reached: ") {
                checker.assert_any_discovery(property.name);
            }
        }
    }
    violated.sort_unstable();
    violated
}

/// Two inputs, an aborted transaction and an unanswered request, with nothing else.
const SMALL: Bounds =
    Bounds { inputs: 2, timeouts: 1, repeats: 0, aborts: 1, crashes: 0, expiries: 0, is_ahead: false };

fn assert_once(bounds: Bounds) {
    assert_eq!(check(bounds, None, None), Vec::<&str>::new());
}

#[test]
fn inputs_are_visible_once_with_two_unanswered_requests() {
    assert_once(Bounds { timeouts: 2, aborts: 0, ..SMALL });
}

#[test]
fn inputs_are_visible_once_with_a_request_that_arrives_twice() {
    assert_once(Bounds { repeats: 1, timeouts: 1, inputs: 1, ..SMALL });
}

#[test]
fn inputs_are_visible_once_with_a_crash() {
    assert_once(Bounds { crashes: 1, aborts: 0, ..SMALL });
}

#[test]
fn inputs_are_visible_once_with_a_transaction_that_times_out() {
    assert_once(Bounds { expiries: 1, ..SMALL });
}

#[test]
fn inputs_are_visible_once_with_batches_and_offsets_sent_ahead() {
    assert_once(Bounds { is_ahead: true, inputs: 1, ..SMALL });
}

/// A batch that was sent ahead arrives after the abort of its transaction, and enters the next one.
#[test]
fn without_the_epoch_check_of_produce_a_batch_sent_ahead_is_visible() {
    let violated = check(Bounds { is_ahead: true, inputs: 1, ..SMALL }, None, Some(Unchecked::Produce));
    assert!(violated.contains(&"no aborted record is visible"), "{violated:?}");
}

/// The coordinator of transaction version 1: a delayed EndTxn ends the next transaction (KAFKA-17754).
#[test]
fn without_the_epoch_check_of_endtxn_an_aborted_record_is_visible() {
    let violated = check(SMALL, None, Some(Unchecked::EndTxn));
    assert!(violated.contains(&"no aborted record is visible"), "{violated:?}");
}

/// A delayed Produce enters the next transaction.
#[test]
fn without_the_epoch_check_of_produce_a_late_record_is_visible() {
    let violated = check(SMALL, None, Some(Unchecked::Produce));
    assert!(violated.contains(&"no aborted record is visible"), "{violated:?}");
}

/// A delayed TxnOffsetCommit moves the offset of the next transaction.
#[test]
fn without_the_epoch_check_of_offsets_records_and_offset_differ() {
    let violated = check(SMALL, None, Some(Unchecked::Offsets));
    assert!(violated.contains(&"records and offset agree"), "{violated:?}");
}

#[test]
fn a_batch_repeated_with_a_new_sequence_is_doubled() {
    let violated = check(SMALL, Some(Broken::NewSequence), None);
    assert!(violated.contains(&"no record is doubled"), "{violated:?}");
}

#[test]
fn a_commit_that_is_taken_for_an_abort_doubles_its_records() {
    let violated = check(SMALL, Some(Broken::AbortUnansweredCommit), None);
    assert!(violated.contains(&"no record is doubled"), "{violated:?}");
}

#[test]
fn offsets_sent_twice_in_a_transaction_can_go_back() {
    let violated = check(SMALL, Some(Broken::OffsetsTwice), None);
    assert!(violated.contains(&"records and offset agree"), "{violated:?}");
}

//! The only list of the cases about what is told of messages: a case that is not listed is dead code, and the compiler warns
//! about it.

use crate::Case;
use crate::suite::suite;

/// Every case of the suite about what is told of messages: why one ran twice or did not run, and what is advised. They need
/// [`Harness::whole`](crate::Harness::whole).
pub fn observed_cases() -> &'static [Case] {
    OBSERVED_CASES
}

suite! {
    OBSERVED_CASES from observed_cases;
    0 o00_one_process {
        a_lease_that_ran_out_is_told_by_id_and_by_key_also_after_a_restart,
        a_fifo_group_tells_why_its_messages_wait,
        a_message_that_died_is_told_with_its_error_and_advised,
        a_parked_message_and_its_halted_group_are_told_and_advised,
        keys_that_were_replayed_in_progress_or_in_doubt_are_told: OneStore,
        what_was_delivered_before_a_crash_is_told_after_it: DurableLease,
    }
    0 o01_two_processes {
        a_lease_that_ran_out_at_one_is_told_by_the_other: SecondHandle,
        a_message_given_back_through_the_other_did_not_expire: SecondHandle,
        a_fifo_message_that_moves_between_them_is_one_story: SecondHandle,
        a_letter_that_died_through_the_other_is_told_and_advised: SecondHandle,
        a_message_parked_through_the_other_is_told: SecondHandle,
        a_key_that_was_completed_at_one_is_replayed_at_the_other: SecondHandle OneStore,
    }
}

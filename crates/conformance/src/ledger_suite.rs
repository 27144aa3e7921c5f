//! The only list of the ledger cases: a case that is not listed is dead code, and the compiler warns about it.

use crate::Case;
use crate::suite::suite;

/// Every case of the ledger suite.
pub fn ledger_cases() -> &'static [Case] {
    LEDGER_CASES
}

suite! {
    LEDGER_CASES from ledger_cases;
    0 l00_operators {
        entries_are_listed_page_by_page_in_order_of_their_claims,
        a_filter_chooses_by_scope_and_state,
        a_page_out_of_range_is_refused,
        counters_are_exact,
        a_claim_that_is_repeated_or_waits_is_counted_once,
        looking_changes_and_counts_nothing,
        entries_are_counted_after_a_crash: DurableLedger,
        a_forgotten_effect_may_happen_again,
        a_claim_out_of_range_is_refused_and_changes_nothing,
        a_renewal_out_of_range_is_brought_into_range,
        a_ttl_out_of_range_is_brought_into_range,
        a_resolution_of_what_is_held_says_when_to_come_back,
    }
    1 l01_transitions {
        a_claim_that_takes_over_meets_every_state,
        a_claim_that_parks_meets_every_state,
        a_claim_repeated_by_its_owner_meets_every_state,
        a_renewal_meets_every_state,
        a_completion_meets_every_state,
        a_release_meets_every_state,
        a_doubt_meets_every_state,
        a_resolution_meets_every_state,
        forgetting_meets_every_state,
        an_entry_shows_what_is_known_about_it,
    }
    2 l02_claims {
        of_fifty_concurrent_claims_one_is_granted,
        fifty_waiting_duplicates_get_one_grant_and_equal_outcomes,
        when_the_holder_gives_up_one_of_the_waiting_goes_on,
        the_same_owner_gets_the_same_claim_again,
        a_repeated_claim_never_shortens_its_lease,
        a_repeated_claim_lengthens_its_lease,
        a_repeated_claim_keeps_what_the_first_one_said_about_doubt,
        a_batch_may_name_a_key_twice,
        one_refused_claim_fails_no_other_of_its_batch,
        an_empty_batch_is_no_error,
        a_claim_does_not_wait_when_it_can_be_answered,
        a_waiting_claim_wakes_when_the_lease_lapses,
        a_waiting_claim_wakes_when_its_holder_is_in_doubt,
        a_waiting_claim_waits_on_while_the_lease_is_renewed,
        a_waiting_claim_gives_up_at_its_deadline,
        a_waiting_claim_on_one_key_leaves_another_alone,
        a_claim_survives_a_crash: DurableLedger,
        each_answer_of_many_rounds_survives_a_crash: DurableLedger,
    }
    3 l03_leases {
        a_claim_lapses_exactly_at_the_end_of_its_lease,
        what_remains_of_a_lease_is_answered,
        a_renewed_claim_holds,
        a_renewal_chooses_its_own_lease,
        a_lapsed_claim_that_nobody_took_is_held_again_by_a_renewal,
        an_outcome_outlives_the_lease,
        a_lapsed_claim_is_remembered_for_days: FastTime,
        an_open_claim_gets_a_full_lease_after_a_restart: DurableLedger,
        what_was_in_doubt_stays_so_after_a_crash: DurableLedger,
        a_lapsed_claim_is_in_doubt_right_after_a_crash: DurableLedger,
        a_claim_held_when_the_store_stops_is_held_when_it_opens: DurableLedger,
    }
    4 l04_tokens {
        a_stale_token_changes_nothing,
        a_stale_token_stays_stale_after_a_crash: DurableLedger,
        a_late_completion_counts_while_nobody_took_over,
        a_late_release_counts_while_nobody_took_over,
        the_same_completion_again_is_no_error,
        a_completion_cannot_be_changed,
        a_token_of_another_key_is_stale,
        a_token_is_stale_once_its_key_was_released_and_claimed_anew,
        batches_answer_in_order_and_one_failure_fails_no_other,
    }
    5 l05_doubt {
        who_takes_over_is_told_so,
        a_release_after_a_takeover_leaves_the_older_doubt,
        a_parked_doubt_is_granted_to_nobody,
        a_holder_can_doubt_at_once,
        a_doubt_that_is_declared_late_began_when_the_lease_ended,
        who_doubted_may_still_learn_that_it_happened,
        a_doubt_resolved_as_completed_is_replayed,
        a_doubt_resolved_as_absent_frees_the_key,
        a_resolution_survives_a_crash: DurableLedger,
        a_takeover_survives_a_crash: DurableLedger,
    }
    6 l06_settle {
        an_ack_completes_its_claim: OneStore DurableLedger,
        a_retry_releases_its_claim: OneStore DurableLedger,
        a_reject_records_its_failure: OneStore DurableLedger,
        a_stale_token_blocks_the_settle: OneStore DurableLedger,
        a_claim_that_is_gone_or_has_ended_blocks_the_settle: OneStore,
        a_stale_claim_of_any_scope_blocks_the_settle: OneStore,
        a_stale_receipt_does_not_block_the_completion: OneStore DurableLedger,
        a_settle_repeated_after_a_lost_answer_keeps_the_outcome: OneStore,
        batches_end_each_claim_for_itself: OneStore DurableLedger,
        a_fifo_group_goes_on_when_its_claim_is_completed: OneStore Order,
        a_message_parked_in_doubt_goes_on_when_it_is_resolved: OneStore DurableLedger,
        a_message_parked_in_doubt_beyond_its_retention_continues_when_resolved: OneStore DurableLedger FastTime,
        every_message_parked_for_an_entry_goes_on_and_no_other: OneStore,
        many_messages_parked_for_an_entry_all_go_on: OneStore,
        whatever_ends_a_doubt_lets_parked_messages_continue: OneStore,
        a_message_is_parked_only_while_its_entry_is_in_doubt: OneStore,
        a_waiting_receive_wakes_when_a_doubt_is_resolved: OneStore,
        a_waiting_claim_wakes_when_a_settle_completes_it: OneStore,
        a_claim_for_a_delivery_that_is_not_there_is_a_claim: OneStore,
    }
    7 l07_fences {
        fences_grow_with_every_grant_of_a_key: LedgerFence,
        fences_grow_through_restarts_and_crashes: LedgerFence DurableLedger,
        fences_grow_when_the_wall_clock_was_set_back: LedgerFence DurableLedger WallBack,
        a_repeated_claim_keeps_its_fence,
    }
    9 l09_fingerprints {
        another_fingerprint_is_refused_in_every_state,
        none_and_some_fingerprint_are_different,
        a_mismatch_does_not_wait,
        a_fingerprint_survives_takeover_and_crash: DurableLedger,
    }
    10 l10_scopes {
        the_same_key_in_another_scope_is_another_entry,
        scope_and_key_do_not_run_into_each_other,
        names_of_any_form_are_told_apart,
    }
    11 l11_outcomes {
        a_final_failure_is_replayed,
        an_outcome_comes_back_byte_for_byte,
        an_outcome_at_the_limit_is_kept_whole,
        of_an_oversize_outcome_a_marker_is_kept_and_it_never_runs_again,
        an_oversize_outcome_cannot_be_changed_to_another_one,
        an_outcome_without_a_value_is_an_outcome,
    }
    13 l13_retention {
        an_outcome_is_kept_for_its_time_and_no_longer,
        replaying_does_not_lengthen_the_time,
        what_is_pruned_is_counted_and_the_rest_stays,
        what_nobody_asks_for_is_pruned_too,
        a_time_that_was_over_while_the_store_was_down_is_over: DurableLedger,
        the_entry_of_a_live_message_is_kept: OneStore DurableLedger,
        the_outcome_of_a_duplicate_that_waits_is_kept: OneStore,
        a_new_message_does_not_bring_back_what_was_over: OneStore,
        the_entry_of_a_claim_that_names_a_delivery_is_kept: OneStore DurableLedger,
        the_entry_of_a_message_that_was_dropped_is_over: OneStore FastTime,
        the_entry_of_a_message_that_was_purged_or_deleted_is_over: OneStore,
        the_entry_of_an_acked_message_is_kept_for_its_time: OneStore,
        the_entry_of_a_dead_letter_is_kept: OneStore DurableLedger,
        a_redrive_clears_a_final_failure: OneStore DurableLedger,
        the_entry_of_a_letter_that_went_elsewhere_is_kept_for_its_time: OneStore,
        a_redrive_keeps_what_was_completed: OneStore,
        a_redrive_leaves_a_doubt_to_be_resolved: OneStore,
        a_redriven_message_in_doubt_stays_parked_until_it_is_resolved: OneStore DurableLedger,
        a_redrive_that_leaves_a_letter_leaves_its_entry: OneStore,
    }
    13 l13_releases {
        a_release_clears_a_final_failure: OneStore DurableLedger,
        a_release_keeps_what_was_completed: OneStore,
        a_release_leaves_a_doubt_to_be_resolved: OneStore,
        a_release_leaves_a_running_duplicate_alone: OneStore,
        of_released_duplicates_one_runs: OneStore,
        a_release_reaches_no_other_entry: OneStore,
        a_release_among_the_dead_keeps_the_failure_of_the_source: OneStore,
        a_released_message_of_a_halted_group_runs: OneStore DurableLedger Order,
        a_release_on_one_handle_clears_for_the_other: OneStore SecondHandle,
    }
    14 l14_two_handles {
        of_claims_on_two_handles_one_is_granted: SecondHandle,
        a_token_ends_its_claim_on_the_other_handle: SecondHandle,
        a_waiting_claim_wakes_when_the_other_handle_ends_it: SecondHandle,
        a_takeover_on_one_handle_makes_the_token_of_the_other_stale: SecondHandle,
    }
}

//! The list of cases, its only place: a case that is not listed is dead code, which the compiler warns of.

use crate::Case;

/// Makes the list `$list` of the cases in `$folder`.
macro_rules! suite {
    (
        $list:ident from $folder:ident;
        $($point:literal $module:ident { $($case:ident $(: $($need:ident)+)?),+ $(,)? })+
    ) => {
        static $list: &[$crate::Case] = &[$($($crate::Case {
            point: $point,
            module: stringify!($module),
            name: stringify!($case),
            needs: &[$($($crate::Need::$need),+)?],
            body: |trial| Box::pin($crate::$folder::$module::$case(trial)),
        }),+),+];
    };
}
pub(crate) use suite;

/// Every case of the queue suite.
pub fn cases() -> &'static [Case] {
    CASES
}

suite! {
    CASES from cases;
    0 p00_keys {
        a_key_is_the_first_source_that_is_there,
        a_fifo_message_without_a_key_has_its_deduplication_id,
        a_changed_pointer_affects_new_messages_only,
        a_queue_that_is_made_again_has_its_own_pointer,
        a_key_stays_in_the_dead_letters_and_after_a_redrive,
    }
    0 p00_changes {
        a_change_of_a_revision_that_is_not_the_newest_is_refused,
        an_equal_configuration_keeps_its_revision,
        concurrent_changes_of_different_fields_lose_nothing,
        revisions_survive_a_restart_and_are_not_used_again,
        purges_keep_the_interval_that_is_asked_for: FastTime,
        a_name_can_be_used_again_after_the_interval: FastTime,
        a_paused_queue_accepts_and_hands_out_nothing,
        a_pause_survives_a_restart_and_changes_no_setting,
        a_waiting_receive_waits_through_a_pause_and_wakes_when_it_ends,
        leases_run_out_in_a_paused_queue,
    }
    0 p00_messages {
        a_message_arrives_as_it_was_sent,
        an_empty_body_is_a_message,
        times_of_a_message_stay_across_attempts,
        browsing_neither_delivers_nor_counts,
        browsing_shows_each_state,
        browsing_goes_page_by_page_in_order,
        discarding_deletes_what_is_not_in_flight,
        purging_deletes_everything_that_is_there,
        a_purged_fifo_group_goes_on,
        counters_are_exact: DurableLease,
        each_way_to_end_a_delivery_is_counted,
        what_is_counted_can_be_read_as_metrics,
        expiry_is_counted,
        the_oldest_message_is_known,
        batches_answer_in_order_and_one_failure_fails_no_other,
        an_empty_batch_is_no_error,
    }
    0 p00_queues {
        creating_a_queue_twice_is_no_error_unless_its_settings_differ,
        a_missing_queue_is_named,
        a_waiting_receive_on_a_missing_queue_fails_at_once,
        a_setting_out_of_range_is_refused,
        a_dead_letter_queue_must_exist_and_be_of_the_same_kind,
        a_dead_letter_queue_must_allow_its_source,
        queues_are_listed_in_order_of_name_and_survive_a_restart,
        changed_settings_hold_at_once_and_through_a_restart,
        a_deleted_queue_is_gone_and_its_name_starts_empty,
        queues_do_not_share_messages,
    }
    1 p01_durability {
        an_unsettled_message_returns_when_its_lease_ends,
        a_receive_chooses_its_own_lease,
        a_lease_of_zero_hides_nothing,
        what_was_sent_survives_a_crash,
        what_was_acked_never_returns: DurableLease,
        attempts_and_history_survive_a_crash,
        delays_and_backoff_survive_a_crash,
        parked_messages_survive_a_crash,
        two_receivers_never_hold_the_same_message,
    }
    2 p02_receipts {
        an_ack_takes_its_message_and_no_other,
        a_stale_receipt_settles_nothing,
        a_stale_fifo_receipt_settles_nothing,
        a_receipt_is_stale_after_a_retry_was_redelivered,
        a_late_ack_holds_on_a_standard_queue_while_nobody_else_has_the_message,
        a_late_ack_is_expired_on_a_fifo_queue,
        a_late_settle_on_a_fifo_queue_is_refused,
        an_acked_message_is_gone,
        a_foreign_receipt_is_malformed,
        extending_a_lease_hides_the_message_for_longer,
        a_lease_can_be_shortened,
        an_extended_delivery_can_be_acked_after_its_first_deadline,
        a_late_extend_takes_a_message_that_no_other_delivery_holds,
        a_late_extend_holds_the_message_until_its_ack,
        a_late_extend_on_a_fifo_queue_is_refused,
        a_delivery_that_was_given_back_cannot_be_extended,
        a_delivery_that_was_nacked_cannot_be_extended,
        a_visibility_of_zero_can_be_followed_by_another,
        late_extends_leave_one_failure_of_their_delivery,
        a_lease_lasts_at_most_twelve_hours_since_the_receive,
        a_refused_extension_changes_nothing,
        a_refused_late_extension_keeps_the_failure,
        an_extension_to_zero_gives_the_message_back_at_once,
        a_receipt_survives_a_crash: DurableLease,
        a_stale_receipt_stays_stale_after_a_crash: DurableLease,
    }
    3 p03_retry {
        by_default_a_retry_is_visible_at_once,
        backoff_doubles_up_to_its_cap,
        full_jitter_spreads_within_its_ceiling,
        a_lease_that_runs_out_backs_off_by_policy,
        a_delay_that_was_asked_for_is_literal,
        a_deferred_delivery_counts_no_attempt,
        a_deferred_message_never_dies_of_it,
        a_rejected_message_is_parked_where_there_is_no_dead_letter_queue,
        a_delivery_in_doubt_is_parked_and_counts_no_attempt,
        a_released_message_starts_anew,
        failed_attempts_are_remembered_with_who_and_why,
        a_message_that_keeps_failing_starves_no_other,
        the_defaults_back_off_and_end: FastTime,
    }
    4 p04_dead_letters {
        the_last_failure_moves_a_message_to_the_dead_letters,
        the_last_lease_that_runs_out_moves_a_message_to_the_dead_letters,
        giving_back_the_last_attempt_moves_a_message_to_the_dead_letters,
        a_rejected_message_goes_to_the_dead_letters_at_once,
        a_delay_that_was_asked_for_does_not_save_the_last_attempt,
        a_dead_letter_is_delivered_with_its_story,
        a_death_is_atomic: DurableLease,
        crashes_count_as_attempts: DurableLease,
        a_lowered_limit_holds_at_the_next_receive,
        dead_letters_are_never_suppressed_as_duplicates,
        long_errors_are_cut_and_only_the_last_failures_kept,
        a_message_is_dropped_when_its_retention_ends: FastTime,
        a_message_held_past_its_retention_is_dropped_when_it_comes_back: FastTime,
        a_dead_letter_keeps_the_age_of_its_message: FastTime,
        a_settle_that_comes_after_the_death_is_told_so,
        deliveries_grow_where_attempts_do_not,
        out_of_attempts_without_a_dead_letter_queue_is_parked,
    }
    5 p05_redrive {
        a_redriven_message_returns_to_its_source_as_a_new_one,
        a_redrive_survives_a_crash_once_it_is_done,
        dead_letters_can_go_to_another_queue,
        a_missing_target_is_refused,
        a_filter_chooses_what_is_redriven,
        a_filter_by_time_of_death_is_half_open,
        a_dead_letter_whose_source_is_gone_is_left,
        a_redrive_keeps_to_its_rate,
        a_cancelled_redrive_stops_and_keeps_what_it_moved,
        cancelling_what_does_not_exist_is_not_found,
        one_redrive_runs_per_dead_letter_queue,
        redrives_are_kept_as_an_audit_newest_first,
        a_redrive_goes_on_after_a_crash_without_losing_or_doubling,
    }
    6 p06_attempts {
        a_repeated_receive_survives_a_crash: Order DurableLease,
        a_standard_queue_repeats_a_receive_too: DurableLease,
        a_repeat_gives_what_is_still_held_and_nothing_else: Order DurableLease,
        a_repeat_after_the_lease_ran_out_is_a_new_receive: Order DurableLease,
        a_repeat_does_not_shorten_a_lease: Order DurableLease,
        an_attempt_can_be_repeated_for_five_minutes: Order DurableLease FastTime,
        a_purge_and_a_new_queue_end_what_can_be_repeated: Order,
        what_is_acked_on_receive_cannot_be_repeated: Order,
        attempts_of_two_queues_are_told_apart: Order,
        a_repeat_does_not_wait_behind_those_who_wait: Order,
        two_waiting_receives_of_one_attempt_get_the_same: Order,
        a_dropped_receive_takes_nothing_from_its_repeat: Order,
        a_dropped_receive_can_be_repeated: Order,
    }
    6 p06_crossings {
        a_group_that_is_halted_in_a_pause_stays_halted_after_it: Order DurableLease,
        a_redrive_under_way_continues_through_a_pause,
        a_redriven_message_does_not_wait_for_its_delivery_time_again: FastTime,
        a_message_that_waits_for_its_time_can_be_discarded,
        a_message_that_waits_for_its_time_counts_against_the_quota,
        what_is_discarded_while_a_redrive_runs_does_not_return,
        a_late_extend_does_not_reach_a_dead_letter: DurableLease,
        a_dead_letter_that_a_group_waits_for_outlives_its_retention: Order FastTime,
        a_dead_letter_is_kept_while_a_second_group_waits_for_it: Order FastTime,
        a_held_dead_letter_comes_back_to_be_kept: Order FastTime,
    }
    6 p06_dead_groups {
        by_default_a_group_goes_on_after_a_death: Order,
        a_halted_group_stands_still_and_others_do_not: Order DurableLease,
        a_lease_that_runs_out_halts_a_group_too: Order,
        a_rejection_halts_a_group_too: Order,
        who_works_ahead_of_a_death_may_finish: Order,
        a_released_group_goes_on_without_its_dead: Order,
        a_redriven_message_takes_its_old_place_in_a_halted_group: Order,
        a_redrive_elsewhere_decides_about_the_message_too: Order,
        a_group_is_halted_until_each_of_its_messages_is_decided_about: Order,
        a_dead_letter_that_is_released_among_the_dead_is_not_decided_about: Order,
        discarding_in_its_source_does_not_reach_a_dead_letter: Order,
        a_dead_letter_that_halts_two_groups_is_decided_about_once: Order,
        what_waits_in_a_halted_group_is_not_dropped_by_age: Order FastTime,
    }
    6 p06_dedup {
        a_repeated_send_adds_nothing_and_answers_as_the_first,
        a_repetition_inside_one_batch_is_suppressed,
        an_id_is_remembered_after_its_message_was_acked,
        an_id_is_forgotten_exactly_at_the_end_of_its_window,
        the_default_window_is_five_minutes: FastTime,
        a_window_of_hours_holds_through_restarts: FastTime LongDedup,
        many_ids_of_a_long_window_are_told_apart: FastTime LongDedup,
        content_based_ids_are_the_sha_256_of_the_body,
        ids_can_be_compared_within_their_group,
        a_window_of_zero_suppresses_nothing,
        standard_queues_honour_ids_that_are_given,
        queues_do_not_share_ids,
        a_refused_send_remembers_no_id,
        a_purge_forgets_the_ids,
        a_purge_forgets_the_ids_of_a_long_window: FastTime LongDedup,
    }
    6 p06_delay {
        a_delayed_message_is_hidden_until_its_delay_is_over,
        a_queue_delays_messages_that_do_not_say,
        a_delay_is_not_part_of_the_lease,
        a_message_is_delivered_at_its_time_and_retained_from_then: FastTime,
        a_delivery_time_survives_a_crash,
        a_delivery_time_that_cannot_be_is_refused,
        messages_come_in_order_of_sending,
        a_higher_priority_comes_first_then_the_order_of_sending: DurableLease,
        a_quiet_group_overtakes_a_noisy_one,
        a_noisy_group_alone_is_served_in_full,
        fair_sharing_loses_and_doubles_nothing: DurableLease,
    }
    6 p06_fifo {
        a_group_is_received_in_the_order_of_its_sends: Order,
        one_receive_may_take_several_of_a_group_in_order: Order,
        a_group_is_blocked_while_any_of_its_batch_is_in_flight: Order,
        other_groups_are_not_blocked: Order,
        each_group_keeps_its_order_when_groups_are_mixed: Order,
        a_failure_inside_a_batch_returns_the_rest_uncounted: Order,
        a_failure_leaves_earlier_messages_of_its_batch_in_flight: Order,
        a_failure_of_one_group_leaves_the_others_of_its_receive: Order,
        order_holds_when_a_batch_runs_out_of_its_lease: Order,
        a_backing_off_head_blocks_its_group: Order,
        a_deferred_head_blocks_its_group: Order,
        a_delayed_head_blocks_its_group: Order,
        a_message_given_back_comes_again_first: Order,
        a_blocked_group_stays_blocked_through_a_crash: Order DurableLease,
        a_repeated_receive_attempt_gives_the_same_deliveries: Order,
        a_repeated_receive_attempt_can_be_settled: Order,
        a_discarded_head_frees_its_group: Order,
        a_fifo_message_needs_a_group_and_an_identity_and_takes_no_delay: Order,
        a_visibility_of_zero_leaves_the_rest_of_the_batch_in_flight: Order,
        a_parked_message_takes_back_the_rest_of_its_batch: Order,
        a_group_that_failed_waits_behind_the_other_groups: Order,
        healthy_messages_do_not_die_with_a_poison_neighbour: Order FastTime,
    }
    7 p07_long_poll {
        a_waiting_receive_wakes_on_a_send,
        a_waiting_receive_is_told_that_its_queue_was_deleted,
        a_receive_does_not_wait_when_something_is_ready,
        a_waiting_receive_wakes_on_expiry,
        a_waiting_receive_wakes_when_a_message_is_given_back,
        a_waiting_receive_wakes_when_a_lease_was_shortened,
        a_waiting_receive_wakes_when_a_delay_is_over,
        a_waiting_receive_wakes_when_its_group_is_free: Order,
        a_waiting_receive_wakes_on_release_and_redrive,
        a_waiting_receive_wakes_on_a_death_at_another_receive,
        a_waiting_receive_gives_up_at_its_deadline,
        a_queue_says_how_long_to_wait,
        a_lease_begins_with_the_delivery_not_with_the_wait,
        one_message_wakes_one_of_two,
        every_waiting_receive_is_served,
        a_waiting_receive_on_one_queue_leaves_another_alone,
        a_receive_dropped_while_it_waits_takes_nothing,
        a_receive_dropped_when_it_is_ready_takes_nothing,
        a_receive_dropped_before_its_answer_takes_nothing,
        a_dropped_fifo_receive_leaves_order_and_group_as_they_were: Order,
    }
    8 p08_limits {
        the_largest_message_is_one_mebibyte,
        a_queue_sets_its_own_largest_message,
        a_batch_may_have_a_thousand_messages_and_a_mebibyte_each,
        a_batch_beyond_a_thousand_is_refused_whole,
        a_page_has_one_to_a_thousand_rows,
        a_message_that_does_not_fit_its_queue_is_refused,
        a_fifo_message_that_does_not_fit_its_queue_is_refused: Order,
        a_redrive_out_of_range_is_refused,
        a_receive_out_of_range_is_refused,
        a_delay_is_at_most_fifteen_minutes,
        a_standard_queue_has_at_most_120k_in_flight: Heavy,
        a_fifo_queue_with_120k_in_flight_hands_out_nothing: Heavy Order,
    }
    9 p09_deliveries {
        a_lease_survives_a_restart_and_ends_when_it_would_have: DurableLease,
        a_lease_survives_a_crash: DurableLease,
        an_extension_survives_a_crash: DurableLease,
        a_lease_that_ran_out_while_the_store_was_down_is_over: DurableLease,
        what_is_acked_on_receive_never_returns,
        what_a_fifo_group_acks_on_receive_does_not_block_it: Order,
        each_answer_of_many_rounds_survives_a_crash: DurableLease,
    }
    10 p10_fences {
        fences_grow_with_every_delivery_of_the_store: Fence,
        a_message_has_a_larger_fence_at_every_delivery,
        fences_grow_through_restarts_and_crashes: Fence,
        fences_grow_when_the_wall_clock_was_set_back: Fence WallBack,
        a_wall_clock_set_back_holds_nothing_up: WallBack,
    }
    11 p11_quotas {
        a_full_queue_refuses_messages_until_some_are_acked: DurableLease,
        bytes_are_limited_too,
        purging_and_discarding_make_room,
        a_refused_message_leaves_no_trace,
        a_full_dead_letter_queue_loses_nothing,
    }
    12 p12_two_handles {
        a_send_on_one_handle_wakes_a_receive_on_the_other: SecondHandle,
        a_message_is_held_once_across_handles: SecondHandle,
        a_receipt_settles_on_the_other_handle: SecondHandle,
        fences_grow_across_handles: SecondHandle Fence,
        a_repeated_send_on_the_other_handle_adds_nothing: SecondHandle,
        a_group_held_on_one_handle_is_blocked_on_the_other: SecondHandle Order,
        changed_settings_hold_on_the_other_handle: SecondHandle,
        a_redrive_is_seen_and_cancelled_on_the_other_handle: SecondHandle,
    }
    13 p13_transfer {
        only_a_paused_queue_is_exported: Transfer,
        a_moved_message_is_as_it_was: Transfer,
        a_moved_fifo_queue_keeps_its_order: Transfer Order,
        a_group_stays_halted_for_its_dead_letter_and_takes_it_back_in_order: Transfer Order,
        a_group_stays_halted_for_its_parked_message: Transfer Order,
        an_import_that_is_repeated_adds_nothing: Transfer,
        a_moved_queue_remembers_its_deduplication_ids: Transfer FastTime,
        fences_of_the_target_exceed_those_of_the_source: Transfer Fence,
        what_does_not_fit_is_refused_alone: Transfer,
        a_moved_entry_replays_and_an_open_claim_is_in_doubt: Transfer OneStore,
        a_message_that_was_parked_for_an_entry_goes_on_when_it_is_resolved: Transfer OneStore,
    }
}

//! Drafts by example (I44 to I47, faults 100 to 104): see `draft_checks`, which the planted faults use too.

use crate::draft_checks;

/// One test for each check.
macro_rules! checks {
    ($($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                draft_checks::$check().unwrap_or_else(|broken| panic!("{broken}"));
            }
        )*
    };
}

checks! {
    every_drafter_brings_the_same_text
    only_what_was_right_is_found_again
    a_run_ends_at_the_first_stop_or_limit
    no_draft_runs_past_the_limit
    drafts_preempt_nobody
    drafts_keep_to_quotas_and_promises
    blocks_of_drafts_go_back
    a_request_changes_while_its_drafts_are_verified
    a_sequence_with_drafts_is_left_out_of_the_next_plan
    drafts_follow_a_token_on_its_way
    growth_waits_for_the_blocks_of_drafts
}

//! Several sequences in one request, by example (I29, faults 77 and 78): see `sibling_checks`, which the planted faults use too.

use crate::sibling_checks;

/// One test for each check.
macro_rules! checks {
    ($($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                sibling_checks::$check().unwrap_or_else(|broken| panic!("{broken}"));
            }
        )*
    };
}

checks! {
    the_prompt_is_computed_once_and_shared
    a_request_is_ended_as_one
    a_sequence_is_ended_alone
    a_fork_ends_with_its_request
    a_row_is_kept_for_each
    too_many_are_refused
    the_same_prompt_comes_again
    others_begin_behind_a_window
    without_eviction_others_begin_behind_a_window
    without_eviction_every_sequence_has_its_blocks
    others_begin_behind_a_plan_that_did_not_know_them
}

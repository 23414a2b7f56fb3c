//! Partial hits in several groups, with windows and without: what is found is what brute force finds.
//!
//! Before: scripts of prompts, drawn by proptest from a seed. After: see `parts`. `BLOCKTABLE_SEED` chooses other scripts,
//! `BLOCKTABLE_CASES` more of them.

use std::cell::RefCell;

use crate::broken;
use crate::parts::{Met, Script, scripts};
use crate::seed;

#[test]
fn what_is_found_is_the_longest_that_every_group_accepts() {
    let all = RefCell::new(Met::default());
    let cases = seed::run_cases("partial_hits", 250, &scripts(), |script: Script| {
        let (met, mut all) = (script.run()?, all.borrow_mut());
        all.parts += met.parts;
        all.only_with_part += met.only_with_part;
        all.unequal += met.unequal;
        broken::Checked::Ok(())
    });
    let Met { parts, only_with_part, unequal } = all.into_inner();
    eprintln!("{parts} parts, {only_with_part} that full blocks needed, {unequal} of which some group had more");
    assert!(parts > cases && only_with_part > cases / 100 && unequal > cases / 100, "scripts must meet everything");
}

//! Sequences do what a model made of plain collections does, on random scripts, and every row that a table names holds what was written.
//!
//! Before: a script of calls, drawn by proptest from a seed. After: results, tables, counts, holders, queue order, published blocks and
//! contents have been compared after every call. A failing script is shrunk and printed. `BLOCKTABLE_SEED` chooses other scripts,
//! `BLOCKTABLE_CASES=100000` more of them.

use crate::seed;
use crate::sequence_script::sequence_scripts;

#[test]
fn sequences_do_what_the_model_does() {
    seed::run_cases("sequences_vs_model", 1_500, &sequence_scripts(), |script| script.run());
}

//! The block pool does what a model made of plain collections does, on random scripts, after every single call.
//!
//! Before: a script of calls, drawn by proptest from a seed. After: results, counts, holders, the whole order of the free queue,
//! states and lookups of the index have been compared, and the pool's audit has recounted them. A failing script is shrunk and
//! printed. `BLOCKTABLE_SEED` chooses other scripts, `BLOCKTABLE_CASES=100000` more of them.

use crate::pool_script::pool_scripts;
use crate::seed;

#[test]
fn the_pool_does_what_the_model_does() {
    seed::run_cases("pool_vs_model", 4_000, &pool_scripts(), |script| script.run());
}

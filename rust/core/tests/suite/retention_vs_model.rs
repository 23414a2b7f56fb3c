//! Retention does what a plain model does: priorities, times to live, refreshes, and the whole order in which free blocks are handed out.
//!
//! Before: proptest draws chains that are written, hit, released and forgotten for room while time passes. After: the order of the free
//! queue was compared after every call, and no cached block ever stood before a block behind it in its chain: it is evicted later.

use crate::retention_script::scripts;
use crate::seed;

#[test]
fn the_order_of_eviction_is_the_models() {
    seed::run_cases("retention_vs_model", 2_000, &scripts(), |script| script.run());
}

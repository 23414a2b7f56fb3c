//! Has a question that the scheduler asks before it acts be refused, in a build that can.
//!
//! Before: a schedule says which question of the next plan. After: the plan went on without who was refused.

/// Does `operation` with its `nth` question refused, counted from 1; what it says, and whether it asked that one.
#[cfg(feature = "mutants")]
pub fn with_refusal<T>(nth: u32, operation: impl FnOnce() -> T) -> (T, bool) {
    use blocktable_core::refusal::refuse;
    refuse(nth);
    let outcome = operation();
    let is_met = refuse(0) == 0 && nth > 0;
    (outcome, is_met)
}

/// The same where nothing can be refused.
#[cfg(not(feature = "mutants"))]
pub fn with_refusal<T>(_nth: u32, operation: impl FnOnce() -> T) -> (T, bool) {
    (operation(), false)
}

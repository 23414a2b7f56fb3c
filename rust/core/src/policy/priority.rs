//! `priority`: lower numbers first, and who has waited `ageing_us` counts as one number lower.
//!
//! A request of priority `p` that came at time `t` has aged to `p - (now - t) / ageing_us`. All age alike, so the order of two
//! requests is the order of `p + t / ageing_us`, which does not change: nothing is sorted again as time passes.
//!
//! Overtakers of a request of priority `p`: those of priority `q < p` that arrive less than `(p - q) * ageing_us` after it, and
//! `max_pass` smaller ones. So who comes `(p - q) * ageing_us` later, or more, waits behind it; by default that is 1 s for each
//! priority between them, and 2,000 s for the lowest of all behind the highest.
//! The same class ranks running requests, so what was admitted by its age is not the first victim of what came later.

use crate::mutant::{self, Mutant};
use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::Key;

#[derive(Debug)]
pub(super) struct Priority {
    pub ageing_us: u64,
}

impl Policy for Priority {
    fn class(&self, priority: i32, submitted_us: u64) -> i64 {
        let aged = if mutant::is_on(Mutant::NoAgeing) { 0 } else { submitted_us / self.ageing_us };
        i64::from(priority).saturating_add(i64::try_from(aged).unwrap_or(i64::MAX))
    }

    fn key(&self, ask: &Ask) -> Key {
        // The order of signed numbers as that of unsigned ones.
        (ask.rank.class.cast_unsigned() ^ (1 << 63), ask.rank.arrival)
    }
}

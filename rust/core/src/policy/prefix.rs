//! `prefix`: the longest cached prefix first, inside bands of `prefix_band` consecutive arrivals; bands in order.
//!
//! Lengths are counted in full blocks that are known when the order is made, and kept up as blocks are published and evicted:
//! see `cache_follower.rs`.
//!
//! Overtakers of a request: those behind it in its band, at most `prefix_band - 1`, and `max_pass` smaller ones; by default
//! 1,023 + 8.

use crate::mutant::{self, Mutant};
use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::Key;

#[derive(Debug)]
pub(super) struct Prefix {
    pub band: u64,
}

impl Policy for Prefix {
    fn key(&self, ask: &Ask) -> Key {
        let band = if mutant::is_on(Mutant::OnePrefixBand) { 0 } else { ask.rank.arrival / self.band };
        (band << 32 | u64::from(u32::MAX - ask.cached_blocks), ask.rank.arrival)
    }

    fn follows_cache(&self) -> bool {
        true
    }
}

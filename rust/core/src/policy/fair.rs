//! `fair`: the tenant that was served least goes first, first come, first served inside each (virtual token counters, Sheng et
//! al., "Fairness in Serving Large Language Models", OSDI 2024).
//!
//! Each tenant has a counter of work: a prompt token that is computed costs 1, charged at admission, an output 2, each divided by
//! the tenant's weight. Cached tokens and recomputation cost nothing. A tenant that comes back after nobody of it waited is lifted to
//! the lowest counter of those that wait, or of the last that did: nobody saves up by staying away.
//!
//! Two tenants that always have somebody waiting get work whose difference is at most `2 * U / weight`, `U` = max(longest prompt,
//! 2 * `max_num_batched_tokens`). Overtakers of a request that is the first of its tenant: with `n - 1` other tenants, of each so many
//! that their work reaches the lag of this tenant's counter, at most `U / weight`, so at most `(n - 1) * (U + 1)` in all and
//! none if its counter is the lowest, plus `max_pass` smaller ones. By default, with two tenants, prompts up to 4,096 tokens and a
//! budget of 2,048 tokens a step: at most 4,097 + 8, and 8 for a tenant that comes back.

use crate::mutant::{self, Mutant};
use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::Key;

/// Parts of a token that a counter can tell apart: a power of two above every weight.
const PARTS: u64 = 1 << 16;

/// Heaviest tenant.
pub(crate) const MAX_WEIGHT: u32 = 1 << 12;

#[derive(Debug, Default)]
pub(super) struct Fair {
    /// Counter and weight of each tenant.
    tenants: Vec<(u64, u32)>,
    /// The counter of the tenant that was the last to stop waiting.
    last: u64,
}

impl Fair {
    fn counter(&self, line: usize) -> u64 {
        self.tenants.get(line).map_or(0, |tenant| tenant.0)
    }
}

impl Policy for Fair {
    fn key(&self, ask: &Ask) -> Key {
        (0, ask.rank.arrival)
    }

    fn standing(&self, line: usize, _first: Key) -> Key {
        (self.counter(line), line as u64)
    }

    fn wake(&mut self, line: usize, weight: u32, lowest: Option<usize>) {
        if self.tenants.len() <= line {
            self.tenants.resize(line + 1, (0, 1));
        }
        let floor =
            if mutant::is_on(Mutant::NoLift) { 0 } else { lowest.map_or(self.last, |lowest| self.counter(lowest)) };
        let tenant = &mut self.tenants[line];
        *tenant = (tenant.0.max(floor), weight);
    }

    fn sleep(&mut self, line: usize) {
        self.last = self.counter(line);
    }

    fn forget(&mut self, line: usize) {
        if let Some(tenant) = self.tenants.get_mut(line) {
            tenant.0 = 0;
        }
    }

    fn charge(&mut self, line: usize, tokens: u64) {
        let Some(tenant) = self.tenants.get_mut(line) else { return };
        if mutant::is_on(Mutant::ChargeNothing) {
            return;
        }
        tenant.0 = tenant.0.saturating_add(tokens.saturating_mul(PARTS / u64::from(tenant.1)));
    }

    fn charges(&self) -> bool {
        true
    }
}

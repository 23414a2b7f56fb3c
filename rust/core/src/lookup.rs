//! A request looks up its prefix: full blocks that are known, and rows of the next one that can be copied.
//!
//! Before: it is about to be admitted, or lost what it shared. After: [`Hit`](crate::hit::Hit) names the blocks, which nobody holds for it yet.

use crate::beside::Beside;
use crate::hit::Known;
use crate::mutant::{self, Mutant};
use crate::partial_hit::PartialHit;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Finds the longest known prefix in full blocks. The last token is always computed, so that there are logits to sample from.
    pub(crate) fn find_hits(&mut self, seat: usize) {
        let mut most = self.most_hits(seat);
        let (index, known) = (self.pool.index(), self.known(seat));
        self.hit.find(index, &self.groups, &self.seats[seat].as_ref().expect("a seat in use").keys[..most], known);
        while let Some(at) = self.first_forged(seat) {
            self.counters.forged_hits += 1;
            most = at;
            let (index, keys) = (self.pool.index(), &self.seats[seat].as_ref().expect("a seat in use").keys[..most]);
            self.hit.find(index, &self.groups, keys, known);
        }
    }

    /// The same, and what is to be done beside: nothing in a pool without a ledger.
    pub(crate) fn find_hits_and_part(&mut self, seat: usize) -> Option<Beside> {
        self.find_hits(seat);
        self.pool.has_ledger().then(|| Beside { part: self.find_part(seat) })
    }

    /// The rows of the next block that can be copied. Behind some of these a window may see one block fewer: less is held than without
    /// them, and more full blocks may serve.
    #[cold]
    #[inline(never)]
    fn find_part(&mut self, seat: usize) -> Option<PartialHit> {
        let plain = self.hit.len();
        if self.pool.partial().is_none() || !self.groups.has_window() {
            return self.find_partial(seat, plain);
        }
        let mut most = if mutant::is_on(Mutant::PartialBehindFullOnly) { plain } else { self.most_hits(seat) };
        loop {
            self.refit(seat, most, self.block_size.tokens() - 1);
            let len = self.hit.len();
            let part = self.find_partial(seat, len);
            self.refit(seat, len, part.map_or(0, |part| part.rows));
            if self.hit.len() == len && (len == plain || part.is_some() && self.first_forged(seat).is_none()) {
                return part;
            }
            most = len - 1;
        }
    }

    /// Full blocks that a hit may have at most.
    fn most_hits(&self, seat: usize) -> usize {
        let request = self.request(seat);
        if mutant::is_on(Mutant::PreemptedLooksNothingUp) && request.preemptions > 0 {
            return 0;
        }
        let whole = usize::from(mutant::is_on(Mutant::HitWholePrompt));
        self.block_size.full_blocks(request.num_tokens() - 1 + whole).min(request.keys.len())
    }

    /// What counts for a hit. Who shares what is not confirmed may lose it, and who was promised its whole need was not promised blocks for
    /// that.
    fn known(&self, seat: usize) -> Known {
        if self.promises_whole(seat) { Known::Published } else { Known::Pending }
    }

    /// Finds again, of at most `most` blocks, what every group accepts with `rows` rows behind it.
    fn refit(&mut self, seat: usize, most: usize, rows: usize) {
        let (index, known) = (self.pool.index(), self.known(seat));
        let keys = &self.seats[seat].as_ref().expect("a seat in use").keys[..most];
        self.hit.fit(index, &self.groups, keys, known, rows);
    }
}

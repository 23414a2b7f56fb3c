//! A running request that lost what it shared looks for its prefix once more, before it computes what another one computes.
//!
//! Before: its writer failed, was aborted or preempted, and [`Scheduler::put_back`](crate::Scheduler) cut its tables. After: it shares
//! what others have published or are writing, as a waiting request would; or it waits, if one of this step comes to stand in its next
//! block; or, if there is nothing to share or no room for that, it goes on alone. All of its growth is done here, so that what it
//! shares unconfirmed is in the plan in the same call.

use crate::error::Result;
use crate::mutant::{self, Mutant};
use crate::preemption::contains;
use crate::reason::Reason;
use crate::refusal::Granted;
use crate::row_arrays::RowArrays;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// A running request that may compute `chunk` rows looks again; how many of the budget it used, or nothing if it is to grow alone.
    pub(crate) fn look_again(&mut self, rows: &mut RowArrays<'_>, seat: usize, chunk: usize) -> Option<usize> {
        let request = self.request(seat);
        let is_its_own = request.is_mixed || !request.drafts.is_empty();
        if is_its_own || self.block_size.offset(request.computed()) > 0 || mutant::is_on(Mutant::SharerLooksOnce) {
            return None;
        }
        self.find_hits(seat);
        let (hits, kept) = (self.hit.len(), self.request(seat).table.len());
        let request = self.request(seat);
        let is_awaited = hits >= kept
            && hits < self.block_size.full_blocks(request.num_tokens() - 1)
            && request.keys.get(hits).is_some_and(|key| contains(&self.frontier, key));
        if is_awaited && !mutant::is_on(Mutant::NoPrefixWait) {
            self.note_wait(seat, Reason::PrefixInFlight { found: hits as u32 });
            return Some(0);
        }
        if hits <= kept {
            return None;
        }
        let start = hits * self.block_size.tokens();
        let chunk = chunk.min(request.num_tokens() - start);
        let missing = (self.block_size.blocks_for(start + chunk) - hits) as u32;
        let (missing_in_all, promised) = (missing * self.groups.len() as u32, request.promised);
        let own = promised.min(missing_in_all);
        let free_hits = self.hit.num_free(&self.pool);
        let (named, room) = (self.hit.blocks().count() as u32, self.room_of_tenant(&self.asks[seat]));
        let beyond = missing_in_all - own + free_hits;
        if beyond > self.pool.num_free().saturating_sub(self.promised) || named + missing_in_all - own > room {
            return None;
        }
        match self.ask_to_rejoin(missing_in_all + free_hits) {
            Ok(_granted) => self.rejoin(seat, kept, missing, own),
            Err(error) => {
                self.note_refusal(error);
                self.note_wait(seat, Reason::StepRefused {});
                return Some(0);
            }
        }
        self.schedule(rows, seat, chunk, self.hit.confirmed()..hits);
        Some(chunk)
    }

    fn ask_to_rejoin(&self, needed: u32) -> Result<Granted> {
        let granted = Granted::begin();
        self.hit.blocks().try_for_each(|block| self.pool.may_share(block))?;
        self.pool.may_take(needed)?;
        Ok(granted)
    }

    /// Puts the hit that was just found in the place of the `kept` blocks that it has, and `missing` blocks a group behind it.
    #[cold]
    #[inline(never)]
    fn rejoin(&mut self, seat: usize, kept: usize, missing: u32, own: u32) {
        let old = self.request_mut(seat).cut(0);
        self.hold_hits(seat);
        self.ask_for_hits(seat, None);
        let (hits, size) = (self.hit.len(), self.block_size.tokens());
        let request = self.request_mut(seat);
        request.set_computed(hits * size);
        if request.num_outputs() == 0 && request.preemptions == 0 {
            request.cached = Some(hits * size);
            self.counters.prefix_hits += ((hits - kept) * size) as u64;
        }
        let planned_in = self.request(seat).planned_in;
        let when = self.when_free(planned_in, old.blocks());
        self.pool.release(old, when);
        if missing > 0 {
            self.take_blocks(seat, missing, own);
        }
        self.note_change(seat, 0);
        self.recount(seat);
    }
}

//! What waiting requests would find in the prefix cache, kept up without looking it all up again.
//!
//! Before: a request joins the line, or was found not to fit. After: its hit is remembered and read again only when the last block of
//! it went, or the key that it stopped at appeared (design 3): blocks of a chain are evicted from behind, so no other change
//! matters. A plan reads at most [`UPDATES`] hits again. A remembered hit decides only the order, and who is not worth a second try;
//! admission looks everything up.

use crate::mutant::{self, Mutant};
use crate::scheduler::Scheduler;

/// Remembered hits that a plan reads again.
const UPDATES: usize = 256;

impl Scheduler {
    /// Reads the hits again that may have changed.
    pub(crate) fn follow_cache(&mut self) {
        for _ in 0..UPDATES {
            let Some(seat) = self.pool.watch_mut().pop() else { return };
            self.read_again(seat);
        }
    }

    /// The request at `seat` begins to wait.
    pub(crate) fn begin_to_follow(&mut self, seat: usize) {
        self.asks[seat].short_of = None;
        if self.waiting.policy.follows_cache() {
            self.asks[seat].cached_blocks = 0;
            self.read_hit(seat);
        }
    }

    /// The request at `seat` waits no more.
    pub(crate) fn end_to_follow(&mut self, seat: usize) {
        self.pool.watch_mut().forget(seat);
        self.asks[seat].short_of = None;
    }

    /// The tokens or keys of the request at `seat`, which waits, are others now.
    pub(crate) fn follow_anew(&mut self, seat: usize) {
        self.pool.watch_mut().forget(seat);
        self.asks[seat].cached_blocks = 0;
        self.read_again(seat);
    }

    /// The request at `seat` was just looked up: it found `hits` blocks, and lacks more free blocks than there are, `rest` of them not
    /// counting its hits. Until its hit changes, fewer free blocks than that do not suffice. With several groups, or a window, other
    /// changes matter too, so nothing is remembered.
    pub(crate) fn remember_short(&mut self, seat: usize, hits: usize, rest: u32) {
        if self.groups.len() > 1 || self.groups.has_window() || !self.config.enable_prefix_caching {
            return;
        }
        self.pool.watch_mut().forget(seat);
        self.asks[seat].short_of = Some(rest);
        self.watch_hit(seat, hits);
    }

    fn read_again(&mut self, seat: usize) {
        self.asks[seat].short_of = None;
        if self.waiting.policy.follows_cache() && !mutant::is_on(Mutant::HitNotFollowed) {
            self.read_hit(seat);
            self.waiting.reorder(seat, &self.asks[seat]);
        }
    }

    /// Goes on from the remembered hit, in the first group.
    fn read_hit(&mut self, seat: usize) {
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let most = self.block_size.full_blocks(request.num_tokens() - 1).min(request.keys.len());
        let is_cached = |at: usize| self.pool.index().lookup(&request.keys[at]).is_some();
        let mut hits = (self.asks[seat].cached_blocks as usize).min(most);
        while hits > 0 && !is_cached(hits - 1) {
            hits -= 1;
        }
        while hits < most && is_cached(hits) {
            hits += 1;
        }
        self.asks[seat].cached_blocks = hits as u32;
        self.watch_hit(seat, hits);
    }

    fn watch_hit(&mut self, seat: usize, hits: usize) {
        let keys = &self.seats[seat].as_ref().expect("a seat in use").keys;
        let last = hits.checked_sub(1).and_then(|last| keys.get(last));
        self.pool.watch_mut().watch(seat, [last, keys.get(hits)]);
    }
}

//! Blocks for a running request that grows: from its promise, from what is free, from promises below it, from victims below it.
//!
//! A victim ranks strictly below the taker, so equals never swap places and the request of highest rank always advances
//! (design 10). A sequence that finds no victim is skipped and keeps its blocks. Victims are computed anew when their turn comes.

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::Error;
use crate::ids::Key;
use crate::mutant::{self, Mutant};
use crate::reason::{Reason, saturated};
use crate::request::Place;
use crate::scheduler::Scheduler;

/// Whether a running request has blocks for the rows it was to compute.
pub(crate) enum Growth {
    /// It has.
    Fits,
    /// Nobody ranks below it, and so many blocks beyond its promise do not suffice.
    NoVictim { needed: u32 },
    /// Its tenant may hold no more, and nobody of it ranks below.
    OverQuota,
    /// One of its steps was refused; nothing changed.
    Refused(Error),
}

impl Scheduler {
    /// Makes the running request at position `at` own blocks for `rows` rows. What may be refused is asked before anybody makes room for
    /// it, so that nobody does so for nothing.
    pub(crate) fn grow(&mut self, at: usize, rows: usize) -> Growth {
        let seat = self.running[at];
        if self.copy_is_written(seat) {
            return Growth::NoVictim { needed: 0 };
        }
        let held = if mutant::is_on(Mutant::GrowFromZero) { 0 } else { self.request(seat).table.len() };
        // In each group.
        let missing = self.block_size.blocks_for(rows).saturating_sub(held);
        let missing_in_all = (missing * self.groups.len()) as u32;
        let mut needed = missing_in_all + self.copies_due(seat);
        if needed == 0 {
            return Growth::Fits;
        }
        let granted = match self.ask_to_grow(seat) {
            Ok(granted) => granted,
            Err(error) => return Growth::Refused(error),
        };
        while needed > 0 {
            let promised = self.request(seat).promised;
            let unpromised = self.pool.num_free().saturating_sub(self.promised);
            let mut own = promised.min(missing_in_all);
            if self.config.queue.no_evict || needed - own > unpromised {
                // Its copies come from its promise too.
                own = promised.min(needed);
            }
            let (new, room) = (missing_in_all.saturating_sub(own), self.room_of_tenant(&self.asks[seat]));
            if new > room && !mutant::is_on(Mutant::QuotaExceeded) {
                self.name_filled();
                match self.victim_of_tenant(seat, new - room).filter(|_| self.lookahead_in_flight() == 0) {
                    Some(victim) => {
                        self.note_preemption(victim, seat);
                        self.preempt(victim);
                    }
                    None => return Growth::OverQuota,
                }
                needed = missing_in_all + self.copies_due(seat);
                continue;
            }
            let beyond = needed - own;
            if beyond <= unpromised {
                granted.take(needed - u32::from(mutant::is_on(Mutant::AskForgetsBlock)));
                let first = self.copy_tail(seat).unwrap_or(self.request(seat).table.len());
                self.take_blocks(seat, missing as u32, own);
                self.note_change(seat, first);
                self.hold_more(seat, missing_in_all, own);
                return Growth::Fits;
            }
            self.name_filled();
            let short = beyond - unpromised;
            if self.unname_tail(seat, needed) || self.take_room_below(seat) {
                needed = missing_in_all + self.copies_due(seat);
                continue;
            }
            if self.config.queue.no_evict && !mutant::is_on(Mutant::EvictAnyway) {
                return Growth::NoVictim { needed: beyond };
            }
            // What steps in flight name is free when they have ended.
            let parked = if mutant::is_on(Mutant::ParkedNotAwaited) { 0 } else { self.pool.num_parked() };
            if short <= parked + self.lookahead_in_flight() || !self.suffices_below(seat, short) {
                return Growth::NoVictim { needed: beyond };
            }
            if self.reclaim_promises(seat, short) {
                continue;
            }
            let Some(victim) = self.victim_below(seat) else {
                return Growth::NoVictim { needed: beyond };
            };
            self.note_preemption(victim, seat);
            self.preempt(victim);
            if mutant::is_on(Mutant::PreemptTwo)
                && let Some(victim) = self.victim_below(seat)
            {
                self.preempt(victim);
            }
            // Who left may have shared its last block.
            needed = missing_in_all + self.copies_due(seat);
        }
        Growth::Fits
    }

    /// Takes a running request's row and blocks; it waits again, at its rank. Its tokens stay.
    pub(crate) fn preempt(&mut self, seat: usize) {
        if self.flight.runs(self.request(seat).planned_in) {
            self.withdraw_writer(seat);
        }
        self.stop_running(seat);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        self.counters.preemptions += 1;
        self.counters.recomputed_tokens += request.computed() as u64;
        self.outlook.see_stop(request.num_outputs());
        request.preemptions += 1;
        request.forget_rows();
        if self.config.enable_prefix_caching {
            // The newest output may have filled a block whose last row was never planned: others may wait for it, or it for them.
            request.extend_keys(&mut self.hasher, request.num_tokens());
        }
        let id = request.id();
        if mutant::is_on(Mutant::PreemptedToTail) {
            self.asks[seat].rank.arrival = self.next_id - 1;
        }
        self.start_waiting(seat);
        if !self.forget_untold(id) {
            let (request, number) = self.name_of(seat);
            self.draft.preempted.push([request, number]);
        }
    }

    /// Moves `count` blocks a group, `own` of them all promised before, into the tables.
    pub(crate) fn take_blocks(&mut self, seat: usize, count: u32, own: u32) {
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let evictions = self.pool.evictions();
        for group in 0..self.groups.len() {
            self.pool.take(request.table_of_mut(group), count).expect("promised or unpromised blocks are free");
        }
        request.promised -= own;
        self.promised -= own;
        if self.pool.evictions() > evictions {
            self.note(seat, Reason::Evicted { blocks: saturated(self.pool.evictions() - evictions) });
        }
    }

    /// Notes for the plan that the tables of a running request changed from entry `first` on.
    pub(crate) fn note_change(&mut self, seat: usize, first: usize) {
        for group in 0..self.groups.len() {
            let first = first + usize::from(mutant::is_on(Mutant::DirtyMissing));
            self.note_entries(seat, group, first..usize::MAX);
        }
    }

    /// Notes for the plan that these entries of a table of a running request changed. Of one that is not told yet the plan will tell all.
    pub(crate) fn note_entries(&mut self, seat: usize, group: usize, entries: Range<usize>) {
        if self.is_untold(seat) {
            return;
        }
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let Place::Running(row) = request.place else { unreachable!("only running requests have a row") };
        let blocks = request.table_of(group).blocks();
        let changed = blocks.get(entries.start..entries.end.min(blocks.len())).unwrap_or(&[]);
        self.draft.dirty.push([group as i32, row.index() as i32, entries.start as i32, changed.len() as i32]);
        self.draft.dirty_ids.extend(changed.iter().map(|block| block.get() as i32));
    }

    /// Takes up to `wanted` promised blocks from requests below `seat`, lowest first; their owners then grow like decodes.
    fn reclaim_promises(&mut self, seat: usize, wanted: u32) -> bool {
        let above = self.rank_in_running(seat) + 1;
        let mut left = wanted;
        for at in (above..self.running.len()).rev() {
            let owner = self.running[at];
            if !self.may_lose(owner) {
                continue;
            }
            let promised = &mut self.seats[owner].as_mut().expect("a seat in use").promised;
            let taken = left.min(*promised);
            *promised -= taken;
            self.promised -= taken;
            left -= taken;
            if taken > 0 {
                let request = self.request(seat).id().0;
                self.note(owner, Reason::PromiseTakenBy { request, blocks: taken });
                self.recount(owner);
            }
        }
        left < wanted
    }

    /// Whether those below `seat` were promised, or hold alone, at least `wanted` blocks: nobody loses anything in vain. Blocks that
    /// only victims share are not counted, so a growth may wait that could have gone on; the highest rank takes what there is.
    fn suffices_below(&self, seat: usize, wanted: u32) -> bool {
        let rank = self.rank_in_running(seat);
        if rank == 0 && !self.secures_somebody() || mutant::is_on(Mutant::PreemptEqual) {
            return true;
        }
        let mut missing = wanted as usize;
        for &below in self.running[rank + 1..].iter().filter(|&&below| self.may_lose(below)) {
            let request = self.request(below);
            let blocks = request.tables().flat_map(|table| table.blocks());
            let alone = blocks.filter(|&&block| self.pool.holders(block) == 1 && !self.flight.is_orphan(block));
            missing = missing.saturating_sub(request.promised as usize + alone.count());
            if missing == 0 {
                return true;
            }
        }
        false
    }

    /// The request below `seat` that is cheapest to compute anew.
    fn victim_below(&self, seat: usize) -> Option<usize> {
        let rank = self.rank_in_running(seat);
        if mutant::is_on(Mutant::PreemptEqual) && rank > 0 {
            return Some(self.running[0]);
        }
        // The lowest of equals: its loss delays nobody above it.
        let below = self.running[rank + 1..].iter().rev().copied();
        below.filter(|&seat| self.may_lose(seat)).min_by_key(|&seat| self.cost_of(seat))
    }

    /// The request below `seat` and of the same tenant that goes first as a victim, if all of them together hold `wanted` blocks of its
    /// quota: nobody loses anything in vain.
    fn victim_of_tenant(&self, seat: usize, wanted: u32) -> Option<usize> {
        if self.config.queue.no_evict {
            return None;
        }
        let rank = self.rank_in_running(seat);
        let held = |&other: &usize| {
            if self.asks[other].tenant == self.asks[seat].tenant { self.request(other).account.held } else { 0 }
        };
        let below = self.running[rank + 1..].iter().rev().copied().filter(|&other| self.may_lose(other));
        let helps = |other: &usize| held(other) > 0 || mutant::is_on(Mutant::TenantVictimInVain);
        let do_suffice = below.clone().map(|other| held(&other)).sum::<u32>() >= wanted;
        let victim = below.filter(helps).min_by_key(|&seat| self.cost_of(seat));
        victim.filter(|_| do_suffice || mutant::is_on(Mutant::TenantVictimInVain))
    }

    /// In which order requests are taken, the smallest first: of the lowest class, of a tenant above its soft quota, cheap.
    /// The last part is what giving it up costs: tokens to compute anew. Where blocks can be swapped, their bytes stand here as well.
    pub(crate) fn cost_of(&self, seat: usize) -> (Reverse<i64>, bool, usize) {
        let request = self.request(seat);
        let class = if mutant::is_on(Mutant::ClassIgnored) { 0 } else { self.asks[seat].rank.class };
        (Reverse(class), !self.is_over_soft(seat), request.computed())
    }
}

/// Whether `keys` names `key`.
pub(crate) fn contains(keys: &hashbrown::HashTable<Key>, key: &Key) -> bool {
    keys.find(key.short(), |other| other == key).is_some()
}

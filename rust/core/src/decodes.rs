//! The fast way of requests that only decode: a row and its token from one cache line each, a commit from two.
//!
//! Before: a plan or a commit comes to such requests. After: all that this way is enough for is done, and the first request that needs a
//! look at everything is named. A decode that begins a block takes it here as well; where there is plenty, all that do take theirs at once.

use crate::flight::Entry;
use crate::ids::TokenId;
use crate::mutant::{self, Mutant};
use crate::reason::Reason;
use crate::refusal::Granted;
use crate::request::{End, Request};
use crate::row_arrays::RowArrays;
use crate::scheduler::Scheduler;

/// Requests of which is read ahead at a time: so many reads wait for memory together, and what they brought is still in the nearest cache
/// when it is used.
pub(crate) const READ_AHEAD: usize = 32;

impl Scheduler {
    /// Adds the running requests from position `at` on, as long as each decodes in a block of its own, or takes a free one, and there
    /// is budget: one token for each, from one cache line of each. The position of the first that needs a closer look.
    pub(crate) fn schedule_decodes(&mut self, at: usize, arrays: &mut RowArrays<'_>) -> usize {
        let (step, has_keys, size) = (self.steps + 1, self.config.enable_prefix_caching, self.block_size);
        let most = (self.running.len() - at).min(arrays.budget);
        // Out of the way of who takes a block, which touches none of them.
        let running = std::mem::take(&mut self.running);
        let mut entries = std::mem::take(&mut self.flight.of_mut(step).entries);
        let mut rows = arrays.more(most, most, most);
        let seats = &running[at..][..most];
        let mut wasted = 0;
        let mut count = 0;
        loop {
            let lines = &mut self.seats[..];
            while count < most {
                let seat = seats[count];
                let request = lines[seat].line_mut();
                let Some(next) = request.next_row(size) else { break };
                request.fly(step, entries.len(), 1, Some(rows.first_sample + count));
                rows.seq_slots[count] = next.row.index() as i32;
                rows.token_ids[count] = next.token as i32;
                rows.token_sources[count] = next.source;
                rows.positions[count] = next.position as i32;
                rows.slots[count] = next.slot;
                rows.sample_requests[count] = next.id.0 as i64;
                entries.push(Entry::decode(seat, next.epoch, next.position));
                wasted += next.room;
                count += 1;
                if next.room > 0 {
                    continue;
                }
                self.crossing.push(seat);
                if !has_keys {
                    continue;
                }
                if next.source < 0 || mutant::is_on(Mutant::KeyBeforeToken) {
                    self.filled.push(seat);
                } else {
                    // The commit that brings the token names the block that it completes.
                    request.watch();
                }
            }
            let begins = |&seat: &usize| self.seats[seat].line().has_filled_block();
            if !seats.get(count).is_some_and(begins) || !self.begin_block(seats[count]) {
                break;
            }
        }
        rows.follow_positions(count);
        arrays.give_back(most - count);
        self.running = running;
        self.flight.of_mut(step).entries = entries;
        self.counters.wasted_rows_sum += wasted as u64;
        arrays.budget -= count;
        at + count
    }

    /// Gives the decodes that filled their blocks in the last plan the next ones, all at once, if there is plenty: whatever this plan takes
    /// beside them is free too, so that it does not matter who comes first. Where there is not, each takes its own when its turn comes.
    pub(crate) fn begin_blocks(&mut self) {
        let mut takers = std::mem::take(&mut self.takers);
        let most = takers.len() as u32;
        let may_begin =
            |&seat: &usize| self.seats[seat].line().has_filled_block() && self.room_of_tenant(&self.asks[seat]) >= most;
        takers.retain(may_begin);
        if self.has_plenty(takers.len()) {
            for seats in takers.chunks(READ_AHEAD) {
                self.read_to_begin(seats);
                self.begin_blocks_of(seats);
            }
        } else {
            self.read_to_begin(&takers[..takers.len().min(READ_AHEAD)]);
        }
        takers.clear();
        self.takers = takers;
    }

    /// Whether all that this plan may take is free beside `count` blocks and all promises: rows of the budget, and for each request the rest
    /// of a block and a copy.
    fn has_plenty(&self, count: usize) -> bool {
        let rows = self.config.max_num_batched_tokens as usize;
        let most = self.groups.len() * (self.block_size.blocks_for(rows) + 2 * self.running.len());
        let promised = if mutant::is_on(Mutant::PlentyForgetsPromises) { 0 } else { self.promised };
        let free = self.pool.num_free().saturating_sub(promised) as usize;
        count > 1 && free >= count + most && self.pool.shares().is_none() && !mutant::is_on(Mutant::DecodeTakesPromised)
    }

    /// Gives the running request at `seat`, a decode that has filled its last block, the next one, as [`Scheduler::grow`] does where a
    /// block is free for it: then nothing can be refused, and nobody loses anything. False if there is none, and nothing changed.
    fn begin_block(&mut self, seat: usize) -> bool {
        let own = self.request(seat).promised.min(1);
        let is_free = self.pool.num_free() > self.promised || mutant::is_on(Mutant::DecodeTakesPromised);
        let has_room = 1 - own <= self.room_of_tenant(&self.asks[seat]) || mutant::is_on(Mutant::QuotaExceeded);
        if !is_free || !has_room {
            return false;
        }
        self.begin_blocks_of(&[seat]);
        true
    }

    /// Gives each of these decodes, which have filled their blocks, the next one. So many are free for them.
    fn begin_blocks_of(&mut self, seats: &[usize]) {
        let granted = Granted::begin();
        granted.take(seats.len() as u32 - u32::from(mutant::is_on(Mutant::AskForgetsBlock)));
        let mut begun = std::mem::take(&mut self.begun);
        let evicted = self.pool.take_run(&mut begun, seats.len() as u32).expect("so many are free");
        for (at, (&seat, block)) in seats.iter().zip(begun.blocks.drain(..)).enumerate() {
            let request = self.seats[seat].as_mut().expect("a seat in use");
            let (number, own) = (request.table.len(), request.promised.min(1));
            request.table.blocks.push(block);
            request.promised -= own;
            self.promised -= own;
            request.foresee(request.next(), self.block_size);
            if evicted >> at & 1 == 1 {
                self.note(seat, Reason::Evicted { blocks: 1 });
            }
            if at == 0 || !mutant::is_on(Mutant::RunTellsFirst) {
                self.note_change(seat, number);
            }
            self.hold_more(seat, 1, own);
        }
        self.begun = begun;
    }

    /// These decodes are about to begin a block: reads what they need.
    fn read_to_begin(&self, seats: &[usize]) {
        // Who takes content away from the pool is told so.
        let is_told = self.pool.evictions() > 0;
        let end = |&seat: &usize| {
            let last = if is_told { self.timelines.ring(seat).last() } else { None };
            let table = self.seats[seat].as_ref().map_or(0, Request::glance_at_table);
            table ^ self.asks[seat].tenant ^ last.map_or(0, |record| record.times)
        };
        self.pool.read_to_take(seats.iter().map(end));
    }

    /// Commits the entries of step `step` from `at` on, as long as each is a row of a decode, from the requests' own lines unless it
    /// completes a block. `tokens` begins with the token of the first; where it ends, so does this. How many; and, if the last of them
    /// ended its request, its seat and how it ended.
    pub(crate) fn commit_decodes(&mut self, step: u64, at: usize, tokens: &[i64]) -> (usize, Option<(usize, End)>) {
        if mutant::is_on(Mutant::WastedTokenShown) || mutant::is_on(Mutant::CountOneTooMany) {
            return (0, None);
        }
        let mut count = 0;
        let flight = self.flight.of(step);
        for (entry, &token) in flight.entries[at..].iter().zip(tokens) {
            let request = self.seats[entry.seat()].line_mut();
            if !entry.is_plain_decode() || request.is_watched() || request.epoch != entry.epoch {
                break;
            }
            if let Some(filled) = entry.filled() {
                if self.seen.is_some() {
                    break;
                }
                self.pool.publish(flight.pending[filled]).expect("a block of this pool");
                request.published = self.block_size.full_blocks(entry.start() + 1);
            }
            request.land_decode();
            count += 1;
            if let Some(end) = request.push_unwatched(token as TokenId) {
                return (count, Some((entry.seat(), end)));
            }
        }
        (count, None)
    }
}

//! Recounts every invariant from the tables, the leases and a walk of the free queue (A1 to A8 of the catalogue of faults).
//!
//! Called by the tests after every public call, and by an engine when it is idle. Reads everything, changes nothing.

use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::flight::{Entry, Flight};
use crate::ids::BlockId;
use crate::prefix_index::KeyState;
use crate::request::{Place, Request};
use crate::scheduler::Scheduler;
use crate::seat::Seat;
use crate::tenants::Backlog;

fn wrong<T>(check: &'static str, detail: String) -> Result<T> {
    Err(Error::Audit { check, detail })
}

impl Scheduler {
    /// Recounts A1 to A8.
    ///
    /// # Errors
    /// [`Error::Audit`] with the first invariant that does not hold.
    pub fn audit(&self) -> Result<()> {
        self.audit_places()?;
        self.pool.audit(self.requests().flat_map(Request::tables).chain(self.pins.tables()))?;
        self.audit_pins()?;
        self.audit_leases()?;
        self.audit_promises()?;
        self.audit_quotas()?;
        self.audit_writers()?;
        self.requests().try_for_each(|request| self.audit_rows(request))?;
        if self.idle_with_work && self.flight.oldest().is_none() && self.running.len() + self.waiting.len() > 0 {
            return wrong(
                "A8",
                "the last plan ran nothing, freed nothing and ended nothing although requests live".into(),
            );
        }
        Ok(())
    }

    /// Everybody who lives.
    fn requests(&self) -> impl Iterator<Item = &Request> {
        self.seats.iter().filter_map(Seat::as_ref)
    }

    /// A6: every live request is in exactly one line, at its rank; rows are had by one or free; who waits holds nothing.
    fn audit_places(&self) -> Result<()> {
        let mut seen = vec![0; self.seats.len()];
        let waiting: Vec<usize> = self.waiting.seats().map(|(_, seat)| seat).collect();
        for &seat in self.running.iter().chain(&waiting) {
            if self.seats[seat].as_ref().is_none() {
                return wrong("A6", format!("seat {seat} stands in a line and its request has ended"));
            }
            seen[seat] += 1;
        }
        for (seat, place) in self.seats.iter().enumerate() {
            if seen[seat] != usize::from(place.as_ref().is_some()) {
                return wrong("A6", format!("seat {seat} stands in {} lines", seen[seat]));
            }
        }
        if !self.running.is_sorted_by_key(|&seat| self.asks[seat].rank) {
            let ids: Vec<_> = self.running.iter().map(|&seat| self.request(seat).id()).collect();
            return wrong("A6", format!("those that run are out of rank: {ids:?}"));
        }
        let is_placed = |(key, seat): (_, usize)| {
            self.asks[seat].rank.arrival == self.request(seat).id().0
                && key == self.waiting.policy.key(&self.asks[seat])
        };
        if !self.waiting.is_sound() || !self.waiting.seats().all(is_placed) {
            return wrong("A6", "the line of those that wait is out of order".into());
        }
        let mut rows = vec![0; self.config.rows() as usize];
        for row in &self.free_rows {
            rows[row.index()] += 1;
        }
        for &seat in &self.running {
            let Place::Running(row) = self.request(seat).place else {
                return wrong("A6", format!("request {} runs without a row", self.request(seat).id().0));
            };
            rows[row.index()] += 1;
            self.request(seat).spare_rows.iter().for_each(|row| rows[row.index()] += 1);
        }
        if let Some(row) = rows.iter().position(|&count| count != 1) {
            return wrong("A6", format!("row {row} is had or free {} times", rows[row]));
        }
        for &seat in &waiting {
            let request = self.request(seat);
            if request.place != Place::Waiting
                || !request.tables().all(BlockTable::is_empty)
                || request.promised > 0
                || request.computed() > 0
            {
                return wrong("A6", format!("request {} waits and holds something", request.id().0));
            }
        }
        Ok(())
    }

    /// A2: a block that the step in flight names is in nobody's reach; with no step in flight nothing is parked.
    fn audit_leases(&self) -> Result<()> {
        if self.flight.oldest().is_none() {
            let parked = self.pool.num_parked();
            return if parked == 0 {
                Ok(())
            } else {
                wrong("A2", format!("{parked} blocks are parked, no step is in flight"))
            };
        }
        if let Some(block) = self.pool.free_blocks().find(|&block| self.flight.is_orphan(block)) {
            return wrong(
                "A2",
                format!("block {} is named by the step in flight and stands in the free queue", block.get()),
            );
        }
        let is_source = |block: &BlockId| self.draft.copies.iter().any(|copy| copy[1] == block.get() as i32);
        if let Some(block) = self.pool.free_blocks().find(is_source) {
            return wrong(
                "A2",
                format!("block {} is copied by the step in flight and stands in the free queue", block.get()),
            );
        }
        Ok(())
    }

    /// A2: what pins hold is published, counted once, and within the budget.
    fn audit_pins(&self) -> Result<()> {
        let blocks: std::collections::BTreeSet<_> = self.pins.tables().flat_map(|table| table.blocks()).collect();
        let (counted, budget) = (self.pins.blocks(), self.config.pin_budget);
        if blocks.len() != counted as usize || counted > budget {
            return wrong("A2", format!("{} blocks are pinned, {counted} are counted, {budget} may be", blocks.len()));
        }
        match blocks.iter().find(|block| self.pool.index().state(***block) != KeyState::Published) {
            Some(block) => wrong("A2", format!("block {} is pinned and not published", block.get())),
            None => Ok(()),
        }
    }

    /// A1: what was promised is free.
    fn audit_promises(&self) -> Result<()> {
        let room = self.made_room_for.map_or(0, |(_, blocks)| blocks);
        let sum: u32 = room + self.requests().map(|request| request.promised).sum::<u32>();
        if sum != self.promised || sum > self.pool.num_free() {
            let free = self.pool.num_free();
            return wrong(
                "A1",
                format!("requests were promised {sum}, {} are counted, {free} are free", self.promised),
            );
        }
        Ok(())
    }

    /// A2: what each tenant holds and has waiting is what its requests hold and wait for, and no more than it may hold.
    fn audit_quotas(&self) -> Result<()> {
        let mut held = vec![(0, Backlog::default()); self.tenants.all().len()];
        let mut expected = 0;
        for (seat, place) in self.seats.iter().enumerate() {
            let Some(request) = place.as_ref() else { continue };
            let ask = &self.asks[seat];
            let named: usize = request.tables().map(|table| table.len() - table.num_null()).sum();
            let blocks = named as u32 + request.promised;
            held[ask.tenant as usize].0 += blocks;
            held[ask.tenant as usize].1.add(ask.backlog);
            expected += u64::from(request.account.expected.saturating_sub(blocks));
        }
        let mut all = Backlog::default();
        for (tenant, (held, backlog)) in self.tenants.all().iter().zip(held) {
            all.add(backlog);
            if (tenant.held, tenant.backlog) != (held, backlog) || held > tenant.rules.hard_blocks {
                return wrong("A2", format!("{tenant:?} holds {held} blocks and has {backlog:?} waiting"));
            }
        }
        if all != self.backlog || expected != self.outlook.expected {
            return wrong(
                "A2",
                format!("{all:?} waits, {expected} blocks are expected; counted are {:?}", self.outlook),
            );
        }
        Ok(())
    }

    /// A5: each step in flight writes only to blocks that are not published, each for one request; others may only share them as full.
    fn audit_writers(&self) -> Result<()> {
        let mut flying = vec![(0, 0); self.seats.len()];
        for step in self.flight.in_flight() {
            self.audit_step(self.flight.of(step), &mut flying)?;
        }
        for (seat, place) in self.seats.iter().enumerate() {
            let Some(request) = place.as_ref() else { continue };
            if request.in_flight() != flying[seat] {
                let (id, told, found) = (request.id().0, request.in_flight(), flying[seat]);
                return wrong(
                    "A7",
                    format!("request {id}: {told:?} rows and tokens are in flight, steps have {found:?}"),
                );
            }
        }
        Ok(())
    }

    /// A5 of one step; adds the rows and tokens that it brings to `flying`, by seat.
    fn audit_step(&self, flight: &Flight, flying: &mut [(usize, usize)]) -> Result<()> {
        let published = |&block: &BlockId| self.pool.index().state(block) == KeyState::Published;
        if let Some(block) = flight.pending.iter().copied().find(published) {
            return wrong("A5", format!("block {} is published before its step is confirmed", block.get()));
        }
        let size = self.block_size;
        let mut writers = vec![0u32; self.pool.num_blocks() as usize];
        let live =
            |entry: &&Entry| self.seats[entry.seat()].as_ref().is_some_and(|request| request.epoch == entry.epoch);
        for entry in flight.entries.iter().filter(live) {
            let request = self.request(entry.seat());
            let (rows, tokens) = &mut flying[entry.seat()];
            (*rows, *tokens) = (*rows + entry.chunk(), *tokens + usize::from(entry.samples()));
            let last = size.full_blocks(entry.start() + entry.chunk() - 1);
            if last >= request.table.len() {
                return wrong("A5", format!("request {} writes past its table", request.id().0));
            }
            let written = request.tables().flat_map(|table| &table.blocks()[size.full_blocks(entry.start())..=last]);
            for &block in written {
                writers[block.index()] += 1;
                let state = self.pool.index().state(block);
                let forked = flight.rare(entry).forked;
                let shared = self.pool.holders(block) > 1 && state != KeyState::Pending && !forked;
                if state == KeyState::Published || shared || writers[block.index()] > 1 {
                    let id = request.id().0;
                    return wrong(
                        "A5",
                        format!("request {id} writes to block {}, which is shared or published", block.get()),
                    );
                }
            }
        }
        Ok(())
    }

    /// A7: `published <= computed < tokens`, in rows; a table has blocks for what is computed; published blocks have their keys.
    fn audit_rows(&self, request: &Request) -> Result<()> {
        let size = self.block_size;
        let id = request.id().0;
        let (published, computed, tokens) =
            (request.published * size.tokens(), request.computed(), request.num_tokens());
        if published > computed || computed >= tokens || computed > request.table.len() * size.tokens() {
            let held = request.table.len();
            return wrong(
                "A7",
                format!(
                    "request {id}: {published} rows published, {computed} computed, {tokens} tokens, {held} blocks"
                ),
            );
        }
        if request.keys.len() > size.full_blocks(tokens) {
            return wrong("A7", format!("request {id} has {} keys for {tokens} tokens", request.keys.len()));
        }
        for (group, table) in request.tables().enumerate() {
            self.audit_table(request, group, table)?;
        }
        Ok(())
    }

    /// A7, of one table: as long as the others, null up to some entry that the next query does not see; what counts as published has
    /// its key.
    fn audit_table(&self, request: &Request, group: usize, table: &BlockTable) -> Result<()> {
        let id = request.id().0;
        if table.len() != request.table.len() {
            return wrong(
                "A7",
                format!("request {id}: group {group} has {} blocks of {}", table.len(), request.table.len()),
            );
        }
        let num_null = table.num_null();
        let first = self.groups.specs()[group].first_block(request.computed(), self.block_size);
        if num_null > first || table.blocks()[num_null..].contains(&BlockId::NULL) {
            return wrong(
                "A7",
                format!(
                    "request {id}: group {group} keeps blocks from {num_null} on, its next query sees from {first} on"
                ),
            );
        }
        for (at, &block) in table.blocks().iter().enumerate().take(request.published).skip(num_null) {
            if self.config.enable_prefix_caching && self.pool.index().state(block) == KeyState::Unnamed {
                return wrong(
                    "A7",
                    format!(
                        "request {id}: block {} at {at} of group {group} counts as published and has no key",
                        block.get()
                    ),
                );
            }
        }
        Ok(())
    }
}

//! A second sequence over the rows of a running one, and the way back to fewer tokens.
//!
//! Before: the caller, between plans or while a step is in flight. After: the child runs on a row of its own, which the next plan tells.
//! Both go on from the confirmed length: rows that the step in flight writes, copies or shares unconfirmed belong to the parent alone.
//! Who then writes first into the last, partial block gets a copy: see `copy_on_write.rs`.

use crate::block_pool::Release;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::ids::{BlockId, RequestId, Row};
use crate::mutant::{self, Mutant};
use crate::rank::{Ask, Rank};
use crate::reason::{Reason, saturated};
use crate::request::{Limits, Place};
use crate::scheduler::Scheduler;

/// A sequence that parts from another one.
#[derive(Debug)]
pub(crate) struct Branch {
    pub id: RequestId,
    pub row: Row,
    /// Blocks that it is promised.
    pub promise: u32,
    pub limits: Limits,
    pub submitted_us: u64,
}

impl Scheduler {
    /// A new request with the tokens of the running request `parent`, over the same blocks. It counts the parent's outputs so far as its
    /// own, ranks last in its parent's class, and may be skipped or preempted like any other. The next plan names it among `admitted`.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], [`Error::NotRunning`], [`Error::NoFreeRow`], [`Error::NeverFits`], and [`Error::InvalidInput`] for
    /// limits. Nothing changes then.
    pub fn fork(&mut self, parent: RequestId, limits: Limits, now_us: u64) -> Result<RequestId> {
        let forked = self.try_fork(parent, limits, now_us);
        if let Err(error) = &forked {
            self.timelines.count(Reason::of_refusal(error));
        }
        forked
    }

    fn try_fork(&mut self, parent: RequestId, limits: Limits, now_us: u64) -> Result<RequestId> {
        let seat = self.seat_of(parent).ok_or(Error::UnknownRequest { request: parent })?;
        if self.request(seat).place == Place::Waiting {
            return Err(Error::NotRunning { request: parent });
        }
        self.check_limits(&limits)?;
        let request = self.request(seat);
        if limits.max_tokens as usize <= request.num_outputs() {
            let bound = format!("must be above {}, the outputs that it starts with", request.num_outputs());
            return Err(Error::InvalidInput { field: "max_tokens", value: i128::from(limits.max_tokens), bound });
        }
        self.check_fits(request.prompt_len, &limits, 0)?;
        self.may_have_row()?;
        let promise = self.promise_of_fork(seat, &limits)?;
        let tables = self.fork_tables(seat, self.confirmed(seat))?;

        let row = self.free_rows.pop().expect("it was asked for");
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.split(seat, tables, Branch { id, row, promise, limits, submitted_us: now_us });
        self.timelines.tell_time(now_us);
        Ok(id)
    }

    /// Makes `branch`, a second sequence of the request at `seat`, over its confirmed rows, which `tables` name; its seat.
    pub(crate) fn split(&mut self, seat: usize, mut tables: Vec<BlockTable>, branch: Branch) -> usize {
        let Branch { id, row, promise, limits, submitted_us } = branch;
        let (rows, size) = (self.confirmed(seat), self.block_size);
        let max_model_len = self.config.max_model_len as usize;
        let mut own = promise;
        if let Some(last) = self.last_writer(seat, rows, id) {
            let copies = own.min(self.groups.tail_blocks(rows) as u32);
            own -= copies;
            self.promised += copies;
            self.request_mut(last).promised += copies;
            self.recount(last);
        }
        let parent = self.seats[seat].as_mut().expect("a seat in use");
        parent.settle();
        let mut child = parent.child(id, limits, submitted_us, max_model_len);
        child.family = parent.family;
        parent.asks_to_write = true;
        parent.look_closer();
        child.asks_to_write = true;
        child.place = Place::Running(row);
        child.set_computed(rows);
        child.published = parent.published.min(size.full_blocks(rows));
        if parent.looks_again() {
            child.look_again();
        }
        child.table = tables.remove(0);
        child.others = tables.into();
        let tokens = saturated(child.num_tokens() as u64);
        let expected = self.expected_blocks(seat);
        let mut ask = Ask { submitted_us, passed: 0, charged: rows as u32, ..self.asks[seat] };
        ask.rank.arrival = id.0;
        self.tenants.enter_again(ask.tenant);
        let seat_of_child = self.sit(child, ask);
        let parent_id = self.request(seat).id().0;
        self.join_family(seat_of_child);
        self.note(seat_of_child, Reason::ForkedFrom { request: parent_id, tokens });
        self.make_room(seat_of_child);
        let at = self.rank_in_running(seat_of_child);
        self.running.insert(at, seat_of_child);
        self.request_mut(seat_of_child).promised = own;
        self.promised += own;
        self.open_account(seat_of_child, expected);
        self.untold.push((seat_of_child, id));
        self.counters.forks += 1;
        for step in self.flight.in_flight().collect::<Vec<_>>() {
            if let Some(at) = self.live_entry(step, seat) {
                self.flight.of_mut(step).rare_mut(at).forked = true;
            }
        }
        seat_of_child
    }

    /// Second tables over the first `rows` rows of the request at `seat`, as far as the query behind these sees them. If one is refused, so
    /// are the others: their holders go again, and as the parent holds what they held, that changes nothing.
    pub(crate) fn fork_tables(&mut self, seat: usize, rows: usize) -> Result<Vec<BlockTable>> {
        let (len, mut tables) = (self.block_size.blocks_for(rows), Vec::with_capacity(self.groups.len()));
        for (group, table) in self.seats[seat].as_ref().expect("a seat in use").tables().enumerate() {
            match self.pool.fork_head(table, len) {
                Ok(mut forked) => {
                    let mut unseen = Vec::new();
                    if !mutant::is_on(Mutant::ForkSharesUnseen) {
                        forked.forget_before(self.groups.first_kept(group, rows), |block| unseen.push(block));
                    }
                    self.pool.release_blocks(&unseen, Release::Now).expect("the table just forked held them");
                    tables.push(forked);
                }
                Err(error) => {
                    tables.into_iter().for_each(|forked| self.pool.release(forked, Release::Now));
                    return Err(error);
                }
            }
        }
        Ok(tables)
    }

    /// Takes a request back to its first `num_tokens` tokens, wherever it is. What the step in flight brings for it does not count, and
    /// who shares what it was writing goes back. Its last token is computed anew; outputs that are left count as before, and a
    /// prompt may become shorter.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::InvalidInput`] for no token, or more than there are. Nothing changes then.
    pub fn truncate(&mut self, id: RequestId, num_tokens: usize) -> Result<()> {
        let seat = self.seat_of(id).ok_or(Error::UnknownRequest { request: id })?;
        let known = self.request(seat).num_tokens();
        if !(1..=known).contains(&num_tokens) {
            let bound = format!("must be 1..={known}, the tokens of the request");
            return Err(Error::InvalidInput { field: "num_tokens", value: num_tokens as i128, bound });
        }
        if num_tokens == known {
            return Ok(());
        }
        let mut rows = self.confirmed(seat).min(num_tokens - 1);
        if !self.is_in_sight(seat, rows) {
            rows = 0;
        }
        for table in self.request(seat).tables() {
            let cut = table.blocks().iter().skip(self.block_size.blocks_for(rows));
            cut.filter(|&&block| block != BlockId::NULL).try_for_each(|&block| self.pool.may_release(block))?;
        }
        if self.flight.runs(self.request(seat).planned_in) {
            self.withdraw_writer(seat);
        }
        let (size, max_model_len) = (self.block_size, self.config.max_model_len as usize);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        request.keep_tokens(num_tokens, size.full_blocks(num_tokens), max_model_len);
        if mutant::is_on(Mutant::TruncateKeepsEpoch) {
            request.forget_rows_in_flight();
        } else {
            request.forget_flight();
        }
        self.go_back(seat, rows);
        self.note(seat, Reason::Truncated { tokens: saturated(num_tokens as u64) });
        if self.request(seat).place == Place::Waiting {
            self.follow_anew(seat);
        } else if self.config.queue.no_evict {
            self.give_back_surplus(seat);
        } else {
            self.keep_promise(seat, self.need_of(seat));
            self.recount(seat);
        }
        Ok(())
    }

    /// Blocks that a child of the request at `seat` is promised at its fork: none, but with `no_evict` all that it may need, those to
    /// copy its tail to among them.
    pub(crate) fn promise_of_fork(&self, seat: usize, limits: &Limits) -> Result<u32> {
        let request = self.request(seat);
        let (rows, len) = (self.confirmed(seat), self.block_size.blocks_for(self.confirmed(seat)));
        let room = self.room_of_tenant(&self.asks[seat]);
        let held = (len * self.groups.len()) as u32;
        let mut promise = 0;
        if self.config.queue.no_evict {
            promise = self.groups.need_behind(rows, self.most_rows(request.prompt_len, limits));
        }
        let promise = promise as u32;
        let free = self.pool.num_free().saturating_sub(self.promised).min(room.saturating_sub(held));
        if promise > free || held > room {
            return Err(Error::OutOfBlocks { needed: promise.max(held), free: free.min(room) });
        }
        Ok(promise)
    }

    /// With `no_evict`: of those that share the block of row `rows` of the request at `seat`, which is begun, the one that was not promised
    /// blocks to copy it to, if its child `id` will write after it. There is one at most: the last to write needs none.
    fn last_writer(&self, seat: usize, rows: usize, id: RequestId) -> Option<usize> {
        let copies = self.groups.tail_blocks(rows) as u32;
        if !self.config.queue.no_evict || copies == 0 || mutant::is_on(Mutant::CopyOfLastPromised) {
            return None;
        }
        let child = Rank { arrival: id.0, ..self.asks[seat].rank };
        let shared = self.request(seat).table.blocks()[self.block_size.full_blocks(rows)];
        let writes_there = |&other: &usize| self.tail(other).next() == Some(shared);
        let has_copies = |&other: &usize| self.request(other).promised >= self.need_of(other) + copies;
        let before = self.running.iter().copied().take_while(|&other| self.asks[other].rank < child);
        before.filter(writes_there).find(|other| !has_copies(other))
    }

    /// Rows of a request that no step in flight can take back.
    pub(crate) fn confirmed(&self, seat: usize) -> usize {
        let computed = self.request(seat).computed();
        for step in self.flight.in_flight() {
            let Some(at) = self.live_entry(step, seat) else { continue };
            let entry = self.flight.of(step).entries[at];
            let rare = self.flight.of(step).rare(&entry);
            let blocks = match (rare.shared.is_empty(), rare.copied) {
                _ if mutant::is_on(Mutant::ForkUnconfirmed) => return computed,
                (false, _) => rare.shared.start,
                (true, true) => self.block_size.full_blocks(entry.start().min(computed)),
                (true, false) => continue,
            };
            return self.length_in_sight(seat, blocks) * self.block_size.tokens();
        }
        computed
    }

    /// The first `rows` rows of a request are computed; it gives back the blocks behind them. Nothing that is in flight for it counts.
    pub(crate) fn go_back(&mut self, seat: usize, rows: usize) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        request.set_computed(rows);
        request.published = request.published.min(size.full_blocks(rows));
        request.asks_to_write = size.offset(rows) > 0;
        let rest = request.cut(size.blocks_for(rows).min(request.table.len()));
        let planned_in = request.planned_in;
        let when = self.when_free(planned_in, rest.blocks());
        self.pool.release(rest, when);
        self.owes = true;
        self.recount(seat);
    }

    /// Names the forked requests that still run to the caller, with their rows and tables.
    pub(crate) fn tell_forks(&mut self) {
        for (seat, id) in std::mem::take(&mut self.untold) {
            let Place::Running(row) = self.request(seat).place else { unreachable!("who stops is forgotten") };
            debug_assert_eq!(self.request(seat).id(), id);
            let (request, number) = self.name_of(seat);
            self.draft.admitted.push([request, number, row.index() as i64]);
            self.note_change(seat, 0);
        }
    }

    /// Whether no plan has told yet that the request at `seat` runs.
    pub(crate) fn is_untold(&self, seat: usize) -> bool {
        !self.untold.is_empty() && self.untold.iter().any(|&(untold, _)| untold == seat)
    }

    /// A forked request stops running; true if no plan has told that it ran.
    pub(crate) fn forget_untold(&mut self, id: RequestId) -> bool {
        let found = self.untold.iter().position(|&(_, untold)| untold == id);
        found.map(|at| self.untold.remove(at)).is_some()
    }
}

//! Several sequences in one request: they share the prompt, which is computed once, and part with their first outputs.
//!
//! Before: a submission that asks for more than one. After: it waits and is prefilled as one, with a row of the block tables kept for each;
//! the step that ends its prompt samples its last row once for each, and the commit forks the others off: full blocks are shared, the
//! tail is copied by whoever writes first. Sequence `i` of request `r` has the id `r + i`, which nobody else gets, so it ranks behind
//! those before it and above every later request. From there on each is planned, preempted, and ended by a stop or its length alone. Abort, a
//! deadline and want of memory end all of them; the request is over when the last one is.

use crate::commit::Committed;
use crate::error::{Error, Result};
use crate::fork::Branch;
use crate::ids::RequestId;
use crate::mutant::{self, Mutant};
use crate::request::{End, Limits};
use crate::scheduler::Scheduler;
use crate::speculation::Given;

impl Scheduler {
    /// Sequences of a request run at once when its prompt ends, so there must be a row for each.
    pub(crate) fn check_siblings(&self, siblings: u32) -> Result<()> {
        let rows = self.config.rows();
        if siblings < rows {
            return Ok(());
        }
        let bound =
            format!("must be 1..={rows}, the sequences that run at once (max_num_seqs, max_num_batched_tokens)");
        Err(Error::InvalidInput { field: "n", value: i128::from(siblings) + 1, bound })
    }

    /// With `no_evict`: what `siblings` sequences beside the first need when the prompt is computed.
    pub(crate) fn need_of_siblings(&self, prompt_len: usize, limits: &Limits, siblings: u32) -> u64 {
        if siblings == 0 || !self.config.queue.no_evict || mutant::is_on(Mutant::SiblingsUnpromised) {
            return 0;
        }
        u64::from(siblings) * self.groups.need_behind(prompt_len, self.most_rows(prompt_len, limits)) as u64
    }

    /// The request at `seat` is the first of several sequences.
    pub(crate) fn begin_family(&mut self, seat: usize, siblings: u32) {
        let request = self.request_mut(seat);
        let id = request.id();
        (request.siblings, request.family) = (siblings, Some(id));
        self.families.insert(id, vec![id]);
    }

    /// The sequence at `seat` was forked off one of a family, and belongs to it.
    pub(crate) fn join_family(&mut self, seat: usize) {
        let (id, family) = (self.request(seat).id(), self.request(seat).family);
        if mutant::is_on(Mutant::ForkOutlivesFamily) && family.is_some_and(|first| self.doomed.contains(&first)) {
            return;
        }
        if let Some(members) = family.and_then(|first| self.families.get_mut(&first)) {
            members.push(id);
        }
    }

    /// Sequence `id` has ended. Want of memory ends the others in the next plan: the one under way counts on its lines.
    pub(crate) fn leave_family(&mut self, first: RequestId, id: RequestId, end: End) {
        let Some(members) = self.families.get_mut(&first) else { return };
        members.retain(|&member| member != id);
        if members.is_empty() {
            self.families.remove(&first);
        } else if end == End::Capacity {
            self.doomed.push(first);
        }
    }

    /// Ends every sequence of a request.
    pub(crate) fn end_family(&mut self, first: RequestId, end: End) -> bool {
        let members = self.families.get(&first).cloned().unwrap_or_default();
        let mut did_end = false;
        for id in members {
            did_end |= self.leave_by_id(id, end);
        }
        did_end
    }

    /// Ends the requests of whose sequences one found no memory, with all that was forked from them since.
    pub(crate) fn end_doomed(&mut self) {
        for first in std::mem::take(&mut self.doomed) {
            self.end_family(first, End::Capacity);
        }
        // Each of those that ended now has named its request again.
        self.doomed.clear();
    }

    /// Whether there is a row for each sequence of the waiting request at `seat`.
    pub(crate) fn has_rows_for(&self, seat: usize) -> bool {
        let siblings = self.request(seat).siblings as usize;
        let siblings = if mutant::is_on(Mutant::RowForOneOnly) { 0 } else { siblings };
        self.free_rows.len() > siblings
    }

    /// The request and the number under which plans tell of the sequence at `seat`; their sum is its id.
    pub(crate) fn name_of(&self, seat: usize) -> (i64, i64) {
        let request = self.request(seat);
        let first = request.family.unwrap_or(request.id());
        (first.0 as i64, (request.id().0 - first.0) as i64)
    }

    /// Brings the first tokens of all sequences of a request: all of them, or it is sampled again.
    pub(crate) fn commit_family(
        &mut self,
        step: u64,
        at: usize,
        given: &Given<'_>,
        now_us: u64,
        committed: &mut Committed,
    ) {
        let entry = self.flight.of(step).entries[at];
        let seat = entry.seat();
        let is_stale = self.is_stale(&entry);
        let is_whole = (0..given.len()).all(|sample| given.token(sample).is_some());
        if is_stale || !is_whole {
            let dropped = (0..given.len()).filter(|&sample| given.token(sample).is_some());
            committed.dropped.extend(dropped.map(|sample| (given.first + sample) as i32));
            if !is_stale {
                self.confirm(step, at, entry.chunk() - 1);
            }
            return;
        }
        self.confirm(step, at, entry.chunk());
        committed.accepted += given.len();
        let first = self.request(seat).id();
        let rows = std::mem::take(&mut self.request_mut(seat).spare_rows);
        self.hand_on_promise(seat);
        self.request_mut(seat).siblings = 0;
        for (number, row) in (1..).zip(rows) {
            let token = given.token(number).expect("all are given");
            let id = RequestId(first.0 + number as u64);
            let (limits, submitted_us) = (self.request(seat).limits.clone(), self.request(seat).submitted_us);
            let promise = self.promise_of_fork(seat, &limits);
            let has_room = promise.is_ok();
            let tables =
                self.fork_tables(seat, self.confirmed(seat)).expect("a block has room for the holders of all rows");
            let branch = Branch { id, row, promise: promise.unwrap_or(0), limits, submitted_us };
            let sibling = self.split(seat, tables, branch);
            let end = self.append(sibling, token, now_us);
            match end {
                Some(end) => self.commit_end(sibling, end, committed),
                None if !has_room => self.wait_at_once(sibling),
                None => {}
            }
        }
        let token = given.token(0).expect("all are given");
        self.accept(seat, token, now_us, committed);
    }

    /// What the first sequence was promised for the others is free for them, who are promised theirs in the same call.
    fn hand_on_promise(&mut self, seat: usize) {
        let request = self.request(seat);
        let theirs = self.need_of_siblings(request.prompt_len, &request.limits, request.siblings) as u32;
        self.keep_promise(seat, request.promised.saturating_sub(theirs));
        self.recount(seat);
    }

    /// The sequence at `seat`, which no plan has told of, waits for the blocks that its tenant may not hold now.
    fn wait_at_once(&mut self, seat: usize) {
        self.stop_running(seat);
        let request = self.request_mut(seat);
        request.forget_rows();
        let id = request.id();
        if self.config.enable_prefix_caching {
            // As after a preemption: the newest output may have filled a block.
            let request = self.seats[seat].as_mut().expect("a seat in use");
            request.extend_keys(&mut self.hasher, request.num_tokens());
        }
        self.forget_untold(id);
        self.start_waiting(seat);
    }
}

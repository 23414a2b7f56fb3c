//! What must be true of every plan, checked against what the caller knows.

use std::collections::{BTreeMap, BTreeSet};

use blocktable_core::ids::{BlockId, Key, RequestId};
use blocktable_core::prefix_index::KeyState;
use blocktable_core::request::End;

use super::{Client, Driver, Plan};
use crate::broken::{Checked, broken, ensure};

/// What the caller sees before a plan.
pub struct Before {
    /// Requests that run.
    pub(super) running: BTreeSet<u64>,
    /// For each that waits, the published blocks that serve its chain: group by group, as many as a hit may cover.
    published: BTreeMap<u64, Vec<Vec<Option<BlockId>>>>,
    /// Whether somebody's time is over.
    is_overdue: bool,
}

impl Before {
    pub fn look(driver: &mut Driver, is_overdue: bool) -> Self {
        let running = driver.live().filter(|client| client.is_running()).map(|client| client.id).collect();
        let waiting: Vec<u64> = driver.live().filter(|client| client.is_waiting()).map(|client| client.id).collect();
        let published = waiting.into_iter().map(|id| (id, driver.published_chain(id))).collect();
        Before { running, published, is_overdue }
    }
}

impl Driver {
    pub(super) fn check_plan(&mut self, plan: &Plan, before: &Before) -> Checked {
        self.check_shape(plan)?;
        self.check_tables(plan)?;
        self.check_preemptions(plan, before)?;
        self.check_last_victim(plan)?;
        self.check_admissions(plan, before)?;
        self.check_order_of_admission(plan)?;
        self.check_waits(plan)?;
        self.check_chunks(plan, before)?;
        self.check_progress(plan, before.is_overdue)
    }

    /// Published blocks that hold the tokens of a request, as many as a hit may cover, in each group.
    fn published_chain(&mut self, id: u64) -> Vec<Vec<Option<BlockId>>> {
        let most = (self.clients[&id].tokens.len() - 1) / self.block_size();
        let keys = if self.config().enable_prefix_caching { self.keys_of(id, most) } else { Vec::new() };
        let published = |key: &Key| {
            let found = self.scheduler.pool().index().lookup(key);
            found.and_then(|(block, state)| (state == KeyState::Published).then_some(block))
        };
        let chain = |group: usize| keys.iter().map(|key| published(&key.in_group(group))).collect();
        (0..self.config().groups.len()).map(chain).collect()
    }

    fn client_in_row(&self, row: i32) -> Checked<&Client> {
        let found = self.live().find(|client| client.row == Some(row));
        found.map_or_else(|| broken("shape", format!("row {row} is planned and belongs to nobody")), Ok)
    }

    /// Lengths, ranges, and that tokens and positions are those of the requests.
    fn check_shape(&self, plan: &Plan) -> Checked {
        let config = self.config();
        let (rows, budget) = (config.rows() as usize, config.max_num_batched_tokens as usize);
        let fits = plan.seq_slots.len() <= rows && plan.token_ids.len() <= budget;
        ensure(fits, "shape", || format!("{} sequences, {} tokens", plan.seq_slots.len(), plan.token_ids.len()))?;
        let distinct: BTreeSet<i32> = plan.seq_slots.iter().copied().collect();
        ensure(distinct.len() == plan.seq_slots.len(), "shape", || format!("rows {:?}", plan.seq_slots))?;
        let is_chain = plan.query_starts[0] == 0 && plan.query_starts.is_sorted();
        ensure(is_chain, "shape", || format!("query_starts {:?}", plan.query_starts))?;
        ensure(plan.token_sources.iter().all(|&source| source == -1), "shape", || {
            "a token without a value".to_owned()
        })?;
        let mut samples = Vec::new();
        for (seq, chunk) in plan.chunks().into_iter().enumerate() {
            let client = self.client_in_row(plan.seq_slots[seq])?;
            let (first, end) = (plan.query_starts[seq] as usize, plan.seq_lens[seq] as usize);
            let known = end.min(client.tokens.len());
            let has_drafts = end > known && end - chunk + 1 == known;
            ensure(chunk > 0 && (end == known || has_drafts) && chunk <= end, "shape", || {
                format!("request {}: {chunk} tokens to {end} of {}", client.id, client.tokens.len())
            })?;
            let positions = plan.positions[first..first + chunk].iter().copied();
            ensure(positions.eq(end as i32 - chunk as i32..end as i32), "shape", || {
                format!("request {}: positions of {chunk} tokens to {end}", client.id)
            })?;
            for (i, position) in (end - chunk..known).enumerate() {
                let planned = (plan.token_ids[first + i], plan.positions[first + i]);
                let known = (client.tokens[position] as i32, position as i32);
                ensure(planned == known, "tokens", || {
                    format!("request {}: {planned:?}, must be {known:?}", client.id)
                })?;
            }
            if end >= client.tokens.len() {
                let rows = plan.query_starts[seq + 1] - 1 - (end - known) as i32..plan.query_starts[seq + 1];
                let last = rows.end - 1;
                samples.extend(rows.map(|row| (row, client.id as i64)));
                samples.extend((1..=i64::from(client.siblings)).map(|number| (last, client.id as i64 + number)));
            }
        }
        let planned: Vec<(i32, i64)> =
            plan.sample_rows.iter().copied().zip(plan.sample_requests.iter().copied()).collect();
        ensure(planned == samples, "samples", || format!("{planned:?}, must be {samples:?}"))
    }

    /// Slots go through the tables, each is written once, and a device that is told of changes only knows the same tables.
    fn check_tables(&self, plan: &Plan) -> Checked {
        let size = self.block_size();
        let tables = &self.memories[(plan.step as usize + 1) % 2].1;
        let is_block = |id: i32| 0 < id && (id as u32) < self.config().num_blocks;
        let mut written = BTreeSet::new();
        for (seq, chunk) in plan.chunks().into_iter().enumerate() {
            let first = plan.query_starts[seq] as usize;
            let seen = self.first_entries(plan.positions[first] as usize);
            for ((group, line), seen) in self.lines(plan.seq_slots[seq]).into_iter().enumerate().zip(seen) {
                let valid = line..line + (plan.seq_lens[seq] as usize).div_ceil(size);
                let (shown, told) = (&tables[valid.clone()], &self.device_tables[valid]);
                ensure(shown == told, "tables", || format!("the plan shows {shown:?}, a device was told {told:?}"))?;
                ensure(shown[seen..].iter().all(|&id| is_block(id)), "tables", || {
                    format!("{shown:?} names no block that group {group} sees from {seen} on")
                })?;
                for i in first..first + chunk {
                    let position = plan.positions[i] as usize;
                    let slot = i64::from(shown[position / size]) * size as i64 + (position % size) as i64;
                    let planned = plan.group_slots[group][i];
                    ensure(planned == slot, "slots", || {
                        format!("position {position} of group {group} goes to {planned}, must be {slot}")
                    })?;
                    ensure(written.insert(slot), "slots", || format!("slot {slot} is written twice"))?;
                }
            }
        }
        Ok(())
    }

    /// A victim ranks below a running request that grew, that no longer shares its last block with the victim, or that ended because it does not fit alone.
    fn check_preemptions(&mut self, plan: &Plan, before: &Before) -> Checked {
        for &victim in &plan.preempted {
            let is_taker = |&id: &u64| {
                let rows = self.config().rows() as i32;
                // Blocks for drafts alone are not worth a victim.
                let is_needed = |row: i32, column: i32| {
                    let seq = plan.seq_slots.iter().position(|&slot| slot == row);
                    let next = |seq: usize| plan.positions[plan.query_starts[seq] as usize] / self.block_size() as i32;
                    seq.is_none_or(|seq| self.num_drafts(plan, seq) == 0 || column <= next(seq))
                };
                let grew = |row| plan.dirty.iter().any(|change| change.0 % rows == row && is_needed(row, change.1));
                self.clients[&id].rank < self.clients[&victim].rank
                    && !plan.preempted.contains(&id)
                    && (self.clients[&id].may_copy || self.clients[&id].row.is_none_or(grew))
            };
            let is_displaced = || {
                let is_higher = |client: &Client| {
                    client.is_live()
                        && client.rank.class < self.clients[&victim].rank.class
                        && client.asked.turn.priority < self.clients[&victim].asked.turn.priority
                };
                self.config().queue.preempt_for_waiting && self.clients.values().any(is_higher)
            };
            let most = self.config().max_preemptions;
            let (preemptions, costs) = (self.clients[&victim].preemptions, self.clients[&victim].costs);
            let gives_way = plan.is_empty() && preemptions > most;
            ensure(before.running.iter().any(is_taker) || is_displaced() || gives_way, "rank", || {
                format!("request {victim} is preempted, and nobody above it grew")
            })?;
            self.seen.most_preempted += usize::from(preemptions == most);
            let bound = most + costs + self.seen.pinned as u32;
            ensure(preemptions <= bound, "preemptions", || {
                format!("request {victim} is preempted {preemptions} times, at most {bound}")
            })?;
        }
        ensure(plan.preempted.is_empty() || !self.config().queue.no_evict, "no_evict", || {
            format!("{:?} are preempted", plan.preempted)
        })?;
        let is_room_made = self.is_room_made(&plan.preempted, &plan.admitted);
        self.seen.rooms += usize::from(is_room_made);
        ensure(plan.preempted.is_empty() || plan.admitted.is_empty() || is_room_made, "admission", || {
            format!("{:?} are preempted, {:?} admitted", plan.preempted, plan.admitted)
        })
    }

    /// What the last victim left is needed: less than it had is over when everybody has what it takes. (Where more than growth can be
    /// the reason, or more comes back than its blocks, nothing is said.)
    fn check_last_victim(&self, plan: &Plan) -> Checked {
        let Some(victim) = plan.preempted.last().map(|id| &self.clients[id]) else { return Ok(()) };
        let ends_one = plan.ended.iter().any(|&(_, code)| code == End::Capacity as i64);
        let has_other_reason = self.config().queue.preempt_for_waiting
            || self.rules_of(victim.asked.tenant).hard_blocks < u32::MAX
            || plan.is_empty();
        if ends_one || has_other_reason || self.live().any(|client| client.looks_again) {
            return Ok(());
        }
        let blocks = victim.granted.max(victim.tokens.len()).div_ceil(self.block_size());
        let most = blocks * self.config().groups.len();
        let left = (self.scheduler.pool().num_free() - self.scheduler.num_promised()) as usize;
        ensure(left < most, "victims", || {
            format!("request {} had {most} blocks at most, {left} are left: it was preempted in vain", victim.id)
        })
    }

    /// An admitted request starts behind all that was found, and gets all the tokens that the budget leaves.
    fn check_admissions(&mut self, plan: &Plan, before: &Before) -> Checked {
        let (size, budget) = (self.block_size(), self.config().max_num_batched_tokens as usize);
        let threshold = match self.config().long_prefill_threshold {
            0 => usize::MAX,
            tokens => tokens as usize,
        };
        for &(id, row) in &plan.admitted {
            let Some(seq) = plan.seq_slots.iter().position(|&planned| planned == row) else {
                return broken("admission", format!("request {id} is admitted and gets no token"));
            };
            let len = self.clients[&id].tokens.len();
            let (first, chunk) = (plan.query_starts[seq] as usize, plan.chunks()[seq]);
            let start = plan.positions[first] as usize;
            // A part of a block is copied, at least a quarter of it, in every group that sees it.
            let part = start % size;
            let is_large = part * 4 >= size && self.config().enable_partial_hits;
            ensure((part == 0 || is_large) && start < len, "hit", || {
                format!("request {id} starts at {start} of {len}")
            })?;
            for (group, spec) in self.config().groups.iter().enumerate() {
                let target = plan.group_slots[group][first] / size as i64;
                let is_here = |copy: &&[i32; 4]| copy[0] == group as i32 && i64::from(copy[2]) == target;
                let copied = plan.copies.iter().find(is_here).map_or(0, |copy| copy[3] as usize);
                let due = if spec.window == Some(1) { 0 } else { part };
                ensure(copied == due, "hit", || {
                    format!("request {id} starts at {start}, {copied} rows are copied in group {group}")
                })?;
            }
            self.seen.partial_hits += usize::from(part > 0);
            let sure = self.still_published(id, &before.published[&id]);
            ensure(start >= sure * size, "hit", || {
                format!("request {id} starts at {start}, {sure} blocks of {size} were there for it")
            })?;
            // Who runs and was given drafts has a token of the budget, but comes behind.
            let is_admitted = |slot: &&i32| plan.admitted.iter().any(|(_, row)| row == *slot);
            let behind = plan.seq_slots[seq..].iter().filter(|slot| !is_admitted(slot)).count();
            let wanted = (len - start).min(budget - first - behind).min(threshold);
            ensure(chunk == wanted, "budget", || format!("request {id} gets {chunk} tokens, {wanted} fit"))?;
            self.note_admission(id, start);
            let has_window = self.config().groups.iter().any(|group| group.window.is_some());
            self.seen.hits_through_windows += usize::from(has_window && start > 0);
            let cached = self.scheduler.num_cached_tokens(RequestId(id));
            let known = self.clients[&id].cached;
            ensure(cached.as_ref().ok() == known.as_ref(), "cached", || format!("{cached:?}, must be {known:?}"))?;
        }
        Ok(())
    }

    /// The longest prefix that every group accepts with blocks that were found before the plan and still serve: those cannot have
    /// been missed.
    fn still_published(&mut self, id: u64, found: &[Vec<Option<BlockId>>]) -> usize {
        let (size, most) = (self.block_size(), found[0].len());
        let keys = self.keys_of(id, most);
        let index = self.scheduler.pool().index();
        let serves = |group: usize, number: usize| {
            let block = found[group][number];
            block.is_some_and(|block| index.lookup(&keys[number].in_group(group)) == Some((block, KeyState::Published)))
        };
        let accept = |&len: &usize| {
            let mut firsts = self.first_entries(len * size).into_iter().enumerate();
            firsts.all(|(group, first)| (first..len).all(|number| serves(group, number)))
        };
        (0..=most).rev().find(accept).expect("nothing is always accepted")
    }

    /// Who goes first is passed `max_pass` times at most, but while it waits for a block that the plan computes.
    fn check_order_of_admission(&mut self, plan: &Plan) -> Checked {
        let mut passes = Vec::new();
        for passed in self.live().filter(|client| client.is_waiting()) {
            let goes_later = |&&(id, _): &&(u64, i32)| self.goes_before(passed, &self.clients[&id]);
            let by = plan.admitted.iter().filter(goes_later).count() as u32;
            if by > 0 {
                // With `no_evict`, or if it may not be preempted again, it waits for every block that is being computed.
                let needs_all = self.config().queue.no_evict || passed.preemptions >= self.config().max_preemptions;
                let is_in_flight =
                    self.config().enable_prefix_caching && (needs_all || self.next_block_is_planned(passed, plan));
                passes.push((passed.id, by, is_in_flight));
            }
        }
        let most = self.config().queue.max_pass;
        for (id, by, is_in_flight) in passes {
            if is_in_flight {
                self.seen.passed_over += 1;
                continue;
            }
            let client = self.clients.get_mut(&id).expect("a known request");
            client.passes += by;
            self.seen.passes += by as usize;
            let passes = client.passes;
            ensure(passes <= most, "order", || format!("request {id} is passed {passes} times, {most} are allowed"))?;
        }
        Ok(())
    }

    /// Whether the first `tokens` tokens, whole blocks, are the same for both, and may be shared.
    fn is_same_content(&self, one: &Client, other: &Client, tokens: usize) -> bool {
        let last_key = |client: &Client| {
            let mut keys = Vec::new();
            self.scheduler.hasher().clone().extend(&client.chain, &mut keys, &client.tokens[..tokens]);
            keys.pop()
        };
        one.tokens[..tokens] == other.tokens[..tokens] && last_key(one) == last_key(other)
    }

    /// Nobody computes a block that a sequence before it in the plan is just coming to.
    fn check_waits(&self, plan: &Plan) -> Checked {
        if !self.config().enable_prefix_caching {
            return Ok(());
        }
        let size = self.block_size();
        for (id, row) in &plan.admitted {
            let client = &self.clients[id];
            let seq = plan.seq_slots.iter().position(|planned| planned == row).expect("checked before");
            let needed = plan.positions[plan.query_starts[seq] as usize] as usize / size * size + size;
            let comes_to_it = |&before: &usize| {
                let writer = self.client_in_row(plan.seq_slots[before]).expect("checked before");
                let stands_in_it = plan.seq_lens[before] as usize / size + 1 == needed / size;
                let most = writer.tokens.len().min(client.tokens.len() - 1);
                !writer.is_mixed && stands_in_it && needed <= most && self.is_same_content(writer, client, needed)
            };
            let writer = (0..seq).find(comes_to_it);
            ensure(writer.is_none(), "wait", || format!("request {id} computes what sequence {writer:?} computes"))?;
        }
        self.check_second_look(plan)
    }

    /// Who lost what it shared shares what a prompt before it in the plan completes, if there is room whatever else it finds. (Through
    /// a window more than that block is needed, and who was promised its whole need shares nothing that is not confirmed.)
    fn check_second_look(&self, plan: &Plan) -> Checked {
        let (config, size) = (self.config(), self.block_size());
        let shares_unconfirmed = |client: &Client| {
            let is_promised_all = config.queue.no_evict || client.preemptions >= config.max_preemptions;
            !is_promised_all && !client.is_mixed && client.drafts.is_empty()
        };
        if config.groups.iter().any(|group| group.window.is_some()) || !plan.preempted.is_empty() || self.is_refused {
            return Ok(());
        }
        let left = (self.scheduler.pool().num_free() - self.scheduler.num_promised()) as usize;
        for (seq, &row) in plan.seq_slots.iter().enumerate() {
            let client = self.client_in_row(row)?;
            let start = plan.positions[plan.query_starts[seq] as usize] as usize;
            let (end, most) = (start + size, client.tokens.len().div_ceil(size) * config.groups.len());
            let has_room = left >= most && self.rules_of(client.asked.tenant).hard_blocks == u32::MAX;
            let is_on_edge = client.looks_again && start == client.computed && start.is_multiple_of(size);
            if !is_on_edge
                || !has_room
                || !shares_unconfirmed(client)
                || end > client.prompt_len.min(client.tokens.len() - 1)
            {
                continue;
            }
            let completes = |&before: &usize| {
                let writer = self.client_in_row(plan.seq_slots[before]).expect("checked before");
                let is_written = plan.seq_lens[before] as usize >= end && end <= writer.prompt_len;
                is_written && !writer.is_mixed && self.is_same_content(writer, client, end)
            };
            let writer = (0..seq).find(completes);
            ensure(writer.is_none(), "twice", || {
                format!("request {} computes rows {start}..{end}, which sequence {writer:?} wrote", client.id)
            })?;
        }
        Ok(())
    }

    /// Whether some sequence of the plan comes to stand inside a full block that `client` can use.
    fn next_block_is_planned(&self, client: &Client, plan: &Plan) -> bool {
        let size = self.block_size();
        plan.seq_slots.iter().zip(&plan.seq_lens).any(|(&row, &end)| {
            let writer = self.client_in_row(row).expect("checked before");
            let needed = (end as usize / size + 1) * size;
            let most = writer.tokens.len().min(client.tokens.len() - 1);
            needed <= most && self.is_same_content(writer, client, needed)
        })
    }

    /// Who runs goes on where it stood: decodes by one token, skipped only for want of a block, prefills within the threshold.
    fn check_chunks(&mut self, plan: &Plan, before: &Before) -> Checked {
        let (size, threshold) = (self.block_size(), self.config().long_prefill_threshold as usize);
        let mut skipped = 0;
        for client in before.running.iter().map(|id| &self.clients[id]).filter(|client| client.is_running()) {
            let (id, rest) = (client.id, client.tokens.len() - client.computed);
            let Some(seq) = plan.seq_slots.iter().position(|&row| client.row == Some(row)) else {
                let needs_block = client.may_copy || client.computed >= client.granted.next_multiple_of(size);
                ensure(rest > 1 || needs_block, "decode", || format!("request {id} decodes and gets no token"))?;
                ensure(rest > 1 || !self.promises_all(), "no_evict", || format!("request {id} waits for a block"))?;
                skipped += 1;
                continue;
            };
            let (start, chunk) = (plan.positions[plan.query_starts[seq] as usize] as usize, plan.chunks()[seq]);
            let rejoins = client.looks_again && start > client.computed && start % size == 0;
            ensure(start == client.computed || rejoins, "start", || {
                format!("request {id} goes on at {start}, not {}", client.computed)
            })?;
            let is_small = rest == 1 || threshold == 0 || chunk <= threshold;
            ensure(is_small, "budget", || format!("request {id} gets {chunk} tokens, the threshold is {threshold}"))?;
        }
        self.seen.skipped += skipped;
        Ok(())
    }

    /// With live requests a plan runs something, frees something, or ends something.
    fn check_progress(&self, plan: &Plan, is_overdue: bool) -> Checked {
        let ended = is_overdue || plan.ended.iter().any(|&(_, code)| code == End::Capacity as i64);
        let moves =
            !plan.is_empty() || !plan.preempted.is_empty() || ended || self.is_refused || self.live().next().is_none();
        ensure(moves, "progress", || "requests live, and the plan does nothing".to_owned())
    }
}

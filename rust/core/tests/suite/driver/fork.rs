//! The driver forks requests and takes them back to fewer tokens, and foretells what they keep.

use blocktable_core::error::Error;
use blocktable_core::ids::RequestId;
use blocktable_core::request::Limits;

use super::siblings::salt_of;
use super::world::mark;
use super::{Client, ColdAnswer, Driver};
use crate::broken::{Checked, ensure};

impl Driver {
    /// Forks a request, which may not run; the child, unless it is refused as the rules say it must be. Its choices are its own.
    pub fn fork(&mut self, parent: u64, limits: Limits) -> Checked<Option<u64>> {
        let must_refuse = self.reasons_to_refuse_fork(parent, &limits);
        let before = self.snapshot();
        let now_us = self.tick();
        let confirmed = self.confirmed(parent);
        match self.scheduler.fork(RequestId(parent), limits.clone(), now_us) {
            Err(error) => {
                // What it must be promised, or its tenant may hold, is not known here.
                let hard =
                    self.clients.get(&parent).map_or(u32::MAX, |parent| self.rules_of(parent.asked.tenant).hard_blocks);
                let is_short = matches!(error, Error::OutOfBlocks { .. });
                let may_be_short = self.config().queue.no_evict || hard < u32::MAX;
                let is_known = must_refuse.iter().any(|wanted| *wanted == kind(&error));
                ensure(is_known || (is_short && may_be_short), "fork", || {
                    format!("fork of {parent} gives {error}; reasons: {must_refuse:?}")
                })?;
                self.unchanged_since(&before)?;
                self.settle()?;
                Ok(None)
            }
            Ok(RequestId(id)) => {
                ensure(must_refuse.is_empty(), "fork", || format!("forked although {must_refuse:?}"))?;
                let mut child = Client { id, limits, is_untold: true, may_copy: true, ..self.clients[&parent].clone() };
                child.salt = salt_of(id);
                (child.row, child.preemptions, child.submitted_us) = (None, 0, now_us);
                (child.computed, child.granted) = (confirmed, confirmed);
                (child.rank.arrival, child.passes) = (id, 0);
                child.drafts.clear();
                child.siblings = 0;
                child.answer = self.answer_of(&child);
                child.costs = 1;
                let parent = self.clients.get_mut(&parent).expect("a known request");
                (parent.may_copy, parent.costs) = (true, parent.costs + 1);
                self.clients.insert(id, child);
                self.expected.forks += 1;
                self.seen.forked += 1;
                self.settle()?;
                Ok(Some(id))
            }
        }
    }

    /// Takes a request back to `num_tokens` tokens.
    pub fn truncate(&mut self, id: u64, num_tokens: usize) -> Checked {
        let is_windowed = self.config().groups.iter().any(|group| group.window.is_some());
        if is_windowed && self.clients.get(&id).is_some_and(|client| client.is_untold) {
            // Which of its entries are null is not known before its row is told.
            return Ok(());
        }
        let before = self.snapshot();
        let live = self.clients.get(&id).filter(|client| client.is_live());
        let is_wrong = live.is_none_or(|client| !(1..=client.tokens.len()).contains(&num_tokens));
        let rows = self.confirmed(id).min(num_tokens.saturating_sub(1));
        let result = self.scheduler.truncate(RequestId(id), num_tokens);
        ensure(result.is_err() == is_wrong, "truncate", || format!("to {num_tokens} tokens gives {result:?}"))?;
        if is_wrong {
            self.unchanged_since(&before)?;
            return self.settle();
        }
        if num_tokens < self.clients[&id].tokens.len() {
            let rows = if self.sees(id, rows) { rows } else { 0 };
            let in_flight = self.step.as_ref().is_some_and(|step| step.entries.iter().any(|entry| entry.id == id));
            if in_flight {
                self.lose_writer(id);
                self.seen.ended_in_flight -= 1;
            }
            if self.config().enable_prefix_caching {
                self.keys_of(id, self.clients[&id].tokens.len() / self.block_size());
                self.past.push(self.clients[&id].clone());
            }
            let mut client = self.clients[&id].clone();
            client.tokens.truncate(num_tokens);
            client.prompt_len = client.prompt_len.min(num_tokens);
            client.keys.truncate(num_tokens / self.block_size());
            client.drafts.clear();
            (client.computed, client.granted, client.may_copy) = (rows, rows, true);
            client.costs += 1;
            client.answer = self.answer_of(&client);
            self.clients.insert(id, client);
            self.seen.truncated += 1;
        }
        self.settle()
    }

    /// The step that was to copy rows for its entry `at` has failed.
    pub(super) fn lose_copied(&mut self, at: usize) {
        let entry = &self.step.as_ref().expect("a plan in flight").entries[at];
        let Some(kept) = entry.copied.filter(|_| !entry.is_stale) else { return };
        let rows = kept * self.block_size();
        let (start, is_partial_hit) = (entry.start, entry.is_partial_hit);
        let client = self.clients.get_mut(&entry.id).expect("a known request");
        (client.computed, client.granted) = (rows, rows);
        if is_partial_hit && client.outputs().is_empty() && client.preemptions == 0 {
            client.cached = Some(rows);
            self.expected.prefix_hits -= (start - rows) as u64;
        }
        self.seen.lost_copies += 1;
    }

    /// Rows of a request that no step in flight can take back.
    fn confirmed(&self, id: u64) -> usize {
        let Some(client) = self.clients.get(&id) else { return 0 };
        let entry = self.step.as_ref().and_then(|step| step.entries.iter().find(|entry| entry.id == id));
        match entry.filter(|entry| !entry.is_stale) {
            Some(entry) if !entry.shared.is_empty() => entry.kept * self.block_size(),
            Some(entry) => entry.copied.map_or(client.computed, |kept| kept * self.block_size()),
            None => client.computed,
        }
    }

    /// Whether the tables of a request name all that its query at `position` sees.
    fn sees(&self, id: u64, position: usize) -> bool {
        let (client, end) = (&self.clients[&id], position.div_ceil(self.block_size()));
        let Some(row) = client.row else { return true };
        let lines = self.lines(row).into_iter().zip(self.first_entries(position));
        lines.into_iter().all(|(line, first)| (first.min(end)..end).all(|at| self.device_tables[line + at] > 0))
    }

    pub(super) fn answer_of(&self, client: &Client) -> ColdAnswer {
        let config = self.config();
        let Client { tokens, prompt_len, salt, limits, identity, .. } = client;
        let (vocab_size, longest, size) = (config.vocab_size, config.max_model_len, self.block_size());
        let mark = |position| mark(identity, position, size);
        ColdAnswer::of(tokens, *prompt_len, *salt, limits, vocab_size, longest, &config.groups, mark)
    }

    fn reasons_to_refuse_fork(&self, parent: u64, limits: &Limits) -> Vec<&'static str> {
        let mut reasons = Vec::new();
        let Some(client) = self.clients.get(&parent).filter(|client| client.is_live()) else { return vec!["unknown"] };
        if client.is_waiting() {
            reasons.push("not running");
        }
        if limits.max_tokens as usize <= client.outputs().len() {
            reasons.push("max_tokens");
        }
        if limits.min_tokens > limits.max_tokens {
            reasons.push("min_tokens");
        }
        let must_make = limits.min_tokens.max(1) as usize;
        let longest = self.config().max_model_len as usize - 1;
        let queue = &self.config().queue;
        let rows = client.prompt_len + if queue.no_evict { limits.max_tokens as usize } else { must_make } - 1;
        if self.need(rows.min(longest)) > (self.config().num_blocks - 1 - queue.watermark) as usize {
            reasons.push("never fits");
        }
        let spare: u32 = self.live().filter(|client| client.is_running()).map(|client| client.siblings).sum();
        if self.scheduler.num_running() + spare as usize == self.config().rows() as usize {
            reasons.push("no free row");
        }
        reasons
    }
}

fn kind(error: &Error) -> &'static str {
    match error {
        Error::UnknownRequest { .. } => "unknown",
        Error::NotRunning { .. } => "not running",
        Error::NoFreeRow { .. } => "no free row",
        Error::NeverFits { .. } => "never fits",
        Error::InvalidInput { field, .. } => field,
        _ => "something else",
    }
}

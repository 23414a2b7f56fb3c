//! A request comes: it is checked against every bound, and then waits.
//!
//! Before: the border has a prompt with its keys. After: it stands in the waiting line with a seat, an id and a rank; or it was refused,
//! with the field or the numbers, and nothing changed.

use crate::block_hash::Prompt;
use crate::error::{Error, Result};
use crate::ids::{RequestId, TokenId};
use crate::mutant::{self, Mutant};
use crate::policy::PolicyKind;
use crate::queue_rules::PRIORITIES;
use crate::rank::{Ask, Asked, Rank};
use crate::reason::{Reason, saturated};
use crate::request::{Limits, Request};
use crate::scheduler::Scheduler;
use crate::tenants::{self, Backlog};

impl Scheduler {
    /// Queues one request of the nameless tenant, without priority and deadlines.
    ///
    /// # Errors
    /// As [`submit_as`](Self::submit_as).
    pub fn submit(&mut self, prompt: Prompt, limits: Limits, now_us: u64) -> Result<RequestId> {
        self.submit_as(prompt, limits, Asked::default(), now_us)
    }

    /// Queues one request. Ids count up, so of one class earlier ones rank higher.
    ///
    /// # Errors
    /// [`Error::InvalidInput`], [`Error::NeverFits`] or [`Error::QueueFull`]; nothing is queued then.
    pub fn submit_as(
        &mut self,
        mut prompt: Prompt,
        limits: Limits,
        asked: Asked<'_>,
        now_us: u64,
    ) -> Result<RequestId> {
        if let Err(error) = self
            .check_siblings(asked.siblings)
            .and_then(|()| self.check(&prompt.tokens, &limits, asked.siblings))
            .and_then(|()| self.check_asked(&asked, now_us))
            .and_then(|()| self.check_tenant(&prompt.tokens, &limits, &asked))
            .and_then(|()| self.check_queue(prompt.tokens.len(), asked.tenant))
        {
            self.counters.refused += 1;
            self.timelines.count(Reason::of_refusal(&error));
            return Err(error);
        }
        if prompt.generation != self.hasher.generation && self.config.enable_prefix_caching {
            // The weights changed while it was hashed.
            prompt.keys.clear();
            self.hasher.extend(&prompt.chain, &mut prompt.keys, &prompt.tokens);
            if let Some(trail) = &mut prompt.trail {
                trail.restart();
                trail.extend(&mut self.hasher, &prompt.tokens);
            }
        }
        self.clear_up();
        self.pool.tell_time(now_us);
        let id = RequestId(self.next_id);
        self.next_id += 1 + u64::from(asked.siblings);
        let ask = self.ask(id, &asked, now_us);
        let (tokens, max_tokens) = (saturated(prompt.tokens.len() as u64), limits.max_tokens);
        self.timelines.tell_time(now_us);
        let seat = self.sit(Request::new(id, prompt, limits, now_us, self.config.max_model_len as usize), ask);
        if asked.siblings > 0 {
            self.begin_family(seat, asked.siblings);
        }
        self.note(seat, Reason::Submitted { tokens, max_tokens });
        if self.waiting.len() > 0 {
            self.note(seat, Reason::BehindHead { others: self.waiting.len() as u32 });
        }
        self.start_waiting(seat);
        self.counters.submitted += 1;
        Ok(id)
    }

    fn check(&self, prompt: &[TokenId], limits: &Limits, siblings: u32) -> Result<()> {
        let invalid =
            |field, value: usize, bound: String| Err(Error::InvalidInput { field, value: value as i128, bound });
        let vocab = self.config.vocab_size;
        let longest = self.config.max_model_len as usize - 1;
        if prompt.is_empty() || prompt.len() > longest {
            return invalid(
                "prompt_len",
                prompt.len(),
                format!("must be 1..={longest} tokens for max_model_len {}", longest + 1),
            );
        }
        // All at once, many at a time: nearly always all are right.
        let is_wrong = prompt.iter().fold(false, |wrong, &id| wrong | (id >= vocab));
        if is_wrong && let Some(&id) = prompt.iter().find(|&&id| id >= vocab) {
            return invalid("token_ids", id as usize, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        self.check_limits(limits)?;
        self.check_fits(prompt.len(), limits, siblings)
    }

    fn check_asked(&self, asked: &Asked<'_>, now_us: u64) -> Result<()> {
        let invalid = |field, value: i128, bound: String| Err(Error::InvalidInput { field, value, bound });
        tenants::check_name(asked.tenant)?;
        let turn = &asked.turn;
        if !PRIORITIES.contains(&turn.priority) {
            let bound = format!("must be {}..={}", PRIORITIES.start(), PRIORITIES.end());
            return invalid("priority", i128::from(turn.priority), bound);
        }
        let policy = self.config.queue.policy;
        if turn.priority != 0 && policy != PolicyKind::Priority {
            return invalid("priority", i128::from(turn.priority), format!("must be 0 with policy {}", policy.name()));
        }
        for (field, value) in [("deadline_us", turn.deadline_us), ("queue_deadline_us", turn.queue_deadline_us)] {
            if value <= now_us {
                return invalid(field, i128::from(value), format!("must be later than now_us, {now_us}"));
            }
        }
        Ok(())
    }

    pub(crate) fn check_limits(&self, limits: &Limits) -> Result<()> {
        let invalid =
            |field, value: u32, bound: String| Err(Error::InvalidInput { field, value: i128::from(value), bound });
        let vocab = self.config.vocab_size;
        if let Some(&id) = limits.stop_tokens.iter().find(|&&id| id >= vocab) {
            return invalid("stop_token_ids", id, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        if limits.max_tokens == 0 {
            return invalid("max_tokens", 0, "must be at least 1".to_owned());
        }
        if limits.min_tokens > limits.max_tokens {
            let bound = format!("must be at most max_tokens, {}", limits.max_tokens);
            return invalid("min_tokens", limits.min_tokens, bound);
        }
        Ok(())
    }

    /// Refuses what cannot fit even alone: the rows of the prompt and of the outputs that must be made. The newest output has no row.
    /// With `no_evict` all sequences must fit at once.
    pub(crate) fn check_fits(&self, prompt_len: usize, limits: &Limits, siblings: u32) -> Result<()> {
        let must_make = limits.min_tokens.max(1) as usize;
        let mut rows = (prompt_len + must_make - 1).min(self.config.max_model_len as usize - 1);
        if self.config.queue.no_evict {
            rows = self.most_rows(prompt_len, limits);
        }
        let needed = self.groups.need(0, 0, rows) as u64 + self.need_of_siblings(prompt_len, limits, siblings);
        let usable =
            self.pool.usable() - if mutant::is_on(Mutant::WatermarkUsable) { 0 } else { self.config.queue.watermark };
        let usable = u64::from(usable) + u64::from(mutant::is_on(Mutant::NullUsable));
        if needed > usable && !mutant::is_on(Mutant::NoNeverFits) {
            return Err(Error::NeverFits { needed, usable });
        }
        Ok(())
    }

    /// What the line is to know of the request `id`, whose tenant has one more from here on.
    fn ask(&mut self, id: RequestId, asked: &Asked<'_>, now_us: u64) -> Ask {
        let (tenant, is_reused) = self.tenants.enter(asked.tenant);
        if is_reused {
            self.waiting.policy.forget(tenant as usize);
        }
        let turn = asked.turn;
        let class = self.waiting.policy.class(turn.priority, now_us);
        Ask {
            rank: Rank { class, arrival: id.0 },
            turn,
            tenant,
            submitted_us: now_us,
            due_us: turn.deadline_us.min(turn.queue_deadline_us),
            cached_blocks: 0,
            short_of: None,
            backlog: Backlog::default(),
            passed: 0,
            charged: 0,
        }
    }
}

//! What may join the waiting line: refused is what can never fit its tenant's quota, and what a full queue has no room for.
//!
//! Before: a request is submitted. After: a refusal named the limit with its numbers and changed nothing.

use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::mutant::{self, Mutant};
use crate::rank::Asked;
use crate::request::Limits;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Rows that a request may have at most. Its newest output has none.
    pub(crate) fn most_rows(&self, prompt_len: usize, limits: &Limits) -> usize {
        (prompt_len + limits.max_tokens as usize - 1).min(self.config.max_model_len as usize - 1)
    }

    /// Refuses what cannot fit the quota of its tenant even alone.
    pub(crate) fn check_tenant(&self, prompt: &[TokenId], limits: &Limits, asked: &Asked<'_>) -> Result<()> {
        let hard = self.tenants.rules(asked.tenant).hard_blocks;
        let least = (prompt.len() + limits.min_tokens.max(1) as usize - 1).min(self.config.max_model_len as usize - 1);
        let rows = if self.config.queue.no_evict { self.most_rows(prompt.len(), limits) } else { least };
        let needed = self.blocks_of(rows) + self.need_of_siblings(prompt.len(), limits, asked.siblings);
        if needed > u64::from(hard) && !mutant::is_on(Mutant::QuotaNotAsked) {
            return Err(Error::NeverFits { needed, usable: u64::from(hard) });
        }
        Ok(())
    }

    /// Refuses what the queue, or the tenant's part of it, has no room for.
    pub(crate) fn check_queue(&self, tokens: usize, tenant: &str) -> Result<()> {
        let (rules, of_tenant) = (self.tenants.rules(tenant), self.tenants.backlog(tenant));
        let (queue, all) = (&self.config.queue, self.backlog);
        let (tokens, blocks) = (tokens as u64, self.blocks_of(tokens));
        let or_none = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        let limits = [
            ("max_waiting", u64::from(self.config.max_waiting), all.requests, 1),
            ("max_waiting_tokens", or_none(queue.max_waiting_tokens), all.tokens, tokens),
            ("max_waiting_blocks", or_none(queue.max_waiting_blocks), all.blocks, blocks),
            ("tenants: max_waiting", rules.max_waiting, of_tenant.requests, 1),
            ("tenants: max_waiting_tokens", rules.max_waiting_tokens, of_tenant.tokens, tokens),
            ("tenants: max_waiting_blocks", rules.max_waiting_blocks, of_tenant.blocks, blocks),
        ];
        for (at, (what, limit, waiting, more)) in limits.into_iter().enumerate() {
            // Somebody is always let into an empty queue.
            if waiting == 0
                || waiting.saturating_add(more) <= limit
                || (at > 0 && mutant::is_on(Mutant::OnlyRequestsLimited))
            {
                continue;
            }
            let over = waiting.saturating_add(more) - limit;
            let retry_after_us = self.drain.time_for(at % 3, over);
            return Err(Error::QueueFull { what, limit, waiting, retry_after_us });
        }
        Ok(())
    }
}

//! Whose turn it is, by the documentation of the policies, and whose time is over.

use blocktable_core::policy::PolicyKind;
use blocktable_core::rank::Asked;
use blocktable_core::request::End;

use blocktable_core::tenants::TenantRules;

use super::{Client, Driver};
use crate::broken::{Checked, ensure};

impl Driver {
    /// Kinds of refusal for what a request asks beside its prompt and limits.
    pub(super) fn reasons_of_turn(&self, asked: &Asked<'_>) -> Vec<&'static str> {
        let mut reasons = Vec::new();
        let (turn, policy) = (asked.turn, self.config().queue.policy);
        if !(-1000..=1000).contains(&turn.priority) || (turn.priority != 0 && policy != PolicyKind::Priority) {
            reasons.push("priority");
        }
        if turn.deadline_us <= self.now_us {
            reasons.push("deadline_us");
        }
        if turn.queue_deadline_us <= self.now_us {
            reasons.push("queue_deadline_us");
        }
        if asked.siblings >= self.config().rows() {
            reasons.push("n");
        }
        if asked.tenant.len() > 1024 {
            reasons.push("tenant");
        }
        reasons
    }

    /// The class of a request that is submitted now.
    pub(super) fn class_of(&self, asked: &Asked<'_>) -> i64 {
        match self.config().queue.policy {
            PolicyKind::Priority => {
                i64::from(asked.turn.priority) + (self.now_us / self.config().queue.ageing_us) as i64
            }
            _ => 0,
        }
    }

    /// Whether one waiting request goes before another, whatever was served and is cached.
    pub(super) fn goes_before(&self, one: &Client, other: &Client) -> bool {
        let rules = &self.config().queue;
        let due = |client: &Client| {
            let latest = client.submitted_us + rules.latest_deadline_us;
            latest.min(client.asked.turn.deadline_us).min(client.asked.turn.queue_deadline_us)
        };
        match rules.policy {
            // Who has a quota may have to wait for its tenant's own requests.
            _ if self.rules_of(one.asked.tenant)
                != TenantRules { weight: self.rules_of(one.asked.tenant).weight, ..TenantRules::default() } =>
            {
                false
            }
            PolicyKind::Fcfs => one.id < other.id,
            PolicyKind::Priority => one.rank < other.rank,
            PolicyKind::Deadline => (due(one), one.id) < (due(other), other.id),
            PolicyKind::Fair => one.asked.tenant == other.asked.tenant && one.id < other.id,
            PolicyKind::Prefix => one.id / u64::from(rules.prefix_band) < other.id / u64::from(rules.prefix_band),
        }
    }

    /// Before a plan: whose time is over ends with it; how many.
    pub(super) fn end_overdue(&mut self) -> usize {
        let now_us = self.now_us;
        let overdue = |client: &&Client| {
            let turn = client.asked.turn;
            turn.deadline_us <= now_us || (client.cached.is_none() && turn.queue_deadline_us <= now_us)
        };
        let ids: Vec<u64> = self.live().filter(overdue).map(|client| client.id).collect();
        let count = ids.len();
        for id in ids {
            let client = &self.clients[&id];
            self.seen.overdue_running += usize::from(client.is_running());
            let was_refused = client.cached.is_none() && client.asked.turn.queue_deadline_us <= now_us;
            self.seen.deadlines += usize::from(!was_refused);
            self.seen.queue_deadlines += usize::from(was_refused);
            self.mark_ended(id, if was_refused { End::Refused } else { End::Expired } as i64);
        }
        count
    }
}

impl Driver {
    /// The rules of a tenant.
    pub(super) fn rules_of(&self, tenant: &str) -> TenantRules {
        let queue = &self.config().queue;
        let named = queue.tenants.iter().find(|(name, _)| **name == *tenant);
        named.map_or(queue.other_tenants, |(_, rules)| *rules)
    }

    /// Whether one more request of so many tokens is too much for the queue, or for its tenant's part of it.
    pub(super) fn is_queue_full(&self, tokens: usize, tenant: &str) -> bool {
        let (queue, rules) = (&self.config().queue, self.rules_of(tenant));
        let or_none = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        let all = [
            u64::from(self.config().max_waiting),
            or_none(queue.max_waiting_tokens),
            or_none(queue.max_waiting_blocks),
        ];
        let own = [rules.max_waiting, rules.max_waiting_tokens, rules.max_waiting_blocks];
        let amounts = |client: &Client| [1, client.queued, self.need(client.queued)];
        let is_over = |limits: [u64; 3], of_tenant: bool| {
            let mut waiting = [0; 3];
            for client in
                self.live().filter(|client| client.is_waiting() && (!of_tenant || client.asked.tenant == tenant))
            {
                amounts(client).iter().zip(&mut waiting).for_each(|(amount, sum)| *sum += amount);
            }
            let more = [1, tokens, self.need(tokens)];
            (0..3).any(|at| waiting[at] > 0 && (waiting[at] + more[at]) as u64 > limits[at])
        };
        is_over(all, false) || is_over(own, true)
    }

    /// No tenant's tables name more blocks than it may hold. Entries behind a window are not known here, so only without one.
    pub(super) fn check_quotas(&self) -> Checked {
        if self.config().groups.iter().any(|group| group.window.is_some()) {
            return Ok(());
        }
        let groups = self.config().groups.len();
        for (tenant, rules) in &self.config().queue.tenants {
            let of_tenant = self.live().filter(|client| client.is_running() && client.asked.tenant == &**tenant);
            let held: usize = of_tenant.map(|client| client.granted.div_ceil(self.block_size()) * groups).sum();
            ensure(held <= rules.hard_blocks as usize, "quota", || format!("{tenant} holds {held} blocks: {rules:?}"))?;
        }
        Ok(())
    }

    /// Whether a step may both preempt and admit: those that it preempted made room for the only one that it admits.
    pub(super) fn is_room_made(&self, preempted: &[u64], admitted: &[(u64, i32)]) -> bool {
        let [(id, _)] = admitted else { return false };
        let one = &self.clients[id];
        let is_lower = |victim: &u64| {
            let other = &self.clients[victim];
            other.rank.class > one.rank.class && other.asked.turn.priority > one.asked.turn.priority
        };
        self.config().queue.preempt_for_waiting && preempted.iter().any(is_lower)
    }
}

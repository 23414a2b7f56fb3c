//! Whose turn it is, by the documentation of the policies, and whose time is over.

use blocktable_core::policy::PolicyKind;
use blocktable_core::rank::Asked;
use blocktable_core::request::End;

use super::{Client, Driver};

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
            PolicyKind::Fcfs => one.id < other.id,
            PolicyKind::Priority => one.rank < other.rank,
            PolicyKind::Deadline => (due(one), one.id) < (due(other), other.id),
            PolicyKind::Fair => one.asked.tenant == other.asked.tenant && one.id < other.id,
            PolicyKind::Prefix => one.id / u64::from(rules.prefix_band) < other.id / u64::from(rules.prefix_band),
        }
    }

    /// Before a plan: whose time is over ends with it.
    pub(super) fn end_overdue(&mut self) {
        let now_us = self.now_us;
        let overdue = |client: &&Client| {
            let turn = client.asked.turn;
            turn.deadline_us <= now_us || (client.cached.is_none() && turn.queue_deadline_us <= now_us)
        };
        let ids: Vec<u64> = self.live().filter(overdue).map(|client| client.id).collect();
        for id in ids {
            let client = &self.clients[&id];
            let was_refused = client.cached.is_none() && client.asked.turn.queue_deadline_us <= now_us;
            self.seen.deadlines += usize::from(!was_refused);
            self.seen.queue_deadlines += usize::from(was_refused);
            self.mark_ended(id, if was_refused { End::Refused } else { End::Expired } as i64);
        }
    }
}

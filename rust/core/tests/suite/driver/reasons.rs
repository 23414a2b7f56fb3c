//! Every wait has a reason: after each plan, whoever got no token can say what it waits for, and whoever ended can say how.

use blocktable_core::ids::RequestId;
use blocktable_core::notes::Whereabouts;
use blocktable_core::reason::{Kind, Reason};
use blocktable_core::timeline::MAX_RECORDS;

use super::{Client, Driver, Plan};
use crate::broken::{Checked, broken, ensure};

impl Driver {
    /// Asks about every request that lives, and about those whose end `plan` tells, which was made just now.
    pub(super) fn check_reasons(&self, plan: &Plan) -> Checked {
        let is_told = |id: u64| plan.ended.iter().any(|&(ended, _)| ended == id);
        for client in self.clients.values().filter(|client| client.is_live() || is_told(client.id)) {
            let told = self.scheduler.explain(RequestId(client.id));
            let told = told.or_else(|error| broken("reason", error.to_string()))?;
            let records = &told.records;
            ensure((1..=MAX_RECORDS).contains(&records.len()), "timeline", || format!("{} records", records.len()))?;
            let in_order = records.is_sorted_by_key(|record| (record.step, record.until_us));
            ensure(in_order, "timeline", || format!("records are out of order: {told}"))?;
            let place = match client {
                _ if !client.is_live() => Whereabouts::Ended,
                _ if client.is_waiting() => Whereabouts::Waiting,
                _ => Whereabouts::Running,
            };
            ensure(told.place == place, "reason", || format!("it is {place:?}: {told}"))?;
            let is_end = records.last().is_some_and(|record| record.reason.kind() == Kind::End);
            ensure(is_end != client.is_live(), "reason", || format!("it lives: {}; {told}", client.is_live()))?;
            let runs = client.row.is_some_and(|row| plan.seq_slots.contains(&row));
            let waits = client.is_live() && !runs;
            ensure(told.waits_for.is_some() == waits, "reason", || format!("it got no token: {waits}; {told}"))?;
            let now = records.iter().filter(|record| record.step + 1 == plan.step);
            let wrong = now.map(|record| record.reason).find(|&reason| self.is_wrong(reason, plan, client));
            ensure(wrong.is_none(), "numbers", || format!("{wrong:?} is not so: {told}"))?;
        }
        Ok(())
    }

    /// Whether what `plan` noted contradicts its own numbers, or the plan.
    fn is_wrong(&self, reason: Reason, plan: &Plan, client: &Client) -> bool {
        let is_waiting = client.is_waiting();
        // One of several sequences takes the others along; with `no_evict` two may lack what the other has.
        let ends_alone = client.family.is_none() && !self.config().queue.no_evict;
        match reason {
            Reason::Capacity { needed, usable } => ends_alone && needed <= usable,
            // A running one may also wait for what is copied.
            Reason::BlocksInFlight { needed, free, parked } => needed > free + parked || is_waiting && needed <= free,
            Reason::KeptForGrowth { needed, free, kept } => needed > free || needed + kept <= free,
            Reason::OutOfBlocks { needed, free, promised } => needed <= free.saturating_sub(promised),
            Reason::Yields { held, limit } => held <= limit,
            Reason::NoBudget { .. } => {
                is_waiting && plan.token_ids.len() < self.config().max_num_batched_tokens as usize
            }
            _ => false,
        }
    }
}

//! Every wait has a reason: after each plan, whoever got no token can say what it waits for, and whoever ended can say how.

use blocktable_core::ids::RequestId;
use blocktable_core::notes::Whereabouts;
use blocktable_core::reason::Kind;
use blocktable_core::timeline::MAX_RECORDS;

use super::{Driver, Plan};
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
        }
        Ok(())
    }
}

//! What work costs a tenant: each row once, and each output.
//!
//! Before: a request was admitted, or a step was planned. After: its tenant's counter says what it was given, if the policy asks.

use crate::scheduler::Scheduler;

impl Scheduler {
    /// Charges the prompt of a request that was just admitted to its tenant, but for what was cached or charged before.
    pub(crate) fn charge_admission(&mut self, seat: usize) {
        if self.waiting.policy.charges() {
            let (computed, known) = (self.request(seat).computed(), self.request(seat).num_tokens());
            self.charge_rows(seat, computed, known);
        }
    }

    /// Charges the outputs of the step that was just planned, and the rows behind what was charged at admission.
    pub(crate) fn charge_step(&mut self) {
        if !self.waiting.policy.charges() {
            return;
        }
        let step = self.steps + 1;
        for at in 0..self.flight.of(step).entries.len() {
            let entry = &self.flight.of(step).entries[at];
            let (seat, start, end, samples) =
                (entry.seat(), entry.start(), entry.start() + entry.chunk(), entry.samples());
            if samples {
                self.waiting.policy.charge(self.asks[seat].tenant as usize, 1);
            }
            self.charge_rows(seat, start, end);
        }
    }

    fn charge_rows(&mut self, seat: usize, start: usize, end: usize) {
        let ask = &mut self.asks[seat];
        let new = end.saturating_sub(start.max(ask.charged as usize));
        ask.charged = ask.charged.max(end as u32);
        if new > 0 {
            self.waiting.policy.charge(ask.tenant as usize, new as u64);
        }
    }
}

//! The driver changes the weights' version: keys differ from then on, and what running requests compute is not found any more.
//!
//! The oracle's rows do not depend on weights, so every answer stays the cold one; that old content is not found under new keys is
//! checked elsewhere, on the scheduler alone.

use blocktable_core::error::Error;
use blocktable_core::ids::{RequestId, StepId};

use super::Driver;
use crate::broken::{Checked, broken, ensure};

impl Driver {
    /// Other weights compute from the next plan on. Refused while a step is in flight.
    pub fn set_weights_version(&mut self, version: u8) -> Checked {
        let before = self.snapshot();
        let is_new = self.config().weights_version != [version];
        let result = self.scheduler.set_weights_version(&[version]);
        if let Some(step) = &self.step {
            let expected = Err(Error::StepInFlight { step: StepId(step.plan.step) });
            ensure(result == expected, "weights", || format!("in flight they change: {result:?}"))?;
            self.unchanged_since(&before)?;
            return self.settle();
        }
        let mut mixed = 0;
        if is_new {
            // What was told so far has the old names.
            self.past.extend(self.clients.values().cloned());
            for client in self.clients.values_mut() {
                client.keys.clear();
                let has_rows = client.is_live() && !client.is_waiting() && client.computed > 0;
                client.is_mixed |= has_rows;
                mixed += usize::from(has_rows);
            }
        }
        ensure(result == Ok(mixed), "weights", || format!("{result:?} are mixed, must be {mixed}"))?;
        self.seen.mixed += mixed;
        for client in self.live() {
            let told = self.scheduler.is_mixed(RequestId(client.id));
            let told = told.or_else(|error| broken("weights", error.to_string()))?;
            ensure(told == client.is_mixed, "weights", || format!("request {} is mixed: {told}", client.id))?;
        }
        self.settle()
    }
}

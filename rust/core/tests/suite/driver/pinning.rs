//! Pins of the driver: what is pinned stays published and held, whatever happens, until it is given back.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::error::Error;
use blocktable_core::ids::Key;
use blocktable_core::prefix_index::KeyState;

use super::Driver;
use crate::broken::{Checked, broken, ensure};

/// A pin.
#[derive(Clone, Debug)]
pub struct Pin {
    pub id: u64,
    /// The keys that it holds in the first group.
    pub keys: Vec<Key>,
}

impl Driver {
    /// Pins a prompt; false if it is refused, as the rules say it must be.
    pub fn pin(&mut self, prompt: &[u32]) -> Checked<bool> {
        self.pin_as(Identity::of(Domain::Deployment), prompt)
    }

    /// The same for a tenant, an adapter, salts and media.
    pub fn pin_as(&mut self, identity: Identity, prompt: &[u32]) -> Checked<bool> {
        // The prompt of a request that was truncated may end before its ranges do.
        let Ok(prompt) = self.scheduler.prompt(prompt.to_vec(), identity) else { return Ok(false) };
        let before = (self.snapshot(), self.scheduler.num_pinned());
        let budget = self.config().pin_budget;
        match self.scheduler.pin(&prompt) {
            Ok(pinned) => {
                let blocks = pinned.tokens / self.block_size();
                ensure(blocks > 0 && blocks <= prompt.keys().len(), "pin", || format!("{pinned:?}"))?;
                let held = self.scheduler.num_pinned();
                let most = before.1 + pinned.blocks;
                ensure((before.1..=most.min(budget)).contains(&held), "pin", || format!("{held} of {budget} pinned"))?;
                self.pins.push(Pin { id: pinned.id, keys: prompt.keys()[..blocks].to_vec() });
                self.seen.pinned += 1;
                self.settle()?;
                Ok(true)
            }
            Err(Error::OverPinBudget { needed, pinned, budget: said }) => {
                ensure((pinned, said) == (before.1, budget) && pinned + needed > budget, "pin", || {
                    format!("refused: {needed} more than {pinned} of {said}")
                })?;
                self.unchanged_since(&before.0)?;
                Ok(false)
            }
            Err(Error::InvalidInput { field: "token_ids", .. } | Error::OutOfBlocks { .. }) => {
                self.unchanged_since(&before.0)?;
                Ok(false)
            }
            Err(other) => broken("pin", other.to_string()),
        }
    }

    /// Gives a pin back, chosen modulo those that there are.
    pub fn unpin(&mut self, number: usize) -> Checked {
        if self.pins.is_empty() {
            let refused = matches!(self.scheduler.unpin(9999), Err(Error::InvalidInput { field: "pin", .. }));
            return ensure(refused, "pin", || "a pin that never was is given back".to_owned());
        }
        let pin = self.pins.remove(number % self.pins.len());
        self.scheduler.unpin(pin.id).or_else(|error| broken("pin", error.to_string()))?;
        self.settle()
    }

    pub fn unpin_all(&mut self) -> Checked {
        while !self.pins.is_empty() {
            self.unpin(0)?;
        }
        let pinned = self.scheduler.num_pinned();
        ensure(pinned == 0, "pin", || format!("{pinned} blocks are pinned by nobody"))
    }

    /// What is pinned is there, in the groups that see everything.
    pub(super) fn check_pins(&self) -> Checked {
        let index = self.scheduler.pool().index();
        let full = (0..self.config().groups.len()).filter(|&group| self.config().groups[group].window.is_none());
        for group in full {
            let keys = self.pins.iter().flat_map(|pin| &pin.keys);
            for key in keys {
                let found = index.lookup(&key.in_group(group));
                let is_there = found.is_some_and(|(block, state)| {
                    state == KeyState::Published && self.scheduler.pool().holders(block) > 0
                });
                ensure(is_there, "pin", || format!("{key:?} of group {group} is pinned and {found:?}"))?;
            }
        }
        Ok(())
    }
}

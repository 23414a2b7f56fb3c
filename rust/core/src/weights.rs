//! Other weights: nothing that the old ones computed is found by a later request.
//!
//! Before: the engine has loaded them, with no step in flight. After: whoever waits looks for its prefix among what the new weights
//! computed. Who runs goes on, with rows of both versions: it publishes nothing more and is known by
//! [`Scheduler::is_mixed`]; a preemption computes it anew by the new weights alone. What the old ones computed stays under its keys
//! until it is evicted, and is found again if they come back.

use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::mutant::{self, Mutant};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Rows are computed by weights `version` from the next plan on. How many running requests hold rows of other ones.
    ///
    /// Hashes the tokens of every waiting request again.
    ///
    /// # Errors
    /// [`Error::StepInFlight`]: the weights of that step must be known; [`Error::InvalidInput`] for a version that is too long, or has
    /// no place in vLLM's keys: reset the prefix cache instead.
    pub fn set_weights_version(&mut self, version: &[u8]) -> Result<usize> {
        if let Some(step) = self.flight.oldest() {
            return Err(Error::StepInFlight { step });
        }
        let generation = self.hasher.generation;
        self.hasher = self.hasher.clone().with_weights(version)?;
        self.config.weights_version = version.to_vec();
        if self.hasher.generation == generation {
            return Ok(0);
        }
        let has_keys = self.config.enable_prefix_caching;
        if has_keys && !mutant::is_on(Mutant::WaitingKeepsOldKeys) {
            for (_, seat) in self.waiting.seats().collect::<Vec<_>>() {
                let request = self.seats[seat].as_mut().expect("a seat in use");
                request.forget_keys();
                request.extend_keys(&mut self.hasher, request.num_tokens());
                self.follow_anew(seat);
            }
        }
        let mut mixed = 0;
        for &seat in &self.running {
            let request = self.seats[seat].as_mut().expect("a seat in use");
            if request.computed() == 0 {
                if has_keys {
                    request.forget_keys();
                    request.extend_keys(&mut self.hasher, request.num_tokens());
                }
                continue;
            }
            request.look_closer();
            request.is_mixed = !mutant::is_on(Mutant::MixedRowsPublished);
            mixed += 1;
        }
        Ok(mixed)
    }

    /// Whether the rows of a live request were computed by several versions of the weights.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it does not live.
    pub fn is_mixed(&self, id: RequestId) -> Result<bool> {
        let seat = self.seat_of(id).ok_or(Error::UnknownRequest { request: id })?;
        Ok(self.request(seat).is_mixed)
    }
}

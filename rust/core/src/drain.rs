//! How fast requests leave the waiting line: measured with the caller's clock, only while somebody waits.
//!
//! Before: plans say what time it is, admissions what left. After: a full queue can say when there will be room. Nothing is said
//! before anything was measured.

use crate::tenants::Backlog;

/// Admissions after which older ones count half.
const HALF_LIFE: u64 = 256;

/// What left the line, and in how much time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drain {
    admitted: Backlog,
    busy_us: u64,
    /// The last plan after which somebody waited.
    waited_since_us: Option<u64>,
}

impl Drain {
    /// A plan begins.
    pub fn begin(&mut self, now_us: u64) {
        if let Some(since) = self.waited_since_us.take() {
            self.busy_us = self.busy_us.saturating_add(now_us.saturating_sub(since));
        }
    }

    /// A plan is done, and somebody waits, or not.
    pub fn end(&mut self, now_us: u64, does_wait: bool) {
        self.waited_since_us = does_wait.then_some(now_us);
    }

    /// A request was admitted that was so much of the queue.
    pub fn admit(&mut self, backlog: Backlog) {
        self.admitted.add(backlog);
        if self.admitted.requests >= 2 * HALF_LIFE {
            let Backlog { requests, tokens, blocks } = self.admitted;
            self.admitted = Backlog { requests: requests / 2, tokens: tokens / 2, blocks: blocks / 2 };
            self.busy_us /= 2;
        }
    }

    /// Microseconds until `amount` has left: requests (0), tokens (1) or blocks (2). At least 1.
    pub fn time_for(&self, what: usize, amount: u64) -> Option<u64> {
        let admitted = [self.admitted.requests, self.admitted.tokens, self.admitted.blocks][what];
        if admitted == 0 || self.busy_us == 0 {
            return None;
        }
        let time = u128::from(self.busy_us) * u128::from(amount) / u128::from(admitted);
        Some(u64::try_from(time).unwrap_or(u64::MAX).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_while_somebody_waits_and_never_invented() {
        let mut drain = Drain::default();
        assert_eq!(drain.time_for(0, 1), None);
        drain.begin(1_000_000);
        drain.admit(Backlog { requests: 1, tokens: 100, blocks: 7 });
        drain.end(1_000_000, true);
        assert_eq!(drain.time_for(0, 1), None, "no time has passed");
        drain.begin(1_000_400);
        drain.admit(Backlog { requests: 1, tokens: 300, blocks: 19 });
        drain.end(1_000_400, false);
        assert_eq!(drain.time_for(0, 1), Some(200));
        assert_eq!(drain.time_for(1, 100), Some(100));
        drain.begin(9_000_000);
        assert_eq!(drain.time_for(0, 3), Some(600), "nobody waited in between");
    }
}

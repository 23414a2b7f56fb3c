//! Who goes first and how much may wait: the part of a configuration that concerns the waiting line.
//!
//! Before: `Config` carries it. After: it was validated once, then trusted. Times are microseconds of the caller's clock.

use crate::error::{Error, Result};
use crate::policy::PolicyKind;
use crate::tenants::{TenantRules, check_name};

/// Priorities that a request may have; lower ones go first.
pub const PRIORITIES: std::ops::RangeInclusive<i32> = -1000..=1000;

/// Rules of the waiting line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRules {
    /// In which order waiting requests are admitted.
    pub policy: PolicyKind,
    /// `priority`: a request that has waited this long ranks one priority higher; at least 1.
    pub ageing_us: u64,
    /// `deadline`: a request without a deadline, or with a later one, is ordered as if it had this long from its submission.
    pub latest_deadline_us: u64,
    /// `prefix`: requests are ordered by their cached prefix inside bands of so many consecutive arrivals; at least 1.
    pub prefix_band: u32,
    /// Smaller requests that may be admitted before one that does not fit yet.
    pub max_pass: u32,
    /// Blocks that an admission leaves free while others run, for these to grow.
    pub watermark: u32,
    /// Whether an admission also leaves free what those that run are expected to take yet.
    pub estimate_growth: bool,
    /// Nobody is ever preempted: an admission promises the whole length that a request may have.
    pub no_evict: bool,
    /// Whether a waiting request preempts running ones of lower classes; only with policy `priority`.
    pub preempt_for_waiting: bool,
    /// Tokens of all requests that wait at once; 0 is no limit.
    pub max_waiting_tokens: u64,
    /// Blocks for the tokens of all requests that wait at once; 0 is no limit.
    pub max_waiting_blocks: u64,
    /// Rules of tenants by name.
    pub tenants: Vec<(Box<str>, TenantRules)>,
    /// Rules of every other tenant.
    pub other_tenants: TenantRules,
}

impl Default for QueueRules {
    fn default() -> Self {
        QueueRules {
            policy: PolicyKind::Fcfs,
            ageing_us: 1_000_000,
            latest_deadline_us: 60_000_000,
            prefix_band: 1024,
            max_pass: 8,
            watermark: 0,
            estimate_growth: true,
            no_evict: false,
            preempt_for_waiting: false,
            max_waiting_tokens: 0,
            max_waiting_blocks: 0,
            tenants: Vec::new(),
            other_tenants: TenantRules::default(),
        }
    }
}

impl QueueRules {
    /// Checks every bound, for a pool with so many usable blocks.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] naming the first field that breaks one.
    pub fn validate(&self, usable: u32) -> Result<()> {
        let within = |field, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::InvalidInput { field, value: i128::from(value), bound: format!("must be {low}..={high}") })
        };
        within("ageing_us", self.ageing_us, 1, 1 << 50)?;
        within("latest_deadline_us", self.latest_deadline_us, 1, 1 << 50)?;
        within("prefix_band", u64::from(self.prefix_band), 1, 1 << 24)?;
        within("max_pass", u64::from(self.max_pass), 0, 1 << 24)?;
        within("watermark", u64::from(self.watermark), 0, u64::from(usable - 1))?;
        if self.preempt_for_waiting && (self.policy != PolicyKind::Priority || self.no_evict) {
            let bound = "needs policy priority, and excludes no_evict".to_owned();
            return Err(Error::InvalidInput { field: "preempt_for_waiting", value: 1, bound });
        }
        self.other_tenants.validate()?;
        self.tenants.iter().try_for_each(|(name, rules)| check_name(name).and_then(|()| rules.validate()))
    }
}

//! In which order waiting requests are admitted: one small trait, one file for each policy.
//!
//! Before: a request joins the [line](crate::waiting_line). After: the line asks its policy for a key when it joins, never again unless
//! the policy says so, so a steady step sorts and scans nothing. Keys end with the arrival, so every order is total.
//!
//! **Starvation.** Each policy bounds the *overtakers* of a request: requests that arrive after it and are admitted before its first
//! admission. The formula stands at the head of its file; these are left out everywhere: passing while it waits for a prefix that
//! another one computes (at most as often as its prompt has blocks), and while its own tenant is at its hard quota.
//! From overtakers follow steps. At most `waiting ahead + overtakers + rows` requests end before it starts, and in every step the highest
//! of those that run computes a token, or one that is [secured](crate::secured) and for whose blocks it waits; so with `n` of them and
//! `L` = `max_model_len` it starts within `n * L` steps of running without a failed one. A request that was preempted comes back at its
//! old place in the line.

mod deadline;
mod fair;
mod fcfs;
mod prefix;
mod priority;

pub(crate) use fair::MAX_WEIGHT;

use crate::queue_rules::QueueRules;
use crate::rank::Ask;
use crate::seat_heap::Key;

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lower priority numbers first, with ageing.
    Priority,
    /// The tenant that was served least first.
    Fair,
    /// The earliest deadline first.
    Deadline,
    /// The longest cached prefix first.
    Prefix,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [PolicyKind; 5] =
        [PolicyKind::Fcfs, PolicyKind::Priority, PolicyKind::Fair, PolicyKind::Deadline, PolicyKind::Prefix];

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::Fcfs => "fcfs",
            PolicyKind::Priority => "priority",
            PolicyKind::Fair => "fair",
            PolicyKind::Deadline => "deadline",
            PolicyKind::Prefix => "prefix",
        }
    }

    /// The policy of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// An order of waiting requests. Each tenant has a line, and the line with the lowest standing goes first.
pub(crate) trait Policy: std::fmt::Debug + Send + Sync {
    /// The class of a request's rank, which never changes.
    fn class(&self, priority: i32, submitted_us: u64) -> i64 {
        let _ = (priority, submitted_us);
        0
    }

    /// The order of a request in its line, smallest first.
    fn key(&self, ask: &Ask) -> Key;

    /// Where a tenant's line, which begins with `first`, stands among the others, lowest first. Without a change of `first` it may
    /// only rise.
    fn standing(&self, line: usize, first: Key) -> Key {
        let _ = line;
        first
    }

    /// A line in which nobody stood is joined; `lowest` is the number of the one that goes first, if somebody waits.
    fn wake(&mut self, line: usize, weight: u32, lowest: Option<usize>) {
        let _ = (line, weight, lowest);
    }

    /// Nobody stands in a line any more.
    fn sleep(&mut self, line: usize) {
        let _ = line;
    }

    /// The number of a line is given to another tenant.
    fn forget(&mut self, line: usize) {
        let _ = line;
    }

    /// A line's requests were given `tokens` of work.
    fn charge(&mut self, line: usize, tokens: u64) {
        let _ = (line, tokens);
    }

    /// Whether work is charged.
    fn charges(&self) -> bool {
        false
    }

    /// Whether it orders by cached prefixes, so that these are kept up.
    fn follows_cache(&self) -> bool {
        false
    }
}

/// The policy that these rules name.
pub(crate) fn make(rules: &QueueRules) -> Box<dyn Policy> {
    match rules.policy {
        PolicyKind::Fcfs => Box::new(fcfs::Fcfs),
        PolicyKind::Priority => Box::new(priority::Priority { ageing_us: rules.ageing_us }),
        PolicyKind::Fair => Box::new(fair::Fair::default()),
        PolicyKind::Deadline => Box::new(deadline::Deadline { latest_us: rules.latest_deadline_us }),
        PolicyKind::Prefix => Box::new(prefix::Prefix { band: u64::from(rules.prefix_band) }),
    }
}

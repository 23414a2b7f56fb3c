//! What the waiting line knows of each live request, by seat: its rank, whose it is, and until when it may wait.
//!
//! Before: submit or fork. After: the line orders by it, victims are chosen by it. A rank never changes while a request lives.

use crate::tenants::Backlog;

/// Order of sequences: the smaller one is the higher. Total, since no two requests have the same arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Priority class, aged; lower goes first.
    pub class: i64,
    /// Number of the request, in the order of submissions and forks.
    pub arrival: u64,
}

/// What a request says of its turn, beside its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Lower goes first, with policy `priority`; otherwise 0.
    pub priority: i32,
    /// When it ends as expired, wherever it is; `u64::MAX` is never.
    pub deadline_us: u64,
    /// When it is refused if it was not admitted before; `u64::MAX` is never.
    pub queue_deadline_us: u64,
}

impl Default for Turn {
    fn default() -> Self {
        Turn { priority: 0, deadline_us: u64::MAX, queue_deadline_us: u64::MAX }
    }
}

/// What a request says when it is submitted, beside its prompt and its limits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// Whose it is, for policies and quotas; the empty name is a tenant like any other.
    pub tenant: &'a str,
    /// Its turn.
    pub turn: Turn,
    /// Sequences beside the first that go on from its prompt, each with outputs of its own.
    pub siblings: u32,
}

/// A live request as the line knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub rank: Rank,
    pub turn: Turn,
    /// Number of its tenant.
    pub tenant: u32,
    pub submitted_us: u64,
    /// The earlier of its two deadlines, whether it was admitted or not.
    pub due_us: u64,
    /// Blocks of its prompt that were cached when it was looked up last. Only policy `prefix` asks.
    pub cached_blocks: u32,
    /// Free blocks that it needs beside its hits, if it was found not to fit and nothing changed for it since.
    pub short_of: Option<u32>,
    /// Requests that were admitted before it although it was looked at first and did not fit.
    pub passed: u32,
    /// What it is of the queue, while it waits.
    pub backlog: Backlog,
    /// Rows up to here have been charged to its tenant.
    pub charged: u32,
}

//! One request as its caller knows it: what it asked for, what came back, and what the cold answer says must come back.

use blocktable_core::chain::{Chain, Identity};
use blocktable_core::ids::Key;
use blocktable_core::rank::{Asked, Rank};
use blocktable_core::request::Limits;

use super::oracle::ColdAnswer;

/// A request that was accepted.
#[derive(Clone, Debug)]
pub struct Client {
    pub id: u64,
    pub prompt_len: usize,
    /// Prompt, then the outputs that commits accepted.
    pub tokens: Vec<u32>,
    pub limits: Limits,
    pub identity: Identity,
    pub chain: Chain,
    pub answer: ColdAnswer,
    pub submitted_us: u64,
    /// When it was admitted for the first time.
    pub admitted_us: Option<u64>,
    /// Its row of the block tables while it runs.
    pub row: Option<i32>,
    /// It was forked, and no plan has told its row yet.
    pub is_untold: bool,
    /// The weights changed while it held rows: nothing that it computes is found by others, as long as it runs.
    pub is_mixed: bool,
    /// It was forked or truncated since it got a token: its next row may need a block to copy to.
    pub may_copy: bool,
    /// It lost what it shared, and was not planned since: it may find more than it kept.
    pub looks_again: bool,
    /// Sets its choices apart from those of requests with the same tokens.
    pub salt: u64,
    /// Rows that are confirmed while it runs.
    pub computed: usize,
    /// Rows for which its table has blocks while it runs.
    pub granted: usize,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached: Option<usize>,
    pub preemptions: u32,
    /// Forks, second sequences and truncations that it was a part of: each may cost it one preemption more than it may have.
    pub costs: u32,
    pub asked: Asked<'static>,
    /// Tokens that it had when it began to wait.
    pub queued: usize,
    pub rank: Rank,
    /// Requests behind it that were admitted before it although it did not wait for a prefix.
    pub passes: u32,
    /// Drafts that were proposed for the next plan.
    pub drafts: Vec<u32>,
    /// Sequences beside it that begin with its first output.
    pub siblings: u32,
    /// The first sequence of its request, if that has several.
    pub family: Option<u64>,
    /// End code, once it has ended.
    pub end: Option<i64>,
    /// Keys of the full blocks of `tokens`, as far as they were needed.
    pub keys: Vec<Key>,
}

impl Client {
    pub fn is_live(&self) -> bool {
        self.end.is_none()
    }

    pub fn is_running(&self) -> bool {
        self.is_live() && (self.row.is_some() || self.is_untold)
    }

    pub fn is_waiting(&self) -> bool {
        self.is_live() && self.row.is_none() && !self.is_untold
    }

    pub fn outputs(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Tokens it can have at most.
    pub fn most_tokens(&self) -> usize {
        self.prompt_len + self.answer.outputs.len()
    }
}

//! One request: its tokens, how far they are computed, where their rows live, and when it ends.
//!
//! Before: submit. After: the scheduler moves it between waiting and running until it ends. Always
//! `published * block_size <= computed <= tokens`: rows count as computed when their step is committed, never when it is planned.

use crate::block_hash::{BlockHasher, Prompt};
use crate::block_table::BlockTable;
use crate::chain::Chain;
use crate::ids::{BlockId, Key, RequestId, Row, TokenId};
use crate::miss::Miss;
use crate::mutant::{self, Mutant};
use crate::retention::{Ranges, Worth};
use crate::trail::Trail;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub enum End {
    /// A stop token, or the caller saw a stop string.
    Stop = 1,
    /// `max_tokens` or `max_model_len` reached.
    Length = 2,
    /// The caller aborted it.
    Aborted = 3,
    /// Alone in the pool and still not fitting.
    Capacity = 4,
}

impl End {
    /// Whether the request ended as finished; otherwise it was aborted.
    #[must_use]
    pub fn is_finished(self) -> bool {
        matches!(self, End::Stop | End::Length)
    }
}

/// Where a live request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the waiting line; holds nothing.
    Waiting,
    /// Has a row of the block tables.
    Running(Row),
}

/// What a request may ask for, beside its prompt.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Outputs at most.
    pub max_tokens: u32,
    /// Outputs before a stop token counts.
    pub min_tokens: u32,
    /// Tokens that end the text.
    pub stop_tokens: Vec<TokenId>,
}

/// A live request. What a decode step reads comes first and fits two cache lines; the rest is touched when a block fills up.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) id: RequestId,
    /// The last step that ran it, counted from 1.
    pub(crate) planned_in: u64,
    /// Raised when what is in flight for this request stops counting.
    pub(crate) epoch: u32,
    /// The last of `tokens`.
    pub(crate) newest: TokenId,
    pub(crate) place: Place,
    /// The block of the next row may be shared or published, so that a write asks for a copy first.
    pub(crate) asks_to_write: bool,
    /// Rows that committed steps have written, or that a hit brought.
    pub(crate) computed: usize,
    /// The table of the first group.
    pub(crate) table: BlockTable,
    /// Prompt, then confirmed outputs.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_len: usize,
    pub(crate) limits: Limits,
    /// Keys of the first full blocks of `tokens`. Those of the prompt are there from submit on.
    pub(crate) keys: Vec<Key>,
    /// What the keys depend on beside the tokens.
    pub(crate) chain: Chain,
    /// What explains a miss, if that is wanted.
    pub(crate) trail: Option<Box<Trail>>,
    /// Why its prefix was found no further at the first admission.
    pub(crate) miss: Option<Miss>,
    /// The weights changed while it ran: its rows are of several versions, so none of them is published any more.
    pub(crate) is_mixed: bool,
    /// The tables of the groups behind the first, as long as `table`.
    pub(crate) others: Box<[BlockTable]>,
    /// Blocks at the head of the tables whose content this request found or published.
    pub(crate) published: usize,
    /// Blocks promised at admission and not yet taken.
    pub(crate) promised: u32,
    pub(crate) preemptions: u32,
    pub(crate) submitted_us: u64,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub(crate) cached: Option<usize>,
    /// What it asks for its blocks, if anything.
    pub(crate) retention: Option<Box<Ranges>>,
    /// Hit of the first look; used by a mutant only.
    pub(crate) first_hit: Option<usize>,
}

impl Request {
    pub(crate) fn new(id: RequestId, prompt: Prompt, limits: Limits, now_us: u64) -> Self {
        let Prompt { tokens, keys, chain, trail, generation: _ } = prompt;
        Request {
            id,
            prompt_len: tokens.len(),
            newest: tokens.last().copied().unwrap_or_default(),
            tokens,
            limits,
            submitted_us: now_us,
            place: Place::Waiting,
            asks_to_write: false,
            computed: 0,
            table: BlockTable::new(),
            others: Box::default(),
            keys,
            chain,
            trail,
            miss: None,
            is_mixed: false,
            published: 0,
            promised: 0,
            epoch: 0,
            planned_in: 0,
            preemptions: 0,
            cached: None,
            retention: None,
            first_hit: None,
        }
    }

    /// A second sequence with the same tokens, which counts the outputs so far as its own. It has no row and no block yet.
    pub(crate) fn child(&self, id: RequestId, limits: Limits, now_us: u64) -> Self {
        let (tokens, keys, chain) = (self.tokens.clone(), self.keys.clone(), self.chain.clone());
        let prompt = Prompt { tokens, keys, chain, trail: self.trail.clone(), generation: 0 };
        let (prompt_len, is_mixed, cached, miss) = (self.prompt_len, self.is_mixed, self.cached, self.miss);
        let retention = self.retention.clone();
        Request { prompt_len, is_mixed, cached, miss, retention, ..Request::new(id, prompt, limits, now_us) }
    }

    /// The tables of all groups.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        std::iter::once(&self.table).chain(&self.others)
    }

    /// The table of group `group`.
    pub(crate) fn table_of(&self, group: usize) -> &BlockTable {
        if group == 0 { &self.table } else { &self.others[group - 1] }
    }

    /// The same, to change it.
    pub(crate) fn table_of_mut(&mut self, group: usize) -> &mut BlockTable {
        if group == 0 { &mut self.table } else { &mut self.others[group - 1] }
    }

    /// Cuts the tables after `len` entries: what follows, as one list in the order of the tokens, of each block number group by
    /// group. Its release gives the last rows of all groups first, so that what is evicted of a chain is its end, in all groups.
    pub(crate) fn cut(&mut self, len: usize) -> BlockTable {
        if self.others.is_empty() {
            return self.table.split_off(len);
        }
        let mut list = BlockTable::new();
        for number in len..self.table.len() {
            list.blocks
                .extend(self.tables().map(|table| table.blocks()[number]).filter(|&block| block != BlockId::NULL));
        }
        self.table.blocks.truncate(len);
        self.others.iter_mut().for_each(|table| table.blocks.truncate(len));
        list
    }

    /// What the block that begins with token `start` is worth to it.
    pub(crate) fn worth(&self, start: usize) -> Worth {
        self.retention.as_ref().map_or(Worth::DEFAULT, |ranges| ranges.worth(start))
    }

    /// Tokens whose rows are not computed.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len().saturating_sub(self.computed)
    }

    /// Whether nothing but the newest token is left to compute.
    pub(crate) fn is_decoding(&self) -> bool {
        self.remaining() == 1
    }

    pub(crate) fn num_outputs(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Keeps the first `len` tokens, and the keys of their full blocks, of which there are `blocks`.
    pub(crate) fn keep_tokens(&mut self, len: usize, blocks: usize) {
        self.tokens.truncate(len);
        self.newest = self.tokens[len - 1];
        self.prompt_len = self.prompt_len.min(len);
        self.keys.truncate(blocks);
        if let Some(trail) = &mut self.trail {
            trail.truncate(blocks);
        }
    }

    /// Forgets all keys: the weights changed.
    pub(crate) fn forget_keys(&mut self) {
        self.keys.clear();
        if let Some(trail) = &mut self.trail {
            trail.restart();
        }
    }

    /// Makes the missing keys of the full blocks of the first `tokens` tokens, by the fields that the prompt came with.
    pub(crate) fn extend_keys(&mut self, hasher: &mut BlockHasher, tokens: usize) {
        if mutant::is_on(Mutant::OutputsWithoutChain) {
            hasher.extend(&hasher.plain_chain(), &mut self.keys, &self.tokens[..tokens]);
            return;
        }
        hasher.extend(&self.chain, &mut self.keys, &self.tokens[..tokens]);
        if let Some(trail) = &mut self.trail {
            trail.extend(hasher, &self.tokens[..tokens]);
        }
    }

    /// Appends an output; the end that it brings, if any. A stop token comes before a limit that is reached at once.
    pub(crate) fn push(&mut self, token: TokenId, max_model_len: usize) -> Option<End> {
        self.tokens.push(token);
        self.newest = token;
        let outputs = self.num_outputs();
        let may_stop = outputs >= self.limits.min_tokens as usize || mutant::is_on(Mutant::MinTokensIgnored);
        if may_stop && self.limits.stop_tokens.contains(&token) {
            return Some(End::Stop);
        }
        if outputs >= self.limits.max_tokens as usize || self.tokens.len() >= max_model_len {
            return Some(End::Length);
        }
        None
    }

    /// Forgets rows and place; the tokens stay. The table must have been given back.
    pub(crate) fn forget_rows(&mut self) {
        debug_assert!(self.table.is_empty());
        self.place = Place::Waiting;
        self.asks_to_write = false;
        self.computed = 0;
        self.published = 0;
        self.promised = 0;
        if std::mem::take(&mut self.is_mixed) {
            self.forget_keys();
        }
        self.epoch += 1;
        if mutant::is_on(Mutant::TailLostOnPreempt) {
            self.tokens.truncate(self.prompt_len);
            self.newest = self.tokens[self.prompt_len - 1];
        }
    }
}

//! Sizes and limits of one scheduler: validated once, then trusted.

use crate::block_hash::{Algorithm, BlockHasher};
use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::events::MAX_EVENTS;
use crate::flight::MAX_DEPTH;
use crate::free_queue::MAX_BLOCKS;
use crate::group::{self, GroupSpec};
use crate::queue_rules::QueueRules;
use crate::shares::{self, DomainShare};

/// Entries of all block tables together: 8 GiB.
const MAX_TABLE_ENTRIES: u64 = 1 << 31;

/// What a scheduler is made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// KV blocks in all; block 0 is the null block.
    pub num_blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Tokens of a request, prompt and outputs together.
    pub max_model_len: u32,
    /// Requests that run at once.
    pub max_num_seqs: u32,
    /// Tokens a step, prefill and decode together.
    pub max_num_batched_tokens: u32,
    /// Requests that wait at once.
    pub max_waiting: u32,
    /// Tokens that one request may prefill in a step; 0 is no limit but the budget.
    pub long_prefill_threshold: u32,
    /// Plans made before the oldest step in flight is committed, it included: 1, or 2 to make the next plan while the model runs.
    pub overlap_depth: u32,
    /// Draft tokens that [`propose`](crate::scheduler::Scheduler::propose) may give a sequence for one step; 0 = none.
    pub max_draft_tokens: u32,
    /// How often a request may be preempted: after that it is admitted only with all that it may ever need, and is no victim.
    pub max_preemptions: u32,
    /// The layers' groups, each with its own tables over the one pool.
    pub groups: Vec<GroupSpec>,
    /// Whether full blocks are found again by their content.
    pub enable_prefix_caching: bool,
    /// What makes the keys.
    pub hash_algorithm: Algorithm,
    /// Separates deployments that must not share keys.
    pub hash_seed: Vec<u8>,
    /// KV events that a reader can be behind without losing any; 0 = none are recorded.
    pub event_buffer_size: u32,
    /// Number format and layout of the rows: other ones, other keys.
    pub kv_layout: Vec<u8>,
    /// Which weights compute the rows: others, other keys.
    pub weights_version: Vec<u8>,
    /// Whether the scheduler remembers what was published, so as to tell why a prefix was found no further.
    pub explain_misses: bool,
    /// Blocks that pins may hold together.
    pub pin_budget: u32,
    /// Content of these tenants that others do not evict: see [`shares`](crate::shares).
    pub domain_shares: Vec<DomainShare>,
    /// Whether the first rows of a full block are reused by copying them, and hits are compared token by token.
    pub enable_partial_hits: bool,
    /// Who goes first and how much may wait.
    pub queue: QueueRules,
}

impl Config {
    /// These sizes, and for the rest what Python's `Scheduler` has by default.
    #[must_use]
    pub fn new(num_blocks: u32, block_size: u32, vocab_size: u32, max_model_len: u32) -> Config {
        Config {
            num_blocks,
            block_size,
            vocab_size,
            max_model_len,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_waiting: 4096,
            long_prefill_threshold: 0,
            max_preemptions: 16,
            overlap_depth: 1,
            max_draft_tokens: 0,
            groups: vec![GroupSpec::FULL],
            enable_prefix_caching: true,
            hash_algorithm: Algorithm::DEFAULT,
            hash_seed: Vec::new(),
            event_buffer_size: 0,
            kv_layout: Vec::new(),
            weights_version: Vec::new(),
            explain_misses: false,
            pin_budget: 0,
            domain_shares: Vec::new(),
            enable_partial_hits: false,
            queue: QueueRules::default(),
        }
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] naming the first field that breaks one.
    pub fn validate(&self) -> Result<()> {
        let at_most = |field, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::InvalidInput { field, value: i128::from(value), bound: format!("must be {low}..={high}") })
        };
        at_most("num_blocks", self.num_blocks, 2, MAX_BLOCKS)?;
        at_most("block_size", self.block_size, 1, 4096)?;
        at_most("vocab_size", self.vocab_size, 1, i32::MAX as u32)?;
        at_most("max_model_len", self.max_model_len, 2, 1 << 27)?;
        at_most("max_num_seqs", self.max_num_seqs, 1, 1 << 16)?;
        at_most("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 22)?;
        at_most("max_waiting", self.max_waiting, 1, 1 << 24)?;
        at_most("long_prefill_threshold", self.long_prefill_threshold, 0, 1 << 27)?;
        at_most("overlap_depth", self.overlap_depth, 1, MAX_DEPTH)?;
        at_most("max_draft_tokens", self.max_draft_tokens, 0, 1024)?;
        at_most("event_buffer_size", self.event_buffer_size, 0, MAX_EVENTS)?;
        at_most("pin_budget", self.pin_budget, 0, self.num_blocks - 1)?;
        shares::check(&self.domain_shares, self.num_blocks - 1)?;
        group::check(&self.groups)?;
        self.check_tables()?;
        self.queue.validate(self.num_blocks - 1)?;
        self.hasher().map(drop)
    }

    /// The block tables of all rows and groups are memory that is taken at once.
    fn check_tables(&self) -> Result<()> {
        let row = u64::from(self.max_blocks()) * self.groups.len() as u64;
        let most = MAX_TABLE_ENTRIES / row;
        if u64::from(self.rows()) <= most {
            return Ok(());
        }
        let bound = format!("must be at most {most}, with {row} entries of the block tables for each");
        Err(Error::InvalidInput { field: "max_num_seqs", value: i128::from(self.rows()), bound })
    }

    /// What makes the keys.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if vLLM's keys are wanted and have no place for the seed, the layout or the weights.
    pub fn hasher(&self) -> Result<BlockHasher> {
        if self.hash_algorithm.vllm_format().is_some() {
            let refused = |field, value: usize, bound: &str| {
                let bound = format!("{bound} with hash_algorithm {}", self.hash_algorithm.name());
                Err(Error::InvalidInput { field, value: value as i128, bound })
            };
            if let Err(error) = std::str::from_utf8(&self.hash_seed) {
                return refused("hash_seed", error.valid_up_to(), "bytes are UTF-8: all must be");
            }
            if !self.kv_layout.is_empty() {
                return refused("kv_layout", self.kv_layout.len(), "bytes: must be empty");
            }
        }
        let hasher = BlockHasher::new(self.hash_algorithm, self.block_size, &self.hash_seed);
        let hasher = hasher.with_layout(&self.kv_layout).with_weights(&self.weights_version)?;
        let hasher = hasher.with_shares(&self.domain_shares);
        if !self.enable_prefix_caching {
            return Ok(hasher.without_keys());
        }
        Ok(if self.explain_misses { hasher.explaining() } else { hasher })
    }

    /// Requests that run at once: no more than the tokens of a step, so that each running one gets a token in every step.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.max_num_seqs.min(self.max_num_batched_tokens)
    }

    /// Tokens that a step samples at most: one for each sequence, and one for each draft.
    #[must_use]
    pub fn samples(&self) -> usize {
        let rows = self.rows() as usize;
        // Sequences that share a prompt sample its last row, each for the row that is kept for it.
        (rows * (1 + self.max_draft_tokens as usize)).min(rows + self.max_num_batched_tokens as usize)
    }

    /// Rows of one sequence that a step computes at most.
    #[must_use]
    pub fn max_chunk(&self) -> usize {
        let budget = self.max_num_batched_tokens.min(self.max_model_len);
        match self.long_prefill_threshold {
            0 => budget as usize,
            threshold => budget.min(threshold) as usize,
        }
    }

    /// Columns of the block tables.
    #[must_use]
    pub fn max_blocks(&self) -> u32 {
        BlockSize::new(self.block_size).blocks_for(self.max_model_len as usize) as u32
    }
}

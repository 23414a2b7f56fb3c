//! A model whose answers betray every wrong KV row.
//!
//! A KV row holds (token, position). The next token is a hash of all rows that are visible through the block table, so a stale,
//! foreign, missing, shifted or half-written row changes the output. The cold answer is the same hash over the tokens themselves:
//! no cache, no blocks, no batch. Each group has its own rows, and through a window a query sees the newest rows only.

use blocktable_core::group::GroupSpec;
use blocktable_core::request::{End, Limits};

/// What one row of KV memory holds, token, position and group; `None` is poison: nothing that anybody may read.
pub type KvRow = Option<(u32, u32, u32)>;

/// Hash of no rows.
pub const NO_ROWS: u64 = 0x6A09_E667_F3BC_C908;

/// Hash of one row more.
pub fn fold(hash: u64, row: KvRow) -> u64 {
    let (token, position) = row.map_or((u64::MAX, u64::MAX), |(token, position, group)| {
        (token.into(), u64::from(group) << 32 | u64::from(position))
    });
    let mixed = (hash ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    (mixed ^ position).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(32)
}

/// The first row that the query at `position` sees in a group, by definition: none that is `window` or more before it.
pub fn first_seen(group: GroupSpec, position: usize) -> usize {
    (0..=position).find(|row| group.window.is_none_or(|window| position - row < window as usize)).expect("itself")
}

/// The hashes of all groups in one.
pub fn mix(hashes: impl Iterator<Item = u64>) -> u64 {
    hashes.fold(0, |mixed, hash| mixed.rotate_left(7) ^ hash)
}

/// The token that a hash of rows stands for.
pub fn token_of(hash: u64, vocab_size: u32) -> u32 {
    ((hash ^ (hash >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33) as u32 % vocab_size
}

/// What a request answers alone, on memory of its own, and how it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdAnswer {
    pub outputs: Vec<u32>,
    pub end: End,
}

impl ColdAnswer {
    /// Folds the prompt and outputs one by one until a rule ends them: a stop token from `min_tokens` outputs on, `max_tokens`, or
    /// `max_model_len` tokens in all. `mark` is what a row holds beside its token, by position. The tokens behind `prompt_len` count as
    /// outputs already; `salt` sets a forked request's choices apart.
    #[expect(clippy::too_many_arguments, reason = "all that an answer depends on")]
    pub fn of(
        tokens: &[u32],
        prompt_len: usize,
        salt: u64,
        limits: &Limits,
        vocab_size: u32,
        max_model_len: u32,
        groups: &[GroupSpec],
        mark: impl Fn(usize) -> u32,
    ) -> Self {
        let mut tokens = tokens.to_vec();
        let mut hashes = vec![NO_ROWS; groups.len()];
        let mut folded = 0;
        loop {
            for (number, &group) in groups.iter().enumerate() {
                let mut first = folded;
                if group.window.is_some() {
                    hashes[number] = NO_ROWS;
                    first = first_seen(group, tokens.len() - 1);
                }
                let rows = tokens.iter().enumerate().skip(first);
                hashes[number] = rows.fold(hashes[number], |hash, (position, &token)| {
                    fold(hash, Some((token ^ mark(position), position as u32, number as u32)))
                });
            }
            folded = tokens.len();
            let hash = mix(hashes.iter().copied());
            let token = token_of(hash ^ salt, vocab_size);
            tokens.push(token);
            let outputs = (tokens.len() - prompt_len) as u32;
            let end = if outputs >= limits.min_tokens && limits.stop_tokens.contains(&token) {
                End::Stop
            } else if outputs >= limits.max_tokens || tokens.len() as u32 >= max_model_len {
                End::Length
            } else {
                continue;
            };
            return ColdAnswer { outputs: tokens.split_off(prompt_len), end };
        }
    }
}

/// The KV memory, and the model that reads and writes it.
#[derive(Clone, Debug)]
pub struct KvMemory {
    rows: Vec<KvRow>,
    block_size: usize,
}

impl KvMemory {
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        KvMemory { rows: vec![None; (num_blocks * block_size) as usize], block_size: block_size as usize }
    }

    pub fn read(&self, slot: i64) -> KvRow {
        self.rows[slot as usize]
    }

    pub fn write(&mut self, slot: i64, row: KvRow) {
        self.rows[slot as usize] = row;
    }

    /// Group, source block, target block, rows.
    pub fn copy(&mut self, [_, source, target, rows]: [i32; 4]) {
        let start = |block: i32| block as usize * self.block_size;
        let (from, to) = (start(source), start(target));
        self.rows.copy_within(from..from + rows as usize, to);
    }

    /// Nobody may read this block any more.
    pub fn poison(&mut self, block: u32) {
        let start = block as usize * self.block_size;
        self.rows[start..start + self.block_size].fill(None);
    }

    /// Hash of the rows `first..=last` behind `table`, a row of the block tables.
    pub fn hash_through(&self, table: &[i32], first: usize, last: usize) -> u64 {
        let row = |position: usize| {
            self.rows[table[position / self.block_size] as usize * self.block_size + position % self.block_size]
        };
        (first..=last).fold(NO_ROWS, |hash, position| fold(hash, row(position)))
    }
}

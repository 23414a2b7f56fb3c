//! The names of things: blocks, keys, requests, rows, steps. No bare integers elsewhere.
//!
//! Between the border and the arrays of a plan a number that means something has one of these types.

use std::num::NonZeroU32;
use std::sync::LazyLock;

use crate::group::MAX_GROUPS;
use crate::mutant::{self, Mutant};

/// Index of one physical KV block; always below the pool's `num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// The null block: id 0, never handed out, named by table entries that have no memory behind them.
    pub const NULL: BlockId = BlockId(0);

    /// The id as a plain number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The id as an index into per-block arrays.
    #[must_use]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One token of the model's vocabulary.
pub type TokenId = u32;

/// Name of a full block's content: a cryptographic hash of all tokens up to its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// The key before the first block of a chain.
    pub const ROOT: Key = Key([0; 32]);

    /// The name of the same tokens' content in group `group`, so that one hash serves all groups. Group 0 has the key itself.
    #[must_use]
    #[inline]
    pub fn in_group(&self, group: usize) -> Key {
        if group == 0 || mutant::is_on(Mutant::OneKeyForAllGroups) {
            return *self;
        }
        let mask = &GROUP_MASKS[group];
        Key(std::array::from_fn(|i| self.0[i] ^ mask[i]))
    }

    /// 64 bits of the key. It is uniform already, so a hash table needs no further hash.
    #[must_use]
    pub fn short(&self) -> u64 {
        let mut low = [0; 8];
        low.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(low)
    }
}

/// What sets the keys of each group apart: 256 bits that no chain of hashes meets.
static GROUP_MASKS: LazyLock<[[u8; 32]; MAX_GROUPS]> = LazyLock::new(|| {
    std::array::from_fn(|group| blake3::derive_key("blocktable 2026-11 group of a key v1", &[group as u8]))
});

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({:016x}..)", self.short())
    }
}

/// One submission. Given in order of arrival and never given again, so it is the request's rank too:
/// the lower id arrived first and ranks higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One plan, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// Row of a running request in the persistent block tables; stable while it runs. Its number is one more than the row's, so that no row
/// takes no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row(NonZeroU32);

impl Row {
    pub(crate) fn new(index: u32) -> Self {
        Row(NonZeroU32::MIN.saturating_add(index))
    }

    /// The row as an index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

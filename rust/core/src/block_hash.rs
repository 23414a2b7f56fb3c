//! Chained keys of full blocks: what is and is not in a key (design 4).
//!
//! `key = hash(domain; parent key, tokens)`. The domain (version, algorithm, block size, seed) enters once, as BLAKE3's key or as
//! SHA-256's first parent; after that every input of a chain has the same length, so the encoding is injective.
//! A 16-token block hashes 32 + 64 bytes: two compressions of either algorithm. Keys depend on nothing of this process or
//! machine: the same seed gives the same keys anywhere.

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::ids::{Key, TokenId};
use crate::mutant::{self, Mutant};

/// Names this encoding. A change of the encoding changes the name, so that old keys match nothing.
const DOMAIN: &str = "blocktable 2026-11 block key v1";

/// Which cryptographic hash makes the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// BLAKE3 in keyed mode, 256 bits.
    Blake3,
    /// SHA-256.
    Sha256,
}

impl Algorithm {
    /// The faster of the two for a 16-token block on processors with SHA instructions, where serving runs: `blocktable bench hash`
    /// shows both.
    pub const DEFAULT: Algorithm = Algorithm::Sha256;

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
        }
    }

    /// The algorithm of this name.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        match name {
            "blake3" => Some(Algorithm::Blake3),
            "sha256" => Some(Algorithm::Sha256),
            _ => None,
        }
    }
}

/// Makes the keys of one domain.
#[derive(Clone)]
pub struct BlockHasher {
    algorithm: Algorithm,
    block_size: usize,
    /// BLAKE3's key.
    domain: [u8; 32],
    /// Parent of the first block of a chain.
    root: Key,
    /// Parent key and tokens, laid out for one call.
    input: Vec<u8>,
}

impl BlockHasher {
    /// A hasher for blocks of `block_size` tokens; `seed` separates deployments that must not share keys.
    #[must_use]
    pub fn new(algorithm: Algorithm, block_size: u32, seed: &[u8]) -> Self {
        let mut material = Vec::with_capacity(16 + seed.len());
        material.extend_from_slice(&block_size.to_le_bytes());
        material.extend_from_slice(&(seed.len() as u64).to_le_bytes());
        material.extend_from_slice(seed);
        let (domain, root) = match algorithm {
            Algorithm::Blake3 => (blake3::derive_key(DOMAIN, &material), Key::ROOT),
            Algorithm::Sha256 => {
                let mut hash = Sha256::new_with_prefix(DOMAIN);
                hash.update(&material);
                ([0; 32], Key(hash.finalize().into()))
            }
        };
        let block_size = block_size as usize;
        BlockHasher { algorithm, block_size, domain, root, input: vec![0; 32 + 4 * block_size] }
    }

    /// Key of the block that holds `tokens` behind `parent`; `None` is the start of a chain.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] unless there are exactly `block_size` tokens.
    pub fn key(&mut self, parent: Option<&Key>, tokens: &[TokenId]) -> Result<Key> {
        if tokens.len() != self.block_size {
            let bound = format!("a key names exactly {} tokens", self.block_size);
            return Err(Error::InvalidInput { field: "tokens", value: tokens.len() as i128, bound });
        }
        let parent = if mutant::is_on(Mutant::KeyWithoutParent) { None } else { parent };
        self.input[..32].copy_from_slice(&parent.unwrap_or(&self.root).0);
        for (bytes, token) in self.input[32..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        Ok(Key(match self.algorithm {
            Algorithm::Blake3 => blake3::keyed_hash(&self.domain, &self.input).into(),
            Algorithm::Sha256 => Sha256::digest(&self.input).into(),
        }))
    }

    /// Appends the keys of all full blocks of `tokens` from block `keys.len()` on.
    pub fn extend(&mut self, keys: &mut Vec<Key>, tokens: &[TokenId]) {
        let from = keys.len() * self.block_size;
        for block in tokens[from.min(tokens.len())..].chunks_exact(self.block_size) {
            let key = self.key(keys.last(), block).expect("chunks are whole blocks");
            keys.push(key);
        }
    }
}

/// Tokens with the keys of their full blocks. Only a hasher makes it, so that keys and tokens cannot disagree.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) keys: Vec<Key>,
}

impl BlockHasher {
    /// Makes the keys of a prompt. The long part of a submit: it needs no lock on the scheduler.
    #[must_use]
    pub fn prompt(&self, tokens: Vec<TokenId>) -> Prompt {
        let mut keys = Vec::with_capacity(tokens.len() / self.block_size);
        self.clone().extend(&mut keys, &tokens);
        Prompt { tokens, keys }
    }
}

impl BlockHasher {
    /// Keys of the full blocks of `tokens`, which follow the block of key `parent`; `None` is the start of a chain.
    #[must_use]
    pub fn keys_behind(&self, parent: Option<&Key>, tokens: &[TokenId]) -> Vec<Key> {
        let mut hasher = self.clone();
        let mut keys = Vec::with_capacity(tokens.len() / self.block_size);
        for block in tokens.chunks_exact(self.block_size) {
            let key = hasher.key(keys.last().or(parent), block).expect("chunks are whole blocks");
            keys.push(key);
        }
        keys
    }
}

impl Prompt {
    /// Tokens without keys, for a scheduler that caches no prefixes.
    #[must_use]
    pub fn without_keys(tokens: Vec<TokenId>) -> Prompt {
        Prompt { tokens, keys: Vec::new() }
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The keys of its full blocks.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(hasher: &mut BlockHasher, tokens: &[TokenId]) -> Vec<Key> {
        let mut keys = Vec::new();
        hasher.extend(&mut keys, tokens);
        keys
    }

    #[test]
    fn a_chain_has_a_key_for_each_full_block_and_may_be_extended_in_pieces() {
        for algorithm in [Algorithm::Blake3, Algorithm::Sha256] {
            let mut hasher = BlockHasher::new(algorithm, 4, b"");
            let tokens: Vec<TokenId> = (0..19).collect();
            let whole = chain(&mut hasher, &tokens);
            assert_eq!(whole.len(), 4);
            let mut pieces = Vec::new();
            for end in 0..=tokens.len() {
                hasher.extend(&mut pieces, &tokens[..end]);
            }
            assert_eq!(pieces, whole);
        }
    }

    #[test]
    fn equal_tokens_behind_different_parents_have_different_keys() {
        let mut hasher = BlockHasher::new(Algorithm::Blake3, 2, b"");
        let (a, b) = (chain(&mut hasher, &[1, 2, 9, 9]), chain(&mut hasher, &[1, 3, 9, 9]));
        assert_ne!(a[1], b[1]);
        assert_ne!(a[1], hasher.key(None, &[9, 9]).unwrap());
    }

    #[test]
    fn seed_block_size_and_algorithm_separate_domains() {
        let key = |algorithm, size: u32, seed: &[u8]| {
            let mut hasher = BlockHasher::new(algorithm, size, seed);
            hasher.key(None, &vec![7; size as usize]).unwrap()
        };
        let keys = [
            key(Algorithm::Blake3, 4, b""),
            key(Algorithm::Blake3, 4, b"x"),
            key(Algorithm::Blake3, 5, b""),
            key(Algorithm::Sha256, 4, b""),
            key(Algorithm::Sha256, 4, b"x"),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b));
        }
    }

    #[test]
    fn keys_are_the_same_in_every_process() {
        let mut hasher = BlockHasher::new(Algorithm::Sha256, 2, b"golden");
        assert_eq!(hasher.key(None, &[1, 2]).unwrap(), hasher.key(None, &[1, 2]).unwrap());
        assert_eq!(hasher.key(None, &[1, 2]).unwrap().short(), GOLDEN_SHA256);
        let mut hasher = BlockHasher::new(Algorithm::Blake3, 2, b"golden");
        assert_eq!(hasher.key(None, &[1, 2]).unwrap().short(), GOLDEN_BLAKE3);
    }

    const GOLDEN_SHA256: u64 = 1_778_865_383_768_689_956;
    const GOLDEN_BLAKE3: u64 = 11_712_808_358_438_595_987;

    #[test]
    fn a_key_names_whole_blocks_only() {
        let mut hasher = BlockHasher::new(Algorithm::Blake3, 4, b"");
        assert!(matches!(hasher.key(None, &[1, 2, 3]), Err(Error::InvalidInput { field: "tokens", value: 3, .. })));
    }
}

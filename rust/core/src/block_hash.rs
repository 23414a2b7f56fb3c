//! Chained keys of full blocks: `key = hash(parent key, tokens, what is particular to the block)` (design 4).
//!
//! Before: a [`Chain`] says who may share and what is particular; the bytes are those of [`key_encoding`], or of vLLM
//! ([`vllm_encoding`](crate::vllm_encoding)). After: the prefix index finds blocks by their keys. What is constant along a chain enters
//! once, in the root that is the parent of its first block. Keys depend on nothing of this process or machine: the same seed gives the
//! same keys anywhere.

use std::sync::Arc;

use crate::block_size::BlockSize;
use crate::chain::{Adapter, Chain, Domain, Extras, Identity};
use crate::error::{Error, Result};
use crate::ids::{Key, TokenId};
use crate::key_encoding::{self, Constant};
use crate::mutant::{self, Mutant};
use crate::partial_index::least_rows;
use crate::sha256;
use crate::shares::{self, DomainShare};
use crate::trail::Trail;
use crate::vllm_encoding;

pub use crate::algorithm::Algorithm;
pub use crate::prompt::Prompt;

/// Makes the keys of one pool.
#[derive(Clone)]
pub struct BlockHasher {
    algorithm: Algorithm,
    makes_keys: bool,
    /// Prompts get a trail too.
    explains: bool,
    block_size: usize,
    seed: Box<[u8]>,
    layout: Box<[u8]>,
    /// Empty: the weights never change.
    weights: Box<[u8]>,
    /// How often the weights changed.
    pub(crate) generation: u32,
    /// BLAKE3's key.
    domain: [u8; 32],
    /// Root of a chain of [`Domain::Deployment`] without an adapter.
    deployment: Key,
    /// What is hashed, laid out for one call. Kept for its memory.
    input: Vec<u8>,
    /// Tenants whose content has a share, in the order of their shares.
    sharers: Arc<[Box<[u8]>]>,
    /// A block of which only the head is known. Kept for its memory.
    head: Vec<TokenId>,
}

/// Names of successive full blocks of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Number of the first of them.
    pub first: usize,
    /// Their keys.
    pub keys: Vec<Key>,
    /// The keys of their heads, by which parts of them are found; none if that is not wanted.
    pub heads: Vec<Key>,
}

impl BlockHasher {
    /// A hasher for blocks of `block_size` tokens; `seed` separates deployments that must not share keys. For vLLM's algorithms it is
    /// the text that vLLM takes from `PYTHONHASHSEED`; empty is its fixed default.
    #[must_use]
    pub fn new(algorithm: Algorithm, block_size: u32, seed: &[u8]) -> Self {
        let hasher = BlockHasher {
            algorithm,
            makes_keys: true,
            explains: false,
            block_size: block_size as usize,
            seed: seed.into(),
            layout: Box::default(),
            weights: Box::default(),
            generation: 0,
            domain: [0; 32],
            deployment: Key::ROOT,
            input: Vec::with_capacity(128 + 4 * block_size as usize),
            sharers: Arc::default(),
            head: Vec::new(),
        };
        hasher.rooted()
    }

    /// The same for rows of another number format or layout. vLLM's keys do not depend on it.
    #[must_use]
    pub fn with_layout(mut self, layout: &[u8]) -> Self {
        self.layout = layout.into();
        self.rooted()
    }

    /// The same for other weights: none of its keys is one of before. Empty is a version like any other.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the version has no place in vLLM's keys, or is too long.
    pub fn with_weights(mut self, version: &[u8]) -> Result<Self> {
        let most = if self.algorithm.vllm_format().is_some() { 0 } else { crate::chain::MAX_NAME };
        if version.len() > most {
            let bound = format!("bytes: must be at most {most} with hash_algorithm {}", self.algorithm.name());
            return Err(Error::InvalidInput { field: "weights_version", value: version.len() as i128, bound });
        }
        if *self.weights != *version {
            self.weights = version.into();
            self.generation += 1;
        }
        Ok(self)
    }

    /// The same; the chains of these tenants say that they have a share.
    #[must_use]
    pub(crate) fn with_shares(mut self, shares: &[DomainShare]) -> Self {
        self.sharers = shares.iter().map(|share| share.domain.clone()).collect();
        self
    }

    /// Whose share the blocks of `identity` count to, and from which on.
    fn owner(&self, identity: &Identity) -> (u8, usize) {
        let at = match &identity.domain {
            Domain::Public => return (shares::PUBLIC, 0),
            Domain::Deployment => None,
            Domain::Tenant(name) => self.sharers.iter().position(|sharer| **sharer == **name),
        };
        (shares::owner(at), identity.public_tokens / self.block_size)
    }

    /// The same, with what it takes to explain misses: one more hash a block.
    #[must_use]
    pub fn explaining(mut self) -> Self {
        self.explains = true;
        self
    }

    /// Tokens a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// What makes the keys.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Which weights compute the rows.
    #[must_use]
    pub fn weights(&self) -> &[u8] {
        &self.weights
    }

    /// The chain of a prompt of `prompt_len` tokens.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the first field that breaks a bound, or that vLLM's keys have no place for.
    pub fn chain(&mut self, mut identity: Identity, prompt_len: usize) -> Result<Chain> {
        identity.validate(prompt_len)?;
        if self.algorithm.vllm_format().is_some() {
            check_vllm(&identity, self.algorithm)?;
            return Ok(Chain::new(self.deployment, identity, self.block_size, true));
        }
        let start = if identity.public_tokens > 0 { &Domain::Public } else { &identity.domain };
        let root = if *start == Domain::Deployment && identity.adapter.is_none() {
            self.deployment
        } else {
            self.root(start, identity.adapter.as_ref())
        };
        let (owner, first) = self.owner(&identity);
        Ok(Chain::new(root, identity, self.block_size, false).owned(owner, first))
    }

    /// The chain of tokens of [`Domain::Deployment`] and nothing else.
    #[must_use]
    pub fn plain_chain(&self) -> Chain {
        Chain::plain(self.deployment)
    }

    /// Key of block `at` of `chain`, which holds `tokens` behind the block of key `parent`; block 0 has no parent. A block that
    /// may be reused, and has its tokens from elsewhere, is verified by the same call: with our parent and our chain over its tokens.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] unless there are exactly `block_size` tokens, and a parent exactly where there is a block before.
    pub fn block_key(&mut self, chain: &Chain, at: usize, parent: Option<&Key>, tokens: &[TokenId]) -> Result<Key> {
        if tokens.len() != self.block_size {
            let bound = format!("a key names exactly {} tokens", self.block_size);
            return Err(Error::InvalidInput { field: "tokens", value: tokens.len() as i128, bound });
        }
        if (at == 0) != parent.is_none() {
            let bound = "every block but the first has a parent".to_owned();
            return Err(Error::InvalidInput { field: "block", value: at as i128, bound });
        }
        let parent = parent.filter(|_| !mutant::is_on(Mutant::KeyWithoutParent)).copied();
        let parent = parent.unwrap_or_else(|| self.first_parent(chain));
        Ok(self.key_behind(&parent, chain.extras.as_deref(), at, tokens))
    }

    /// Key of the `tokens` of block `at`, behind the block or root of key `parent`.
    fn key_behind(&mut self, parent: &Key, extras: Option<&Extras>, at: usize, tokens: &[TokenId]) -> Key {
        let forgets =
            [Mutant::TokensNotCompared, Mutant::TokensOfFirstGroup, Mutant::KeyWithoutLastToken].map(mutant::is_on);
        let forgets = forgets.contains(&true);
        let shorter = if forgets { [&tokens[..tokens.len() - 1], &[0]].concat() } else { Vec::new() };
        let tokens = if forgets { &shorter } else { tokens };
        self.input.clear();
        if let Some(format) = self.algorithm.vllm_format() {
            let extras = extras.map(|extras| extras.vllm_extras(at, self.block_size)).unwrap_or_default();
            format.write_block(&mut self.input, parent, tokens, &extras);
        } else if let Some(extras) = extras {
            let fields = extras.fields(at, self.block_size);
            key_encoding::write_block(&mut self.input, parent, tokens, fields);
        } else {
            key_encoding::write_block(&mut self.input, parent, tokens, []);
        }
        self.digest()
    }

    /// The same for a block that begins with `head` and holds nothing else that a token can be.
    ///
    /// # Errors
    /// As [`BlockHasher::block_key`], if `head` is longer than a block.
    pub(crate) fn head_key(&mut self, chain: &Chain, at: usize, parent: Option<&Key>, head: &[TokenId]) -> Result<Key> {
        let mut block = std::mem::take(&mut self.head);
        block.clear();
        block.extend_from_slice(head);
        block.resize(self.block_size.max(head.len()), TokenId::MAX);
        let key = self.block_key(chain, at, parent, &block);
        self.head = block;
        key
    }

    /// Appends the keys of all full blocks of `tokens`, the tokens of `chain` from its start, from block `keys.len()` on.
    pub fn extend(&mut self, chain: &Chain, keys: &mut Vec<Key>, tokens: &[TokenId]) {
        let first = keys.len();
        let from = first * self.block_size;
        for (at, block) in tokens[from.min(tokens.len())..].chunks_exact(self.block_size).enumerate() {
            let key = self.block_key(chain, first + at, keys.last(), block).expect("chunks are whole blocks");
            keys.push(key);
        }
    }

    /// The same for tokens of a chain without fields, of which some keys are there.
    pub(crate) fn extend_plain(&mut self, keys: &mut Vec<Key>, tokens: &[TokenId]) {
        let from = keys.len() * self.block_size;
        for block in tokens[from.min(tokens.len())..].chunks_exact(self.block_size) {
            let key = self.key_behind(&keys[keys.len() - 1], None, keys.len(), block);
            keys.push(key);
        }
    }

    /// The same if only the key of the last block is missing, which ends with token `len` and is `newest`; false if that is not so.
    pub(crate) fn extend_by_newest(&mut self, keys: &mut Vec<Key>, len: usize, newest: &[TokenId]) -> bool {
        if newest.len() != self.block_size || (keys.len() + 1) * self.block_size != len {
            return false;
        }
        let key = self.key_behind(&keys[keys.len() - 1], None, keys.len(), newest);
        keys.push(key);
        true
    }

    /// The same for a scheduler that caches no prefixes: prompts are checked and get no keys.
    #[must_use]
    pub fn without_keys(mut self) -> Self {
        self.makes_keys = false;
        self
    }

    /// Makes the keys of a prompt. The long part of a submit: it needs no lock on the scheduler.
    ///
    /// # Errors
    /// As [`BlockHasher::chain`].
    pub fn prompt(&mut self, tokens: Vec<TokenId>, identity: Identity) -> Result<Prompt> {
        let said = (!identity.is_plain()).then(|| Box::new(identity.clone()));
        let explained = self.explains.then(|| identity.clone());
        let chain = self.chain(identity, tokens.len())?;
        let trail = explained.map(|identity| Box::new(Trail::new(self, &identity, &tokens)));
        if !self.makes_keys {
            return Ok(Prompt { tokens, keys: Vec::new(), chain, trail, generation: self.generation, said });
        }
        let mut keys = Vec::with_capacity(tokens.len() / self.block_size);
        self.extend(&chain, &mut keys, &tokens);
        Ok(Prompt { tokens, keys, chain, trail, generation: self.generation, said })
    }

    /// The same for a chain that is known already, and whose ranges, if it has any, fit the tokens.
    #[must_use]
    pub fn prompt_of(&self, chain: &Chain, tokens: Vec<TokenId>) -> Prompt {
        let mut keys = Vec::with_capacity(tokens.len() / self.block_size);
        self.clone().extend(chain, &mut keys, &tokens);
        Prompt { tokens, keys, chain: chain.clone(), trail: None, generation: self.generation, said: None }
    }

    /// Names of the full blocks of `tokens` from block `first` of `chain` on, which follow the block of key `parent`; with those of their
    /// heads, if parts of them are to be found.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] unless there is a parent exactly where there is a block before.
    pub fn names_from(
        &self,
        chain: &Chain,
        first: usize,
        parent: Option<&Key>,
        tokens: &[TokenId],
        with_heads: bool,
    ) -> Result<Names> {
        let mut hasher = self.clone();
        let least = least_rows(BlockSize::new(self.block_size as u32));
        let mut names = Names { first, keys: Vec::with_capacity(tokens.len() / self.block_size), heads: Vec::new() };
        for (at, block) in tokens.chunks_exact(self.block_size).enumerate() {
            let parent = names.keys.last().or(parent).copied();
            let key = hasher.block_key(chain, first + at, parent.as_ref(), block)?;
            if with_heads {
                names.heads.push(hasher.head_key(chain, first + at, parent.as_ref(), &block[..least])?);
            }
            names.keys.push(key);
        }
        Ok(names)
    }

    /// Parent of the first block: the root, and the version of the weights if they have one.
    fn first_parent(&mut self, chain: &Chain) -> Key {
        if self.weights.is_empty() || mutant::is_on(Mutant::WeightsForgotten) {
            return chain.root;
        }
        self.input.clear();
        let constants = [Constant::Root(&chain.root.0), Constant::Weights(&self.weights)];
        key_encoding::write_root(&mut self.input, constants);
        self.digest()
    }

    /// Sets what follows from the constants of the pool.
    fn rooted(mut self) -> Self {
        self.input.clear();
        if let Some(format) = self.algorithm.vllm_format() {
            let seed = if self.seed.is_empty() { vllm_encoding::DEFAULT_SEED.as_bytes() } else { &self.seed };
            format.write_seed(&mut self.input, seed);
            self.deployment = self.digest();
            return self;
        }
        if self.algorithm == Algorithm::Blake3 {
            self.domain = blake3::derive_key("blocktable 2026-11 block key", &self.seed);
        }
        self.deployment = self.root(&Domain::Deployment, None);
        self
    }

    pub(crate) fn root(&mut self, domain: &Domain, adapter: Option<&Adapter>) -> Key {
        let domain = match domain {
            _ if mutant::is_on(Mutant::DomainForgotten) => Constant::Deployment,
            Domain::Public => Constant::Public,
            Domain::Deployment => Constant::Deployment,
            Domain::Tenant(name) => Constant::Tenant(name),
        };
        let adapter = adapter.filter(|_| !mutant::is_on(Mutant::AdapterForgotten)).map(|adapter| {
            let load = if mutant::is_on(Mutant::AdapterLoadForgotten) { 0 } else { adapter.load };
            Constant::Adapter { name: &adapter.name, load }
        });
        self.input.clear();
        let size = Constant::BlockSize(self.block_size as u32);
        let pool = [size, Constant::Seed(&self.seed), Constant::Layout(&self.layout), domain];
        key_encoding::write_root(&mut self.input, pool.into_iter().chain(adapter));
        self.digest()
    }

    fn digest(&mut self) -> Key {
        Key(match self.algorithm {
            Algorithm::Blake3 => blake3::keyed_hash(&self.domain, &self.input).into(),
            _ => sha256::digest(&mut self.input),
        })
    }
}

/// What vLLM's keys have no place for cannot be kept apart by them.
fn check_vllm(identity: &Identity, algorithm: Algorithm) -> Result<()> {
    let refused = |field, value: usize, bound: &str| {
        let bound = format!("{bound} with hash_algorithm {}", algorithm.name());
        Err(Error::InvalidInput { field, value: value as i128, bound })
    };
    if let Domain::Tenant(name) = &identity.domain {
        return refused("domain", name.len(), "bytes: tenants cannot be kept apart");
    }
    if identity.public_tokens > 0 {
        return refused("public_tokens", identity.public_tokens, "must be 0");
    }
    if let Some(adapter) = identity.adapter.as_ref().filter(|adapter| adapter.load > 0) {
        return refused("adapter", adapter.load as usize, "the load number must be 0");
    }
    let is_whole = |salt: &crate::chain::Salt| salt.start == 0 && salt.end == usize::MAX;
    if identity.salts.len() > 1 || identity.salts.iter().any(|salt| !is_whole(salt)) {
        return refused("cache_salt", identity.salts.len(), "must be one salt for the whole prompt");
    }
    let adapter = identity.adapter.iter().flat_map(|adapter| [("adapter", &adapter.name), ("adapter", &adapter.path)]);
    let salts = identity.salts.iter().map(|salt| ("cache_salt", &salt.salt));
    let media = identity.media.iter().map(|item| ("media", &item.id));
    for (field, text) in adapter.chain(salts).chain(media) {
        if let Err(error) = std::str::from_utf8(text) {
            return refused(field, error.valid_up_to(), "bytes are UTF-8: all must be");
        }
    }
    Ok(())
}

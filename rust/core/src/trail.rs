//! What a request needs to be told why its prefix was found no further: prints of its content, and of who computes it.
//!
//! Before: a hasher that explains makes it with the prompt's keys, at the cost of one more hash a block. After: `explain.rs` asks and
//! notes. The content of a block is the chain of its tokens and media alone, as if everybody shared it.

use crate::block_hash::BlockHasher;
use crate::chain::{Chain, Domain, Identity};
use crate::ids::{Key, TokenId};
use crate::miss::Print;

/// The prints of one chain.
#[derive(Clone, Debug)]
pub(crate) struct Trail {
    content: Chain,
    keys: Vec<Key>,
    /// Blocks that are wholly public.
    public_blocks: usize,
    /// Domain, and domain and adapter, of public blocks and of others.
    computed_by: [[u64; 2]; 2],
}

impl Trail {
    /// The trail of a prompt whose identity has been checked.
    pub fn new(hasher: &mut BlockHasher, identity: &Identity, prompt: &[TokenId]) -> Self {
        let content = Identity { media: identity.media.clone(), ..Identity::of(Domain::Public) };
        let content = hasher.chain(content, prompt.len()).expect("checked");
        let adapter = identity.adapter.as_ref();
        let mut prints = |domain| [hasher.root(domain, None).short(), hasher.root(domain, adapter).short()];
        let computed_by = [prints(&Domain::Public), prints(&identity.domain)];
        let public_blocks = identity.public_tokens / hasher.block_size();
        let mut trail = Trail { content, keys: Vec::new(), public_blocks, computed_by };
        trail.extend(hasher, prompt);
        trail
    }

    /// Goes on to the last full block of `tokens`.
    pub fn extend(&mut self, hasher: &mut BlockHasher, tokens: &[TokenId]) {
        hasher.extend(&self.content, &mut self.keys, tokens);
    }

    /// Only the first `blocks` blocks are left.
    pub fn truncate(&mut self, blocks: usize) {
        self.keys.truncate(blocks);
    }

    /// The weights changed.
    pub fn restart(&mut self) {
        self.keys.clear();
    }

    /// Block `at`, whose key is `key`. It must have been reached.
    pub fn print(&self, at: usize, key: &Key) -> Print {
        let [domain, computed_by] = self.computed_by[usize::from(at >= self.public_blocks)];
        Print { content: self.keys[at].short(), key: key.short(), computed_by, domain }
    }
}

//! What the content of a row depends on beside its token: who may see it, and what computed it.
//!
//! Before: a request's identity. After: the oracle's rows carry the mark, so that a row which a request may not find changes its
//! answer. A range that touches a block marks all of it, since blocks are what is shared.

use std::hash::{DefaultHasher, Hash, Hasher};

use blocktable_core::chain::{Domain, Identity};

/// The mark of row `position`; 0 for what everybody of a deployment shares.
pub fn mark(identity: &Identity, position: usize, block_size: usize) -> u32 {
    let block = position / block_size;
    let (start, end) = (block * block_size, (block + 1) * block_size);
    let mut hash = DefaultHasher::new();
    let mut is_marked = false;
    let mut add = |what: &str, bytes: &[u8], number: i64| {
        (what, bytes, number).hash(&mut hash);
        is_marked = true;
    };
    let is_public = identity.public_tokens > 0 && end <= identity.public_tokens;
    match &identity.domain {
        Domain::Tenant(name) if !is_public => add("tenant", name, 0),
        Domain::Deployment | Domain::Tenant(_) | Domain::Public => {}
    }
    if let Some(adapter) = &identity.adapter {
        add("adapter", &adapter.name, adapter.load as i64);
    }
    for salt in identity.salts.iter().filter(|salt| salt.start < end && start < salt.end) {
        add("salt", &salt.salt, 0);
    }
    for item in identity.media.iter().filter(|item| item.start < end && start < item.end) {
        add("media", &item.id, item.start as i64 - start as i64);
    }
    if is_marked { hash.finish() as u32 | 1 } else { 0 }
}

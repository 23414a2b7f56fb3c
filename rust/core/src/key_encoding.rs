//! The bytes that a key is a hash of, and the way back from them: equal bytes mean equal meaning.
//!
//! Before: [`Chain`](crate::chain::Chain) says what is particular to a block. After: [`BlockHasher`](crate::block_hash::BlockHasher)
//! hashes the bytes. A block is its parent key, its tokens, and its particular fields, if it has any; a root is the name of this
//! encoding and the constants of a chain. Each field is a tag, a length and a value, in a fixed order, so [`read_block`] and
//! [`read_root`] give back what was written: the encoding is injective, whatever the fields hold.

use crate::ids::{Key, TokenId};
use crate::mutant::{self, Mutant};

/// Names this encoding. A change of the encoding changes the name, so that old keys match nothing. A root begins with it and a block
/// with a key, which is longer to guess than to hash, so the two never meet.
pub const VERSION: &[u8] = b"blocktable 2026-11 block key encoding v2";

/// What is particular to one block, and not to its whole chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    /// The domain of the deployment, behind a public range.
    Deployment,
    /// The domain of a tenant, behind a public range.
    Tenant(&'a [u8]),
    /// A salt of a range that touches this block.
    Salt(&'a [u8]),
    /// A media item that touches this block.
    Media {
        /// Where it begins, counted from the first token of this block.
        offset: i64,
        /// Its tokens, in this block and others.
        len: u64,
        /// What it is.
        id: &'a [u8],
    },
}

/// What is constant along a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Constant<'a> {
    /// Tokens a block.
    BlockSize(u32),
    /// Separates deployments.
    Seed(&'a [u8]),
    /// Number format and layout of the rows.
    Layout(&'a [u8]),
    /// The chain starts in the public domain.
    Public,
    /// The chain starts in the domain of a deployment without tenants.
    Deployment,
    /// The chain starts in the domain of a tenant.
    Tenant(&'a [u8]),
    /// The adapter that computes the rows, and which load of it.
    Adapter {
        /// Its name.
        name: &'a [u8],
        /// Raised whenever an adapter is loaded.
        load: u64,
    },
    /// Which weights compute the rows.
    Weights(&'a [u8]),
    /// The root that this one extends.
    Root(&'a [u8]),
}

/// A block as [`read_block`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block<'a> {
    /// Key of the block before it, or the root.
    pub parent: Key,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// What is particular to it.
    pub fields: Vec<Field<'a>>,
}

/// Appends a block. Without fields these are 32 + 4 bytes a token: two compressions for 16 tokens.
pub fn write_block<'a>(
    to: &mut Vec<u8>,
    parent: &Key,
    tokens: &[TokenId],
    fields: impl IntoIterator<Item = Field<'a>>,
) {
    to.extend_from_slice(&parent.0);
    if cfg!(target_endian = "little") {
        to.extend_from_slice(bytemuck::cast_slice(tokens));
    } else {
        tokens.iter().for_each(|token| to.extend_from_slice(&token.to_le_bytes()));
    }
    for field in fields {
        match field {
            Field::Deployment => put(to, 1, &[]),
            Field::Tenant(domain) => put(to, 2, &[domain]),
            Field::Salt(salt) => put(to, 3, &[salt]),
            Field::Media { offset, len, id } => put(to, 4, &[&offset.to_le_bytes(), &len.to_le_bytes(), id]),
        }
    }
}

/// What [`write_block`] wrote for a block of `block_size` tokens; `None` for anything else.
#[must_use]
pub fn read_block(bytes: &[u8], block_size: usize) -> Option<Block<'_>> {
    let (parent, rest) = bytes.split_first_chunk::<32>()?;
    let (tokens, mut rest) = rest.split_at_checked(4 * block_size)?;
    let tokens = tokens.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect();
    let mut fields = Vec::new();
    let mut last = 0;
    while !rest.is_empty() {
        let (tag, value, behind) = take(rest)?;
        let is_domain = |tag| tag == 1 || tag == 2;
        if tag < last || (is_domain(tag) && is_domain(last)) {
            return None;
        }
        fields.push(match tag {
            1 if value.is_empty() => Field::Deployment,
            2 => Field::Tenant(value),
            3 => Field::Salt(value),
            4 => {
                let (offset, value) = value.split_first_chunk()?;
                let (len, id) = value.split_first_chunk()?;
                Field::Media { offset: i64::from_le_bytes(*offset), len: u64::from_le_bytes(*len), id }
            }
            _ => return None,
        });
        (last, rest) = (tag, behind);
    }
    Some(Block { parent: Key(*parent), tokens, fields })
}

/// Appends the constants of a root behind its name.
pub fn write_root<'a>(to: &mut Vec<u8>, constants: impl IntoIterator<Item = Constant<'a>>) {
    to.extend_from_slice(VERSION);
    for constant in constants {
        match constant {
            Constant::BlockSize(size) => put(to, 16, &[&size.to_le_bytes()]),
            Constant::Seed(seed) => put(to, 17, &[seed]),
            Constant::Layout(layout) => put(to, 18, &[layout]),
            Constant::Public => put(to, 19, &[]),
            Constant::Deployment => put(to, 20, &[]),
            Constant::Tenant(domain) => put(to, 21, &[domain]),
            Constant::Adapter { name, load } => put(to, 22, &[&load.to_le_bytes(), name]),
            Constant::Weights(version) => put(to, 23, &[version]),
            Constant::Root(root) => put(to, 24, &[root]),
        }
    }
}

/// What [`write_root`] wrote; `None` for anything else.
#[must_use]
pub fn read_root(bytes: &[u8]) -> Option<Vec<Constant<'_>>> {
    let mut rest = bytes.strip_prefix(VERSION)?;
    let mut constants = Vec::new();
    while !rest.is_empty() {
        let (tag, value, behind) = take(rest)?;
        constants.push(match tag {
            16 => Constant::BlockSize(u32::from_le_bytes(value.try_into().ok()?)),
            17 => Constant::Seed(value),
            18 => Constant::Layout(value),
            19 if value.is_empty() => Constant::Public,
            20 if value.is_empty() => Constant::Deployment,
            21 => Constant::Tenant(value),
            22 => {
                let (load, name) = value.split_first_chunk()?;
                Constant::Adapter { name, load: u64::from_le_bytes(*load) }
            }
            23 => Constant::Weights(value),
            24 => Constant::Root(value),
            _ => return None,
        });
        rest = behind;
    }
    Some(constants)
}

/// Appends a tag, the length of the value, and the value, which is given in parts.
fn put(to: &mut Vec<u8>, tag: u8, parts: &[&[u8]]) {
    if !mutant::is_on(Mutant::FieldWithoutTag) {
        to.push(tag);
    }
    if !mutant::is_on(Mutant::FieldWithoutLength) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        to.extend_from_slice(&(len as u32).to_le_bytes());
    }
    parts.iter().for_each(|part| to.extend_from_slice(part));
}

/// The tag and the value of the first field of `bytes`, and what stands behind it.
fn take(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (len, rest) = rest.split_first_chunk()?;
    let (value, behind) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((tag, value, behind))
}

//! What keys promise, as checks that pass, and that a planted fault must fail.
//!
//! Before: a test of the promises, or a row of the table of planted faults. After: `Ok`, or the name of the promise that is broken:
//! "encoding" (equal bytes mean equal meaning), "keys" (another field, another key), "exact" (the driver's oracle: nobody reads rows
//! that are not his), "shared" (who may share does), "vllm", "weights", "miss".

mod misses;
mod vllm;
mod weights;
mod worlds;

pub use misses::*;
pub use vllm::*;
pub use weights::*;
pub use worlds::*;

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::chain::{Domain, Identity, Media, Salt};
use blocktable_core::group::MAX_GROUPS;
use blocktable_core::ids::Key;
use blocktable_core::key_encoding::{self, Constant, Field, VERSION};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::broken::{Checked, ensure};
use crate::seed;

const CASES: u32 = 2_000;

/// What a block may hold.
#[derive(Clone, Debug)]
pub struct Content {
    parent: [u8; 32],
    tokens: Vec<u32>,
    domain: Option<Option<Vec<u8>>>,
    salts: Vec<Vec<u8>>,
    media: Vec<(i64, u64, Vec<u8>)>,
}

/// Short values of few letters, so that different fields meet in equal bytes if anything is missing.
fn contents() -> impl Strategy<Value = Content> {
    let short = || vec(prop_oneof![4 => 0..5_u8, 1 => any::<u8>()], 0..6);
    let domain = prop_oneof![2 => Just(None), 1 => Just(Some(None)), 2 => short().prop_map(|name| Some(Some(name)))];
    let media = vec((-4..4_i64, 0..4_u64, short()), 0..3);
    (any::<[u8; 32]>(), vec(any::<u32>(), 0..4), domain, vec(short(), 0..4), media)
        .prop_map(|(parent, tokens, domain, salts, media)| Content { parent, tokens, domain, salts, media })
}

impl Content {
    fn fields(&self) -> Vec<Field<'_>> {
        let domain = self.domain.iter().map(|name| name.as_ref().map_or(Field::Deployment, |name| Field::Tenant(name)));
        let salts = self.salts.iter().map(|salt| Field::Salt(salt));
        let media = self.media.iter().map(|(offset, len, id)| Field::Media { offset: *offset, len: *len, id });
        domain.chain(salts).chain(media).collect()
    }
}

/// What was written is read back, so no two blocks are written alike.
pub fn blocks_are_read_as_they_were_written() -> Checked {
    seed::sweep(seed::seed(), CASES, &contents(), |content| {
        let (fields, mut bytes) = (content.fields(), Vec::new());
        key_encoding::write_block(&mut bytes, &Key(content.parent), &content.tokens, fields.iter().copied());
        let plain = 32 + 4 * content.tokens.len();
        ensure(!fields.is_empty() || bytes.len() == plain, "encoding", || {
            format!("{} bytes, not {plain}", bytes.len())
        })?;
        let block = key_encoding::read_block(&bytes, content.tokens.len());
        let is_same = block.as_ref().is_some_and(|block| {
            block.parent.0 == content.parent && block.tokens == content.tokens && block.fields == fields
        });
        ensure(is_same, "encoding", || format!("{content:?} is read as {block:?}"))
    })
}

/// The same for roots; and no block of a chain is a root, whatever its fields hold.
pub fn roots_are_read_as_they_were_written() -> Checked {
    let short = || vec(prop_oneof![4 => 0..5_u8, 1 => any::<u8>()], 0..6);
    let roots = (vec((0..9_u8, short(), 0..3_u64), 0..6),);
    seed::sweep(seed::seed(), CASES, &roots, |(parts,)| {
        let constants: Vec<Constant<'_>> =
            parts.iter().map(|(kind, bytes, number)| constant(*kind, bytes, *number)).collect();
        let mut bytes = Vec::new();
        key_encoding::write_root(&mut bytes, constants.iter().copied());
        let found = key_encoding::read_root(&bytes);
        ensure(found.as_ref() == Some(&constants), "encoding", || format!("{constants:?} is read as {found:?}"))?;
        ensure(bytes.starts_with(VERSION) && VERSION.len() >= 32, "encoding", || "a root has no name".to_owned())
    })
}

fn constant(kind: u8, bytes: &[u8], number: u64) -> Constant<'_> {
    match kind {
        0 => Constant::BlockSize(number as u32),
        1 => Constant::Seed(bytes),
        2 => Constant::Layout(bytes),
        3 => Constant::Public,
        4 => Constant::Deployment,
        5 => Constant::Tenant(bytes),
        6 => Constant::Adapter { name: bytes, load: number },
        7 => Constant::Weights(bytes),
        _ => Constant::Root(bytes),
    }
}

/// One content has another key in each group; two contents never meet in one group.
pub fn groups_have_keys_of_their_own() -> Checked {
    let keys = vec(any::<[u8; 32]>(), 1..4);
    seed::sweep(seed::seed(), 200, &keys, |keys| {
        let of = |group: usize| keys.iter().map(move |key| Key(*key).in_group(group));
        let is_own = of(0).eq(keys.iter().map(|key| Key(*key)));
        ensure(is_own, "keys", || "group 0 has another key than the chain".to_owned())?;
        let mut all: Vec<Key> = (0..MAX_GROUPS).flat_map(of).collect();
        let mut distinct: Vec<&[u8; 32]> = keys.iter().collect();
        distinct.sort();
        distinct.dedup();
        all.sort();
        all.dedup();
        let wanted = MAX_GROUPS * distinct.len();
        ensure(all.len() == wanted, "keys", || format!("{} keys, not {wanted}", all.len()))
    })
}

/// Behind one parent, with equal tokens: whatever differs in the fields of a block differs in its key.
pub fn every_field_of_a_block_enters_its_key() -> Checked {
    let salt = |start, end, salt: &[u8]| Salt { start, end, salt: salt.into() };
    let item = |start, end, id: &[u8]| Media { start, end, id: id.into() };
    let plain = || Identity::of(Domain::Deployment);
    let tenant = |name: &[u8]| Identity::of(Domain::Tenant(name.into()));
    let cases = [
        plain(),
        Identity { public_tokens: 1, ..plain() },
        Identity { public_tokens: 1, ..tenant(b"x") },
        Identity { public_tokens: 1, ..tenant(b"y") },
        Identity { salts: vec![salt(0, usize::MAX, b"x")], ..plain() },
        Identity { salts: vec![salt(0, usize::MAX, b"y")], ..plain() },
        Identity { salts: vec![salt(0, 9, b"x"), salt(9, 12, b"y")], ..plain() },
        Identity { salts: vec![salt(0, 12, b"xy")], ..plain() },
        Identity { media: vec![item(8, 11, b"x")], ..plain() },
        Identity { media: vec![item(8, 11, b"y")], ..plain() },
        Identity { media: vec![item(9, 12, b"x")], ..plain() },
        Identity { media: vec![item(2, 12, b"x")], ..plain() },
        Identity { media: vec![item(3, 12, b"x")], ..plain() },
        Identity { media: vec![item(8, 9, b"x"), item(9, 10, b"y")], ..plain() },
        Identity { media: vec![item(8, 9, b"y"), item(9, 10, b"x")], ..plain() },
    ];
    for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
        let mut hasher = BlockHasher::new(algorithm, 4, b"");
        let mut key = |identity: &Identity| {
            let chain = hasher.chain(identity.clone(), 12).expect("a valid identity");
            hasher.block_key(&chain, 2, Some(&Key([7; 32])), &[1, 2, 3, 4]).expect("a block of 4")
        };
        let keys: Vec<Key> = cases.iter().map(&mut key).collect();
        for (at, one) in keys.iter().enumerate() {
            let same = keys[..at].iter().position(|other| other == one);
            ensure(same.is_none(), "keys", || {
                format!("{:?} has the key of {:?}", cases[at], cases[same.unwrap_or(0)])
            })?;
        }
    }
    Ok(())
}

/// Prompts of equal tokens whose chains differ in one constant have no key in common.
pub fn every_constant_of_a_chain_enters_its_keys() -> Checked {
    let tokens: Vec<u32> = (0..12).collect();
    for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
        let make = |size, seed: &[u8], layout: &[u8], weights: &[u8]| {
            let hasher = BlockHasher::new(algorithm, size, seed).with_layout(layout);
            hasher.with_weights(weights).expect("a short version")
        };
        let hashers = [
            make(4, b"", b"", b""),
            make(3, b"", b"", b""),
            make(4, b"x", b"", b""),
            make(4, b"", b"x", b""),
            make(4, b"", b"", b"x"),
        ];
        let mut keys = Vec::new();
        for (at, mut hasher) in hashers.into_iter().enumerate() {
            for identity in constants() {
                let prompt = hasher.prompt(tokens.clone(), identity.clone()).expect("a valid identity");
                keys.extend(prompt.keys().iter().map(|&key| (key, at, format!("{identity:?}"))));
            }
        }
        keys.sort_by_key(|(key, ..)| *key);
        let same = keys.windows(2).find(|pair| pair[0].0 == pair[1].0);
        ensure(same.is_none(), "keys", || format!("{same:?} share a key"))?;
    }
    Ok(())
}

/// Domains and adapters that look alike.
fn constants() -> Vec<Identity> {
    use blocktable_core::chain::Adapter;
    let tenant = |name: &[u8]| Identity::of(Domain::Tenant(name.into()));
    let plain = Identity::of(Domain::Deployment);
    let adapter = |name: &[u8], load| Some(Adapter { name: name.into(), load, path: Box::default() });
    vec![
        plain.clone(),
        Identity::of(Domain::Public),
        tenant(b"x"),
        tenant(b"y"),
        Identity { adapter: adapter(b"x", 1), ..plain.clone() },
        Identity { adapter: adapter(b"x", 2), ..plain.clone() },
        Identity { adapter: adapter(b"y", 1), ..plain },
        Identity { adapter: adapter(b"x", 1), ..tenant(b"x") },
        Identity {
            salts: vec![Salt { start: 0, end: usize::MAX, salt: (*b"x").into() }],
            ..Identity::of(Domain::Deployment)
        },
    ]
}

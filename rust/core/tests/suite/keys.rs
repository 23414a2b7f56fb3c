//! Keys name their content, all of it: tokens, what is before them, who may share them, what computed them.
//!
//! Before: the checks of `key_checks`, which the table of planted faults uses too. After: each holds; and keys are those that were
//! written down, in every process and version.

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::error::Error;
use blocktable_core::ids::Key;

use crate::broken::Checked;
use crate::key_checks;

#[test]
fn a_block_is_read_back_from_the_bytes_that_are_hashed() -> Checked {
    key_checks::blocks_are_read_as_they_were_written()
}

#[test]
fn a_root_is_read_back_from_the_bytes_that_are_hashed() -> Checked {
    key_checks::roots_are_read_as_they_were_written()
}

#[test]
fn one_content_has_another_key_in_every_group() -> Checked {
    key_checks::groups_have_keys_of_their_own()
}

#[test]
fn whatever_is_particular_to_a_block_enters_its_key() -> Checked {
    key_checks::every_field_of_a_block_enters_its_key()
}

#[test]
fn whatever_is_constant_along_a_chain_enters_its_keys() -> Checked {
    key_checks::every_constant_of_a_chain_enters_its_keys()
}

#[test]
fn two_tenants_share_the_public_range_and_nothing_behind_it() -> Checked {
    key_checks::tenants_share_what_is_public_and_nothing_else()
}

#[test]
fn two_tenants_copy_rows_of_the_public_range_and_of_nothing_behind_it() -> Checked {
    key_checks::tenants_copy_no_row_of_private_blocks()
}

#[test]
fn a_salt_keeps_others_out_and_lets_nobody_in() -> Checked {
    key_checks::a_salt_narrows_and_never_widens()
}

#[test]
fn an_adapter_that_is_loaded_anew_finds_nothing_of_before() -> Checked {
    key_checks::adapters_are_apart()
}

#[test]
fn media_are_told_by_what_they_are_and_where_they_begin() -> Checked {
    key_checks::media_are_apart_from_where_they_begin()
}

#[test]
fn an_answer_is_found_by_who_got_it_and_nobody_else() -> Checked {
    key_checks::answers_belong_to_who_asked()
}

/// A prompt with everything that a key can depend on.
fn rich(algorithm: Algorithm) -> Vec<Key> {
    let identity = Identity {
        domain: Domain::Tenant((*b"tenant").into()),
        public_tokens: 3,
        adapter: Some(Adapter { name: (*b"adapter").into(), load: 7, path: Box::default() }),
        salts: vec![Salt { start: 4, end: 7, salt: (*b"salt").into() }],
        media: vec![Media { start: 1, end: 5, id: (*b"picture").into() }],
    };
    let hasher = BlockHasher::new(algorithm, 2, b"golden").with_layout(b"float32");
    let mut hasher = hasher.with_weights(b"1").unwrap();
    hasher.prompt((1..=8).collect(), identity).unwrap().keys().to_vec()
}

#[test]
fn keys_are_those_that_were_written_down() {
    let plain = |algorithm| BlockHasher::new(algorithm, 2, b"golden").prompt(vec![1, 2, 3, 4], key_checks::plain());
    let last = |algorithm| plain(algorithm).unwrap().keys()[1].short();
    let wanted =
        [11_687_739_627_672_233_699, 1_930_719_949_772_491_069, 10_704_298_652_343_596_036, 4_936_579_312_663_426_164];
    assert_eq!(Algorithm::ALL.map(last), wanted);
    let last = |algorithm| rich(algorithm).last().copied().unwrap().short();
    assert_eq!(
        (last(Algorithm::Sha256), last(Algorithm::Blake3)),
        (4_254_348_365_702_814_615, 16_759_704_782_869_792_824)
    );
}

#[test]
fn a_block_of_16_tokens_takes_two_compressions() {
    let mut bytes = Vec::new();
    blocktable_core::key_encoding::write_block(&mut bytes, &Key::ROOT, &[7; 16], []);
    assert!(bytes.len() <= 119, "{} bytes", bytes.len());
}

#[test]
fn a_copy_of_a_chain_gives_the_same_keys_in_any_pieces() {
    let identity = Identity { public_tokens: 5, ..key_checks::tenant("a") };
    for algorithm in [Algorithm::Sha256, Algorithm::Blake3] {
        let mut hasher = BlockHasher::new(algorithm, 4, b"");
        let whole = hasher.prompt((0..19).collect(), identity.clone()).unwrap();
        let (chain, tokens): (_, Vec<u32>) = (whole.chain().clone(), (0..19).collect());
        let mut pieces = Vec::new();
        for end in 0..=tokens.len() {
            hasher.extend(&chain, &mut pieces, &tokens[..end]);
        }
        assert_eq!(pieces, whole.keys());
        let again = hasher.block_key(&chain, 2, Some(&pieces[1]), &tokens[8..12]);
        assert_eq!(again.as_ref(), Ok(&pieces[2]), "one call gives the key of any block");
    }
}

#[test]
fn what_breaks_a_bound_is_refused_by_its_field() {
    let mut hasher = BlockHasher::new(Algorithm::DEFAULT, 4, b"");
    let plain = key_checks::plain;
    let salt = |start, end, len| Salt { start, end, salt: vec![1; len].into() };
    let item = |start, end, len| Media { start, end, id: vec![1; len].into() };
    let adapter =
        |name: usize, path: usize| Adapter { name: vec![1; name].into(), load: 0, path: vec![1; path].into() };
    let cases = [
        (Identity::of(Domain::Tenant(Box::default())), "domain", 0),
        (Identity::of(Domain::Tenant(vec![1; 1025].into())), "domain", 1025),
        (Identity { public_tokens: 11, ..plain() }, "public_tokens", 11),
        (Identity { adapter: Some(adapter(0, 0)), ..plain() }, "adapter", 0),
        (Identity { adapter: Some(adapter(1, 1025)), ..plain() }, "adapter", 1025),
        (Identity { salts: vec![salt(0, 10, 0)], ..plain() }, "cache_salt", 0),
        (Identity { salts: vec![salt(0, 11, 1)], ..plain() }, "cache_salt", 11),
        (Identity { salts: vec![salt(4, 4, 1)], ..plain() }, "cache_salt", 4),
        (Identity { salts: vec![salt(10, usize::MAX, 1)], ..plain() }, "cache_salt", 10),
        (Identity { salts: vec![salt(0, 1, 1); 65], ..plain() }, "cache_salt", 65),
        (Identity { media: vec![item(0, 10, 1025)], ..plain() }, "media", 1025),
        (Identity { media: vec![item(5, 3, 1)], ..plain() }, "media", 5),
        (Identity { media: vec![item(0, 5, 1), item(4, 6, 1)], ..plain() }, "media", 4),
    ];
    for (identity, field, value) in cases {
        let shown = format!("{identity:?}");
        let refused = hasher.chain(identity, 10);
        let is_it =
            matches!(&refused, Err(Error::InvalidInput { field: f, value: v, .. }) if *f == field && *v == value);
        assert!(is_it, "{shown}: {refused:?}");
    }
    assert!(hasher.block_key(&hasher.plain_chain(), 0, None, &[1, 2, 3]).is_err());
    assert!(hasher.block_key(&hasher.plain_chain(), 1, None, &[1, 2, 3, 4]).is_err());
    assert!(hasher.with_weights(&[1; 1025]).is_err());
}

#[test]
fn other_weights_find_nothing_of_the_old_ones() -> Checked {
    key_checks::other_weights_find_nothing_of_the_old_ones()
}

#[test]
fn a_miss_says_why() -> Checked {
    key_checks::every_miss_has_its_reason()
}

#[test]
fn a_request_has_one_reason_however_often_it_is_admitted() -> Checked {
    key_checks::every_admitted_request_counts_once()
}

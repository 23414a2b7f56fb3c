//! Keys of `sha256_cbor` and `vllm_sha256` are those that vLLM 0.32 gave for 200 recorded chains, byte for byte.
//!
//! Before: `vectors/vllm_hashes.jsonl.gz`, one chain a line: algorithm, block size, tokens, the extra field of the first block if it has
//! one, and the hash of each block. After: the keys are equal. What the recorded chains do not hold (media, an adapter in every block)
//! is compared with bytes written out here by hand.

use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use serde_json::Value;

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::chain::{Domain, Identity, Media};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::ids::Key;
use blocktable_core::vllm_encoding::{Extra, Format};
use sha2::{Digest, Sha256};

use crate::broken::Checked;
use crate::key_checks::{self, plain, salted, tenant, vllm_key};

#[test]
fn the_recorded_chains_of_vllm_come_out_the_same() {
    let mut seen = [0; 4];
    for line in recorded() {
        let chain: Value = serde_json::from_str(&line).expect("one chain a line");
        let is_cbor = chain["algorithm"] == "sha256_cbor";
        let algorithm = if is_cbor { Algorithm::Sha256Cbor } else { Algorithm::VllmSha256 };
        let size = chain["block_size"].as_u64().expect("a size") as u32;
        let tokens: Vec<u32> = chain["tokens"]
            .as_array()
            .expect("tokens")
            .iter()
            .map(|token| token.as_u64().expect("a token") as u32)
            .collect();
        let wanted: Vec<&str> =
            chain["chain"].as_array().expect("keys").iter().map(|key| key.as_str().expect("hex")).collect();
        let found = match chain["first_block_extra"].get(0) {
            None => {
                seen[usize::from(is_cbor)] += 1;
                keys(algorithm, size, tokens, plain())
            }
            Some(extra) if extra[0] == "cache_salt" => {
                seen[2] += 1;
                keys(algorithm, size, tokens, salted(0, usize::MAX, extra[1].as_str().expect("a salt")))
            }
            Some(extra) => {
                seen[3] += 1;
                with_first_extra(algorithm, size as usize, &tokens, extra)
            }
        };
        assert_eq!(found.iter().map(hex).collect::<Vec<_>>(), wanted, "{line}");
    }
    assert!(seen.iter().all(|&times| times >= 15), "the chains must hold enough of each kind: {seen:?}");
}

/// The seed of vLLM is a text of the environment; without one it is fixed.
#[test]
fn the_seed_is_the_text_of_vllms_environment() {
    // sha256 of the CBOR text "7", and of the pickled text "7".
    let pickled = b"\x80\x05\x95\x05\0\0\0\0\0\0\0\x8c\x017\x94.";
    for (algorithm, bytes) in [(Algorithm::Sha256Cbor, &b"\x617"[..]), (Algorithm::VllmSha256, &pickled[..])] {
        let first = BlockHasher::new(algorithm, 2, b"7").prompt(vec![1, 2], plain()).unwrap().keys()[0];
        let format = algorithm.vllm_format().unwrap();
        let mut input = Vec::new();
        format.write_block(&mut input, &Key(Sha256::digest(bytes).into()), &[1, 2], &[]);
        assert_eq!(first, Key(Sha256::digest(&input).into()));
    }
}

/// (b"\0" * 32, (1,), (("lora", "a", "p"), ("mm", "i", -2), ("mm", "j", 300), ("cache_salt", "s"))) in both formats.
#[test]
fn a_block_of_every_field_is_written_as_vllm_writes_it() {
    let extras = [
        Extra::Lora { name: b"a", path: b"p" },
        Extra::Media { id: b"i", offset: -2 },
        Extra::Media { id: b"j", offset: 300 },
        Extra::Salt(b"s"),
    ];
    let mut cbor = Vec::new();
    Format::Cbor.write_block(&mut cbor, &Key::ROOT, &[1], &extras);
    let wanted = [
        &b"\x83\x58\x20"[..],
        &[0; 32],
        b"\x81\x01\x84\x83\x64lora\x61a\x61p\x83\x62mm\x61i\x21\x83\x62mm\x61j\x19\x01\x2c\x82\x6acache_salt\x61s",
    ]
    .concat();
    assert_eq!(cbor, wanted);
    let mut pickle = Vec::new();
    Format::Pickle.write_block(&mut pickle, &Key::ROOT, &[1], &extras);
    let wanted = [
        &b"\x80\x05\x95\x6c\0\0\0\0\0\0\0C\x20"[..],
        &[0; 32],
        b"\x94K\x01\x85\x94(\x8c\x04lora\x94\x8c\x01a\x94\x8c\x01p\x94\x87\x94\x8c\x02mm\x94\x8c\x01i\x94J\xfe\xff\xff\xff\x87\x94",
        b"h\x06\x8c\x01j\x94M\x2c\x01\x87\x94\x8c\x0acache_salt\x94\x8c\x01s\x94\x86\x94t\x94\x87\x94.",
    ]
    .concat();
    assert_eq!(pickle, wanted);
}

#[test]
fn adapter_and_media_enter_every_block_that_they_touch_and_the_salt_the_first() -> Checked {
    key_checks::vllms_fields_stand_where_vllm_has_them()
}

#[test]
fn what_vllms_keys_cannot_keep_apart_is_refused() {
    let range = salted(2, 4, "s");
    let loaded = key_checks::adapted("a", 1);
    let bytes = Identity { media: vec![Media { start: 0, end: 1, id: vec![0xFF].into() }], ..plain() };
    let cases = [
        (tenant("a"), "domain"),
        (Identity { public_tokens: 2, ..plain() }, "public_tokens"),
        (range, "cache_salt"),
        (loaded, "adapter"),
        (bytes, "media"),
    ];
    for algorithm in [Algorithm::Sha256Cbor, Algorithm::VllmSha256] {
        let mut hasher = BlockHasher::new(algorithm, 2, b"");
        for (identity, field) in cases.clone() {
            let refused = hasher.chain(identity, 6);
            assert!(
                matches!(&refused, Err(Error::InvalidInput { field: f, .. }) if *f == field),
                "{field}: {refused:?}"
            );
        }
        assert!(hasher.chain(Identity::of(Domain::Public), 6).is_ok(), "everybody shares everything already");
        assert!(hasher.with_weights(b"2").is_err());
        let config = |hash_seed: &[u8], kv_layout: &[u8]| Config {
            hash_algorithm: algorithm,
            hash_seed: hash_seed.to_vec(),
            kv_layout: kv_layout.to_vec(),
            ..key_checks::scene().config().clone()
        };
        assert!(config(b"7", b"").validate().is_ok());
        assert!(config(b"\xff", b"").validate().is_err());
        assert!(config(b"", b"x").validate().is_err());
    }
}

fn keys(algorithm: Algorithm, size: u32, tokens: Vec<u32>, identity: Identity) -> Vec<Key> {
    BlockHasher::new(algorithm, size, b"").prompt(tokens, identity).expect("a valid identity").keys().to_vec()
}

/// The recorder gave the adapter to the first block alone, which vLLM itself does not.
fn with_first_extra(algorithm: Algorithm, size: usize, tokens: &[u32], extra: &Value) -> Vec<Key> {
    let [name, path] = [1, 2].map(|at| extra[at].as_str().expect("a text").as_bytes());
    let mut keys: Vec<Key> = Vec::new();
    for (at, tokens) in tokens.chunks_exact(size).enumerate() {
        let extras = [Extra::Lora { name, path }];
        keys.push(vllm_key(algorithm, keys.last().copied(), tokens, if at == 0 { &extras } else { &[] }));
    }
    keys
}

fn hex(key: &Key) -> String {
    key.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn recorded() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/vllm_hashes.jsonl.gz");
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).expect("a gzip file of text");
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 200);
    lines
}

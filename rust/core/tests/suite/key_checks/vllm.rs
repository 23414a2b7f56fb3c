//! Where vLLM's fields stand: the adapter in every block, media in those that they touch, the salt in the first.

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::chain::{Adapter, Identity, Media};
use blocktable_core::ids::Key;
use blocktable_core::vllm_encoding::Extra;
use sha2::{Digest, Sha256};

use super::worlds::salted;
use crate::broken::{Checked, ensure};

/// The key of one block, from the fields that it is to have.
pub fn vllm_key(algorithm: Algorithm, parent: Option<Key>, tokens: &[u32], extras: &[Extra<'_>]) -> Key {
    let format = algorithm.vllm_format().expect("one of vLLM's");
    let mut bytes = Vec::new();
    let parent = parent.unwrap_or_else(|| {
        format.write_seed(&mut bytes, b"vllm-none-hash");
        Key(Sha256::digest(&bytes).into())
    });
    bytes.clear();
    format.write_block(&mut bytes, &parent, tokens, extras);
    Key(Sha256::digest(&bytes).into())
}

/// Three blocks of two tokens.
pub fn vllms_fields_stand_where_vllm_has_them() -> Checked {
    for algorithm in [Algorithm::Sha256Cbor, Algorithm::VllmSha256] {
        let identity = Identity {
            adapter: Some(Adapter { name: (*b"a").into(), load: 0, path: (*b"p").into() }),
            media: vec![Media { start: 1, end: 3, id: (*b"i").into() }],
            ..salted(0, usize::MAX, "s")
        };
        let prompt = BlockHasher::new(algorithm, 2, b"").prompt((0..6).collect(), identity).expect("a valid identity");
        let lora = Extra::Lora { name: b"a", path: b"p" };
        let media = |offset| Extra::Media { id: b"i", offset };
        let extras = [vec![lora, media(1), Extra::Salt(b"s")], vec![lora, media(-1)], vec![lora]];
        let mut parent = None;
        for (at, extras) in extras.iter().enumerate() {
            let key = vllm_key(algorithm, parent, &[2 * at as u32, 2 * at as u32 + 1], extras);
            ensure(prompt.keys()[at] == key, "vllm", || format!("{algorithm:?}, block {at}"))?;
            parent = Some(key);
        }
    }
    Ok(())
}

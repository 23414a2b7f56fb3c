//! Any bytes, as what a key is a hash of, and as what a client says of a prompt.
//!
//! Before: a fuzzer, or the core's own tests with a corpus and random bytes, call [`run`]. After: it returns, or panics because
//! bytes that can be read are not the only ones that mean this, or because a hasher broke down or contradicted itself.

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::key_encoding::{VERSION, read_block, read_root, write_block, write_root};

/// The first byte chooses the block size and the algorithm, the rest is read in three ways. In how many of them it meant something.
pub fn run(data: &[u8]) -> usize {
    let Some((&first, data)) = data.split_first() else { return 0 };
    let size = usize::from(first % 4) + 1;
    let read = what_is_read_is_what_was_written(data, size);
    read + what_is_said_is_hashed_or_refused(data, size, Algorithm::ALL[usize::from(first / 4) % Algorithm::ALL.len()])
}

/// Every meaning has one encoding, and every encoding one meaning.
fn what_is_read_is_what_was_written(data: &[u8], size: usize) -> usize {
    let mut again = Vec::new();
    let mut ways = 0;
    if let Some(block) = read_block(data, size) {
        write_block(&mut again, &block.parent, &block.tokens, block.fields.iter().copied());
        assert_eq!(again, data, "other bytes mean {block:?}");
        assert_eq!(read_block(&again, size), Some(block));
        ways += 1;
    }
    let named = [VERSION, data].concat();
    if let Some(constants) = read_root(&named) {
        again.clear();
        write_root(&mut again, constants.iter().copied());
        assert_eq!(again, named, "other bytes mean {constants:?}");
        ways += 1;
    }
    ways
}

/// A prompt of at most 32 tokens, hashed whole and block by block.
fn what_is_said_is_hashed_or_refused(data: &[u8], size: usize, algorithm: Algorithm) -> usize {
    let mut said = Bytes(data);
    let tokens: Vec<u32> = (0..said.number() % 33).map(|_| said.number() as u32 * 0x0101_0101).collect();
    let identity = said.identity();
    let mut hasher = BlockHasher::new(algorithm, size as u32, said.text()).with_layout(&[]);
    if let Ok(other) = hasher.clone().with_weights(said.text()) {
        hasher = other;
    }
    let Ok(prompt) = hasher.prompt(tokens.clone(), identity) else { return 0 };
    assert_eq!(prompt.keys().len(), tokens.len() / size);
    let mut parent = None;
    for (at, block) in tokens.chunks_exact(size).enumerate() {
        let key = hasher.block_key(prompt.chain(), at, parent, block).expect("a whole block");
        assert_eq!(key, prompt.keys()[at]);
        parent = Some(&prompt.keys()[at]);
    }
    let mut pieces = Vec::new();
    (0..=tokens.len()).for_each(|end| hasher.extend(prompt.chain(), &mut pieces, &tokens[..end]));
    assert_eq!(pieces, prompt.keys());
    1
}

/// What is left of the input; at its end everything is 0 and empty.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn number(&mut self) -> usize {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(first)
    }

    fn text(&mut self) -> &'a [u8] {
        let len = self.number().min(self.0.len());
        let (text, rest) = self.0.split_at(len);
        self.0 = rest;
        text
    }

    fn identity(&mut self) -> Identity {
        let domain = match self.number() % 3 {
            0 => Domain::Public,
            1 => Domain::Deployment,
            _ => Domain::Tenant(self.text().into()),
        };
        let public_tokens = self.number();
        let adapter = (self.number() % 2 == 1).then(|| Adapter {
            name: self.text().into(),
            load: self.number() as u64,
            path: self.text().into(),
        });
        let end = |number: usize| if number == 255 { usize::MAX } else { number };
        let salts = (0..self.number() % 5)
            .map(|_| Salt { start: self.number(), end: end(self.number()), salt: self.text().into() })
            .collect();
        let media = (0..self.number() % 5)
            .map(|_| Media { start: self.number(), end: self.number(), id: self.text().into() })
            .collect();
        Identity { domain, public_tokens, adapter, salts, media }
    }
}

//! Any bytes, as KV events.
//!
//! Before: a fuzzer, or the core's own tests with a corpus and random bytes, call [`run`]. After: it returns, or panics because bytes
//! that can be read are not the only ones that mean this.

use blocktable_core::event_bytes::{Encoder, decode};

/// Reads the bytes; 1 if they meant something.
pub fn run(data: &[u8]) -> usize {
    let Ok(decoded) = decode(data) else { return 0 };
    let mut again = Vec::new();
    let mut encoder = Encoder::new(&mut again, decoded.next, decoded.lost, decoded.block_size as usize);
    decoded.events().for_each(|event| encoder.push(&event));
    assert_eq!(encoder.finish() as usize, decoded.events().len());
    assert_eq!(again, data, "other bytes mean the same");
    1
}

//! SHA-256 of one short message that lies in a buffer with room behind it: padded in place, compressed in one go.
//!
//! Before: [`BlockHasher`](crate::block_hash::BlockHasher) has laid out what is hashed. After: the digest; the buffer holds the
//! padded message. The same as `sha2::Sha256::digest`, without its buffering, which costs a 16-token block an eighth of its time.

#[cfg(not(feature = "stub_hash"))]
use sha2::block_api::compress256;

/// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
#[cfg(not(feature = "stub_hash"))]
const START: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];

/// No digest, but quick: for counting the instructions of everything else under valgrind, which hides the processor's SHA.
#[cfg(feature = "stub_hash")]
pub(crate) fn digest(message: &mut [u8]) -> [u8; 32] {
    let mix = |state: u64, bytes: &[u8]| {
        let word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        (state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
    };
    let state = message.chunks(8).fold(message.len() as u64, mix);
    let mut digest = [0; 32];
    for (bytes, number) in digest.chunks_exact_mut(8).zip(1_u64..) {
        bytes.copy_from_slice(&mix(state, &[number as u8]).to_le_bytes());
    }
    digest
}

/// The digest of `message`, which is padded in place.
#[cfg(not(feature = "stub_hash"))]
pub(crate) fn digest(message: &mut Vec<u8>) -> [u8; 32] {
    let bits = 8 * message.len() as u64;
    message.push(0x80);
    let padded = (message.len() + 8).next_multiple_of(64);
    message.resize(padded - 8, 0);
    message.extend_from_slice(&bits.to_be_bytes());
    let mut state = START;
    compress256(&mut state, bytemuck::cast_slice(message));
    let mut digest = [0; 32];
    for (bytes, word) in digest.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

#[cfg(all(test, not(feature = "stub_hash")))]
mod tests {
    use sha2::Digest;

    #[test]
    fn messages_of_every_length_have_the_digest_of_the_library() {
        for len in 0..400_usize {
            let message: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            let wanted: [u8; 32] = sha2::Sha256::digest(&message).into();
            assert_eq!(super::digest(&mut message.clone()), wanted, "{len} bytes");
        }
    }
}

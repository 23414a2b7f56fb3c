//! The hashes that a key may be made by, and their names.

use crate::vllm_encoding::Format;

/// Which cryptographic hash makes the keys, and over which bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// BLAKE3 in keyed mode over our encoding, 256 bits.
    Blake3,
    /// SHA-256 over our encoding.
    Sha256,
    /// vLLM's `sha256_cbor`, byte for byte: SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// vLLM's `sha256`, byte for byte: SHA-256 over a pickle.
    VllmSha256,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 4] =
        [Algorithm::Blake3, Algorithm::Sha256, Algorithm::Sha256Cbor, Algorithm::VllmSha256];

    /// The faster of ours for a 16-token block on processors with SHA instructions, where serving runs: `blocktable bench hash`
    /// shows all.
    pub const DEFAULT: Algorithm = Algorithm::Sha256;

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha256Cbor => "sha256_cbor",
            Algorithm::VllmSha256 => "vllm_sha256",
        }
    }

    /// The algorithm of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// How vLLM writes a block, if this is one of its algorithms.
    #[must_use]
    pub const fn vllm_format(self) -> Option<Format> {
        match self {
            Algorithm::Blake3 | Algorithm::Sha256 => None,
            Algorithm::Sha256Cbor => Some(Format::Cbor),
            Algorithm::VllmSha256 => Some(Format::Pickle),
        }
    }
}

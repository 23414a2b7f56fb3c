//! What entered a scheduler, as bytes: a header, the configuration, then a record for each call with what came of it.
//!
//! Before: [`Recorded`](crate::recorder::Recorded) writes records. After: [`replay`](crate::replay::replay) makes the calls again.
//! Always: bytes are either the only ones that mean this, or refused with the place where they break. Whole numbers are LEB128 without
//! needless bytes, signed ones are folded (zigzag), texts have their length before them.
//!
//! | part | bytes | meaning |
//! |---|---|---|
//! | header | 8 | `BTRECORD` |
//! | | 4 | version of this format, little-endian |
//! | | 8 | number of the first record behind the configuration; 1: all are there |
//! | | 8 | checksum of the record before that one |
//! | record | 4 | bytes of its body, little-endian |
//! | | … | body: kind, what the call was given, what came of it |
//! | | 8 | checksum: the first bytes of BLAKE3 over the checksum before, the length and the body |
//!
//! Record 0 is the configuration; the number of the first record stands for the checksum before it. Checksums form a chain, so a record that is left out, moved or changed
//! is found. They protect against accidents, not against forgers.
//!
//! A recording holds prompts, salts, the hash seed and every token that was sampled: keep it as you keep those.

use crate::chain::Identity;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::mutant::{self, Mutant};
use crate::rank::Turn;
use crate::recording_calls::put_entry;
use crate::recording_config::put_config;
use crate::recording_numbers::Left;
use crate::request::Limits;
use crate::retention::Ranges;

/// The version of the format.
pub const VERSION: u32 = 5;
const MAGIC: &[u8; 8] = b"BTRECORD";
/// Bytes of a record beside its body.
pub(crate) const FRAME: usize = 12;

/// The outcome of a call that never returned.
pub const NEVER_RETURNED: u64 = u64::MAX;

/// A checksum in the chain.
pub(crate) type Check = [u8; 8];

/// What a call was given.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the arguments of the methods of `Recorded` of the same names")]
pub enum Call {
    Submit {
        tokens: Vec<TokenId>,
        identity: Identity,
        limits: Limits,
        tenant: String,
        turn: Turn,
        siblings: u32,
        now_us: u64,
    },
    SetRetention {
        request: u64,
        ranges: Ranges,
    },
    Abort {
        request: u64,
    },
    EndSequence {
        request: u64,
    },
    Finish {
        request: u64,
    },
    Fork {
        request: u64,
        limits: Limits,
        now_us: u64,
    },
    Truncate {
        request: u64,
        num_tokens: u64,
    },
    ResetPrefixCache,
    Pin {
        tokens: Vec<TokenId>,
        identity: Identity,
    },
    Unpin {
        pin: u64,
    },
    SetWeightsVersion {
        version: Vec<u8>,
    },
    Propose {
        rows: Vec<i64>,
        starts: Vec<i64>,
        tokens: Vec<i64>,
    },
    Plan {
        now_us: u64,
    },
    Commit {
        step: u64,
        tokens: Vec<i64>,
        starts: Vec<i64>,
        now_us: u64,
    },
    Fail {
        step: u64,
    },
}

impl Call {
    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Call::Submit { .. } => "submit",
            Call::SetRetention { .. } => "set_retention",
            Call::Abort { .. } => "abort",
            Call::EndSequence { .. } => "end_sequence",
            Call::Finish { .. } => "finish",
            Call::Fork { .. } => "fork",
            Call::Truncate { .. } => "truncate",
            Call::ResetPrefixCache => "reset_prefix_cache",
            Call::Pin { .. } => "pin",
            Call::Unpin { .. } => "unpin",
            Call::SetWeightsVersion { .. } => "set_weights_version",
            Call::Propose { .. } => "propose",
            Call::Plan { .. } => "plan",
            Call::Commit { .. } => "commit",
            Call::Fail { .. } => "fail",
        }
    }
}

/// A call with what came of it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What it was given.
    pub call: Call,
    /// A digest of what it returned, or of its refusal.
    pub outcome: u64,
    /// Of a plan: a digest of each of its arrays, and of the counters: see [`mod@crate::digest`].
    pub digests: Vec<u32>,
}

/// A recording that was read.
#[derive(Clone, Debug)]
pub struct Recording {
    /// What the scheduler was made with.
    pub config: Config,
    /// Number of the first entry; 1: nothing is missing. Only then it can be replayed.
    pub first: u64,
    /// Checksum of the record before the first entry.
    before: Check,
    /// In the order in which they happened.
    pub entries: Vec<Entry>,
    /// The bytes end within a record, as after a crash: this is what stands before it.
    pub is_cut: bool,
}

/// The header and the configuration; the checksum of the configuration.
pub(crate) fn begin(out: &mut Vec<u8>, config: &Config, missing: Option<(u64, Check)>) -> Check {
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    let at = out.len();
    out.extend_from_slice(&[0; 16]);
    let first = missing.map_or(1, |(first, _)| first);
    let check = frame(out, first.to_le_bytes(), |out| put_config(out, config));
    let before = missing.map_or(check, |(_, before)| before);
    out[at..at + 8].copy_from_slice(&first.to_le_bytes());
    out[at + 8..at + 16].copy_from_slice(&before);
    check
}

/// Appends a record whose body `write` writes; its checksum.
pub(crate) fn frame(out: &mut Vec<u8>, before: Check, write: impl FnOnce(&mut Vec<u8>)) -> Check {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out);
    let len = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
    let check = checksum(before, &out[start..]);
    out.extend_from_slice(&check);
    check
}

pub(crate) fn checksum(before: Check, record: &[u8]) -> Check {
    if mutant::is_on(Mutant::ChecksumIgnored) {
        return [0; 8];
    }
    let mut hash = blake3::Hasher::new();
    hash.update(&before).update(record);
    *hash.finalize().as_bytes().first_chunk().expect("32 bytes")
}

/// Makes the checksums of bytes right that were changed on purpose: for tests, which else would never get behind them. As far as the
/// bytes have the form of records.
pub fn mend(bytes: &mut [u8]) {
    let Some(&first) = bytes.get(12..).and_then(|rest| rest.first_chunk()) else { return };
    let (mut at, mut check) = (28, first);
    while let Some(rest) = bytes.get_mut(at..)
        && let Some(len) = rest.first_chunk().map(|&len| u32::from_le_bytes(len) as usize)
        && rest.len() >= len.saturating_add(FRAME)
    {
        let is_config = at == 28;
        check = checksum(check, &rest[..4 + len]);
        rest[4 + len..][..8].copy_from_slice(&check);
        at += len + FRAME;
        if is_config && first == 1_u64.to_le_bytes() {
            bytes[20..28].copy_from_slice(&check);
        } else if is_config {
            check = *bytes[20..].first_chunk().expect("eight bytes of the header");
        }
    }
}

impl Recording {
    /// Reads what was recorded. Never holds more than a small multiple of the bytes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the byte where they break.
    pub fn read(bytes: &[u8]) -> Result<Recording> {
        let mut left = Left { bytes, at: 0 };
        if left.take()? != *MAGIC {
            return refused(0, "must begin with BTRECORD");
        }
        let version = u32::from_le_bytes(left.take()?);
        if version != VERSION {
            return refused(8, &format!("is of version {version}; this build reads version {VERSION}"));
        }
        let (first, before) = (u64::from_le_bytes(left.take()?), left.take()?);
        let Some((mut body, config_check)) = left.record(first.to_le_bytes())? else {
            return left.broken("the bytes end here");
        };
        let config = body.config()?;
        body.end()?;
        if first == 0 || (first == 1) != (before == config_check) {
            return refused(12, "the first record must be numbered 1 or above, with the checksum before it");
        }
        let mut recording = Recording { config, first, before, entries: Vec::new(), is_cut: false };
        let mut check = before;
        while left.at < bytes.len() {
            let Some((mut body, next)) = left.record(check)? else {
                recording.is_cut = true;
                break;
            };
            check = next;
            recording.entries.push(body.entry()?);
            body.end()?;
        }
        Ok(recording)
    }

    /// The bytes that it was read from, up to where they were cut.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let missing = (self.first > 1).then_some((self.first, self.before));
        let mut check = begin(&mut out, &self.config, missing);
        if self.first > 1 {
            check = self.before;
        }
        for entry in &self.entries {
            check = frame(&mut out, check, |out| put_entry(out, entry));
        }
        out
    }
}

pub(crate) fn refused<T>(at: usize, bound: &str) -> Result<T> {
    Err(Error::InvalidInput { field: "recording", value: at as i128, bound: bound.to_owned() })
}

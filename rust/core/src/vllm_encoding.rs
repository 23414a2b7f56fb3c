//! The bytes that vLLM 0.32 hashes for a block, so that its routers and event consumers know our keys.
//!
//! Before: `hash_algorithm` names one of the two. After: [`BlockHasher`](crate::block_hash::BlockHasher) hashes the bytes with SHA-256.
//! A block is `(parent key, (token, ...), None | (field, ...))`: in canonical CBOR for `sha256_cbor`, pickled by protocol 5 for vLLM's
//! `sha256`. Pickle names an object that comes a second time by its number. For the tags of fields that is always so; two media
//! of one block with equal ids are two objects here, which vLLM's may or may not be. A pickle is one frame, as vLLM's is up to 64 KiB.

use crate::ids::{Key, TokenId};

/// The text whose hash is the parent of first blocks when no seed is configured.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// A field of vLLM's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra<'a> {
    /// An adapter, in every block.
    Lora {
        /// Its name.
        name: &'a [u8],
        /// Where it was loaded from.
        path: &'a [u8],
    },
    /// A media item, in every block that it touches.
    Media {
        /// What it is.
        id: &'a [u8],
        /// Where it begins, counted from the first token of the block.
        offset: i64,
    },
    /// The salt of a prompt, in its first block.
    Salt(&'a [u8]),
}

/// How a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Canonical CBOR.
    Cbor,
    /// Pickle, protocol 5.
    Pickle,
}

impl Format {
    /// Appends a block.
    pub fn write_block(self, to: &mut Vec<u8>, parent: &Key, tokens: &[TokenId], extras: &[Extra<'_>]) {
        match self {
            Format::Cbor => cbor_block(to, parent, tokens, extras),
            Format::Pickle => Pickle::new(to).block(parent, tokens, extras),
        }
    }

    /// Appends a text, whose hash is the parent of first blocks.
    pub fn write_seed(self, to: &mut Vec<u8>, seed: &[u8]) {
        match self {
            Format::Cbor => cbor_bytes(to, 3, seed),
            Format::Pickle => Pickle::new(to).seed(seed),
        }
    }
}

impl<'a> Extra<'a> {
    fn tag(&self) -> &'static str {
        match self {
            Extra::Lora { .. } => "lora",
            Extra::Media { .. } => "mm",
            Extra::Salt(_) => "cache_salt",
        }
    }
}

fn cbor_block(to: &mut Vec<u8>, parent: &Key, tokens: &[TokenId], extras: &[Extra<'_>]) {
    cbor_head(to, 4, 3);
    cbor_bytes(to, 2, &parent.0);
    cbor_head(to, 4, tokens.len() as u64);
    tokens.iter().for_each(|&token| cbor_head(to, 0, token.into()));
    if extras.is_empty() {
        to.push(0xF6);
        return;
    }
    cbor_head(to, 4, extras.len() as u64);
    for extra in extras {
        cbor_head(to, 4, if matches!(extra, Extra::Salt(_)) { 2 } else { 3 });
        cbor_bytes(to, 3, extra.tag().as_bytes());
        match *extra {
            Extra::Lora { name, path } => {
                cbor_bytes(to, 3, name);
                cbor_bytes(to, 3, path);
            }
            Extra::Media { id, offset } => {
                cbor_bytes(to, 3, id);
                // A negative number n is written as -1 - n.
                let (major, value) = if offset < 0 { (1, !offset as u64) } else { (0, offset as u64) };
                cbor_head(to, major, value);
            }
            Extra::Salt(salt) => cbor_bytes(to, 3, salt),
        }
    }
}

/// A kind and a number, in as few bytes as it needs.
fn cbor_head(to: &mut Vec<u8>, major: u8, value: u64) {
    let kind = major << 5;
    match value {
        0..=23 => to.push(kind | value as u8),
        24..=0xFF => to.extend_from_slice(&[kind | 24, value as u8]),
        0x100..=0xFFFF => {
            to.push(kind | 25);
            to.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xFFFF_FFFF => {
            to.push(kind | 26);
            to.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            to.push(kind | 27);
            to.extend_from_slice(&value.to_be_bytes());
        }
    }
}

fn cbor_bytes(to: &mut Vec<u8>, major: u8, bytes: &[u8]) {
    cbor_head(to, major, bytes.len() as u64);
    to.extend_from_slice(bytes);
}

/// A pickle being written. Strings, bytes and tuples are numbered as they are written.
struct Pickle<'a> {
    to: &'a mut Vec<u8>,
    frame: usize,
    numbered: u32,
    media: Option<u32>,
}

impl<'a> Pickle<'a> {
    fn new(to: &'a mut Vec<u8>) -> Self {
        to.extend_from_slice(&[0x80, 5, 0x95]);
        let frame = to.len();
        to.extend_from_slice(&[0; 8]);
        Pickle { to, frame, numbered: 0, media: None }
    }

    fn seed(mut self, seed: &[u8]) {
        self.text(seed);
        self.end();
    }

    fn block(mut self, parent: &Key, tokens: &[TokenId], extras: &[Extra<'_>]) {
        self.to.extend_from_slice(&[b'C', 32]);
        self.to.extend_from_slice(&parent.0);
        self.number_it();
        self.tuple(tokens.len(), |pickle| tokens.iter().for_each(|&token| pickle.int(token.into())));
        if extras.is_empty() {
            self.to.push(b'N');
        } else {
            self.tuple(extras.len(), |pickle| extras.iter().for_each(|extra| pickle.extra(extra)));
        }
        self.to.push(0x87);
        self.number_it();
        self.end();
    }

    fn extra(&mut self, extra: &Extra<'_>) {
        let len = if matches!(extra, Extra::Salt(_)) { 2 } else { 3 };
        self.tuple(len, |pickle| {
            pickle.tag(extra);
            match *extra {
                Extra::Lora { name, path } => {
                    pickle.text(name);
                    pickle.text(path);
                }
                Extra::Media { id, offset } => {
                    pickle.text(id);
                    pickle.int(offset);
                }
                Extra::Salt(salt) => pickle.text(salt),
            }
        });
    }

    /// Only the tag of media can come twice in one block.
    fn tag(&mut self, extra: &Extra<'_>) {
        if let (Extra::Media { .. }, Some(number)) = (extra, self.media) {
            match u8::try_from(number) {
                Ok(number) => self.to.extend_from_slice(&[b'h', number]),
                Err(_) => {
                    self.to.push(b'j');
                    self.to.extend_from_slice(&number.to_le_bytes());
                }
            }
            return;
        }
        if let Extra::Media { .. } = extra {
            self.media = Some(self.numbered);
        }
        self.text(extra.tag().as_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        match u8::try_from(text.len()) {
            Ok(len) => self.to.extend_from_slice(&[0x8C, len]),
            Err(_) => {
                self.to.push(b'X');
                self.to.extend_from_slice(&(text.len() as u32).to_le_bytes());
            }
        }
        self.to.extend_from_slice(text);
        self.number_it();
    }

    fn int(&mut self, value: i64) {
        if let Ok(value) = u8::try_from(value) {
            self.to.extend_from_slice(&[b'K', value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.to.push(b'M');
            self.to.extend_from_slice(&value.to_le_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.to.push(b'J');
            self.to.extend_from_slice(&value.to_le_bytes());
        } else {
            // As many bytes as the number and its sign need.
            let bits = 65 - (if value < 0 { !value } else { value }).leading_zeros();
            let len = bits.div_ceil(8) as usize;
            self.to.extend_from_slice(&[0x8A, len as u8]);
            self.to.extend_from_slice(&value.to_le_bytes()[..len]);
        }
    }

    fn tuple(&mut self, len: usize, items: impl FnOnce(&mut Self)) {
        if len > 3 {
            self.to.push(b'(');
        }
        items(self);
        self.to.push(match len {
            1 => 0x85,
            2 => 0x86,
            3 => 0x87,
            _ => b't',
        });
        self.number_it();
    }

    fn number_it(&mut self) {
        self.to.push(0x94);
        self.numbered += 1;
    }

    fn end(self) {
        self.to.push(b'.');
        let len = (self.to.len() - self.frame - 8) as u64;
        self.to[self.frame..self.frame + 8].copy_from_slice(&len.to_le_bytes());
    }
}

//! Events as bytes: what crosses a border in one piece, and the way back. All numbers are little-endian.
//!
//! Before: [`EventLog`](crate::events::EventLog) or a snapshot of the index. After: a publisher, on a thread of its own.
//!
//! | part | bytes | meaning |
//! |---|---|---|
//! | header | 8 | number of the event that comes after these: where to read on |
//! | | 8 | events that were lost before these |
//! | | 4 | events that follow |
//! | | 4 | tokens a block |
//! | event | 1 | 1 stored, 2 removed, 3 cleared |
//! | | 1 | group |
//! | | 1 | 1 if there is a parent, else 0 |
//! | | 1 | 0 |
//! | stored, removed | 32 | key |
//! | stored with parent | 32 | key of the block before it |
//! | stored | 4 × tokens | its tokens |
//!
//! Every sequence of bytes is either one of these, exactly, or refused with the place where it breaks.

use crate::error::{Error, Result};
use crate::events::Event;
use crate::ids::{Key, TokenId};
use crate::mutant::{self, Mutant};

/// Bytes of the header.
const HEADER: usize = 24;

/// Puts events into bytes.
pub struct Encoder<'a> {
    bytes: &'a mut Vec<u8>,
    count: u32,
}

impl<'a> Encoder<'a> {
    /// Clears `bytes` and writes the header. `next`: where to read on; `lost`: what was lost before.
    pub fn new(bytes: &'a mut Vec<u8>, next: u64, lost: u64, block_size: usize) -> Self {
        bytes.clear();
        bytes.extend_from_slice(&next.to_le_bytes());
        bytes.extend_from_slice(&lost.to_le_bytes());
        bytes.extend_from_slice(&0_u32.to_le_bytes());
        bytes.extend_from_slice(&(block_size as u32).to_le_bytes());
        Encoder { bytes, count: 0 }
    }

    /// Appends one event.
    pub fn push(&mut self, event: &Event<'_>) {
        let head = |kind, group, has_parent: bool| [kind, group, u8::from(has_parent), 0];
        match event {
            Event::Stored { key, parent, tokens, group } => {
                self.bytes.extend_from_slice(&head(1, *group, parent.is_some()));
                self.bytes.extend_from_slice(&key.0);
                if let Some(parent) = parent {
                    self.bytes.extend_from_slice(&parent.0);
                }
                for token in *tokens {
                    self.bytes.extend_from_slice(&token.to_le_bytes());
                }
            }
            Event::Removed { key, group } => {
                self.bytes.extend_from_slice(&head(2, *group, false));
                self.bytes.extend_from_slice(&key.0);
            }
            Event::Cleared => self.bytes.extend_from_slice(&head(3, 0, false)),
        }
        self.count += 1;
    }

    /// Completes the header; how many events there are.
    pub fn finish(self) -> u32 {
        let count = self.count + u32::from(mutant::is_on(Mutant::EventCountWrong));
        self.bytes[16..20].copy_from_slice(&count.to_le_bytes());
        self.count
    }
}

/// Events read from bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Where to read on.
    pub next: u64,
    /// What was lost before these.
    pub lost: u64,
    /// Tokens a block.
    pub block_size: u32,
    events: Vec<Owned>,
    tokens: Vec<TokenId>,
}

/// An event whose tokens are a range of [`Decoded::tokens`].
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owned {
    Stored { key: Key, parent: Option<Key>, first: usize, group: u8 },
    Removed { key: Key, group: u8 },
    Cleared,
}

impl Decoded {
    /// The events, in order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Event<'_>> {
        self.events.iter().map(|event| match *event {
            Owned::Stored { key, parent, first, group } => {
                let tokens = &self.tokens[first..first + self.block_size as usize];
                Event::Stored { key, parent, tokens, group }
            }
            Owned::Removed { key, group } => Event::Removed { key, group },
            Owned::Cleared => Event::Cleared,
        })
    }
}

/// Reads what an [`Encoder`] wrote. Takes any bytes; never holds more than a small multiple of their length.
///
/// # Errors
/// [`Error::InvalidInput`] with the byte where they break.
pub fn decode(bytes: &[u8]) -> Result<Decoded> {
    let mut left = Left { bytes, at: 0 };
    let next = u64::from_le_bytes(left.take()?);
    let lost = u64::from_le_bytes(left.take()?);
    let count = u32::from_le_bytes(left.take()?);
    let block_size = u32::from_le_bytes(left.take()?);
    // Each event has four bytes or more, so a count that lies is found out before it takes memory.
    if count as usize > (bytes.len() - HEADER) / 4 {
        return left.broken("more events are announced than there are bytes for");
    }
    let mut decoded =
        Decoded { next, lost, block_size, events: Vec::with_capacity(count as usize), tokens: Vec::new() };
    for _ in 0..count {
        let event = left.event(block_size as usize, &mut decoded.tokens)?;
        decoded.events.push(event);
    }
    if left.at != bytes.len() {
        return left.broken("bytes follow the last event");
    }
    Ok(decoded)
}

/// Bytes that are not read yet.
struct Left<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Left<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some(taken) = self.bytes[self.at..].first_chunk() else { return self.broken("the bytes end here") };
        self.at += N;
        Ok(*taken)
    }

    fn event(&mut self, block_size: usize, tokens: &mut Vec<TokenId>) -> Result<Owned> {
        let [kind, group, has_parent, zero] = self.take()?;
        if zero != 0 || has_parent > 1 || (has_parent == 1 && kind != 1) {
            return self.broken("an event begins with its kind, its group, and whether it has a parent");
        }
        match kind {
            1 => {
                let key = Key(self.take()?);
                let parent = if has_parent == 1 { Some(Key(self.take()?)) } else { None };
                let first = tokens.len();
                let length = block_size.saturating_mul(4);
                let Some(raw) = self.bytes.get(self.at..self.at.saturating_add(length)) else {
                    return self.broken("the tokens of a block do not fit");
                };
                tokens.extend(raw.as_chunks().0.iter().map(|&token| TokenId::from_le_bytes(token)));
                self.at += length;
                Ok(Owned::Stored { key, parent, first, group })
            }
            2 => Ok(Owned::Removed { key: Key(self.take()?), group }),
            3 if group == 0 => Ok(Owned::Cleared),
            _ => self.broken("an event is stored (1), removed (2) or cleared (3, group 0)"),
        }
    }

    fn broken<T>(&self, bound: &str) -> Result<T> {
        Err(Error::InvalidInput { field: "event bytes", value: self.at as i128, bound: bound.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(events: &[Event<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, 17, 5, 2);
        events.iter().for_each(|event| encoder.push(event));
        assert_eq!(encoder.finish(), events.len() as u32);
        bytes
    }

    fn three() -> [Event<'static>; 4] {
        let (a, b) = (Key([1; 32]), Key([2; 32]));
        [
            Event::Stored { key: a, parent: None, tokens: &[3, u32::MAX], group: 0 },
            Event::Stored { key: b, parent: Some(a), tokens: &[5, 6], group: 255 },
            Event::Removed { key: b, group: 255 },
            Event::Cleared,
        ]
    }

    #[test]
    fn what_was_put_in_comes_out() {
        let decoded = decode(&bytes(&three())).unwrap();
        assert_eq!((decoded.next, decoded.lost, decoded.block_size), (17, 5, 2));
        assert_eq!(decoded.events().collect::<Vec<_>>(), three());
    }

    #[test]
    fn whatever_is_cut_off_or_added_is_refused() {
        let whole = bytes(&three());
        for len in 0..whole.len() {
            assert!(decode(&whole[..len]).is_err(), "{len} bytes of {} are accepted", whole.len());
        }
        assert!(decode(&[&whole[..], &[0]].concat()).is_err());
    }

    #[test]
    fn a_count_that_lies_takes_no_memory() {
        let mut huge = bytes(&[]);
        huge[16..20].fill(255);
        assert!(decode(&huge).is_err());
    }
}

//! What the records of a recording are made of, one way and back: numbers, texts, lists, and the frame of a record.
//!
//! Before: `recording_calls.rs` and `recording_config.rs` say what stands where. After: bytes, each number in one way alone; or an error that
//! says at which byte they are wrong.

use crate::error::Result;
use crate::mutant::{self, Mutant};
use crate::recording::{Check, FRAME, checksum, refused};

pub(crate) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(crate) fn fold(number: i64) -> u64 {
    (number.wrapping_shl(1) ^ (number >> 63)) as u64
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    put(out, text.len() as u64);
    out.extend_from_slice(text);
}

/// Bytes that are not read yet.
pub(crate) struct Left<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Left<'a> {
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some(taken) = self.bytes[self.at..].first_chunk() else { return self.broken("the bytes end here") };
        self.at += N;
        Ok(*taken)
    }

    /// The body of the next record, and its checksum; none if the bytes end within it.
    pub fn record(&mut self, before: Check) -> Result<Option<(Left<'a>, Check)>> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.first_chunk().map(|&len| u32::from_le_bytes(len) as usize) else { return Ok(None) };
        if rest.len() < len.saturating_add(FRAME) {
            return Ok(None);
        }
        let check = checksum(before, &rest[..4 + len]);
        if rest[4 + len..][..8] != check && !mutant::is_on(Mutant::ChecksumIgnored) {
            return self.broken("the checksum of this record is wrong");
        }
        let body = Left { bytes: &self.bytes[..self.at + 4 + len], at: self.at + 4 };
        self.at += len + FRAME;
        Ok(Some((body, check)))
    }

    pub fn end(&self) -> Result<()> {
        if self.at == self.bytes.len() { Ok(()) } else { self.broken("bytes follow in this record") }
    }

    pub fn number(&mut self) -> Result<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.take()?;
            let part = u64::from(byte & 0x7F);
            if part << shift >> shift != part {
                break;
            }
            number |= part << shift;
            if byte < 0x80 {
                if byte == 0 && shift > 0 && !mutant::is_on(Mutant::RecordingNumberTooLong) {
                    break;
                }
                return Ok(number);
            }
        }
        self.broken("a number must be LEB128 of 64 bits at most, without needless bytes")
    }

    pub fn number32(&mut self) -> Result<u32> {
        match u32::try_from(self.number()?) {
            Ok(number) => Ok(number),
            Err(_) => self.broken("a number must have 32 bits at most"),
        }
    }

    pub fn signed(&mut self) -> Result<i64> {
        let folded = self.number()?;
        Ok((folded >> 1) as i64 ^ -((folded & 1) as i64))
    }

    /// How many follow, each of `bytes` bytes at least: a count that lies is found out before it takes memory.
    pub fn count(&mut self, bytes: usize) -> Result<usize> {
        let count = self.number()?;
        if count > ((self.bytes.len() - self.at) / bytes) as u64 {
            return self.broken("more are announced than there are bytes for");
        }
        Ok(count as usize)
    }

    pub fn list<T>(&mut self, bytes: usize, read: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.count(bytes)?;
        (0..count).map(|_| read(self)).collect()
    }

    pub fn flag(&mut self) -> Result<bool> {
        match self.take()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => self.broken("must be 0 or 1"),
        }
    }

    pub fn text(&mut self) -> Result<Vec<u8>> {
        let len = self.count(1)?;
        let text = self.bytes[self.at..self.at + len].to_vec();
        self.at += len;
        Ok(text)
    }

    pub fn string(&mut self) -> Result<String> {
        match String::from_utf8(self.text()?) {
            Ok(text) => Ok(text),
            Err(_) => self.broken("must be UTF-8"),
        }
    }

    pub fn broken<T>(&self, bound: &str) -> Result<T> {
        refused(self.at, bound)
    }
}

//! Bytes that hold no events are refused, and bytes that do mean one thing only.
//!
//! Before: proptest damages what an encoder wrote, or draws bytes. After: they were refused with the place where they break, or
//! encoding what they mean gives the same bytes again.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::event_bytes::{Encoder, decode};
use blocktable_core::events::Event;
use blocktable_core::ids::Key;

use crate::broken::{Checked, broken};
use crate::mirror::decoded;
use crate::seed;

/// Kind, key, parent, group; and what is done to the bytes: cut, and one byte changed.
type Case = (usize, Vec<(u8, u8, Option<u8>, u8)>, Option<usize>, Option<(usize, u8)>);

fn cases() -> impl Strategy<Value = Case> {
    let event = (0..3_u8, any::<u8>(), any::<Option<u8>>(), any::<u8>());
    (0..5_usize, vec(event, 0..6), any::<Option<usize>>(), any::<Option<(usize, u8)>>())
}

#[test]
fn damaged_bytes_are_refused_or_mean_something_else() {
    seed::run_cases("event_bytes", 20_000, &cases(), |(block_size, events, cut, change)| {
        let tokens: Vec<u32> = (0..block_size as u32).collect();
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, 9, 0, block_size);
        for (kind, key, parent, group) in events {
            let (key, parent) = (Key([key; 32]), parent.map(|parent| Key([parent; 32])));
            encoder.push(&match kind {
                0 => Event::Stored { key, parent, tokens: &tokens, group },
                1 => Event::Removed { key, group },
                _ => Event::Cleared,
            });
        }
        encoder.finish();
        decoded(&bytes)?;
        if let Some((at, byte)) = change {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        bytes.truncate(cut.map_or(bytes.len(), |cut| cut % (bytes.len() + 1)));
        if decode(&bytes).is_ok() { decoded(&bytes).map(drop) } else { Checked::Ok(()) }
    });
}

#[test]
fn any_bytes_are_read_or_refused() {
    seed::run_cases("event_bytes, any", 20_000, &vec(any::<u8>(), 0..200), |bytes| match decode(&bytes) {
        Ok(_) => decoded(&bytes).map(drop),
        Err(error) if error.to_string().starts_with("event bytes=") => Ok(()),
        Err(error) => broken("bytes", error.to_string()),
    });
}

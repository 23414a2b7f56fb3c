//! The prefix index once more, rebuilt from its events alone.
//!
//! Before: events came out of the core as bytes. After: [`Mirror::apply`] says which of them does not follow from those before, and
//! [`Mirror::compare`] whether the rebuilt set of keys is the index's.

use std::collections::{BTreeMap, BTreeSet};

use blocktable_core::event_bytes::{Decoded, Encoder, decode};
use blocktable_core::events::Event;
use blocktable_core::ids::{Key, TokenId};
use blocktable_core::prefix_index::{KeyState, PrefixIndex};

use crate::broken::{Checked, broken, ensure};

/// Whether a key names these tokens behind this parent in this group.
pub type Names<'a> = &'a dyn Fn(&Key, Option<Key>, &[TokenId], u8) -> bool;

/// A reader of events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mirror {
    /// Number of the event that it waits for.
    pub next: u64,
    /// Published keys of chains, each with its groups and the key before it there.
    pub keys: BTreeMap<(u8, Key), Option<Key>>,
    /// How often it fell behind and started again.
    pub restarts: usize,
}

impl Mirror {
    /// Applies what came since `next`. False if it fell behind: it must start again from a snapshot.
    pub fn apply(&mut self, decoded: &Decoded, names: Names<'_>) -> Checked<bool> {
        let number = self.next + decoded.lost + decoded.events().len() as u64;
        ensure(number == decoded.next, "numbers", || {
            format!("{} + {} lost + {} is not {}", self.next, decoded.lost, decoded.events().len(), decoded.next)
        })?;
        if decoded.lost > 0 {
            return Ok(false);
        }
        decoded.events().try_for_each(|event| self.take(&event, names))?;
        self.next = decoded.next;
        Ok(true)
    }

    /// Starts again from a snapshot: no key may come twice, or before its parent if that is published.
    pub fn restart(&mut self, snapshot: &Decoded, names: Names<'_>) -> Checked {
        let mut events = snapshot.events();
        ensure(events.next() == Some(Event::Cleared), "snapshot", || "it does not begin with a clear".to_owned())?;
        self.keys.clear();
        let mut waited_for = Vec::new();
        for event in events {
            self.take(&event, names)?;
            if let Event::Stored { key, parent, group, .. } = event {
                ensure(!waited_for.contains(&(group, key)), "snapshot", || format!("{key:?} comes behind its child"))?;
                let parent = parent.map(|parent| (group, parent));
                waited_for.extend(parent.filter(|parent| !self.keys.contains_key(parent)));
            }
        }
        self.next = snapshot.next;
        self.restarts += 1;
        Ok(())
    }

    /// Reads an index directly.
    pub fn follow(&mut self, index: &PrefixIndex, names: Names<'_>) -> Checked {
        let Some(log) = index.events() else { return Ok(()) };
        let mut bytes = Vec::new();
        let reading = log.since(self.next).or_else(|error| broken("numbers", error.to_string()))?;
        let mut encoder = Encoder::new(&mut bytes, log.next(), reading.lost, log.block_size());
        reading.events().for_each(|event| encoder.push(&event));
        encoder.finish();
        if !self.apply(&decoded(&bytes)?, names)? {
            let mut encoder = Encoder::new(&mut bytes, log.next(), 0, log.block_size());
            index.snapshot(|event| encoder.push(&event));
            encoder.finish();
            self.restart(&decoded(&bytes)?, names)?;
        }
        self.compare(index)
    }

    /// The keys are those of the published blocks.
    pub fn compare(&self, index: &PrefixIndex) -> Checked {
        let told: BTreeSet<Key> = self.keys.keys().map(|(group, key)| key.in_group(usize::from(*group))).collect();
        let published: BTreeSet<Key> = published(index).collect();
        ensure(told == published, "mirror", || format!("the events tell {:?}, the index has {published:?}", self.keys))
    }

    fn take(&mut self, event: &Event<'_>, names: Names<'_>) -> Checked {
        match *event {
            Event::Stored { key, parent, tokens, group } => {
                let is_it = names(&key, parent, tokens, group);
                ensure(is_it, "content", || format!("{key:?} does not name {tokens:?} behind {parent:?}"))?;
                let before = self.keys.insert((group, key), parent);
                ensure(before.is_none(), "mirror", || format!("{key:?} is stored although it was"))
            }
            Event::Removed { key, group } => {
                let before = self.keys.remove(&(group, key));
                ensure(before.is_some(), "mirror", || format!("{key:?} of group {group} is removed, it was not stored"))
            }
            Event::Cleared => {
                self.keys.clear();
                Ok(())
            }
        }
    }
}

/// What the bytes hold; that they say nothing in two ways is checked, too.
pub fn decoded(bytes: &[u8]) -> Checked<Decoded> {
    let decoded = decode(bytes).or_else(|error| broken("bytes", error.to_string()))?;
    let mut again = Vec::new();
    let mut encoder = Encoder::new(&mut again, decoded.next, decoded.lost, decoded.block_size as usize);
    decoded.events().for_each(|event| encoder.push(&event));
    encoder.finish();
    ensure(again == bytes, "bytes", || "other bytes mean the same".to_owned())?;
    Ok(decoded)
}

fn published(index: &PrefixIndex) -> impl Iterator<Item = Key> {
    index.blocks().filter(|&block| index.state(block) == KeyState::Published).filter_map(|block| index.key(block))
}

//! Recounts the index: A4.
//!
//! Before: any time between two calls. After: the first name that is not where it must be, if any. Reads only.

use crate::error::{Error, Result};
use crate::ids::{BlockId, Key};
use crate::prefix_index::{CHAIN, KeyState, NEXT, NONE, PrefixIndex, STATE, STATES, state_in, tag};

impl PrefixIndex {
    /// A4: every entry names a block whose own key equals it, and every named block is reached from its entry, once.
    ///
    /// # Errors
    /// [`Error::Audit`] with what was found.
    pub fn audit(&self) -> Result<()> {
        let wrong = |detail: String| Err(Error::Audit { check: "A4", detail });
        let mut reached = vec![false; self.keys.len()];
        for (bucket, &head) in self.buckets.iter().enumerate() {
            let mut first = head;
            while first != NONE {
                let key = self.keys[first as usize];
                if self.bucket(&Key(key)) != bucket {
                    return wrong(format!("block {first} stands in a bucket that is not its key's"));
                }
                let (mut block, mut before) = (first, KeyState::Published);
                loop {
                    let at = block as usize;
                    let state = state_in(&self.links[at]);
                    let is_named = state == KeyState::Pending || state == KeyState::Published && state == before;
                    let has_tag = self.links[at][STATE] & !STATES == tag(&Key(key));
                    if self.keys[at] != key || !has_tag || !is_named {
                        return wrong(format!(
                            "block {block} does not carry the key of its entry, or not in its order"
                        ));
                    }
                    if std::mem::replace(&mut reached[at], true) {
                        return wrong(format!("block {block} is named twice"));
                    }
                    (block, before) = (self.links[at][NEXT], state);
                    if block == first {
                        break;
                    }
                }
                first = self.links[first as usize][CHAIN];
            }
        }
        let state = |at: usize| self.state(BlockId(at as u32));
        let named = |at: usize| state(at) != KeyState::Unnamed;
        if let Some(at) = (0..reached.len()).find(|&at| named(at) != reached[at]) {
            return wrong(format!("block {at} has a key in state {:?} that no entry names", state(at)));
        }
        let counted = self.links.iter().filter(|links| state_in(links) == KeyState::Published).count();
        if counted != self.num_published as usize {
            return wrong(format!("{counted} blocks are published, {} are counted", self.num_published));
        }
        Ok(())
    }
}

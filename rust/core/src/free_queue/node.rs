//! The three words of every block: its link forwards, its link backwards, its state.
//!
//! A word carries 32 bits of content below 32 bits of version. A link's version grows with every change, so that who read the link
//! before cannot change it after. A state's version grows whenever the block leaves a lane. Behind the blocks stand the sentinels, one
//! for each lane; a link of 0 in a sentinel leads to itself, so zeroed memory is a pool of fresh blocks and empty lanes.

use crate::resident::bring_in_words;
use crate::sync::{AtomicU64, Ordering, zeroed};

const VERSION: u64 = !0 << 32;
const NAMED: u32 = 1 << 31;
/// The bit of a state word that says that the content has a name.
pub(super) const NAME: u64 = NAMED as u64;
const IN_LANE: u32 = 1 << 30;
const OUT: u32 = 1 << 29;
const LANE: u32 = (1 << 12) - 1;

/// Holders that a block can have.
pub(crate) const MAX_HOLDERS: u32 = OUT - 1;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Never handed out.
    Fresh,
    /// With this many holders.
    Held(u32),
    /// With who freed it, in the stack, or on its way to this lane.
    Out(u16),
    /// In this lane.
    Lane(u16),
}

/// What a state word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub place: Place,
    /// Whether the content has a name, by which it can be hit.
    pub named: bool,
}

impl State {
    pub fn of(word: u64) -> State {
        let low = low(word);
        let place = match low & !NAMED {
            0 => Place::Fresh,
            rest if rest & IN_LANE != 0 => Place::Lane((rest & LANE) as u16),
            rest if rest & OUT != 0 => Place::Out((rest & LANE) as u16),
            holders => Place::Held(holders),
        };
        State { place, named: low & NAMED != 0 }
    }

    /// This state under the version of `word`.
    pub fn in_word(self, word: u64) -> u64 {
        let place = match self.place {
            Place::Fresh => 0,
            Place::Held(holders) => holders,
            Place::Out(lane) => OUT | u32::from(lane),
            Place::Lane(lane) => IN_LANE | u32::from(lane),
        };
        word & VERSION | u64::from(place | if self.named { NAMED } else { 0 })
    }
}

/// The content of a word.
pub(super) fn low(word: u64) -> u32 {
    word as u32
}

/// The word that follows `word`, with content `low`.
pub(super) fn after(word: u64, low: u32) -> u64 {
    (word & VERSION).wrapping_add(1 << 32) | u64::from(low)
}

/// The words of all blocks and sentinels.
pub(super) struct Nodes {
    words: Box<[[AtomicU64; 3]]>,
    num_blocks: u32,
}

impl Nodes {
    pub fn new(num_blocks: u32, lanes: usize) -> Self {
        Nodes { words: zeroed(num_blocks as usize + lanes), num_blocks }
    }

    /// Brings all their memory in: see [`resident`](crate::resident).
    pub fn bring_in(&self) {
        bring_in_words(&self.words);
    }

    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    pub fn next(&self, id: u32) -> &AtomicU64 {
        &self.words[id as usize][0]
    }

    pub fn prev(&self, id: u32) -> &AtomicU64 {
        &self.words[id as usize][1]
    }

    pub fn state(&self, id: u32) -> &AtomicU64 {
        &self.words[id as usize][2]
    }

    pub fn sentinel(&self, lane: u16) -> u32 {
        self.num_blocks + u32::from(lane)
    }

    pub fn is_sentinel(&self, id: u32) -> bool {
        id >= self.num_blocks
    }

    /// Where `word`, a link of `id`, leads.
    pub fn link(&self, word: u64, id: u32) -> u32 {
        if low(word) == 0 && self.is_sentinel(id) { id } else { low(word) }
    }

    /// Sets the link forwards of a block that is the caller's alone.
    pub fn set_next(&self, id: u32, to: u32) {
        set_own(self.next(id), |word| after(word, to));
    }

    /// Sets the link backwards of a block that is the caller's alone.
    pub fn set_prev(&self, id: u32, to: u32) {
        set_own(self.prev(id), |word| after(word, to));
    }

    /// Sets the state of a block that is the caller's alone.
    pub fn set_state(&self, id: u32, state: State) {
        set_own(self.state(id), |word| state.in_word(word));
    }
}

fn set_own(cell: &AtomicU64, new: impl Fn(u64) -> u64) {
    // Relaxed: the block is the caller's, so what it became so by brought the last change along.
    let word = cell.load(Ordering::Relaxed);
    // Release: a late helper that reads this learns with it that its operation is over (see `Lanes::read`).
    cell.store(new(word), Ordering::Release);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_out_of_its_word_as_it_went_in() {
        for place in [Place::Fresh, Place::Held(1), Place::Held(MAX_HOLDERS), Place::Out(0), Place::Out(1716)] {
            for named in [false, true] {
                let state = State { place, named };
                let word = state.in_word(7 << 32 | 99);
                assert_eq!((State::of(word), word >> 32), (state, 7));
            }
        }
        let state = State { place: Place::Lane(100), named: true };
        assert_eq!(State::of(state.in_word(0)), state);
    }

    #[test]
    fn a_version_grows_and_wraps_without_touching_the_content() {
        assert_eq!(after(3 << 32 | 5, 9), 4 << 32 | 9);
        assert_eq!(after(u64::MAX, 9), 9);
    }
}

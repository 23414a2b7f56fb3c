//! A row of seats whose keys rise: a seat comes behind the last or before the first, and any seat can be taken out.
//!
//! Before: most seats come in the order of their keys and leave in that order too, as requests do that are served as they arrive, or
//! that all have the same time. After: coming, leaving and the first cost a few instructions however many there are, where a heap
//! walks its depth. A seat that leaves from the middle leaves a gap; there are never more gaps than seats, but for a few, and none at
//! either end. Where a seat stands is kept in `places`, which a heap may share.

use std::collections::VecDeque;

use crate::mutant::{self, Mutant};
use crate::seat_heap::{Key, NOWHERE};

/// Marks a place in a row. Below it stands the number that the seat got when it came, counted on and on.
const IN_LANE: u32 = 1 << 31;
const NUMBERS: u32 = (1 << 30) - 1;
/// The seat of a gap.
const GAP: u32 = u32::MAX;
/// Gaps that may always stay.
const FEW: usize = 64;

/// Seats with rising keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeatLane {
    entries: VecDeque<(Key, u32)>,
    /// Number of the first entry.
    first: u32,
    gaps: usize,
}

impl SeatLane {
    /// Whether this is a place in a row.
    pub fn has(place: u32) -> bool {
        place != NOWHERE && place & IN_LANE != 0
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.gaps
    }

    /// The seat of the smallest key, and that key.
    pub fn first(&self) -> Option<(Key, usize)> {
        self.entries.front().map(|&(key, seat)| (key, seat as usize))
    }

    /// Seats in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, usize)> + '_ {
        self.entries.iter().filter(|&&(_, seat)| seat != GAP).map(|&(key, seat)| (key, seat as usize))
    }

    /// Puts `seat` in, which is nowhere, if its key is above or below all others; whether it is.
    pub fn push(&mut self, places: &mut [u32], seat: usize, key: Key) -> bool {
        if self.entries.back().is_none_or(|&(last, _)| key > last) || mutant::is_on(Mutant::LaneOutOfOrder) {
            self.entries.push_back((key, seat as u32));
            places[seat] = self.place(self.entries.len() - 1);
        } else if self.entries.front().is_some_and(|&(first, _)| key < first) {
            self.entries.push_front((key, seat as u32));
            self.first = self.first.wrapping_sub(1) & NUMBERS;
            places[seat] = self.place(0);
        } else {
            return false;
        }
        true
    }

    /// Gives `seat`, which is in this row, another key, if it may stand where it stands; whether it may.
    pub fn change(&mut self, places: &[u32], seat: usize, key: Key) -> bool {
        let at = self.at(places[seat]);
        let is_above = at == 0 || self.entries[at - 1].0 < key;
        let fits = is_above && self.entries.get(at + 1).is_none_or(|&(next, _)| key < next);
        if fits {
            self.entries[at].0 = key;
        }
        fits
    }

    /// Takes `seat` out, which is in this row.
    pub fn remove(&mut self, places: &mut [u32], seat: usize) {
        let at = self.at(std::mem::replace(&mut places[seat], NOWHERE));
        self.entries[at].1 = GAP;
        self.gaps += 1;
        while self.entries.back().is_some_and(|&(_, seat)| seat == GAP) {
            self.entries.pop_back();
            self.gaps -= 1;
        }
        while self.entries.front().is_some_and(|&(_, seat)| seat == GAP) {
            self.entries.pop_front();
            self.first = (self.first + 1) & NUMBERS;
            self.gaps -= 1;
        }
        if self.gaps > self.len() + FEW {
            self.close_up(places);
        }
    }

    /// Whether every entry is where it must be.
    pub fn is_sound(&self, places: &[u32]) -> bool {
        let ends = [self.entries.front(), self.entries.back()];
        self.entries.iter().filter(|&&(_, seat)| seat == GAP).count() == self.gaps
            && self.entries.iter().is_sorted_by(|(one, _), (next, _)| one < next)
            && ends.into_iter().flatten().all(|&(_, seat)| seat != GAP)
            && (0..).zip(&self.entries).all(|(at, &(_, seat))| seat == GAP || places[seat as usize] == self.place(at))
    }

    /// The place of the entry at `at`.
    fn place(&self, at: usize) -> u32 {
        IN_LANE | (self.first.wrapping_add(at as u32) & NUMBERS)
    }

    /// Where the entry of this place is.
    fn at(&self, place: u32) -> usize {
        (place.wrapping_sub(self.first) & NUMBERS) as usize
    }

    fn close_up(&mut self, places: &mut [u32]) {
        self.entries.retain(|&(_, seat)| seat != GAP);
        self.gaps = 0;
        for at in 0..self.entries.len() {
            places[self.entries[at].1 as usize] = self.place(at);
        }
    }
}

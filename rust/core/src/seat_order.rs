//! Seats by key, smallest first, from which any seat can be taken out.
//!
//! Before: a line gives each seat a key whose second part no other has, so that the order is total. After: the first is known at once,
//! the others are in no order. Those that come in the order of their keys stand in a row, the others in a heap. Where a seat stands is
//! kept in `places`, which several orders may share: a seat stands in one of them.

use crate::seat_heap::{Key, NOWHERE, SeatHeap};
use crate::seat_lane::SeatLane;

/// Seats with their keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeatOrder {
    lane: SeatLane,
    heap: SeatHeap,
}

impl SeatOrder {
    pub fn len(&self) -> usize {
        self.lane.len() + self.heap.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The seat of the smallest key, and that key.
    pub fn first(&self) -> Option<(Key, usize)> {
        match (self.lane.first(), self.heap.first()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Seats in no order, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, usize)> + '_ {
        self.lane.iter().chain(self.heap.iter())
    }

    /// Puts `seat` in, which is in no order over `places`.
    pub fn push(&mut self, places: &mut Vec<u32>, seat: usize, key: Key) {
        if places.len() <= seat {
            places.resize(seat + 1, NOWHERE);
        }
        if !self.lane.push(places, seat, key) {
            self.heap.push(places, seat, key);
        }
    }

    /// Takes `seat` out, which is in this order.
    pub fn remove(&mut self, places: &mut [u32], seat: usize) {
        if SeatLane::has(places[seat]) {
            self.lane.remove(places, seat);
        } else {
            self.heap.remove(places, seat);
        }
    }

    /// Gives `seat`, which is in this order, another key.
    pub fn change(&mut self, places: &mut Vec<u32>, seat: usize, key: Key) {
        if !SeatLane::has(places[seat]) {
            self.heap.change(places, seat, key);
        } else if !self.lane.change(places, seat, key) {
            self.lane.remove(places, seat);
            self.push(places, seat, key);
        }
    }

    /// Whether every seat is where it must be.
    pub fn is_sound(&self, places: &[u32]) -> bool {
        self.lane.is_sound(places) && self.heap.is_sound(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes all out, first to last.
    fn drained(mut order: SeatOrder, places: &mut [u32]) -> Vec<(Key, usize)> {
        std::iter::from_fn(|| {
            let first = order.first()?;
            order.remove(places, first.1);
            assert!(order.is_sound(places));
            Some(first)
        })
        .collect()
    }

    #[test]
    fn seats_leave_in_the_order_of_their_keys_whatever_was_taken_out_and_changed() {
        // From keys that rise to keys in no order.
        for disorder in [0, 1, 5, 97] {
            let (mut order, mut places) = (SeatOrder::default(), Vec::new());
            let key = |seat: usize| ((seat + seat * 7919 % 200 * disorder) as u64, seat as u64);
            (0..200).for_each(|seat| order.push(&mut places, seat, key(seat)));
            let mut expected: Vec<(Key, usize)> = Vec::new();
            for seat in 0..200 {
                match seat % 5 {
                    0 => order.remove(&mut places, seat),
                    1 => {
                        let other = (key(seat).0 ^ 5, seat as u64);
                        order.change(&mut places, seat, other);
                        expected.push((other, seat));
                    }
                    _ => expected.push((key(seat), seat)),
                }
                assert!(order.is_sound(&places));
            }
            assert_eq!(order.len(), expected.len());
            expected.sort_unstable();
            let mut listed: Vec<_> = order.iter().collect();
            listed.sort_unstable();
            assert_eq!(listed, expected);
            assert_eq!(drained(order, &mut places), expected);
            assert!(places.iter().all(|&place| place == NOWHERE));
        }
    }

    #[test]
    fn one_that_comes_back_goes_before_the_others_and_gaps_are_closed() {
        let (mut order, mut places) = (SeatOrder::default(), Vec::new());
        (0..1000).for_each(|seat| order.push(&mut places, seat, (seat as u64, 0)));
        for round in 0..3 {
            order.remove(&mut places, round);
            order.push(&mut places, round, (round as u64, 0));
            order.remove(&mut places, round);
        }
        for seat in (5..995).filter(|seat| seat % 9 != 0) {
            order.remove(&mut places, seat);
            assert!(order.is_sound(&places));
        }
        let left: Vec<usize> = (3..1000).filter(|seat| !(5..995).contains(seat) || seat % 9 == 0).collect();
        assert_eq!(drained(order, &mut places).into_iter().map(|(_, seat)| seat).collect::<Vec<_>>(), left);
    }

    #[test]
    fn numbers_of_places_begin_again() {
        let (mut order, mut places) = (SeatOrder::default(), Vec::new());
        order.push(&mut places, 1, (1 << 40, 0));
        for step in 1..10u64 {
            order.push(&mut places, 0, ((1 << 40) - step, 0)); // counted down below 0
            assert!(order.is_sound(&places));
            assert_eq!(order.first(), Some((((1 << 40) - step, 0), 0)));
            order.remove(&mut places, 0);
        }
        order.push(&mut places, 2, ((1 << 40) + 1, 0));
        assert_eq!(drained(order, &mut places).len(), 2);
    }
}

//! A heap of seats, smallest key first, from which any seat can be taken out.
//!
//! Before: a line gives each seat a key whose second part no other has, so that the order is total. After: the first is known at once,
//! the others are in no order. Where a seat stands is kept in `places`, which several heaps may share: a seat stands in one of them.

/// Smaller is earlier.
pub(crate) type Key = (u64, u64);

/// Where a seat is that stands in no heap.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// Children of an entry: a wide heap is shallow, and its children lie side by side.
const ARITY: usize = 4;

/// Seats with their keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeatHeap {
    entries: Vec<(Key, u32)>,
}

impl SeatHeap {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The seat of the smallest key, and that key.
    pub fn first(&self) -> Option<(Key, usize)> {
        self.entries.first().map(|&(key, seat)| (key, seat as usize))
    }

    /// Seats in no order, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, usize)> + '_ {
        self.entries.iter().map(|&(key, seat)| (key, seat as usize))
    }

    /// Puts `seat` in, which is in no heap over `places`.
    pub fn push(&mut self, places: &mut [u32], seat: usize, key: Key) {
        self.entries.push((key, seat as u32));
        self.rise(places, self.entries.len() - 1);
    }

    /// Takes `seat` out, which is in this heap.
    pub fn remove(&mut self, places: &mut [u32], seat: usize) {
        let at = std::mem::replace(&mut places[seat], NOWHERE) as usize;
        let last = self.entries.pop().expect("an entry");
        if at < self.entries.len() {
            self.entries[at] = last;
            self.settle(places, at);
        }
    }

    /// Gives `seat`, which is in this heap, another key.
    pub fn change(&mut self, places: &mut [u32], seat: usize, key: Key) {
        let at = places[seat] as usize;
        self.entries[at].0 = key;
        self.settle(places, at);
    }

    /// Whether every entry is where it must be.
    pub fn is_sound(&self, places: &[u32]) -> bool {
        self.entries.iter().enumerate().all(|(at, &(key, seat))| {
            places[seat as usize] as usize == at && (at == 0 || self.entries[(at - 1) / ARITY].0 < key)
        })
    }

    fn settle(&mut self, places: &mut [u32], at: usize) {
        if at > 0 && self.entries[at].0 < self.entries[(at - 1) / ARITY].0 {
            self.rise(places, at);
        } else {
            self.sink(places, at);
        }
    }

    fn rise(&mut self, places: &mut [u32], mut at: usize) {
        let entry = self.entries[at];
        while at > 0 && entry.0 < self.entries[(at - 1) / ARITY].0 {
            let parent = self.entries[(at - 1) / ARITY];
            self.put(places, at, parent);
            at = (at - 1) / ARITY;
        }
        self.put(places, at, entry);
    }

    fn sink(&mut self, places: &mut [u32], mut at: usize) {
        let entry = self.entries[at];
        loop {
            let first = ARITY * at + 1;
            let end = (first + ARITY).min(self.entries.len());
            let Some(child) = (first..end).min_by_key(|&child| self.entries[child].0) else { break };
            if self.entries[child].0 > entry.0 {
                break;
            }
            let child_entry = self.entries[child];
            self.put(places, at, child_entry);
            at = child;
        }
        self.put(places, at, entry);
    }

    fn put(&mut self, places: &mut [u32], at: usize, entry: (Key, u32)) {
        self.entries[at] = entry;
        places[entry.1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_leave_in_the_order_of_their_keys_whatever_was_taken_out_and_changed() {
        let (mut heap, mut places) = (SeatHeap::default(), vec![NOWHERE; 200]);
        let key = |seat: u64| ((seat * 7919) % 31, seat);
        (0..200).for_each(|seat| heap.push(&mut places, seat, key(seat as u64)));
        let mut expected: Vec<(Key, usize)> = Vec::new();
        for seat in 0..200 {
            match seat % 5 {
                0 => heap.remove(&mut places, seat),
                1 => {
                    let other = (key(seat as u64).0 ^ 5, seat as u64);
                    heap.change(&mut places, seat, other);
                    expected.push((other, seat));
                }
                _ => expected.push((key(seat as u64), seat)),
            }
            assert!(heap.is_sound(&places));
        }
        expected.sort_unstable();
        let left = std::iter::from_fn(|| {
            let first = heap.first()?;
            heap.remove(&mut places, first.1);
            Some(first)
        });
        assert_eq!(left.collect::<Vec<_>>(), expected);
        assert!(places.iter().all(|&place| place == NOWHERE));
    }
}

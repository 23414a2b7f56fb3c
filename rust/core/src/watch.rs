//! Which waiting request wants to know when a key appears in the prefix index, or goes.
//!
//! Before: a request whose prefix was looked up watches the last key that was found and the first that was not. After: a change of
//! either lists it among the changed, however many watch the key, at the cost of one look at a table; the reader takes them out as
//! it has time. Keys are told apart by 64 bits: a rare equal pair costs a second look, nothing else.

use hashbrown::HashTable;

use crate::ids::Key;

const NONE: u32 = u32::MAX;

/// Keys that one seat can watch.
const EACH: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    prev: u32,
    next: u32,
    is_linked: bool,
}

/// A list of nodes.
#[derive(Clone, Copy, Debug)]
struct List {
    key: u64,
    first: u32,
    last: u32,
}

/// Seats by the keys that they watch.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Those that watch one key, by key.
    lists: HashTable<List>,
    /// `EACH` for every seat.
    nodes: Vec<Node>,
    changed: List,
}

impl Default for Watch {
    fn default() -> Self {
        Watch { lists: HashTable::new(), nodes: Vec::new(), changed: List { key: 0, first: NONE, last: NONE } }
    }
}

impl Watch {
    /// Lets `seat`, which watches nothing, watch these keys.
    pub fn watch(&mut self, seat: usize, keys: [Option<&Key>; EACH]) {
        let least = (seat + 1) * EACH;
        if self.nodes.len() < least {
            self.nodes.resize(least, Node { key: 0, prev: NONE, next: NONE, is_linked: false });
        }
        for (at, key) in keys.into_iter().enumerate() {
            if let Some(key) = key {
                self.append(seat * EACH + at, key.short());
            }
        }
    }

    /// `seat` watches nothing any more.
    pub fn forget(&mut self, seat: usize) {
        for node in seat * EACH..(seat + 1) * EACH {
            if self.nodes.get(node).is_some_and(|node| node.is_linked) {
                self.unlink(node);
            }
        }
    }

    /// A key appeared, or went.
    pub fn note(&mut self, key: &Key) {
        if self.lists.is_empty() {
            return;
        }
        let short = key.short();
        let Ok(entry) = self.lists.find_entry(short, |list| list.key == short) else { return };
        let (list, _) = entry.remove();
        if self.changed.last == NONE {
            self.changed.first = list.first;
        } else {
            self.nodes[self.changed.last as usize].next = list.first;
            self.nodes[list.first as usize].prev = self.changed.last;
        }
        self.changed.last = list.last;
    }

    /// A seat whose keys changed, the one that changed first; it watches nothing afterwards.
    pub fn pop(&mut self) -> Option<usize> {
        if self.changed.first == NONE {
            return None;
        }
        let seat = self.changed.first as usize / EACH;
        self.forget(seat);
        Some(seat)
    }

    fn append(&mut self, node: usize, key: u64) {
        let id = node as u32;
        self.nodes[node] = Node { key, prev: NONE, next: NONE, is_linked: true };
        match self.lists.find_mut(key, |list| list.key == key) {
            Some(list) => {
                let last = std::mem::replace(&mut list.last, id);
                self.nodes[last as usize].next = id;
                self.nodes[node].prev = last;
            }
            None => {
                self.lists.insert_unique(key, List { key, first: id, last: id }, |list| list.key);
            }
        }
    }

    fn unlink(&mut self, node: usize) {
        let Node { key, prev, next, .. } = self.nodes[node];
        self.nodes[node].is_linked = false;
        let id = node as u32;
        if prev != NONE {
            self.nodes[prev as usize].next = next;
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        if self.changed.first == id {
            self.changed.first = next;
        }
        if self.changed.last == id {
            self.changed.last = prev;
        }
        if prev != NONE && next != NONE {
            return;
        }
        // It may have been an end of its key's list.
        let Ok(mut entry) = self.lists.find_entry(key, |list| list.key == key) else { return };
        let list = entry.get_mut();
        if list.first == id && list.last == id {
            entry.remove();
        } else if list.first == id {
            list.first = next;
        } else if list.last == id {
            list.last = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key([n; 32])
    }

    fn changed(watch: &mut Watch) -> Vec<usize> {
        std::iter::from_fn(|| watch.pop()).collect()
    }

    #[test]
    fn whoever_watches_a_key_is_listed_once_when_it_changes() {
        let mut watch = Watch::default();
        watch.watch(3, [Some(&key(1)), Some(&key(2))]);
        watch.watch(0, [None, Some(&key(2))]);
        watch.watch(5, [Some(&key(2)), Some(&key(4))]);
        watch.note(&key(9));
        assert_eq!(changed(&mut watch), []);
        watch.note(&key(2));
        watch.note(&key(1));
        assert_eq!(changed(&mut watch), [3, 0, 5]);
        watch.note(&key(4));
        assert_eq!(changed(&mut watch), [], "who was listed watches nothing");
    }

    #[test]
    fn lists_stay_whole_whatever_leaves_them() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        let (mut watch, mut model) = (Watch::default(), vec![None::<[u8; 2]>; 12]);
        let mut expected = std::collections::BTreeSet::new();
        for _ in 0..20_000 {
            let seat = next(12) as usize;
            match next(4) {
                0 if model[seat].is_none() => {
                    let keys = [next(5) as u8, 5 + next(5) as u8];
                    watch.watch(seat, [Some(&key(keys[0])), Some(&key(keys[1]))]);
                    model[seat] = Some(keys);
                }
                1 => {
                    watch.forget(seat);
                    model[seat] = None;
                    expected.remove(&seat);
                }
                2 => {
                    let changes = next(10) as u8;
                    watch.note(&key(changes));
                    expected.extend((0..12).filter(|&seat| model[seat].is_some_and(|keys| keys.contains(&changes))));
                }
                _ => match watch.pop() {
                    Some(seat) => {
                        assert!(expected.remove(&seat), "{seat} is told of nothing");
                        model[seat] = None;
                    }
                    None => assert_eq!(expected.len(), 0, "{expected:?} are not told"),
                },
            }
        }
    }
}

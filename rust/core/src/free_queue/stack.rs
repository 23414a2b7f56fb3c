//! Blocks that were released without content: the last one released is the next one taken.
//!
//! Treiber's stack (1986) of ids; the head carries a version, so a head that left and came back is another one (no ABA). A list goes in
//! with one exchange, and up to [`RUN`] blocks come out with one: while the head stands, nothing below it changes.

use crate::free_queue::node::{Nodes, after, low};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::sync::{Alone, AtomicU64, Ordering};

/// Blocks that one exchange takes at most: the work that an interrupted exchange wastes.
pub(super) const RUN: usize = 32;

/// The stack.
pub(super) struct Stack {
    head: Alone,
}

impl Stack {
    pub fn new() -> Self {
        Stack { head: Alone(AtomicU64::new(0)) }
    }

    /// Puts the chain from `first` to `last`, which is the caller's, on top. Takes effect when the exchange succeeds.
    pub fn push(&self, nodes: &Nodes, first: u32, last: u32) {
        let head = &self.head.0;
        // Relaxed: only compared and stored; who takes the blocks below reads them from the exchanges that brought them.
        let mut top = head.load(Ordering::Relaxed);
        loop {
            nodes.set_next(last, low(top));
            if mutant::is_on(Mutant::StackIgnoresOthers) {
                head.store(after(top, first), Ordering::Release);
                return;
            }
            // Release: the chain's links and states, and what its holders did with the blocks, come before.
            match head.compare_exchange(top, after(top, first), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => top = found,
            }
        }
    }

    /// Takes blocks from the top into `out`, at most [`RUN`]; returns how many. They are the caller's alone. None: the stack was empty.
    pub fn pop(&self, nodes: &Nodes, out: &mut [BlockId]) -> usize {
        let head = &self.head.0;
        // Acquire: pairs with the Release of every push since the stack was last empty (exchanges continue each other's release).
        let mut top = head.load(Ordering::Acquire);
        loop {
            let (mut at, mut count) = (low(top), 0);
            while at != 0 && count < out.len().min(RUN) {
                out[count] = BlockId(at);
                count += 1;
                // Relaxed: if the head still stands, this link came before it; if not, the exchange fails.
                at = low(nodes.next(at).load(Ordering::Relaxed));
            }
            if count == 0 {
                return 0;
            }
            let rest = if mutant::is_on(Mutant::StackForgetsVersion) { u64::from(at) } else { after(top, at) };
            // AcqRel: hands on the release of the pushes below, which this exchange continues.
            match head.compare_exchange(top, rest, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return count,
                Err(found) => top = found,
            }
        }
    }

    /// From the top down. Exact while nobody else is at work.
    pub fn iter<'a>(&'a self, nodes: &'a Nodes) -> impl Iterator<Item = u32> + 'a {
        let mut at = low(self.head.0.load(Ordering::Acquire));
        std::iter::from_fn(move || {
            let id = at;
            (id != 0).then(|| {
                at = low(nodes.next(id).load(Ordering::Acquire));
                id
            })
        })
        .take(nodes.num_blocks() as usize)
    }
}

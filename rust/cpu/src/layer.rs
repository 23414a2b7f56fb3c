//! One layer's attention, checked: where everything lies, in one number format.

use crate::element::Element;
use crate::mutant::{self, Mutant};

/// Pages of keys or values: row (block, head, offset) begins at `base + block * block_step + head * head_step + offset * row_step`.
#[derive(Clone, Copy)]
pub(crate) struct Pages<E> {
    pub(crate) base: *const E,
    pub(crate) block_step: usize,
    pub(crate) head_step: usize,
    pub(crate) row_step: usize,
}

/// Everything that the kernels read. Made by `attention`, which has checked it all.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a, E> {
    pub(crate) q: *const E,
    pub(crate) q_token_step: usize,
    pub(crate) q_head_step: usize,
    /// [T, Hq, Dv], contiguous.
    pub(crate) out: *mut E,
    pub(crate) keys: Pages<E>,
    pub(crate) values: Pages<E>,
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    /// Query heads of a KV head.
    pub(crate) grouped: usize,
    pub(crate) key_width: usize,
    pub(crate) value_width: usize,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    /// 0: none.
    pub(crate) window: usize,
    pub(crate) sinks: Option<&'a [f32]>,
}

// SAFETY: the threads of one call read the inputs, and each writes the rows of `out` of its own items; the caller of the call keeps
// the memory alive and leaves it alone until the call returns (`Tensor::new`).
unsafe impl<E> Sync for Layer<'_, E> {}

/// Positions that are gathered for one product.
pub(crate) const TILE: usize = 64;

/// Where the rows of a tile's positions begin, in numbers from the base of head 0.
pub(crate) struct Offsets {
    pub(crate) keys: [usize; TILE],
    pub(crate) values: [usize; TILE],
}

impl Offsets {
    pub(crate) const fn new() -> Self {
        Offsets { keys: [0; TILE], values: [0; TILE] }
    }

    /// Of the `count` positions from `first` on; `table` names their blocks.
    #[inline(always)]
    pub(crate) fn fill<E: Element>(&mut self, layer: &Layer<'_, E>, table: &[i32], first: usize, count: usize) {
        let values = if mutant::is(Mutant::ValuesByKeySteps) { layer.keys } else { layer.values };
        let (mut block, mut offset) = (first / layer.block_size, first % layer.block_size);
        for row in 0..count {
            let id = table[block] as usize;
            self.keys[row] = id * layer.keys.block_step + offset * layer.keys.row_step;
            self.values[row] = id * values.block_step + offset * values.row_step;
            if mutant::is(Mutant::OffsetsCut) {
                self.keys[row] &= 0x7fff_ffff;
            }
            offset += 1;
            if offset == layer.block_size {
                (block, offset) = (block + 1, 0);
            }
        }
    }
}

impl<E: Element> Layer<'_, E> {
    pub(crate) fn query_heads(&self) -> usize {
        self.kv_heads * self.grouped
    }

    /// The query head that is number `group` of those of `kv_head`.
    #[inline(always)]
    pub(crate) fn query_head(&self, kv_head: usize, group: usize) -> usize {
        if mutant::is(Mutant::HeadsDealt) {
            return group * self.kv_heads + kv_head;
        }
        kv_head * self.grouped + group
    }

    /// The lowest position that the query at `position` sees.
    #[inline(always)]
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        if self.window == 0 {
            return 0;
        }
        let longer = usize::from(mutant::is(Mutant::WindowLonger));
        (position + 1).saturating_sub(self.window + longer)
    }

    /// Weight that the sink of a query head takes, beside a softmax whose largest score is `max`.
    #[inline(always)]
    pub(crate) fn sink(&self, head: usize, max: f32) -> f32 {
        match self.sinks {
            Some(sinks) if !mutant::is(Mutant::NoSink) => (sinks[head] - max).exp(),
            _ => 0.0,
        }
    }

    /// Writes one answer: `sums` [Dv] over `total`.
    ///
    /// # Safety
    /// `token` and `head` are below T and Hq, and nobody else writes this row.
    #[inline(always)]
    pub(crate) unsafe fn answer(&self, token: usize, head: usize, sums: &[f32], total: f32) {
        let at = (token * self.query_heads() + head) * self.value_width;
        let share = 1.0 / total;
        for (d, sum) in sums[..self.value_width].iter().enumerate() {
            // SAFETY: inside [T, Hq, Dv].
            unsafe { *self.out.add(at + d) = E::narrow(sum * share) };
        }
    }
}

//! The left side of a product: rows in strips, and where the processor has tiles in thirds too.
//!
//! Before: whoever writes strips. After: `product`. Always: a strip is filled before a product reads it.

use std::ops::Range;

use crate::isa::Isa;
use crate::strips::{Strip, Strips};
#[cfg(target_arch = "x86_64")]
use crate::thirds::Thirds;

/// Memory of rows that are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) strips: Strips,
    #[cfg(target_arch = "x86_64")]
    pub(crate) thirds: Option<Thirds>,
}

impl Left {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    /// Of `rows` rows of `numbers` numbers at most, in memory of so many numbers as `room` says from the beginning of a cache line on.
    pub(crate) fn new(at: *mut f32, rows: usize, numbers: usize, isa: Isa) -> Left {
        let behind = at.wrapping_add(Strips::room(rows, numbers, isa.lanes()));
        Left {
            strips: Strips::whole(at, numbers),
            #[cfg(target_arch = "x86_64")]
            thirds: isa.tiles().map(|tiles| Thirds::new(tiles, behind, numbers)),
        }
    }

    /// Numbers of memory.
    pub(crate) fn room(rows: usize, numbers: usize, isa: Isa) -> usize {
        let strips = Strips::room(rows, numbers, isa.lanes());
        #[cfg(target_arch = "x86_64")]
        if isa.tiles().is_some() {
            return strips + Thirds::room(rows, numbers);
        }
        strips
    }

    /// Makes a strip's `numbers` ready, which begin with a block of a depth and end with one or with the row.
    ///
    /// # Safety
    /// They were written to `strips`, and nobody else uses these.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) unsafe fn fill(&self, strip: Strip, numbers: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(thirds) = self.thirds {
            // SAFETY: the caller's; `new` was given room.
            unsafe { thirds.fill(strip, self.strips, numbers) };
        }
    }
}

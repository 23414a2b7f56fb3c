//! Memory of one thread for its items, kept from call to call: large buffers from the system come page by page, at each use.

use std::cell::RefCell;

use crate::layer::Offsets;

/// Working memory.
pub(crate) struct Scratch {
    numbers: Vec<f32>,
    /// Of the current tile and the next one.
    pub(crate) offsets: [Offsets; 2],
}

/// Numbers of a cache line; every part begins at a multiple of it.
const LINE: usize = 16;

impl Scratch {
    /// `sizes` numbers in parts that lie one behind the other; they hold anything that is a number.
    pub(crate) fn parts<const P: usize>(&mut self, sizes: [usize; P]) -> ([&mut [f32]; P], &mut [Offsets; 2]) {
        let padded = sizes.map(|size| size.next_multiple_of(LINE));
        let total: usize = padded.iter().sum();
        if self.numbers.len() < total + LINE {
            self.numbers.resize(total + LINE, 0.0);
        }
        let skipped = self.numbers.as_ptr().align_offset(64).min(LINE);
        let mut rest = &mut self.numbers[skipped..];
        let parts = std::array::from_fn(|part| {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(padded[part]);
            rest = behind;
            &mut own[..sizes[part]]
        });
        (parts, &mut self.offsets)
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> =
        const { RefCell::new(Scratch { numbers: Vec::new(), offsets: [const { Offsets::new() }; 2] }) };
}

thread_local! {
    static CALL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with `size` numbers that this thread's calls use in turn, from the beginning of a cache line on; they hold anything that
/// is a number.
pub(crate) fn with_call_memory<R>(size: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    CALL.with_borrow_mut(|memory| {
        if memory.len() < size + LINE {
            memory.resize(size + LINE, 0.0);
        }
        let skipped = memory.as_ptr().align_offset(64).min(LINE);
        work(&mut memory[skipped..][..size])
    })
}

/// Runs `work` with this thread's memory.
pub(crate) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(work)
}

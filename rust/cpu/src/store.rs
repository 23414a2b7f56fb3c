//! New keys and values to their slots.

use crate::input::{Refusal, Sizes, check_dtype, check_rows, numbers, refuse};
use crate::mutant::{self, Mutant};
use crate::team;
use crate::tensor::{Dtype, Tensor};

/// Bytes below which a second thread costs more than it gives.
const ALONE: usize = 1 << 20;
/// Tokens that one thread writes at a time.
const TOKENS: usize = 64;

/// Copies k [T, Hkv, Dk] and v [T, Hkv, Dv] to the rows of k_cache [N, Hkv, B, Dk] and v_cache [N, Hkv, B, Dv] that slots [T] int64
/// names, block * B + offset, each at most once; a negative slot is skipped. Refuses what does not fit before it writes anything.
pub fn store_kv(
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    k_cache: &Tensor<'_>,
    v_cache: &Tensor<'_>,
    slots: &Tensor<'_>,
    threads: usize,
) -> Result<(), Refusal> {
    Store::check(k, v, k_cache, v_cache, slots)?.run(threads);
    Ok(())
}

/// A checked call.
pub(crate) struct Store<'a> {
    slots: &'a [i64],
    block_size: usize,
    heads: usize,
    /// Of the keys and of the values.
    rows: [Rows; 2],
    number_bytes: usize,
}

impl<'a> Store<'a> {
    pub(crate) fn check(
        k: &Tensor<'_>,
        v: &Tensor<'_>,
        k_cache: &Tensor<'_>,
        v_cache: &Tensor<'_>,
        slots: &Tensor<'a>,
    ) -> Result<Store<'a>, Refusal> {
        let mut sizes = Sizes::default();
        sizes.bind("T Hkv Dk", k)?;
        sizes.bind("T Hkv Dv", v)?;
        sizes.bind("T", slots)?;
        sizes.bind("N Hkv B Dk", k_cache)?;
        sizes.bind("N Hkv B Dv", v_cache)?;
        for tensor in [v, k_cache, v_cache] {
            check_dtype(tensor, k.dtype, ", the dtype of k")?;
        }
        for tensor in [k, v, k_cache, v_cache] {
            check_rows(tensor)?;
        }
        let slots = numbers::<i64>(slots, Dtype::I64)?;
        let (block_size, heads) = (sizes.of("B"), sizes.of("Hkv"));
        let rows = sizes.of("N") * block_size;
        if let Some(&slot) = slots.iter().find(|&&slot| slot >= 0 && slot as usize >= rows) {
            return refuse(format!("slots holds {slot}: must be below {rows} (blocks * block size)"));
        }
        let rows = [Rows::of(k, k_cache), Rows::of(v, v_cache)];
        Ok(Store { slots, block_size, heads, rows, number_bytes: k.dtype.size() })
    }

    pub(crate) fn run(&self, threads: usize) {
        let Store { slots, block_size, heads, rows: ref sources, number_bytes: bytes } = *self;
        let moved = slots.len() * heads * sources.iter().map(|rows| rows.width).sum::<usize>() * bytes;
        team::run(if moved < ALONE { 1 } else { threads }, slots.len().div_ceil(TOKENS), &|item| {
            let first = item * TOKENS;
            for (token, &slot) in slots.iter().enumerate().skip(first).take(TOKENS) {
                let slot = if mutant::is(Mutant::NowhereWritten) { slot.max(0) } else { slot };
                if slot < 0 {
                    continue;
                }
                let slot = slot as usize;
                let (block, mut offset) = (slot / block_size, slot % block_size);
                if mutant::is(Mutant::StoredBeside) {
                    offset = (offset + 1) % block_size;
                }
                for rows in sources {
                    for head in 0..heads {
                        // SAFETY: token, head, block and offset are below T, Hkv, N and B, so both rows are inside their tensors, which
                        // may be read and written (`Tensor::new`) and do not overlap; every slot is written once.
                        unsafe {
                            let from = rows.from.add((token * rows.from_steps[0] + head * rows.from_steps[1]) * bytes);
                            let at = block * rows.to_steps[0] + head * rows.to_steps[1] + offset * rows.to_steps[2];
                            std::ptr::copy_nonoverlapping(from, rows.to.add(at * bytes), rows.width * bytes);
                        }
                    }
                }
            }
        });
    }
}

/// Where the rows of one tensor come from and go to.
struct Rows {
    from: *const u8,
    from_steps: [usize; 2],
    to: *mut u8,
    to_steps: [usize; 3],
    width: usize,
}

// SAFETY: threads read `from`, and each writes the rows of its own slots.
unsafe impl Sync for Rows {}

impl Rows {
    fn of(source: &Tensor<'_>, cache: &Tensor<'_>) -> Rows {
        Rows {
            from: source.data,
            from_steps: [source.strides[0], source.strides[1]],
            to: cache.data,
            to_steps: [cache.strides[0], cache.strides[1], cache.strides[2]],
            width: source.shape[2],
        }
    }
}

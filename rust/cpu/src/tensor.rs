//! Memory of somebody else as a tensor: where it is, its format, sizes and strides.

use std::marker::PhantomData;

/// A number format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
}

impl Dtype {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::I64 => 8,
        }
    }

    /// torch's name of it, without `torch.`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
        }
    }
}

/// Most dimensions of a tensor here.
pub const MAX_DIMENSIONS: usize = 4;

/// Up to four dimensions of numbers, with strides in numbers.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub(crate) name: &'static str,
    pub(crate) data: *mut u8,
    pub(crate) dtype: Dtype,
    pub(crate) dimensions: usize,
    pub(crate) shape: [usize; MAX_DIMENSIONS],
    pub(crate) strides: [usize; MAX_DIMENSIONS],
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: it is a description; who may use the memory is promised at `new`, for every thread of a call.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}

impl<'a> Tensor<'a> {
    /// A tensor called `name` in refusals; `None` with more than four dimensions, or shape and strides of other lengths.
    ///
    /// # Safety
    /// For `'a`: every number that shape and strides reach from `data` is in memory that may be read, and, if the tensor is handed
    /// over as one to write to, written; `data` has the alignment of `dtype`, and so have the others through whole strides; nobody
    /// else writes to what is read or touches what is written while a call of this crate runs.
    pub unsafe fn new(
        name: &'static str,
        data: *mut u8,
        dtype: Dtype,
        shape: &[usize],
        strides: &[usize],
    ) -> Option<Tensor<'a>> {
        if shape.len() > MAX_DIMENSIONS || shape.len() != strides.len() {
            return None;
        }
        let (mut sizes, mut steps) = ([1; MAX_DIMENSIONS], [0; MAX_DIMENSIONS]);
        sizes[..shape.len()].copy_from_slice(shape);
        steps[..shape.len()].copy_from_slice(strides);
        Some(Tensor { name, data, dtype, dimensions: shape.len(), shape: sizes, strides: steps, memory: PhantomData })
    }

    /// The sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.dimensions]
    }

    /// The numbers of a contiguous float32 tensor.
    pub fn floats(&self) -> Result<&'a [f32], crate::Refusal> {
        crate::input::numbers(self, Dtype::F32)
    }

    /// A contiguous one with its dimensions behind the first as one.
    pub(crate) fn flat(&self) -> Tensor<'a> {
        let width = self.shape()[1..].iter().product();
        Tensor { dimensions: 2, shape: [self.shape[0], width, 1, 1], strides: [width, 1, 0, 0], ..*self }
    }

    /// No numbers at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Numbers lie without gaps, the last dimension fastest.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut step = 1;
        for dimension in (0..self.dimensions).rev() {
            if self.shape[dimension] != 1 && self.strides[dimension] != step {
                return false;
            }
            step *= self.shape[dimension];
        }
        true
    }
}

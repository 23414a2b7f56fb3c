//! Memory that Python and the core both see, through the buffer protocol. Beside `allocations.rs` the only `unsafe` of this crate, each use with its reason.
//!
//! [`Arena`] is memory that plans are written to and numpy views look at. [`with_ints`] reads a caller's integers without a copy,
//! [`tensor`] borrows the memory of a tensor.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use blocktable_cpu::{Dtype, Tensor};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// Zeroed memory of a fixed place and size, in 64-bit words.
pub struct Arena {
    words: *mut i64,
    len: usize,
}

// SAFETY: the pointer is to memory that only this object frees; who may access it and when is said at `lend`.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub fn new(words: usize) -> Arc<Arena> {
        let words: Box<[i64]> = vec![0; words].into();
        let len = words.len();
        Arc::new(Arena { words: Box::into_raw(words).cast(), len })
    }
}

/// Lends `work` the two memories of one set of arrays, together with `owner`, the only one who writes to them.
pub fn lend<T, R>(
    owner: &mut T,
    staging: &Arena,
    tables: &Arena,
    work: impl FnOnce(&mut T, &mut [i64], &mut [i64]) -> R,
) -> R {
    assert!(!std::ptr::eq(staging, tables), "two different memories");
    // SAFETY: both live as long as their references. The scheduler behind the lock is the only owner that is ever passed, and it is
    // borrowed mutably while the slices live, so nobody else of this crate makes slices of them. Python reads them only between a plan
    // and the commit of its step, as the stub says; the scheduler writes to the other set in that time.
    let (staging, tables) = unsafe {
        (
            std::slice::from_raw_parts_mut(staging.words, staging.len),
            std::slice::from_raw_parts_mut(tables.words, tables.len),
        )
    };
    work(owner, staging, tables)
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` with this length in `new`, and freed only here.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.words, self.len)) });
    }
}

/// An arena as Python sees it: a writable buffer of bytes, since torch takes no read-only ones. Nobody but the core should write.
#[pyclass(frozen, module = "blocktable._core")]
pub struct Memory(pub Arc<Arena>);

#[pymethods]
impl Memory {
    // SAFETY: fills `view` as the buffer protocol asks: a strong reference to the exporter keeps the arena alive while the view lives.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("view is null"));
        }
        let arena = Arc::clone(&slf.get().0);
        let bytes = (arena.len * size_of::<i64>()) as ffi::Py_ssize_t;
        // SAFETY: `view` is not null and points to memory of the caller; the arena's memory has `bytes` bytes.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), arena.words.cast(), bytes, 0, flags) };
        if filled < 0 { Err(PyErr::fetch(slf.py())) } else { Ok(()) }
    }
}

/// Integers of a caller's buffer.
pub enum Ints<'a> {
    Narrow(&'a [i32]),
    Wide(&'a [i64]),
}

/// Why a buffer was not read.
pub enum NotInts {
    /// The object offers no C-contiguous buffer.
    NoBuffer,
    /// The buffer is not one line of int32 or int64.
    Shape,
}

/// Shows `read` the integers of `object`, a C-contiguous one-dimensional buffer of int32 or int64. Allocates nothing.
pub fn with_ints<R>(object: &Bound<'_, PyAny>, read: impl FnOnce(Ints<'_>) -> R) -> Result<R, NotInts> {
    let mut view = MaybeUninit::<ffi::Py_buffer>::uninit();
    let flags = ffi::PyBUF_C_CONTIGUOUS | ffi::PyBUF_FORMAT;
    // SAFETY: `object` is alive and `view` is ours to fill.
    if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
        drop(PyErr::take(object.py()));
        return Err(NotInts::NoBuffer);
    }
    // SAFETY: filled by the successful call above.
    let mut view = unsafe { view.assume_init() };
    // SAFETY: the exporter keeps `format` alive until the release below; null means bytes.
    let format = if view.format.is_null() { c"B" } else { unsafe { CStr::from_ptr(view.format) } };
    let letter =
        format.to_bytes().strip_prefix(b"@").or(format.to_bytes().strip_prefix(b"=")).unwrap_or(format.to_bytes());
    let signed = matches!(letter, b"i" | b"l" | b"q")
        || (cfg!(target_endian = "little") && matches!(letter, b"<i" | b"<l" | b"<q"));
    let len = if view.itemsize > 0 { (view.len / view.itemsize) as usize } else { 0 };
    // Other items than integers may have any size.
    let aligned = matches!(view.itemsize, 4 | 8) && view.buf.align_offset(view.itemsize as usize) == 0;
    let result = match view.itemsize {
        _ if !signed || view.ndim != 1 || !aligned => Err(NotInts::Shape),
        _ if len == 0 => Ok(read(Ints::Wide(&[]))),
        // SAFETY: the exporter keeps `len` aligned items of this size alive until the release below, and the interpreter is held, so
        // nobody writes to them meanwhile.
        4 => Ok(read(Ints::Narrow(unsafe { std::slice::from_raw_parts(view.buf.cast(), len) }))),
        // SAFETY: as above.
        8 => Ok(read(Ints::Wide(unsafe { std::slice::from_raw_parts(view.buf.cast(), len) }))),
        _ => Err(NotInts::Shape),
    };
    // SAFETY: filled above and released once.
    unsafe { ffi::PyBuffer_Release(&raw mut view) };
    result
}

/// DLPack's description of a tensor (version 0.x), as far as it is read here.
#[repr(C)]
struct DlTensor {
    data: *mut u8,
    device: (i32, i32),
    dimensions: i32,
    dtype: DlType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// Memory of the CPU, and such that a GPU can read it too.
const ON_CPU: [i32; 2] = [1, 3];

/// The tensor `name` that an unused DLPack capsule describes (`torch.utils.dlpack.to_dlpack`): memory of the CPU with up to four
/// dimensions. The capsule stays the caller's, who keeps it until the tensor is no longer used.
pub fn tensor<'a>(name: &'static str, capsule: &'a Bound<'_, PyAny>) -> PyResult<Tensor<'a>> {
    let refuse = |why: String| PyValueError::new_err(format!("{name} {why}"));
    // SAFETY: the object is alive; a capsule of another name, and anything else, gives null and an exception.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()) };
    if pointer.is_null() {
        drop(PyErr::take(capsule.py()));
        return Err(refuse("is no DLPack capsule that has not been used".to_owned()));
    }
    // SAFETY: a capsule of this name holds a DLManagedTensor, which begins with the tensor's description and lives as long as the
    // capsule, for which `capsule` holds a reference.
    let found = unsafe { &*pointer.cast::<DlTensor>() };
    if !ON_CPU.contains(&found.device.0) {
        return Err(refuse(format!("is on a device of DLPack's type {}: must be on the CPU", found.device.0)));
    }
    let dtype = match (found.dtype.code, found.dtype.bits, found.dtype.lanes) {
        (2, 32, 1) => Dtype::F32,
        (4, 16, 1) => Dtype::Bf16,
        (2, 16, 1) => Dtype::F16,
        (0, 32, 1) => Dtype::I32,
        (0, 64, 1) => Dtype::I64,
        (code, bits, _) => return Err(refuse(format!("has numbers of DLPack's type {code} with {bits} bits"))),
    };
    let dimensions = found.dimensions.max(0) as usize;
    // SAFETY: the description's shape has so many entries; one of no dimension may be null, and is not looked at.
    let shape = if dimensions == 0 { &[] } else { unsafe { std::slice::from_raw_parts(found.shape, dimensions) } };
    let mut compact = vec![1i64; dimensions];
    for dimension in (1..dimensions).rev() {
        compact[dimension - 1] = compact[dimension] * shape[dimension];
    }
    let strides = if dimensions == 0 || found.strides.is_null() {
        &compact[..]
    } else {
        // SAFETY: strides that are not null have as many entries as the shape.
        unsafe { std::slice::from_raw_parts(found.strides, dimensions) }
    };
    if shape.iter().chain(strides).any(|&number| number < 0) {
        return Err(refuse(format!("has strides {strides:?}: must not be negative")));
    }
    let data = found.data.wrapping_add(found.byte_offset as usize);
    if data.align_offset(dtype.size()) != 0 {
        return Err(refuse(format!("begins at an address that is no multiple of {}", dtype.size())));
    }
    let (shape, strides): (Vec<usize>, Vec<usize>) =
        (shape.iter().map(|&n| n as usize).collect(), strides.iter().map(|&n| n as usize).collect());
    // SAFETY: the exporter promises that what the description reaches is memory of its own while the capsule lives; `'a` is within
    // that. That nobody writes to it meanwhile is asked of the caller, in the stub.
    let tensor = unsafe { Tensor::new(name, data, dtype, &shape, &strides) };
    tensor.ok_or_else(|| refuse(format!("has {dimensions} dimensions: must have at most 4")))
}

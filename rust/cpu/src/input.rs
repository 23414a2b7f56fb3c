//! Checks of what a caller hands over: equal letters are equal sizes; a refusal names tensor, letter and both sizes.

use std::fmt;

use crate::tensor::{Dtype, Tensor};

/// Why a call was refused. Nothing has been read or written then.
#[derive(Debug)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl Refusal {
    /// The same, of a layer of several.
    pub(crate) fn of_layer(self, number: usize) -> Refusal {
        Refusal(format!("layer {number}: {}", self.0))
    }
}

pub(crate) fn refuse<T>(reason: String) -> Result<T, Refusal> {
    Err(Refusal(reason))
}

/// Sizes by letter.
#[derive(Default)]
pub(crate) struct Sizes(Vec<(&'static str, usize)>);

impl Sizes {
    /// Reads letters, one a dimension, off `tensor`; a known letter must be equal.
    pub(crate) fn bind(&mut self, letters: &'static str, tensor: &Tensor<'_>) -> Result<(), Refusal> {
        let count = letters.split(' ').count();
        if count != tensor.dimensions {
            let wanted = letters.replace(' ', ", ");
            return refuse(format!("{} has shape {:?}: must be [{wanted}]", tensor.name, tensor.shape()));
        }
        for (dimension, letter) in letters.split(' ').enumerate() {
            let found = tensor.shape[dimension];
            // `S+1` is one more than S.
            let (letter, extra) = letter.strip_suffix("+1").map_or((letter, 0), |letter| (letter, 1));
            if found < extra {
                return refuse(format!(
                    "{} has {letter}+1=0 in dimension {dimension}: must be at least 1",
                    tensor.name
                ));
            }
            match self.0.iter().find(|(known, _)| *known == letter) {
                None => self.0.push((letter, found - extra)),
                Some(&(_, size)) if size + extra == found => {}
                Some(&(_, size)) => {
                    let plus = if extra == 0 { "" } else { "+1" };
                    let wanted = size + extra;
                    return refuse(format!(
                        "{} has {letter}{plus}={found} in dimension {dimension}: must be {wanted}",
                        tensor.name
                    ));
                }
            }
        }
        Ok(())
    }

    /// The size of a letter that has been read.
    pub(crate) fn of(&self, letter: &str) -> usize {
        self.0.iter().find(|(known, _)| *known == letter).map_or(0, |&(_, size)| size)
    }
}

/// Refuses a tensor of another format than `wanted`, which is `whose`.
pub(crate) fn check_dtype(tensor: &Tensor<'_>, wanted: Dtype, whose: &str) -> Result<(), Refusal> {
    if tensor.dtype == wanted {
        return Ok(());
    }
    let (found, wanted) = (tensor.dtype.name(), wanted.name());
    refuse(format!("{} has dtype {found}: must be {wanted}{whose}", tensor.name))
}

/// Refuses a tensor whose last dimension has gaps.
pub(crate) fn check_rows(tensor: &Tensor<'_>) -> Result<(), Refusal> {
    let last = tensor.dimensions - 1;
    if tensor.shape[last] > 1 && tensor.strides[last] != 1 && !tensor.is_empty() {
        let step = tensor.strides[last];
        return refuse(format!("{} has stride {step} in its last dimension: must be 1", tensor.name));
    }
    Ok(())
}

/// The numbers of a contiguous tensor of `dtype`, which is the format of `T`.
pub(crate) fn numbers<'a, T: Copy>(tensor: &Tensor<'a>, dtype: Dtype) -> Result<&'a [T], Refusal> {
    check_dtype(tensor, dtype, "")?;
    if !tensor.is_contiguous() {
        return refuse(format!("{} has gaps between its numbers: must be contiguous", tensor.name));
    }
    let count: usize = tensor.shape().iter().product();
    if count == 0 {
        return Ok(&[]);
    }
    assert_eq!(size_of::<T>(), dtype.size(), "the format is that of T");
    // SAFETY: `Tensor::new` was promised that what the shape reaches may be read for `'a`, aligned, and it lies without gaps.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data.cast(), count) })
}

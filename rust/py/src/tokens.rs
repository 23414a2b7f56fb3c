//! Python's lists, arrays and numbers to the core's plain ones. Only conversion: bounds of meaning are the core's.

use blocktable_core::GroupSpec;
use blocktable_core::mutant::{self, Mutant};
use blocktable_core::retention::TokenRange;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

use crate::buffer::{Ints, NotInts, with_ints};
use crate::error::invalid;

/// Token ids from a sequence of ints or from an int32 or int64 array.
pub fn token_ids(field: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = object.cast_exact::<PyList>() {
        let mut ids = Vec::with_capacity(list.len());
        for item in list.iter() {
            ids.push(token_id(field, &item)?);
        }
        return Ok(ids);
    }
    match with_ints(object, |ints| match ints {
        Ints::Narrow(ids) => ids.iter().map(|&id| u32::try_from(id).map_err(|_| i64::from(id))).collect(),
        Ints::Wide(ids) => ids.iter().map(|&id| u32::try_from(id).map_err(|_| id)).collect::<Result<Vec<u32>, i64>>(),
    }) {
        Ok(Ok(ids)) => Ok(ids),
        Ok(Err(id)) => Err(out_of_range(object.py(), field, id)),
        Err(NotInts::Shape) => Err(invalid(object.py(), field, object, "must be one line of int32 or int64")),
        Err(NotInts::NoBuffer) => {
            let Ok(items) = object.try_iter() else {
                return Err(invalid(
                    object.py(),
                    field,
                    object,
                    "must be a sequence of ints or a contiguous int32 or int64 array",
                ));
            };
            items.map(|item| token_id(field, &item?)).collect()
        }
    }
}

/// A count from outside: an int that fits 32 bits without a sign.
pub fn count(field: &str, object: &Bound<'_, PyAny>) -> PyResult<u32> {
    if object.is_instance_of::<PyBool>() {
        return Err(invalid(object.py(), field, object, "must be an int, not a bool"));
    }
    let Ok(number) = object.extract::<i64>() else {
        return Err(invalid(object.py(), field, object, "must be an int of 0..=4294967295"));
    };
    let number = if mutant::is_on(Mutant::ClampNegative) { number.max(0) } else { number };
    u32::try_from(number).map_err(|_| invalid(object.py(), field, number, "must be 0..=4294967295"))
}

/// Groups of layers from a sequence of windows: `None` for a group whose queries see everything.
pub fn groups(object: &Bound<'_, PyAny>) -> PyResult<Vec<GroupSpec>> {
    let bound = "must be a sequence of windows in tokens, None for a group without one";
    let items = object.try_iter().map_err(|_| invalid(object.py(), "groups", object, bound))?;
    let group = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        let window = if item.is_none() { None } else { Some(count("groups", &item)?) };
        Ok(GroupSpec { window })
    };
    items.map(group).collect()
}

/// A number from outside that fits 64 bits without a sign: a clock, a step, a request.
pub fn number(field: &str, object: &Bound<'_, PyAny>) -> PyResult<u64> {
    let bound = "must be an int of 0..=18446744073709551615";
    if object.is_instance_of::<PyBool>() {
        return Err(invalid(object.py(), field, object, bound));
    }
    object.extract().map_err(|_| invalid(object.py(), field, object, bound))
}

/// Ranges of retention: a sequence of (token_start, token_end or None, priority, duration_ms or None).
pub fn token_ranges(object: &Bound<'_, PyAny>) -> PyResult<Vec<TokenRange>> {
    let bound = "must be a sequence of (token_start, token_end or None, priority, duration_ms or None)";
    let wrong = || invalid(object.py(), "retention", object, bound);
    let range = |item: Bound<'_, PyAny>| -> PyResult<TokenRange> {
        let item = item.cast_into::<PyTuple>().map_err(|_| wrong())?;
        let parts: Vec<Bound<'_, PyAny>> = item.iter().collect();
        let [start, end, priority, duration_ms] = &parts[..] else { return Err(wrong()) };
        let high = count("priority", priority)?;
        Ok(TokenRange {
            start: count("token_start", start)?,
            end: (!end.is_none()).then(|| count("token_end", end)).transpose()?,
            priority: u8::try_from(high).map_err(|_| invalid(object.py(), "priority", high, "must be 0..=100"))?,
            duration_ms: (!duration_ms.is_none()).then(|| number("duration_ms", duration_ms)).transpose()?,
        })
    };
    object.try_iter().map_err(|_| wrong())?.map(|item| range(item?)).collect()
}

/// Copies the integers of a C-contiguous int32 or int64 buffer to `to`, whose memory is kept.
pub fn copy_ints(field: &str, object: &Bound<'_, PyAny>, to: &mut Vec<i64>) -> PyResult<()> {
    to.clear();
    let copied = with_ints(object, |ints| match ints {
        Ints::Narrow(ints) => to.extend(ints.iter().map(|&int| i64::from(int))),
        Ints::Wide(ints) => to.extend_from_slice(ints),
    });
    copied
        .map_err(|_| invalid(object.py(), field, object, "must be a C-contiguous one-dimensional int32 or int64 array"))
}

fn token_id(field: &str, item: &Bound<'_, PyAny>) -> PyResult<u32> {
    if !item.is_exact_instance_of::<PyInt>() && item.is_instance_of::<PyBool>() {
        return Err(invalid(item.py(), field, item, "token ids must be ints, not bools"));
    }
    let Ok(id) = item.extract::<i64>() else {
        return Err(invalid(item.py(), field, item, "token ids must be ints of at least 0 that fit 32 bits"));
    };
    u32::try_from(id).map_err(|_| out_of_range(item.py(), field, id))
}

fn out_of_range(py: Python<'_>, field: &str, id: i64) -> PyErr {
    invalid(py, field, id, "token ids must be at least 0 and fit 32 bits")
}

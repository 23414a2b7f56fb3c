//! Reasons, timelines and the stall report as Python's values. Only conversion: what is said, and in which words, is the core's.

use blocktable_core::notes::Explanation;
use blocktable_core::reason::Reason;
use blocktable_core::stall::Stall;
use blocktable_core::timeline::Record;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// (code, name, kind, names of its numbers) of every reason, in the order of the codes.
pub fn all_reasons(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let rows = Reason::ALL.iter().map(|reason| {
        let numbers = PyTuple::new(py, reason.numbers().map(|(name, _)| name).collect::<Vec<_>>())?;
        (reason.code(), reason.name(), reason.kind().name(), numbers).into_pyobject(py)
    });
    PyTuple::new(py, rows.collect::<PyResult<Vec<_>>>()?)
}

/// `reason`, `code`, `kind`, `numbers` and `words`.
fn reason_of(py: Python<'_>, reason: Reason) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("reason", reason.name())?;
    dict.set_item("code", reason.code())?;
    dict.set_item("kind", reason.kind().name())?;
    let numbers = PyDict::new(py);
    reason.numbers().try_for_each(|(name, number)| numbers.set_item(name, number))?;
    dict.set_item("numbers", numbers)?;
    dict.set_item("words", reason.to_string())?;
    Ok(dict)
}

fn record_of<'py>(py: Python<'py>, record: &Record) -> PyResult<Bound<'py, PyDict>> {
    let dict = reason_of(py, record.reason)?;
    dict.set_item("at_us", record.at_us)?;
    dict.set_item("until_us", record.until_us)?;
    dict.set_item("step", record.step)?;
    dict.set_item("times", record.times)?;
    Ok(dict)
}

/// What is known of a request, as data and in words.
pub fn explanation_of<'py>(py: Python<'py>, told: &Explanation) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("request_id", told.request.0)?;
    dict.set_item("place", told.place.name())?;
    dict.set_item("waits_for", told.waits_for.map(|reason| reason_of(py, reason)).transpose()?)?;
    dict.set_item("forgotten", told.forgotten)?;
    let records = told.records.iter().map(|record| record_of(py, record));
    dict.set_item("records", PyList::new(py, records.collect::<PyResult<Vec<_>>>()?)?)?;
    dict.set_item("text", told.to_string())?;
    Ok(dict)
}

/// The numbers of a stall.
pub fn stall_of<'py>(py: Python<'py>, stall: &Stall) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("request_id", stall.request.0)?;
    dict.set_item("is_running", stall.is_running)?;
    dict.set_item("waits_for", stall.reason.map(|reason| reason_of(py, reason)).transpose()?)?;
    for (name, blocks) in [
        ("needed", stall.needed),
        ("free", stall.free),
        ("promised", stall.promised),
        ("parked", stall.parked),
        ("pinned", stall.pinned),
    ] {
        dict.set_item(name, blocks)?;
    }
    dict.set_item("running", stall.running)?;
    dict.set_item("waiting", stall.waiting)?;
    dict.set_item("held_by", stall.held_by.iter().map(|&(request, blocks)| (request.0, blocks)).collect::<Vec<_>>())?;
    Ok(dict)
}

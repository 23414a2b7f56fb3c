//! One total match from the core's refusals to the exceptions of `blocktable.errors`.

use blocktable_core::Error;
use pyo3::IntoPyObjectExt;
use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The exception of this refusal.
pub fn to_python(py: Python<'_>, refusal: Error) -> PyErr {
    match refusal {
        Error::InvalidInput { field, value, bound } => invalid(py, field, value, &bound),
        Error::NeverFits { needed, usable } => make(py, "NeverFitsError", (needed, usable)),
        Error::QueueFull { what, limit, waiting, retry_after_us } => {
            make(py, "QueueFullError", (limit, what, waiting, retry_after_us))
        }
        Error::NotRunning { request } => make(py, "NotRunningError", (request.0,)),
        Error::NoFreeRow { rows } => make(py, "NoFreeRowError", (rows,)),
        Error::UnknownRequest { request } => make(py, "UnknownRequestError", (request.0,)),
        Error::OverPinBudget { needed, pinned, budget } => make(py, "PinBudgetError", (needed, pinned, budget)),
        Error::StepInFlight { step } => make(py, "StepInFlightError", (step.0,)),
        Error::WrongStep { given, expected } => make(py, "WrongStepError", (given.0, expected.map(|step| step.0))),
        Error::Stalled(stall) => match crate::explain::stall_of(py, &stall) {
            Ok(report) => make(py, "StalledError", (stall.to_string(), report)),
            Err(error) => error,
        },
        Error::Audit { check, detail } => make(py, "AuditError", (check, detail)),
        Error::OutOfBlocks { needed, free } => make(py, "OutOfBlocksError", (needed, free)),
        Error::NotHeld { block } => make(py, "NotHeldError", (block.get(),)),
        Error::NoSuchBlock { block, num_blocks } => make(py, "NoSuchBlockError", (block, num_blocks)),
        Error::Released => make(py, "ReleasedError", ()),
        Error::ForeignTable => make(py, "ForeignTableError", ()),
        Error::BeingWritten { block } => make(py, "BeingWrittenError", (block.get(),)),
    }
}

/// `RecordingError` for a file that cannot be written.
pub fn recording_failed(py: Python<'_>, why: &str) -> PyErr {
    make(py, "RecordingError", (why,))
}

/// `InvalidInputError` for a value that the conversion itself refuses.
pub fn invalid<'py>(py: Python<'py>, field: &str, value: impl IntoPyObject<'py>, bound: &str) -> PyErr {
    let Ok(value) = value.into_bound_py_any(py) else {
        return make(py, "InvalidInputError", (field, py.None(), bound));
    };
    make(py, "InvalidInputError", (field, value, bound))
}

fn make<'py>(py: Python<'py>, class: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    let make = move || -> PyResult<PyErr> {
        let module = ERRORS.get_or_try_init(py, || py.import("blocktable.errors").map(Bound::unbind))?;
        Ok(PyErr::from_value(module.bind(py).getattr(class)?.call1(arguments)?))
    };
    make().unwrap_or_else(|error| error)
}

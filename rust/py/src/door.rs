//! The one door between Python and the core. No other file takes the core's lock or lets go of the interpreter.
//!
//! *Held*: microseconds of work with the interpreter kept, since letting go of it could cost a switch interval of 5 ms. Nobody holds
//! the lock without the interpreter, so it is never waited for; and no Python code runs inside, so the interpreter is never lost
//! there. *Released*: work of 10 us and more that needs no lock.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error;

/// The core behind its lock.
pub struct Door<T>(Mutex<T>);

impl<T> Door<T> {
    pub fn new(core: T) -> Self {
        Door(Mutex::new(core))
    }

    /// Runs `work` on the core with the interpreter kept, and maps its refusal.
    pub fn held<R>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> blocktable_core::Result<R>) -> PyResult<R> {
        let Ok(mut core) = self.0.lock() else {
            return Err(PyRuntimeError::new_err("an earlier call broke this object; make a new one"));
        };
        let result = work(&mut core);
        drop(core);
        result.map_err(|refusal| error::to_python(py, refusal))
    }

    /// What can be read even of a core that an earlier call broke, for a report of that.
    pub fn last_look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What an object does when Python forgets it: there is nobody left to be told of a refusal.
    pub fn last(&self, work: impl FnOnce(&mut T) -> blocktable_core::Result<()>) {
        if let Ok(mut core) = self.0.lock() {
            let _ = work(&mut core);
        }
    }
}

/// Runs `work`, which needs neither the interpreter nor a lock, with the interpreter released.
pub fn released<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    py.detach(work)
}

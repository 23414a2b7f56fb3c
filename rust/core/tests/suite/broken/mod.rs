//! A promise that does not hold, with the name of the check that found it.
//!
//! Before: a check of the driver, of the model, or the audit. After: a test that fails, or one that demands that a planted fault is
//! found by the check that is there for it.

use blocktable_core::error::Error;

/// A promise that does not hold. `check` is a name of the audit (A1 to A8) or of one of the tests' own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub check: &'static str,
    pub detail: String,
}

pub type Checked<T = ()> = Result<T, Broken>;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.check, self.detail)
    }
}

/// Fails with `detail` under the name `check`.
pub fn broken<T>(check: &'static str, detail: impl Into<String>) -> Checked<T> {
    Err(Broken { check, detail: detail.into() })
}

/// `Ok` if `holds`.
pub fn ensure(holds: bool, check: &'static str, detail: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { broken(check, detail()) }
}

/// What the audit says, under its own name.
pub fn audited(result: Result<(), Error>) -> Checked {
    match result {
        Ok(()) => Ok(()),
        Err(Error::Audit { check, detail }) => broken(check, detail),
        Err(other) => broken("audit", other.to_string()),
    }
}

//! Recordings at the border: files are opened here, since the core only writes to what it is given. Replays and reads bytes.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Result as IoResult, Write};
use std::path::Path;

use blocktable_core::recording::{Call, Recording};
use blocktable_core::replay;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::released;
use crate::error::{recording_failed, to_python};

/// Bytes that are written at once.
const BUFFER: usize = 1 << 16;

/// A file to which only the process that made it writes: a fork of it has what was buffered, and the end of the file, too.
pub struct OwnFile {
    file: File,
    process: u32,
}

impl Write for OwnFile {
    fn write(&mut self, bytes: &[u8]) -> IoResult<usize> {
        if self.process == std::process::id() { self.file.write(bytes) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> IoResult<()> {
        self.file.flush()
    }
}

/// Makes the file, which only its owner may read, and must not be there yet. Says why not.
pub fn create(path: &Path) -> IoResult<BufWriter<OwnFile>> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let own = |file| OwnFile { file, process: std::process::id() };
    options.open(path).map(|file| BufWriter::with_capacity(BUFFER, own(file)))
}

/// Ends a recording; how many calls it has.
pub fn stop(py: Python<'_>, stopped: Option<(u64, Option<String>)>) -> PyResult<Option<u64>> {
    match stopped {
        None => Ok(None),
        Some((calls, None)) => Ok(Some(calls)),
        Some((_, Some(why))) => Err(recording_failed(py, &why)),
    }
}

/// Replay a recording on a new scheduler.
#[pyfunction]
#[pyo3(name = "replay")]
pub fn py_replay<'py>(py: Python<'py>, recording: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let replayed = released(py, || replay::replay(recording)).map_err(|refusal| to_python(py, refusal))?;
    let dict = PyDict::new(py);
    dict.set_item("calls", replayed.calls)?;
    dict.set_item("plans", replayed.plans)?;
    dict.set_item("tokens", replayed.tokens)?;
    dict.set_item("is_cut", replayed.is_cut)?;
    dict.set_item("ends_in_panic", replayed.ends_in_panic)?;
    dict.set_item("difference", replayed.difference.map(|difference| difference.to_string()))?;
    Ok(dict)
}

/// The calls of a recording, a line each.
#[pyfunction]
pub fn read_recording(py: Python<'_>, recording: &[u8]) -> PyResult<Vec<String>> {
    let read = released(py, || Recording::read(recording)).map_err(|refusal| to_python(py, refusal))?;
    let line = |(number, call): (u64, &Call)| {
        let name = call.name();
        match call {
            Call::Submit { tokens, limits, now_us, .. } => {
                format!("{number} {name} {} tokens, max_tokens {}, at {now_us} us", tokens.len(), limits.max_tokens)
            }
            Call::Pin { tokens, .. } => format!("{number} {name} {} tokens", tokens.len()),
            Call::Commit { step, tokens, now_us, .. } => {
                format!("{number} {name} step {step}, {} tokens, at {now_us} us", tokens.len())
            }
            Call::Propose { rows, tokens, .. } => {
                format!("{number} {name} {} drafts for {} sequences", tokens.len(), rows.len())
            }
            Call::Plan { now_us } => format!("{number} {name} at {now_us} us"),
            Call::SetRetention { request, .. }
            | Call::Abort { request }
            | Call::EndSequence { request }
            | Call::Finish { request }
            | Call::Fork { request, .. } => format!("{number} {name} request {request}"),
            Call::Truncate { request, num_tokens } => {
                format!("{number} {name} request {request} to {num_tokens} tokens")
            }
            Call::Unpin { pin } => format!("{number} {name} {pin}"),
            Call::Fail { step } => format!("{number} {name} step {step}"),
            Call::SetWeightsVersion { .. } | Call::ResetPrefixCache => format!("{number} {name}"),
        }
    };
    Ok((read.first..).zip(read.entries.iter().map(|entry| &entry.call)).map(line).collect())
}

//! The closed set of refusals. Each carries the numbers that its reader needs.
//!
//! Bad input and refusals change nothing. `Stalled` and `Audit` are faults of ours, never of the caller.

use crate::ids::{BlockId, RequestId, StepId};
use crate::stall::Stall;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A value from outside breaks a bound.
    InvalidInput {
        /// Which argument.
        field: &'static str,
        /// What it was.
        value: i128,
        /// What it must be.
        bound: String,
    },
    /// Even alone the request needs more blocks than the pool can ever give.
    NeverFits {
        /// Blocks for the prompt and the outputs that it must make.
        needed: u64,
        /// Blocks of the pool but the null block.
        usable: u64,
    },
    /// As much waits as may wait.
    QueueFull {
        /// The limit, by the name of its option.
        what: &'static str,
        /// How much may wait.
        limit: u64,
        /// How much waits.
        waiting: u64,
        /// When there will be room at the rate at which requests were admitted lately; unknown before the first was.
        retry_after_us: Option<u64>,
    },
    /// Fewer blocks are free than were asked for: wait or preempt.
    OutOfBlocks {
        /// Asked for.
        needed: u32,
        /// In the free queue.
        free: u32,
    },
    /// A pin would hold more blocks than pins may hold together.
    OverPinBudget {
        /// Blocks that it would pin and no other pin has.
        needed: u32,
        /// Blocks that are pinned.
        pinned: u32,
        /// `pin_budget`.
        budget: u32,
    },
    /// A block was released, or shared, that nobody holds.
    NotHeld {
        /// The block.
        block: BlockId,
    },
    /// A step in flight writes the rows that were to be copied.
    BeingWritten {
        /// The block.
        block: BlockId,
    },
    /// A block id at or past the end of the pool.
    NoSuchBlock {
        /// The id.
        block: u32,
        /// Blocks in all.
        num_blocks: u32,
    },
    /// A table was used after it was released, or after its pool was reset.
    Released,
    /// A table of another pool.
    ForeignTable,
    /// A fork needs a running parent, and this request waits.
    NotRunning {
        /// Its id.
        request: RequestId,
    },
    /// A fork needs a row, and every row is had.
    NoFreeRow {
        /// Rows in all.
        rows: u32,
    },
    /// The request is not known any more, or never was.
    UnknownRequest {
        /// Its id.
        request: RequestId,
    },
    /// `plan` was called while a step is neither committed nor failed.
    StepInFlight {
        /// That step.
        step: StepId,
    },
    /// `commit` or `fail` named a step that is not in flight.
    WrongStep {
        /// The step that was named.
        given: StepId,
        /// The step in flight, if any.
        expected: Option<StepId>,
    },
    /// Runnable work cannot move although nothing is in flight.
    Stalled(Box<Stall>),
    /// An invariant does not hold.
    Audit {
        /// Its name, A1 to A8.
        check: &'static str,
        /// What was found.
        detail: String,
    },
}

/// The result of a call that can be refused.
pub type Result<T> = std::result::Result<T, Error>;

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::InvalidInput { field, value, bound } => write!(f, "{field}={value}: {bound}"),
            Error::NeverFits { needed, usable } => {
                write!(f, "the request needs {needed} KV blocks, the pool has {usable} usable ones")
            }
            Error::QueueFull { what, limit, waiting, retry_after_us } => {
                write!(f, "the queue is full: {waiting} wait, {limit} may ({what})")?;
                retry_after_us.map_or(Ok(()), |us| write!(f, "; retry after {us} us"))
            }
            Error::OutOfBlocks { needed, free } => write!(f, "{needed} blocks were asked for, {free} are free"),
            Error::OverPinBudget { needed, pinned, budget } => {
                write!(f, "the pin needs {needed} blocks more, {pinned} are pinned and {budget} may be (pin_budget)")
            }
            Error::NotHeld { block } => write!(f, "block {} has no holder", block.get()),
            Error::BeingWritten { block } => write!(f, "block {} is written by the step in flight", block.get()),
            Error::NoSuchBlock { block, num_blocks } => write!(f, "block {block}: must be below {num_blocks}"),
            Error::Released => write!(f, "the table was released, or its pool was reset"),
            Error::ForeignTable => write!(f, "the table belongs to another pool"),
            Error::NotRunning { request } => write!(f, "request {} does not run", request.0),
            Error::NoFreeRow { rows } => write!(f, "all {rows} rows are had by running requests"),
            Error::UnknownRequest { request } => write!(f, "request {} is not known", request.0),
            Error::StepInFlight { step } => write!(f, "step {} is still in flight", step.0),
            Error::WrongStep { given, expected: Some(step) } => {
                write!(f, "step {} was named, but step {} is in flight", given.0, step.0)
            }
            Error::WrongStep { given, expected: None } => {
                write!(f, "step {} was named, but no step is in flight", given.0)
            }
            Error::Stalled(stall) => write!(f, "{stall}"),
            Error::Audit { check, detail } => write!(f, "{check}: {detail}"),
        }
    }
}

impl std::error::Error for Error {}

//! Block pool, prefix cache and scheduler for paged KV memory (PagedAttention, Kwon et al. 2023).
//!
//! The walk of a step: [`Scheduler::submit`](scheduler::Scheduler::submit) queues a request → [`plan`](scheduler::Scheduler::plan)
//! chooses what runs, finds prefixes in the [`prefix_index`] by the keys of [`block_hash`], takes blocks from the [`block_pool`] in the
//! order of the [`free_queue`] into a [`block_table`], and leaves flat arrays in the memory that [`mod@plan`] describes → the caller
//! runs the model → [`commit`](scheduler::Scheduler::commit) confirms the rows, publishes full blocks and ends what is done.
//!
//! Knows nothing of Python, reads no clock and no randomness. One thread owns the state: calls take `&mut self`.

#![forbid(unsafe_code)]

#[cfg(all(feature = "mutants", not(loom)))]
pub mod access;
pub mod algorithm;
mod beside;
pub mod block_hash;
pub mod block_map;
pub mod block_pool;
pub mod block_ref;
pub mod block_size;
pub mod block_table;
pub mod chain;
pub mod config;
pub mod deadlines;
pub mod digest;
pub mod error;
pub mod event_bytes;
pub mod events;
pub mod free_queue;
pub mod group;
pub mod ids;
pub mod key_encoding;
pub mod miss;
pub mod mutant;
pub mod notes;
pub mod pins;
pub mod plan;
pub mod policy;
pub mod prefix_cache;
pub mod prefix_groups;
pub mod prefix_index;
pub mod prompt;
pub mod queue_rules;
pub mod rank;
pub mod reason;
pub mod recorder;
pub mod recording;
#[cfg(feature = "mutants")]
pub mod refusal;
pub mod replay;
pub mod request;
pub mod retention;
pub mod scheduler;
mod second_look;
pub mod sequence;
pub mod sequences;
pub mod shares;
pub mod stall;
pub mod stats;
pub mod tenants;
pub mod timeline;
pub mod vllm_encoding;

mod accounts;
mod admission;
mod audit;
mod cache_follower;
mod charges;
mod commit;
mod copy_on_write;
mod decodes;
mod drain;
mod ending;
mod expiry;
mod explain;
mod flight;
mod fork;
mod hit;
mod lookup;
mod partial_hit;
mod partial_index;
mod planning;
mod preemption;
mod promises;
mod queue_limits;
mod recording_calls;
mod recording_config;
mod recording_numbers;
#[cfg(not(feature = "mutants"))]
mod refusal;
mod resident;
mod room;
mod row_arrays;
mod seat;
mod seat_heap;
mod seat_lane;
mod seat_order;
mod secured;
mod sha256;
mod siblings;
mod sight;
mod speculation;
#[cfg(feature = "mutants")]
mod state;
mod submission;
mod sync;
mod trail;
mod waiting_line;
mod watch;
mod weights;

pub use commit::Committed;
pub use config::Config;
pub use error::{Error, Result};
pub use group::GroupSpec;
pub use recorder::Recorded;
pub use scheduler::Scheduler;

//! All tests of the core but the model-checked races, as one crate: it is compiled and linked once.
//!
//! A folder is what several files use; a file has the tests of one promise.

#![cfg(not(loom))]
#![cfg_attr(not(feature = "mutants"), allow(dead_code, reason = "what only the tests with planted faults use"))]

mod broken;
mod default_bounds;
mod draft_checks;
mod drafts;
mod driver;
mod event_bytes;
mod examples;
mod fuzz_entries;
mod groups;
mod in_flight_sharing;
mod key_checks;
mod keys;
mod limits_of_the_queue;
mod lock_freedom;
mod mirror;
mod model;
mod mutants;
mod overlap;
mod overlap_random;
mod overlap_script;
mod partial_hits;
mod parts;
mod pins;
mod policies;
mod policy_checks;
mod pool_script;
mod pool_vs_model;
mod progress_exhaustive;
mod queue_steps;
mod queue_threads;
mod reasons;
mod refused;
mod replay;
mod retained;
mod retention_script;
mod retention_vs_model;
mod schedule_corners;
mod schedule_script;
mod scheduler_random;
mod seed;
mod sequence_script;
mod sequences_vs_model;
mod shared_prompt;
mod shares_script;
mod shares_vs_model;
mod sibling_checks;
mod siblings;
mod thrash;
mod transaction;
mod truncate;
mod vllm_hashes;
mod vllm_vectors;

//! Counters since the start, and gauges. Plain numbers, written where the thing happens, read as one snapshot.
//!
//! Ends, preemptions and first tokens are counted by sequence, and the sequences of a request beside its first one among `forks`: so
//! `submitted + forks` is the sum of `finished`, `aborted`, `queue_expired` and those that live, and no end counts twice.

/// Counters since the start. Tokens are counted in tokens, memory in blocks or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Plans with something to run.
    pub steps: u64,
    /// Requests accepted by submit.
    pub submitted: u64,
    /// Requests forked from running ones.
    pub forks: u64,
    /// Requests refused by submit.
    pub refused: u64,
    /// Requests ended as finished.
    pub finished: u64,
    /// Requests ended as aborted.
    pub aborted: u64,
    /// Those of them whose deadline was over.
    pub expired: u64,
    /// Requests whose queue deadline was over before they were admitted: they count neither as finished nor as aborted.
    pub queue_expired: u64,
    /// Requests that lost their row and blocks and wait again.
    pub preemptions: u64,
    /// Steps that the caller failed.
    pub failed_steps: u64,
    /// Prompt tokens of admitted requests, each request once.
    pub prefix_queries: u64,
    /// Those of them that were found in the prefix cache.
    pub prefix_hits: u64,
    /// Hits that a comparison of their tokens refused: each was taken for a miss.
    pub forged_hits: u64,
    /// Tokens that had been computed and were given up by a preemption.
    pub recomputed_tokens: u64,
    /// Tokens of running requests that were given up because the writer of a block that they shared failed or left.
    pub put_back_tokens: u64,
    /// Tokens of steps that the caller failed.
    pub failed_tokens: u64,
    /// Draft tokens planned.
    pub drafted_tokens: u64,
    /// Those of them that became outputs.
    pub accepted_drafts: u64,
    /// Tokens planned, drafts among them.
    pub scheduled_tokens: u64,
    /// Rows of held blocks, summed over steps.
    pub taken_rows_sum: u64,
    /// Rows of held blocks that hold no token after the step, summed over steps.
    pub wasted_rows_sum: u64,
    /// Time from submit to first admission, summed over admitted requests, in microseconds.
    pub queue_us_sum: u64,
    /// Time from submit to the commit of the first output, summed over requests, in microseconds.
    pub first_token_us_sum: u64,
    /// Blocks held at most.
    pub peak_blocks: u64,
}

impl Counters {
    /// Tokens that were given up, by what took them beside preemptions. Apart from the others: those are in the digests of recordings.
    #[must_use]
    pub fn losses(&self) -> [(&'static str, u64); 2] {
        [("put_back_tokens", self.put_back_tokens), ("failed_tokens", self.failed_tokens)]
    }

    /// Every other counter with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 22] {
        [
            ("steps", self.steps),
            ("submitted", self.submitted),
            ("forks", self.forks),
            ("refused", self.refused),
            ("finished", self.finished),
            ("aborted", self.aborted),
            ("expired", self.expired),
            ("queue_expired", self.queue_expired),
            ("preemptions", self.preemptions),
            ("failed_steps", self.failed_steps),
            ("prefix_queries", self.prefix_queries),
            ("prefix_hits", self.prefix_hits),
            ("forged_hits", self.forged_hits),
            ("recomputed_tokens", self.recomputed_tokens),
            ("drafted_tokens", self.drafted_tokens),
            ("accepted_drafts", self.accepted_drafts),
            ("scheduled_tokens", self.scheduled_tokens),
            ("taken_rows_sum", self.taken_rows_sum),
            ("wasted_rows_sum", self.wasted_rows_sum),
            ("queue_us_sum", self.queue_us_sum),
            ("first_token_us_sum", self.first_token_us_sum),
            ("peak_blocks", self.peak_blocks),
        ]
    }
}

//! The closed set of reasons: why a request waits, is skipped, preempted, refused or ended, what it evicted, why it missed, and the few
//! events that stand between those in its timeline (design 12). Each carries its numbers.
//!
//! Before: the scheduler decides something and notes why. After: [`Timelines`](crate::timeline::Timelines) keeps it. The codes below are
//! stable: a code never changes its meaning and is never used again.

use std::fmt;

use crate::error::Error;
use crate::miss::Miss;

/// What a reason is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A waiting request was not admitted, or a running one got no token.
    Wait,
    /// A running request lost something.
    Loss,
    /// A call was refused. No request came of it, so it is only counted.
    Refusal,
    /// Cached content was given up.
    Eviction,
    /// A prefix was found no further than it was.
    Miss,
    /// The request ended.
    End,
    /// Neither: it went on.
    Event,
}

impl Kind {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Wait => "wait",
            Kind::Loss => "loss",
            Kind::Refusal => "refusal",
            Kind::Eviction => "eviction",
            Kind::Miss => "miss",
            Kind::End => "end",
            Kind::Event => "event",
        }
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $code:literal $variant:ident $name:literal $kind:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* } $words:literal;)*) => {
        /// Why something happened, with its numbers. Blocks are counted in blocks, tokens in tokens; `request` is a request's id.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason { $($(#[$doc])* $variant { $($(#[$field_doc])* $field: $type),* },)* }

        impl Reason {
            /// One of each, with all numbers 0, in the order of their codes.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant { $($field: 0),* },)*];

            /// Its stable number.
            #[must_use]
            pub const fn code(self) -> u8 {
                match self { $(Reason::$variant { .. } => $code,)* }
            }

            /// Its stable name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Reason::$variant { .. } => $name,)* }
            }

            /// What it is about.
            #[must_use]
            pub const fn kind(self) -> Kind {
                match self { $(Reason::$variant { .. } => Kind::$kind,)* }
            }

            /// Its numbers with their names, in order.
            pub fn numbers(self) -> impl Iterator<Item = (&'static str, u64)> {
                let mut numbers = [None; 3];
                match self {
                    $(Reason::$variant { $($field),* } => {
                        let given: &[(&'static str, u64)] = &[$((stringify!($field), u64::from($field))),*];
                        given.iter().enumerate().for_each(|(at, &number)| numbers[at] = Some(number));
                    })*
                }
                numbers.into_iter().flatten()
            }
        }

        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self { $(Reason::$variant { $($field),* } => write!(f, $words),)* }
            }
        }
    };
}

reasons! {
    /// It needs more blocks than are free and promised to nobody.
    1 OutOfBlocks "out_of_blocks" Wait {
        /// Blocks that it lacks, hits that are free among them.
        needed: u32,
        /// In the free queue.
        free: u32,
        /// Of those, promised to running requests.
        promised: u32
    } "waits for {needed} KV blocks: {free} are free, {promised} of them promised to others";
    /// Another request computes its next block in this step.
    2 PrefixInFlight "prefix_in_flight" Wait {
        /// Blocks of its prefix that are there.
        found: u32
    } "waits for the block behind its first {found}, which another request computes now";
    /// The blocks that it needs are free when the step in flight has ended.
    3 BlocksInFlight "blocks_in_flight" Wait {
        /// Blocks that it lacks.
        needed: u32,
        /// In the free queue, promised to nobody.
        free: u32,
        /// Held by nobody, named by what is in flight.
        parked: u32
    } "waits for {needed} KV blocks: {free} are free, {parked} more when what is in flight has ended";
    /// Every row of the block tables is had.
    4 NoRow "no_row" Wait {
        /// Rows in all.
        rows: u32
    } "waits for a row: all {rows} are had by running requests (max_num_seqs)";
    /// The step has no token left for it.
    5 NoBudget "no_budget" Wait {
        /// Tokens of a step.
        budget: u32
    } "waits for tokens: the {budget} of this step are given to others (max_num_batched_tokens)";
    /// The plan did not come to it: who waits before it does not fit, or took what there was.
    7 BehindHead "behind_head" Wait {
        /// Others that wait.
        others: u32
    } "waits its turn: {others} others wait";
    /// This step preempted somebody, so it admits nobody.
    11 AfterPreemption "after_preemption" Wait {} "waits: a step that preempts admits nobody";
    /// One of its steps was refused by the pool.
    12 StepRefused "step_refused" Wait {} "waits: one of its steps was refused by the pool";
    /// Its tenant may hold no more blocks.
    13 OverQuota "over_quota" Wait {
        /// Blocks that its tenant holds.
        held: u32,
        /// Its hard quota.
        limit: u32
    } "waits: its tenant holds {held} KV blocks, {limit} it may hold";
    /// Its tenant is above its soft quota, and others wait.
    14 Yields "yields" Wait {
        /// Blocks that its tenant holds.
        held: u32,
        /// Its soft quota.
        limit: u32
    } "waits: its tenant holds {held} KV blocks, above {limit} it goes behind others";
    /// The blocks that it needs are free, and kept for those that run to grow.
    15 KeptForGrowth "kept_for_growth" Wait {
        /// Blocks that it needs.
        needed: u32,
        /// In the free queue, promised to nobody.
        free: u32,
        /// Of those, left for growth: the watermark, and what is expected.
        kept: u32
    } "waits for {needed} KV blocks: {free} are free, {kept} of them kept for those that run to grow (watermark, estimate_growth)";
    /// A running request cannot grow, and nobody that ranks below it has what it lacks.
    20 NoVictim "no_victim" Wait {
        /// Blocks that it lacks.
        needed: u32,
        /// In the free queue.
        free: u32,
        /// Of those, promised to running requests.
        promised: u32
    } "runs, but waits for {needed} KV blocks: {free} are free, {promised} of them promised, and nobody below it has enough";
    /// The step in flight verifies drafts: until then nobody knows where it goes on.
    21 DraftsInFlight "drafts_in_flight" Wait {
        /// Drafts in that step.
        drafts: u32
    } "runs, but waits for the step that verifies its {drafts} drafts";
    /// It lost its row and its blocks, and waits again.
    30 PreemptedBy "preempted_by" Loss {
        /// Who took them.
        request: u64,
        /// Tokens to compute again.
        tokens: u32
    } "was preempted by request {request}: {tokens} tokens are computed again";
    /// Blocks that were promised to it went to a request of higher rank.
    31 PromiseTakenBy "promise_taken_by" Loss {
        /// Who took them.
        request: u64,
        /// How many.
        blocks: u32
    } "lost the promise of {blocks} KV blocks to request {request}";
    /// What it shared was withdrawn: its writer failed or left.
    32 PutBack "put_back" Loss {
        /// Tokens to compute after all.
        tokens: u32
    } "goes back by {tokens} tokens: who computed them for it failed or left";
    /// The model failed in a step that ran it.
    33 StepFailed "step_failed" Loss {
        /// Tokens of that step.
        tokens: u32
    } "computes {tokens} tokens again: the model failed";
    /// Another one was admitted while it did not fit.
    34 PassedBy "passed_by" Loss {
        /// Who.
        request: u64
    } "was passed by request {request}, which fits";
    /// A value breaks a bound.
    40 InvalidInput "invalid_input" Refusal {} "was refused: a value breaks a bound";
    /// Even alone it needs more blocks than there are.
    41 NeverFits "never_fits" Refusal {
        /// Blocks that it needs.
        needed: u32,
        /// Blocks of the pool but the null block.
        usable: u32
    } "was refused: it needs {needed} KV blocks, the pool has {usable} usable ones";
    /// As many wait as may wait.
    42 QueueFull "queue_full" Refusal {
        /// The limit, of requests, tokens or blocks.
        limit: u64
    } "was refused: the queue is full, {limit} may wait";
    /// A fork's parent waits, or has ended.
    43 NotRunning "not_running" Refusal {
        /// The parent.
        request: u64
    } "was refused: request {request} does not run";
    /// A fork found no row.
    44 NoFreeRow "no_free_row" Refusal {
        /// Rows in all.
        rows: u32
    } "was refused: all {rows} rows are had by running requests";
    /// A fork was refused by the pool.
    45 Refused "refused" Refusal {} "was refused by the pool";
    /// Blocks that it took held cached content.
    60 Evicted "evicted" Eviction {
        /// How many.
        blocks: u32
    } "took {blocks} KV blocks that held cached content";
    /// Every full block of the prompt was found that may be.
    70 MissNothing "miss_nothing" Miss {
        /// Blocks that were found.
        found: u32
    } "found all of its prefix that can be found: {found} blocks";
    /// The prompt has no full block before its last token.
    71 MissShorterThanBlock "miss_shorter_than_block" Miss {} "found nothing: the prompt is shorter than a block";
    /// Nobody published the next block, as far as it is remembered.
    72 MissNeverSeen "miss_never_seen" Miss {
        /// Blocks that were found.
        found: u32
    } "found {found} blocks of its prefix: nobody published the next one";
    /// The next block was published, and given up.
    73 MissEvicted "miss_evicted" Miss {
        /// Blocks that were found.
        found: u32
    } "found {found} blocks of its prefix: the next one was evicted";
    /// The next block was published with another salt.
    74 MissOtherSalt "miss_other_salt" Miss {
        /// Blocks that were found.
        found: u32
    } "found {found} blocks of its prefix: the next one has another salt";
    /// The next block was published by another adapter.
    75 MissOtherAdapter "miss_other_adapter" Miss {
        /// Blocks that were found.
        found: u32
    } "found {found} blocks of its prefix: the next one is of another adapter";
    /// The next block was published in another domain. Only counted, never told of a request.
    76 MissOtherDomain "miss_other_domain" Miss {
        /// Blocks that were found.
        found: u32
    } "found {found} blocks of its prefix: the next one is of another domain";
    /// A stop token, or the caller saw a stop string.
    80 FinishedStop "finished_stop" End {
        /// Outputs.
        tokens: u32
    } "finished with {tokens} outputs: a stop";
    /// `max_tokens` or `max_model_len` reached.
    81 FinishedLength "finished_length" End {
        /// Outputs.
        tokens: u32
    } "finished with {tokens} outputs: the limit";
    /// The caller aborted it.
    82 Aborted "aborted" End {
        /// Outputs.
        tokens: u32
    } "was aborted after {tokens} outputs";
    /// Alone in the pool or in its tenant's quota, and still not fitting.
    83 Capacity "capacity" End {
        /// Blocks that it needs.
        needed: u32,
        /// Blocks of the pool but the null block and what is pinned, or the hard quota of its tenant if that is less.
        usable: u32
    } "was aborted: it needs {needed} KV blocks, {usable} are all that it may ever hold";
    /// Its deadline was over.
    84 Deadline "deadline" End {
        /// Outputs.
        tokens: u32
    } "was aborted after {tokens} outputs: its deadline is over";
    /// Its queue deadline was over before it was admitted for the first time.
    85 QueueDeadline "queue_deadline" End {
        /// Milliseconds that it waited.
        waited_ms: u32
    } "was refused: it waited {waited_ms} ms, longer than it would (queue deadline)";
    /// It was accepted.
    90 Submitted "submitted" Event {
        /// Of the prompt.
        tokens: u32,
        /// Outputs at most.
        max_tokens: u32
    } "was submitted: {tokens} tokens, {max_tokens} outputs at most";
    /// It has a row, for the first time or again.
    91 Admitted "admitted" Event {
        /// Tokens found in the prefix cache.
        cached: u32,
        /// Its row.
        row: u32
    } "runs in row {row}: {cached} tokens were cached";
    /// It began as a copy of a running request.
    92 ForkedFrom "forked_from" Event {
        /// The parent.
        request: u64,
        /// Tokens that it begins with.
        tokens: u32
    } "was forked from request {request} with {tokens} tokens";
    /// It has its first output.
    93 FirstToken "first_token" Event {} "has its first output";
    /// The caller took tokens back.
    94 Truncated "truncated" Event {
        /// Tokens that are left.
        tokens: u32
    } "was truncated to {tokens} tokens";
}

/// Codes are below this.
pub const CODES: usize = 96;

impl Reason {
    /// Why a submit or a fork was refused.
    #[must_use]
    pub fn of_refusal(error: &Error) -> Reason {
        match *error {
            Error::InvalidInput { .. } => Reason::InvalidInput {},
            Error::NeverFits { needed, usable } => {
                Reason::NeverFits { needed: saturated(needed), usable: saturated(usable) }
            }
            Error::QueueFull { limit, .. } => Reason::QueueFull { limit },
            Error::NotRunning { request } | Error::UnknownRequest { request } => {
                Reason::NotRunning { request: request.0 }
            }
            Error::NoFreeRow { rows } => Reason::NoFreeRow { rows },
            _ => Reason::Refused {},
        }
    }

    /// Why a prefix of which `found` blocks were found was found no further.
    #[must_use]
    pub fn of_miss(miss: Miss, found: usize) -> Reason {
        let found = saturated(found as u64);
        match miss {
            Miss::Nothing => Reason::MissNothing { found },
            Miss::ShorterThanBlock => Reason::MissShorterThanBlock {},
            Miss::NeverSeen => Reason::MissNeverSeen { found },
            Miss::Evicted => Reason::MissEvicted { found },
            Miss::OtherSalt => Reason::MissOtherSalt { found },
            Miss::OtherAdapter => Reason::MissOtherAdapter { found },
            Miss::OtherDomain => Reason::MissOtherDomain { found },
        }
    }
}

/// The nearest number of 32 bits.
pub(crate) fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_and_names_are_unique_and_small() {
        let codes: HashSet<u8> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        let names: HashSet<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!((codes.len(), names.len()), (Reason::ALL.len(), Reason::ALL.len()));
        assert!(Reason::ALL.iter().all(|reason| usize::from(reason.code()) < CODES));
        assert!(Reason::ALL.is_sorted_by_key(|reason| reason.code()));
        assert_eq!(size_of::<Reason>(), 16, "two machine words, so that a record has six");
    }

    #[test]
    fn numbers_have_names_and_stand_in_the_words() {
        let reason = Reason::OutOfBlocks { needed: 7, free: 3, promised: 2 };
        assert_eq!(reason.numbers().collect::<Vec<_>>(), [("needed", 7), ("free", 3), ("promised", 2)]);
        assert_eq!(reason.to_string(), "waits for 7 KV blocks: 3 are free, 2 of them promised to others");
        assert_eq!(Reason::FirstToken {}.numbers().count(), 0);
    }

    #[test]
    fn every_miss_has_a_reason_of_its_name() {
        for miss in Miss::ALL {
            assert_eq!(Reason::of_miss(miss, 3).name(), format!("miss_{}", miss.name()));
        }
    }
}

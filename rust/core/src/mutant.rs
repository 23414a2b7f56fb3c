//! Planted faults. Each check of an invariant has one that must fail it.
//!
//! Without feature `mutants` every question is answered `false` at compile time. With it, a thread chooses one fault by name.

macro_rules! mutants {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A planted fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant { $($(#[$doc])* $variant,)* }

        impl Mutant {
            /// Every planted fault.
            pub const ALL: &'static [Mutant] = &[$(Mutant::$variant,)*];

            /// The name by which tests choose it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Mutant::$variant => $name,)* }
            }
        }
    };
}

mutants! {
    /// A waiting request stands behind the others whatever its key.
    LaneOutOfOrder = "lane_out_of_order",
    /// The last block of a finished request keeps its holder.
    LeakBlockOnFinish = "leak_block_on_finish",
    /// The end of one step ends the leases of the next one too.
    LeasesEndTogether = "leases_end_together",
    /// A stop token that comes while the next step is in flight ends nothing.
    WastedTokenShown = "wasted_token_shown",
    /// A block gets its key from a plan that does not know its last token.
    KeyBeforeToken = "key_before_token",
    /// An abort of a request ends its first sequence alone.
    SiblingsOutlive = "siblings_outlive",
    /// A fork of a sequence that is about to end with its request belongs to nobody.
    ForkOutlivesFamily = "fork_outlives_family",
    /// Rows for the other sequences of a request that leaves are lost.
    SpareRowsLost = "spare_rows_lost",
    /// Other sequences get their first token from another row.
    SiblingsOfOtherRow = "siblings_of_other_row",
    /// Who outgrows its tenant's quota is told the size of the pool.
    CapacityTellsPool = "capacity_tells_pool",
    /// Who was refused in a plan that ran nothing is told so when it runs.
    RefusedReadsWaiting = "refused_reads_waiting",
    /// What is kept for growth is told as blocks in flight.
    KeptReadsInFlight = "kept_reads_in_flight",
    /// Who waits behind the one for which room was made is told that the tokens of the step are given away.
    RoomReadsNoBudget = "room_reads_no_budget",
    /// A request of several sequences is admitted with a row for one.
    RowForOneOnly = "row_for_one_only",
    /// With `no_evict` what a request lost is promised again beyond its tenant's quota.
    DebtPaidOverQuota = "debt_paid_over_quota",
    /// With `no_evict` a fork promises copies to the child, though others write before it.
    CopyOfLastPromised = "copy_of_last_promised",
    /// For a growth beyond its tenant's quota anybody below is preempted, also who holds nothing.
    TenantVictimInVain = "tenant_victim_in_vain",
    /// A fork shares what its parent sees no more.
    ForkSharesUnseen = "fork_shares_unseen",
    /// A request of several sequences is promised the blocks of the first alone.
    SiblingsUnpromised = "siblings_unpromised",
    /// Who finds no block ends, although those that are free are kept for a waiting request.
    RoomEndsHighest = "room_ends_highest",
    /// Rows without a token count as wasted in a plan that runs nothing.
    RowsOfNoStepWasted = "rows_of_no_step_wasted",
    /// A block is published with the rows of a draft that was wrong.
    RejectedDraftPublished = "rejected_draft_published",
    /// One row of the drafts that were wrong counts as computed.
    RollbackKeepsOne = "rollback_keeps_one",
    /// A stop among drafts that are right does not end the run.
    StopInsideRunMissed = "stop_inside_run_missed",
    /// A draft counts whatever the sample before it says.
    DraftNotCompared = "draft_not_compared",
    /// Drafts get their blocks like any growth.
    DraftsPreempt = "drafts_preempt",
    /// Growth preempts although a step in flight will give blocks back.
    LookaheadNotAwaited = "lookahead_not_awaited",
    /// Growth preempts although blocks of those that left are free when the step in flight has ended.
    ParkedNotAwaited = "parked_not_awaited",
    /// The blocks of wrong drafts stay with their sequence.
    LookaheadKept = "lookahead_kept",
    /// Drafts run past the most tokens that a request may have.
    DraftsPastLimit = "drafts_past_limit",
    /// What the next step brings counts although the one before it failed.
    FailLeavesNext = "fail_leaves_next",
    /// The last block of a released list, if it is published, enters no queue.
    LostBlock = "lost_block",
    /// A released list is released twice.
    DoubleFree = "double_free",
    /// The queue mends only one of the two links around a block that leaves.
    OneWayLink = "one_way_link",
    /// The head of the queue's stack carries no version.
    StackForgetsVersion = "stack_forgets_version",
    /// A list is put on the queue's stack by a load and a store.
    StackIgnoresOthers = "stack_ignores_others",
    /// The links of the queue's lanes carry no version.
    LinksForgetVersion = "links_forget_version",
    /// An operation on the lanes is written over another one that is under way.
    LanesIgnoreOthers = "lanes_ignore_others",
    /// A name is taken away by a load and a store.
    UnnameWithoutCompare = "unname_without_compare",
    /// A thread that finds an operation of another on the lanes waits until that one has done it.
    WaitForOthers = "wait_for_others",
    /// Who helps with an operation on the lanes never looks whether it is over.
    HelpersNeverStop = "helpers_never_stop",
    /// A hit takes a block out of its lane without a second look at where it is.
    HitTrustsFirstLook = "hit_trusts_first_look",
    /// A hit of a chain takes out what stands before its first block, whatever that is.
    HitTakesNeighbours = "hit_takes_neighbours",
    /// A block taken out of a lane keeps the name of its old content.
    TakeKeepsName = "take_keeps_name",
    /// Holders are added by a load and a store.
    CountWithoutCompare = "count_without_compare",
    /// Holders are dropped by a load and a store.
    DropWithoutCompare = "drop_without_compare",
    /// Permits are taken by a load and a store.
    PermitsWithoutCompare = "permits_without_compare",
    /// A release adds its permits before its blocks are queued.
    PermitsFirst = "permits_first",
    /// Growth asks for all blocks of a request, not for those that it lacks.
    GrowFromZero = "grow_from_zero",
    /// An admission that does not fit keeps its hits.
    BlockedKeepsHits = "blocked_keeps_hits",
    /// Released blocks without published content join the tail of the queue.
    UnpublishedToTail = "unpublished_to_tail",
    /// A growth takes one victim more than it needs.
    PreemptTwo = "preempt_two",
    /// A prefill takes the tokens of the decodes behind it.
    NoBudgetForDecodes = "no_budget_for_decodes",
    /// A hit takes the block out of the queue but counts no holder.
    SkipRefOnHit = "skip_ref_on_hit",
    /// The queue hands out the second block.
    FreeQueueSkipsOne = "free_queue_skips_one",
    /// A hit counts a holder but leaves the block in the queue.
    HitKeepsInQueue = "hit_keeps_in_queue",
    /// A block that is handed out keeps its entry in the prefix index.
    KeepKeyOnReuse = "keep_key_on_reuse",
    /// Blocks are published when their last row is planned.
    PublishAtPlan = "publish_at_plan",
    /// The partial tail of a finished request is published as if it were full.
    PublishPartial = "publish_partial",
    /// A hit may cover the whole prompt.
    HitWholePrompt = "hit_whole_prompt",
    /// The first chunk after a hit is measured from the start of the prompt.
    BudgetBeforeHit = "budget_before_hit",
    /// A waiting request keeps the hit of its first look.
    StaleHit = "stale_hit",
    /// A failed step counts as computed.
    NoRollbackOnFail = "no_rollback_on_fail",
    /// A failed step publishes its pending keys.
    KeepPendingOnFail = "keep_pending_on_fail",
    /// An abort in flight publishes the pending keys.
    KeepPendingOnAbort = "keep_pending_on_abort",
    /// Who shares a pending block keeps it when it is withdrawn.
    SharerNotReset = "sharer_not_reset",
    /// Blocks released in flight enter the queue at once.
    FreeInFlight = "free_in_flight",
    /// Results of an earlier epoch are applied.
    ApplyStaleResult = "apply_stale_result",
    /// A victim may rank above the taker.
    PreemptEqual = "preempt_equal",
    /// A sequence that finds no victim preempts itself.
    PreemptSelf = "preempt_self",
    /// A step that preempted admits all the same.
    AdmitAfterPreempt = "admit_after_preempt",
    /// Submit does not refuse what can never fit.
    NoNeverFits = "no_never_fits",
    /// The null block counts as usable at submit.
    NullUsable = "null_usable",
    /// A request that is alone and does not fit is left to wait.
    NeverEndsAlone = "never_ends_alone",
    /// Released blocks with published content join the head of the queue.
    HeadOrder = "head_order",
    /// A released table goes first block first.
    ForwardOrder = "forward_order",
    /// Preemption forgets the outputs so far.
    TailLostOnPreempt = "tail_lost_on_preempt",
    /// Stop tokens count before `min_tokens`.
    MinTokensIgnored = "min_tokens_ignored",
    /// A request's priority does not age.
    NoAgeing = "no_ageing",
    /// A late deadline, or none, is ordered behind all others.
    NoLatestDeadline = "no_latest_deadline",
    /// All requests are in one band, so a long cached prefix goes first whenever it comes.
    OnePrefixBand = "one_prefix_band",
    /// A tenant that was away keeps what it saved.
    NoLift = "no_lift",
    /// Work is charged to nobody.
    ChargeNothing = "charge_nothing",
    /// A request that does not fit may be passed for ever.
    PassForEver = "pass_for_ever",
    /// A remembered hit is not read again.
    HitNotFollowed = "hit_not_followed",
    /// The watermark counts as usable at submit.
    WatermarkUsable = "watermark_usable",
    /// A map of the pool tells the last of several tenants that name a block.
    MapKeepsLastTenant = "map_keeps_last_tenant",
    /// A map of the pool shows a parked block as free.
    MapShowsParkedFree = "map_shows_parked_free",
    /// Groups of a shared prefix take the block that a member writes.
    PrefixTooLong = "prefix_too_long",
    /// A shared prefix is looked for among those only who share most.
    PrefixDeepestOnly = "prefix_deepest_only",
    /// Who was taken back since the plan is in a group.
    PrefixOfStale = "prefix_of_stale",
    /// Who would hold more than its quota only until what it shares is confirmed is ended for want of memory.
    PendingOverQuotaEnds = "pending_over_quota_ends",
    /// Submit does not ask for the tenant's quota.
    QuotaNotAsked = "quota_not_asked",
    /// A tenant may hold more than its hard quota.
    QuotaExceeded = "quota_exceeded",
    /// A tenant above its soft quota does not yield.
    SoftQuotaIgnored = "soft_quota_ignored",
    /// The queue is limited by requests only.
    OnlyRequestsLimited = "only_requests_limited",
    /// With `no_evict` only what is known is promised.
    PromiseOnlyKnown = "promise_only_known",
    /// With `no_evict` a growth preempts all the same.
    EvictAnyway = "evict_anyway",
    /// An admission leaves nothing free for growth.
    NothingReserved = "nothing_reserved",
    /// Who was preempted as often as may be comes back like anybody else.
    WornUnsecured = "worn_unsecured",
    /// Who was promised all that it may need is a victim like anybody else.
    SecuredTaken = "secured_taken",
    /// Victims are chosen whatever their class.
    ClassIgnored = "class_ignored",
    /// A waiting request displaces running ones of its own class.
    RoomFromEquals = "room_from_equals",
    /// Deadlines pass without an end.
    NeverExpires = "never_expires",
    /// An abort leaves the seat of the request in the waiting line.
    AbortWaitingLeaks = "abort_waiting_leaks",
    /// A hit takes the block after its last full one too, and writes into it.
    WriteShared = "write_shared",
    /// The first entry of a grown table is missing from the dirty list.
    DirtyMissing = "dirty_missing",
    /// Slots run on from the first block of a chunk.
    ShortSlot = "short_slot",
    /// Prefix statistics count every look of a waiting request.
    RecountQueriesOnRetry = "recount_queries_on_retry",
    /// A preempted request goes behind all that wait.
    PreemptedToTail = "preempted_to_tail",
    /// Promised blocks are given to later requests.
    IgnorePromises = "ignore_promises",
    /// A decode that has filled its block takes one that is promised to another.
    DecodeTakesPromised = "decode_takes_promised",
    /// Decodes begin their blocks all at once where only promised blocks are free.
    PlentyForgetsPromises = "plenty_forgets_promises",
    /// Of decodes that begin their blocks at once only the first is told to the model.
    RunTellsFirst = "run_tells_first",
    /// The name of a block that a decode has filled goes to the block before it.
    NameOfBlockBefore = "name_of_block_before",
    /// A growth that fails half way keeps what it took.
    PartialTake = "partial_take",
    /// The prefix index goes on naming a block whose content was forgotten.
    OrphanEntry = "orphan_entry",
    /// A request that is alone and does not fit is left to wait, and the plan without work in it is returned.
    StallSilently = "stall_silently",
    /// Confirmed rows run one ahead of the tokens.
    CountOneTooMany = "count_one_too_many",
    /// The key of a block does not depend on the blocks before it.
    KeyWithoutParent = "key_without_parent",
    /// A block leaves a window while the next query still sees it.
    FreeInSight = "free_in_sight",
    /// A block that no query sees any more stays with its request.
    WindowNeverFreed = "window_never_freed",
    /// An entry goes on naming the block that left the window.
    EntryKeepsName = "entry_keeps_name",
    /// The plan does not say which entries became null.
    NullNotTold = "null_not_told",
    /// What leaves a window is promised again although others hold it.
    PromiseUnfreed = "promise_unfreed",
    /// A hit does without the first block that the next query sees through a window.
    ShortWindowHit = "short_window_hit",
    /// A hit is as long as the first group accepts.
    FirstGroupDecides = "first_group_decides",
    /// Who is put back keeps what was published, though a window needs more.
    PutBackBlind = "put_back_blind",
    /// Who shared what was withdrawn starts from its first token again.
    PutBackToStart = "put_back_to_start",
    /// All groups name their content alike.
    OneKeyForAllGroups = "one_key_for_all_groups",
    /// Rows of every group go to the blocks of the first.
    SlotsOfFirstGroup = "slots_of_first_group",
    /// The need of a request counts its first group only.
    NeedOfOneGroup = "need_of_one_group",
    /// A request that waits for a prefix in flight is admitted cold.
    NoPrefixWait = "no_prefix_wait",
    /// No event tells that a key lost its last block.
    EventRemovalForgotten = "event_removal_forgotten",
    /// Events tell of blocks, not of keys: a key with two blocks is told twice and removed when the first goes.
    EventPerBlock = "event_per_block",
    /// An event tells a key that is pending.
    EventPending = "event_pending",
    /// An event names the block itself as its parent.
    EventWrongParent = "event_wrong_parent",
    /// An event brings the tokens that were in its place of the ring before.
    EventOldTokens = "event_old_tokens",
    /// A number is left out when a key is removed.
    EventNumberSkipped = "event_number_skipped",
    /// A reader that fell behind is not told.
    EventGapSilent = "event_gap_silent",
    /// A reset tells that everything is gone although content that is held stays.
    EventClearsHeld = "event_clears_held",
    /// The bytes announce one event more than follow.
    EventCountWrong = "event_count_wrong",
    /// A snapshot leaves the last block out.
    SnapshotForgetsOne = "snapshot_forgets_one",
    /// Blocks are published whose rows were not appended yet.
    PublishUnwritten = "publish_unwritten",
    /// Blocks are published under the keys of other tokens than before.
    PublishOtherTokens = "publish_other_tokens",
    /// A released table goes on living, without blocks.
    ReleaseKeepsSeat = "release_keeps_seat",
    /// The tables of a pool that was reset go on living, without blocks.
    ResetKeepsTables = "reset_keeps_tables",
    /// The table of another pool is taken for one of this pool's own.
    ForeignTableTaken = "foreign_table_taken",
    /// A release of single blocks drops the holders of tables.
    LooseDropsOthers = "loose_drops_others",
    /// A table forgets whose prompt it was made for: what follows is published for everybody.
    ChainForgotten = "chain_forgotten",
    /// The border takes a negative count for 0.
    ClampNegative = "clamp_negative",
    /// A fork counts no holder for its last block.
    ForkMissesLast = "fork_misses_last",
    /// A table that is cut at a block's end keeps one block more.
    TruncateKeepsBlock = "truncate_keeps_block",
    /// Shared and published blocks are written in place.
    WriteInPlace = "write_in_place",
    /// A block that was copied keeps the holder that wrote elsewhere.
    CopyKeepsHolder = "copy_keeps_holder",
    /// A hit leaves a parked block in its list.
    HitStaysParked = "hit_stays_parked",
    /// A partial hit looks at one block of its mark.
    PartialFirstOnly = "partial_first_only",
    /// A partial hit copies one row more than agrees.
    PartialRowTooMany = "partial_row_too_many",
    /// A block that was handed out is still found by the head of its content.
    PartialKeepsForgotten = "partial_keeps_forgotten",
    /// A partial hit is found by its tokens alone, whosever they are.
    PartialOfAnybody = "partial_of_anybody",
    /// The source of a partial hit may be handed out in the step that copies it.
    PartialWithoutLease = "partial_without_lease",
    /// A growth counts one block fewer than it takes.
    AskForgetsBlock = "ask_forgets_block",
    /// An admission does not ask for its first hit.
    AskForgetsHit = "ask_forgets_hit",
    /// Who lost what it shared computes it without a second look.
    SharerLooksOnce = "sharer_looks_once",
    /// Rows are copied as far as the first group has them, in that group alone.
    PartialOfFirstGroup = "partial_of_first_group",
    /// A part is looked for only behind the full blocks that serve without it.
    PartialBehindFullOnly = "partial_behind_full_only",
    /// Keys do not depend on a block's last token, and tokens are compared in the first group alone.
    TokensOfFirstGroup = "tokens_of_first_group",
    /// Keys do not depend on a block's last token, and nobody compares tokens.
    TokensNotCompared = "tokens_not_compared",
    /// Keys do not depend on a block's last token.
    KeyWithoutLastToken = "key_without_last_token",
    /// A forked sequence writes into the block that it shares.
    WriteForked = "write_forked",
    /// A copy brings one row less.
    CopyRowShort = "copy_row_short",
    /// The source of a copy may be handed out at once.
    CopyWithoutLease = "copy_without_lease",
    /// Rows that a failed step was to copy count as copied.
    FailedCopyCounts = "failed_copy_counts",
    /// A fork takes over what the step in flight has not confirmed yet.
    ForkUnconfirmed = "fork_unconfirmed",
    /// What the step in flight brings for a truncated request counts.
    TruncateKeepsEpoch = "truncate_keeps_epoch",
    /// A published block that is written over takes none of the cached blocks behind it along.
    OutlivesParent = "outlives_parent",
    /// Content that is forgotten keeps what it was worth.
    ForgottenKeepsWorth = "forgotten_keeps_worth",
    /// A take counts all blocks that are free.
    TakeCountsFree = "take_counts_free",
    /// A guard that goes keeps its block.
    GuardKeepsBlock = "guard_keeps_block",
    /// Fields of a key have no tag.
    FieldWithoutTag = "field_without_tag",
    /// Fields of a key have no length.
    FieldWithoutLength = "field_without_length",
    /// Keys do not depend on the domain in which their chain starts.
    DomainForgotten = "domain_forgotten",
    /// Behind a public range keys do not depend on the tenant.
    TenantAfterPublicForgotten = "tenant_after_public_forgotten",
    /// Keys do not depend on the adapter.
    AdapterForgotten = "adapter_forgotten",
    /// Keys do not depend on which load of the adapter it is.
    AdapterLoadForgotten = "adapter_load_forgotten",
    /// Keys do not depend on salts.
    SaltForgotten = "salt_forgotten",
    /// A salt enters the first block of a chain only.
    SaltInFirstBlockOnly = "salt_in_first_block_only",
    /// Keys do not depend on media.
    MediaForgotten = "media_forgotten",
    /// Keys do not depend on where in a block a media item begins.
    MediaWithoutOffset = "media_without_offset",
    /// Keys do not depend on the version of the weights.
    WeightsForgotten = "weights_forgotten",
    /// Blocks of outputs, and of a recompute, get keys without the fields of their chain.
    OutputsWithoutChain = "outputs_without_chain",
    /// When the weights change, who waits keeps the keys of the old ones.
    WaitingKeepsOldKeys = "waiting_keeps_old_keys",
    /// When the weights change, who runs goes on to publish rows of both versions.
    MixedRowsPublished = "mixed_rows_published",
    /// A miss tells a request that another domain has its content.
    MissTellsOtherDomain = "miss_tells_other_domain",
    /// What was published is not remembered, so every miss was never seen.
    MissForgetsPublished = "miss_forgets_published",
    /// A preempted request is counted again with the reason of its next admission.
    MissCountedAgain = "miss_counted_again",
    /// vLLM's keys have the salt in every block.
    VllmSaltInEveryBlock = "vllm_salt_in_every_block",
    /// A pin may hold more than the budget.
    PinOverBudget = "pin_over_budget",
    /// A pin of a prompt that was hashed before the weights changed looks for their rows.
    PinKeepsOldKeys = "pin_keeps_old_keys",
    /// A hit of a block that waits for the end of a step counts as a free block less.
    ParkedHitTakesFree = "parked_hit_takes_free",
    /// A pin that is given back keeps its blocks.
    UnpinKeepsHolder = "unpin_keeps_holder",
    /// A block is worth what was last asked for it, not the most.
    LastAskerDecides = "last_asker_decides",
    /// A hit does not start a block's time anew.
    HitRefreshesNothing = "hit_refreshes_nothing",
    /// A block whose time is over stays where it is.
    NothingExpires = "nothing_expires",
    /// A range counts only for the blocks that it touches, not for those before them.
    RangeLiftsItsOwnOnly = "range_lifts_its_own_only",
    /// A prompt that was preempted looks nothing up.
    PreemptedLooksNothingUp = "preempted_looks_nothing_up",
    /// Content that is published stays behind content of its key that is pending.
    PublishedStaysBehind = "published_stays_behind",
    /// A reserve counts no block for the copy that the next row needs.
    ReserveForgetsCopy = "reserve_forgets_copy",
    /// Of a hit over the blocks of several writers, the front may be worth less than the rest.
    FrontWorthLess = "front_worth_less",
    /// New content is worth what the block's old content was.
    OldWorthStays = "old_worth_stays",
    /// Of blocks whose time is over at once the first of the chain goes first.
    ShallowFirst = "shallow_first",
    /// The row of a request depends on how often the thread was asked before, which nobody records.
    UnrecordedDecision = "unrecorded_decision",
    /// Aborts are not recorded.
    RecorderForgetsAbort = "recorder_forgets_abort",
    /// A number of a recording may have needless bytes.
    RecordingNumberTooLong = "recording_number_too_long",
    /// The checksums of a recording are not looked at.
    ChecksumIgnored = "checksum_ignored",
    /// A full timeline goes on growing.
    TimelineGrows = "timeline_grows",
    /// What happened to a request that ended is not kept.
    EndForgetsTimeline = "end_forgets_timeline",
    /// Nobody notes why a request waits.
    WaitNotNoted = "wait_not_noted",
    /// Content is evicted owner by owner, whatever their shares.
    SharesIgnored = "shares_ignored",
    /// Content that was forgotten still counts for its owner.
    ShareCountsForgotten = "share_counts_forgotten",
    /// An admission that is refused half way keeps its promise.
    RefusedKeepsPromise = "refused_keeps_promise",
}

#[cfg(feature = "mutants")]
thread_local! {
    static CHOSEN: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// Whether a lone request that does not fit is left to wait.
#[must_use]
pub(crate) fn leaves_lone_requests() -> bool {
    is_on(Mutant::NeverEndsAlone) || is_on(Mutant::StallSilently)
}

/// Another number each time.
#[cfg(feature = "mutants")]
pub(crate) fn unrecorded() -> u64 {
    thread_local!(static ASKED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    ASKED.with(|asked| {
        asked.set(asked.get() + 1);
        asked.get().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40
    })
}

/// Never asked, in this build.
#[cfg(not(feature = "mutants"))]
pub(crate) const fn unrecorded() -> u64 {
    0
}

/// Whether this thread runs with fault `which`.
#[cfg(feature = "mutants")]
#[must_use]
pub fn is_on(which: Mutant) -> bool {
    CHOSEN.with(|chosen| chosen.get() == Some(which))
}

/// Whether this thread runs with fault `which`: never, in this build.
#[cfg(not(feature = "mutants"))]
#[must_use]
#[inline(always)]
pub const fn is_on(_which: Mutant) -> bool {
    false
}

/// Whether this thread runs with a fault that is none of these.
#[cfg(feature = "mutants")]
pub(crate) fn is_any_but(these: &[Mutant]) -> bool {
    CHOSEN.with(|chosen| chosen.get().is_some_and(|fault| !these.contains(&fault)))
}

/// Chooses the fault of this thread by name, or none. False if there is no such fault in this build.
#[cfg(feature = "mutants")]
#[must_use]
pub fn choose(name: Option<&str>) -> bool {
    let found = name.map(|name| Mutant::ALL.iter().copied().find(|mutant| mutant.name() == name));
    match found {
        Some(None) => false,
        Some(Some(mutant)) => {
            CHOSEN.with(|chosen| chosen.set(Some(mutant)));
            true
        }
        None => {
            CHOSEN.with(|chosen| chosen.set(None));
            true
        }
    }
}

/// Chooses the fault of this thread by name, or none. This build has no faults.
#[cfg(not(feature = "mutants"))]
#[must_use]
pub fn choose(name: Option<&str>) -> bool {
    name.is_none()
}

/// The faults of this build.
#[must_use]
pub const fn available() -> &'static [Mutant] {
    if cfg!(feature = "mutants") { Mutant::ALL } else { &[] }
}

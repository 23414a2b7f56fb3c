//! Every planted fault is caught by the check that is there for it.
//!
//! Before: a table of rows: fault, names under which it may be found, and a check. After: each check passes without its fault and
//! fails with it, under one of those names. A1 to A8 are names of the audit; the others are those of the driver and of the pool's
//! model. A fault that is missing from the table, or a check of the audit that no fault ever fails, is a failure too.

#![cfg(feature = "mutants")]

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use blocktable_core::Recorded;
use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_ref::SharedPool;
use blocktable_core::block_table::BlockTable;
use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::{Key, RequestId};
use blocktable_core::mutant::{self, Mutant};
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::recording::{Recording, mend};
use blocktable_core::replay::replay;
use blocktable_core::request::{End, Limits};

use crate::broken::{self, Checked, broken, ensure};
use crate::draft_checks;
use crate::driver::{self, Driver};
use crate::key_checks;
use crate::limits_of_the_queue;
use crate::overlap::World;
use crate::overlap_script::{drafting_scripts, scripts};
use crate::parts;
use crate::policy_checks;
use crate::pool_script::pool_scripts;
use crate::refused;
use crate::retained;
use crate::retention_script;
use crate::schedule_corners::{at_quotas_beside_writers, corners, refusing_schedules};
use crate::schedule_script::schedules;
use crate::seed;
use crate::sequence_script::sequence_scripts;
use crate::shared_prompt;
use crate::shares_script::shares_scripts;
use crate::sibling_checks;

/// A fault, the names under which its check may find it, and the check.
struct Row {
    fault: Mutant,
    found_by: &'static [&'static str],
    check: fn() -> Checked,
}

/// One test for each row, named like the fault, and the table of all rows.
macro_rules! rows {
    ($($name:ident: $fault:ident, $found_by:expr, $check:expr;)*) => {
        const ROWS: &[Row] = &[$(Row { fault: Mutant::$fault, found_by: &$found_by, check: $check },)*];

        mod fault {
            $(
                #[test]
                fn $name() {
                    let row = super::ROWS.iter().find(|row| row.fault.name() == stringify!($name));
                    super::demand_found(row.expect("a row of this name"));
                }
            )*
        }
    };
}

rows! {
    leases_end_together: LeasesEndTogether, ["A2"], a_request_leaves_two_steps_in_flight;
    rows_of_no_step_wasted: RowsOfNoStepWasted, ["wasted"], a_plan_runs_nothing_while_the_last_token_is_on_its_way;
    wasted_token_shown: WastedTokenShown, ["ends"], a_stop_comes_while_the_next_step_runs;
    key_before_token: KeyBeforeToken, ["A7"], a_block_fills_up_in_a_step_that_was_planned_ahead;
    fail_leaves_next: FailLeavesNext, ["exact"], a_step_fails_under_the_next_one;
    siblings_outlive: SiblingsOutlive, ["books"], sibling_checks::a_request_is_ended_as_one;
    fork_outlives_family: ForkOutlivesFamily, ["siblings"], sibling_checks::a_fork_ends_with_its_request;
    spare_rows_lost: SpareRowsLost, ["A6"], sibling_checks::a_request_is_ended_as_one;
    siblings_of_other_row: SiblingsOfOtherRow, ["samples"], sibling_checks::the_prompt_is_computed_once_and_shared;
    debt_paid_over_quota: DebtPaidOverQuota, ["A2"], limits_of_the_queue::without_eviction_a_debt_waits_for_its_quota;
    copy_of_last_promised: CopyOfLastPromised, ["no_evict"], limits_of_the_queue::without_eviction_a_fork_makes_nobody_wait;
    tenant_victim_in_vain: TenantVictimInVain, ["rank"], limits_of_the_queue::a_quota_takes_nothing_in_vain;
    fork_shares_unseen: ForkSharesUnseen, ["siblings"], sibling_checks::without_eviction_others_begin_behind_a_window;
    siblings_unpromised: SiblingsUnpromised, ["submit"], sibling_checks::without_eviction_every_sequence_has_its_blocks;
    room_ends_highest: RoomEndsHighest, ["capacity"], limits_of_the_queue::who_goes_first_waits_while_room_is_kept;
    capacity_tells_pool: CapacityTellsPool, ["numbers"], limits_of_the_queue::a_tenant_never_holds_more_than_its_hard_quota;
    refused_reads_waiting: RefusedReadsWaiting, ["reason"], a_refused_request_runs_in_the_next_plan;
    kept_reads_in_flight: KeptReadsInFlight, ["numbers"], limits_of_the_queue::what_is_kept_for_growth_is_told;
    room_reads_no_budget: RoomReadsNoBudget, ["numbers"], limits_of_the_queue::who_waits_behind_a_room_is_told_why;
    row_for_one_only: RowForOneOnly, ["siblings"], sibling_checks::a_row_is_kept_for_each;
    rejected_draft_published: RejectedDraftPublished, ["A7"], draft_checks::only_what_was_right_is_found_again;
    rollback_keeps_one: RollbackKeepsOne, ["A7"], draft_checks::every_drafter_brings_the_same_text;
    stop_inside_run_missed: StopInsideRunMissed, ["epoch"], draft_checks::a_run_ends_at_the_first_stop_or_limit;
    draft_not_compared: DraftNotCompared, ["epoch", "exact"], draft_checks::every_drafter_brings_the_same_text;
    drafts_preempt: DraftsPreempt, ["shape"], draft_checks::drafts_preempt_nobody;
    lookahead_not_awaited: LookaheadNotAwaited, ["victim"], draft_checks::growth_waits_for_the_blocks_of_drafts;
    parked_not_awaited: ParkedNotAwaited, ["victims"], one_block_is_missing_while_a_step_runs;
    lookahead_kept: LookaheadKept, ["lookahead"], draft_checks::blocks_of_drafts_go_back;
    drafts_past_limit: DraftsPastLimit, ["limit"], draft_checks::no_draft_runs_past_the_limit;
    leak_block_on_finish: LeakBlockOnFinish, ["A2"], one_request_runs_to_its_end;
    lost_block: LostBlock, ["A1"], one_request_runs_to_its_end;
    double_free: DoubleFree, ["A2"], random_pool_scripts;
    one_way_link: OneWayLink, ["A3"], a_prompt_comes_again;
    grow_from_zero: GrowFromZero, ["memory"], one_request_runs_to_its_end;
    blocked_keeps_hits: BlockedKeepsHits, ["A6"], a_hit_is_gone_before_it_is_used;
    unpublished_to_tail: UnpublishedToTail, ["model"], random_pool_scripts;
    preempt_two: PreemptTwo, ["victims"], a_long_victim_makes_room_for_a_short_one_that_waits;
    no_budget_for_decodes: NoBudgetForDecodes, ["decode"], a_prefill_runs_before_decodes;
    skip_ref_on_hit: SkipRefOnHit, ["A2"], a_prompt_comes_again;
    free_queue_skips_one: FreeQueueSkipsOne, ["model"], random_pool_scripts;
    hit_keeps_in_queue: HitKeepsInQueue, ["A1"], a_prompt_comes_again;
    keep_key_on_reuse: KeepKeyOnReuse, ["A5"], cached_blocks_are_handed_out_again;
    publish_at_plan: PublishAtPlan, ["A5"], one_request_runs_to_its_end;
    publish_partial: PublishPartial, ["A5", "A7"], a_prompt_runs_in_chunks;
    hit_whole_prompt: HitWholePrompt, ["A7"], a_prompt_comes_again;
    budget_before_hit: BudgetBeforeHit, ["budget"], a_hit_leaves_the_budget_alone;
    stale_hit: StaleHit, ["A7", "hit", "sight"], a_hit_is_gone_before_it_is_used;
    no_rollback_on_fail: NoRollbackOnFail, ["start"], a_step_fails;
    keep_pending_on_fail: KeepPendingOnFail, ["sight", "A5"], a_step_fails;
    keep_pending_on_abort: KeepPendingOnAbort, ["A5"], a_writer_leaves_in_flight;
    sharer_not_reset: SharerNotReset, ["A7"], a_writer_leaves_in_flight;
    free_in_flight: FreeInFlight, ["A2"], a_writer_leaves_in_flight;
    apply_stale_result: ApplyStaleResult, ["A7", "epoch"], a_writer_leaves_in_flight;
    preempt_equal: PreemptEqual, ["rank", "reason", "shape", "panic"], memory_runs_short;
    preempt_self: PreemptSelf, ["rank"], nobody_ranks_below;
    admit_after_preempt: AdmitAfterPreempt, ["admission"], a_long_victim_makes_room_for_a_short_one_that_waits;
    no_never_fits: NoNeverFits, ["submit"], what_can_never_fit_is_submitted;
    null_usable: NullUsable, ["submit"], what_can_never_fit_is_submitted;
    never_ends_alone: NeverEndsAlone, ["A8"], a_lone_request_outgrows_the_pool;
    head_order: HeadOrder, ["model"], random_pool_scripts;
    forward_order: ForwardOrder, ["model"], random_pool_scripts;
    tail_lost_on_preempt: TailLostOnPreempt, ["samples", "tokens", "shape"], memory_runs_short;
    min_tokens_ignored: MinTokensIgnored, ["ends"], a_stop_token_comes_before_min_tokens;
    abort_waiting_leaks: AbortWaitingLeaks, ["A6"], a_waiting_request_is_aborted;
    write_shared: WriteShared, ["A5"], a_prompt_comes_again_while_it_runs;
    dirty_missing: DirtyMissing, ["tables"], one_request_runs_to_its_end;
    short_slot: ShortSlot, ["slots"], cached_blocks_are_handed_out_again;
    recount_queries_on_retry: RecountQueriesOnRetry, ["counters"], a_waiting_request_is_aborted;
    watermark_usable: WatermarkUsable, ["submit"], limits_of_the_queue::what_the_watermark_leaves_no_room_for_is_refused;
    pending_over_quota_ends: PendingOverQuotaEnds, ["capacity"], limits_of_the_queue::who_shares_what_is_being_written_waits_for_its_quota;
    quota_not_asked: QuotaNotAsked, ["submit"], limits_of_the_queue::what_no_quota_can_hold_is_refused;
    quota_exceeded: QuotaExceeded, ["A2"], limits_of_the_queue::a_tenant_never_holds_more_than_its_hard_quota;
    soft_quota_ignored: SoftQuotaIgnored, ["yield"], limits_of_the_queue::a_tenant_above_its_soft_quota_yields;
    only_requests_limited: OnlyRequestsLimited, ["submit"], limits_of_the_queue::a_queue_is_full_by_tokens_and_blocks_too;
    promise_only_known: PromiseOnlyKnown, ["no_evict"], limits_of_the_queue::without_eviction_nobody_waits_for_another;
    evict_anyway: EvictAnyway, ["no_evict", "fork"], limits_of_the_queue::without_eviction_a_fork_that_went_back_waits;
    nothing_reserved: NothingReserved, ["thrash"], limits_of_the_queue::what_grows_is_left_room;
    class_ignored: ClassIgnored, ["victim"], limits_of_the_queue::the_lowest_class_is_preempted_first;
    worn_unsecured: WornUnsecured, ["preemptions"], limits_of_the_queue::nobody_is_preempted_more_often_than_may_be;
    secured_taken: SecuredTaken, ["preemptions"], limits_of_the_queue::nobody_is_preempted_more_often_than_may_be;
    room_from_equals: RoomFromEquals, ["rank"], limits_of_the_queue::only_a_higher_class_displaces;
    lane_out_of_order: LaneOutOfOrder, ["A6"], policy_checks::a_low_priority_waits_behind_high_ones;
    no_ageing: NoAgeing, ["order"], policy_checks::a_low_priority_waits_behind_high_ones;
    no_latest_deadline: NoLatestDeadline, ["order"], policy_checks::no_deadline_waits_behind_early_ones;
    one_prefix_band: OnePrefixBand, ["order"], policy_checks::a_cold_prompt_waits_behind_cached_ones;
    charge_nothing: ChargeNothing, ["starvation"], policy_checks::a_tenant_waits_behind_another_that_floods;
    pass_for_ever: PassForEver, ["order"], policy_checks::a_large_request_waits_behind_small_ones;
    no_lift: NoLift, ["share"], policy_checks::a_tenant_comes_back_with_a_flood;
    hit_not_followed: HitNotFollowed, ["order"], policy_checks::a_waiting_prompt_becomes_cached;
    never_expires: NeverExpires, ["books"], policy_checks::deadlines_pass;
    preempted_to_tail: PreemptedToTail, ["A6"], memory_runs_short;
    ignore_promises: IgnorePromises, ["A1"], two_long_prompts_run_in_chunks;
    decode_takes_promised: DecodeTakesPromised, ["A1"], a_decode_fills_its_block_beside_a_prompt_in_chunks;
    plenty_forgets_promises: PlentyForgetsPromises, ["A1"], decodes_begin_blocks_beside_a_prompt_that_was_promised_the_rest;
    run_tells_first: RunTellsFirst, ["tables"], decodes_begin_blocks_at_once;
    name_of_block_before: NameOfBlockBefore, ["A5"], decodes_begin_blocks_at_once;
    partial_take: PartialTake, ["model"], random_pool_scripts;
    orphan_entry: OrphanEntry, ["A4"], cached_blocks_are_handed_out_again;
    stall_silently: StallSilently, ["A8"], a_lone_request_outgrows_the_pool;
    count_one_too_many: CountOneTooMany, ["A7"], one_request_runs_to_its_end;
    key_without_parent: KeyWithoutParent, ["sight"], equal_blocks_follow_different_ones;
    free_in_sight: FreeInSight, ["A7"], a_window_slides_over_a_long_request;
    window_never_freed: WindowNeverFreed, ["memory"], a_window_slides_over_a_long_request;
    entry_keeps_name: EntryKeepsName, ["A2"], a_window_slides_over_a_long_request;
    null_not_told: NullNotTold, ["memory"], a_window_slides_over_a_long_request;
    promise_unfreed: PromiseUnfreed, ["A1"], what_leaves_a_window_stays_with_another;
    short_window_hit: ShortWindowHit, ["A7", "tables"], a_window_finds_its_prefix_again;
    first_group_decides: FirstGroupDecides, ["A7"], a_window_finds_its_prefix_again;
    put_back_blind: PutBackBlind, ["A7"], a_sharer_loses_what_its_window_needs;
    put_back_to_start: PutBackToStart, ["counters", "reuse", "start"], a_writer_fails_behind_published_blocks;
    one_key_for_all_groups: OneKeyForAllGroups, ["sight"], a_window_finds_its_prefix_again;
    slots_of_first_group: SlotsOfFirstGroup, ["slots"], a_window_slides_over_a_long_request;
    need_of_one_group: NeedOfOneGroup, ["submit"], what_can_never_fit_two_groups_is_submitted;
    no_prefix_wait: NoPrefixWait, ["wait"], equal_cold_prompts_come_together;
    event_removal_forgotten: EventRemovalForgotten, ["mirror"], cached_blocks_are_handed_out_again;
    event_per_block: EventPerBlock, ["mirror"], random_pool_scripts;
    event_pending: EventPending, ["mirror"], one_request_runs_to_its_end;
    event_wrong_parent: EventWrongParent, ["content"], one_request_runs_to_its_end;
    event_old_tokens: EventOldTokens, ["content"], one_request_runs_to_its_end;
    event_number_skipped: EventNumberSkipped, ["mirror", "numbers"], cached_blocks_are_handed_out_again;
    event_gap_silent: EventGapSilent, ["numbers"], more_happens_in_a_step_than_the_ring_holds;
    event_clears_held: EventClearsHeld, ["mirror"], a_reset_meets_a_request_that_runs;
    event_count_wrong: EventCountWrong, ["bytes"], one_request_runs_to_its_end;
    last_asker_decides: LastAskerDecides, ["order", "I58"], random_retention_scripts;
    hit_refreshes_nothing: HitRefreshesNothing, ["order", "I58"], random_retention_scripts;
    nothing_expires: NothingExpires, ["order", "I58"], random_retention_scripts;
    range_lifts_its_own_only: RangeLiftsItsOwnOnly, ["order", "I58"], random_retention_scripts;
    preempted_looks_nothing_up: PreemptedLooksNothingUp, ["hit"], the_first_of_eight_is_displaced;
    published_stays_behind: PublishedStaysBehind, ["A4"], the_later_of_two_writers_is_done_first;
    reserve_forgets_copy: ReserveForgetsCopy, ["reserve", "append", "blocks", "queue"], random_sequence_scripts;
    front_worth_less: FrontWorthLess, ["I58"], retained::all;
    old_worth_stays: OldWorthStays, ["order", "I58"], random_retention_scripts;
    shallow_first: ShallowFirst, ["order", "I58"], random_retention_scripts;
    pin_over_budget: PinOverBudget, ["pin"], a_pin_is_over_the_budget;
    pin_keeps_old_keys: PinKeepsOldKeys, ["pin"], a_prompt_of_old_weights_is_pinned;
    parked_hit_takes_free: ParkedHitTakesFree, ["pin"], a_parked_prefix_is_pinned;
    unpin_keeps_holder: UnpinKeepsHolder, ["A2"], a_pin_is_given_back;
    snapshot_forgets_one: SnapshotForgetsOne, ["snapshot"], the_last_block_is_published;
    publish_unwritten: PublishUnwritten, ["publish"], random_sequence_scripts;
    publish_other_tokens: PublishOtherTokens, ["publish"], random_sequence_scripts;
    release_keeps_seat: ReleaseKeepsSeat, ["release of the released"], random_sequence_scripts;
    reset_keeps_tables: ResetKeepsTables, ["use after reset"], random_sequence_scripts;
    foreign_table_taken: ForeignTableTaken, ["foreign"], random_sequence_scripts;
    loose_drops_others: LooseDropsOthers, ["release_blocks", "A2"], random_sequence_scripts;
    fork_misses_last: ForkMissesLast, ["A2"], random_pool_scripts;
    truncate_keeps_block: TruncateKeepsBlock, ["model", "A2"], random_pool_scripts;
    write_in_place: WriteInPlace, ["model"], random_pool_scripts;
    copy_keeps_holder: CopyKeepsHolder, ["A2"], random_pool_scripts;
    hit_takes_neighbours: HitTakesNeighbours, ["A2"], blocks_that_stand_apart_are_hit;
    hit_stays_parked: HitStaysParked, ["A1", "A3"], random_pool_scripts;
    guard_keeps_block: GuardKeepsBlock, ["A2"], a_guard_goes;
    field_without_tag: FieldWithoutTag, ["encoding"], key_checks::blocks_are_read_as_they_were_written;
    field_without_length: FieldWithoutLength, ["encoding"], key_checks::roots_are_read_as_they_were_written;
    domain_forgotten: DomainForgotten, ["exact", "sight"], key_checks::tenants_share_what_is_public_and_nothing_else;
    tenant_after_public_forgotten: TenantAfterPublicForgotten, ["exact", "sight"], key_checks::answers_belong_to_who_asked;
    adapter_forgotten: AdapterForgotten, ["exact", "sight"], key_checks::adapters_are_apart;
    adapter_load_forgotten: AdapterLoadForgotten, ["exact", "sight"], key_checks::adapters_are_apart;
    salt_forgotten: SaltForgotten, ["exact", "sight"], key_checks::a_salt_narrows_and_never_widens;
    salt_in_first_block_only: SaltInFirstBlockOnly, ["exact", "sight"], key_checks::a_salt_narrows_and_never_widens;
    media_forgotten: MediaForgotten, ["exact", "sight"], key_checks::media_are_apart_from_where_they_begin;
    media_without_offset: MediaWithoutOffset, ["exact", "sight"], key_checks::media_are_apart_from_where_they_begin;
    weights_forgotten: WeightsForgotten, ["keys"], key_checks::every_constant_of_a_chain_enters_its_keys;
    vllm_salt_in_every_block: VllmSaltInEveryBlock, ["vllm"], key_checks::vllms_fields_stand_where_vllm_has_them;
    miss_tells_other_domain: MissTellsOtherDomain, ["miss"], key_checks::every_miss_has_its_reason;
    miss_forgets_published: MissForgetsPublished, ["miss"], key_checks::every_miss_has_its_reason;
    miss_counted_again: MissCountedAgain, ["miss"], key_checks::every_admitted_request_counts_once;
    waiting_keeps_old_keys: WaitingKeepsOldKeys, ["weights"], key_checks::other_weights_find_nothing_of_the_old_ones;
    mixed_rows_published: MixedRowsPublished, ["weights"], key_checks::other_weights_find_nothing_of_the_old_ones;
    outputs_without_chain: OutputsWithoutChain, ["content"], key_checks::answers_belong_to_who_asked;
    partial_first_only: PartialFirstOnly, ["partial"], prompts_branch_inside_blocks;
    partial_row_too_many: PartialRowTooMany, ["sight", "partial"], prompts_branch_inside_blocks;
    partial_keeps_forgotten: PartialKeepsForgotten, ["A4"], partial_blocks_are_handed_out_again;
    partial_of_anybody: PartialOfAnybody, ["exact", "sight", "shared"], key_checks::tenants_copy_no_row_of_private_blocks;
    partial_without_lease: PartialWithoutLease, ["A2", "sight"], a_partial_source_is_the_next_to_go;
    tokens_not_compared: TokensNotCompared, ["exact", "sight"], prompts_differ_in_a_last_token;
    tokens_of_first_group: TokensOfFirstGroup, ["exact", "sight"], prompts_differ_in_the_second_group_alone;
    partial_of_first_group: PartialOfFirstGroup, ["hit"], prompts_part_in_several_groups;
    partial_behind_full_only: PartialBehindFullOnly, ["partial"], prompts_part_in_several_groups;
    key_without_last_token: KeyWithoutLastToken, ["forged", "hit"], prompts_differ_in_a_last_token;
    write_forked: WriteForked, ["A5"], a_request_is_forked;
    copy_row_short: CopyRowShort, ["sight"], a_request_is_forked;
    copy_without_lease: CopyWithoutLease, ["A2"], a_request_goes_back_into_a_published_block;
    failed_copy_counts: FailedCopyCounts, ["start"], a_step_that_copies_fails;
    fork_unconfirmed: ForkUnconfirmed, ["A7", "start"], a_sharer_is_forked_in_flight;
    unrecorded_decision: UnrecordedDecision, ["replay"], a_schedule_is_replayed;
    recorder_forgets_abort: RecorderForgetsAbort, ["replay"], a_schedule_is_replayed;
    checksum_ignored: ChecksumIgnored, ["checksum"], a_changed_recording_is_refused;
    recording_number_too_long: RecordingNumberTooLong, ["format"], a_number_is_written_in_one_way;
    wait_not_noted: WaitNotNoted, ["reason"], nobody_ranks_below;
    end_forgets_timeline: EndForgetsTimeline, ["timeline"], one_request_runs_to_its_end;
    timeline_grows: TimelineGrows, ["timeline"], a_request_is_put_off_forty_times;
    shares_ignored: SharesIgnored, ["model"], random_shares_scripts;
    share_counts_forgotten: ShareCountsForgotten, ["A4"], random_shares_scripts;
    sharer_looks_once: SharerLooksOnce, ["twice"], a_writer_fails_before_anything_is_published;
    ask_forgets_block: AskForgetsBlock, ["panic"], one_request_runs_to_its_end;
    ask_forgets_hit: AskForgetsHit, ["panic"], a_prompt_comes_again;
    refused_keeps_promise: RefusedKeepsPromise, ["transaction"], || refused::an_admission_is_refused().map(drop);
    truncate_keeps_epoch: TruncateKeepsEpoch, ["epoch", "A5", "A7"], a_request_goes_back_in_flight;
}

/// Faults that nothing here can see, and what sees them.
const CAUGHT_ELSEWHERE: &[(Mutant, &str)] = &[
    (Mutant::ClampNegative, "tests/border/test_pool.py"),
    (Mutant::ChainForgotten, "tests/border/test_pool.py"),
    (Mutant::MapKeepsLastTenant, "tests/border/test_block_map.py"),
    (Mutant::MapShowsParkedFree, "tests/border/test_block_map.py"),
    (Mutant::PrefixTooLong, "tests/border/test_prefix_groups.py"),
    (Mutant::PrefixDeepestOnly, "tests/border/test_prefix_groups.py"),
    (Mutant::PrefixOfStale, "tests/border/test_prefix_groups.py"),
    (Mutant::StackForgetsVersion, RACES),
    (Mutant::StackIgnoresOthers, RACES),
    (Mutant::LinksForgetVersion, "tests/lock_freedom.rs"),
    (Mutant::LanesIgnoreOthers, RACES),
    (Mutant::UnnameWithoutCompare, RACES),
    (Mutant::HelpersNeverStop, RACES),
    (Mutant::HitTrustsFirstLook, RACES),
    (Mutant::TakeKeepsName, RACES),
    (Mutant::CountWithoutCompare, RACES),
    (Mutant::DropWithoutCompare, RACES),
    (Mutant::PermitsWithoutCompare, RACES),
    (Mutant::PermitsFirst, RACES),
    (Mutant::WaitForOthers, "tests/lock_freedom.rs"),
    (Mutant::OutlivesParent, "tests/truncate.rs"),
    (Mutant::ForgottenKeepsWorth, "src/block_pool/tests.rs"),
    (Mutant::TakeCountsFree, "tests/queue_steps.rs"),
];

const RACES: &str = "tests/loom_queue.rs";

#[test]
fn every_planted_fault_is_in_the_table() {
    let here = ROWS.iter().map(|row| row.fault.name());
    let names: Vec<&str> = here.chain(CAUGHT_ELSEWHERE.iter().map(|(fault, _)| fault.name())).collect();
    let distinct: HashSet<&str> = names.iter().copied().collect();
    assert_eq!(distinct.len(), names.len(), "a fault stands in the table twice");
    assert_eq!(mutant::available().len(), Mutant::ALL.len());
    for fault in Mutant::ALL {
        assert!(distinct.contains(fault.name()), "no check is there for {}", fault.name());
    }
}

#[test]
fn every_check_of_the_audit_has_a_planted_fault() {
    for check in ["A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8"] {
        assert!(ROWS.iter().any(|row| row.found_by == [check]), "no fault is there that only {check} may find");
    }
}

#[test]
fn random_schedules_alone_find_most_faults() {
    // Orders and refusals that only a user of the pool can see; a list that is released twice must be shared whole; and choices
    // that are wrong but break nothing.
    let orders = ["free_queue_skips_one", "head_order", "forward_order", "unpublished_to_tail", "partial_take"];
    let sequences = [
        "reserve_forgets_copy",
        "publish_unwritten",
        "publish_other_tokens",
        "release_keeps_seat",
        "reset_keeps_tables",
        "foreign_table_taken",
        "loose_drops_others",
        "clamp_negative",
        "chain_forgotten",
        "map_keeps_last_tenant",
        "map_shows_parked_free",
    ];
    let rare = [
        "double_free",
        "no_budget_for_decodes",
        "event_per_block",
        "promise_unfreed",
        "put_back_blind",
        "put_back_to_start",
        "quota_exceeded",
        "stop_inside_run_missed",
        "tenant_victim_in_vain",
        "room_reads_no_budget",
        "parked_not_awaited",
        "fork_shares_unseen",
        "plenty_forgets_promises",
        "fork_outlives_family",
    ];
    let tables = [
        "fork_misses_last",
        "truncate_keeps_block",
        "write_in_place",
        "copy_keeps_holder",
        "hit_stays_parked",
        "hit_takes_neighbours",
        "guard_keeps_block",
        "failed_copy_counts",
        "partial_first_only",
        "partial_without_lease",
        "partial_of_anybody",
        "tokens_not_compared",
        "tokens_of_first_group",
        "partial_behind_full_only",
        "key_without_last_token",
        "fork_unconfirmed",
    ];
    // What no schedule has, and what needs more of them: who may share is one in four here, and differs in one way of twelve.
    let keys = [
        "miss_tells_other_domain",
        "miss_forgets_published",
        "miss_counted_again",
        "weights_forgotten",
        "vllm_salt_in_every_block",
        "field_without_tag",
        "field_without_length",
        "waiting_keeps_old_keys",
        "mixed_rows_published",
        "tenant_after_public_forgotten",
        "media_without_offset",
        "salt_in_first_block_only",
        "adapter_load_forgotten",
    ];
    // What only decides who is evicted first.
    let retention = [
        "last_asker_decides",
        "hit_refreshes_nothing",
        "nothing_expires",
        "range_lifts_its_own_only",
        "front_worth_less",
        "old_worth_stays",
        "shallow_first",
        "pin_keeps_old_keys",
        "parked_hit_takes_free",
        "shares_ignored",
        "share_counts_forgotten",
    ];
    // What only decides who goes first.
    let turns = [
        "no_lift",
        "charge_nothing",
        "hit_not_followed",
        "soft_quota_ignored",
        "nothing_reserved",
        "class_ignored",
        "no_ageing",
        "one_prefix_band",
        "promise_only_known",
        "evict_anyway",
        "admit_after_preempt",
    ];
    // What is only seen in a recording, or in a very long timeline.
    let told = [
        "timeline_grows",
        "unrecorded_decision",
        "recorder_forgets_abort",
        "checksum_ignored",
        "recording_number_too_long",
    ];
    let elsewhere = [&turns[..], &orders, &sequences, &tables, &rare, &keys, &retention, &told].concat();
    let own = [&OVERLAP[..], &CORNERS, &DRAFTING, &REFUSING].concat();
    let is_for_others = |fault: &Mutant| {
        elsewhere.contains(&fault.name())
            || own.contains(fault)
            || CAUGHT_ELSEWHERE.iter().any(|(caught, _)| caught == fault)
    };
    // Some need luck: they get more of it.
    let is_missed = |fault: &&Mutant| {
        let sweep = |seed, cases| seed::sweep(seed, cases, &schedules(), |schedule| schedule.run().map(drop));
        under(**fault, || sweep(1, 300).and_then(|()| sweep(2, 2_000))).is_ok()
    };
    let missed: Vec<_> = Mutant::ALL.iter().filter(|fault| !is_for_others(fault)).filter(is_missed).collect();
    assert!(missed.is_empty(), "2,300 random schedules do not find {missed:?}");
}

#[test]
fn an_unknown_fault_is_refused_and_the_choice_is_of_one_thread() {
    assert!(!mutant::choose(Some("no such fault")));
    assert!(mutant::choose(Some("double_free")));
    assert!(mutant::is_on(Mutant::DoubleFree) && !mutant::is_on(Mutant::LostBlock));
    let elsewhere = std::thread::spawn(|| mutant::is_on(Mutant::DoubleFree)).join();
    assert!(!elsewhere.expect("the thread ends"), "another thread runs without the fault");
    assert!(mutant::choose(None) && !mutant::is_on(Mutant::DoubleFree));
}

fn demand_found(row: &Row) {
    let name = row.fault.name();
    (row.check)().unwrap_or_else(|broken| panic!("without the fault the check must pass: {broken}"));
    match under(row.fault, row.check) {
        Ok(()) => panic!("{name} is not found"),
        Err(found) => {
            assert!(row.found_by.contains(&found.check), "{name} must be found by {:?}: {found}", row.found_by)
        }
    }
}

/// Runs `check` with a planted fault. A panic counts as found, under the name "panic".
pub fn under(fault: Mutant, check: impl Fn() -> Checked) -> Checked {
    assert!(mutant::choose(Some(fault.name())));
    let outcome = catch_unwind(AssertUnwindSafe(check));
    assert!(mutant::choose(None));
    outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        broken("panic", text.unwrap_or_default())
    })
}

/// Scripts on the pool alone, beside its model.
fn random_shares_scripts() -> Checked {
    seed::sweep(3, 200, &shares_scripts(), |script| script.run())
}

fn random_pool_scripts() -> Checked {
    static PASSES: OnceLock<Checked> = OnceLock::new();
    let run = || seed::sweep(1, 2000, &pool_scripts(), |script| script.run());
    let is_planted = mutant::available().iter().any(|&fault| mutant::is_on(fault));
    if is_planted { run() } else { PASSES.get_or_init(run).clone() }
}

/// Scripts on a pool and its sequences, beside their model.
fn random_sequence_scripts() -> Checked {
    static PASSES: OnceLock<Checked> = OnceLock::new();
    let run = || seed::sweep(1, 500, &sequence_scripts(), |script| script.run());
    let is_planted = mutant::available().iter().any(|&fault| mutant::is_on(fault));
    if is_planted { run() } else { PASSES.get_or_init(run).clone() }
}

/// Faults of the scheduler's world that sequences meet too: found there under these names.
#[test]
fn random_sequence_scripts_find_the_faults_that_they_share_with_the_scheduler() {
    for fault in [
        Mutant::HitWholePrompt,
        Mutant::BlockedKeepsHits,
        Mutant::RecountQueriesOnRetry,
        Mutant::SkipRefOnHit,
        Mutant::HitKeepsInQueue,
        Mutant::KeepKeyOnReuse,
        Mutant::KeyWithoutParent,
        Mutant::ForkMissesLast,
        Mutant::TruncateKeepsBlock,
        Mutant::WriteInPlace,
        Mutant::CopyKeepsHolder,
        Mutant::PartialTake,
        Mutant::LeakBlockOnFinish,
        Mutant::DoubleFree,
    ] {
        let found = under(fault, random_sequence_scripts);
        assert!(found.is_err(), "{} is not found", fault.name());
    }
}

/// Chains with retention on the pool alone, beside their model.
fn random_retention_scripts() -> Checked {
    seed::sweep(1, 400, &retention_script::scripts(), |script| script.run())
}

/// 10 tokens and 7 outputs, the newest of which has no row: four full blocks.
fn one_request_runs_to_its_end() -> Checked {
    let mut driver = Driver::new(config(9, 4));
    driver.submit(prompt(1, 10), up_to(7))?;
    driver.drain()
}

/// Four blocks with content stand in the queue; the first and the third of them are hit as one chain.
fn blocks_that_stand_apart_are_hit() -> Checked {
    let mut pool = BlockPool::new(5).expect("a pool");
    let mut table = BlockTable::new();
    pool.take(&mut table, 4).expect("free blocks");
    let blocks = table.blocks().to_vec();
    for (name, &block) in blocks.iter().enumerate() {
        pool.make_pending(block, Key([name as u8; 32])).expect("a block of the pool");
        pool.publish(block).expect("a block of the pool");
    }
    pool.release(table, Release::Now);
    let mut table = BlockTable::new();
    pool.share_all(&mut table, &[blocks[0], blocks[2]]).expect("both have names");
    broken::audited(pool.audit([&table]))
}

fn the_first_of_eight_is_displaced() -> Checked {
    shared_prompt::run(64, shared_prompt::Disturbance::Displaced(5)).map(drop)
}

fn the_later_of_two_writers_is_done_first() -> Checked {
    let mut pool = BlockPool::new(4).expect("a pool");
    let mut table = BlockTable::new();
    pool.take(&mut table, 2).expect("both are free");
    for &block in table.blocks() {
        pool.make_pending(block, Key([1; 32])).expect("a block of the pool");
    }
    pool.publish(table.blocks()[1]).expect("a block of the pool");
    broken::audited(pool.audit([&table]))
}

fn a_guard_goes() -> Checked {
    let pool = SharedPool::new(BlockPool::new(4).expect("a pool"));
    let held = pool.take().expect("a free block");
    drop(held.share().expect("held"));
    broken::audited(pool.lock().audit([held.table()]))
}

/// Three go on from 11 rows in blocks of 4, and one of them is forked again.
fn a_request_is_forked() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    let parent = driver.submit(prompt(1, 10), up_to(7))?.expect("it fits");
    driver.run_step()?;
    driver.run_step()?;
    let child = driver.fork(parent, up_to(9))?.expect("a row is free");
    driver.fork(parent, up_to(8))?;
    driver.run_step()?;
    driver.plan()?;
    driver.fork(child, up_to(6))?;
    driver.drain()
}

/// The third of the copies is not made.
fn a_step_that_copies_fails() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    let parent = driver.submit(prompt(1, 10), up_to(7))?.expect("it fits");
    driver.run_step()?;
    driver.fork(parent, up_to(7))?;
    driver.fork(parent, up_to(7))?;
    driver.plan()?;
    driver.fail()?;
    driver.drain()
}

fn a_request_goes_back_into_a_published_block() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    let id = driver.submit(prompt(1, 13), up_to(7))?.expect("it fits");
    driver.run_step()?;
    driver.truncate(id, 7)?;
    driver.drain()
}

fn a_request_goes_back_in_flight() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    let id = driver.submit(prompt(1, 13), up_to(7))?.expect("it fits");
    driver.run_step()?;
    driver.plan()?;
    driver.truncate(id, 9)?;
    driver.drain()
}

/// The child goes on from what was confirmed, and the step fails.
fn a_sharer_is_forked_in_flight() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    driver.submit(prompt(1, 13), up_to(3))?;
    let sharer = driver.submit(prompt(1, 13), up_to(3))?.expect("it fits");
    driver.plan()?;
    driver.fork(sharer, up_to(5))?;
    driver.fail()?;
    driver.drain()
}

/// Prompts leave each other at every place inside blocks of 8; what is reused is what a walk over all of them says.
fn prompts_branch_inside_blocks() -> Checked {
    let mut driver = Driver::new(Config { enable_partial_hits: true, ..config(200, 8) });
    let mut before: Vec<Vec<u32>> = Vec::new();
    for number in 0..40_u32 {
        let stays = (number * 7 % 37) as usize;
        let tokens: Vec<u32> =
            (0..40).map(|at| if at < stays { at as u32 } else { 100 + number % 5 * 10 + at as u32 }).collect();
        let id = driver.submit(tokens.clone(), up_to(1))?.expect("it fits");
        driver.drain()?;
        let common = |other: &Vec<u32>| {
            let same = other.iter().zip(&tokens).take_while(|(ours, theirs)| ours == theirs).count();
            let (full, rest) = (same.min(39) / 8 * 8, same.min(39) % 8);
            full + if rest >= 2 { rest } else { 0 }
        };
        let wanted = before.iter().map(common).max().unwrap_or(0);
        let cached = driver.clients[&id].cached;
        ensure(cached == Some(wanted), "partial", || {
            format!("prompt {number}: {cached:?} tokens are cached, {wanted} could be")
        })?;
        before.push(tokens);
    }
    ensure(driver.seen.partial_hits > 10, "rare", || format!("{:?}", driver.seen))
}

/// Six blocks of 4: every second prompt evicts what the one before left.
fn partial_blocks_are_handed_out_again() -> Checked {
    let mut driver = Driver::new(Config { enable_partial_hits: true, ..config(7, 4) });
    for number in 0..12 {
        let tokens: Vec<u32> = prompt(1, 6).into_iter().chain((0..12).map(|at| number * 50 + at)).collect();
        driver.submit(tokens, up_to(2))?;
        driver.drain()?;
    }
    Ok(())
}

/// The only free blocks are one that is empty and the source.
fn a_partial_source_is_the_next_to_go() -> Checked {
    let mut driver = Driver::new(Config { enable_partial_hits: true, ..config(5, 4) });
    for number in 0..12 {
        let tokens: Vec<u32> = prompt(1, 3).into_iter().chain((0..9).map(|at| number * 50 + at)).collect();
        driver.submit(tokens, up_to(2))?;
        driver.submit(prompt(1, 3).into_iter().chain([900 + number]).collect(), up_to(2))?;
        driver.drain()?;
    }
    Ok(())
}

/// Their last full blocks differ in the last token.
fn prompts_differ_in_a_last_token() -> Checked {
    prompts_differ_in(vec![GroupSpec::FULL])
}

/// The queries of the first group see themselves only, so that no hit has a block there.
fn prompts_differ_in_the_second_group_alone() -> Checked {
    prompts_differ_in(vec![GroupSpec::sliding(1), GroupSpec::FULL])
}

fn prompts_differ_in(groups: Vec<GroupSpec>) -> Checked {
    let config = Config { enable_partial_hits: true, event_buffer_size: 0, groups, ..config(40, 4) };
    let mut driver = Driver::new(config);
    for last in 0..3 {
        let mut tokens = prompt(1, 9);
        tokens[7] = 900 + last;
        driver.submit(tokens, up_to(2))?;
        driver.drain()?;
    }
    let forged = driver.scheduler.counters().forged_hits;
    ensure(forged == 0, "forged", || format!("{forged} hits were forged"))
}

fn prompts_part_in_several_groups() -> Checked {
    seed::sweep(1, 200, &parts::scripts(), |script| script.run().map(drop))
}

/// 12 tokens in blocks of 4: two of its three full blocks are hit, the last token is computed.
fn a_prompt_comes_again() -> Checked {
    let mut driver = Driver::new(config(12, 4));
    for _ in 0..3 {
        driver.submit(prompt(1, 12), up_to(3))?;
        driver.drain()?;
    }
    ensure(driver.scheduler.counters().prefix_hits == 16, "cached", || "two hits of two blocks".to_owned())
}

/// The first still runs when the second comes, and has published the block that the second must not write.
fn a_prompt_comes_again_while_it_runs() -> Checked {
    let mut driver = Driver::new(config(12, 4));
    driver.submit(prompt(1, 12), up_to(8))?;
    driver.run_step()?;
    driver.submit(prompt(1, 12), up_to(8))?;
    driver.drain()
}

/// Six usable blocks; each prompt needs the blocks in which the one before was published, out of order.
fn cached_blocks_are_handed_out_again() -> Checked {
    let mut driver = Driver::new(config(7, 4));
    for family in 1..5 {
        driver.submit(prompt(family, 17), up_to(4))?;
        driver.drain()?;
    }
    ensure(driver.scheduler.pool().evictions() > 0, "eviction", || "nothing was evicted".to_owned())
}

/// 6 tokens a step: the first chunk ends inside the second block.
fn a_prompt_runs_in_chunks() -> Checked {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 6, max_num_seqs: 4, ..config(12, 4) });
    driver.submit(prompt(1, 15), up_to(3))?;
    driver.drain()
}

/// Prompt 465, block 256, 256 of them cached, budget 300: all 209 others are computed in one step.
fn a_hit_leaves_the_budget_alone() -> Checked {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 300, max_model_len: 600, ..config(8, 256) });
    for _ in 0..2 {
        driver.submit(prompt(1, 465), up_to(1))?;
        driver.drain()?;
    }
    let tokens: Vec<usize> =
        driver.plans.iter().map(|plan| plan.token_ids.len()).filter(|&tokens| tokens > 0).collect();
    ensure(tokens == [300, 165, 209], "budget", || format!("{tokens:?}"))
}

/// Request 3 sees a cached prefix while request 2 holds what it needs beside it; request 2 evicts the prefix; then request 3 starts.
fn a_hit_is_gone_before_it_is_used() -> Checked {
    let mut driver = Driver::new(config(9, 2));
    driver.submit(prompt(1, 9), up_to(1))?;
    driver.drain()?;
    driver.submit(prompt(2, 5), up_to(12))?;
    driver.run_step()?;
    driver.submit(prompt(1, 14), up_to(1))?;
    driver.drain()
}

/// What a failed step wrote is garbage: nobody may find it, and the request goes on from what was confirmed.
fn a_step_fails() -> Checked {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 8, max_num_seqs: 4, ..config(16, 4) });
    let first = driver.submit(prompt(1, 18), up_to(3))?.expect("it fits");
    driver.run_step()?;
    driver.plan()?;
    driver.fail()?;
    driver.abort(first)?;
    driver.submit(prompt(1, 18), up_to(3))?;
    driver.plan()?;
    driver.fail()?;
    driver.drain()
}

/// The second request shares blocks that the first is writing in the same step; the first is aborted before the step ends.
fn a_writer_leaves_in_flight() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    let writer = driver.submit(prompt(1, 14), up_to(3))?.expect("it fits");
    driver.submit(prompt(1, 14), up_to(3))?;
    driver.plan()?;
    let shared = driver.step.as_ref().map_or(0, |step| step.entries[1].shared.len());
    ensure(shared == 3, "sharing", || format!("{shared} blocks are shared in flight"))?;
    driver.abort(writer)?;
    driver.drain()
}

/// One request, planned twice, in a pool of its own; the model has run neither step.
fn two_steps_in_flight(limits: Limits) -> Checked<(World, u64)> {
    let mut world = World::new(Config { overlap_depth: 2, max_num_seqs: 2, ..config(16, 4) });
    let id = world.submit(prompt(1, 6), limits)?.expect("it fits");
    for _ in 0..2 {
        ensure(world.plan()?, "overlap", || "a plan is empty".to_owned())?;
    }
    ensure(!world.plan()? && world.in_flight() == 2, "overlap", || "a third plan is made".to_owned())?;
    Ok((world, id))
}

fn a_request_leaves_two_steps_in_flight() -> Checked {
    let (mut world, id) = two_steps_in_flight(up_to(9))?;
    world.leave(id, false)?;
    world.commit(0)?;
    world.drain()
}

fn a_stop_comes_while_the_next_step_runs() -> Checked {
    let world = World::new(config(16, 4));
    let answer = world.answer(&prompt(1, 6), 6, 0, &up_to(9));
    let (mut world, _) = two_steps_in_flight(Limits { stop_tokens: vec![answer.outputs[0]], ..up_to(9) })?;
    world.commit(0)?;
    world.commit(0)?;
    ensure(world.seen.stopped_late == 1 && world.seen.dropped == 1, "ends", || format!("{:?}", world.seen))?;
    world.drain()
}

/// The second output is the last.
fn a_plan_runs_nothing_while_the_last_token_is_on_its_way() -> Checked {
    let (mut world, _) = two_steps_in_flight(up_to(2))?;
    world.commit(0)?;
    ensure(!world.plan()?, "overlap", || "there is something to run".to_owned())?;
    world.drain()
}

/// Four requests, one block each, all of which are full: the first needs another one, and what the last gives up is free when the step
/// in flight has ended.
fn one_block_is_missing_while_a_step_runs() -> Checked {
    let mut world = World::new(Config { overlap_depth: 2, enable_prefix_caching: false, ..config(5, 4) });
    for family in 1..5 {
        world.submit(prompt(family, 3), up_to(6))?;
    }
    world.plan()?;
    world.plan()?;
    world.commit(0)?;
    world.plan()?;
    let preemptions = world.scheduler.counters().preemptions;
    ensure(preemptions == 1, "victims", || format!("{preemptions} were preempted for one block"))?;
    world.drain()
}

fn a_block_fills_up_in_a_step_that_was_planned_ahead() -> Checked {
    let (mut world, _) = two_steps_in_flight(up_to(20))?;
    world.drain()
}

fn a_step_fails_under_the_next_one() -> Checked {
    let (mut world, _) = two_steps_in_flight(up_to(20))?;
    world.fail()?;
    world.commit(0)?;
    world.drain()
}

#[test]
fn random_overlap_scripts_find_the_faults_of_overlap() {
    for fault in OVERLAP.into_iter().chain([Mutant::FreeInFlight, Mutant::ApplyStaleResult, Mutant::SharerNotReset]) {
        let found = under(fault, || seed::sweep(1, 1_000, &scripts(), |script| script.run().map(drop)));
        assert!(found.is_err(), "1,000 random scripts do not find {}", fault.name());
    }
}

#[test]
fn random_schedules_in_corners_find_what_hides_there() {
    for fault in CORNERS {
        let found = under(fault, || seed::sweep(1, 1_000, &corners(), |schedule| schedule.run().map(drop)));
        assert!(found.is_err(), "1,000 random schedules in corners do not find {}", fault.name());
    }
    let sharing = at_quotas_beside_writers();
    let found =
        under(Mutant::PendingOverQuotaEnds, || seed::sweep(1, 500, &sharing, |schedule| schedule.run().map(drop)));
    assert!(found.is_err(), "500 random schedules at quotas beside writers do not find who shares at its quota");
    for fault in REFUSING {
        let found = under(fault, || seed::sweep(1, 1_000, &refusing_schedules(), |schedule| schedule.run().map(drop)));
        assert!(found.is_err(), "1,000 random schedules with refusals do not find {}", fault.name());
    }
    for fault in DRAFTING {
        let found = under(fault, || seed::sweep(1, 2_000, &drafting_scripts(), |script| script.run().map(drop)));
        assert!(found.is_err(), "2,000 random scripts with drafts do not find {}", fault.name());
    }
}

/// Faults that need a tenant at its quota, a writer that many rely on, or a pool that outputs outgrow.
const CORNERS: [Mutant; 5] = [
    Mutant::PreemptTwo,
    Mutant::SharerLooksOnce,
    Mutant::PendingOverQuotaEnds,
    Mutant::DebtPaidOverQuota,
    Mutant::CapacityTellsPool,
];

/// Faults that need a question that is refused.
const REFUSING: [Mutant; 2] = [Mutant::RefusedKeepsPromise, Mutant::RefusedReadsWaiting];

/// A fault that needs drafts in the last free blocks.
const DRAFTING: [Mutant; 1] = [Mutant::LookaheadNotAwaited];

/// Faults that need two steps in flight.
const OVERLAP: [Mutant; 5] = [
    Mutant::RowsOfNoStepWasted,
    Mutant::LeasesEndTogether,
    Mutant::WastedTokenShown,
    Mutant::KeyBeforeToken,
    Mutant::FailLeavesNext,
];

/// Four requests that grow outgrow the pool; the fifth waits.
fn memory_runs_short() -> Checked {
    let mut driver = Driver::new(Config { enable_prefix_caching: false, max_num_seqs: 4, ..config(11, 2) });
    for family in 0..5 {
        driver.submit(prompt(family, 3), up_to(9))?;
    }
    driver.drain()?;
    ensure(driver.scheduler.counters().preemptions > 0, "pressure", || "nobody was preempted".to_owned())
}

/// Request 2 lost its blocks first, as it was cheaper; when request 3 loses its own too, request 2 would fit at once.
fn a_long_victim_makes_room_for_a_short_one_that_waits() -> Checked {
    let mut driver = Driver::new(Config { enable_prefix_caching: false, ..config(11, 2) });
    for (family, len) in [(1, 4), (2, 3), (3, 11)] {
        driver.submit(prompt(family, len), up_to(14))?;
    }
    driver.drain()?;
    let mut victims = driver.plans.iter().map(|plan| &plan.preempted).filter(|victims| !victims.is_empty());
    let first = (victims.next(), victims.next());
    ensure(first == (Some(&vec![2]), Some(&vec![3])), "victims", || format!("{first:?} were preempted in turn"))
}

/// The block that a lone request needs is refused once: the plan runs nothing, and the next one has its number.
fn a_refused_request_runs_in_the_next_plan() -> Checked {
    let mut driver = Driver::new(config(9, 4));
    driver.submit(prompt(1, 8), up_to(6))?;
    driver.run_step()?;
    driver.refuse_next = 1;
    let runs = driver.plan()?;
    ensure(!runs && driver.seen.refused == 1, "setting", || "nothing was refused".to_owned())?;
    driver.drain()
}

/// Five tokens a step. A failed step takes back what request 2 copied, so it is a longer prefill, with two decodes behind it.
fn a_prefill_runs_before_decodes() -> Checked {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 5, enable_partial_hits: true, ..config(40, 4) });
    driver.submit(prompt(1, 9), up_to(1))?;
    driver.drain()?;
    let before = driver.plans.len();
    // Seven tokens of the second are there, three of them by a copy that fails.
    for tokens in [prompt(4, 1), [prompt(1, 7), prompt(5, 2)].concat(), prompt(2, 1), prompt(3, 1)] {
        driver.submit(tokens, up_to(3))?;
    }
    driver.plan()?;
    driver.fail()?;
    driver.drain()?;
    let chunks: Vec<Vec<usize>> = driver.plans[before..before + 2].iter().map(driver::Plan::chunks).collect();
    ensure(chunks == [[1, 2, 1, 1], [1, 2, 1, 1]], "budget", || format!("{chunks:?}"))
}

/// The last in rank needs a block and there is none: it is skipped and keeps what it has.
fn nobody_ranks_below() -> Checked {
    let mut driver = Driver::new(Config { enable_prefix_caching: false, ..config(5, 4) });
    driver.submit(prompt(1, 5), up_to(4))?;
    driver.submit(prompt(2, 7), up_to(4))?;
    driver.drain()?;
    let counters = driver.scheduler.counters();
    ensure(driver.seen.skipped > 0 && counters.preemptions == 0, "pressure", || {
        format!("{:?}, {counters:?}", driver.seen)
    })
}

/// Three usable blocks of 4 rows: 12 rows fit, 13 do not, and neither do outputs that must be made.
fn what_can_never_fit_is_submitted() -> Checked {
    let mut driver = Driver::new(config(4, 4));
    let limits = |min_tokens| Limits { max_tokens: 9, min_tokens, stop_tokens: Vec::new() };
    let refused = [(12, 0, false), (13, 0, true), (10, 3, false), (10, 4, true), (17, 0, true)];
    for (len, min_tokens, is_refused) in refused {
        let id = driver.submit(prompt(1, len), limits(min_tokens))?;
        ensure(id.is_none() == is_refused, "submit", || {
            format!("{len} tokens, at least {min_tokens} outputs: {id:?}")
        })?;
    }
    driver.drain()
}

fn a_lone_request_outgrows_the_pool() -> Checked {
    let mut driver = Driver::new(config(4, 4));
    let id = driver.submit(prompt(1, 10), up_to(9))?.expect("its prompt fits");
    driver.drain()?;
    let client = &driver.clients[&id];
    ensure(client.end == Some(End::Capacity as i64) && client.outputs().len() == 3, "capacity", || {
        format!("{client:?}")
    })
}

fn a_stop_token_comes_before_min_tokens() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    let answer = driver.submit(prompt(1, 6), up_to(6))?.map(|id| driver.clients[&id].answer.outputs.clone());
    let stop_tokens = vec![answer.expect("it fits")[1]];
    driver.submit(prompt(1, 6), Limits { max_tokens: 6, min_tokens: 4, stop_tokens })?;
    driver.drain()
}

/// Two requests run and one of them is aborted, while every call is recorded; then all calls are made again.
fn a_schedule_is_replayed() -> Checked {
    let replayed = replay(&recorded()?).or_else(|error| broken("replay", error.to_string()))?;
    replayed.difference.map_or(Ok(()), |difference| broken("replay", difference.to_string()))
}

fn recorded() -> Checked<Vec<u8>> {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 12, ..config(20, 4) });
    driver.scheduler.record_in_ring(1 << 20).or_else(|error| broken("record", error.to_string()))?;
    driver.submit(prompt(1, 40), up_to(6))?;
    let id = driver.submit(prompt(2, 12), up_to(6))?.expect("it fits");
    (3..10).try_for_each(|family| driver.submit(prompt(family, 5), up_to(3)).map(drop))?;
    (0..6).try_for_each(|_| driver.run_step())?;
    driver.abort(id)?;
    driver.drain()?;
    Ok(driver.scheduler.recorded().unwrap_or_default())
}

/// A digest in the last record has another bit.
fn a_changed_recording_is_refused() -> Checked {
    let mut bytes = recorded()?;
    let at = bytes.len() - 10;
    bytes[at] ^= 1;
    ensure(Recording::read(&bytes).is_err(), "checksum", || "a change is not found".to_owned())
}

/// An abort of request 1, the number in two bytes instead of one, with right checksums.
fn a_number_is_written_in_one_way() -> Checked {
    let mut scheduler = Recorded::new(config(4, 4)).expect("a valid configuration");
    scheduler.record_in_ring(1000).expect("nothing was called");
    scheduler.abort(RequestId(1));
    let short = scheduler.recorded().expect("a ring");
    // Length, kind, number, outcome, no digest, checksum.
    let (before, record) = short.split_at(short.len() - 23);
    ensure(record[..6] == [11, 0, 0, 0, 3, 1], "form", || format!("{record:?}"))?;
    let mut long = [before, &[12, 0, 0, 0, 3, 0x81, 0], &record[6..]].concat();
    mend(&mut long);
    ensure(Recording::read(&short).is_ok(), "format", || "the short one is refused".to_owned())?;
    ensure(Recording::read(&long).is_err(), "format", || "other bytes mean the same".to_owned())
}

/// A request loses a step and a token, in turn: two records each time.
fn a_request_is_put_off_forty_times() -> Checked {
    let mut driver = Driver::new(config(20, 4));
    let id = driver.submit(prompt(1, 60), up_to(2))?.expect("it fits");
    for at in 1..=40 {
        driver.plan()?;
        driver.fail()?;
        driver.truncate(id, 60 - at)?;
    }
    driver.drain()
}

/// The second finds no room and is looked at in every step, until it is aborted.
fn a_waiting_request_is_aborted() -> Checked {
    let mut driver = Driver::new(config(6, 4));
    driver.submit(prompt(1, 12), up_to(6))?;
    let waits = driver.submit(prompt(2, 12), up_to(2))?.expect("it fits alone");
    for _ in 0..3 {
        driver.run_step()?;
    }
    driver.abort(waits)?;
    driver.drain()
}

/// Each prompt needs five of nine blocks, taken over several steps: the second must wait although blocks are free.
fn two_long_prompts_run_in_chunks() -> Checked {
    let chunks = Config { max_num_batched_tokens: 8, max_num_seqs: 4, long_prefill_threshold: 4, ..config(10, 4) };
    let mut driver = Driver::new(chunks);
    driver.submit(prompt(1, 18), up_to(2))?;
    driver.submit(prompt(2, 20), up_to(2))?;
    driver.drain()
}

/// Three decodes side by side, and far more blocks than they can take; nothing is told of their names.
fn decodes_begin_blocks_at_once() -> Checked {
    let few = Config { max_num_batched_tokens: 16, event_buffer_size: 0, explain_misses: false, ..config(40, 4) };
    let mut driver = Driver::new(few);
    for family in 1..4 {
        driver.submit(prompt(family, 5), up_to(9))?;
    }
    driver.drain()
}

/// Two decodes begin their third blocks while all that is free is promised to a prompt that runs in chunks of six tokens.
fn decodes_begin_blocks_beside_a_prompt_that_was_promised_the_rest() -> Checked {
    let chunks = Config { max_num_batched_tokens: 8, max_model_len: 128, ..config(25, 4) };
    let mut driver = Driver::new(chunks);
    for family in 1..3 {
        driver.submit(prompt(family, 4), up_to(8))?;
    }
    driver.submit(prompt(3, 76), up_to(2))?;
    driver.drain()
}

/// Seven blocks: the second request was promised the six that the first does not hold, and needs them step by step.
fn a_decode_fills_its_block_beside_a_prompt_in_chunks() -> Checked {
    let chunks = Config { max_num_batched_tokens: 8, max_num_seqs: 4, long_prefill_threshold: 4, ..config(8, 4) };
    let mut driver = Driver::new(chunks);
    driver.submit(prompt(1, 3), up_to(4))?;
    driver.submit(prompt(2, 23), up_to(2))?;
    driver.drain()
}

/// The second block of both prompts holds the same tokens behind other ones.
fn equal_blocks_follow_different_ones() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    for family in 1..3 {
        let head = prompt(family, 4);
        driver.submit([&head[..], &prompt(9, 4), &head].concat(), up_to(2))?;
        driver.drain()?;
    }
    driver.submit([&prompt(9, 4)[..], &prompt(9, 4), &prompt(1, 4)].concat(), up_to(2))?;
    driver.drain()
}

/// 5 tokens a step for a prompt of 21: seven others wait for the first instead of computing it too.
fn equal_cold_prompts_come_together() -> Checked {
    let mut driver = Driver::new(Config { max_num_batched_tokens: 10, long_prefill_threshold: 5, ..config(40, 4) });
    for _ in 0..8 {
        driver.submit(prompt(1, 21), up_to(1))?;
    }
    driver.drain()?;
    let computed = driver.scheduler.counters().scheduled_tokens;
    ensure(computed == 21 + 7, "wait", || format!("{computed} tokens were computed"))
}

/// 64 tokens a step for a prompt of 1,009: each step shares what it writes, the fifteenth fails.
fn a_writer_fails_behind_published_blocks() -> Checked {
    (1..=18).try_for_each(|step| shared_prompt::run(64, shared_prompt::Disturbance::Failed(step)).map(drop))
}

fn a_writer_fails_before_anything_is_published() -> Checked {
    shared_prompt::run(2048, shared_prompt::Disturbance::Failed(1)).map(drop)
}

/// Four blocks are published in one step, the ring holds three events.
fn more_happens_in_a_step_than_the_ring_holds() -> Checked {
    let mut driver = Driver::new(Config { event_buffer_size: 3, ..config(9, 4) });
    driver.submit(prompt(1, 17), up_to(2))?;
    driver.drain()?;
    let restarts = driver.followers.first.restarts;
    ensure(restarts == 1, "gap", || format!("the reader started {restarts} times from a snapshot"))
}

/// The second prompt runs, the first is only remembered. Later nobody runs.
fn a_reset_meets_a_request_that_runs() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    driver.submit(prompt(1, 9), up_to(1))?;
    driver.drain()?;
    driver.submit(prompt(2, 9), up_to(3))?;
    driver.run_step()?;
    driver.reset_prefix_cache()?;
    ensure(driver.followers.first.keys.len() == 2, "reset", || "the blocks of the second prompt stay".to_owned())?;
    driver.drain()?;
    driver.reset_prefix_cache()?;
    ensure(driver.followers.first.keys.is_empty(), "reset", || "a key is left".to_owned())
}

/// Three blocks are cached, two may be pinned.
fn a_pin_is_over_the_budget() -> Checked {
    let mut driver = Driver::new(Config { pin_budget: 2, ..config(16, 4) });
    driver.submit(prompt(1, 13), up_to(2))?;
    driver.drain()?;
    let is_pinned = driver.pin(&prompt(1, 13))?;
    ensure(!is_pinned, "pin", || "it is pinned".to_owned())
}

/// What the prompt's keys named when it was hashed is still cached, but by other weights.
fn a_prompt_of_old_weights_is_pinned() -> Checked {
    let mut driver = Driver::new(Config { pin_budget: 4, ..config(16, 4) });
    let hashed = driver.scheduler.prompt(prompt(1, 13), Identity::of(Domain::Deployment)).expect("a prompt");
    driver.submit(prompt(1, 13), up_to(2))?;
    driver.drain()?;
    driver.set_weights_version(7)?;
    let pinned = driver.scheduler.pin(&hashed);
    ensure(pinned.is_err(), "pin", || format!("rows of the old weights are pinned: {pinned:?}"))
}

/// All blocks wait for the end of a step that names them, and none is free.
fn a_parked_prefix_is_pinned() -> Checked {
    let mut driver = Driver::new(Config { pin_budget: 4, ..config(6, 4) });
    let request = driver.submit(prompt(1, 17), up_to(2))?.expect("it fits");
    driver.run_step()?;
    driver.plan()?;
    driver.abort(request)?;
    ensure(driver.scheduler.pool().num_free() == 0, "setting", || "some block is free".to_owned())?;
    let is_pinned = driver.pin(&prompt(1, 17))?;
    ensure(is_pinned, "pin", || "it is not pinned".to_owned())?;
    driver.drain()
}

fn a_pin_is_given_back() -> Checked {
    let mut driver = Driver::new(Config { pin_budget: 3, ..config(16, 4) });
    driver.submit(prompt(1, 13), up_to(2))?;
    driver.drain()?;
    let is_pinned = driver.pin(&prompt(1, 13))?;
    ensure(is_pinned, "pin", || "it is not pinned".to_owned())?;
    driver.drain()
}

/// Two usable blocks, the second of which gets the last id.
fn the_last_block_is_published() -> Checked {
    let mut driver = Driver::new(config(3, 4));
    driver.submit(prompt(1, 7), up_to(2))?;
    driver.drain()
}

/// A group that sees everything and one that sees 6 rows, in blocks of 4: what is behind the window is free for others.
fn a_window_slides_over_a_long_request() -> Checked {
    let groups = vec![GroupSpec::FULL, GroupSpec::sliding(6)];
    let mut driver = Driver::new(Config { groups, max_num_batched_tokens: 8, ..config(15, 4) });
    driver.submit(prompt(1, 18), up_to(12))?;
    driver.drain()
}

/// The first half of the prompt of another one comes again and ends inside the window; then all of it, longer.
fn a_window_finds_its_prefix_again() -> Checked {
    let groups = vec![GroupSpec::FULL, GroupSpec::sliding(6)];
    let mut driver = Driver::new(Config { groups, ..config(40, 4) });
    for len in [17, 9, 17, 23] {
        driver.submit(prompt(1, len), up_to(3))?;
        driver.drain()?;
    }
    let hits = driver.scheduler.counters().prefix_hits;
    ensure(hits == 8 + 16 + 16, "cached", || format!("{hits} tokens were found"))
}

/// The second shares what the first computed; when that leaves its window it is not free, so it is no promise.
fn what_leaves_a_window_stays_with_another() -> Checked {
    let groups = vec![GroupSpec::sliding(9)];
    let sizes = Config { max_num_batched_tokens: 9, long_prefill_threshold: 8, ..config(8, 4) };
    let mut driver = Driver::new(Config { groups, ..sizes });
    driver.submit(prompt(1, 17), up_to(4))?;
    driver.run_step()?;
    driver.run_step()?;
    driver.submit([&prompt(1, 16)[..], &prompt(2, 24)].concat(), up_to(3))?;
    driver.drain()
}

/// Four usable blocks. In the fourth step the first request takes block 2 of its own chain again, behind which it and the second
/// share blocks 4 and 5; the query at block 4 would need it.
fn a_sharer_loses_what_its_window_needs() -> Checked {
    let groups = vec![GroupSpec::sliding(6)];
    let sizes = Config { max_num_batched_tokens: 8, long_prefill_threshold: 6, ..config(5, 4) };
    let mut driver = Driver::new(Config { groups, ..sizes });
    driver.submit(prompt(1, 24), up_to(3))?;
    for _ in 0..3 {
        driver.run_step()?;
    }
    driver.submit([&prompt(1, 24)[..], &prompt(2, 2)].concat(), up_to(3))?;
    driver.plan()?;
    driver.fail()?;
    let back = driver.seen.put_back_to_nothing;
    ensure(back == 1, "sharing", || format!("{back} requests were put back to nothing"))?;
    driver.drain()
}

/// Five usable blocks of 4 rows: two groups need twice as many, but through a window of 5 a step of 4 rows never more than three.
fn what_can_never_fit_two_groups_is_submitted() -> Checked {
    for (window, len, is_refused) in [(None, 8, false), (None, 12, true), (Some(5), 8, false), (Some(5), 12, true)] {
        let groups = vec![GroupSpec::FULL, GroupSpec { window }];
        let mut driver = Driver::new(Config { groups, max_num_batched_tokens: 4, max_num_seqs: 2, ..config(6, 4) });
        let id = driver.submit(prompt(1, len), up_to(1))?;
        ensure(id.is_none() == is_refused, "submit", || format!("{len} tokens through {window:?}: {id:?}"))?;
        driver.drain()?;
    }
    Ok(())
}

fn config(num_blocks: u32, block_size: u32) -> Config {
    Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_waiting: 16,
        event_buffer_size: 64,
        explain_misses: true,
        queue: QueueRules { estimate_growth: false, ..QueueRules::default() },
        ..Config::new(num_blocks, block_size, 1009, 64)
    }
}

fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}

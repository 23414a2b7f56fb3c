//! Random schedules in corners that those of [`schedule_script`](crate::schedule_script) hardly reach.
//!
//! Before: proptest draws a corner, and what happens there. After: a [`Schedule`], played as any other.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::tenants::TenantRules;

use crate::schedule_script::{Ask, Event, Schedule, VOCAB, schedules};

/// All corners in turn.
pub fn corners() -> impl Strategy<Value = Schedule> {
    prop_oneof![2 => at_quotas(), 1 => at_quotas_beside_writers(), 1 => beside_writers(), 1 => short_of_memory()]
}

/// Schedules as any other, in which now and then a question of the next plan is refused.
pub fn refusing_schedules() -> impl Strategy<Value = Schedule> {
    (schedules(), vec((0..60_usize, 1..8_u32), 1..4)).prop_map(|(Schedule { config, mut events }, refusals)| {
        for (at, nth) in refusals {
            events.insert(at % (events.len() + 1), Event::Refuse(nth));
        }
        Schedule { config, events }
    })
}

/// Blocks are free, and a tenant may not hold them: while it shares what others write, and after it was truncated.
fn at_quotas() -> impl Strategy<Value = Schedule> {
    let groups = prop_oneof![
        Just(vec![GroupSpec::FULL]),
        (1..6_u32).prop_map(|window| vec![GroupSpec::sliding(window), GroupSpec::FULL])
    ];
    let limits = (2..=4_u32, 4..=16_u32, 0..=4_u32, 3..=10_u32);
    let config =
        (limits, groups, any::<bool>()).prop_map(|((block_size, budget, threshold, quota), groups, no_evict)| {
            let rules = TenantRules { hard_blocks: quota, ..TenantRules::default() };
            let queue = QueueRules { no_evict, tenants: vec![("a".into(), rules)], ..QueueRules::default() };
            let sizes = Config {
                groups,
                max_num_batched_tokens: budget,
                long_prefill_threshold: threshold,
                ..roomy(block_size)
            };
            Config { queue: without_estimate(queue), ..sizes }
        });
    let event = prop_oneof![
        6 => (asks(0..16, 3), 1..=2_usize).prop_map(|(ask, times)| Event::Submit(ask, times)),
        12 => Just(Event::Step),
        4 => Just(Event::Plan),
        5 => (0..8_usize, 100..=255_u8).prop_map(|(number, share)| Event::Truncate(number, share)),
        1 => (0..3_usize).prop_map(Event::AbortPlanned),
        1 => (0..64_usize, 0..8_u32).prop_map(|(number, more)| Event::Fork(number, more)),
    ];
    play(config, event)
}

/// A tenant at its quota shares what another one writes, row by row and through a window.
pub fn at_quotas_beside_writers() -> impl Strategy<Value = Schedule> {
    let config = (2..=3_u32, 1..=2_u32, 1..6_u32, 4..=8_u32).prop_map(|(block_size, threshold, window, quota)| {
        let rules = TenantRules { hard_blocks: quota, ..TenantRules::default() };
        let queue = QueueRules { tenants: vec![("a".into(), rules)], ..QueueRules::default() };
        Config {
            groups: vec![GroupSpec::sliding(window), GroupSpec::FULL],
            long_prefill_threshold: threshold,
            queue: without_estimate(queue),
            ..roomy(block_size)
        }
    });
    let event = prop_oneof![
        2 => asks(6..12, 3).prop_map(|ask| Event::Submit(ask, 1)),
        5 => Just(Event::Step),
        1 => (0..3_usize).prop_map(Event::AbortPlanned),
    ];
    play(config, event)
}

/// Many ask the same, and who writes it fails or leaves.
fn beside_writers() -> impl Strategy<Value = Schedule> {
    let config = (2..=4_u32, 8..=40_u32, prop_oneof![2 => Just(0_u32), 1 => 2..=9_u32]);
    let config = config.prop_map(|(block_size, budget, threshold)| Config {
        max_num_batched_tokens: budget,
        long_prefill_threshold: threshold,
        queue: without_estimate(QueueRules::default()),
        ..roomy(block_size)
    });
    let event = prop_oneof![
        4 => (asks(4..20, 1), 2..=4_usize).prop_map(|(ask, times)| Event::Submit(ask, times)),
        8 => Just(Event::Step),
        6 => Just(Event::Plan),
        3 => Just(Event::Fail),
        3 => (0..3_usize).prop_map(Event::AbortPlanned),
    ];
    play(config, event)
}

/// Outputs outgrow the pool, and nobody finds what another one computed.
fn short_of_memory() -> impl Strategy<Value = Schedule> {
    let config = (1..=3_u32, 12..=36_u32, 3..=5_u32).prop_map(|(block_size, rows, seqs)| Config {
        num_blocks: 1 + rows.div_ceil(block_size),
        max_num_seqs: seqs,
        enable_prefix_caching: false,
        queue: without_estimate(QueueRules::default()),
        ..roomy(block_size)
    });
    let event = prop_oneof![
        5 => (asks(0..10, 1), 1..=2_usize).prop_map(|(ask, times)| Event::Submit(ask, times)),
        16 => Just(Event::Step),
        1 => (0..64_usize).prop_map(Event::Abort),
    ];
    play(config, event)
}

fn play(config: impl Strategy<Value = Config>, event: impl Strategy<Value = Event>) -> impl Strategy<Value = Schedule> {
    (config, vec(event, 5..50)).prop_map(|(config, events)| Schedule { config, events })
}

/// Prompts of two families, of the first so many tenants.
fn asks(shared: std::ops::Range<usize>, tenants: usize) -> impl Strategy<Value = Ask> {
    (0..2_u32, shared, 0..4_usize, 1..10_u32, 0..tenants).prop_map(|(family, shared, own, max_tokens, tenant)| {
        Ask::plain(family, shared + own, max_tokens).by(tenant.min(1))
    })
}

fn without_estimate(queue: QueueRules) -> QueueRules {
    QueueRules { estimate_growth: false, ..queue }
}

/// Room for all that five requests may need.
fn roomy(block_size: u32) -> Config {
    Config {
        max_num_seqs: 5,
        max_num_batched_tokens: 64,
        max_waiting: 12,
        max_preemptions: 3,
        event_buffer_size: 64,
        explain_misses: true,
        ..Config::new(1 + 300_u32.div_ceil(block_size), block_size, VOCAB, 40)
    }
}

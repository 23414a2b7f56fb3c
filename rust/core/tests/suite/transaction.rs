//! Operations of several steps are one transaction: whichever step is refused, all stays bit for bit as it was (design 3, I4).
//!
//! Before: a scheduler in the state in which the operation has most to do. After: each inner step was refused once; holders, the order of
//! the queue, names, events, promises, tables, the plan's draft and the counters are unchanged, and the operation then does what it does in a
//! twin that was never disturbed.

#![cfg(feature = "mutants")]

use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::RequestId;
use blocktable_core::refusal::refuse;
use blocktable_core::retention::{Ranges, TokenRange};

use crate::refused::{self, Caller, config, prompt, refuse_each, up_to};

/// Two hits, the source of a copy, the blocks, the row.
#[test]
fn an_admission_with_hits_a_copy_and_evictions() {
    let mut caller = refused::a_prompt_waits_whose_blocks_are_all_cached();
    let before = caller.scheduler.pool().evictions();
    let sizes = caller.plan().unwrap();
    assert_eq!((sizes.admitted, sizes.copies, sizes.tokens), (1, 1, 12), "22 tokens, of which 10 are there");
    assert!(caller.scheduler.pool().evictions() > before, "content of others is given up");
    assert_eq!(refused::an_admission_is_refused().unwrap(), 5);
}

#[test]
fn an_admission_with_hits_in_two_groups() {
    let make = || {
        let mut config = config(30);
        config.groups = vec![GroupSpec::FULL, GroupSpec::sliding(6)];
        let mut caller = Caller::new(config);
        caller.submit(prompt(1, 17), 3);
        caller.drain();
        caller.submit(prompt(1, 17), 3);
        caller
    };
    // Of four hits the window sees the last two.
    assert_eq!(refuse_each(make, Caller::plan).unwrap(), 4 + 2 + 2);
}

/// A hit refreshes the time of its blocks and moves them to another lane when they are released.
#[test]
fn an_admission_that_asks_for_retention() {
    let make = || {
        let mut caller = Caller::new(config(12));
        for family in [1, 2] {
            let id = caller.submit(prompt(family, 13), 2);
            let range = TokenRange { start: 0, end: None, priority: 60 + family as u8, duration_ms: Some(1) };
            caller.scheduler.set_retention(id, Ranges::new(&[range]).unwrap()).unwrap();
            caller.drain();
        }
        let id = caller.submit(prompt(1, 20), 2);
        let range = TokenRange { start: 0, end: None, priority: 90, duration_ms: Some(2) };
        caller.scheduler.set_retention(id, Ranges::new(&[range]).unwrap()).unwrap();
        caller
    };
    assert_eq!(refuse_each(make, Caller::plan).unwrap(), 3 + 2);
}

/// The next row of a lone request needs a block. (The draft of the plan before is gone only when the next one was begun.)
#[test]
fn a_growth() {
    let make = || {
        let mut caller = Caller::new(config(9));
        caller.submit(prompt(1, 8), 6);
        caller.step();
        begin_plan(&mut caller);
        caller
    };
    assert_eq!(refuse_each(make, Caller::plan).unwrap(), 1);
}

/// The next row goes into a published block, so that it is copied.
#[test]
fn a_growth_with_a_copy() {
    let make = || {
        let mut caller = Caller::new(config(9));
        let id = caller.submit(prompt(1, 13), 6);
        caller.step();
        caller.scheduler.truncate(id, 7).unwrap();
        begin_plan(&mut caller);
        caller
    };
    assert_eq!(make().plan().unwrap().copies, 1);
    assert_eq!(refuse_each(make, Caller::plan).unwrap(), 2);
}

/// The older request needs a block that the younger one has: it is refused before anybody is preempted for it.
#[test]
fn a_growth_is_refused_before_anybody_makes_room_for_it() {
    let make = || {
        let mut caller = Caller::new(config(5));
        caller.submit(prompt(1, 8), 6);
        caller.submit(prompt(2, 7), 6);
        caller.step();
        caller
    };
    let mut caller = make();
    caller.plan().unwrap();
    assert_eq!(caller.scheduler.counters().preemptions, 1);
    let mut caller = make();
    refuse(1);
    caller.plan().unwrap();
    assert_eq!(refuse(0), 0);
    assert_eq!((caller.scheduler.counters().preemptions, caller.scheduler.num_running()), (0, 2));
    caller.scheduler.audit().unwrap();
}

#[test]
fn a_fork() {
    let make = || {
        let mut config = config(30);
        config.groups = vec![GroupSpec::FULL, GroupSpec::sliding(6)];
        let mut caller = Caller::new(config);
        caller.submit(prompt(1, 10), 6);
        caller.step();
        caller
    };
    let fork = |caller: &mut Caller| caller.scheduler.fork(RequestId(1), up_to(8), 30);
    let questions = refuse_each(make, fork).unwrap();
    assert_eq!(questions, 1 + 2, "a row, and a table in each group");
}

#[test]
fn a_truncation_also_in_flight() {
    let idle = || {
        let mut caller = Caller::new(config(30));
        caller.submit(prompt(1, 14), 6);
        caller.step();
        caller
    };
    let in_flight = || {
        let mut caller = Caller::new(config(30));
        caller.submit(prompt(1, 14), 6);
        caller.plan().unwrap();
        caller
    };
    let truncate = |caller: &mut Caller| caller.scheduler.truncate(RequestId(1), 6);
    assert_eq!(refuse_each(idle, truncate).unwrap(), 2);
    assert!(refuse_each(in_flight, truncate).unwrap() >= 2);
}

/// Others run on: who is refused keeps its place, and all end as if nothing had been.
#[test]
fn a_plan_goes_on_without_who_was_refused() {
    let make = || {
        let mut caller = Caller::new(config(30));
        caller.submit(prompt(1, 10), 6);
        caller.submit(prompt(2, 8), 6);
        caller.step();
        caller.scheduler.fork(RequestId(1), up_to(6), 30).unwrap();
        caller.submit(prompt(2, 12), 4);
        caller
    };
    let mut twin = make();
    twin.drain();
    let mut refusals = 0;
    for nth in 1.. {
        let mut caller = make();
        refuse(nth);
        let sizes = caller.plan().unwrap();
        if refuse(0) > 0 {
            assert_eq!(sizes.seqs, 4);
            break;
        }
        refusals += 1;
        assert!((1..4).contains(&sizes.seqs), "refusal {nth}: {} run", sizes.seqs);
        caller.scheduler.audit().unwrap();
        caller.commit(&sizes);
        caller.drain();
        caller.scheduler.audit().unwrap();
        let (pool, counters) = (caller.scheduler.pool(), caller.scheduler.counters());
        assert_eq!(pool.num_free(), pool.usable());
        assert_eq!(counters.finished, twin.scheduler.counters().finished);
    }
    assert!(refusals >= 5, "{refusals}");
}

/// Begins a plan whose first step is refused.
fn begin_plan(caller: &mut Caller) {
    refuse(1);
    let outcome = caller.plan();
    assert_eq!(refuse(0), 0);
    assert!(matches!(outcome, Err(Error::OutOfBlocks { .. } | Error::BeingWritten { .. })), "{outcome:?}");
}

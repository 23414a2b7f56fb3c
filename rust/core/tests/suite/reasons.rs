//! Reasons by example: what a request is told, now and after its end; and that every reason of the closed enum can occur.
//!
//! Before: calls on a scheduler. After: its timelines. That every wait has a reason is checked by the driver after each plan of every
//! random schedule (`driver/reasons.rs`).

#![cfg(feature = "mutants")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use blocktable_core::error::Error;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::reason::Reason;
use blocktable_core::{Committed, Config, Scheduler};

use crate::broken::Checked;
use crate::refused::{Caller, config, prompt, up_to};
use crate::schedule_script::schedules;
use crate::seed;

#[test]
fn the_timeline_of_a_request_that_waited_ran_and_ended() {
    // Three usable blocks of 4 rows: the second prompt waits until the first has ended.
    let mut caller = Caller::new(config(4));
    let first = caller.submit(prompt(1, 8), 2);
    let second = caller.submit(prompt(2, 8), 1);
    caller.step();
    let told = caller.scheduler.explain(second).unwrap();
    assert_eq!(told.waits_for, Some(Reason::OutOfBlocks { needed: 2, free: 1, promised: 0 }));
    caller.drain();
    let told = caller.scheduler.explain(second).unwrap();
    let names: Vec<&str> = told.records.iter().map(|record| record.reason.name()).collect();
    assert_eq!(
        names,
        [
            "submitted",
            "behind_head",
            "out_of_blocks",
            "miss_never_seen",
            "admitted",
            "evicted",
            "first_token",
            "finished_length"
        ]
    );
    assert_eq!(told.waits_for, None);
    let text = told.to_string();
    assert!(
        text.starts_with("request 2 (ended)\n  +0.000000 s: was submitted: 8 tokens, 1 outputs at most\n"),
        "{text}"
    );
    assert!(text.contains("waits for 2 KV blocks: 0 are free, 0 of them promised to others (2 times in"), "{text}");
    assert_eq!(caller.scheduler.explain(first).unwrap().records.last().unwrap().reason.name(), "finished_length");
}

#[test]
fn the_last_1024_that_ended_are_known_and_no_more() {
    let mut caller = Caller::new(config(4));
    for family in 1..=1030 {
        let id = caller.submit(prompt(family % 50, 3), 1);
        caller.step();
        assert_eq!(id, RequestId(u64::from(family)));
    }
    let known: Vec<u64> = (1..=1031).filter(|&id| caller.scheduler.explain(RequestId(id)).is_ok()).collect();
    assert_eq!(known, (7..=1030).collect::<Vec<u64>>());
    let unknown = Error::UnknownRequest { request: RequestId(6) };
    assert_eq!(caller.scheduler.explain(RequestId(6)), Err(unknown));
}

#[test]
fn a_steady_step_notes_nothing() {
    let mut caller = Caller::new(Config { max_model_len: 512, ..config(120) });
    let id = caller.submit(prompt(1, 8), 400);
    caller.step();
    let before = (caller.scheduler.explain(id).unwrap(), total(&caller.scheduler));
    for _ in 0..300 {
        caller.step();
    }
    let after = (caller.scheduler.explain(id).unwrap(), total(&caller.scheduler));
    assert_eq!(before, after);
}

#[test]
fn a_listener_hears_every_note() {
    let mut caller = Caller::new(config(4));
    caller.scheduler.listen_to_notes(1000);
    caller.submit(prompt(1, 8), 2);
    caller.submit(prompt(2, 8), 1);
    caller.drain();
    let mut lines = String::new();
    assert_eq!(caller.scheduler.take_notes(&mut lines), Some(0));
    assert_eq!(lines.lines().count() as u64, total(&caller.scheduler));
    for line in lines.lines() {
        let read: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let reason = Reason::ALL.iter().find(|reason| reason.name() == read["reason"]).expect("a known name");
        assert_eq!(read["code"], reason.code());
    }
}

/// Random schedules bring most; the rest, one scene each.
#[test]
fn every_reason_can_occur() {
    let seen = RefCell::new(BTreeMap::new());
    seed::run_cases("reasons", 900, &schedules(), |schedule| {
        add(&mut seen.borrow_mut(), &schedule.run()?.scheduler);
        Checked::Ok(())
    });
    let mut seen = seen.into_inner();
    add(&mut seen, &refused_forks().scheduler);
    add(&mut seen, &other_askers().scheduler);
    add(&mut seen, &a_writer_that_failed().scheduler);
    add(&mut seen, &drafts_in_flight().scheduler);
    #[cfg(feature = "mutants")]
    add(&mut seen, &refused_steps().scheduler);
    #[cfg(not(feature = "mutants"))]
    seen.extend([("step_refused", 1), ("refused", 1)]);
    let never: Vec<&str> = Reason::ALL
        .iter()
        .map(|reason| reason.name())
        .filter(|name| seen.get(name).is_none_or(|&times| times == 0))
        .collect();
    assert!(never.is_empty(), "these never occurred: {never:?}");
}

fn total(scheduler: &Scheduler) -> u64 {
    scheduler.reasons().map(|(_, times)| times).sum()
}

fn add(seen: &mut BTreeMap<&'static str, u64>, scheduler: &Scheduler) {
    scheduler.reasons().for_each(|(reason, times)| *seen.entry(reason.name()).or_default() += times);
}

/// A fork of nobody, and one without a row.
fn refused_forks() -> Caller {
    let mut caller = Caller::new(Config { max_num_seqs: 1, ..config(9) });
    let id = caller.submit(prompt(1, 8), 6);
    caller.step();
    assert_eq!(
        caller.scheduler.fork(RequestId(77), up_to(9), 1),
        Err(Error::UnknownRequest { request: RequestId(77) })
    );
    assert_eq!(caller.scheduler.fork(id, up_to(9), 1), Err(Error::NoFreeRow { rows: 1 }));
    caller
}

/// Two equal prompts: the second shares in one step what the first computes, and the step fails.
fn a_writer_that_failed() -> Caller {
    let mut caller = Caller::new(config(20));
    caller.submit(prompt(1, 9), 1);
    caller.submit(prompt(1, 9), 1);
    let sizes = caller.plan().unwrap();
    caller.scheduler.fail(StepId(sizes.step)).unwrap();
    caller
}

/// Two steps in flight: the first verifies a draft, so the second leaves the request out.
fn drafts_in_flight() -> Caller {
    let mut caller = Caller::new(Config { overlap_depth: 2, max_draft_tokens: 1, ..config(20) });
    for family in [1, 2] {
        caller.submit(prompt(family, 9), 4);
    }
    caller.step();
    caller.scheduler.propose(&[0], &[0, 1], &[7]).unwrap();
    caller.plan().unwrap();
    caller.plan().unwrap();
    caller
}

/// The same tokens in another domain, and evicted.
fn other_askers() -> Caller {
    use blocktable_core::chain::{Domain, Identity};
    let mut caller = Caller::new(Config { explain_misses: true, ..config(4) });
    caller.submit(prompt(1, 9), 1);
    caller.drain();
    let other = Identity::of(Domain::Tenant(b"other".as_slice().into()));
    let hashed = caller.scheduler.prompt(prompt(1, 9), other).unwrap();
    let id = caller.scheduler.submit(hashed, up_to(1), 5).unwrap();
    caller.drain();
    // It is counted, and the request is told no more than it may know.
    let told = caller.scheduler.explain(id).unwrap();
    assert!(told.records.iter().any(|record| record.reason.name() == "miss_never_seen"), "{told}");
    assert!(!told.records.iter().any(|record| record.reason.name() == "miss_other_domain"), "{told}");
    caller.submit(prompt(1, 9), 1);
    caller.drain();
    let step = StepId(caller.scheduler.steps());
    assert!(caller.scheduler.commit(step, &[], &[0], 9, &mut Committed::default()).is_err());
    caller
}

/// An admission, a growth and a fork, one step of which the pool refuses.
#[cfg(feature = "mutants")]
fn refused_steps() -> Caller {
    use blocktable_core::refusal::refuse;
    let mut caller = Caller::new(config(9));
    let id = caller.submit(prompt(1, 8), 6);
    refuse(1);
    assert!(caller.plan().is_err());
    refuse(0);
    let waits_for = caller.scheduler.explain(id).unwrap().waits_for;
    assert_eq!(waits_for, Some(Reason::StepRefused {}));
    caller.step();
    refuse(2);
    assert!(caller.scheduler.fork(id, up_to(9), 1).is_err());
    refuse(0);
    caller
}

/// A lone request that does not fit is left to wait by a planted fault: the plan says who, for what, and where the blocks are.
#[cfg(feature = "mutants")]
#[test]
fn a_stall_is_reported_with_its_numbers() {
    use blocktable_core::mutant;
    let mut caller = Caller::new(config(4));
    let id = caller.submit(prompt(1, 10), 9);
    caller.step();
    assert!(mutant::choose(Some("never_ends_alone")));
    let report = (0..9).find_map(|_| match caller.plan() {
        Err(Error::Stalled(stall)) => Some(stall),
        outcome => {
            caller.commit(&outcome.unwrap());
            None
        }
    });
    assert!(mutant::choose(None));
    let stall = report.expect("a stall");
    assert_eq!((stall.request, stall.is_running), (id, true));
    assert_eq!(stall.reason, Some(Reason::NoVictim { needed: 1, free: 0, promised: 0 }));
    assert_eq!((stall.needed, stall.free, stall.promised, stall.parked, stall.pinned), (1, 0, 0, 0, 0));
    assert_eq!((stall.running, stall.waiting, stall.held_by.clone()), (1, 0, vec![(id, 3)]));
    assert_eq!(
        stall.to_string(),
        "request 1 cannot move: it runs and got no token (runs, but waits for 1 KV blocks: 0 are free, 0 of them promised, and nobody \
         below it has enough); it needs 1 KV blocks more, 0 are free (0 promised), 0 parked, 0 pinned; 1 run, 0 wait; request 1 holds 3"
    );
}

//! Has each step of an operation refused in turn, and compares all that the scheduler remembers.
//!
//! Before: a scheduler in some state, made the same way each time, and an operation. After: each refusal left the state as it was,
//! and the operation, done again, did what it does in a twin that was never disturbed.

#![cfg(feature = "mutants")]

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Result;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::plan::{PlanMemory, Sizes};
use blocktable_core::refusal::refuse;
use blocktable_core::request::Limits;
use blocktable_core::{Committed, Scheduler};

use crate::broken::{Checked, audited, broken, ensure};

/// A scheduler with the memory of its plans.
pub struct Caller {
    pub scheduler: Scheduler,
    memories: [(Vec<i64>, Vec<i32>); 2],
}

impl Caller {
    pub fn new(config: Config) -> Self {
        let scheduler = Scheduler::new(config).expect("a valid configuration");
        let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
        Caller { memories: [memory(), memory()], scheduler }
    }

    pub fn submit(&mut self, tokens: Vec<u32>, max_tokens: u32) -> RequestId {
        let prompt = self.scheduler.prompt(tokens, Identity::of(Domain::Deployment)).expect("a valid prompt");
        self.scheduler.submit(prompt, up_to(max_tokens), 1).expect("it fits")
    }

    pub fn plan(&mut self) -> Result<Sizes> {
        let (staging, tables) = &mut self.memories[(self.scheduler.steps() % 2) as usize];
        self.scheduler.plan(10, PlanMemory { staging, tables })
    }

    pub fn commit(&mut self, sizes: &Sizes) {
        let (tokens, starts) = (vec![7; sizes.samples], (0..=sizes.samples as i64).collect::<Vec<_>>());
        let step = StepId(sizes.step);
        self.scheduler.commit(step, &tokens, &starts, 20, &mut Committed::default()).expect("the step in flight");
    }

    /// A step, or the plan that has nothing to run.
    pub fn step(&mut self) -> Sizes {
        let sizes = self.plan().expect("a plan");
        if sizes.seqs > 0 {
            self.commit(&sizes);
        }
        sizes
    }

    /// Steps until nobody is left and the last plan had nothing to tell.
    pub fn drain(&mut self) {
        while self.step().seqs > 0 {}
        self.step();
    }

    /// What the scheduler and both block tables hold.
    pub fn state(&self) -> String {
        format!("{}tables: {:?}", self.scheduler.state(), self.memories.each_ref().map(|(_, tables)| tables))
    }
}

/// Does `operation` with its first, second, ... step refused, each time in a new state, until all of them are granted. Returns how
/// many may be refused.
pub fn refuse_each<T: PartialEq + std::fmt::Debug>(
    make: impl Fn() -> Caller,
    operation: impl Fn(&mut Caller) -> Result<T>,
) -> Checked<u32> {
    let mut twin = make();
    let expected = operation(&mut twin);
    ensure(expected.is_ok(), "twin", || format!("{expected:?}"))?;
    let after = twin.state();
    for nth in 1.. {
        let mut caller = make();
        let before = caller.state();
        refuse(nth);
        let outcome = operation(&mut caller);
        if refuse(0) > 0 {
            ensure(outcome == expected, "transaction", || format!("{outcome:?} is not {expected:?}"))?;
            same("undisturbed", &caller.state(), &after)?;
            return Ok(nth - 1);
        }
        ensure(outcome.is_err(), "transaction", || format!("refusal {nth} is not told: {outcome:?}"))?;
        same(&format!("refusal {nth}, {outcome:?}"), &caller.state(), &before)?;
        audited(caller.scheduler.audit())?;
        let again = operation(&mut caller);
        ensure(again == expected, "transaction", || format!("after refusal {nth}: {again:?} is not {expected:?}"))?;
        same(&format!("done again after refusal {nth}"), &caller.state(), &after)?;
        audited(caller.scheduler.audit())?;
    }
    unreachable!("some number of steps is enough")
}

fn same(when: &str, now: &str, must_be: &str) -> Checked {
    let differs = now.lines().zip(must_be.lines()).find(|(now, must_be)| now != must_be);
    match differs {
        Some((now, must_be)) => broken("transaction", format!("{when}:\n{now}\nmust be\n{must_be}")),
        None => ensure(now == must_be, "transaction", || format!("{when}: the states are not equally long")),
    }
}

/// Two prompts of 14 tokens in blocks of 4 have left all that they published in a pool of 9 blocks, and a third one waits. It begins
/// like the first for 2 blocks and 2 rows: two hits out of the middle of the queue, the source of a copy, and blocks of the second.
pub fn a_prompt_waits_whose_blocks_are_all_cached() -> Caller {
    let mut caller = Caller::new(Config { enable_partial_hits: true, ..config(9) });
    for family in [1, 2] {
        caller.submit(prompt(family, 14), 3);
        caller.drain();
    }
    let mut tokens = prompt(1, 22);
    tokens[10..].fill(5);
    caller.submit(tokens, 2);
    caller
}

/// The admission of that prompt.
pub fn an_admission_is_refused() -> Checked<u32> {
    refuse_each(a_prompt_waits_whose_blocks_are_all_cached, Caller::plan)
}

pub fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

pub fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}

/// Blocks of 4, and events.
pub fn config(num_blocks: u32) -> Config {
    Config {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_waiting: 16,
        event_buffer_size: 64,
        explain_misses: true,
        ..Config::new(num_blocks, 4, 1009, 64)
    }
}

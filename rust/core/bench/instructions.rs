//! A fixed schedule, for `tests/instructions.py` to count its instructions: the same calls in every run, nothing read, nothing printed.
//!
//! `instructions CASE STEPS [BLOCKS]`, in a pool of as many blocks as fit, or of BLOCKS. Before: 1,024 requests run, their places in their blocks spread evenly. After: so many steps more, each
//! with a new token for every request. The difference of two runs that differ in STEPS alone is what the steps cost. Case `decode`:
//! nobody ends. Case `turnover`: in each step 32 end and 32 come, who share two blocks of their prompts; so hits, releases and
//! evictions are counted too. Built with feature `stub_hash`, since valgrind hides the processor's SHA.

use std::process::ExitCode;

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::ids::{StepId, TokenId};
use blocktable_core::plan::PlanMemory;
use blocktable_core::request::Limits;
use blocktable_core::{Committed, Config, Scheduler};

const SEQS: u32 = 1024;
const BLOCK_SIZE: u32 = 16;
const VOCAB_SIZE: u32 = 32_000;
const MAX_MODEL_LEN: u32 = 1024;
/// Outputs of a request that ends.
const SHORT: u32 = 32;

#[derive(Clone, Copy, PartialEq)]
enum Case {
    Decode,
    Turnover,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let case = match arguments.next().as_deref() {
        Some("decode") => Case::Decode,
        Some("turnover") => Case::Turnover,
        _ => return usage(),
    };
    let Some(steps) = arguments.next().and_then(|steps| steps.parse().ok()) else { return usage() };
    let num_blocks = match arguments.next().map(|blocks| blocks.parse()) {
        None => 1 + SEQS * if case == Case::Decode { MAX_MODEL_LEN / BLOCK_SIZE } else { 6 },
        Some(Ok(num_blocks)) => num_blocks,
        Some(Err(_)) => return usage(),
    };
    run(case, steps, num_blocks);
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("instructions decode|turnover STEPS [BLOCKS]");
    ExitCode::from(2)
}

fn run(case: Case, steps: u32, num_blocks: u32) {
    let mut scheduler = Scheduler::new(Config {
        max_num_seqs: SEQS,
        max_num_batched_tokens: 64 * SEQS,
        ..Config::new(num_blocks, BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN)
    })
    .expect("sizes within their bounds");
    let mut next = 0;
    let mut submit = |scheduler: &mut Scheduler, max_tokens: u32| {
        let prompt = scheduler.prompt(prompt(case, next), Identity::of(Domain::Deployment)).expect("no field is set");
        next += 1;
        let limits = Limits { max_tokens, ..Limits::default() };
        scheduler.submit(prompt, limits, 0).expect("room for one more");
    };
    for at in 0..SEQS {
        submit(&mut scheduler, if case == Case::Decode { MAX_MODEL_LEN } else { 2 + at % SHORT });
    }
    let mut memories = [(); 2].map(|()| (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]));
    let starts: Vec<i64> = (0..=i64::from(SEQS)).collect();
    let mut tokens = vec![0; SEQS as usize];
    let mut committed = Committed::default();
    for step in 0..=steps {
        let (staging, tables) = &mut memories[(scheduler.steps() % 2) as usize];
        let sizes = scheduler.plan(u64::from(step), PlanMemory { staging, tables }).expect("no step is in flight");
        assert_eq!(sizes.samples, SEQS as usize, "everybody runs, and brings a token");
        for (at, token) in (0..).zip(&mut tokens) {
            *token = i64::from((step * 7919 + at) % VOCAB_SIZE);
        }
        let commit = scheduler.commit(StepId(sizes.step), &tokens, &starts, u64::from(step), &mut committed);
        commit.expect("the step in flight");
        for _ in 0..committed.ended.len() {
            submit(&mut scheduler, SHORT);
        }
    }
}

/// The tokens of request number `number`.
fn prompt(case: Case, number: u32) -> Vec<TokenId> {
    let own = |len: u32| (0..len).map(move |at| (number * 31 + at * 7 + 1) % VOCAB_SIZE);
    match case {
        Case::Decode => own(BLOCK_SIZE + number % BLOCK_SIZE).collect(),
        Case::Turnover => (0..2 * BLOCK_SIZE).chain(own(8)).collect(),
    }
}

//! A change of weights under waiting and running requests, on the scheduler alone: rows of two versions have no cold answer.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::plan::PlanMemory;
use blocktable_core::request::Limits;
use blocktable_core::{Committed, Scheduler};

use super::worlds::{scene, tokens};
use crate::broken::{Checked, audited, ensure};

/// A scheduler whose model answers 5 to everything.
struct Bench {
    scheduler: Scheduler,
    memories: [(Vec<i64>, Vec<i32>); 2],
}

impl Bench {
    fn new(config: Config) -> Self {
        let scheduler = Scheduler::new(config).expect("a valid configuration");
        let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
        let memories = [memory(), memory()];
        Bench { scheduler, memories }
    }

    fn submit(&mut self, prompt: &[u32], max_tokens: u32) -> RequestId {
        let prompt =
            self.scheduler.prompt(prompt.to_vec(), Identity::of(Domain::Deployment)).expect("a valid identity");
        self.scheduler.submit(prompt, Limits { max_tokens, ..Limits::default() }, 0).expect("it fits")
    }

    /// Plans; the samples of the step, and its number.
    fn plan(&mut self) -> (usize, StepId) {
        let (staging, tables) = &mut self.memories[(self.scheduler.steps() % 2) as usize];
        let sizes = self.scheduler.plan(0, PlanMemory { staging, tables }).expect("a plan");
        (sizes.samples, StepId(sizes.step))
    }

    fn step(&mut self) -> Checked {
        let (samples, step) = self.plan();
        let starts: Vec<i64> = (0..=samples as i64).collect();
        self.scheduler.commit(step, &vec![5; samples], &starts, 0, &mut Committed::default()).expect("a commit");
        audited(self.scheduler.audit())
    }

    fn run(&mut self) -> Checked {
        while self.scheduler.num_running() + self.scheduler.num_waiting() > 0 {
            self.step()?;
        }
        Ok(())
    }

    /// Prompt tokens that a request found.
    fn finds(&mut self, prompt: &[u32], wanted: usize) -> Checked {
        let id = self.submit(prompt, 1);
        self.run()?;
        self.found(id, wanted)
    }

    fn found(&self, id: RequestId, wanted: usize) -> Checked {
        let found = self.scheduler.num_cached_tokens(id).expect("a known request");
        ensure(found == wanted, "weights", || format!("request {} found {found} tokens, not {wanted}", id.0))
    }
}

/// One request runs across the change, one waits, one comes later; then the old weights come back.
pub fn other_weights_find_nothing_of_the_old_ones() -> Checked {
    let mut bench = Bench::new(Config { max_num_seqs: 1, ..scene().config().clone() });
    let (prompt, other) = (tokens(1, 18), tokens(2, 18));
    bench.finds(&prompt, 0)?;
    bench.finds(&prompt, 16)?;
    let runs = bench.submit(&other, 9);
    bench.step()?;
    let waits = bench.submit(&prompt, 1);
    // Hashed before the change and submitted after it.
    let late = bench.scheduler.prompt(prompt.clone(), Identity::of(Domain::Deployment)).expect("a valid identity");
    let (samples, step) = bench.plan();
    let refused = bench.scheduler.set_weights_version(b"2");
    ensure(refused == Err(Error::StepInFlight { step }), "weights", || format!("in flight: {refused:?}"))?;
    let starts: Vec<i64> = (0..=samples as i64).collect();
    bench.scheduler.commit(step, &vec![5; samples], &starts, 0, &mut Committed::default()).expect("a commit");
    let mixed = bench.scheduler.set_weights_version(b"2");
    ensure(mixed == Ok(1), "weights", || format!("{mixed:?} requests hold old rows"))?;
    let late = bench.scheduler.submit(late, Limits { max_tokens: 1, ..Limits::default() }, 0).expect("it fits");
    bench.run()?;
    ensure(bench.scheduler.is_mixed(runs).is_err(), "weights", || "it has ended".to_owned())?;
    bench.found(waits, 0)?;
    bench.found(late, 16)?;
    bench.finds(&prompt, 16)?;
    // What the running one computed by both is under no version.
    let whole: Vec<u32> = [&other[..], &[5; 8]].concat();
    bench.finds(&whole, 0)?;
    bench.scheduler.set_weights_version(b"").expect("nothing is in flight");
    bench.finds(&whole, 16)
}

//! Eight equal cold prompts, the first of which is disturbed after some step: nothing that was published by then is computed again, and
//! nothing else is computed twice.
//!
//! Before: the budget of a step and what happens. After: every plan was compared with what the index published before it, every answer
//! with the cold one, and what was computed after the disturbance with what was missing then: the rest of the prompt once, and a
//! last token for each sequence that had none.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::ids::Key;
use blocktable_core::policy::PolicyKind;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::Limits;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;

pub const PROMPT: usize = 1009;
const BLOCK: usize = 16;
const SHARERS: usize = 8;

/// What happens to the first of the eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    /// Nothing.
    None,
    /// It is aborted while this step is in flight.
    AbortedInFlight(usize),
    /// It is aborted when this step is committed.
    Aborted(usize),
    /// This step fails.
    Failed(usize),
    /// An older request grows in a pool of so many blocks and takes its place.
    Crowded(u32),
    /// A request of a higher class comes when this step is committed. It needs one block more than is promised to nobody, and takes none
    /// of what is published.
    Displaced(usize),
}

impl Disturbance {
    /// Whether it strikes in step `step`, so that only what was published by then is certain from there on.
    fn happens_at(self, step: usize) -> bool {
        use Disturbance::{Aborted, AbortedInFlight, Displaced, Failed};
        [AbortedInFlight(step), Aborted(step), Failed(step), Displaced(step)].contains(&self)
    }
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Rows of the prompt that all plans computed.
    pub prompt_rows: usize,
    /// Rows that preempted requests had computed.
    pub recomputed: usize,
    /// In which step the first of the eight was preempted first.
    pub preempted_in: Option<usize>,
}

/// Runs the eight to their ends.
pub fn run(budget: u32, disturbance: Disturbance) -> Checked<Outcome> {
    let num_blocks = if let Disturbance::Crowded(num_blocks) = disturbance { num_blocks } else { 128 };
    let mut driver = Driver::new(config(num_blocks, budget));
    if num_blocks < 128 {
        driver.submit((500..516).collect(), Limits { max_tokens: 64, ..Limits::default() })?;
    }
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| (331 + i * 17) % 1009).collect();
    let hashed = driver.scheduler.prompt(prompt.clone(), Identity::of(Domain::Deployment)).expect("a valid identity");
    let mut ids = Vec::new();
    for _ in 0..SHARERS {
        let id = driver.submit(prompt.clone(), Limits { max_tokens: 4, ..Limits::default() })?;
        ids.extend(id);
    }
    let mut outcome = Outcome::default();
    let mut floor = None;
    let mut due = None;
    for step in 1.. {
        let published = floor.unwrap_or_else(|| published_rows(&driver, hashed.keys()));
        if !driver.plan()? {
            break;
        }
        let plan = driver.plans.last().expect("a plan");
        if plan.preempted.contains(&ids[0]) {
            outcome.preempted_in.get_or_insert(step);
        }
        let rows = driver.step.iter().flat_map(|step| &step.entries).filter(|entry| ids.contains(&entry.id));
        for entry in rows {
            let again = entry.start..(entry.start + entry.chunk).min(PROMPT - 1).min(published);
            ensure(again.is_empty(), "reuse", || {
                format!("request {} computes rows {again:?} in step {step}, {published} are published", entry.id)
            })?;
            outcome.prompt_rows += (entry.start + entry.chunk).min(PROMPT).saturating_sub(entry.start);
        }
        if disturbance == Disturbance::AbortedInFlight(step) {
            driver.abort(ids[0])?;
        }
        if disturbance == Disturbance::Failed(step) {
            driver.fail()?
        } else {
            driver.commit(&[])?
        }
        if disturbance == Disturbance::Aborted(step) {
            driver.abort(ids[0])?;
        }
        if disturbance == Disturbance::Displaced(step) {
            let unpromised = driver.scheduler.pool().num_free() - driver.scheduler.num_promised();
            let prompt = (0..unpromised * BLOCK as u32 + 8).map(|i| (700 + i * 13) % 1009).collect();
            let turn = Turn { priority: -1, ..Turn::default() };
            let limits = Limits { max_tokens: 4, ..Limits::default() };
            let asked = Asked { turn, ..Asked::default() };
            driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)?;
        }
        if disturbance.happens_at(step) {
            let published = published_rows(&driver, hashed.keys());
            floor = Some(published);
            let clients = ids.iter().map(|id| &driver.clients[id]);
            let cold = clients.filter(|client| client.is_live() && client.outputs().is_empty()).count();
            due = (cold > 0).then_some(outcome.prompt_rows + PROMPT - published + cold - 1);
        }
    }
    driver.drain()?;
    ensure(due.is_none_or(|due| due == outcome.prompt_rows), "twice", || {
        format!("{} rows of the prompt were computed, {due:?} were due", outcome.prompt_rows)
    })?;
    outcome.recomputed = driver.scheduler.counters().recomputed_tokens as usize;
    Ok(outcome)
}

/// Rows of the prompt's first blocks that are published, without a gap.
fn published_rows(driver: &Driver, keys: &[Key]) -> usize {
    let is_published =
        |key: &&Key| matches!(driver.scheduler.pool().index().lookup(key), Some((_, KeyState::Published)));
    keys.iter().take_while(is_published).count() * BLOCK
}

fn config(num_blocks: u32, budget: u32) -> Config {
    let queue = QueueRules {
        policy: PolicyKind::Priority,
        preempt_for_waiting: true,
        estimate_growth: false,
        ..QueueRules::default()
    };
    Config {
        max_num_seqs: 16,
        max_num_batched_tokens: budget,
        max_waiting: 16,
        queue,
        ..Config::new(num_blocks, BLOCK as u32, 1009, 1100)
    }
}

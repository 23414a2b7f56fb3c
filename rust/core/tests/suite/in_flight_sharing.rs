//! Identical cold prompts are computed once, whatever happens to the one that computes (design 6).
//!
//! Before: eight equal prompts of 1,009 tokens at once, in blocks of 16, with a budget for all of it or for a sixteenth. After: who
//! shares a block computes its last token only; what was published when the writer was aborted, preempted or failed stays in use, and
//! what was lost is computed once more, by one of them.

use blocktable_core::config::Config;
use blocktable_core::request::Limits;

use crate::broken::Checked;
use crate::driver::Driver;
use crate::shared_prompt::{Disturbance, PROMPT, run};

const BUDGETS: [u32; 2] = [2048, 64];
/// The prompt takes 16 steps at 64 tokens a step; a few more until the answers end.
const STEPS: std::ops::RangeInclusive<usize> = 1..=21;

#[test]
fn eight_equal_prompts_compute_one_and_seven_last_tokens() -> Checked {
    for budget in BUDGETS {
        assert_eq!(run(budget, Disturbance::None)?.prompt_rows, PROMPT + 7, "budget {budget}");
    }
    Ok(())
}

#[test]
fn an_abort_of_the_first_after_any_step_loses_nothing_published() -> Checked {
    for step in STEPS {
        for budget in BUDGETS {
            run(budget, Disturbance::Aborted(step))?;
            run(budget, Disturbance::AbortedInFlight(step))?;
        }
    }
    Ok(())
}

#[test]
fn a_failure_of_any_step_loses_nothing_published() -> Checked {
    for step in STEPS {
        for budget in BUDGETS {
            run(budget, Disturbance::Failed(step))?;
        }
    }
    Ok(())
}

/// The prompt takes steps 1 to 16. In each but the last somebody of a higher class takes the place of the first.
#[test]
fn a_preemption_of_the_first_after_any_step_loses_nothing_published() -> Checked {
    for step in 1..=15 {
        let outcome = run(64, Disturbance::Displaced(step))?;
        assert_eq!(outcome.preempted_in, Some(step + 1), "the first is preempted in the next step");
    }
    Ok(())
}

/// In a pool that is too small for all, what is published may be evicted by the one who takes the place: the bound is what was
/// computed once, a last token for each of the others, and what the preempted had computed.
#[test]
fn a_preemption_of_the_first_in_a_crowded_pool_costs_what_it_had_computed() -> Checked {
    let mut steps = std::collections::BTreeSet::new();
    for num_blocks in 66..=70 {
        for budget in BUDGETS {
            let outcome = run(budget, Disturbance::Crowded(num_blocks))?;
            let due = PROMPT + 7 + outcome.recomputed;
            assert!(outcome.prompt_rows <= due, "{} rows, {due} with what was preempted", outcome.prompt_rows);
            steps.extend(outcome.preempted_in);
        }
    }
    assert!(steps.len() > 1, "the first was preempted in steps {steps:?} only");
    Ok(())
}

/// The text of the first fills a block in the plan in which somebody who lost that very block, of another writer, looks for it again.
#[test]
fn a_block_that_a_decode_fills_is_found_in_the_same_plan() -> Checked {
    let limits = |max_tokens| Limits { max_tokens, ..Limits::default() };
    let new_driver = || Driver::new(Config { max_num_batched_tokens: 64, ..Config::new(32, 4, 1009, 64) });
    let prompt = vec![1, 2, 3, 4, 5];
    let mut earlier = new_driver();
    let id = earlier.submit(prompt.clone(), limits(8))?.expect("it fits");
    earlier.drain()?;
    let text = earlier.clients[&id].tokens.clone();

    let mut driver = new_driver();
    driver.submit(prompt, limits(8))?;
    driver.run_step()?;
    driver.run_step()?;
    let longer = |tail: u32| [&text[..8], &[tail; 3]].concat();
    let writer = driver.submit(longer(101), limits(4))?.expect("it fits");
    let sharer = driver.submit(longer(102), limits(4))?.expect("it fits");
    let rows_of = |driver: &Driver, id| {
        let mut entries = driver.step.iter().flat_map(|step| &step.entries);
        entries.find(|entry| entry.id == id).map(|entry| entry.start..entry.start + entry.chunk)
    };
    driver.plan()?;
    assert_eq!(rows_of(&driver, writer), Some(4..11), "it found the first block, and fills the second");
    assert_eq!(rows_of(&driver, sharer), Some(8..11), "it shares both");
    driver.abort(writer)?;
    driver.commit(&[])?;
    driver.plan()?;
    assert_eq!(rows_of(&driver, sharer), Some(8..11), "it has the first, and shares the second with who fills it now");
    driver.commit(&[])?;
    driver.drain()
}

//! Why a prefix was found no further: each reason from a scene that has no other.

use blocktable_core::chain::Identity;
use blocktable_core::config::Config;
use blocktable_core::ids::RequestId;
use blocktable_core::miss::Miss;

use super::worlds::{adapted, pictured, plain, salted, scene, tenant, tokens};
use crate::broken::{Checked, ensure};
use crate::driver::Driver;

/// Asks in turn; each must be told its reason, and those of other domains are counted as such.
fn told(driver: &mut Driver, turns: &[(Identity, Vec<u32>, Miss)]) -> Checked {
    for (at, (identity, prompt, wanted)) in turns.iter().enumerate() {
        let limits = blocktable_core::request::Limits { max_tokens: 3, ..Default::default() };
        let before = driver.scheduler.misses().of(*wanted);
        let id = driver.submit_as(identity.clone(), prompt.clone(), limits)?.expect("it fits");
        let unknown = driver.scheduler.miss(RequestId(id));
        ensure(unknown == Ok(None), "miss", || format!("turn {at}: {unknown:?} before it was admitted"))?;
        driver.drain()?;
        let found = driver.scheduler.miss(RequestId(id)).expect("it ended lately");
        ensure(found == Some(wanted.of_request()), "miss", || format!("turn {at}: {found:?}, not {wanted:?}"))?;
        let counted = driver.scheduler.misses().of(*wanted) - before;
        ensure(counted == 1, "miss", || format!("turn {at}: {counted} more for {wanted:?}"))?;
    }
    Ok(())
}

pub fn every_miss_has_its_reason() -> Checked {
    let prompt = || tokens(1, 18);
    let public = |name| Identity { public_tokens: 8, ..tenant(name) };
    let mut driver = scene();
    let turns = [
        (plain(), tokens(1, 4), Miss::ShorterThanBlock),
        (plain(), prompt(), Miss::NeverSeen),
        (plain(), prompt(), Miss::Nothing),
        (plain(), tokens(1, 30), Miss::NeverSeen),
        (salted(9, 18, "x"), prompt(), Miss::OtherSalt),
        (adapted("x", 1), prompt(), Miss::OtherAdapter),
        (adapted("x", 2), prompt(), Miss::OtherAdapter),
        (Identity { adapter: adapted("x", 2).adapter, ..salted(0, 18, "x") }, prompt(), Miss::OtherSalt),
        (pictured(9, 12, "cat"), prompt(), Miss::NeverSeen),
        (tenant("a"), prompt(), Miss::OtherDomain),
        (public("a"), prompt(), Miss::OtherDomain),
        (public("b"), prompt(), Miss::OtherDomain),
        (public("b"), prompt(), Miss::Nothing),
        (tenant("b"), tokens(2, 18), Miss::NeverSeen),
    ];
    told(&mut driver, &turns)?;
    // A pool of nine blocks: what another prompt needs pushes the first one out.
    let mut driver = Driver::new(Config { num_blocks: 10, ..scene().config().clone() });
    let turns = [
        (plain(), prompt(), Miss::NeverSeen),
        (plain(), tokens(2, 30), Miss::NeverSeen),
        (plain(), prompt(), Miss::Evicted),
        (plain(), prompt(), Miss::Nothing),
    ];
    told(&mut driver, &turns)?;
    driver.reset_prefix_cache()?;
    told(&mut driver, &[(plain(), prompt(), Miss::Evicted)])
}

/// Whoever is admitted again after a preemption is not counted again; without the option nothing is told.
pub fn every_admitted_request_counts_once() -> Checked {
    let small = Config { num_blocks: 11, block_size: 2, max_num_seqs: 4, ..scene().config().clone() };
    for explain_misses in [true, false] {
        let mut driver = Driver::new(Config { explain_misses, ..small.clone() });
        for family in 0..5 {
            let limits = blocktable_core::request::Limits { max_tokens: 9, ..Default::default() };
            driver.submit_as(plain(), tokens(family, 3), limits)?;
        }
        driver.drain()?;
        let counters = driver.scheduler.counters();
        ensure(counters.preemptions > 0, "pressure", || "nobody was preempted".to_owned())?;
        let told: u64 = Miss::ALL.iter().map(|&miss| driver.scheduler.misses().of(miss)).sum();
        let wanted = if explain_misses { 5 } else { 0 };
        ensure(told == wanted, "miss", || format!("{told} reasons for 5 requests"))?;
    }
    Ok(())
}

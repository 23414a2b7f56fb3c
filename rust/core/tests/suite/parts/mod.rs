//! Prompts that part anywhere, one after another through a pool that evicts, and what each must find.
//!
//! Before: a script, drawn by proptest from a seed. After: each prompt started at the longest length that every group's rule accepts, by
//! a look at every length and at the content of every sequence that there was. The driver checks the rest.

use std::collections::BTreeSet;

use blocktable_core::block_hash::BlockHasher;
use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::Key;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::request::Limits;
use proptest::collection::vec;
use proptest::strategy::{Just, Strategy};
use proptest::{prop_oneof, sample::Index};

use crate::broken::{Checked, ensure};
use crate::driver::Driver;

const LONGEST: usize = 48;

/// A prompt: the head of an earlier one, then these tokens.
#[derive(Clone, Debug)]
pub struct Asked {
    earlier: Index,
    kept: Index,
    tail: Vec<u32>,
    outputs: u32,
}

/// One pool and what is asked of it.
#[derive(Clone, Debug)]
pub struct Script {
    groups: Vec<GroupSpec>,
    block_size: u32,
    /// Blocks beside those that one prompt needs.
    spare: u32,
    asked: Vec<Asked>,
}

/// How often the rare things happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Met {
    pub parts: u32,
    /// A part behind full blocks that would not serve without it.
    pub only_with_part: u32,
    /// Some group had a longer part than another.
    pub unequal: u32,
}

/// Up to four groups, windows from one row to all.
pub fn scripts() -> impl Strategy<Value = Script> {
    let window = prop_oneof![2 => Just(None), 3 => (1..=12_u32).prop_map(Some), 1 => (13..=60_u32).prop_map(Some)];
    let group = window.prop_map(|window| GroupSpec { window });
    let asked = (proptest::arbitrary::any::<(Index, Index)>(), vec(0..3_u32, 1..24), 1..4_u32);
    let asked = asked.prop_map(|((earlier, kept), tail, outputs)| Asked { earlier, kept, tail, outputs });
    (vec(group, 1..=4), 1..=8_u32, 0..60_u32, vec(asked, 2..24)).prop_map(|(groups, block_size, spare, asked)| Script {
        groups,
        block_size,
        spare,
        asked,
    })
}

impl Script {
    /// Plays it.
    ///
    /// # Errors
    /// The first difference.
    pub fn run(self) -> Checked<Met> {
        let (len, groups) = (LONGEST as u32, self.groups.len() as u32);
        let num_blocks = 1 + groups * (len.div_ceil(self.block_size) + 1) + self.spare;
        let mut driver = Driver::new(Config {
            groups: self.groups.clone(),
            enable_partial_hits: true,
            max_num_seqs: 1,
            max_num_batched_tokens: len,
            ..Config::new(num_blocks, self.block_size, 1009, len)
        });
        let (mut earlier, mut met) = (vec![vec![7; 9]], Met::default());
        for asked in &self.asked {
            let before = &earlier[asked.earlier.index(earlier.len())];
            let mut tokens = before[..asked.kept.index(before.len() + 1)].to_vec();
            tokens.extend(&asked.tail);
            tokens.truncate(LONGEST - asked.outputs as usize);
            let due = self.longest(&driver, &earlier, &tokens, &mut met);
            let limits = Limits { max_tokens: asked.outputs, ..Limits::default() };
            let id = driver.submit(tokens.clone(), limits)?.expect("it fits");
            driver.drain()?;
            let client = &driver.clients[&id];
            ensure(client.cached == Some(due), "partial", || {
                format!("{:?} tokens of {tokens:?} are cached, {due} could be", client.cached)
            })?;
            earlier.push(client.tokens.clone());
        }
        Ok(met)
    }

    /// The longest length of `tokens` that every group accepts, the last token left out.
    fn longest(&self, driver: &Driver, earlier: &[Vec<u32>], tokens: &[u32], met: &mut Met) -> usize {
        let size = self.block_size as usize;
        let has = |group: usize, key: &Key| {
            let found = driver.scheduler.pool().index().lookup(&key.in_group(group));
            found.is_some_and(|(_, state)| state == KeyState::Published)
        };
        let mut hasher = driver.scheduler.hasher().clone();
        let keys = keys_of(&mut hasher, tokens);
        // For each group, rows of the block behind `full` blocks.
        let mut part = |group: usize, full: usize| {
            let rows = |other: &Vec<u32>| {
                let is_block = other.len() >= (full + 1) * size && other[..full * size] == tokens[..full * size];
                if !is_block || !has(group, &keys_of(&mut hasher, other)[full]) {
                    return 0;
                }
                other[full * size..].iter().zip(&tokens[full * size..]).take_while(|(one, two)| one == two).count()
            };
            earlier.iter().map(rows).max().unwrap_or(0)
        };
        let mut accepts = |length: usize| {
            let (full, rows) = (length / size, length % size);
            let needs = |(group, spec): (usize, &GroupSpec)| {
                let first = spec.window.map_or(0, |window| (length + 1).saturating_sub(window as usize));
                let sees_part = rows > 0 && first < length;
                (first / size..full).all(|number| has(group, &keys[number]))
                    && (!sees_part || part(group, full) >= rows)
            };
            (rows == 0 || rows * 4 >= size) && self.groups.iter().enumerate().all(needs)
        };
        let longest = (0..tokens.len()).rev().find(|&length| accepts(length)).expect("nothing is always accepted");
        met.parts += u32::from(longest % size > 0);
        met.only_with_part += u32::from(longest % size > 0 && !accepts(longest / size * size));
        let parts: BTreeSet<usize> =
            (0..self.groups.len()).map(|group| part(group, longest / size).min(size)).collect();
        met.unequal += u32::from(longest % size > 0 && parts.len() > 1);
        longest
    }
}

fn keys_of(hasher: &mut BlockHasher, tokens: &[u32]) -> Vec<Key> {
    let (chain, mut keys) = (hasher.plain_chain(), Vec::new());
    hasher.extend(&chain, &mut keys, tokens);
    keys
}

//! Random scripts of chains with ranges of retention, run on a pool and on a model of plain collections.
//!
//! The model knows no heap, no lane and no link: each block has a list of what was asked for it, a time at which its last holder went,
//! and a ticket that tells since when it waits. Its order is a sort.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_table::BlockTable;
use blocktable_core::ids::{BlockId, Key};
use blocktable_core::prefix_index::KeyState;
use blocktable_core::retention::{Ranges, TokenRange};

use crate::broken::{Broken, Checked, broken, ensure};

const SIZE: u32 = 4;
const DEFAULT: u8 = 35;
const CHAINS: u8 = 3;
const LONGEST: usize = 6;

/// One call.
#[derive(Clone, Debug)]
pub enum Op {
    /// A sequence of a chain starts: it hits what is cached, writes the rest, publishes it, and asks for retention.
    Start {
        chain: u8,
        blocks: usize,
        ranges: Vec<TokenRange>,
    },
    /// It ends, now or with its step.
    End {
        which: usize,
        park: bool,
    },
    EndLeases,
    /// So many milliseconds pass.
    Pass(u64),
}

/// What is done to a pool.
#[derive(Clone, Debug)]
pub struct Script {
    num_blocks: u32,
    ops: Vec<Op>,
}

/// Scripts on pools in which chains push each other out.
pub fn scripts() -> impl Strategy<Value = Script> {
    let priority = prop_oneof![Just(DEFAULT), Just(10_u8), Just(80), Just(90), 0..=100_u8];
    let end = prop_oneof![1 => Just(None), 3 => (1..=SIZE * LONGEST as u32 + 3).prop_map(Some)];
    let duration = prop_oneof![1 => Just(None), 3 => (1..=6_u64).prop_map(Some)];
    let range = (end, priority, duration).prop_map(|(end, priority, duration_ms)| {
        let start = end.map_or(0, |end| (end - 1) / 2);
        TokenRange { start, end, priority, duration_ms }
    });
    let start = (0..CHAINS, 1..=LONGEST, vec(range, 0..3));
    let op = prop_oneof![
        5 => start.prop_map(|(chain, blocks, ranges)| Op::Start { chain, blocks, ranges }),
        5 => (any::<usize>(), prop::bool::weighted(0.3)).prop_map(|(which, park)| Op::End { which, park }),
        2 => Just(Op::EndLeases),
        3 => (0..5_u64).prop_map(Op::Pass),
    ];
    (8..16_u32, vec(op, 1..40)).prop_map(|(num_blocks, ops)| Script { num_blocks, ops })
}

/// What the model knows of a cached block.
#[derive(Clone, Debug)]
struct Cached {
    chain: u8,
    number: usize,
    /// Priority and milliseconds (`None`: for ever) of all that applies.
    asked: Vec<(u8, Option<u64>)>,
    holders: u32,
    parked: bool,
    released_us: u64,
    /// When it took its place in the queue; larger is later.
    ticket: u64,
}

impl Cached {
    fn priority(&self) -> u8 {
        self.asked.iter().map(|asked| asked.0).max().unwrap_or(DEFAULT)
    }

    /// When its time is over, if ever.
    fn due(&self) -> Option<u64> {
        let mut above = self.asked.iter().filter(|asked| asked.0 > DEFAULT).map(|asked| asked.1).peekable();
        above.peek()?;
        let longest: Option<Vec<u64>> = above.collect();
        Some(self.released_us + longest?.into_iter().max()? * 1000)
    }
}

struct World {
    pool: BlockPool,
    now_us: u64,
    tickets: u64,
    cached: Vec<(BlockId, Cached)>,
    /// Blocks without content, in the order in which they are handed out.
    plain: Vec<BlockId>,
    live: Vec<BlockTable>,
    parked: Vec<Vec<BlockId>>,
}

impl Script {
    /// Runs the script.
    ///
    /// # Errors
    /// The first difference.
    pub fn run(&self) -> Checked {
        let mut pool = BlockPool::new(self.num_blocks).expect("a pool");
        pool.use_retention();
        let plain = pool.free_blocks().collect();
        let mut world =
            World { pool, now_us: 0, tickets: 0, cached: Vec::new(), plain, live: Vec::new(), parked: Vec::new() };
        for (at, op) in self.ops.iter().enumerate() {
            let outcome = world.apply(op).and_then(|()| world.compare());
            outcome
                .map_err(|Broken { check, detail }| Broken { check, detail: format!("call {at}, {op:?}: {detail}") })?;
        }
        Ok(())
    }
}

impl World {
    fn apply(&mut self, op: &Op) -> Checked {
        match op {
            Op::Start { chain, blocks, ranges } => self.start(*chain, *blocks, ranges),
            Op::End { which, park } if !self.live.is_empty() => {
                let table = self.live.swap_remove(which % self.live.len());
                // What was parked may be shared: a scheduler would see that this table names what the step names.
                self.end(table, *park || !self.parked.is_empty());
                Ok(())
            }
            Op::End { .. } => Ok(()),
            Op::EndLeases => {
                self.pool.end_leases(1);
                for list in std::mem::take(&mut self.parked) {
                    self.enqueue(&list);
                }
                Ok(())
            }
            Op::Pass(ms) => {
                self.now_us += ms * 1000;
                self.pool.expire(self.now_us);
                self.expire();
                Ok(())
            }
        }
    }

    fn start(&mut self, chain: u8, blocks: usize, ranges: &[TokenRange]) -> Checked {
        let asked = Ranges::new(ranges).or_else(|error| broken("ranges", error.to_string()))?;
        let known = (0..blocks).map_while(|number| self.pool.index().lookup(&name(chain, number)));
        let hits: Vec<BlockId> = known.filter(|hit| hit.1 == KeyState::Published).map(|hit| hit.0).collect();
        let free_hits = hits.iter().filter(|&&block| self.pool.holders(block) == 0).count();
        if blocks - hits.len() + free_hits > self.pool.num_free() as usize + self.parked_hits(&hits) {
            return Ok(());
        }
        let mut table = BlockTable::new();
        for &block in &hits {
            self.pool.share(&mut table, block).or_else(|error| broken("share", error.to_string()))?;
            self.parked.iter_mut().for_each(|list| list.retain(|&parked| parked != block));
            let cached = self.of(block);
            cached.holders += 1;
            cached.parked = false;
        }
        let count = (blocks - hits.len()) as u32;
        if self.pool.take(&mut table, count).is_err() {
            self.end(table, !self.parked.is_empty());
            return Ok(());
        }
        for number in hits.len()..blocks {
            let block = table.blocks()[number];
            let expected = self.next_taken();
            ensure(expected == Some(block), "order", || format!("{block:?} is handed out, {expected:?} is due"))?;
            self.pool.make_pending(block, name(chain, number)).expect("a block of this pool");
            self.pool.publish(block).expect("a block of this pool");
            let (asked, released_us, ticket) = (Vec::new(), 0, 0);
            let new = Cached { chain, number, asked, holders: 1, parked: false, released_us, ticket };
            self.cached.push((block, new));
        }
        for (number, &block) in table.blocks().iter().enumerate() {
            let start = number as u32 * SIZE;
            self.pool.ask(block, number, asked.worth(start as usize));
            let cached = self.cached.iter_mut().find(|cached| cached.0 == block).map(|cached| &mut cached.1);
            let cached = cached.expect("a cached block");
            let applies = |range: &&TokenRange| range.end.is_none_or(|end| end > start);
            cached.asked.extend(ranges.iter().filter(applies).map(|range| (range.priority, range.duration_ms)));
            if ranges.iter().all(|range| range.end.is_some()) {
                cached.asked.push((DEFAULT, None));
            }
        }
        self.live.push(table);
        Ok(())
    }

    /// Hits that stand in no queue, so that they take nothing from it.
    fn parked_hits(&self, hits: &[BlockId]) -> usize {
        self.parked.iter().flatten().filter(|block| hits.contains(block)).count()
    }

    fn end(&mut self, table: BlockTable, park: bool) {
        let mut freed = Vec::new();
        for &block in table.blocks().iter().rev() {
            let now_us = self.now_us;
            let cached = self.of(block);
            cached.holders -= 1;
            if cached.holders == 0 {
                (cached.released_us, cached.parked) = (now_us, park);
                freed.push(block);
            }
        }
        self.pool.release(table, if park { Release::Until(1) } else { Release::Now });
        if park {
            self.parked.push(freed);
        } else {
            self.enqueue(&freed);
        }
    }

    fn enqueue(&mut self, freed: &[BlockId]) {
        for &block in freed {
            self.tickets += 1;
            let ticket = self.tickets;
            let cached = self.of(block);
            (cached.parked, cached.ticket) = (false, ticket);
        }
    }

    /// Blocks that wait and whose time is over are worth the default and wait anew: by deadline, then the deepest first.
    fn expire(&mut self) {
        let mut over: Vec<(u64, std::cmp::Reverse<usize>, u32)> = Vec::new();
        for (block, cached) in &self.cached {
            let waits = cached.holders == 0 && !cached.parked;
            if let Some(due) = cached.due().filter(|&due| waits && due <= self.now_us) {
                over.push((due, std::cmp::Reverse(cached.number), block.get()));
            }
        }
        over.sort_unstable();
        for (_, _, block) in over {
            self.tickets += 1;
            let ticket = self.tickets;
            let block = self.pool.block(block).expect("a block of this pool");
            let cached = self.of(block);
            (cached.asked, cached.ticket) = (vec![(DEFAULT, None)], ticket);
        }
    }

    /// The block that is to be handed out, which forgets its content.
    fn next_taken(&mut self) -> Option<BlockId> {
        if !self.plain.is_empty() {
            return Some(self.plain.remove(0));
        }
        let next = self.waiting().first().copied()?;
        self.cached.retain(|(block, _)| *block != next);
        Some(next)
    }

    /// Cached blocks that wait, in the order of their eviction.
    fn waiting(&self) -> Vec<BlockId> {
        let mut waiting: Vec<&(BlockId, Cached)> =
            self.cached.iter().filter(|(_, cached)| cached.holders == 0 && !cached.parked).collect();
        waiting.sort_by_key(|(_, cached)| (cached.priority(), cached.ticket));
        waiting.iter().map(|(block, _)| *block).collect()
    }

    fn of(&mut self, block: BlockId) -> &mut Cached {
        let cached = self.cached.iter_mut().find(|cached| cached.0 == block);
        &mut cached.expect("a cached block").1
    }

    fn compare(&self) -> Checked {
        let queue: Vec<BlockId> = self.pool.free_blocks().collect();
        let model = [&self.plain[..], &self.waiting()].concat();
        ensure(queue == model, "order", || {
            format!("the queue is {queue:?}, the model's {model:?}: {:?}", self.cached)
        })?;
        let parked = self.parked.iter().flatten().count();
        ensure(self.pool.num_parked() as usize == parked, "parked", || format!("{parked} are parked"))?;
        crate::broken::audited(self.pool.audit(&self.live))?;
        // I58: where both wait, what is behind in a chain goes first.
        for (at, block) in queue.iter().enumerate() {
            let of = |block: &BlockId| self.cached.iter().find(|cached| cached.0 == *block).map(|cached| &cached.1);
            let Some(one) = of(block) else { continue };
            let mut later = queue[at + 1..].iter().filter_map(of);
            let behind = later.find(|other| other.chain == one.chain && other.number > one.number);
            ensure(behind.is_none(), "I58", || format!("{one:?} is evicted before {behind:?}"))?;
        }
        Ok(())
    }
}

fn name(chain: u8, number: usize) -> Key {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1]) = (chain + 1, number as u8);
    Key(bytes)
}

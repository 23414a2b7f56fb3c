//! Random scripts on a pool in which two tenants have shares, run on the pool and on plain lists side by side.
//!
//! Before: proptest draws a [`SharesScript`]. After: [`SharesScript::run`] says at which call the two first differ: which blocks were
//! handed out, in what order, and what each owner has left. Owner 0 is everybody without a share, owner 1 the public.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_table::BlockTable;
use blocktable_core::ids::{BlockId, Key};
use blocktable_core::shares::DomainShare;

use crate::broken::{Checked, audited, broken};

const OWNERS: usize = 4;

/// One call.
#[derive(Clone, Debug)]
pub enum Op {
    /// Take blocks, give some of them content of an owner, the last of those only for the step, and release all.
    Write {
        owner: u8,
        blocks: u32,
        named: u32,
    },
    /// Take blocks and hold them.
    Hold {
        blocks: u32,
    },
    /// Release what was held longest.
    LetGo,
    /// Hit the content of a free block and release it: it goes to the tail of its owner.
    Touch {
        block: u32,
    },
    ForgetUnheld,
}

/// A pool, the shares of two tenants, and what is done.
#[derive(Clone, Debug)]
pub struct SharesScript {
    pub usable: u32,
    pub shares: [u32; 2],
    pub ops: Vec<Op>,
}

/// Scripts on small pools.
pub fn shares_scripts() -> impl Strategy<Value = SharesScript> {
    let op = prop_oneof![
        6 => (0..OWNERS as u8, 1..6_u32, 0..6_u32)
            .prop_map(|(owner, blocks, named)| Op::Write { owner, blocks, named: named.min(blocks) }),
        2 => (1..8_u32).prop_map(|blocks| Op::Hold { blocks }),
        2 => Just(Op::LetGo),
        2 => (1..20_u32).prop_map(|block| Op::Touch { block }),
        1 => Just(Op::ForgetUnheld),
    ];
    (4..16_u32, 1..6_u32, 1..6_u32, vec(op, 1..60)).prop_map(|(usable, one, two, ops)| {
        let one = one.min(usable - 1);
        SharesScript { usable, shares: [one, two.min(usable - one)], ops }
    })
}

/// Plain lists.
struct Model {
    /// Above what each owner has, if positive, its content may be evicted.
    shares: [i64; OWNERS],
    /// Blocks without content, the next one first.
    empty: VecDeque<u32>,
    /// Free blocks that had content when they were released, by owner, the oldest first; false: it is forgotten.
    cached: [VecDeque<(u32, bool)>; OWNERS],
    held: VecDeque<Vec<u32>>,
    names: u64,
}

impl Model {
    fn content(&self, owner: usize) -> i64 {
        self.cached[owner].iter().filter(|(_, has_content)| *has_content).count() as i64
    }

    fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        let free = self.empty.len() + self.cached.iter().map(VecDeque::len).sum::<usize>();
        (count as usize <= free).then(|| (0..count).map(|_| self.take_one()).collect())
    }

    fn take_one(&mut self) -> u32 {
        if let Some(block) = self.empty.pop_front() {
            return block;
        }
        let above = |owner: &usize| self.content(*owner) - self.shares[*owner];
        let some = (0..OWNERS).filter(|&owner| !self.cached[owner].is_empty());
        let most = some.rev().max_by_key(above).expect("some block is free");
        self.cached[most].pop_front().expect("it has some").0
    }
}

impl SharesScript {
    /// Runs the script on the pool and on the lists.
    ///
    /// # Errors
    /// The first difference.
    pub fn run(&self) -> Checked {
        let share = |at: usize| DomainShare { domain: [at as u8].into(), blocks: self.shares[at] };
        let mut pool = BlockPool::new(self.usable + 1).expect("a pool").sharing(&[share(0), share(1)]);
        let mut model = Model {
            shares: [0, i64::from(u32::MAX), self.shares[0].into(), self.shares[1].into()],
            empty: (1..=self.usable).collect(),
            cached: Default::default(),
            held: VecDeque::new(),
            names: 0,
        };
        let mut held = VecDeque::new();
        for (at, op) in self.ops.iter().enumerate() {
            let same = apply(op, &mut pool, &mut model, &mut held);
            same.and_then(|()| compare(&pool, &model, &held)).map_err(|mut broken| {
                broken.detail = format!("call {at}, {op:?}: {}", broken.detail);
                broken
            })?;
        }
        Ok(())
    }
}

fn apply(op: &Op, pool: &mut BlockPool, model: &mut Model, held: &mut VecDeque<BlockTable>) -> Checked {
    match *op {
        Op::Write { owner, blocks, named } => {
            let Some((table, taken)) = take(blocks, pool, model)? else { return Ok(()) };
            for &block in &table.blocks()[..named as usize] {
                model.names += 1;
                let mut key = [0; 32];
                key[..8].copy_from_slice(&model.names.to_le_bytes());
                pool.set_owner(block, owner);
                pool.make_pending(block, Key(key)).expect("a block of the pool");
                if !model.names.is_multiple_of(5) {
                    pool.publish(block).expect("a block of the pool");
                }
            }
            let first = model.names - u64::from(named);
            pool.release(table, Release::Now);
            for (number, &block) in taken.iter().enumerate().rev() {
                if number < named as usize && !(first + 1 + number as u64).is_multiple_of(5) {
                    model.cached[usize::from(owner)].push_back((block, true));
                }
            }
            // What is named waits behind the tail, although its name is withdrawn in the same call; the rest goes before the head.
            for (number, &block) in taken.iter().enumerate() {
                if number >= named as usize || (first + 1 + number as u64).is_multiple_of(5) {
                    model.empty.push_front(block);
                }
            }
            Ok(())
        }
        Op::Hold { blocks } => {
            if let Some((table, taken)) = take(blocks, pool, model)? {
                held.push_back(table);
                model.held.push_back(taken);
            }
            Ok(())
        }
        Op::LetGo => {
            if let Some(table) = held.pop_front() {
                pool.release(table, Release::Now);
                let blocks = model.held.pop_front().expect("both hold");
                blocks.iter().for_each(|&block| model.empty.push_front(block));
            }
            Ok(())
        }
        Op::Touch { block } => {
            for list in &mut model.cached {
                if let Some(at) = list.iter().position(|&entry| entry == (block, true)) {
                    let entry = list.remove(at).expect("it was found");
                    list.push_back(entry);
                    let mut table = BlockTable::new();
                    let block = pool.block(block).expect("a block of the pool");
                    pool.share(&mut table, block).expect("it has a name");
                    pool.release(table, Release::Now);
                }
            }
            Ok(())
        }
        Op::ForgetUnheld => {
            model.cached.iter_mut().flatten().for_each(|(_, has_content)| *has_content = false);
            pool.forget_unheld();
            Ok(())
        }
    }
}

/// The same blocks, in the same order.
fn take(count: u32, pool: &mut BlockPool, model: &mut Model) -> Checked<Option<(BlockTable, Vec<u32>)>> {
    let mut table = BlockTable::new();
    let got = pool.take(&mut table, count);
    let wanted = model.take(count);
    let ids: Vec<u32> = table.blocks().iter().map(|block| block.get()).collect();
    match wanted {
        None if got.is_err() && table.is_empty() => Ok(None),
        Some(wanted) if got.is_ok() && ids == wanted => Ok(Some((table, wanted))),
        wanted => broken("model", format!("the pool hands out {got:?}, {ids:?}; the lists {wanted:?}")),
    }
}

fn compare(pool: &BlockPool, model: &Model, held: &VecDeque<BlockTable>) -> Checked {
    audited(pool.audit(held))?;
    let queue: Vec<u32> = pool.free_blocks().map(BlockId::get).collect();
    let cached = model.cached.iter().flatten().map(|(block, _)| block);
    let wanted: Vec<u32> = model.empty.iter().chain(cached).copied().collect();
    if queue != wanted {
        return broken("model", format!("free are {queue:?}, in the lists {wanted:?}"));
    }
    let published: i64 = (0..OWNERS).map(|owner| model.content(owner)).sum();
    if i64::from(pool.index().num_published()) != published {
        return broken(
            "model",
            format!("{} blocks are published, in the lists {published}", pool.index().num_published()),
        );
    }
    Ok(())
}

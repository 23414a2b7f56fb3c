//! Random scripts of calls on a block pool, run on the pool and on its model side by side.
//!
//! Before: proptest draws a [`PoolScript`]. After: [`PoolScript::run`] says at which call the two first differ, or that they never do.
//! After every call all that can be seen is compared: the result, counts, holders, the whole order of the free queue, states and
//! lookups of the index, and [`BlockPool::audit`] with all tables that are alive.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::block_pool::{BlockCopy, BlockPool, Release};
use blocktable_core::block_size::BlockSize;
use blocktable_core::block_table::BlockTable;
use blocktable_core::error::Error;
use blocktable_core::events::{Content, EventLog};
use blocktable_core::ids::{BlockId, Key, TokenId};
use blocktable_core::prefix_index::KeyState;

use crate::broken::{Broken, Checked, audited, broken};
use crate::mirror::Mirror;
use crate::model::{NotHeld, PoolModel, Refusal};

const TABLES: usize = 4;
const KEYS: u8 = 6;
/// Rows of a block, for those calls that count rows.
const SIZE: u32 = 3;
/// Ids from here on belong to another pool.
const FOREIGN: u32 = 16;

/// One call. Block ids below [`FOREIGN`] are taken modulo the pool's.
#[derive(Clone, Debug)]
pub enum PoolOp {
    Take {
        table: usize,
        count: u32,
    },
    /// Look a key up and hold what is found.
    Hit {
        table: usize,
        key: u8,
    },
    /// Hold a block that nobody looked up.
    Share {
        table: usize,
        block: u32,
    },
    /// Hold the blocks of a run of keys, as far as there are any.
    HitChain {
        table: usize,
        key: u8,
    },
    /// Hold blocks that nobody looked up, all or none.
    ShareAll {
        table: usize,
        blocks: Vec<u32>,
    },
    Release {
        table: usize,
        park: bool,
    },
    /// One list of the blocks of several tables, with null blocks between them, and perhaps one block too many, or of another pool.
    ReleaseList {
        tables: Vec<usize>,
        extra: Option<u32>,
        park: bool,
    },
    /// A second table over the blocks of one takes the place of another.
    Fork {
        from: usize,
        to: usize,
    },
    /// Cut a table to so many rows, in blocks of [`SIZE`].
    Truncate {
        table: usize,
        rows: usize,
        park: bool,
    },
    MakeWritable {
        table: usize,
        index: usize,
        park: bool,
    },
    EndLeases,
    MakePending {
        block: u32,
        key: u8,
    },
    Publish {
        block: u32,
    },
    Withdraw {
        block: u32,
    },
    ForgetUnheld,
}

/// A pool and what is done to it.
#[derive(Clone, Debug)]
pub struct PoolScript {
    pub num_blocks: u32,
    pub ops: Vec<PoolOp>,
}

/// Scripts on small pools, where everything meets everything.
pub fn pool_scripts() -> impl Strategy<Value = PoolScript> {
    let table = || 0..TABLES;
    let block = || 0..FOREIGN;
    let any_block = || prop_oneof![6 => 0..FOREIGN, 1 => FOREIGN..20_u32];
    let op = prop_oneof![
        4 => (table(), 0..5_u32).prop_map(|(table, count)| PoolOp::Take { table, count }),
        1 => (table(), 0..20_u32).prop_map(|(table, count)| PoolOp::Take { table, count }),
        4 => (table(), 0..KEYS).prop_map(|(table, key)| PoolOp::Hit { table, key }),
        1 => (table(), any_block()).prop_map(|(table, block)| PoolOp::Share { table, block }),
        2 => (table(), 0..KEYS).prop_map(|(table, key)| PoolOp::HitChain { table, key }),
        2 => (table(), vec(any_block(), 0..6)).prop_map(|(table, blocks)| PoolOp::ShareAll { table, blocks }),
        3 => (table(), any::<bool>()).prop_map(|(table, park)| PoolOp::Release { table, park }),
        2 => (vec(table(), 0..4), proptest::option::weighted(0.3, any_block()), any::<bool>())
            .prop_map(|(tables, extra, park)| PoolOp::ReleaseList { tables, extra, park }),
        2 => (table(), table()).prop_map(|(from, to)| PoolOp::Fork { from, to }),
        2 => (table(), 0..40_usize, any::<bool>())
            .prop_map(|(table, rows, park)| PoolOp::Truncate { table, rows, park }),
        3 => (table(), 0..8_usize, any::<bool>())
            .prop_map(|(table, index, park)| PoolOp::MakeWritable { table, index, park }),
        2 => Just(PoolOp::EndLeases),
        5 => (block(), 0..KEYS).prop_map(|(block, key)| PoolOp::MakePending { block, key }),
        5 => block().prop_map(|block| PoolOp::Publish { block }),
        1 => block().prop_map(|block| PoolOp::Withdraw { block }),
        1 => Just(PoolOp::ForgetUnheld),
    ];
    (2..14_u32, vec(op, 1..50)).prop_map(|(num_blocks, ops)| PoolScript { num_blocks, ops })
}

impl PoolScript {
    /// Runs the script on the pool and on the model.
    ///
    /// # Errors
    /// The first difference.
    pub fn run(&self) -> Checked {
        let mut world = World::new(self.num_blocks);
        world.compare()?;
        for (at, op) in self.ops.iter().enumerate() {
            let outcome = world.apply(op).and_then(|()| world.compare()).and_then(|()| world.follow());
            outcome
                .map_err(|Broken { check, detail }| Broken { check, detail: format!("call {at}, {op:?}: {detail}") })?;
        }
        Ok(())
    }
}

/// The pool, the model, and the tables of each.
struct World {
    pool: BlockPool,
    model: PoolModel,
    /// Another, larger pool, whose ids mean nothing here.
    other: BlockPool,
    tables: Vec<(BlockTable, Vec<u32>)>,
    /// The index rebuilt from its events.
    mirror: Mirror,
}

impl World {
    fn new(num_blocks: u32) -> Self {
        let tables = (0..TABLES).map(|_| (BlockTable::new(), Vec::new())).collect();
        let new = |num_blocks| BlockPool::new(num_blocks).expect("a pool of two or more");
        let pool = new(num_blocks).recording(EventLog::new(num_blocks, 1, 1 + num_blocks % 5));
        World { pool, model: PoolModel::new(num_blocks), other: new(100), tables, mirror: Mirror::default() }
    }

    fn apply(&mut self, op: &PoolOp) -> Checked {
        match *op {
            PoolOp::Take { table, count } => self.take(table, count),
            PoolOp::Hit { table, key } => match self.pool.index().lookup(&name(key)) {
                Some((block, _)) => self.share(table, block),
                None => Ok(()),
            },
            PoolOp::Share { table, block } => self.share(table, self.block(block)),
            PoolOp::HitChain { table, key } => {
                let found = (key..KEYS).map_while(|key| self.pool.index().lookup(&name(key)));
                let blocks: Vec<BlockId> = found.map(|(block, _)| block).collect();
                self.share_all(table, &blocks)
            }
            PoolOp::ShareAll { table, ref blocks } => {
                let blocks: Vec<BlockId> = blocks.iter().map(|&block| self.block(block)).collect();
                self.share_all(table, &blocks)
            }
            PoolOp::Release { table, park } => self.release(table, park),
            PoolOp::ReleaseList { ref tables, extra, park } => self.release_list(tables, extra, park),
            PoolOp::Fork { from, to } => self.fork(from, to),
            PoolOp::Truncate { table, rows, park } => self.truncate(table, rows, park),
            PoolOp::MakeWritable { table, index, park } => self.make_writable(table, index, park),
            PoolOp::EndLeases => {
                self.pool.end_leases(1);
                self.model.end_leases();
                Ok(())
            }
            PoolOp::MakePending { block, key } => self.on_block(block, |pool, model, block| {
                pool.make_pending(block, name(key)).expect("a block of the pool");
                let parent = key.checked_sub(1).map(name);
                pool.describe(block, name(key), Content { parent, tokens: &[TokenId::from(key)], group: key % 2 });
                model.make_pending(block.get(), name(key));
            }),
            PoolOp::Publish { block } => self.on_block(block, |pool, model, block| {
                pool.publish(block).expect("a block of the pool");
                model.index.publish(block.get());
            }),
            PoolOp::Withdraw { block } => self.on_block(block, |pool, model, block| {
                pool.withdraw(block).expect("a block of the pool");
                model.index.forget(block.get());
            }),
            PoolOp::ForgetUnheld => same("blocks that forgot", self.pool.forget_unheld(), self.model.forget_unheld()),
        }
    }

    fn take(&mut self, table: usize, count: u32) -> Checked {
        let free = self.model.queue.len() as u32;
        let wanted = self.model.take(count).ok_or(Error::OutOfBlocks { needed: count, free });
        let (real, list) = &mut self.tables[table];
        let got = self.pool.take(real, count);
        if let Ok(taken) = &wanted {
            list.extend(taken);
        }
        same("take", got, wanted.map(|_| ()))
    }

    fn share(&mut self, table: usize, block: BlockId) -> Checked {
        let refusal = self.no_such(block);
        let (real, list) = &mut self.tables[table];
        let got = self.pool.share(real, block);
        if let Some(refusal) = refusal {
            return same("share", got, Err(refusal));
        }
        let wanted = self.model.share(block.get());
        if wanted.is_ok() {
            list.push(block.get());
        }
        same("share", got, wanted.map_err(|NotHeld(_)| Error::NotHeld { block }))
    }

    fn share_all(&mut self, table: usize, blocks: &[BlockId]) -> Checked {
        let not_null = || blocks.iter().copied().filter(|&block| block != BlockId::NULL);
        let mut after = self.model.clone();
        let of_one = |block: BlockId| {
            self.no_such(block).map_or(Ok(()), Err)?;
            after.share(block.get()).map_err(|NotHeld(_)| Error::NotHeld { block })
        };
        let wanted = not_null().try_for_each(of_one);
        let (real, list) = &mut self.tables[table];
        let got = self.pool.share_all(real, &not_null().collect::<Vec<_>>());
        if wanted.is_ok() {
            list.extend(not_null().map(BlockId::get));
            self.model = after;
        }
        same("share_all", got, wanted)
    }

    fn release(&mut self, table: usize, park: bool) -> Checked {
        let (real, list) = std::mem::take(&mut self.tables[table]);
        self.pool.release(real, when(park));
        same("release in the model", self.model.release(&list, park), Ok(()))
    }

    fn fork(&mut self, from: usize, to: usize) -> Checked {
        if from == to {
            return Ok(());
        }
        self.release(to, false)?;
        let forked = self.pool.fork(&self.tables[from].0);
        let list = self.tables[from].1.clone();
        self.model.fork(&list);
        same("fork", forked.as_ref().map(BlockTable::len), Ok(list.len()))?;
        self.tables[to] = (forked.expect("compared"), list);
        Ok(())
    }

    fn truncate(&mut self, table: usize, rows: usize, park: bool) -> Checked {
        let (real, list) = &mut self.tables[table];
        let got = self.pool.truncate(real, rows, BlockSize::new(SIZE), when(park));
        let most = list.len() * SIZE as usize;
        if rows > most {
            let bound = format!("must be at most {most}, the rows of the table");
            return same("truncate", got, Err(Error::InvalidInput { field: "rows", value: rows as i128, bound }));
        }
        let cut = list.split_off(rows.div_ceil(SIZE as usize));
        same("truncate in the model", self.model.release(&cut, park), Ok(()))?;
        same("truncate", got, Ok(()))
    }

    fn make_writable(&mut self, table: usize, index: usize, park: bool) -> Checked {
        let block = |id| self.pool.block(id).expect("a block of the pool");
        let (real, list) = &mut self.tables[table];
        let wanted = match self.model.make_writable(list, index, park) {
            Ok(copy) => Ok(copy.map(|(source, target)| BlockCopy { source: block(source), target: block(target) })),
            Err(Refusal::NoSuchEntry) => {
                let bound = format!("must be below {}, the blocks of the table", list.len());
                Err(Error::InvalidInput { field: "index", value: index as i128, bound })
            }
            Err(Refusal::BeingWritten(id)) => Err(Error::BeingWritten { block: block(id) }),
            Err(Refusal::NoneFree) => Err(Error::OutOfBlocks { needed: 1, free: 0 }),
        };
        same("make_writable", self.pool.make_writable(real, index, when(park)), wanted)
    }

    fn release_list(&mut self, tables: &[usize], extra: Option<u32>, park: bool) -> Checked {
        let mut numbers = tables.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let list: Vec<u32> = numbers.iter().flat_map(|&at| [&[0], &self.tables[at].1[..]].concat()).collect();
        let mut blocks: Vec<BlockId> = list.iter().map(|&block| self.block(block)).collect();
        if let Some(extra) = extra.map(|extra| self.block(extra)) {
            if let Some(refusal) = self.no_such(extra) {
                blocks.push(extra);
                return same("release_blocks", self.pool.release_blocks(&blocks, when(park)), Err(refusal));
            }
            let with_extra = [&[extra.get()], &list[..]].concat();
            // What some other table still names stays held: only lists that must be refused get one block too many.
            if let Err(NotHeld(block)) = self.model.clone().release(&with_extra, park) {
                blocks.insert(0, extra);
                let refusal = Err(Error::NotHeld { block: self.block(block) });
                return same("release_blocks", self.pool.release_blocks(&blocks, when(park)), refusal);
            }
        }
        for at in numbers {
            self.tables[at] = Default::default();
        }
        same("release_blocks in the model", self.model.release(&list, park), Ok(()))?;
        same("release_blocks", self.pool.release_blocks(&blocks, when(park)), Ok(()))
    }

    fn on_block(&mut self, block: u32, act: impl Fn(&mut BlockPool, &mut PoolModel, BlockId)) -> Checked {
        let block = self.block(block);
        act(&mut self.pool, &mut self.model, block);
        Ok(())
    }

    fn block(&self, number: u32) -> BlockId {
        let pool = if number < FOREIGN { &self.pool } else { &self.other };
        pool.block(number % pool.num_blocks()).expect("a block of that pool")
    }

    fn no_such(&self, block: BlockId) -> Option<Error> {
        self.pool.block(block.get()).err()
    }

    /// The events tell what the index holds. A block of one token is named after that token and the one before.
    fn follow(&mut self) -> Checked {
        let names = |key: &Key, parent: Option<Key>, tokens: &[TokenId], group: u8| {
            let number = tokens[0] as u8;
            let in_chain = |number: u8| name(number).in_group(usize::from(group));
            *key == in_chain(number) && parent == number.checked_sub(1).map(in_chain)
        };
        self.mirror.follow(self.pool.index(), &names)
    }

    /// Everything that can be seen.
    fn compare(&self) -> Checked {
        let (pool, model) = (&self.pool, &self.model);
        audited(pool.audit(self.tables.iter().map(|(real, _)| real)))?;
        same("queue", pool.free_blocks().map(BlockId::get).collect::<Vec<_>>(), Vec::from(model.queue.clone()))?;
        same("num_free", pool.num_free(), model.queue.len() as u32)?;
        same("num_parked", pool.num_parked(), model.num_parked())?;
        same("num_held", pool.num_held(), model.num_held())?;
        same("evictions", pool.evictions(), model.evictions)?;
        same("num_published", pool.index().num_published(), model.index.num_published())?;
        for number in 0..pool.num_blocks() {
            let block = self.block(number);
            same("holders", (block, pool.holders(block)), (block, model.holders[number as usize]))?;
            same("state", (block, pool.index().state(block)), (block, model.index.state(number)))?;
        }
        for key in (0..KEYS).map(name) {
            let found: Option<(u32, KeyState)> = pool.index().lookup(&key).map(|(block, state)| (block.get(), state));
            same("lookup", found, model.index.lookup(&key))?;
        }
        for (real, list) in &self.tables {
            same("table", real.blocks().iter().map(|block| block.get()).collect(), list.clone())?;
        }
        Ok(())
    }
}

/// Keys that agree in the 64 bits by which the index looks first, two by two.
fn name(key: u8) -> Key {
    let mut bytes = [0; 32];
    (bytes[0], bytes[31]) = (key / 2, key);
    Key(bytes)
}

fn when(park: bool) -> Release {
    if park { Release::Until(1) } else { Release::Now }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, pool: T, model: T) -> Checked {
    if pool == model { Ok(()) } else { broken("model", format!("{what}: the pool has {pool:?}, the model {model:?}")) }
}

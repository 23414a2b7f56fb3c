//! Random scripts of calls on [`Sequences`], run on it and on plain collections side by side, with KV memory behind the blocks.
//!
//! Before: proptest draws a [`SequenceScript`]. After: [`SequenceScript::run`] says at which call the two first differ, or that they never
//! do. After every call results, tables, counts, holders, queue order and published blocks are compared, and each row that a table names
//! must still hold what its own sequence wrote there: nothing stale, foreign, missing or written over.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::error::Error;
use blocktable_core::ids::{BlockId, Key, TokenId};
use blocktable_core::prefix_index::KeyState;
use blocktable_core::sequences::{SequenceId, Sequences};

use crate::broken::{Broken, Checked, audited, broken, ensure};
use crate::model::{NotHeld, PoolModel};

const SEATS: usize = 4;

/// One call. Numbers are taken modulo what there is.
#[derive(Clone, Debug)]
pub enum Op {
    /// Look a prompt up, with room for `extra` tokens behind it or for none at all.
    Find {
        seat: usize,
        tokens: Vec<TokenId>,
        extra: Option<usize>,
    },
    Begin {
        seat: usize,
    },
    Append {
        seat: usize,
        tokens: Vec<TokenId>,
    },
    Reserve {
        seat: usize,
        rows: usize,
    },
    Fork {
        seat: usize,
        child: usize,
    },
    Truncate {
        seat: usize,
        rows: usize,
    },
    /// Publish what is written but the last `but` tokens; with another first token if `lies`, which nobody looks up; more than is written
    /// if `over`.
    Publish {
        seat: usize,
        but: usize,
        start: usize,
        lies: bool,
        over: bool,
    },
    Release {
        seat: usize,
    },
    /// Use a name that was released, or that belongs to another pool.
    Stale,
    Foreign,
    Take {
        count: u32,
    },
    /// Hold blocks that were taken one by one once more, or a block that nobody may.
    ShareBlocks {
        count: usize,
        extra: Option<u32>,
    },
    /// Give back blocks that were taken one by one, `extra` among them.
    ReleaseBlocks {
        count: usize,
        extra: Option<u32>,
    },
    Forget,
    Reset,
}

/// A pool and what is done to it.
#[derive(Clone, Debug)]
pub struct SequenceScript {
    num_blocks: u32,
    block_size: u32,
    /// Rows of a block that is only in part what is asked for are found.
    parts: bool,
    ops: Vec<Op>,
}

/// Scripts on small pools and few tokens, where everything meets everything.
pub fn sequence_scripts() -> impl Strategy<Value = SequenceScript> {
    let seat = || 0..SEATS;
    let tokens = |most: usize| vec(prop_oneof![8 => Just(7_u32), 1 => 0..3_u32], 0..most);
    let op = prop_oneof![
        5 => (seat(), tokens(14), proptest::option::weighted(0.6, 0..6_usize))
            .prop_map(|(seat, tokens, extra)| Op::Find { seat, tokens, extra }),
        1 => seat().prop_map(|seat| Op::Begin { seat }),
        6 => (seat(), tokens(9)).prop_map(|(seat, tokens)| Op::Append { seat, tokens }),
        1 => (seat(), 0..20_usize).prop_map(|(seat, rows)| Op::Reserve { seat, rows }),
        2 => (seat(), seat()).prop_map(|(seat, child)| Op::Fork { seat, child }),
        2 => (seat(), 0..20_usize).prop_map(|(seat, rows)| Op::Truncate { seat, rows }),
        6 => (seat(), 0..4_usize, prop_oneof![3 => Just(0_usize), 1 => 0..4_usize], proptest::bool::weighted(0.2), proptest::bool::weighted(0.1))
            .prop_map(|(seat, but, start, lies, over)| Op::Publish { seat, but, start, lies, over }),
        3 => seat().prop_map(|seat| Op::Release { seat }),
        1 => Just(Op::Stale),
        1 => Just(Op::Foreign),
        1 => (0..4_u32).prop_map(|count| Op::Take { count }),
        1 => (0..4_usize, proptest::option::weighted(0.4, 0..20_u32))
            .prop_map(|(count, extra)| Op::ShareBlocks { count, extra }),
        2 => (0..4_usize, proptest::option::weighted(0.4, 0..20_u32))
            .prop_map(|(count, extra)| Op::ReleaseBlocks { count, extra }),
        1 => Just(Op::Forget),
        1 => prop_oneof![4 => Just(Op::Forget), 1 => Just(Op::Reset)],
    ];
    (2..14_u32, 1..6_u32, any::<bool>(), vec(op, 1..50))
        .prop_map(|(num_blocks, block_size, parts, ops)| SequenceScript { num_blocks, block_size, parts, ops })
}

impl SequenceScript {
    /// Runs the script.
    ///
    /// # Errors
    /// The first difference.
    pub fn run(&self) -> Checked {
        let mut world = World::new(self.num_blocks, self.block_size, self.parts);
        for (at, op) in self.ops.iter().enumerate() {
            let outcome = world.apply(op).and_then(|()| world.compare());
            outcome
                .map_err(|Broken { check, detail }| Broken { check, detail: format!("call {at}, {op:?}: {detail}") })?;
        }
        Ok(())
    }
}

/// A sequence of the model.
#[derive(Clone, Debug)]
struct Chain {
    id: SequenceId,
    tokens: Vec<TokenId>,
    blocks: Vec<u32>,
    named: usize,
    /// Its last block stands by for a copy.
    spare: bool,
    lookup: Option<(u64, u64)>,
}

struct World {
    size: usize,
    parts: bool,
    real: Sequences,
    other: (Sequences, SequenceId),
    hasher: BlockHasher,
    model: PoolModel,
    seats: Vec<Option<Chain>>,
    dead: Option<SequenceId>,
    loose: Vec<u32>,
    /// (queries, hits)
    reuse: (u64, u64),
    /// What each row of KV memory holds: all tokens up to there.
    memory: HashMap<(u32, usize), Vec<TokenId>>,
    /// What each block was published as: all tokens up to its end.
    claimed: HashMap<u32, Vec<TokenId>>,
}

impl World {
    fn new(num_blocks: u32, block_size: u32, parts: bool) -> Self {
        let mut other = Sequences::new(100, block_size).expect("a pool");
        let foreign = other.begin();
        let real = Sequences::new(num_blocks, block_size).expect("a pool");
        World {
            size: block_size as usize,
            parts,
            real: if parts { real.remembering() } else { real },
            other: (other, foreign),
            hasher: BlockHasher::new(Algorithm::DEFAULT, block_size, b""),
            model: PoolModel::new(num_blocks),
            seats: vec![None; SEATS],
            dead: None,
            loose: Vec::new(),
            reuse: (0, 0),
            memory: HashMap::new(),
            claimed: HashMap::new(),
        }
    }

    fn apply(&mut self, op: &Op) -> Checked {
        match op {
            Op::Begin { seat } => self.begin(*seat),
            Op::Find { seat, tokens, extra } => self.find(*seat, tokens, *extra),
            Op::Append { seat, tokens } => self.with(*seat, |world, chain| world.append(chain, tokens)),
            Op::Reserve { seat, rows } => self.with(*seat, |world, chain| world.reserve(chain, *rows)),
            Op::Fork { seat, child } => self.fork(*seat, *child),
            Op::Truncate { seat, rows } => self.with(*seat, |world, chain| world.truncate(chain, *rows)),
            Op::Publish { seat, but, start, lies, over } => {
                self.with(*seat, |world, chain| world.publish(chain, *but, *start, *lies, *over))
            }
            Op::Release { seat } => self.release(*seat),
            Op::Stale => self.stale(),
            Op::Foreign => {
                let id = self.other.1;
                same("foreign", self.real.append(id, 1), Err(Error::ForeignTable))?;
                same("foreign", self.real.release(id), Err(Error::ForeignTable))
            }
            Op::Take { count } => self.take(*count),
            Op::ShareBlocks { count, extra } => self.share_blocks(*count, *extra),
            Op::ReleaseBlocks { count, extra } => self.release_blocks(*count, *extra),
            Op::Forget => same("forgotten", self.real.forget_unheld(), self.model.forget_unheld()),
            Op::Reset => self.reset(),
        }
    }

    fn with(&mut self, seat: usize, call: impl Fn(&mut Self, &mut Chain) -> Checked) -> Checked {
        let Some(mut chain) = self.seats[seat].take() else { return Ok(()) };
        let outcome = call(self, &mut chain);
        self.seats[seat] = Some(chain);
        outcome
    }

    fn begin(&mut self, seat: usize) -> Checked {
        self.release(seat)?;
        let id = self.real.begin();
        self.seats[seat] =
            Some(Chain { id, tokens: Vec::new(), blocks: Vec::new(), named: 0, spare: false, lookup: None });
        Ok(())
    }

    fn find(&mut self, seat: usize, tokens: &[TokenId], extra: Option<usize>) -> Checked {
        self.release(seat)?;
        let reserve = extra.map_or(0, |extra| tokens.len() + extra);
        let prompt = self.hasher.prompt_of(&self.hasher.plain_chain(), tokens.to_vec());
        let got = self.real.find(&mut self.hasher, &prompt, reserve);
        if tokens.is_empty() {
            return ensure(matches!(got, Err(Error::InvalidInput { field: "token_ids", .. })), "bad", || {
                "empty".into()
            });
        }
        let most = (tokens.len() - 1) / self.size;
        let hits: Vec<u32> =
            prompt.keys()[..most].iter().map_while(|key| self.model.index.lookup(key)).map(|hit| hit.0).collect();
        let part = self.part(tokens, hits.len());
        let (found, num_hits) = (hits.len() * self.size + part.map_or(0, |part| part.1), hits.len());
        let lacking = if reserve > found { reserve.div_ceil(self.size) - num_hits } else { 0 };
        let hits: Vec<u32> = hits.into_iter().chain(part.map(|part| part.0)).collect();
        let needed = lacking + hits.iter().filter(|&&hit| self.model.holders[hit as usize] == 0).count();
        let free = self.model.queue.len();
        if lacking > 0 && needed > free {
            let refusal = Error::OutOfBlocks { needed: needed as u32, free: free as u32 };
            return same("find", got.map(|found| found.1), Err(refusal));
        }
        for &hit in &hits {
            self.model.share(hit).expect("a named block");
        }
        let mut blocks = hits.clone();
        blocks.extend(self.model.take(lacking as u32).expect("enough are free"));
        let (id, got) = got.map_err(|refusal| Broken { check: "find", detail: refusal.to_string() })?;
        same("found", got, found)?;
        let lookup = Some((tokens.len() as u64, found as u64));
        self.seats[seat] = Some(Chain {
            id,
            tokens: tokens[..found].to_vec(),
            blocks,
            named: num_hits,
            spare: part.is_some() && lacking > 0,
            lookup,
        });
        Ok(())
    }

    /// The block that holds most of what goes on behind `hits` full blocks, and how many rows: of those that hold enough, the one right
    /// before what is wanted or right behind it, in the order of their tokens.
    fn part(&self, tokens: &[TokenId], hits: usize) -> Option<(u32, usize)> {
        let (start, least) = (hits * self.size, self.size.div_ceil(4));
        let wanted = &tokens[start..(start + self.size).min(tokens.len() - 1)];
        let stands = |&block: &u32| {
            self.model.index.state(block) == KeyState::Published
                && self.model.index.key(block).and_then(|key| self.model.index.lookup(&key)).map(|found| found.0)
                    == Some(block)
        };
        let behind = |block: u32| {
            let (head, tail) = self.claimed.get(&block)?.split_at_checked(start)?;
            (head == &tokens[..start] && tail.len() == self.size).then_some((tail, block))
        };
        let rows = |tail: &[TokenId]| tail.iter().zip(wanted).take_while(|(ours, theirs)| ours == theirs).count();
        let known = (1..self.model.holders.len() as u32).filter(stands).filter_map(behind);
        let near: Vec<_> = known.filter(|known| self.parts && rows(known.0) >= least).collect();
        let before = near.iter().filter(|known| known.0 <= wanted).max();
        let after = near.iter().filter(|known| known.0 > wanted).min();
        after.into_iter().chain(before).max_by_key(|known| rows(known.0)).map(|known| (known.1, rows(known.0)))
    }

    fn append(&mut self, chain: &mut Chain, tokens: &[TokenId]) -> Checked {
        let (rows, end) = (chain.tokens.len(), chain.tokens.len() + tokens.len());
        let at = rows / self.size;
        let shared =
            |block: u32| self.model.holders[block as usize] > 1 || self.model.index.state(block) != KeyState::Unnamed;
        let entries = &chain.blocks[..chain.blocks.len() - usize::from(chain.spare)];
        let replaced = !tokens.is_empty() && entries.get(at).is_some_and(|&block| shared(block));
        let stands_by = chain.spare && replaced;
        let lacking = end.div_ceil(self.size).saturating_sub(chain.blocks.len() - usize::from(stands_by));
        let (needed, free) = (lacking + usize::from(replaced && !stands_by), self.model.queue.len());
        let got = self.real.append(chain.id, tokens.len());
        if needed > free {
            return same("append", got, Err(Error::OutOfBlocks { needed: needed as u32, free: free as u32 }));
        }
        let mut copy = None;
        if stands_by {
            let spare = chain.blocks.pop().expect("it stands by");
            self.model.release(&[spare], false).expect("held");
        }
        chain.spare &= tokens.is_empty();
        if replaced {
            let replaced = self.model.make_writable(&mut chain.blocks, at, false);
            let (source, target) = replaced.ok().flatten().expect("enough are free");
            copy = (rows % self.size > 0).then_some((source, target, (rows % self.size) as u32));
        }
        chain.blocks.extend(self.model.take(lacking as u32).expect("enough are free"));
        let got = got.map(|copy| copy.map(|copy| (copy.source.get(), copy.target.get(), copy.rows)));
        same("append", got, Ok(copy))?;
        if let Some((source, target, rows)) = copy {
            for row in 0..rows as usize {
                let content = self.memory.get(&(source, row)).cloned().unwrap_or_default();
                self.memory.insert((target, row), content);
            }
        }
        for (row, &token) in (rows..).zip(tokens) {
            chain.tokens.push(token);
            self.memory.insert((chain.blocks[row / self.size], row % self.size), chain.tokens.clone());
        }
        if let Some((queries, hits)) = chain.lookup.take_if(|_| !tokens.is_empty()) {
            self.reuse = (self.reuse.0 + queries, self.reuse.1 + hits);
        }
        let slots: Vec<i64> = self.real.slots(chain.id, rows, end).map_err(refused)?.collect();
        let slot = |row: usize| i64::from(chain.blocks[row / self.size]) * self.size as i64 + (row % self.size) as i64;
        same("slots", slots, (rows..end).map(slot).collect())
    }

    fn reserve(&mut self, chain: &mut Chain, rows: usize) -> Checked {
        let (at, entries) = (chain.tokens.len() / self.size, chain.blocks.len() - usize::from(chain.spare));
        let shared =
            |block: u32| self.model.holders[block as usize] > 1 || self.model.index.state(block) != KeyState::Unnamed;
        let copies = rows > chain.tokens.len() && at < entries && shared(chain.blocks[at]);
        let len = chain.blocks.len() - usize::from(chain.spare && copies);
        let lacking = rows.max(chain.tokens.len()).div_ceil(self.size).saturating_sub(len);
        let needed = (lacking + usize::from(copies && !chain.spare)) as u32;
        let free = self.model.queue.len() as u32;
        let wanted = match self.model.take(needed) {
            Some(taken) => {
                chain.blocks.extend(taken);
                chain.spare |= copies;
                Ok(())
            }
            None => Err(Error::OutOfBlocks { needed, free }),
        };
        same("reserve", self.real.reserve(chain.id, rows), wanted)
    }

    fn fork(&mut self, seat: usize, child: usize) -> Checked {
        if seat == child || self.seats[seat].is_none() {
            return Ok(());
        }
        self.release(child)?;
        let Some(parent) = self.seats[seat].clone() else { return Ok(()) };
        let blocks = parent.blocks[..parent.tokens.len().div_ceil(self.size)].to_vec();
        self.model.fork(&blocks);
        let id = self.real.fork(parent.id).map_err(refused)?;
        self.seats[child] = Some(Chain { id, blocks, spare: false, lookup: None, ..parent });
        Ok(())
    }

    fn truncate(&mut self, chain: &mut Chain, rows: usize) -> Checked {
        let rows = rows % (chain.tokens.len() + 2);
        let got = self.real.truncate(chain.id, rows);
        if rows > chain.tokens.len() {
            return ensure(matches!(got, Err(Error::InvalidInput { field: "num_tokens", .. })), "bad", || {
                format!("{got:?}")
            });
        }
        let rest = chain.blocks.split_off(rows.div_ceil(self.size));
        self.model.release(&rest, false).expect("held");
        chain.tokens.truncate(rows);
        chain.named = chain.named.min(rows / self.size);
        chain.spare = false;
        same("truncate", got, Ok(()))
    }

    fn publish(&mut self, chain: &mut Chain, but: usize, start: usize, lies: bool, over: bool) -> Checked {
        let end = chain.tokens.len().saturating_sub(but);
        let mut tokens = chain.tokens[..end].to_vec();
        if lies && let Some(token) = tokens.get_mut(start * self.size) {
            *token += 50;
        }
        if over {
            tokens = [&chain.tokens[..], &[1; 4][..self.size.min(4)]].concat();
        }
        let first = start * self.size;
        let plain = self.hasher.plain_chain();
        let all = self.hasher.prompt_of(&plain, tokens.clone());
        let parent = start.checked_sub(1).and_then(|before| all.keys().get(before));
        let rest = tokens.get(first..).unwrap_or_default();
        let names = self.hasher.names_from(&plain, start, parent, rest, self.parts).map_err(refused)?;
        let keys: &[Key] = &names.keys;
        let got = self.real.publish(chain.id, &names, rest, None);
        let blocks = chain.blocks.get(start..).unwrap_or_default();
        let differs = |(&block, key): (&u32, &Key)| self.model.index.key(block).is_some_and(|old| old != *key);
        if tokens.len().max(first) > chain.tokens.len() || start > chain.named || blocks.iter().zip(keys).any(differs) {
            return ensure(matches!(got, Err(Error::InvalidInput { .. })), "publish", || format!("was taken: {got:?}"));
        }
        let before = self.model.index.num_published();
        for (at, (&block, key)) in blocks.iter().zip(keys).enumerate() {
            if self.model.index.state(block) == KeyState::Unnamed {
                self.claimed.insert(block, tokens[..(start + at + 1) * self.size].to_vec());
            }
            self.model.index.make_pending(block, *key);
            self.model.index.publish(block);
        }
        chain.named = chain.named.max(start + keys.len());
        same("published", got, Ok(self.model.index.num_published() - before))
    }

    fn release(&mut self, seat: usize) -> Checked {
        let Some(chain) = self.seats[seat].take() else { return Ok(()) };
        self.model.release(&chain.blocks, false).expect("held");
        self.dead = Some(chain.id);
        same("release", self.real.release(chain.id), Ok(()))
    }

    fn stale(&mut self) -> Checked {
        let Some(id) = self.dead else { return Ok(()) };
        same("release of the released", self.real.release(id), Err(Error::Released))?;
        same("append to the released", self.real.append(id, 1), Err(Error::Released))?;
        same("tokens of the released", self.real.rows(id), Err(Error::Released))
    }

    fn take(&mut self, count: u32) -> Checked {
        let free = self.model.queue.len() as u32;
        let wanted = self.model.take(count).ok_or(Error::OutOfBlocks { needed: count, free });
        if let Ok(taken) = &wanted {
            self.loose.extend(taken);
        }
        same("take", self.real.take(count).map(numbers), wanted)
    }

    fn share_blocks(&mut self, count: usize, extra: Option<u32>) -> Checked {
        let (ids, wanted) = self.some_loose(count, extra, false);
        if wanted.is_ok() {
            let held: Vec<u32> = ids.iter().copied().filter(|&id| id > 0).collect();
            self.model.fork(&held);
            self.loose.extend(held);
        }
        same("share_blocks", self.real.share_blocks(ids), wanted)
    }

    fn release_blocks(&mut self, count: usize, extra: Option<u32>) -> Checked {
        let (ids, wanted) = self.some_loose(count, extra, true);
        if wanted.is_ok() {
            self.model
                .release(&ids, false)
                .map_err(|NotHeld(block)| Broken { check: "model", detail: format!("{block}") })?;
            for id in ids.iter().filter(|&&id| id > 0) {
                let at = self.loose.iter().position(|held| held == id).expect("held");
                self.loose.swap_remove(at);
            }
        }
        same("release_blocks", self.real.release_blocks(ids), wanted)
    }

    /// Ids of which the caller holds each, the null block among them, and perhaps one that it does not; and what a call must say.
    fn some_loose(&self, count: usize, extra: Option<u32>, drops: bool) -> (Vec<u32>, Result<(), Error>) {
        let mut ids = self.loose[..count.min(self.loose.len())].to_vec();
        ids.insert(ids.len() / 2, 0);
        let num_blocks = self.real.pool().num_blocks();
        let Some(extra) = extra else { return (ids, Ok(())) };
        let had = self.loose.iter().filter(|&&held| held == extra).count();
        let used = if drops { ids.iter().filter(|&&id| id == extra).count() } else { 0 };
        ids.push(extra);
        let wanted = match self.real.pool().block(extra) {
            Err(_) => Err(Error::NoSuchBlock { block: extra, num_blocks }),
            Ok(block) if extra > 0 && had <= used => Err(Error::NotHeld { block }),
            Ok(_) => Ok(()),
        };
        (ids, wanted)
    }

    fn reset(&mut self) -> Checked {
        self.real.reset();
        self.model = PoolModel::new(self.real.pool().num_blocks());
        let dead: Vec<Chain> = self.seats.iter_mut().filter_map(Option::take).collect();
        (self.loose, self.reuse) = (Vec::new(), (0, 0));
        for chain in dead {
            same("use after reset", self.real.rows(chain.id), Err(Error::Released))?;
            self.dead = Some(chain.id);
        }
        Ok(())
    }

    /// Everything that can be seen.
    fn compare(&mut self) -> Checked {
        let pool = self.real.pool();
        audited(self.real.audit())?;
        same("queue", numbers(&pool.free_blocks().collect::<Vec<_>>()), Vec::from(self.model.queue.clone()))?;
        for id in 0..pool.num_blocks() {
            let block = pool.block(id).map_err(refused)?;
            same("holders", (id, pool.holders(block)), (id, self.model.holders[id as usize]))?;
            same("state", (id, pool.index().state(block)), (id, self.model.index.state(id)))?;
        }
        same("reuse", (self.real.reuse().queries, self.real.reuse().hits), self.reuse)?;
        for chain in self.seats.iter().flatten() {
            same("blocks", self.real.blocks(chain.id).map(numbers), Ok(chain.blocks.clone()))?;
            same("rows", self.real.rows(chain.id), Ok(chain.tokens.len()))?;
            same("named", self.real.named(chain.id), Ok(chain.named))?;
            for row in 0..chain.tokens.len() {
                let content = self.memory.get(&(chain.blocks[row / self.size], row % self.size));
                let wanted = &chain.tokens[..=row];
                ensure(content.is_some_and(|content| content == wanted), "content", || {
                    format!("row {row} holds {content:?}, its sequence is {wanted:?}")
                })?;
            }
        }
        let is_lost =
            |block: u32| self.model.queue.contains(&block) && self.model.index.state(block) == KeyState::Unnamed;
        self.memory.retain(|&(block, _), _| !is_lost(block));
        Ok(())
    }
}

fn refused(refusal: Error) -> Broken {
    Broken { check: "refused", detail: refusal.to_string() }
}

fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}

fn same<T: PartialEq + std::fmt::Debug>(what: &'static str, real: T, model: T) -> Checked {
    if real == model { Ok(()) } else { broken(what, format!("{what}: there is {real:?}, the model has {model:?}")) }
}

//! The block pool hands out the same blocks, in the same order, as the KV cache manager of vLLM 0.32 did on 150 recorded scripts.
//!
//! Before: `vectors/vllm_kv_manager.jsonl.gz`, one script a line, with what vLLM answered and its whole free queue after each call
//! (full attention, no partial hits; block 0 is the null block). After: ids, hit lengths, tables, the order of the free queue and
//! the set of blocks with published content are equal after every call. vLLM names a full block as soon as it is allocated, so each
//! block is published here at once.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use serde_json::Value;

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_table::BlockTable;
use blocktable_core::error::Error;
use blocktable_core::ids::{BlockId, Key, TokenId};
use blocktable_core::prefix_index::KeyState;

/// A request of a script, and what the pool gave it.
#[derive(Default)]
struct Sequence {
    tokens: Vec<TokenId>,
    keys: Vec<Key>,
    table: BlockTable,
}

/// One script being replayed.
struct Replay {
    pool: BlockPool,
    hasher: BlockHasher,
    block_size: usize,
    has_caching: bool,
    live: HashMap<u64, Sequence>,
}

#[test]
fn the_recorded_scripts_of_vllm_come_out_the_same() {
    let scripts = recorded_scripts();
    assert_eq!(scripts.len(), 150);
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (number, script) in scripts.iter().enumerate() {
        let mut replay = Replay::new(script);
        for (at, op) in script["ops"].as_array().expect("ops").iter().enumerate() {
            let what = replay.apply(op).unwrap_or_else(|why| panic!("script {number}, call {at}, {op}: {why}"));
            *seen.entry(what).or_default() += 1;
            replay.compare(op).unwrap_or_else(|why| panic!("script {number}, call {at}, {op}: {why}"));
        }
    }
    for what in ["start", "start with a hit", "start refused", "append", "append refused", "free"] {
        assert!(seen.get(what).is_some_and(|&count| count >= 100), "the scripts must hold enough of {what}: {seen:?}");
    }
}

impl Replay {
    fn new(script: &Value) -> Self {
        let block_size = number(&script["block_size"]) as u32;
        Replay {
            pool: BlockPool::new(number(&script["blocks"]) as u32).expect("a pool"),
            hasher: BlockHasher::new(Algorithm::DEFAULT, block_size, b""),
            block_size: block_size as usize,
            has_caching: script["caching"].as_bool().expect("caching"),
            live: HashMap::new(),
        }
    }

    /// Does one call; what it was, for the count.
    fn apply(&mut self, op: &Value) -> Result<&'static str, String> {
        let id = number(&op["id"]);
        match op["op"].as_str() {
            Some("start") => self.start(id, op),
            Some("append") => self.append(id, op),
            Some("free") => {
                let sequence = self.live.remove(&id).ok_or("not live")?;
                self.pool.release(sequence.table, Release::Now);
                Ok("free")
            }
            other => Err(format!("an unknown call {other:?}")),
        }
    }

    /// Finds the longest cached prefix, holds it, and takes the rest: all of it or nothing.
    fn start(&mut self, id: u64, op: &Value) -> Result<&'static str, String> {
        let tokens: Vec<TokenId> = numbers(&op["tokens"]).into_iter().map(|token| token as TokenId).collect();
        let mut sequence = Sequence { tokens, ..Sequence::default() };
        self.hasher.extend(&self.hasher.plain_chain(), &mut sequence.keys, &sequence.tokens);
        let hits = self.find_hits(&sequence);
        let rest = sequence.tokens.len().div_ceil(self.block_size) - hits.len();
        let free_hits = hits.iter().filter(|&&block| self.pool.holders(block) == 0).count();
        if rest + free_hits > self.pool.num_free() as usize {
            return must_be_refused(op).map(|()| "start refused");
        }
        for &block in &hits {
            self.pool.share(&mut sequence.table, block).map_err(|error| error.to_string())?;
        }
        self.pool.take(&mut sequence.table, rest as u32).map_err(|error| error.to_string())?;
        self.publish(&sequence, hits.len());
        same("hit_tokens", (hits.len() * self.block_size) as u64, number(&op["hit_tokens"]))?;
        same("table", ids(sequence.table.blocks()), numbers(&op["table"]))?;
        self.live.insert(id, sequence);
        Ok(if hits.is_empty() { "start" } else { "start with a hit" })
    }

    fn append(&mut self, id: u64, op: &Value) -> Result<&'static str, String> {
        let mut sequence = self.live.remove(&id).ok_or("not live")?;
        let tokens = numbers(&op["tokens"]);
        let needed = (sequence.tokens.len() + tokens.len()).div_ceil(self.block_size);
        let count = (needed - sequence.table.len()) as u32;
        match self.pool.take(&mut sequence.table, count) {
            Err(Error::OutOfBlocks { .. }) => {
                self.live.insert(id, sequence);
                return must_be_refused(op).map(|()| "append refused");
            }
            other => other.map_err(|error| error.to_string())?,
        }
        let full = sequence.keys.len();
        sequence.tokens.extend(tokens.into_iter().map(|token| token as TokenId));
        self.hasher.extend(&self.hasher.plain_chain(), &mut sequence.keys, &sequence.tokens);
        self.publish(&sequence, full);
        same("table", ids(sequence.table.blocks()), numbers(&op["table"]))?;
        self.live.insert(id, sequence);
        Ok("append")
    }

    /// Blocks that hold the longest known prefix; the last token is always computed.
    fn find_hits(&self, sequence: &Sequence) -> Vec<BlockId> {
        let most = if self.has_caching { (sequence.tokens.len() - 1) / self.block_size } else { 0 };
        let lookup = |key| self.pool.index().lookup(key).map(|(block, _)| block);
        sequence.keys[..most].iter().map_while(lookup).collect()
    }

    fn publish(&mut self, sequence: &Sequence, from: usize) {
        if !self.has_caching {
            return;
        }
        for (key, &block) in sequence.keys.iter().zip(sequence.table.blocks()).skip(from) {
            self.pool.make_pending(block, *key).expect("a block of this pool");
            self.pool.publish(block).expect("a block of this pool");
        }
    }

    /// The state after a call, refused ones too.
    fn compare(&self, op: &Value) -> Result<(), String> {
        let free: Vec<BlockId> = self.pool.free_blocks().collect();
        same("free_queue", ids(&free), numbers(&op["free_queue"]))?;
        let all = (1..self.pool.num_blocks()).map(|id| self.pool.block(id).expect("a block of this pool"));
        let cached: Vec<BlockId> = all.filter(|&block| self.pool.index().state(block) == KeyState::Published).collect();
        same("cached", ids(&cached), numbers(&op["cached"]))?;
        self.pool.audit(self.live.values().map(|sequence| &sequence.table)).map_err(|error| error.to_string())
    }
}

fn recorded_scripts() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/vllm_kv_manager.jsonl.gz");
    let mut text = String::new();
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    GzDecoder::new(file).read_to_string(&mut text).expect("a gzip file of text");
    text.lines().map(|line| serde_json::from_str(line).expect("one script a line")).collect()
}

fn must_be_refused(op: &Value) -> Result<(), String> {
    if op["refused"] == true { Ok(()) } else { Err("ours is refused, vLLM's was not".to_owned()) }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, vllm: T) -> Result<(), String> {
    if ours == vllm { Ok(()) } else { Err(format!("{what}: ours is {ours:?}, vLLM's {vllm:?}")) }
}

fn ids(blocks: &[BlockId]) -> Vec<u64> {
    blocks.iter().map(|block| u64::from(block.get())).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} must be a number"))
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap_or_else(|| panic!("{value} must be a list")).iter().map(number).collect()
}

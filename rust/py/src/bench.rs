//! Loops of `blocktable bench` that are timed inside Rust. Each checks its answer before it is timed.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Instant;

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_table::BlockTable;
use blocktable_core::chain::{Domain, Identity};
use blocktable_core::ids::{BlockId, Key};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::{invalid, to_python};

type Figures = HashMap<&'static str, f64>;

fn wrong(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("wrong answer, not timed: {what}"))
}

/// A key unlike any other: a counter, spread.
fn key(n: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    key[8..16].copy_from_slice(&n.to_le_bytes());
    Key(key)
}

/// Takes `batch` blocks into a table, gives them content if asked, and releases them.
fn cycle(
    pool: &mut BlockPool,
    batch: u32,
    published: bool,
    names: &mut u64,
) -> Result<Vec<BlockId>, blocktable_core::Error> {
    let mut table = BlockTable::new();
    pool.take(&mut table, batch)?;
    if published {
        for &block in table.blocks() {
            *names += 1;
            pool.make_pending(block, key(*names)).expect("a block of this pool");
            pool.publish(block).expect("a block of this pool");
        }
    }
    let blocks = table.blocks().to_vec();
    pool.release(table, Release::Now);
    Ok(blocks)
}

/// Time take + release.
#[pyfunction]
#[pyo3(signature = (*, num_blocks, batch, published, rounds))]
pub fn bench_pool(py: Python<'_>, num_blocks: u32, batch: u32, published: bool, rounds: u32) -> PyResult<Figures> {
    if batch == 0 || batch >= num_blocks || rounds == 0 {
        return Err(invalid(py, "batch", batch, "batch and rounds must be at least 1, batch below num_blocks"));
    }
    let refused = |error| to_python(py, error);
    let start = Instant::now();
    let mut pool = BlockPool::new(num_blocks).map_err(refused)?;
    let init_ms = start.elapsed().as_secs_f64() * 1e3;
    let mut names = 0;
    let start = Instant::now();
    let mut table = BlockTable::new();
    pool.take(&mut table, num_blocks - 1).map_err(refused)?;
    let ascending = table.blocks().iter().map(|block| block.get()).eq(1..num_blocks);
    pool.release(table, Release::Now);
    let first_pass_ms = start.elapsed().as_secs_f64() * 1e3;
    let blocks = cycle(&mut pool, batch, published, &mut names).map_err(refused)?;
    if !ascending || blocks.iter().map(|block| block.get()).ne((num_blocks - batch..num_blocks).rev()) {
        return Err(wrong("block ids are out of order"));
    }
    if published {
        // The whole pool carries content before the clock starts.
        for _ in 0..num_blocks.div_ceil(batch) {
            cycle(&mut pool, batch, true, &mut names).map_err(refused)?;
        }
    }
    pool.audit([]).map_err(refused)?;
    let mut table = BlockTable::new();
    let mut lists: Vec<BlockId> = Vec::with_capacity(batch as usize);
    let start = Instant::now();
    for _ in 0..rounds {
        pool.take(&mut table, batch).map_err(refused)?;
        if published {
            for &block in table.blocks() {
                names += 1;
                pool.make_pending(block, key(names)).expect("a block of this pool");
                pool.publish(block).expect("a block of this pool");
            }
        }
        lists.extend_from_slice(table.blocks());
        pool.release(std::mem::take(&mut table), Release::Now);
        black_box(&lists);
        lists.clear();
    }
    let ns = start.elapsed().as_secs_f64() * 1e9;
    pool.audit([]).map_err(refused)?;
    Ok(HashMap::from([
        ("ns_per_block", ns / f64::from(rounds) / f64::from(batch)),
        ("init_ms", init_ms),
        ("first_pass_ms", first_pass_ms),
        ("bytes_per_block", pool.bytes_per_block()),
    ]))
}

/// Time chained hashing of 16-token blocks.
#[pyfunction]
#[pyo3(signature = (*, algorithm, blocks))]
pub fn bench_hash(py: Python<'_>, algorithm: &str, blocks: usize) -> PyResult<Figures> {
    let algorithm = crate::hasher::algorithm(py, "algorithm", algorithm)?;
    let refused = |error| to_python(py, error);
    let identity = || Identity::of(Domain::Deployment);
    let golden = BlockHasher::new(algorithm, 2, b"golden").prompt(vec![1, 2, 3, 4], identity()).map_err(refused)?;
    let expected = match algorithm {
        Algorithm::Blake3 => 11_687_739_627_672_233_699,
        Algorithm::Sha256 => 1_930_719_949_772_491_069,
        Algorithm::Sha256Cbor => 10_704_298_652_343_596_036,
        Algorithm::VllmSha256 => 4_936_579_312_663_426_164,
    };
    if golden.keys()[1].short() != expected {
        return Err(wrong("a known key came out differently"));
    }
    let mut hasher = BlockHasher::new(algorithm, 16, b"");
    let tokens: Vec<u32> = (0..16 * blocks as u32).collect();
    let mut keys = Vec::with_capacity(blocks);
    let chain = hasher.plain_chain();
    let start = Instant::now();
    hasher.extend(&chain, &mut keys, black_box(&tokens));
    let ns = start.elapsed().as_secs_f64() * 1e9 / blocks as f64;
    black_box(&keys);
    Ok(HashMap::from([("ns_per_block", ns), ("tokens_per_s", 16e9 / ns)]))
}

/// Time match + pin + release of one prompt whose keys are known.
#[pyfunction]
#[pyo3(signature = (*, num_blocks, tokens, cached, aged, rounds))]
pub fn bench_match(
    py: Python<'_>,
    num_blocks: u32,
    tokens: u32,
    cached: bool,
    aged: bool,
    rounds: u32,
) -> PyResult<Figures> {
    let blocks = tokens / 16;
    if blocks == 0 || blocks >= num_blocks || rounds == 0 {
        return Err(invalid(py, "tokens", tokens, "must be at least one block of 16 and fit the pool"));
    }
    let refused = |error| to_python(py, error);
    let mut pool = BlockPool::new(num_blocks).map_err(refused)?;
    if aged {
        age(&mut pool).map_err(refused)?;
    }
    let keys: Vec<Key> = (0..u64::from(blocks)).map(|n| key(n + (1 << 40))).collect();
    if cached {
        let mut table = BlockTable::new();
        pool.take(&mut table, blocks).map_err(refused)?;
        for (&block, &key) in table.blocks().iter().zip(&keys) {
            pool.make_pending(block, key).expect("a block of this pool");
            pool.publish(block).expect("a block of this pool");
        }
        pool.release(table, Release::Now);
    }
    let mut total = 0.0;
    let mut hits = Vec::new();
    for _ in 0..rounds {
        let mut table = BlockTable::new();
        let start = Instant::now();
        hits.clear();
        hits.extend(keys.iter().map_while(|key| pool.index().lookup(key)).map(|(block, _)| block));
        pool.share_all(&mut table, &hits).map_err(refused)?;
        total += start.elapsed().as_secs_f64();
        if table.len() != if cached { blocks as usize } else { 0 } {
            return Err(wrong("the hit has another length"));
        }
        pool.release(table, Release::Now);
    }
    pool.audit([]).map_err(refused)?;
    Ok(HashMap::from([("match_us", total * 1e6 / f64::from(rounds))]))
}

/// Fills the pool with published content and shuffles the free queue.
fn age(pool: &mut BlockPool) -> Result<(), blocktable_core::Error> {
    let mut table = BlockTable::new();
    pool.take(&mut table, pool.usable())?;
    for (n, &block) in table.blocks().iter().enumerate() {
        pool.make_pending(block, key(n as u64 + 1)).expect("a block of this pool");
        pool.publish(block).expect("a block of this pool");
    }
    let mut blocks = table.blocks().to_vec();
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    for i in (1..blocks.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        blocks.swap(i, (state % (i as u64 + 1)) as usize);
    }
    pool.release_blocks(&blocks, Release::Now)?;
    // The blocks are released: the table must not name them any more.
    std::mem::forget(table);
    Ok(())
}

//! Random paged cases, an oracle over positions in float64, and the checks that every kernel must pass. A check tells what is wrong.

#![allow(dead_code)]

pub mod halves;
pub mod layers;
pub mod linear;

use blocktable_cpu::{Attention, Dtype, Isa, Tensor, attend, store_kv};

/// A small generator (splitmix64), so that a case is its seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    /// About normal, mean 0 and deviation 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32).sum::<f32>() - 6.0
    }
}

#[derive(Clone, Debug)]
pub struct Shape {
    pub block_size: usize,
    pub kv_heads: usize,
    pub grouped: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub window: usize,
    pub softcap: f32,
    pub has_sinks: bool,
    pub dtype: Dtype,
    /// (queries, positions) of each sequence.
    pub lengths: Vec<(usize, usize)>,
    /// What every byte that no query sees is made of.
    pub unseen: f32,
}

impl Shape {
    pub fn small(lengths: &[(usize, usize)]) -> Shape {
        Shape {
            block_size: 16,
            kv_heads: 2,
            grouped: 3,
            key_width: 64,
            value_width: 64,
            window: 0,
            softcap: 0.0,
            has_sinks: false,
            dtype: Dtype::F32,
            lengths: lengths.to_vec(),
            unseen: f32::NAN,
        }
    }
    pub fn heads(&self) -> usize {
        self.kv_heads * self.grouped
    }
    /// Bounds of one rounding of an answer.
    pub fn tolerance(&self) -> f64 {
        match self.dtype {
            Dtype::F32 => 1e-5,
            Dtype::F16 => 2e-3,
            _ => 1.6e-2,
        }
    }
}

/// Numbers in the format of a case.
pub struct Numbers {
    pub bytes: Vec<u64>,
    dtype: Dtype,
}

impl Numbers {
    pub fn new(count: usize, dtype: Dtype) -> Numbers {
        Numbers { bytes: vec![0; (count * dtype.size()).div_ceil(8)], dtype }
    }
    pub fn data(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr().cast()
    }
    pub fn set(&mut self, at: usize, x: f32) {
        match self.dtype {
            // SAFETY: `at` is below the count of these tests' own memory.
            Dtype::F32 => unsafe { self.data().cast::<f32>().add(at).write(x) },
            // SAFETY: as above.
            _ => unsafe { self.data().cast::<u16>().add(at).write(narrow(x, self.dtype)) },
        }
    }
    pub fn get(&self, at: usize) -> f32 {
        let data: *const u8 = self.bytes.as_ptr().cast();
        match self.dtype {
            // SAFETY: `at` is below the count of these tests' own memory.
            Dtype::F32 => unsafe { data.cast::<f32>().add(at).read() },
            // SAFETY: as above.
            _ => widen(unsafe { data.cast::<u16>().add(at).read() }, self.dtype),
        }
    }
}

/// Cuts instead of rounding: the cases' numbers are made exact by it before anything is computed.
fn narrow(x: f32, dtype: Dtype) -> u16 {
    if dtype == Dtype::Bf16 {
        return (x.to_bits() >> 16) as u16;
    }
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    if !x.is_finite() {
        return sign | if x.is_nan() { 0x7e00 } else { 0x7c00 };
    }
    let exponent = ((bits >> 23) & 0xff) as i32 - 112;
    if exponent <= 0 { sign } else { sign | ((exponent as u16) << 10) | ((bits >> 13) & 0x3ff) as u16 }
}

fn widen(bits: u16, dtype: Dtype) -> f32 {
    if dtype == Dtype::Bf16 {
        return f32::from_bits(u32::from(bits) << 16);
    }
    let (sign, exponent, rest) = (u32::from(bits & 0x8000) << 16, (bits >> 10) & 31, u32::from(bits & 0x3ff));
    match exponent {
        0 => f32::from_bits(sign | (rest as f32 * 2f32.powi(-24)).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | (rest << 13)),
        _ => f32::from_bits(sign | ((u32::from(exponent) + 112) << 23) | (rest << 13)),
    }
}

/// A case: positions' keys and values, and the same in shuffled blocks of a pool with other layers around.
pub struct Case {
    pub shape: Shape,
    pub q: Numbers,
    pub pool: Numbers,
    pub block_step: usize,
    pub num_blocks: usize,
    pub tables: Vec<i32>,
    pub columns: usize,
    pub starts: Vec<i32>,
    pub lens: Vec<i32>,
    pub sinks: Vec<f32>,
}

impl Case {
    pub fn new(shape: Shape, random: &mut Random) -> Case {
        let size = shape.block_size;
        let counts: Vec<usize> = shape.lengths.iter().map(|&(_, len)| len.div_ceil(size)).collect();
        let num_blocks = counts.iter().sum::<usize>() + 2;
        let mut free: Vec<i32> = (1..num_blocks as i32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        let columns = counts.iter().max().map_or(1, |most| most + 1);
        let mut tables = vec![0; shape.lengths.len() * columns];
        for (row, &count) in counts.iter().enumerate() {
            for column in 0..count {
                // Every third sequence shares the blocks of the one before, as far as both have full ones.
                let shared = row % 3 == 2 && (column + 1) * size <= shape.lengths[row].1.min(shape.lengths[row - 1].1);
                let id = if shared { tables[(row - 1) * columns + column] } else { free.pop().unwrap() };
                tables[row * columns + column] = id;
            }
        }
        let tokens: usize = shape.lengths.iter().map(|&(queries, _)| queries).sum();
        let mut starts = vec![0];
        for &(queries, _) in &shape.lengths {
            starts.push(starts.last().unwrap() + queries as i32);
        }
        let lens = shape.lengths.iter().map(|&(_, len)| len as i32).collect();
        let block_step = shape.kv_heads * size * (shape.key_width + shape.value_width) + 5;
        let mut pool = Numbers::new(num_blocks * block_step, shape.dtype);
        (0..num_blocks * block_step).for_each(|at| pool.set(at, shape.unseen));
        let mut q = Numbers::new(tokens * shape.heads() * shape.key_width, shape.dtype);
        (0..tokens * shape.heads() * shape.key_width).for_each(|at| q.set(at, 2.0 * random.normal()));
        let sinks = if shape.has_sinks { (0..shape.heads()).map(|_| random.normal()).collect() } else { Vec::new() };
        let mut case = Case { shape, q, pool, block_step, num_blocks, tables, columns, starts, lens, sinks };
        for row in 0..case.lens.len() {
            let (queries, len) = case.shape.lengths[row];
            if queries > 0 {
                for position in case.first_seen(len - queries)..len {
                    for head in 0..case.shape.kv_heads {
                        for d in 0..case.shape.key_width {
                            let at = case.key_at(row, position, head, d);
                            case.pool.set(at, random.normal());
                        }
                        for d in 0..case.shape.value_width {
                            let at = case.value_at(row, position, head, d);
                            case.pool.set(at, random.normal());
                        }
                    }
                }
            }
        }
        case
    }

    pub fn first_seen(&self, position: usize) -> usize {
        if self.shape.window == 0 { 0 } else { (position + 1).saturating_sub(self.shape.window) }
    }

    fn row_at(&self, row: usize, position: usize, head: usize) -> (usize, usize) {
        let size = self.shape.block_size;
        let block = self.tables[row * self.columns + position / size] as usize;
        (block * self.block_step, head * size + position % size)
    }
    pub fn key_at(&self, row: usize, position: usize, head: usize, d: usize) -> usize {
        let (block, line) = self.row_at(row, position, head);
        block + line * self.shape.key_width + d
    }
    pub fn value_at(&self, row: usize, position: usize, head: usize, d: usize) -> usize {
        let (block, line) = self.row_at(row, position, head);
        let keys = self.shape.kv_heads * self.shape.block_size * self.shape.key_width;
        block + keys + line * self.shape.value_width + d
    }

    pub fn tokens(&self) -> usize {
        *self.starts.last().unwrap() as usize
    }

    /// The kernel's answer.
    pub fn run(&mut self, isa: Isa, threads: usize) -> Result<Vec<f32>, String> {
        let shape = self.shape.clone();
        let (tokens, heads, size) = (self.tokens(), shape.heads(), shape.block_size);
        let mut out = Numbers::new(tokens * heads * shape.value_width, shape.dtype);
        (0..tokens * heads * shape.value_width).for_each(|at| out.set(at, 77.0));
        let keys = shape.kv_heads * size * shape.key_width;
        let values_from = self.pool.data().wrapping_add(keys * shape.dtype.size());
        let new = |name, data, dtype, shape: &[usize], strides: &[usize]| {
            // SAFETY: every shape below is that of memory of this case.
            unsafe { Tensor::new(name, data, dtype, shape, strides).unwrap() }
        };
        let (dk, dv) = (shape.key_width, shape.value_width);
        let rows = |width: usize| [self.block_step, size * width, width, 1];
        let sizes = |width: usize| [self.num_blocks, shape.kv_heads, size, width];
        let lens = self.lens.len();
        let inputs = Attention {
            q: new("q", self.q.data(), shape.dtype, &[tokens, heads, dk], &[heads * dk, dk, 1]),
            k_cache: new("k_cache", self.pool.data(), shape.dtype, &sizes(dk), &rows(dk)),
            v_cache: new("v_cache", values_from, shape.dtype, &sizes(dv), &rows(dv)),
            out: new("out", out.data(), shape.dtype, &[tokens, heads, dv], &[heads * dv, dv, 1]),
            block_tables: new(
                "block_tables",
                self.tables.as_mut_ptr().cast(),
                Dtype::I32,
                &[lens, self.columns],
                &[self.columns, 1],
            ),
            query_starts: new("query_starts", self.starts.as_mut_ptr().cast(), Dtype::I32, &[lens + 1], &[1]),
            seq_lens: new("seq_lens", self.lens.as_mut_ptr().cast(), Dtype::I32, &[lens], &[1]),
            sinks: shape.has_sinks.then(|| new("sinks", self.sinks.as_mut_ptr().cast(), Dtype::F32, &[heads], &[1])),
            scale: 1.0 / (dk as f32).sqrt(),
            softcap: shape.softcap,
            window: shape.window,
        };
        attend(&inputs, isa, threads).map_err(|refusal| refusal.to_string())?;
        Ok((0..tokens * heads * dv).map(|at| out.get(at)).collect())
    }

    /// The same over positions, one head and one query at a time.
    pub fn expected(&self) -> Vec<f64> {
        let shape = &self.shape;
        let (heads, dk, dv) = (shape.heads(), shape.key_width, shape.value_width);
        let mut out = Vec::new();
        for (row, &(queries, len)) in shape.lengths.iter().enumerate() {
            for query in 0..queries {
                let (token, position) = (self.starts[row] as usize + query, len - queries + query);
                for head in 0..heads {
                    let kv_head = head / shape.grouped;
                    let seen = self.first_seen(position)..position + 1;
                    let mut scores: Vec<f64> = seen
                        .clone()
                        .map(|j| {
                            let dot: f64 = (0..dk)
                                .map(|d| {
                                    let q = self.q.get((token * heads + head) * dk + d);
                                    f64::from(q) * f64::from(self.pool.get(self.key_at(row, j, kv_head, d)))
                                })
                                .sum();
                            let score = dot / f64::from((dk as f32).sqrt());
                            let cap = f64::from(shape.softcap);
                            if cap > 0.0 { cap * (score / cap).tanh() } else { score }
                        })
                        .collect();
                    let sink = shape.has_sinks.then(|| f64::from(self.sinks[head]));
                    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
                    let total = scores.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
                    for d in 0..dv {
                        let values = seen.clone().map(|j| f64::from(self.pool.get(self.value_at(row, j, kv_head, d))));
                        out.push(values.zip(&scores).map(|(value, weight)| value * weight).sum::<f64>() / total);
                    }
                }
            }
        }
        out
    }
}

/// The kernel gives what attention over positions gives.
pub fn equals_oracle(shape: &Shape, seed: u64, isa: Isa, threads: usize) -> Result<(), String> {
    let mut case = Case::new(shape.clone(), &mut Random(seed));
    let found = case.run(isa, threads)?;
    let wanted = case.expected();
    let worst = found.iter().zip(&wanted).map(|(a, b)| (f64::from(*a) - b).abs() / b.abs().max(1.0));
    let worst = worst.fold(0.0, |worst: f64, one| if one <= worst { worst } else { one });
    if worst <= shape.tolerance() {
        return Ok(());
    }
    Err(format!("{} on {threads} threads: worst difference {worst:e} of {shape:?}, seed {seed}", isa.name()))
}

/// A row that is not finite shows in the answers of the queries that see it and in no other.
pub fn broken_row_stays_its_owners(shape: &Shape, sequence: usize, position: usize, isa: Isa) -> Result<(), String> {
    for poison in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new(shape.clone(), &mut Random(5));
        let wanted = case.expected();
        for head in 0..shape.kv_heads {
            for d in 0..shape.value_width {
                let at = case.value_at(sequence, position, head, d);
                case.pool.set(at, poison);
            }
        }
        let found = case.run(isa, 2)?;
        let width = shape.heads() * shape.value_width;
        for (row, &(queries, len)) in shape.lengths.iter().enumerate() {
            for query in 0..queries {
                let own = (case.starts[row] as usize + query) * width..;
                let at = len - queries + query;
                let sees = row == sequence && (case.first_seen(at)..=at).contains(&position);
                for (found, wanted) in found[own.clone()].iter().zip(&wanted[own]).take(width) {
                    let right = (f64::from(*found) - wanted).abs() <= shape.tolerance();
                    if sees == right {
                        return Err(format!("{}: sequence {row}, query {query}: {found} for {wanted}", isa.name()));
                    }
                }
            }
        }
    }
    Ok(())
}

/// A store changes the slots that it names and no other byte.
pub fn stores_its_slots(dtype: Dtype) -> Result<(), String> {
    let (heads, size, dk, dv, blocks) = (2, 7, 6, 9, 5);
    let slots: Vec<i64> = vec![8, -1, 30, 13, 14, -7, 34];
    let tokens = slots.len();
    let step = heads * size * (dk + dv) + 3;
    let (mut k, mut v) = (Numbers::new(tokens * heads * dk, dtype), Numbers::new(tokens * heads * dv, dtype));
    let (mut pool, mut wanted) = (Numbers::new(blocks * step, dtype), Numbers::new(blocks * step, dtype));
    let mut random = Random(1);
    (0..tokens * heads * dk).for_each(|at| k.set(at, random.normal()));
    (0..tokens * heads * dv).for_each(|at| v.set(at, random.normal()));
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let (block, offset) = (slot as usize / size, slot as usize % size);
        for head in 0..heads {
            let row = head * size + offset;
            (0..dk).for_each(|d| wanted.set(block * step + row * dk + d, k.get((token * heads + head) * dk + d)));
            let from = block * step + heads * size * dk + row * dv;
            (0..dv).for_each(|d| wanted.set(from + d, v.get((token * heads + head) * dv + d)));
        }
    }
    let values_from = pool.data().wrapping_add(heads * size * dk * dtype.size());
    let mut named = slots.clone();
    let new = |name, data, dtype, shape: &[usize], strides: &[usize]| {
        // SAFETY: every shape below is that of memory of this function.
        unsafe { Tensor::new(name, data, dtype, shape, strides).unwrap() }
    };
    store_kv(
        &new("k", k.data(), dtype, &[tokens, heads, dk], &[heads * dk, dk, 1]),
        &new("v", v.data(), dtype, &[tokens, heads, dv], &[heads * dv, dv, 1]),
        &new("k_cache", pool.data(), dtype, &[blocks, heads, size, dk], &[step, size * dk, dk, 1]),
        &new("v_cache", values_from, dtype, &[blocks, heads, size, dv], &[step, size * dv, dv, 1]),
        &new("slots", named.as_mut_ptr().cast(), Dtype::I64, &[tokens], &[1]),
        1,
    )
    .map_err(|refusal| refusal.to_string())?;
    if pool.bytes == wanted.bytes { Ok(()) } else { Err("other bytes than those of the slots".to_owned()) }
}

/// Rows more than 2^31 numbers, and 2^32 bytes, apart are those that are read.
pub fn far_apart(isa: Isa) -> Result<(), String> {
    // Two blocks of one row of one number, in memory that the system hands out where it is touched.
    let step = (1usize << 31) + 4;
    let layout = std::alloc::Layout::from_size_align(2 * (step + 8), 16).map_err(|error| error.to_string())?;
    // SAFETY: the size is not 0.
    let data = unsafe { std::alloc::alloc_zeroed(layout) };
    assert!(!data.is_null(), "no room for addresses");
    let (mut q, mut out) = (Numbers::new(1, Dtype::Bf16), Numbers::new(1, Dtype::Bf16));
    q.set(0, 1.0);
    // SAFETY: the first numbers of both blocks; bf16's 1 and 3.
    unsafe {
        data.cast::<u16>().add(step).write(0x3f80);
        data.cast::<u16>().add(step + 1).write(0x4040);
    }
    let (mut table, mut starts, mut lens) = (vec![1i32], vec![0i32, 1], vec![2i32]);
    let new = |name, data, dtype, shape: &[usize], strides: &[usize]| {
        // SAFETY: every shape below is that of memory of this function.
        unsafe { Tensor::new(name, data, dtype, shape, strides).unwrap() }
    };
    let cache = |name, data| new(name, data, Dtype::Bf16, &[2, 1, 2, 1], &[step, 2, 1, 1]);
    let inputs = Attention {
        q: new("q", q.data(), Dtype::Bf16, &[1, 1, 1], &[1, 1, 1]),
        k_cache: cache("k_cache", data),
        v_cache: cache("v_cache", data),
        out: new("out", out.data(), Dtype::Bf16, &[1, 1, 1], &[1, 1, 1]),
        block_tables: new("block_tables", table.as_mut_ptr().cast(), Dtype::I32, &[1, 1], &[1, 1]),
        query_starts: new("query_starts", starts.as_mut_ptr().cast(), Dtype::I32, &[2], &[1]),
        seq_lens: new("seq_lens", lens.as_mut_ptr().cast(), Dtype::I32, &[1], &[1]),
        sinks: None,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
    };
    let done = attend(&inputs, isa, 1).map_err(|refusal| refusal.to_string());
    // SAFETY: allocated above with this layout.
    unsafe { std::alloc::dealloc(data, layout) };
    done?;
    let (low, high) = (1f64.exp(), 3f64.exp());
    let wanted = (low + 3.0 * high) / (low + high);
    if (f64::from(out.get(0)) - wanted).abs() < 0.02 { Ok(()) } else { Err(format!("{} for {wanted}", out.get(0))) }
}

//! Random decoder layers over pages, run whole and in parts.

use blocktable_cpu::{
    Activation, AfterAttention, Attention, BeforeAttention, DecoderLayer, DecoderLayers, Dtype, Isa, Norm, Step,
    Tensor, after_attention, attend, before_attention, decoder_layers, store_kv,
};

use super::Random;
use super::linear::{matrix, matrix_to, vector};

const WIDTH: usize = 24;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const TURNED: usize = 8;
const BETWEEN: usize = 20;
const BLOCK: usize = 4;
const COLUMNS: usize = 12;
const EPS: f32 = 0.01;
const ALL: usize = (HEADS + 2 * KV_HEADS) * TURNED;

/// (queries, positions that the last one sees) of each sequence.
pub const SEQUENCES: [(usize, usize); 6] = [(1, 7), (1, 40), (5, 9), (1, 3), (37, 37), (2, 30)];

struct One {
    norms: [Vec<f32>; 2],
    weights: [Vec<f32>; 3],
    biases: [Vec<f32>; 3],
    project: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    window: usize,
}

/// What a call gets wrong.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    NoLayers,
    Step,
    Values,
    Down,
}

pub struct Model {
    layers: Vec<One>,
}

/// What a step reads and writes beside the parameters.
struct Rows {
    hidden: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    tables: Vec<i32>,
    starts: Vec<i32>,
    lens: Vec<i32>,
    slots: Vec<i64>,
    pages: Vec<[Vec<f32>; 2]>,
}

fn drawn(random: &mut Random, count: usize, size: f32) -> Vec<f32> {
    (0..count).map(|_| random.normal() * size).collect()
}

fn ints<'a, T>(name: &'static str, numbers: &'a [T], dtype: Dtype, shape: &[usize]) -> Tensor<'a> {
    let strides = if shape.len() == 2 { vec![shape[1], 1] } else { vec![1] };
    // SAFETY: the tests' own memory, of that many numbers.
    unsafe { Tensor::new(name, numbers.as_ptr().cast_mut().cast(), dtype, shape, &strides) }.unwrap()
}

fn pages<'a>(name: &'static str, memory: &'a [f32], width: usize) -> Tensor<'a> {
    let blocks = memory.len() / (KV_HEADS * BLOCK * width);
    let shape = [blocks, KV_HEADS, BLOCK, width];
    let strides = [KV_HEADS * BLOCK * width, BLOCK * width, width, 1];
    // SAFETY: as above.
    unsafe { Tensor::new(name, memory.as_ptr().cast_mut().cast(), Dtype::F32, &shape, &strides) }.unwrap()
}

impl Rows {
    /// Numbers and blocks of a sequence depend on what it is alone.
    fn new(sequences: &[(usize, usize)], layers: usize) -> Rows {
        let (mut hidden, mut cos, mut sin) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tables, mut starts, mut lens, mut slots) = (Vec::new(), vec![0], Vec::new(), Vec::new());
        let blocks = 64 * COLUMNS;
        let mut random = Random(3);
        let pages: Vec<[Vec<f32>; 2]> =
            (0..layers).map(|_| [0, 1].map(|_| drawn(&mut random, blocks * KV_HEADS * BLOCK * TURNED, 1.0))).collect();
        for &(queries, len) in sequences {
            let mut random = Random((queries * 100 + len) as u64);
            hidden.extend(drawn(&mut random, queries * WIDTH, 0.5));
            cos.extend(drawn(&mut random, queries * TURNED, 1.0));
            sin.extend(drawn(&mut random, queries * TURNED, 1.0));
            let first = 1 + (queries * 7 + len * 3) % 60 * COLUMNS;
            let table: Vec<i32> = (0..COLUMNS).map(|column| (first + (column * 5) % COLUMNS) as i32).collect();
            for position in len - queries..len {
                slots.push(i64::from(table[position / BLOCK]) * BLOCK as i64 + (position % BLOCK) as i64);
            }
            tables.extend(table);
            lens.push(len as i32);
            starts.push(starts.last().unwrap() + queries as i32);
        }
        Rows { hidden, cos, sin, tables, starts, lens, slots, pages }
    }

    fn count(&self) -> usize {
        self.slots.len()
    }

    fn step(&self) -> Step<'_> {
        let sequences = self.lens.len();
        Step {
            block_tables: ints("block_tables", &self.tables, Dtype::I32, &[sequences, COLUMNS]),
            query_starts: ints("query_starts", &self.starts, Dtype::I32, &[sequences + 1]),
            seq_lens: ints("seq_lens", &self.lens, Dtype::I32, &[sequences]),
            slots: ints("slots", &self.slots, Dtype::I64, &[self.count()]),
        }
    }
}

impl Model {
    pub fn new(layers: usize) -> Model {
        let random = &mut Random(17);
        let mut matrix = |rows: usize, width: usize| drawn(random, rows * width, 1.0 / (width as f32).sqrt());
        let outputs = [HEADS * TURNED, KV_HEADS * TURNED, KV_HEADS * TURNED];
        let layers = (0..layers)
            .map(|number| One {
                norms: [matrix(WIDTH, 1), matrix(WIDTH, 1)],
                weights: outputs.map(|outputs| matrix(outputs, WIDTH)),
                biases: outputs.map(|outputs| matrix(outputs, 1)),
                project: matrix(WIDTH, HEADS * TURNED),
                gate: matrix(BETWEEN, WIDTH),
                up: matrix(BETWEEN, WIDTH),
                down: matrix(WIDTH, BETWEEN),
                window: if number == 1 { 6 } else { 0 },
            })
            .collect();
        Model { layers }
    }

    /// [M, K] of all rows.
    pub fn run(&self, sequences: &[(usize, usize)], isa: Isa, threads: usize) -> Result<Vec<f32>, String> {
        let rows = Rows::new(sequences, self.layers.len());
        let mut out = vec![f32::NAN; rows.count() * WIDTH];
        self.call(&rows, &mut out, Fault::None, isa, threads)?;
        Ok(out)
    }

    /// Why a faulty call is refused, and whether nothing was written.
    pub fn run_with(&self, fault: Fault) -> (String, bool) {
        let rows = Rows::new(&SEQUENCES, self.layers.len());
        let before = rows.pages.clone();
        let mut out = vec![7.0; rows.count() * WIDTH];
        let refused = self.call(&rows, &mut out, fault, Isa::best(), 2).unwrap_err();
        (refused, out.iter().all(|&x| x == 7.0) && before == rows.pages)
    }

    fn call(&self, rows: &Rows, out: &mut [f32], fault: Fault, isa: Isa, threads: usize) -> Result<(), String> {
        let all: Vec<_> =
            self.layers.iter().enumerate().map(|(at, one)| one.layer(&rows.pages[at], at, fault)).collect();
        let count = rows.count();
        let inputs = DecoderLayers {
            hidden: matrix("hidden", &rows.hidden, [count, WIDTH], WIDTH),
            cos: matrix("cos", &rows.cos, [count, TURNED], TURNED),
            sin: matrix("sin", &rows.sin, [count, TURNED], TURNED),
            layers: if fault == Fault::NoLayers { &[] } else { &all },
            steps: &[rows.step()],
            out: matrix_to("out", out, [count, WIDTH]),
        };
        decoder_layers(&inputs, isa, threads).map(|_| ()).map_err(|refusal| refusal.to_string())
    }

    /// Whether the whole gives what the parts give, in the answer and in the pages.
    pub fn equals_parts(&self, sequences: &[(usize, usize)], isa: Isa) -> Result<(), String> {
        let (whole, parts) = (Rows::new(sequences, self.layers.len()), Rows::new(sequences, self.layers.len()));
        let mut out = vec![f32::NAN; whole.count() * WIDTH];
        self.call(&whole, &mut out, Fault::None, isa, 2)?;
        let mut hidden = parts.hidden.clone();
        for (number, one) in self.layers.iter().enumerate() {
            hidden = one.in_parts(&parts, &hidden, &parts.pages[number], isa);
        }
        if out.iter().any(|x| x.is_nan()) || out != hidden {
            return Err("the answers differ".to_owned());
        }
        if whole.pages == parts.pages { Ok(()) } else { Err("the pages differ".to_owned()) }
    }
}

impl One {
    fn norm(&self, at: usize) -> Norm<'_> {
        Norm { weight: vector("norm", &self.norms[at]), eps: EPS }
    }

    fn weights(&self) -> [Tensor<'_>; 3] {
        [0, 1, 2]
            .map(|at| matrix(["q", "k", "v"][at], &self.weights[at], [self.weights[at].len() / WIDTH, WIDTH], WIDTH))
    }

    fn layer<'a>(&'a self, memory: &'a [Vec<f32>; 2], number: usize, fault: Fault) -> DecoderLayer<'a> {
        let is_faulty = number == 1;
        let between = if is_faulty && fault == Fault::Down { 9 } else { BETWEEN };
        let value_width = if is_faulty && fault == Fault::Values { TURNED + 1 } else { TURNED };
        DecoderLayer {
            norms: [self.norm(0), self.norm(1)],
            weights: self.weights(),
            biases: Some([0, 1, 2].map(|at| vector("bias", &self.biases[at]))),
            project: matrix("project", &self.project, [WIDTH, HEADS * TURNED], HEADS * TURNED),
            gate: matrix("gate", &self.gate, [BETWEEN, WIDTH], WIDTH),
            up: matrix("up", &self.up, [BETWEEN, WIDTH], WIDTH),
            activation: Activation::Silu,
            down: matrix("down", &self.down, [WIDTH, between], between),
            k_cache: pages("k_cache", &memory[0], TURNED),
            v_cache: pages("v_cache", &memory[1], value_width),
            scale: 0.3,
            softcap: 0.0,
            window: self.window,
            step: usize::from(is_faulty && fault == Fault::Step),
        }
    }

    /// The same by the calls for the parts: rows of sequences that bring several on `isa`, the others without tiles.
    fn in_parts(&self, rows: &Rows, hidden: &[f32], memory: &[Vec<f32>; 2], isa: Isa) -> Vec<f32> {
        let count = rows.count();
        let alone = if isa.name() == "amx" { Isa::named("avx512").unwrap() } else { isa };
        let is_chunk = |row: usize| {
            rows.starts.windows(2).any(|b| (b[0] as usize..b[1] as usize).contains(&row) && b[1] - b[0] > 1)
        };
        let choose = |chunks: Vec<f32>, singles: Vec<f32>, width: usize| -> Vec<f32> {
            (0..count * width).map(|at| if is_chunk(at / width) { chunks[at] } else { singles[at] }).collect()
        };
        let before = |isa| {
            let mut out = vec![f32::NAN; count * ALL];
            let inputs = BeforeAttention {
                hidden: matrix("hidden", hidden, [count, WIDTH], WIDTH),
                norm: self.norm(0),
                weights: self.weights(),
                biases: Some([0, 1, 2].map(|at| vector("bias", &self.biases[at]))),
                cos: matrix("cos", &rows.cos, [count, TURNED], TURNED),
                sin: matrix("sin", &rows.sin, [count, TURNED], TURNED),
                out: matrix_to("out", &mut out, [count, ALL]),
            };
            before_attention(&inputs, isa, 2).unwrap();
            out
        };
        let between = choose(before(isa), before(alone), ALL);
        let part = |name, first: usize, heads: usize| {
            let data = between[first..].as_ptr().cast_mut().cast();
            // SAFETY: the test's own memory, of rows of `ALL` numbers.
            unsafe { Tensor::new(name, data, Dtype::F32, &[count, heads, TURNED], &[ALL, TURNED, 1]) }.unwrap()
        };
        let (k, v) = (part("k", HEADS * TURNED, KV_HEADS), part("v", (HEADS + KV_HEADS) * TURNED, KV_HEADS));
        let (k_cache, v_cache) = (pages("k_cache", &memory[0], TURNED), pages("v_cache", &memory[1], TURNED));
        let step = rows.step();
        store_kv(&k, &v, &k_cache, &v_cache, &step.slots, 1).unwrap();
        let mut attended = vec![f32::NAN; count * HEADS * TURNED];
        let shape = [count, HEADS, TURNED];
        let inputs = Attention {
            q: part("q", 0, HEADS),
            k_cache,
            v_cache,
            // SAFETY: the test's own memory, of that shape.
            out: unsafe {
                let strides = [HEADS * TURNED, TURNED, 1];
                Tensor::new("out", attended.as_mut_ptr().cast(), Dtype::F32, &shape, &strides).unwrap()
            },
            block_tables: step.block_tables,
            query_starts: step.query_starts,
            seq_lens: step.seq_lens,
            sinks: None,
            scale: 0.3,
            softcap: 0.0,
            window: self.window,
        };
        attend(&inputs, isa, 2).unwrap();
        let after = |isa| {
            let mut out = vec![f32::NAN; count * WIDTH];
            let inputs = AfterAttention {
                attended: matrix("attended", &attended, [count, HEADS * TURNED], HEADS * TURNED),
                hidden: matrix("hidden", hidden, [count, WIDTH], WIDTH),
                project: matrix("project", &self.project, [WIDTH, HEADS * TURNED], HEADS * TURNED),
                norm: self.norm(1),
                gate: matrix("gate", &self.gate, [BETWEEN, WIDTH], WIDTH),
                up: matrix("up", &self.up, [BETWEEN, WIDTH], WIDTH),
                activation: Activation::Silu,
                down: matrix("down", &self.down, [WIDTH, BETWEEN], BETWEEN),
                out: matrix_to("out", &mut out, [count, WIDTH]),
            };
            after_attention(&inputs, isa, 2).unwrap();
            out
        };
        choose(after(isa), after(alone), WIDTH)
    }
}

//! Random linear layers, their oracle in float64, and the checks that every set of instructions must pass.

use blocktable_cpu::{Activation, Dtype, Gated, Isa, Linear, Tensor, gated, linear};

use super::Random;

/// Numbers between two rows of x and of a weight, which nobody may read.
const GAP: usize = 3;

/// x [M, K] and two weights [N, K] with gaps between their rows, and a bias [N].
pub struct Layer {
    pub sizes: [usize; 3],
    x: Vec<f32>,
    weights: [Vec<f32>; 2],
    bias: Vec<f32>,
}

impl Layer {
    pub fn new(sizes: [usize; 3], seed: u64) -> Layer {
        let [rows, outputs, depth] = sizes;
        let mut random = Random(seed);
        let mut matrix = |rows: usize| -> Vec<f32> {
            let step = depth + GAP;
            (0..rows * step).map(|at| if at % step < depth { random.normal() } else { f32::NAN }).collect()
        };
        let (x, weights) = (matrix(rows), [matrix(outputs), matrix(outputs)]);
        Layer { sizes, x, weights, bias: (0..outputs).map(|_| random.normal()).collect() }
    }

    /// The same layer with one of the rows of x alone.
    pub fn with_row(&self, row: usize) -> Layer {
        let step = self.sizes[2] + GAP;
        let x = self.x[row * step..][..step].to_vec();
        Layer { sizes: [1, self.sizes[1], self.sizes[2]], x, weights: self.weights.clone(), bias: self.bias.clone() }
    }

    pub fn linear(&self, isa: Isa, threads: usize, with_bias: bool) -> Vec<f32> {
        let [rows, outputs, depth] = self.sizes;
        let mut out = vec![f32::NAN; rows * outputs];
        let inputs = Linear {
            x: matrix("x", &self.x, [rows, depth], depth + GAP),
            weight: matrix("weight", &self.weights[0], [outputs, depth], depth + GAP),
            bias: with_bias.then(|| vector("bias", &self.bias)),
            out: matrix_to("out", &mut out, [rows, outputs]),
        };
        linear(&inputs, isa, threads).unwrap();
        out
    }

    pub fn gated(&self, activation: Activation, isa: Isa, threads: usize) -> Vec<f32> {
        let [rows, outputs, depth] = self.sizes;
        let mut out = vec![f32::NAN; rows * outputs];
        let inputs = Gated {
            x: matrix("x", &self.x, [rows, depth], depth + GAP),
            gate: matrix("gate", &self.weights[0], [outputs, depth], depth + GAP),
            up: matrix("up", &self.weights[1], [outputs, depth], depth + GAP),
            activation,
            out: matrix_to("out", &mut out, [rows, outputs]),
        };
        gated(&inputs, isa, threads).unwrap();
        out
    }

    /// The exact product with weight `number`, and the size of what was added up.
    fn exact(&self, number: usize, row: usize, output: usize) -> (f64, f64) {
        let (depth, step) = (self.sizes[2], self.sizes[2] + GAP);
        let (x, weight) = (&self.x[row * step..][..depth], &self.weights[number][output * step..][..depth]);
        let terms = || x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
        (terms().sum(), terms().map(f64::abs).sum())
    }
}

/// A matrix that a call writes.
pub fn matrix_to<'a>(name: &'static str, numbers: &'a mut [f32], shape: [usize; 2]) -> Tensor<'a> {
    // SAFETY: the tests' own memory, of that many numbers, borrowed for the tensor alone.
    unsafe { Tensor::new(name, numbers.as_mut_ptr().cast(), Dtype::F32, &shape, &[shape[1], 1]) }.unwrap()
}

/// A matrix that is only read.
pub fn matrix<'a>(name: &'static str, numbers: &'a [f32], shape: [usize; 2], step: usize) -> Tensor<'a> {
    let data = numbers.as_ptr().cast_mut().cast();
    // SAFETY: the tests' own memory, of that many rows and numbers.
    unsafe { Tensor::new(name, data, Dtype::F32, &shape, &[step, 1]) }.unwrap()
}

pub fn vector<'a>(name: &'static str, numbers: &'a [f32]) -> Tensor<'a> {
    let data = numbers.as_ptr().cast_mut().cast();
    // SAFETY: as above.
    unsafe { Tensor::new(name, data, Dtype::F32, &[numbers.len()], &[1]) }.unwrap()
}

fn near(what: &str, at: (usize, usize), got: f32, wanted: f64, size: f64) -> Result<(), String> {
    // A NaN must not pass.
    if (f64::from(got) - wanted).abs() <= 1e-5 * size.max(1e-3) {
        return Ok(());
    }
    Err(format!("{what}{at:?} is {got}, not {wanted}"))
}

pub fn equals_oracle(sizes: [usize; 3], isa: Isa, threads: usize) -> Result<(), String> {
    let layer = Layer::new(sizes, 7);
    let [rows, outputs, _] = sizes;
    for with_bias in [false, true] {
        let got = layer.linear(isa, threads, with_bias);
        for (at, got) in (0..rows * outputs).map(|at| ((at / outputs, at % outputs), got[at])) {
            let bias = if with_bias { f64::from(layer.bias[at.1]) } else { 0.0 };
            let (wanted, size) = layer.exact(0, at.0, at.1);
            near("out", at, got, wanted + bias, size + bias.abs())?;
        }
    }
    Ok(())
}

pub fn gated_equals_oracle(sizes: [usize; 3], activation: Activation, isa: Isa, threads: usize) -> Result<(), String> {
    let layer = Layer::new(sizes, 8);
    let [rows, outputs, _] = sizes;
    let got = layer.gated(activation, isa, threads);
    for (at, got) in (0..rows * outputs).map(|at| ((at / outputs, at % outputs), got[at])) {
        let ((gate, gate_size), (up, up_size)) = (layer.exact(0, at.0, at.1), layer.exact(1, at.0, at.1));
        let own = match activation {
            Activation::Silu => gate / (1.0 + (-gate).exp()),
            Activation::GeluTanh => {
                gate / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3))).tanh())
            }
        };
        near("out", at, got, own * up, gate_size * up.abs() + own.abs() * up_size)?;
    }
    Ok(())
}

/// Products of two numbers have float32's digits, whatever they are made of.
pub fn keeps_digits(isa: Isa) -> Result<(), String> {
    let layer = Layer::new([40, 70, 1], 9);
    let got = layer.linear(isa, 1, false);
    for (at, got) in got.into_iter().enumerate() {
        let (wanted, size) = layer.exact(0, at / 70, at % 70);
        let is_near = (f64::from(got) - wanted).abs() <= size / f64::from(1 << 22);
        if !is_near {
            return Err(format!("out[{at}] is {got}, not {wanted}"));
        }
    }
    Ok(())
}

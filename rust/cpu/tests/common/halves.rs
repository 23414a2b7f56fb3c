//! The two halves of a decoder layer against float64.

use blocktable_cpu::{Activation, AfterAttention, BeforeAttention, Isa, Norm, after_attention, before_attention};

use super::Random;
use super::linear::{matrix, matrix_to, vector};

/// M, K, heads of q, heads of k and v, D, N.
pub type Sizes = [usize; 6];

const EPS: f32 = 0.01;

fn drawn(random: &mut Random, count: usize, size: f32) -> Vec<f32> {
    (0..count).map(|_| random.normal() * size).collect()
}

fn normed(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + f64::from(EPS)).sqrt() * f64::from(*w)).collect()
}

fn times(x: &[f64], weight: &[f32]) -> Vec<f64> {
    weight.chunks(x.len()).map(|row| x.iter().zip(row).map(|(x, w)| x * f64::from(*w)).sum()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn near(got: &[f32], wanted: &[f64], what: &str) -> Result<(), String> {
    // Of what is added up, which may cancel in a narrow row.
    let size = wanted.iter().fold(0.1f64, |size, x| size.max(x.abs()));
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        // A NaN must not pass.
        let is_near = (f64::from(*got) - wanted).abs() <= 1e-5 * size;
        if !is_near {
            return Err(format!("{what}: {at} is {got}, not {wanted}"));
        }
    }
    Ok(())
}

/// Answers of both halves, to compare.
pub struct Halves {
    pub before: Vec<f32>,
    pub after: Vec<f32>,
}

/// Runs both halves of a random layer, on rows from `first` on alone, and holds them against float64.
pub fn run(sizes: Sizes, first: usize, isa: Isa, threads: usize) -> Result<Halves, String> {
    let [rows, width, heads, kv_heads, turned, between] = sizes;
    let random = &mut Random(11);
    let outputs = [heads * turned, kv_heads * turned, kv_heads * turned];
    let all: usize = outputs.iter().sum();
    // Small rows, so that the epsilon of a norm matters.
    let hidden = drawn(random, rows * width, 0.2);
    let norm = drawn(random, width, 1.0);
    let weights = outputs.map(|outputs| drawn(random, outputs * width, 1.0));
    let biases = outputs.map(|outputs| drawn(random, outputs, 1.0));
    let (cos, sin) = (drawn(random, rows * turned, 1.0), drawn(random, rows * turned, 1.0));
    let attended = drawn(random, rows * outputs[0], 1.0);
    let project = drawn(random, width * outputs[0], 0.1);
    let (gate, up) = (drawn(random, between * width, 0.3), drawn(random, between * width, 0.3));
    let down = drawn(random, width * between, 0.1);
    let rows = first..rows;
    let part = |numbers: &[f32], width: usize| numbers[rows.start * width..].to_vec();
    let (hidden, cos, sin, attended) =
        (part(&hidden, width), part(&cos, turned), part(&sin, turned), part(&attended, outputs[0]));
    let rows = rows.len();
    let mut out = Halves { before: vec![f32::NAN; rows * all], after: vec![f32::NAN; rows * width] };
    let weight = |at: usize| matrix(["q", "k", "v"][at], &weights[at], [outputs[at], width], width);
    let inputs = BeforeAttention {
        hidden: matrix("hidden", &hidden, [rows, width], width),
        norm: Norm { weight: vector("norm", &norm), eps: EPS },
        weights: [weight(0), weight(1), weight(2)],
        biases: Some([0, 1, 2].map(|at| vector("bias", &biases[at]))),
        cos: matrix("cos", &cos, [rows, turned], turned),
        sin: matrix("sin", &sin, [rows, turned], turned),
        out: matrix_to("out", &mut out.before, [rows, all]),
    };
    before_attention(&inputs, isa, threads).map_err(|refusal| refusal.to_string())?;
    let inputs = AfterAttention {
        attended: matrix("attended", &attended, [rows, outputs[0]], outputs[0]),
        hidden: matrix("hidden", &hidden, [rows, width], width),
        project: matrix("project", &project, [width, outputs[0]], outputs[0]),
        norm: Norm { weight: vector("norm", &norm), eps: EPS },
        gate: matrix("gate", &gate, [between, width], width),
        up: matrix("up", &up, [between, width], width),
        activation: Activation::Silu,
        down: matrix("down", &down, [width, between], between),
        out: matrix_to("out", &mut out.after, [rows, width]),
    };
    after_attention(&inputs, isa, threads).map_err(|refusal| refusal.to_string())?;
    for row in 0..rows {
        let own = wide(&hidden[row * width..][..width]);
        let x = normed(&own, &norm);
        let mut wanted = Vec::new();
        for at in 0..3 {
            let mut answers = times(&x, &weights[at]);
            answers.iter_mut().zip(&biases[at]).for_each(|(answer, bias)| *answer += f64::from(*bias));
            for head in answers.chunks(turned) {
                for d in 0..turned {
                    let (c, s) = (f64::from(cos[row * turned + d]), f64::from(sin[row * turned + d]));
                    let half = turned / 2;
                    let other = if d < half { -head[d + half] } else { head[d - half] };
                    wanted.push(if at < 2 { head[d] * c + other * s } else { head[d] });
                }
            }
        }
        near(&out.before[row * all..][..all], &wanted, "before attention")?;
        let mut sum = times(&wide(&attended[row * outputs[0]..][..outputs[0]]), &project);
        sum.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
        let x = normed(&sum, &norm);
        let joined: Vec<f64> =
            times(&x, &gate).iter().zip(times(&x, &up)).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        sum.iter_mut().zip(times(&joined, &down)).for_each(|(sum, down)| *sum += down);
        near(&out.after[row * width..][..width], &sum, "after attention")?;
    }
    Ok(out)
}

//! Every set of instructions multiplies as float64 does, and an answer depends on its row and its output's weights alone.

#![allow(clippy::float_cmp)]

mod common;

use blocktable_cpu::{Activation, Dtype, Isa, Linear, Tensor, linear};
use common::Random;
use common::linear::{Layer, equals_oracle, gated_equals_oracle, keeps_digits, matrix, matrix_to, vector};

const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

fn on_all(sizes: [usize; 3]) {
    for isa in Isa::available() {
        let checks = [equals_oracle(sizes, isa, 2), gated_equals_oracle(sizes, ACTIVATIONS[sizes[0] % 2], isa, 2)];
        for check in checks {
            if let Err(what) = check {
                panic!("{sizes:?} on {}: {what}", isa.name());
            }
        }
    }
}

#[test]
fn every_number_of_rows_is_right() {
    for rows in (0..=18).chain([31, 32, 33, 64, 65, 87, 88, 89, 260]) {
        on_all([rows, 29, 70]);
    }
}

#[test]
fn every_number_of_outputs_is_right() {
    for outputs in (0..=26).chain([47, 48, 49, 95, 96, 97, 191, 192, 385, 1000]) {
        on_all([5, outputs, 33]);
    }
}

#[test]
fn every_depth_is_right_across_the_edges_of_vectors_and_parts() {
    for depth in (0..=33).chain([63, 64, 65, 576, 1535, 1536, 1537, 1552, 2500, 3071, 3072, 3073, 4609]) {
        on_all([6, 8, depth]);
    }
}

#[test]
fn a_product_of_two_numbers_has_all_its_digits() {
    for isa in Isa::available() {
        keeps_digits(isa).unwrap_or_else(|what| panic!("on {}: {what}", isa.name()));
    }
}

#[test]
fn random_layers_are_right() {
    let cases = std::env::var("BLOCKTABLE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let seed = std::env::var("BLOCKTABLE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0u64);
    for number in 0..cases {
        let mut random = Random(seed ^ (number << 20));
        on_all([1 + random.below(70), 1 + random.below(120), 1 + random.below(700)]);
    }
}

#[test]
fn an_answer_depends_neither_on_other_rows_nor_on_threads() {
    for isa in Isa::available() {
        for sizes in [[37, 50, 100], [9, 31, 1600]] {
            let layer = Layer::new(sizes, 3);
            let together = layer.linear(isa, 1, true);
            let joined = layer.gated(Activation::Silu, isa, 1);
            assert_eq!(layer.linear(isa, 3, true), together);
            for row in 0..sizes[0] {
                let alone = layer.with_row(row);
                let own = row * sizes[1]..(row + 1) * sizes[1];
                assert_eq!(alone.linear(isa, 2, true), together[own.clone()]);
                assert_eq!(alone.gated(Activation::Silu, isa, 2), joined[own]);
            }
        }
    }
}

#[test]
fn far_values_of_an_activation_are_numbers() {
    for isa in Isa::available() {
        for activation in ACTIVATIONS {
            for size in [1e2f32, 1e6, 1e18] {
                let (x, one, mut out) = ([size, -size], [1.0f32], [0f32; 2]);
                let inputs = blocktable_cpu::Gated {
                    x: matrix("x", &x, [2, 1], 1),
                    gate: matrix("gate", &one, [1, 1], 1),
                    up: matrix("up", &one, [1, 1], 1),
                    activation,
                    out: matrix_to("out", &mut out, [2, 1]),
                };
                blocktable_cpu::gated(&inputs, isa, 1).unwrap();
                assert!((out[0] / (size * size) - 1.0).abs() < 1e-5, "{activation:?} of {size}: {out:?}");
                assert!(out[1].abs() < 1e-9, "{activation:?} of {size}: {out:?}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name_before_anything_is_written() {
    let (x, weight, bias, mut out) = ([1f32; 12], [1f32; 12], [1f32; 3], [7f32; 6]);
    let refused = |x: Tensor<'_>, weight: Tensor<'_>, bias: Option<Tensor<'_>>, to: Tensor<'_>, why: &str| {
        let found = linear(&Linear { x, weight, bias, out: to }, Isa::best(), 1).unwrap_err().to_string();
        assert_eq!(found, why);
    };
    let (good_x, good_weight) = (matrix("x", &x, [2, 4], 4), matrix("weight", &weight, [3, 4], 4));
    let to = out.as_mut_ptr().cast();
    // SAFETY: the test's own memory, of those shapes and strides; so for what follows.
    let answers =
        |shape: &[usize], strides: &[usize]| unsafe { Tensor::new("out", to, Dtype::F32, shape, strides) }.unwrap();
    let good_out = answers(&[2, 3], &[3, 1]);
    let short = matrix("weight", &weight, [3, 3], 3);
    refused(good_x, short, None, good_out, "weight has K=3 in dimension 1: must be 4");
    let few = answers(&[2, 2], &[2, 1]);
    refused(good_x, good_weight, None, few, "out has N=2 in dimension 1: must be 3");
    let flat = vector("x", &x);
    refused(flat, good_weight, None, good_out, "x has shape [12]: must be [M, K]");
    let two = vector("bias", &bias[..2]);
    refused(good_x, good_weight, Some(two), good_out, "bias has N=2 in dimension 0: must be 3");
    // SAFETY: the test's own memory, of that shape.
    let turned =
        |name| unsafe { Tensor::new(name, x.as_ptr().cast_mut().cast(), Dtype::F32, &[2, 4], &[1, 2]) }.unwrap();
    refused(turned("x"), good_weight, None, good_out, "x has stride 2 in its last dimension: must be 1");
    // SAFETY: as above.
    let half =
        unsafe { Tensor::new("weight", weight.as_ptr().cast_mut().cast(), Dtype::F16, &[3, 4], &[4, 1]) }.unwrap();
    refused(good_x, half, None, good_out, "weight has dtype float16: must be float32");
    let gaps = answers(&[2, 3], &[1, 2]);
    refused(good_x, good_weight, None, gaps, "out has gaps between its numbers: must be contiguous");
    assert_eq!(out, [7.0; 6]);
}

//! The two halves of a decoder layer give what float64 gives, for any number of rows, and refuse by name what does not fit.

mod common;

use blocktable_cpu::{BeforeAttention, Isa, Norm, before_attention};
use common::halves::{Sizes, run};
use common::linear::{matrix, matrix_to, vector};

fn on_all(sizes: Sizes) {
    for isa in Isa::available() {
        if let Err(what) = run(sizes, 0, isa, 2) {
            panic!("{sizes:?} on {}: {what}", isa.name());
        }
    }
}

#[test]
fn every_number_of_rows_is_right_across_the_edges_of_blocks() {
    for rows in [0, 1, 2, 5, 8, 15, 16, 17, 33, 255, 256, 257, 300] {
        on_all([rows, 24, 3, 1, 8, 20]);
    }
}

#[test]
fn every_width_is_right() {
    for (width, turned, between) in [(1, 2, 1), (7, 6, 5), (16, 16, 33), (37, 34, 50), (70, 64, 97), (600, 10, 610)] {
        on_all([5, width, 4, 2, turned, between]);
    }
}

#[test]
fn a_row_answers_alone_as_among_others() {
    for isa in Isa::available() {
        let sizes = [263, 40, 2, 1, 16, 50];
        let together = run(sizes, 0, isa, 3).unwrap();
        for first in [3, 255, 256, 262] {
            let alone = run(sizes, first, isa, 1).unwrap();
            assert_eq!(together.before[together.before.len() - alone.before.len()..], alone.before);
            assert_eq!(together.after[together.after.len() - alone.after.len()..], alone.after);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (ones, mut out) = ([1f32; 64], [7f32; 64]);
    let mut refused = |turned: usize, outputs: usize, eps: f32, why: &str| {
        let weight = |name| matrix(name, &ones, [4, 3], 3);
        let inputs = BeforeAttention {
            hidden: matrix("hidden", &ones, [2, 3], 3),
            norm: Norm { weight: vector("norm", &ones[..3]), eps },
            weights: [weight("q"), weight("k"), weight("v")],
            biases: None,
            cos: matrix("cos", &ones, [2, turned], turned),
            sin: matrix("sin", &ones, [2, turned], turned),
            out: matrix_to("out", &mut out, [2, outputs]),
        };
        assert_eq!(before_attention(&inputs, Isa::best(), 1).unwrap_err().to_string(), why);
    };
    refused(4, 11, 0.1, "out has N=11 in dimension 1: must be 12 (outputs of all weights)");
    refused(3, 12, 0.1, "cos has D=3 in dimension 1: must be even and divide Nq=4 and Nk=4");
    refused(8, 12, 0.1, "cos has D=8 in dimension 1: must be even and divide Nq=4 and Nk=4");
    refused(4, 12, f32::NAN, "eps=NaN: must be a finite number above 0");
    assert_eq!(out, [7.0; 64]);
}

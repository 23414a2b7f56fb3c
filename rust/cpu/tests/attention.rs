//! Every set of instructions gives what attention over positions in float64 gives, whatever lies in rows that nobody sees.

#![allow(clippy::print_stdout)]

mod common;

use blocktable_cpu::{Dtype, Isa};
use common::{Random, Shape, broken_row_stays_its_owners, equals_oracle, stores_its_slots};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

fn mixture(size: usize) -> Vec<(usize, usize)> {
    vec![
        (1, 1),
        (1, size),
        (1, size + 1),
        (0, 3),
        (5, 5),
        (3, 2 * size + 1),
        (1, 2 * size + 2),
        (9, 70),
        (64, 129),
        (1, 63),
    ]
}

fn holds(result: Result<(), String>) {
    if let Err(what) = result {
        panic!("{what}");
    }
}

fn on_all(shape: &Shape) {
    for isa in Isa::available() {
        holds(equals_oracle(shape, 3, isa, 2));
    }
}

#[test]
fn the_portable_path_is_always_there() {
    assert_eq!(Isa::available().last().map(|isa| isa.name()), Some("portable"));
    assert_eq!(Isa::named("portable").map(Isa::name), Some("portable"));
    assert!(Isa::named("no such").is_none());
    println!("{:?}", Isa::available().into_iter().map(Isa::name).collect::<Vec<_>>());
}

#[test]
fn every_block_size_is_right() {
    for block_size in [1, 7, 16, 24, 32, 128] {
        on_all(&Shape { block_size, ..Shape::small(&mixture(block_size)) });
    }
}

#[test]
fn every_head_size_is_right_in_every_format() {
    for width in [32, 64, 72, 80, 96, 112, 128, 192, 256] {
        for dtype in DTYPES {
            let lengths = [(1, 33), (7, 70), (1, 5)];
            on_all(&Shape { key_width: width, value_width: width, dtype, ..Shape::small(&lengths) });
        }
    }
    for (key_width, value_width) in [(1, 3), (5, 17), (192, 128), (33, 31)] {
        for dtype in DTYPES {
            on_all(&Shape { key_width, value_width, dtype, ..Shape::small(&[(1, 33), (7, 70)]) });
        }
    }
}

#[test]
fn every_feature_is_right() {
    for (window, softcap, has_sinks) in [
        (1, 0.0, false),
        (5, 0.0, false),
        (64, 0.0, true),
        (0, 0.7, false),
        (0, 30.0, true),
        (9, 1.5, true),
        (1000, 0.0, true),
    ] {
        for dtype in DTYPES {
            on_all(&Shape { window, softcap, has_sinks, dtype, ..Shape::small(&mixture(16)) });
        }
    }
}

#[test]
fn every_number_of_heads_is_right() {
    for (kv_heads, grouped) in [(1, 1), (3, 1), (1, 2), (2, 4), (1, 5), (2, 6), (1, 9), (4, 8)] {
        on_all(&Shape { kv_heads, grouped, key_width: 40, value_width: 40, ..Shape::small(&mixture(16)) });
    }
}

#[test]
fn long_contexts_are_right_across_the_edges_of_their_parts() {
    for length in [511, 512, 513, 1023, 1024, 1025, 1500] {
        let shape =
            Shape { kv_heads: 1, grouped: 3, key_width: 16, value_width: 16, ..Shape::small(&[(1, length), (1, 700)]) };
        on_all(&shape);
        on_all(&Shape { window: 600, has_sinks: true, softcap: 5.0, ..shape });
    }
}

#[test]
fn chunks_are_right_across_the_edges_of_their_tiles() {
    for queries in [2, 5, 47, 48, 49, 63, 64, 65, 130] {
        for before in [0, 1, 63, 64, 65] {
            let shape = Shape { key_width: 20, value_width: 20, ..Shape::small(&[(queries, queries + before)]) };
            on_all(&shape);
            on_all(&Shape { window: 50, ..shape });
        }
    }
}

#[test]
fn what_nobody_sees_never_matters() {
    for unseen in [f32::NAN, f32::INFINITY, 3e38, 0.0] {
        for window in [0, 5, 70] {
            on_all(&Shape { unseen, window, block_size: 7, ..Shape::small(&mixture(7)) });
        }
    }
}

#[test]
fn a_broken_row_spoils_only_those_who_see_it() {
    for isa in Isa::available() {
        for window in [0, 5] {
            let shape = Shape { window, ..Shape::small(&[(9, 20), (1, 20), (70, 100)]) };
            holds(broken_row_stays_its_owners(&shape, 0, 15, isa));
            holds(broken_row_stays_its_owners(&shape, 1, 17, isa));
            holds(broken_row_stays_its_owners(&shape, 2, 66, isa));
        }
    }
}

#[test]
fn an_answer_does_not_depend_on_threads_or_on_the_rest_of_the_batch() {
    for isa in Isa::available() {
        let alone = common::Case::new(Shape::small(&[(1, 1300)]), &mut Random(9)).run(isa, 1).unwrap();
        for threads in [2, 5] {
            let again = common::Case::new(Shape::small(&[(1, 1300)]), &mut Random(9)).run(isa, threads).unwrap();
            assert_eq!(alone, again);
        }
    }
}

#[test]
fn random_batches_are_right() {
    let cases = std::env::var("BLOCKTABLE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let seed = std::env::var("BLOCKTABLE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0u64);
    println!("BLOCKTABLE_SEED={seed}");
    for number in 0..cases {
        let mut random = Random(seed ^ (number << 20));
        let lengths: Vec<_> = (0..1 + random.below(5))
            .map(|_| {
                let queries = if random.below(2) == 0 { 1 } else { random.below(90) };
                (queries, queries + random.below(200))
            })
            .collect();
        let width = 1 + random.below(140);
        let shape = Shape {
            block_size: 1 + random.below(40),
            kv_heads: 1 + random.below(3),
            grouped: 1 + random.below(6),
            key_width: width,
            value_width: if random.below(2) == 0 { width } else { 1 + random.below(70) },
            window: if random.below(2) == 0 { 0 } else { 1 + random.below(90) },
            softcap: [0.0, 1.0, 50.0][random.below(3)],
            has_sinks: random.below(2) == 0,
            dtype: DTYPES[random.below(3)],
            lengths,
            unseen: [f32::NAN, f32::INFINITY, 0.0][random.below(3)],
        };
        let isas = Isa::available();
        holds(equals_oracle(&shape, number, isas[random.below(isas.len())], 1 + random.below(3)));
    }
}

#[test]
fn rows_more_than_31_bits_apart_are_read() {
    Isa::available().into_iter().for_each(|isa| holds(common::far_apart(isa)));
}

#[test]
fn a_store_changes_the_slots_that_it_names() {
    for dtype in DTYPES {
        holds(stores_its_slots(dtype));
    }
}

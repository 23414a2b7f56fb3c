//! Whole layers give, to the last bit, what the calls for their parts give, and refuse by name what does not fit.

mod common;

use blocktable_cpu::Isa;
use common::layers::{Model, SEQUENCES};

#[test]
fn whole_layers_answer_as_their_parts() {
    for isa in Isa::available() {
        for layers in [1, 2, 3] {
            let model = Model::new(layers);
            model.equals_parts(&SEQUENCES, isa).unwrap_or_else(|what| panic!("{layers} on {}: {what}", isa.name()));
        }
    }
}

#[test]
fn a_sequence_answers_alone_as_among_others() {
    let model = Model::new(2);
    for isa in Isa::available() {
        let together = model.run(&SEQUENCES, isa, 3).unwrap();
        let mut first = 0;
        for (number, &(queries, _)) in SEQUENCES.iter().enumerate() {
            let alone = model.run(&SEQUENCES[number..=number], isa, 1).unwrap();
            let width = alone.len() / queries.max(1);
            // Every sequence of the model's has rows of its own, whoever is there.
            assert_eq!(alone, together[first * width..(first + queries) * width], "{number} on {}", isa.name());
            first += queries;
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let model = Model::new(2);
    for (fault, why) in [
        (common::layers::Fault::NoLayers, "layers is empty: must hold at least one"),
        (common::layers::Fault::Step, "layer 1: step=1: must be below 1 (steps)"),
        (common::layers::Fault::Values, "layer 1: v has Nv=16 in dimension 0: must be 18 (heads and width of v_cache)"),
        (common::layers::Fault::Down, "layer 1: down has N=9 in dimension 1: must be 20"),
    ] {
        let (refused, untouched) = model.run_with(fault);
        assert_eq!(refused, why);
        assert!(untouched, "{why}: something was written");
    }
}

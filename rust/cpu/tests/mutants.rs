//! Every planted fault is caught by a check that passes without it, on every set of instructions.

#![cfg(feature = "mutants")]
#![allow(clippy::print_stdout)]

mod common;

use blocktable_cpu::mutant::{Mutant, available, choose};
use blocktable_cpu::{Activation, Dtype, Isa};
use common::{Shape, broken_row_stays_its_owners, equals_oracle, stores_its_slots};

/// What must fail with the fault.
fn check(mutant: Mutant, isa: Isa) -> Result<(), String> {
    let small = |lengths: &[(usize, usize)]| Shape { key_width: 24, value_width: 24, ..Shape::small(lengths) };
    let shape = match mutant {
        Mutant::SeesNext | Mutant::MissesOwn | Mutant::HeadsDealt => {
            Shape { unseen: 0.0, ..small(&[(9, 20), (1, 33)]) }
        }
        Mutant::WindowLonger => Shape { window: 5, unseen: 0.0, ..small(&[(9, 30)]) },
        Mutant::DecodeWindowLonger => Shape { window: 5, unseen: 0.0, ..small(&[(1, 30)]) },
        Mutant::TileTailSeen => small(&[(1, 61), (3, 20)]),
        Mutant::WidthTailLeftOut => Shape { key_width: 21, value_width: 21, ..small(&[(1, 20)]) },
        Mutant::NoCorrection => small(&[(1, 200), (3, 200)]),
        Mutant::PartsUnweighted => small(&[(1, 1200)]),
        Mutant::NoSink => Shape { has_sinks: true, ..small(&[(1, 20)]) },
        Mutant::SinkInEveryPart => Shape { has_sinks: true, ..small(&[(1, 1200)]) },
        Mutant::CapNotMultiplied => Shape { softcap: 0.7, ..small(&[(1, 20)]) },
        Mutant::ValuesByKeySteps => Shape { key_width: 40, ..small(&[(1, 20)]) },
        Mutant::OffsetsCut => return above_32_bits(isa),
        Mutant::BrokenRowsWeighed => return broken_row_stays_its_owners(&small(&[(9, 20)]), 0, 15, isa),
        Mutant::DepthCut => return common::linear::equals_oracle([5, 7, 1700], isa, 2),
        Mutant::DepthTailLeftOut => return common::linear::equals_oracle([5, 7, 37], isa, 2),
        Mutant::LastThirdLeftOut => return common::linear::keeps_digits(isa),
        Mutant::FirstRowInAllLanes => return common::linear::equals_oracle([20, 7, 37], isa, 2),
        Mutant::BiasLeftOut => {
            return [3, 20].into_iter().try_for_each(|rows| common::linear::equals_oracle([rows, 15, 37], isa, 2));
        }
        Mutant::GateAlone => return common::linear::gated_equals_oracle([5, 7, 37], Activation::Silu, isa, 2),
        Mutant::NoResidual | Mutant::NoEps | Mutant::TurnedBack => {
            return common::halves::run([5, 24, 3, 1, 8, 20], 0, isa, 2).map(|_| ());
        }
        Mutant::LayersStoreNothing | Mutant::SinglesInTiles => {
            return common::layers::Model::new(2).equals_parts(&common::layers::SEQUENCES, isa);
        }
        Mutant::NowhereWritten | Mutant::StoredBeside => return stores_its_slots(Dtype::F32),
    };
    equals_oracle(&shape, 3, isa, 2)
}

/// A pool of which only the pages that are touched exist.
fn above_32_bits(isa: Isa) -> Result<(), String> {
    common::far_apart(isa)
}

// One test: the fault is chosen for the whole process.
#[test]
fn every_planted_fault_is_caught() {
    assert!(!available().is_empty());
    for isa in Isa::available() {
        for &mutant in available() {
            // Nobody else has tiles.
            if matches!(mutant, Mutant::LastThirdLeftOut | Mutant::SinglesInTiles) && isa.name() != "amx" {
                continue;
            }
            choose(None);
            if let Err(what) = check(mutant, isa) {
                panic!("the control of {mutant:?} on {}: {what}", isa.name());
            }
            choose(Some(mutant));
            let caught = std::panic::catch_unwind(|| check(mutant, isa));
            choose(None);
            match caught {
                Ok(Ok(())) => panic!("{mutant:?} lives on {}", isa.name()),
                Ok(Err(what)) => println!("{mutant:?}: {what}"),
                Err(_) => println!("{mutant:?}: a panic"),
            }
        }
    }
}

//! Named faults that the tests must catch, chosen at run time; without the feature `mutants` there are none and nothing asks.

#[cfg(feature = "mutants")]
use std::sync::atomic::{AtomicUsize, Ordering};

macro_rules! mutants {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// A planted fault.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Mutant {
            $($(#[$about])* $name,)*
        }

        /// Every fault of this build.
        pub fn available() -> &'static [Mutant] {
            if cfg!(feature = "mutants") { &[$(Mutant::$name,)*] } else { &[] }
        }
    };
}

mutants! {
    /// A query of a chunk sees the position after its own.
    SeesNext,
    /// A query of a chunk does not see its own position.
    MissesOwn,
    /// A window is one position longer.
    WindowLonger,
    /// A window of a single query is one position longer.
    DecodeWindowLonger,
    /// The rest of a tile is not masked.
    TileTailSeen,
    /// The last lanes of a width that is no multiple of the vector are left out.
    WidthTailLeftOut,
    /// A tile does not correct what came before it.
    NoCorrection,
    /// Parts of a long context are added without their weights.
    PartsUnweighted,
    /// The sink takes no weight.
    NoSink,
    /// Every part of a long context takes a sink of its own.
    SinkInEveryPart,
    /// The soft cap is not multiplied back.
    CapNotMultiplied,
    /// Query heads are dealt to the KV heads in turn.
    HeadsDealt,
    /// Values are read with the keys' steps.
    ValuesByKeySteps,
    /// Offsets are cut to 31 bits.
    OffsetsCut,
    /// Values that are not finite are weighed with 0.
    BrokenRowsWeighed,
    /// A negative slot is written as slot 0.
    NowhereWritten,
    /// A stored row goes one offset further.
    StoredBeside,
    /// A product's depth ends with its first part.
    DepthCut,
    /// The numbers behind the last whole vector of a depth are left out.
    DepthTailLeftOut,
    /// The last third of a number of three is left out.
    LastThirdLeftOut,
    /// Every lane of a strip holds its first row.
    FirstRowInAllLanes,
    /// Products start from nothing instead of their bias.
    BiasLeftOut,
    /// A gate's answers are not multiplied with the others.
    GateAlone,
    /// A residual is not added.
    NoResidual,
    /// A norm leaves its epsilon out.
    NoEps,
    /// Rotary positions turn the other way.
    TurnedBack,
    /// Whole layers store no keys and values.
    LayersStoreNothing,
    /// Whole layers multiply rows that come alone in tiles, too.
    SinglesInTiles,
}

#[cfg(feature = "mutants")]
static CHOSEN: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Chooses the fault of the whole process, or none.
#[cfg(feature = "mutants")]
pub fn choose(mutant: Option<Mutant>) {
    CHOSEN.store(mutant.map_or(usize::MAX, |mutant| mutant as usize), Ordering::SeqCst);
}

/// Whether this fault is chosen.
#[inline(always)]
pub(crate) fn is(mutant: Mutant) -> bool {
    #[cfg(feature = "mutants")]
    return CHOSEN.load(Ordering::Relaxed) == mutant as usize;
    #[cfg(not(feature = "mutants"))]
    {
        let _ = mutant;
        false
    }
}

//! Which instructions the kernels use: the widest that the processor has, or one that is asked for.

use crate::lanes::Lanes;
#[cfg(target_arch = "x86_64")]
use crate::lanes_avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use crate::lanes_avx512::Avx512;
use crate::lanes_portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::tiles::Tiles;

/// A set of instructions that this processor has.
#[derive(Clone, Copy)]
pub struct Isa(Kind);

#[derive(Clone, Copy)]
enum Kind {
    /// AVX-512, and tiles for products.
    #[cfg(target_arch = "x86_64")]
    Amx(Avx512, Tiles),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable(Portable),
}

/// Work that runs on any set of instructions.
pub(crate) trait Job {
    fn run<L: Lanes>(self, lanes: L);
}

impl Isa {
    /// All that this processor has, the fastest first; never empty.
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(Avx512::detect().zip(Tiles::detect()).map(|(lanes, tiles)| Isa(Kind::Amx(lanes, tiles))));
            found.extend(Avx512::detect().map(|lanes| Isa(Kind::Avx512(lanes))));
            found.extend(Avx2::detect().map(|lanes| Isa(Kind::Avx2(lanes))));
        }
        found.push(Isa(Kind::Portable(Portable)));
        found
    }

    /// The fastest of this processor for any number of rows: without tiles, which are slower for few.
    pub fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(lanes) = Avx512::detect() {
                return Isa(Kind::Avx512(lanes));
            }
            if let Some(lanes) = Avx2::detect() {
                return Isa(Kind::Avx2(lanes));
            }
        }
        Isa(Kind::Portable(Portable))
    }

    /// The fastest of this processor for whole layers, which know what rows belong together.
    pub fn best_of_layers() -> Isa {
        Isa::named("amx").unwrap_or_else(Isa::best)
    }

    /// The same without tiles.
    pub(crate) fn without_tiles(self) -> Isa {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx(lanes, _) => Isa(Kind::Avx512(lanes)),
            _ => self,
        }
    }

    /// The one of this name, if the processor has it.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }

    /// `amx`, `avx512`, `avx2` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx(..) => "amx",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            Kind::Portable(_) => "portable",
        }
    }

    /// Numbers of a vector.
    pub(crate) fn lanes(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx(..) | Kind::Avx512(_) => Avx512::N,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => Avx2::N,
            Kind::Portable(_) => Portable::N,
        }
    }

    /// The proof of tiles for products.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn tiles(self) -> Option<Tiles> {
        if let Kind::Amx(_, tiles) = self.0 { Some(tiles) } else { None }
    }

    /// Outputs of an item of a product are a multiple: whole tiles of any width.
    pub(crate) fn panel(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.tiles().is_some() {
            return crate::tiles::GRAIN;
        }
        48
    }

    /// Bytes of a block of rows: with the weights of a tile they stay in the second-level cache. Tiles take the rows in parts of their
    /// depth.
    pub(crate) fn row_bytes(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.tiles().is_some() {
            return usize::MAX;
        }
        400 << 10
    }

    /// Runs `job`, compiled for these instructions.
    pub(crate) fn run(self, job: impl Job) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `lanes` proves that the processor has what the function is compiled for.
            Kind::Amx(lanes, _) | Kind::Avx512(lanes) => unsafe { with_avx512(lanes, job) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx2(lanes) => unsafe { with_avx2(lanes, job) },
            Kind::Portable(lanes) => job.run(lanes),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
// SAFETY: the caller's: the processor has these instructions, of which `lanes` is the proof.
unsafe fn with_avx512(lanes: Avx512, job: impl Job) {
    job.run(lanes);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: the caller's: the processor has these instructions, of which `lanes` is the proof.
unsafe fn with_avx2(lanes: Avx2, job: impl Job) {
    job.run(lanes);
}

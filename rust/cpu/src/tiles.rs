//! Products by AMX: tiles of 16 rows of 64 bytes, multiplied whole.
//!
//! Before: `linear` has cut the work, and rows lie in thirds. After: answers in strips. Always: as in `product`, what comes out for a row
//! and an output depends on that row and that output's weights alone, to the last bit: blocks of the depth come in their order, and of
//! each the products of thirds in theirs, whatever the tiles hold beside.
//!
//! A tile multiplies bfloat16 and adds up in float32. A number is three of bfloat16, so a product is nine; the six that matter are
//! taken, what is left out is below 2^-24 of the product. So answers have float32's digits. Of 256 rows they come 1.5 times as fast as
//! from AVX-512, of 32 rows and fewer no faster, since weights are split on their way (one core of Sapphire Rapids).

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::ops::Range;
use std::sync::OnceLock;

use crate::mutant::{self, Mutant};
use crate::product::{Product, Start};
use crate::strips::{Strip, Strips};
use crate::thirds::{BLOCK, ROW, SIDE, THREE, TILE, Thirds, split_rows};

/// The processor has AMX for bfloat16, the system lets this process use it, and AVX-512 is there too. Made by [`crate::isa`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Tiles(());

impl Tiles {
    /// Asks processor and system, once.
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        let has = *FOUND.get_or_init(|| {
            const BF16: u32 = 1 << 22;
            const TILE: u32 = 1 << 24;
            // Every processor with AVX-512 has leaf 7.
            is_x86_feature_detected!("avx512f") && __cpuid_count(7, 0).edx & (BF16 | TILE) == BF16 | TILE && permitted()
        });
        has.then_some(Tiles(()))
    }
}

/// Linux keeps the tiles of a process only after it has asked for them, for all of its threads.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILES: u64 = 18;
    let mut answer = ARCH_PRCTL;
    // SAFETY: a system call that touches no memory of this process; the registers that it changes are named.
    unsafe {
        asm!("syscall", inout("rax") answer, in("rdi") REQUEST, in("rsi") TILES, out("rcx") _, out("r11") _,
            options(nostack));
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// How weights are split on their way: some outputs and some blocks of the depth at a time.
struct Pace {
    /// Outputs: whole products of tiles.
    panel: usize,
    /// Blocks of the depth.
    blocks: usize,
    /// All blocks of a panel one behind the other, not all panels of some blocks.
    goes_along: bool,
}

/// Where several strips use the split weights: with the rows' blocks they stay in the second-level cache.
const MANY: Pace = Pace { panel: 6 * SIDE, blocks: 16, goes_along: false };
/// One strip of two tiles: they stay in the first-level cache, and memory is read along its rows.
const WIDE: Pace = Pace { panel: 2 * SIDE, blocks: 4, goes_along: true };
/// One strip of one tile.
const NARROW: Pace = Pace { panel: 3 * SIDE, blocks: 3, goes_along: true };

/// Outputs of an item are a multiple: whole panels of any pace.
pub(crate) const GRAIN: usize = 6 * SIDE;

/// Numbers of memory for split weights.
pub(crate) const ROOM: usize = MANY.blocks * MANY.panel / SIDE * THREE / size_of::<f32>();

/// Writes the answers of some strips of `rows` rows and of some outputs, with `memory` [`ROOM`] for split weights.
///
/// # Safety
/// As `Product::multiply`; `thirds` holds the rows of `product.x`.
pub(crate) unsafe fn multiply(
    product: &Product<'_>,
    thirds: Thirds,
    rows: usize,
    strips: Range<usize>,
    outputs: Range<usize>,
    to: Strips,
    memory: &mut [f32],
) {
    assert!(memory.len() >= ROOM, "room for split weights");
    let split: *mut u8 = memory.as_mut_ptr().cast();
    let (depth, step) = (product.weight.depth(), product.weight.rows.step);
    let strip = |number| Strip::of(number, rows, SIDE);
    for number in strips.clone() {
        // SAFETY: the caller's.
        unsafe { begin(product, strip(number), outputs.clone(), to) };
    }
    let pace = match strips.len() {
        1 if strip(strips.start).width > SIDE => WIDE,
        1 => NARROW,
        _ => MANY,
    };
    let split_step = pace.panel / SIDE * THREE;
    let (panels, chunks) = (outputs.len().div_ceil(pace.panel), depth.div_ceil(pace.blocks * BLOCK));
    // The first output and number of what comes at `turn`; behind the last turn those of the outputs behind these.
    let place = |turn: usize| {
        let (panel, chunk) = match turn {
            _ if turn >= panels * chunks => (panels + (turn - panels * chunks) / chunks, turn % chunks),
            _ if pace.goes_along => (turn / chunks, turn % chunks),
            _ => (turn % panels, turn / panels),
        };
        (outputs.start + panel * pace.panel, chunk * pace.blocks * BLOCK)
    };
    let mut lanes = 0;
    for turn in 0..panels * chunks {
        let (output, k) = place(turn);
        let (count, numbers) = (pace.panel.min(outputs.end - output), (pace.blocks * BLOCK).min(depth - k));
        let weights = |(output, k): (usize, usize)| product.weight.rows.row(output).wrapping_add(k);
        let ahead = weights(place(turn + if pace.goes_along { chunks } else { 1 }));
        // SAFETY: the caller's: the weights are there; `thirds` proves that the processor has AVX-512.
        unsafe { split_rows(split, split_step, weights((output, k)), step, count, numbers, ahead) };
        let blocks = numbers.div_ceil(BLOCK);
        for number in strips.clone() {
            let strip = strip(number);
            if lanes != strip.width {
                lanes = strip.width;
                // SAFETY: `thirds` proves that the processor has tiles.
                unsafe { configure(lanes) };
            }
            let (left, to) = (thirds.at(strip, k / BLOCK), to.at(strip, output));
            // SAFETY: the caller's: rows and answers are there; so is what was just split, and tiles are configured.
            unsafe {
                if lanes > SIDE {
                    for (pair, left_over) in (0..count).step_by(2 * SIDE).map(|pair| (pair, count - pair)) {
                        let (own, to) = (split.add(pair / SIDE * THREE), to.add(pair * lanes));
                        in_tiles::<2>(lanes, to, left_over, |to| wide(own, split_step, left, to, blocks));
                    }
                } else {
                    for (three, left_over) in (0..count).step_by(3 * SIDE).map(|three| (three, count - three)) {
                        let (own, to) = (split.add(three / SIDE * THREE), to.add(three * lanes));
                        in_tiles::<3>(lanes, to, left_over, |to| narrow(own, split_step, left, to, lanes, blocks));
                    }
                }
            }
        }
        if mutant::is(Mutant::DepthCut) && k + numbers < depth {
            break;
        }
    }
    if lanes > 0 {
        // SAFETY: as above; nobody needs them any more.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }
}

/// Writes what sums are added to.
// SAFETY: as `multiply`.
unsafe fn begin(product: &Product<'_>, strip: Strip, outputs: Range<usize>, to: Strips) {
    for output in outputs {
        let at = to.at(strip, output);
        // SAFETY: the caller's: the lanes of an output that is there, here and in what is before.
        unsafe {
            match product.start {
                Start::Bias(bias) if !mutant::is(Mutant::BiasLeftOut) => {
                    std::slice::from_raw_parts_mut(at, strip.width).fill(bias[output]);
                }
                Start::Before(before) => std::ptr::copy(before.at(strip, output).cast_const(), at, strip.width),
                Start::Zero | Start::Bias(_) => std::slice::from_raw_parts_mut(at, strip.width).fill(0.0),
            }
        }
    }
}

/// Runs `add` with the answers of `T` tiles of outputs of `lanes` lanes, of which `count` outputs are there.
// SAFETY: the caller's: those answers are at `to`.
#[inline(always)]
unsafe fn in_tiles<const T: usize>(lanes: usize, to: *mut f32, count: usize, add: impl FnOnce(*mut f32)) {
    if count >= T * SIDE {
        add(to);
        return;
    }
    let mut all = [0.0; 3 * SIDE * 2 * SIDE];
    // SAFETY: the caller's; `all` has room for any tiles.
    unsafe {
        std::ptr::copy_nonoverlapping(to.cast_const(), all.as_mut_ptr(), count * lanes);
        add(all.as_mut_ptr());
        std::ptr::copy_nonoverlapping(all.as_ptr(), to, count * lanes);
    }
}

/// How the tiles are used: what `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    /// Of a row, for each tile.
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Makes the tiles of this thread fit for `wide`, or for `narrow` with rows of `lanes` lanes.
// SAFETY: the processor has tiles, and they hold nothing that is still needed.
unsafe fn configure(lanes: usize) {
    let mut config = Config { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
    config.bytes[..8].fill(ROW as u16);
    config.rows[..8].fill(SIDE as u8);
    if lanes < SIDE {
        for tile in [0, 1, 2, 6, 7] {
            config.bytes[tile] = (lanes * size_of::<f32>()) as u16;
        }
    }
    // SAFETY: the caller's; it reads 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

/// Adds to two tiles of outputs times two of rows, 32 lanes each output: 0 to 3 hold the sums, 4 and 5 thirds of the weights, 6 and 7 of
/// the rows. No tile holds anything from one call to the next.
// SAFETY: tiles are configured; `blocks` blocks, at least one, are at `weights`, `step` bytes apart, and at `rows`; the sums are at `sums`.
unsafe fn wide(weights: *const u8, step: usize, rows: *const u8, sums: *mut f32, blocks: usize) {
    /// The tiles of weights times those of rows.
    macro_rules! multiply {
        () => {
            "tdpbf16ps tmm0, tmm4, tmm6
            tdpbf16ps tmm1, tmm4, tmm7
            tdpbf16ps tmm2, tmm5, tmm6
            tdpbf16ps tmm3, tmm5, tmm7"
        };
    }
    /// Thirds of both tiles of rows.
    macro_rules! rows {
        ($third:literal) => {
            concat!(
                "tileloadd tmm6, [{rows} + {row} + 1024*",
                $third,
                "]\n",
                "tileloadd tmm7, [{rows} + {row} + 3072 + 1024*",
                $third,
                "]"
            )
        };
    }
    /// Thirds of both tiles of weights.
    macro_rules! weights {
        ($third:literal) => {
            concat!(
                "tileloadd tmm4, [{weights} + {row} + 1024*",
                $third,
                "]\n",
                "tileloadd tmm5, [{weights} + {row} + 3072 + 1024*",
                $third,
                "]"
            )
        };
    }
    // SAFETY: the caller's; the registers that change are named.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {across}]",
            "tileloadd tmm1, [{sums} + {across} + 64]",
            "tileloadd tmm2, [{below} + {across}]",
            "tileloadd tmm3, [{below} + {across} + 64]",
            "2:",
            weights!(0), rows!(2), multiply!(),
            rows!(1), multiply!(),
            rows!(0), multiply!(),
            weights!(2), multiply!(),
            weights!(1), multiply!(),
            rows!(1), multiply!(),
            "add {weights}, {step}",
            "add {rows}, {two}",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {across}], tmm0",
            "tilestored [{sums} + {across} + 64], tmm1",
            "tilestored [{below} + {across}], tmm2",
            "tilestored [{below} + {across} + 64], tmm3",
            sums = in(reg) sums,
            below = in(reg) sums.wrapping_add(SIDE * 2 * SIDE),
            across = in(reg) 2 * ROW,
            weights = inout(reg) weights => _,
            step = in(reg) step,
            rows = inout(reg) rows => _,
            row = in(reg) ROW,
            blocks = inout(reg) blocks => _,
            two = const 2 * THREE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Adds to three tiles of outputs times one of rows with `lanes` lanes: 0 to 2 hold the sums, 3 to 5 thirds of the weights, 6 and 7 of the
/// rows. Products come in the order of `wide`.
// SAFETY: as `wide`.
unsafe fn narrow(weights: *const u8, step: usize, rows: *const u8, sums: *mut f32, lanes: usize, blocks: usize) {
    /// The tiles of weights times one of rows.
    macro_rules! multiply {
        ($rows:literal) => {
            concat!(
                "tdpbf16ps tmm0, tmm3, ",
                $rows,
                "\n",
                "tdpbf16ps tmm1, tmm4, ",
                $rows,
                "\n",
                "tdpbf16ps tmm2, tmm5, ",
                $rows
            )
        };
    }
    /// Thirds of all tiles of weights.
    macro_rules! weights {
        ($third:literal) => {
            concat!(
                "tileloadd tmm3, [{weights} + {row} + 1024*",
                $third,
                "]\n",
                "tileloadd tmm4, [{weights} + {row} + 3072 + 1024*",
                $third,
                "]\n",
                "tileloadd tmm5, [{weights} + {row} + 6144 + 1024*",
                $third,
                "]"
            )
        };
    }
    // SAFETY: the caller's; the registers that change are named.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {across}]",
            "tileloadd tmm1, [{second} + {across}]",
            "tileloadd tmm2, [{third} + {across}]",
            "2:",
            "tileloadd tmm6, [{rows} + {row} + 2048]",
            weights!(0), multiply!("tmm6"),
            "tileloadd tmm7, [{rows} + {row} + 1024]",
            multiply!("tmm7"),
            "tileloadd tmm6, [{rows} + {row}]",
            multiply!("tmm6"),
            weights!(2), multiply!("tmm6"),
            weights!(1), multiply!("tmm6"),
            multiply!("tmm7"),
            "add {weights}, {step}",
            "add {rows}, {one}",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {across}], tmm0",
            "tilestored [{second} + {across}], tmm1",
            "tilestored [{third} + {across}], tmm2",
            sums = in(reg) sums,
            second = in(reg) sums.wrapping_add(SIDE * lanes),
            third = in(reg) sums.wrapping_add(2 * SIDE * lanes),
            across = in(reg) lanes * size_of::<f32>(),
            weights = inout(reg) weights => _,
            step = in(reg) step,
            rows = inout(reg) rows => _,
            row = in(reg) ROW,
            blocks = inout(reg) blocks => _,
            one = const THREE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

const _: () = assert!(TILE == 1024 && ROW == 64, "the instructions above count on it");

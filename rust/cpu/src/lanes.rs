//! What the kernels need of a vector of float32 numbers, whatever the processor.
//!
//! A value of a [`Lanes`] type is the proof that the processor has its instructions: only [`crate::isa`] makes one, after it looked.
//! So arithmetic is safe to call, and what takes a pointer is not.

/// Lanes of the widest vector.
pub(crate) const MOST_LANES: usize = 16;

/// A vector type of `N` float32 lanes. Every method is inlined into a function that is compiled for these instructions.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// The register.
    type V: Copy;
    /// Lanes of `V`.
    const N: usize;
    /// Whether there are 32 registers, so that larger tiles of accumulators fit.
    const WIDE: bool;
    /// Query heads that are multiplied with a row while it lies in registers: 4, or 2 where the compiler makes the registers.
    const HEADS: usize;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where one of them is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where one of them is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The nearest whole number.
    fn round(self, a: Self::V) -> Self::V;
    /// a * 2^n for whole n from -126 to 127.
    fn times_power_of_two(self, a: Self::V, n: Self::V) -> Self::V;
    /// `yes` where x < bound, else `no`, also where x is NaN.
    fn where_below(self, x: Self::V, bound: f32, yes: Self::V, no: Self::V) -> Self::V;
    /// `v` where low <= first + lane < high, else `other`.
    fn where_within(self, v: Self::V, first: i32, low: i32, high: i32, other: f32) -> Self::V;
    fn sum(self, v: Self::V) -> f32;
    fn largest(self, v: Self::V) -> f32;
    /// The sums of four vectors.
    fn sum4(self, v: [Self::V; 4]) -> [f32; 4];

    /// # Safety
    /// `from` has `N` numbers, of any alignment of their type; so for the other loads.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// As `load`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// # Safety
    /// As `load`.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// The first `count` < `N` lanes, zeros behind them.
    ///
    /// # Safety
    /// `from` has `count` numbers; nothing behind them is read.
    unsafe fn load_part(self, from: *const f32, count: usize) -> Self::V;
    /// # Safety
    /// As `load_part`.
    unsafe fn load_bf16_part(self, from: *const u16, count: usize) -> Self::V;
    /// # Safety
    /// As `load_part`.
    unsafe fn load_f16_part(self, from: *const u16, count: usize) -> Self::V;
    /// # Safety
    /// `to` has room for `N` numbers.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// The columns of a square of numbers, `N` of them: column j holds number j of every row; row i begins at `from + i * step`. Of the
    /// rows that are not there, behind `rows`, the last one is taken.
    ///
    /// # Safety
    /// `rows` from 1 to `N` rows of `N` numbers are there.
    unsafe fn columns(self, from: *const f32, step: usize, rows: usize) -> [Self::V; MOST_LANES];
    /// Asks for the cache line at `at`, which may be any address, into the second-level cache.
    fn prefetch(self, at: *const u8);

    /// Turns a square of numbers: its columns, as `columns` takes them, become rows from `to` on, `to_step` apart.
    ///
    /// # Safety
    /// As `columns`, and there is room for `N` rows of `N` numbers.
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, step: usize, rows: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller's.
        unsafe {
            for (j, column) in self.columns(from, step, rows).into_iter().enumerate().take(Self::N) {
                self.store(to.add(j * to_step), column);
            }
        }
    }

    /// e^x for x <= 88; exactly 0 below -87.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // Operands in this order keep a NaN.
        let bounded = self.max(self.splat(-88.0), x);
        let n = self.round(self.mul(bounded, self.splat(std::f32::consts::LOG2_E)));
        let r = self.fma(n, self.splat(-0.693_359_4), bounded);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        // The first terms of the series, fitted to |r| <= ln(2) / 2 (the constants of Cephes' expf).
        let mut p = self.splat(1.987_569_1e-4);
        for term in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
            p = self.fma(p, r, self.splat(term));
        }
        let p = self.add(self.fma(p, self.mul(r, r), r), self.splat(1.0));
        let whole = self.times_power_of_two(p, self.max(self.splat(-126.0), n));
        self.where_below(x, -87.0, self.splat(0.0), whole)
    }

    /// The hyperbolic tangent, within two units of the last place.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let minus = self.sub(self.splat(0.0), x);
        let size = self.max(x, minus);
        let twice = self.min(self.splat(20.0), self.add(size, size));
        let tail = self.div(self.splat(2.0), self.add(self.exp(twice), self.splat(1.0)));
        let large = self.sub(self.splat(1.0), tail);
        let large = self.where_below(x, 0.0, self.sub(self.splat(0.0), large), large);
        // An odd polynomial where the difference would lose digits (the constants of Cephes' tanhf).
        let z = self.mul(x, x);
        let mut p = self.splat(-5.704_988_7e-3);
        for term in [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
            p = self.fma(p, z, self.splat(term));
        }
        let small = self.fma(self.mul(p, z), x, x);
        self.where_below(size, 0.625, small, large)
    }
}

/// Methods of a vector type of x86 that take and give vectors and numbers, each body one of the processor's own instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! instructions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty { $($body:tt)* })*) => {
        $(#[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: `self` proves that the processor has the instructions; none of these touches memory but its own array.
            unsafe { $($body)* }
        })*
    };
}

/// Those that read or write memory.
#[cfg(target_arch = "x86_64")]
macro_rules! accesses {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty { $($body:tt)* })*) => {
        $(#[inline(always)]
        // SAFETY: the caller's, as the trait asks: the numbers that are read or written are there.
        unsafe fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: as above; `self` proves that the processor has the instructions. Masked lanes are not touched.
            unsafe { $($body)* }
        })*
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use {accesses, instructions};

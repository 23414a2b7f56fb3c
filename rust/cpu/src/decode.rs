//! Single queries: the rows of a sequence's blocks are read once, in place, for all query heads that share them.

use crate::element::Element;
use crate::lanes::Lanes;
use crate::layer::{Layer, Offsets, TILE};
use crate::mutant::{self, Mutant};
use crate::scratch::Scratch;
use crate::softmax::{Running, weigh_scores};

/// One query over a part of the positions that it sees.
pub(crate) struct Single<'a> {
    /// Row of q.
    pub(crate) token: usize,
    pub(crate) table: &'a [i32],
    /// Positions `low..high`, not empty.
    pub(crate) low: usize,
    pub(crate) high: usize,
}

/// Where a part's result goes.
pub(crate) enum Target<'a> {
    /// It is the whole: to the layer's output.
    Answer,
    /// For every query head: its running softmax, and its sums [Dv padded to `sum_step`].
    Part { running: &'a mut [Running], sums: &'a mut [f32], sum_step: usize },
}

/// Attends one item.
///
/// # Safety
/// `layer` and `item` have been checked, and nobody else writes the answer of this query.
#[inline(always)]
pub(crate) unsafe fn attend_single<L: Lanes, E: Element>(
    lanes: L,
    layer: &Layer<'_, E>,
    item: &Single<'_>,
    scratch: &mut Scratch,
    mut target: Target<'_>,
) {
    let heads = layer.query_heads();
    let key_pad = layer.key_width.next_multiple_of(L::N);
    let value_pad = layer.value_width.next_multiple_of(L::N);
    let ([queries, sums, weights, state], offsets) =
        scratch.parts([heads * key_pad, heads * value_pad, L::HEADS * TILE, 2 * heads]);
    let (maxima, totals) = state.split_at_mut(heads);
    sums.fill(0.0);
    maxima.fill(f32::NEG_INFINITY);
    totals.fill(0.0);
    for head in 0..heads {
        // SAFETY: the query's row of this head has Dk numbers.
        unsafe {
            let from = layer.q.add(item.token * layer.q_token_step + head * layer.q_head_step);
            widen_row(lanes, from, layer.key_width, layer.scale, queries[head * key_pad..].as_mut_ptr());
        }
    }
    let [current, next] = offsets;
    let (mut current, mut next) = (current, next);
    let mut first = item.low;
    let mut count = TILE.min(item.high - first);
    current.fill(layer, item.table, first, count);
    while count > 0 {
        let next_count = TILE.min(item.high - first - count);
        next.fill(layer, item.table, first + count, next_count);
        for kv_head in 0..layer.kv_heads {
            // What is read after this head: the next head's rows, or those of the next tile.
            let (ahead, ahead_head, ahead_count) =
                if kv_head + 1 < layer.kv_heads { (&*current, kv_head + 1, count) } else { (&*next, 0, next_count) };
            let mut group = 0;
            while group < layer.grouped {
                let some = L::HEADS.min(layer.grouped - group);
                let head = layer.query_head(kv_head, group);
                let head_step = layer.query_head(0, 1);
                let pass =
                    Pass { kv_head, count, ahead, ahead_head, ahead_count: if group == 0 { ahead_count } else { 0 } };
                // SAFETY: `some` heads from `head` on, `head_step` apart, exist; offsets name rows of the pages.
                unsafe {
                    let rows = Heads {
                        queries: queries.as_ptr().add(head * key_pad),
                        query_step: head_step * key_pad,
                        sums: sums.as_mut_ptr().add(head * value_pad),
                        sum_step: head_step * value_pad,
                        maxima: maxima.as_mut_ptr().add(head),
                        totals: totals.as_mut_ptr().add(head),
                        state_step: head_step,
                        weights: weights.as_mut_ptr(),
                    };
                    match some {
                        1 => attend_heads::<L, E, 1>(lanes, layer, current, &pass, &rows),
                        3 if L::HEADS > 2 => attend_heads::<L, E, 3>(lanes, layer, current, &pass, &rows),
                        4 if L::HEADS > 2 => attend_heads::<L, E, 4>(lanes, layer, current, &pass, &rows),
                        _ => attend_heads::<L, E, 2>(lanes, layer, current, &pass, &rows),
                    }
                }
                group += some;
            }
        }
        first += count;
        count = next_count;
        std::mem::swap(&mut current, &mut next);
    }
    for head in 0..heads {
        let own = &sums[head * value_pad..][..value_pad];
        match &mut target {
            Target::Answer => {
                let total = totals[head] + layer.sink(head, maxima[head]);
                // SAFETY: this query's answer is this item's alone.
                unsafe { layer.answer(item.token, head, own, total) };
            }
            Target::Part { running, sums, sum_step } => {
                running[head] = Running { max: maxima[head], sum: totals[head] };
                sums[head * *sum_step..][..layer.value_width].copy_from_slice(&own[..layer.value_width]);
            }
        }
    }
}

/// One KV head of one tile, and what will be read after it.
struct Pass<'a> {
    kv_head: usize,
    count: usize,
    ahead: &'a Offsets,
    ahead_head: usize,
    /// 0: nothing.
    ahead_count: usize,
}

/// The queries of some heads, and what they have come to.
struct Heads {
    queries: *const f32,
    query_step: usize,
    sums: *mut f32,
    sum_step: usize,
    maxima: *mut f32,
    totals: *mut f32,
    state_step: usize,
    /// [heads, TILE]
    weights: *mut f32,
}

// SAFETY: the caller's: `H` heads lie at `rows`, and the offsets of `pass` name rows of the layer's pages.
#[inline(always)]
unsafe fn attend_heads<L: Lanes, E: Element, const H: usize>(
    lanes: L,
    layer: &Layer<'_, E>,
    offsets: &Offsets,
    pass: &Pass<'_>,
    rows: &Heads,
) {
    let width = pass.count.next_multiple_of(L::N);
    // SAFETY: as above; the weights of each head are a row of TILE numbers.
    unsafe {
        score_rows::<L, E, H>(lanes, layer, offsets, pass, rows);
        let mut corrections = [0.0; H];
        for (head, correction) in corrections.iter_mut().enumerate() {
            let at = head * rows.state_step;
            let mut running = Running { max: *rows.maxima.add(at), sum: *rows.totals.add(at) };
            let own = rows.weights.add(head * TILE);
            *correction = weigh_scores(lanes, own, width, 0, pass.count, layer.softcap, &mut running);
            *rows.maxima.add(at) = running.max;
            *rows.totals.add(at) = running.sum;
        }
        let values = layer.values.base.add(pass.kv_head * layer.values.head_step);
        let behind = layer.values.base.add(pass.ahead_head * layer.values.head_step);
        let ahead = Rows { base: behind, offsets: &pass.ahead.values, count: pass.ahead_count };
        let (whole, most) = (layer.value_width / L::N * L::N, if L::WIDE { 4 * L::N } else { 2 * L::N });
        let mut ask = Ask { ahead, width: layer.value_width, first: 0, every: whole.div_ceil(most).max(1) };
        let mut d = 0;
        while d < layer.value_width {
            let own = Rows { base: values.add(d), offsets: &offsets.values, count: pass.count };
            let (left, sums) = (layer.value_width - d, rows.sums.add(d));
            if L::WIDE && left >= 4 * L::N {
                sum_values::<L, E, H, 4>(lanes, &own, rows, sums, &corrections, &ask);
                d += 4 * L::N;
            } else if left >= 2 * L::N {
                sum_values::<L, E, H, 2>(lanes, &own, rows, sums, &corrections, &ask);
                d += 2 * L::N;
            } else if left >= L::N {
                sum_values::<L, E, H, 1>(lanes, &own, rows, sums, &corrections, &ask);
                d += L::N;
            } else {
                if !mutant::is(Mutant::WidthTailLeftOut) {
                    sum_tail::<L, E, H>(lanes, &own, left, rows, sums, &corrections);
                }
                d = layer.value_width;
            }
            ask.first += 1;
        }
    }
}

/// Rows of one KV head from some column on.
struct Rows<'a, E> {
    base: *const E,
    offsets: &'a [usize; TILE],
    count: usize,
}

/// Rows to ask for while others are read, every so many of them: asked for all at once they would wait for each other.
struct Ask<'a, E> {
    ahead: Rows<'a, E>,
    width: usize,
    first: usize,
    every: usize,
}

/// Scores of `H` heads for the rows of one KV head, into the weights' rows, four rows at a time.
// SAFETY: the caller's, as `attend_heads`.
#[inline(always)]
unsafe fn score_rows<L: Lanes, E: Element, const H: usize>(
    lanes: L,
    layer: &Layer<'_, E>,
    offsets: &Offsets,
    pass: &Pass<'_>,
    rows: &Heads,
) {
    let width = layer.key_width;
    // SAFETY: every offset is that of a row of `width` numbers of this KV head; behind the last row, the last one is taken again. The
    // weights' rows have room for a multiple of four.
    unsafe {
        let keys = layer.keys.base.add(pass.kv_head * layer.keys.head_step);
        let ahead = layer.keys.base.add(pass.ahead_head * layer.keys.head_step);
        let mut row = 0;
        while row < pass.count {
            let last = pass.count - 1;
            let from: [*const E; 4] = std::array::from_fn(|i| keys.add(offsets.keys[last.min(row + i)]));
            for i in row..(row + 4).min(pass.ahead_count) {
                prefetch_row(lanes, ahead.wrapping_add(pass.ahead.keys[i]), width);
            }
            let to = rows.weights.add(row);
            if L::WIDE || H < 4 {
                score_four::<L, E, H>(lanes, from, width, rows, 0, to);
            } else {
                // The sums of four heads would take all of 16 registers.
                score_four::<L, E, 2>(lanes, from, width, rows, 0, to);
                score_four::<L, E, 2>(lanes, from, width, rows, 2, to);
            }
            row += 4;
        }
    }
}

/// Scores of `H` heads from `first` on for four rows, to the weights' rows from `to` on.
// SAFETY: the caller's: each of `from` is a row of `width` numbers, and the weights' rows have room for four.
#[inline(always)]
unsafe fn score_four<L: Lanes, E: Element, const H: usize>(
    lanes: L,
    from: [*const E; 4],
    width: usize,
    rows: &Heads,
    first: usize,
    to: *mut f32,
) {
    // SAFETY: as above; queries are padded to whole vectors.
    unsafe {
        let queries = rows.queries.add(first * rows.query_step);
        let mut sums = [[lanes.splat(0.0); 4]; H];
        let mut d = 0;
        while d + L::N <= width {
            for i in 0..4 {
                let key = E::load(lanes, from[i].add(d));
                for (head, sums) in sums.iter_mut().enumerate() {
                    let query = lanes.load(queries.add(head * rows.query_step + d));
                    sums[i] = lanes.fma(key, query, sums[i]);
                }
            }
            d += L::N;
        }
        if d < width && !mutant::is(Mutant::WidthTailLeftOut) {
            for i in 0..4 {
                let key = E::load_part(lanes, from[i].add(d), width - d);
                for (head, sums) in sums.iter_mut().enumerate() {
                    let query = lanes.load(queries.add(head * rows.query_step + d));
                    sums[i] = lanes.fma(key, query, sums[i]);
                }
            }
        }
        for (head, sums) in sums.iter().enumerate() {
            let scores = lanes.sum4(*sums);
            to.add((first + head) * TILE).cast::<[f32; 4]>().write_unaligned(scores);
        }
    }
}

/// Adds the weighed rows of `V` vectors' columns to the sums of `H` heads, and asks for rows on the way.
// SAFETY: the caller's: the rows have these columns, and so have the sums.
#[inline(always)]
unsafe fn sum_values<L: Lanes, E: Element, const H: usize, const V: usize>(
    lanes: L,
    values: &Rows<'_, E>,
    rows: &Heads,
    sums: *mut f32,
    corrections: &[f32; H],
    ask: &Ask<'_, E>,
) {
    // SAFETY: as above.
    unsafe {
        let mut total = [[lanes.splat(0.0); V]; H];
        for head in 0..H {
            for v in 0..V {
                let before = lanes.load(sums.add(head * rows.sum_step + v * L::N));
                total[head][v] = lanes.mul(before, lanes.splat(corrections[head]));
            }
        }
        let mut due = ask.first;
        for row in 0..values.count {
            if row == due && row < ask.ahead.count {
                prefetch_row(lanes, ask.ahead.base.wrapping_add(ask.ahead.offsets[row]), ask.width);
                due += ask.every;
            }
            let from = values.base.add(values.offsets[row]);
            let loaded: [L::V; V] = std::array::from_fn(|v| E::load(lanes, from.add(v * L::N)));
            for head in 0..H {
                let weight = lanes.splat(*rows.weights.add(head * TILE + row));
                for v in 0..V {
                    total[head][v] = lanes.fma(weight, loaded[v], total[head][v]);
                }
            }
        }
        for head in 0..H {
            for v in 0..V {
                lanes.store(sums.add(head * rows.sum_step + v * L::N), total[head][v]);
            }
        }
    }
}

/// As `sum_values`, for the last `part` columns, fewer than a vector.
// SAFETY: the caller's: the rows have these columns, and the sums have room for a whole vector.
#[inline(always)]
unsafe fn sum_tail<L: Lanes, E: Element, const H: usize>(
    lanes: L,
    values: &Rows<'_, E>,
    part: usize,
    rows: &Heads,
    sums: *mut f32,
    corrections: &[f32; H],
) {
    // SAFETY: as above.
    unsafe {
        for head in 0..H {
            let to = sums.add(head * rows.sum_step);
            let mut total = lanes.mul(lanes.load(to), lanes.splat(corrections[head]));
            for row in 0..values.count {
                let loaded = E::load_part(lanes, values.base.add(values.offsets[row]), part);
                total = lanes.fma(lanes.splat(*rows.weights.add(head * TILE + row)), loaded, total);
            }
            lanes.store(to, total);
        }
    }
}

/// `width` numbers, times `scale`, as float32 with zeros up to a whole vector.
///
/// # Safety
/// `from` has `width` numbers and `to` room for them in whole vectors.
#[inline(always)]
pub(crate) unsafe fn widen_row<L: Lanes, E: Element>(lanes: L, from: *const E, width: usize, scale: f32, to: *mut f32) {
    let mut d = 0;
    // SAFETY: as above.
    unsafe {
        while d + L::N <= width {
            lanes.store(to.add(d), lanes.mul(E::load(lanes, from.add(d)), lanes.splat(scale)));
            d += L::N;
        }
        if d < width {
            lanes.store(to.add(d), lanes.mul(E::load_part(lanes, from.add(d), width - d), lanes.splat(scale)));
        }
    }
}

/// Asks for a row, into the second-level cache: the first level has room for a third of the requests that keep memory busy (on a Zen 4
/// core 9 GB/s so, 17 with the second level).
#[inline(always)]
fn prefetch_row<L: Lanes, E>(lanes: L, row: *const E, width: usize) {
    let row = row.cast::<u8>();
    let mut byte = 0;
    while byte < width * size_of::<E>() {
        lanes.prefetch(row.wrapping_add(byte));
        byte += 64;
    }
}

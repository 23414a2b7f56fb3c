//! Several queries of one sequence: a tile of queries times a tile of positions, keys turned over so that products run at full speed.

use crate::decode::widen_row;
use crate::element::Element;
use crate::lanes::Lanes;
use crate::layer::{Layer, TILE};
use crate::mutant::{self, Mutant};
use crate::scratch::Scratch;
use crate::softmax::{Running, weigh_scores};

/// Rows (queries times query heads) of one micro product.
const ROWS: usize = 6;

/// Some queries of a sequence that follow each other, with the query heads of one KV head.
pub(crate) struct Chunk<'a> {
    /// Row of q of the first one.
    pub(crate) token: usize,
    /// Where the first one stands.
    pub(crate) position: usize,
    pub(crate) queries: usize,
    pub(crate) kv_head: usize,
    pub(crate) table: &'a [i32],
}

/// Attends one item.
///
/// # Safety
/// `layer` and `item` have been checked, and nobody else writes the answers of these queries' heads.
#[inline(always)]
pub(crate) unsafe fn attend_chunk<L: Lanes, E: Element>(
    lanes: L,
    layer: &Layer<'_, E>,
    item: &Chunk<'_>,
    scratch: &mut Scratch,
) {
    let grouped = layer.grouped;
    let rows = item.queries * grouped;
    let row_pad = rows.next_multiple_of(ROWS);
    let key_pad = layer.key_width.next_multiple_of(L::N);
    let value_pad = layer.value_width.next_multiple_of(L::N);
    let ([queries, sums, scores, keys, values, narrow, state], offsets) = scratch.parts([
        row_pad * key_pad,
        row_pad * value_pad,
        row_pad * TILE,
        layer.key_width * TILE,
        TILE * value_pad,
        4 * key_pad,
        3 * row_pad,
    ]);
    let (maxima, rest) = state.split_at_mut(row_pad);
    let (totals, corrections) = rest.split_at_mut(row_pad);
    sums.fill(0.0);
    scores.fill(0.0);
    maxima.fill(f32::NEG_INFINITY);
    totals.fill(0.0);
    queries[rows * key_pad..].fill(0.0);
    for row in 0..rows {
        let (token, head) = (item.token + row / grouped, layer.query_head(item.kv_head, row % grouped));
        // SAFETY: this row of q has Dk numbers, and the tile has room for them in whole vectors.
        unsafe {
            let from = layer.q.add(token * layer.q_token_step + head * layer.q_head_step);
            widen_row(lanes, from, layer.key_width, layer.scale, queries[row * key_pad..].as_mut_ptr());
        }
    }
    let end = item.position + item.queries;
    let mut first = layer.first_seen(item.position);
    let [offsets, _] = offsets;
    while first < end {
        let count = TILE.min(end - first);
        offsets.fill(layer, item.table, first, count);
        // SAFETY: offsets name rows of the pages of this KV head; the tiles have the sizes that are named above.
        let finite = unsafe {
            let from = layer.keys.base.add(item.kv_head * layer.keys.head_step);
            turn_keys(lanes, from, &offsets.keys, count, layer.key_width, narrow, key_pad, keys.as_mut_ptr());
            let from = layer.values.base.add(item.kv_head * layer.values.head_step);
            copy_values(lanes, from, &offsets.values, count, layer.value_width, value_pad, values.as_mut_ptr())
        };
        // Queries before this tile see nothing of it.
        let skipped = first.saturating_sub(item.position) * grouped / ROWS * ROWS;
        let width = count.next_multiple_of(L::N);
        for row in (skipped..row_pad).step_by(ROWS) {
            // SAFETY: ROWS rows of the queries' and scores' tiles.
            unsafe {
                let (a, c) = (queries.as_ptr().add(row * key_pad), scores.as_mut_ptr().add(row * TILE));
                multiply(lanes, (a, key_pad), (keys.as_ptr(), TILE), layer.key_width, (c, TILE), TILE, None);
            }
            for row in row..(row + ROWS).min(rows) {
                let (low, high) = seen_columns(layer, item.position + row / grouped, first, count);
                let mut running = Running { max: maxima[row], sum: totals[row] };
                // SAFETY: a row of TILE scores.
                corrections[row] = unsafe {
                    let own = scores.as_mut_ptr().add(row * TILE);
                    weigh_scores(lanes, own, width, low, high, layer.softcap, &mut running)
                };
                (maxima[row], totals[row]) = (running.max, running.sum);
            }
            for row in rows.max(row)..(row + ROWS) {
                scores[row * TILE..][..TILE].fill(0.0);
                corrections[row] = 0.0;
            }
            if finite || mutant::is(Mutant::BrokenRowsWeighed) {
                // SAFETY: ROWS rows of the weights' and sums' tiles.
                unsafe {
                    let (a, c) = (scores.as_ptr().add(row * TILE), sums.as_mut_ptr().add(row * value_pad));
                    let b = (values.as_ptr(), value_pad);
                    multiply(
                        lanes,
                        (a, TILE),
                        b,
                        count,
                        (c, value_pad),
                        value_pad,
                        Some(&corrections[row..row + ROWS]),
                    );
                }
                continue;
            }
            // 0 times what is not finite is no number: every row adds only what it sees.
            for row in row..(row + ROWS).min(rows) {
                let (low, high) = seen_columns(layer, item.position + row / grouped, first, count);
                let own = &mut sums[row * value_pad..][..value_pad];
                own.iter_mut().for_each(|sum| *sum *= corrections[row]);
                for column in low..high {
                    let weight = scores[row * TILE + column];
                    let value = &values[column * value_pad..][..value_pad];
                    own.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
                }
            }
        }
        first += count;
    }
    for row in 0..rows {
        let (token, head) = (item.token + row / grouped, layer.query_head(item.kv_head, row % grouped));
        let total = totals[row] + layer.sink(head, maxima[row]);
        // SAFETY: these answers are this item's alone.
        unsafe { layer.answer(token, head, &sums[row * value_pad..][..value_pad], total) };
    }
}

/// Columns `low..high` of the tile at `first` that the query at `position` sees.
#[inline(always)]
fn seen_columns<E: Element>(layer: &Layer<'_, E>, position: usize, first: usize, count: usize) -> (usize, usize) {
    let mut end = position + 1;
    if mutant::is(Mutant::SeesNext) {
        end += 1;
    }
    if mutant::is(Mutant::MissesOwn) {
        end -= 1;
    }
    let high = end.saturating_sub(first).min(count);
    (layer.first_seen(position).saturating_sub(first).min(high), high)
}

/// Puts the keys of `count` rows into `to` [width, TILE], one column a row; columns behind them become zero.
// SAFETY: the caller's: the offsets name rows of `width` numbers.
#[inline(always)]
unsafe fn turn_keys<L: Lanes, E: Element>(
    lanes: L,
    keys: *const E,
    offsets: &[usize; TILE],
    count: usize,
    width: usize,
    narrow: &mut [f32],
    pad: usize,
    to: *mut f32,
) {
    let mut row = 0;
    while row < TILE {
        for i in 0..4 {
            let own = &mut narrow[i * pad..][..pad];
            if row + i < count {
                // SAFETY: as above.
                unsafe { widen_row(lanes, keys.add(offsets[row + i]), width, 1.0, own.as_mut_ptr()) };
            } else {
                own.fill(0.0);
            }
        }
        let (a, rest) = narrow.split_at(pad);
        let (b, rest) = rest.split_at(pad);
        let (c, e) = rest.split_at(pad);
        for d in 0..width {
            // SAFETY: four columns of row `d`, below TILE.
            unsafe { to.add(d * TILE + row).cast::<[f32; 4]>().write_unaligned([a[d], b[d], c[d], e[d]]) };
        }
        row += 4;
    }
}

/// Copies the values of `count` rows to `to` [TILE, pad] as float32; whether all of them are finite.
// SAFETY: the caller's: the offsets name rows of `width` numbers, and `pad` is `width` in whole vectors.
#[inline(always)]
unsafe fn copy_values<L: Lanes, E: Element>(
    lanes: L,
    values: *const E,
    offsets: &[usize; TILE],
    count: usize,
    width: usize,
    pad: usize,
    to: *mut f32,
) -> bool {
    // x * 0 is 0 for a finite x and NaN for any other.
    let mut odd = lanes.splat(0.0);
    for (row, offset) in offsets[..count].iter().enumerate() {
        // SAFETY: as above.
        unsafe {
            let own = to.add(row * pad);
            widen_row(lanes, values.add(*offset), width, 1.0, own);
            let mut d = 0;
            while d < pad {
                odd = lanes.fma(lanes.load(own.add(d)), lanes.splat(0.0), odd);
                d += L::N;
            }
        }
    }
    lanes.sum(odd) == 0.0
}

/// c [ROWS, columns] = a [ROWS, depth] times b [depth, columns], plus c times `corrections` if there are some. Each matrix comes
/// with its row step.
// SAFETY: the caller's: the matrices have these sizes, and `columns` is a multiple of the lanes.
#[inline(always)]
unsafe fn multiply<L: Lanes>(
    lanes: L,
    a: (*const f32, usize),
    b: (*const f32, usize),
    depth: usize,
    c: (*mut f32, usize),
    columns: usize,
    corrections: Option<&[f32]>,
) {
    let mut column = 0;
    // SAFETY: as above.
    unsafe {
        if L::WIDE {
            while column + 4 * L::N <= columns {
                multiply_columns::<L, 4>(lanes, a, (b.0.add(column), b.1), depth, (c.0.add(column), c.1), corrections);
                column += 4 * L::N;
            }
        }
        while column + 2 * L::N <= columns {
            multiply_columns::<L, 2>(lanes, a, (b.0.add(column), b.1), depth, (c.0.add(column), c.1), corrections);
            column += 2 * L::N;
        }
        while column < columns {
            multiply_columns::<L, 1>(lanes, a, (b.0.add(column), b.1), depth, (c.0.add(column), c.1), corrections);
            column += L::N;
        }
    }
}

// SAFETY: the caller's: as `multiply`, for `V` vectors of columns.
#[inline(always)]
unsafe fn multiply_columns<L: Lanes, const V: usize>(
    lanes: L,
    (a, a_step): (*const f32, usize),
    (b, b_step): (*const f32, usize),
    depth: usize,
    (c, c_step): (*mut f32, usize),
    corrections: Option<&[f32]>,
) {
    let mut total = [[lanes.splat(0.0); V]; ROWS];
    // SAFETY: as above.
    unsafe {
        if let Some(corrections) = corrections {
            for row in 0..ROWS {
                for v in 0..V {
                    let before = lanes.load(c.add(row * c_step + v * L::N));
                    total[row][v] = lanes.mul(before, lanes.splat(corrections[row]));
                }
            }
        }
        for k in 0..depth {
            let right: [L::V; V] = std::array::from_fn(|v| lanes.load(b.add(k * b_step + v * L::N)));
            for (row, total) in total.iter_mut().enumerate() {
                let left = lanes.splat(*a.add(row * a_step + k));
                for v in 0..V {
                    total[v] = lanes.fma(left, right[v], total[v]);
                }
            }
        }
        for (row, total) in total.iter().enumerate() {
            for (v, total) in total.iter().enumerate() {
                lanes.store(c.add(row * c_step + v * L::N), *total);
            }
        }
    }
}

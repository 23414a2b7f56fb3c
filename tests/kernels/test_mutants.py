"""Every promise of `checks.py` can fail: each fault planted in the reference is caught by the check that it is made for.

Before: `implementations.changed` makes a copy of the kernels with one fault. After: the check must raise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest

from tests.kernels import checks
from tests.kernels.implementations import REFERENCE, SMALL_BOUNDS, Change, Implementation, changed
from tests.kernels.paged_case import Length, Shape

Check = Callable[[Implementation], None]

CHUNKS = [Length(9, 20), Length(5, 5), Length(1, 17), Length(7, 33)]  # of one group
DECODES = [Length(1, 20), Length(1, 33)]
ALONE = [Length(9, 20)]


def equals_dense(lengths: list[Length] = CHUNKS, **changes: object) -> Check:
    return partial(checks.check_equals_dense, shape=Shape(**changes), lengths=lengths)  # type: ignore[arg-type]


def stores(**changes: object) -> Check:
    return partial(checks.check_only_written_slots_change, shape=Shape(**changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mutant:
    """A fault, and the check that must see it."""

    name: str
    check: Check
    changes: tuple[Change, ...]


UNSEEN = partial(checks.check_unseen_rows_never_matter, shape=Shape())
BROKEN = partial(checks.check_a_broken_row_stays_its_owners, shape=Shape())
STORED = partial(checks.check_what_was_stored_is_attended, shape=Shape())
SPLIT = "blocks, offsets = slots // block_size, slots % block_size"
CAP = "scores = (scores / scoring.softcap).tanh_() * scoring.softcap"
DEALT = "(count, length, grouped, kv_heads, width).transpose(2, 3)"
CLAMP = "gathered = torch.minimum(columns, last)"
WHOLE_BLOCKS = "gathered = torch.minimum(columns, (last // block_size + 1) * block_size - 1)"

MUTANTS = [
    # What a query sees.
    Mutant("a chunk's mask lets in the next position", equals_dense(), (("row_group", "seen > at\n", "seen > at + 1\n"),)),
    Mutant("a chunk's mask hides the own position", equals_dense(), (("row_group", "seen > at\n", "seen >= at\n"),)),
    Mutant(
        "the band lets in the next position", equals_dense(ALONE), (("causal_band", "column > stands", "column > stands + 1"),)
    ),
    Mutant("the band hides the own position", equals_dense(ALONE), (("causal_band", "column > stands", "column >= stands"),)),
    Mutant("the band is shifted", equals_dense(ALONE), (("causal_band", "self.reach - stands", "self.reach - stands - 1"),)),
    Mutant("nothing is masked", equals_dense(), (("row_group", "if not hidden.any():", "if hidden.any():"),)),
    Mutant(
        "a chunk's window is one longer",
        equals_dense(window=5),
        (("row_group", "seen <= at - geometry.window", "seen < at - geometry.window"),),
    ),
    Mutant(
        "the band's window is one shorter",
        equals_dense(ALONE, window=5),
        (("causal_band", "column <= stands - window", "column <= stands - window + 1"),),
    ),
    Mutant(
        "a decode reaches one position less",
        checks.check_window_while_decoding,
        (("attention_batch", "(end - start) + 1 - window", "(end - start) + 2 - window"),),
    ),
    Mutant(
        "a window starts as if it were always full",
        checks.check_window_while_decoding,
        (("attention_batch", "max(0, seq_len - (end - start) + 1 - window)", "seq_len - (end - start) + 1 - window"),),
    ),
    Mutant(
        "a window that all fits is taken for none, one too early",
        equals_dense(window=32),
        (("attention_batch", "0 < window < max(self.seq_lens, default=0)", "0 < window < max(self.seq_lens) - 1"),),
    ),
    Mutant(
        "the last column of a tile is lost", equals_dense(ALONE), (("row_group", "min(end, member.query_len))", "end - 1)"),)
    ),
    Mutant(
        "the first column of a tile's window is lost",
        equals_dense(window=3),
        (*SMALL_BOUNDS, ("row_group", "earliest - window + 1)", "earliest - window + 2)")),
    ),
    Mutant(
        "every tile has the first tile's queries",
        equals_dense(),
        (
            *SMALL_BOUNDS,
            ("row_group", "slice(member.query_start + start, member", "slice(member.query_start, member"),
            ("row_group", "query_start + end)", "query_start + end - start)"),
        ),
    ),
    Mutant(
        "a padded query is written as a real one",
        equals_dense(),
        (
            ("row_group", "if any(member.query_len < end for member in members):", "if end < 0:"),
            ("row_group", "own_step = torch.minimum(step, final)", "own_step = step.expand(len(members), -1)"),
        ),
    ),
    # What is computed from it.
    Mutant(
        "query heads of a chunk are dealt to the KV heads in turn",
        equals_dense(softcap=1.0, grouped=3),
        (("reference", "q.view(count, length, kv_heads, grouped, width)", f"q.view{DEALT}"),),
    ),
    Mutant(
        "values of a decode are dealt to the query heads in turn",
        equals_dense(DECODES, grouped=3),
        (
            (
                "row_group",
                "value_rows.view(-1, reach).repeat_interleave(grouped, dim=0)",
                "value_rows.view(-1, reach).repeat(grouped, 1)",
            ),
        ),
    ),
    Mutant(
        "values are read in place where rows of the view overlap",
        equals_dense(DECODES, spare=5),
        (
            ("reference", "and values.is_contiguous()\n", ""),
            (
                "reference",
                "embedding_bag(group.value_rows, values,",
                "embedding_bag(group.value_rows, values.as_strided(values.shape, (values.shape[1], 1)),",
            ),
        ),
    ),
    Mutant("the cap is not multiplied back", equals_dense(softcap=0.7), (("reference", CAP, CAP.rpartition(" * ")[0]),)),
    Mutant("no soft cap", equals_dense(softcap=0.7), (("reference", "if scoring.softcap:", "if not scoring.sinks is None:"),)),
    Mutant("sinks are left out", equals_dense(has_sinks=True), (("reference", "if scoring.sinks is None:", "if True:"),)),
    Mutant(
        "a query's own place is left out of its slopes",
        equals_dense(has_slopes=True, has_sinks=True),
        (("row_group", "columns.unsqueeze(1) - positions.unsqueeze(2)", "columns.unsqueeze(1) - 0 * positions.unsqueeze(2)"),),
    ),
    Mutant(
        "the slopes of a chunk alone are those of its first tile",
        equals_dense(ALONE, has_slopes=True, has_sinks=True),
        (*SMALL_BOUNDS, ("row_group", "arange(member.query_column + start, member.query_column + end,", "arange(end - start,")),
    ),
    Mutant(
        "slopes are dealt to the KV heads in turn",
        equals_dense(has_slopes=True, grouped=3),
        (
            (
                "reference",
                "slopes.to(scores.dtype).view(kv_heads, grouped, 1, 1)",
                "slopes.to(scores.dtype).view(grouped, kv_heads, 1, 1).transpose(0, 1)",
            ),
        ),
    ),
    Mutant("the scale is left out", equals_dense(softcap=9.0), (("reference", "alpha=scoring.scale", "alpha=1.0"),)),
    Mutant(
        "values are read with the keys' steps",
        equals_dense(key_width=12),
        (("row_group", "if geometry.value_steps != geometry.key_steps:", "if geometry is None:"),),
    ),
    Mutant(
        "layers of another window read the first one's groups",
        checks.check_layers_of_different_windows,
        (("attention_batch", "found = self._groups.get(geometry)", "found = next(iter(self._groups.values()), None)"),),
    ),
    # Where it is read.
    Mutant("the rest of the last block is read", UNSEEN, (("row_group", CLAMP, WHOLE_BLOCKS),)),
    Mutant("the padding of a table is read", equals_dense(), (("row_group", CLAMP, "gathered = columns"),)),
    Mutant("spoiled queries stay so", BROKEN, (("reference", "if rows.numel():", "if rows is None:"),)),
    Mutant(
        "the cache is taken for contiguous",
        equals_dense(),
        (("row_view", "cache.stride()[:3]", "cache.contiguous().stride()[:3]"),),
    ),
    Mutant("block ids are cut to 16 bits", checks.check_ids_above_65535, (("row_group", ").long()", ").long() & 0xFFFF"),)),
    Mutant(
        "row numbers are cut to 32 bits",
        checks.check_offsets_above_32_bits,
        (("row_group", "blocks * steps.block", "(blocks * steps.block).int().long()"),),
    ),
    # Where it is written.
    Mutant("-1 is written as an index", stores(), (("reference", "if int(slots.min()) < 0:", "if slots is None:"),)),
    Mutant(
        "slots follow the first one", STORED, (("reference", SPLIT, f"slots = slots[0] + slots.argsort().argsort(); {SPLIT}"),)
    ),
    Mutant(
        "block and offset change places", STORED, (("reference", SPLIT, SPLIT.replace("blocks, offsets", "offsets, blocks")),)
    ),
    Mutant("values are left out", STORED, (("reference", "    v_cache[blocks, :, offsets] = v\n", ""),)),
    Mutant(
        "the last slot is written on the side",
        stores(),
        (
            (
                "reference",
                "    v_cache[blocks, :, offsets] = v\n",
                "    v_cache[blocks, :, offsets] = v\n    v_cache[-1, :, -1] = 0\n",
            ),
        ),
    ),
    Mutant(
        "the null block is written on the side",
        stores(),
        (("reference", "    v_cache[blocks, :, offsets] = v\n", "    v_cache[blocks, :, offsets] = v\n    k_cache[0] = 0\n"),),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    _holds_without(mutant.check)
    broken = Implementation.of(mutant.name, changed(*mutant.changes))
    with pytest.raises((AssertionError, IndexError, RuntimeError)) as caught:
        mutant.check(broken)
    print(f"{mutant.name}: {caught.type.__name__}: {caught.value}")


@cache
def _holds_without(check: Check) -> None:
    """The control: without a fault the check passes. Once for each check."""
    check(REFERENCE)


def test_a_mutant_that_no_longer_finds_its_line_is_told() -> None:
    with pytest.raises(LookupError, match="holds 0 times"):
        changed(("reference", "a line that is not there", ""))

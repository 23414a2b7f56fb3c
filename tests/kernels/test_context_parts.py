"""Contexts in parts: every position is in one, and a launch takes what all contexts need, not as many times the longest."""

import random
import sys

import pytest
import torch

from blocktable.kernels import AttentionBatch
from blocktable.kernels.context_parts import PART, ContextParts, count_parts
from tests.kernels import checks
from tests.kernels.implementations import Change, changed
from tests.kernels.paged_case import Length, Shape, make_case

LENS = [0, 1, PART - 1, PART, PART + 1, 5 * PART, 3, 4096]


def listed(parts: ContextParts, num_seqs: int) -> list[tuple[int, int]]:
    """(sequence, number of the part) of each entry."""
    owners = [owner for owner in parts.sequences.tolist() if owner < num_seqs]
    return [(owner, entry - int(parts.firsts[owner, 0])) for entry, owner in enumerate(owners)]


def check_cover(cls: type[ContextParts], window: int, lens: list[int]) -> None:
    """Every context has all its parts, once each, at a place of its own."""
    seen = [min(length, window) if window else length for length in lens]
    wanted = [(owner, part) for owner, count in enumerate(seen) for part in range(max(1, count_parts(count)))]
    parts = cls.cut(torch.tensor(lens, dtype=torch.int32), len(wanted) + 3, window=window)
    assert listed(parts, len(lens)) == wanted
    assert parts.sequences.tolist()[len(wanted) :] == [len(lens)] * 3, "what is left belongs to nobody"
    assert [int(parts.firsts[owner, 1]) + part for owner, part in wanted] == list(range(len(wanted)))


def check_places(cls: type[ContextParts]) -> None:
    """Places of parts that were attended before lie in front of those of the rest."""
    lens, begins = torch.tensor([PART + 10, 20, 3 * PART]).int(), torch.tensor([PART, 0, 2 * PART + 1]).int()
    parts = cls.cut(lens, 3, begins=begins, num_before=4)
    assert parts.sequences.tolist() == [0, 1, 2]
    assert parts.firsts.tolist() == [[0, 0], [1, 2], [2, 3]]
    assert parts.num_places == 7


def check_all(cls: type[ContextParts]) -> None:
    """Both."""
    check_cover(cls, PART, LENS)
    check_places(cls)


@pytest.mark.parametrize("window", [0, 1, PART, 2 * PART + 3])
def test_every_context_has_all_its_parts_once_each_at_a_place_of_its_own(window: int, rng: random.Random) -> None:
    for lens in (LENS, [rng.randrange(4 * PART) for _ in range(40)]):
        check_cover(ContextParts, window, lens)


def test_places_of_parts_that_were_attended_before_lie_in_front_of_those_of_the_rest() -> None:
    check_places(ContextParts)


FAULTS: list[Change] = [
    ("context_parts", "seen = lens - begins if", "seen = lens if"),
    ("context_parts", ".clamp(min=1)", ""),
    ("context_parts", "right=True", "right=False"),
    ("context_parts", "lens.clamp(max=window) if window else lens", "lens"),
    (
        "context_parts",
        "firsts + (before.cumsum(0, dtype=torch.int32) - before)",
        "firsts + before.cumsum(0, dtype=torch.int32)",
    ),
    ("context_parts", "num_parts + num_before)", "num_parts)"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1])
def test_a_planted_fault_is_caught(fault: Change) -> None:
    cls = sys.modules[f"{changed(fault).__name__}.context_parts"].ContextParts
    with pytest.raises((AssertionError, IndexError)):
        check_all(cls)


pytest.importorskip("triton", reason="Triton is not installed")
interpreter = pytest.importorskip("tests.kernels.interpreter")
interpreter.mend()

from blocktable.kernels import quantised, triton_decode  # noqa: E402 - after the interpreter is chosen


def scratch_bytes(lens: list[int]) -> int:
    """What one decode keeps for its parts: 8 query heads on 2 KV heads of 32."""
    tables = torch.zeros(len(lens), -(-max(lens) // 16), dtype=torch.int32)
    batch = AttentionBatch.build(tables, torch.arange(len(lens) + 1), torch.tensor(lens), 16)
    scratch, caches = triton_decode.DecodeScratch(), [torch.zeros(1, 2, 16, 32) for _ in range(2)]
    bound = triton_decode.bind_decode(torch.zeros(len(lens), 8, 32), *caches, batch, scale=1.0, scratch=scratch)
    assert bound.launches[0].grid == (sum(map(count_parts, lens)), 2)
    return scratch.num_bytes


def test_one_long_context_among_many_short_ones_costs_its_own_parts() -> None:
    """A part leaves 32 sums, a maximum and a total for each of 8 query heads; a sequence has a counter for each KV head."""
    assert scratch_bytes([131072] + [100] * 255) == (256 + 255) * 8 * 34 * 4 + 256 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_of_one_byte_a_number_are_attended_in_parts(dtype: torch.dtype) -> None:
    case = make_case(Shape(kv_heads=2, grouped=2, key_width=32, value_width=32), [Length(1, PART + 60), Length(1, 9)])
    caches, scales = zip(*(quantised.quantise(cache, dtype) for cache in case.pool(0.0)[1:]))
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16)
    options = {**case.options, "k_scales": scales[0].contiguous(), "v_scales": scales[1].contiguous()}
    expected = quantised.paged_attention_quantised(case.q, *caches, batch, **options)
    checks.assert_close(triton_decode.paged_decode(case.q, *caches, batch, **options), expected.double(), 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("window", [0, 700])
def test_lengths_that_only_the_device_knows_need_a_bound_on_their_parts_and_no_more(window: int) -> None:
    """As in a captured step: the arrays are filled after the launch was prepared; what is padding is answered with zeros."""
    case = make_case(
        Shape(kv_heads=1, grouped=2, key_width=32, value_width=32, window=window), [Length(1, 1100), Length(1, 40)]
    )
    q = torch.cat([case.q, torch.ones(2, 2, 32)])
    tables = torch.cat([case.tables, torch.zeros_like(case.tables)]).int()
    lens = torch.tensor([1100, 40, 0, 0], dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32)
    batch = AttentionBatch.unread(tables, starts, lens, 16, end_block=case.num_blocks, most_parts=7)
    bound = triton_decode.bind_decode(q, *case.pool(float("nan"))[1:], batch, **case.options)
    assert bound.launches[0].grid == (7, 1)
    out = bound()
    checks.assert_close(out[:2], case.expected(), checks.TOLERANCE)
    assert not out[2:].any()

"""Cascades: what a group shares is attended once, and every answer is that of attention over positions."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktable.kernels import AttentionBatch, KernelInputError
from tests.conftest import SEED
from tests.kernels import checks
from tests.kernels.implementations import Change, changed
from tests.kernels.paged_case import Case, Length, Shape, make_case
from tests.kernels.triton_cases import TOLERANCE

pytest.importorskip("triton", reason="Triton is not installed")
interpreter = pytest.importorskip("tests.kernels.interpreter")
interpreter.mend()

from blocktable.kernels import cascade, triton_cascade, triton_decode  # noqa: E402 - after the interpreter is chosen
from blocktable.kernels.bound_launch import KernelLaunch  # noqa: E402
from blocktable.model import gpu_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are masked afterwards

NAN = float("nan")
Decode = Callable[..., Tensor]
Groups = tuple[list[int], list[int], list[int]]
IMPLEMENTATIONS: dict[str, Decode] = {"torch": cascade.cascade_decode, "triton": triton_cascade.cascade_decode}

# Two groups, of which one has a member without a query, between sequences of their own; contexts that end in the block behind
# what is shared, one position behind it, and far from it.
LENGTHS = [
    Length(1, 40),
    Length(1, 33, shares=32),
    Length(0, 37, shares=32),
    Length(1, 60, shares=32),
    Length(1, 9),
    Length(1, 100),
    Length(1, 97, shares=96),
]
MEMBERS, STARTS, POSITIONS = [0, 1, 2, 3, 6, 5], [0, 4, 6], [32, 96]
WIDE = {"key_width": 32, "value_width": 32}


def groups(block_size: int) -> Groups:
    """Those of LENGTHS, in blocks."""
    return MEMBERS, STARTS, [positions // block_size for positions in POSITIONS]


def attend(decode: Decode, case: Case, given: Groups, **more: Any) -> Tensor:
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, case.shape.block_size).with_prefixes(*given)
    options = {name: value for name, value in case.options.items() if name != "window"}
    return decode(case.q, *case.pool(NAN)[1:], batch, **options, **more)


@pytest.mark.parametrize("decode", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("block_size", "changes"),
    [
        (16, {}),
        (1, {"kv_heads": 1, "grouped": 7}),
        (8, {"has_sinks": True, "dtype": torch.float16}),
        (32, {"softcap": 0.7, "has_slopes": True, "dtype": torch.bfloat16, "grouped": 3}),
        (16, {"softcap": 2.0, "has_slopes": True, "has_sinks": True, "key_width": 80, "value_width": 48}),
    ],
    ids=str,
)
def test_a_cascade_is_attention_over_positions(decode: Decode, block_size: int, changes: dict[str, Any]) -> None:
    torch.manual_seed(SEED)
    case = make_case(Shape(block_size=block_size, **(WIDE | changes)), LENGTHS, spread=2.0)
    with interpreter.shuffled_programs(block_size):
        out = attend(decode, case, groups(block_size))
    checks.assert_close(out, case.expected(), TOLERANCE[case.shape.dtype])


@pytest.mark.parametrize("decode", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_group_of_some_or_one_and_no_group_at_all_are_right_too(decode: Decode) -> None:
    case = make_case(Shape(**WIDE), LENGTHS)
    for given in (([1, 3], [0, 2], [1]), ([3], [0, 1], [2]), ([], [0], [])):
        checks.assert_close(attend(decode, case, given), case.expected(), checks.TOLERANCE)


@pytest.mark.parametrize("window", [0, 700, 5000])
def test_a_decode_over_a_batch_with_prefixes_passes_them_over(window: int) -> None:
    """As a layer with a window does beside others that have none, before and behind a cascade of the same batch."""
    lengths = [Length(1, 1100), Length(1, 1120, shares=1088)]
    case = make_case(Shape(kv_heads=1, window=window, **WIDE), lengths, spread=2.0)
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes([0, 1], [0, 2], [68])
    caches = case.pool(NAN)[1:]
    for _ in range(2):
        checks.assert_close(triton_decode.paged_decode(case.q, *caches, batch, **case.options), case.expected(), 1e-5)
        triton_cascade.bind_cascade(case.q, *caches, batch, scale=1.0)


@pytest.mark.parametrize(("window", "launches"), [(0, 2), (21, 1), (100, 2)])
def test_a_layer_whose_window_nobody_outgrows_is_one_without(
    window: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    run = KernelLaunch.run
    monkeypatch.setattr(KernelLaunch, "run", lambda self, launch=None: (made.append(self.kernel), run(self, launch)))
    case = make_case(Shape(window=window, **WIDE), LENGTHS)
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes(*groups(16))
    out = gpu_attention.GpuKernels().paged_attention(case.q, *case.pool(NAN)[1:], batch, **case.options)
    checks.assert_close(out, case.expected(), checks.TOLERANCE)
    assert len(made) == launches


def test_prefixes_and_rests_of_several_parts_are_joined_and_leave_the_counters_at_0() -> None:
    """More members than a tile holds, prefixes of three parts, a rest of two: in shuffled orders over the same memory."""
    shared = 2 * triton_decode.PART + 48
    lengths = [Length(1, shared + 5), *(Length(1, shared + 9 + i, shares=shared) for i in range(4))]
    lengths.append(Length(1, shared + triton_decode.PART + 7, shares=shared))
    case = make_case(Shape(kv_heads=1, grouped=6, has_sinks=True, **WIDE), lengths, spread=2.0)
    given = (list(range(6)), [0, 6], [shared // 16])
    scratch, expected = triton_decode.DecodeScratch(), case.expected()
    for seed in (1, 2):
        with interpreter.shuffled_programs(seed):
            out = attend(triton_cascade.cascade_decode, case, given, scratch=scratch)
        checks.assert_close(out, expected, checks.TOLERANCE)
    assert scratch._counters is not None
    assert not scratch._counters.any()


def test_a_prefix_is_loaded_once_for_all_that_a_tile_holds() -> None:
    """The launches say so: one program for each part and KV head, whatever the number of members; the rests begin behind it."""
    case = make_case(Shape(grouped=2, **WIDE), [Length(1, 100), *(Length(1, 100 + i, shares=96) for i in range(7))])
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes(list(range(8)), [0, 8], [6])
    bound = triton_cascade.bind_cascade(case.q, *case.pool(0.0)[1:], batch, scale=1.0)
    shared, own = bound.launches
    assert shared.grid == (1, 2, 1)
    assert shared.constants["ROWS"] // 2 == 8
    assert own.grid == (8, 2)
    assert batch.prefixes is not None
    assert batch.prefixes.begins() == [96] * 8
    assert batch.prefixes.saved_positions == 7 * 96


def test_a_bound_cascade_reads_what_the_tensors_hold_at_each_call() -> None:
    case = make_case(Shape(**WIDE), LENGTHS)
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes(*groups(16))
    bound = triton_cascade.bind_cascade(case.q, *case.pool(NAN)[1:], batch, scale=case.options["scale"])
    checks.assert_close(bound(), case.expected(), checks.TOLERANCE)
    case.q.mul_(-0.5)
    checks.assert_close(bound(), case.expected(), checks.TOLERANCE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([0, 1], [0, 2], [3]), r"blocks\[0\]=3: must be 1 to 2, those before each member's query"),
        (([0, 1], [0, 2], [0]), r"blocks\[0\]=0: must be 1 to 2"),
        (([0, 4], [0, 2], [1]), r"blocks\[0\]=1: must be 1 to 0"),
        (([0, 5], [0, 2], [1]), r"blocks\[0\]=1: must be the same blocks in the tables of \[0, 5\]"),
        (([0, 0], [0, 2], [1]), r"members=\[0, 0\]: must be sequences below 7, each at most once"),
        (([0, 7], [0, 2], [1]), r"members=\[0, 7\]: must be sequences below 7"),
        (([0, 1], [0, 1], [1]), r"starts=\[0, 1\]: must be 2 numbers from 0 to 2"),
        (([0, 1], [0, 0, 2], [1, 1]), r"starts\[1\]=0: must be above 0"),
    ],
)
def test_groups_that_cannot_be_right_are_refused(given: Groups, message: str) -> None:
    case = make_case(Shape(**WIDE), LENGTHS)
    with pytest.raises(KernelInputError, match=message):
        attend(cascade.cascade_decode, case, given)


@pytest.mark.parametrize("decode", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_cascade_of_chunks_is_refused(decode: Decode) -> None:
    case = make_case(Shape(**WIDE), [Length(2, 40), Length(1, 40, shares=32)])
    with pytest.raises(KernelInputError, match="more than one query: must have at most one each"):
        attend(decode, case, ([0, 1], [0, 2], [2]))


@dataclass(frozen=True)
class Mutant:
    """A fault in one of the files, which the cases above must see."""

    name: str
    module: str
    change: Change


MUTANTS = [
    Mutant("the twin attends a prefix twice", "cascade", ("cascade", "begins[sequence], batch", "0 * begins[sequence], batch")),
    Mutant(
        "the twin joins without weights", "cascade", ("cascade", "(other.maximum - maximum).exp()", "maximum - maximum + 1")
    ),
    Mutant(
        "the twin's slopes begin at the prefix", "cascade", ("cascade", "seq_lens[sequence] - 1 for", "seq_lens[0] - 1 for")
    ),
    Mutant(
        "the rest begins at the start",
        "triton_cascade",
        ("triton_decode", "before = tl.cdiv(lowest, PART)", "before = tl.cdiv(lowest, PART); lowest = lowest * 0"),
    ),
    Mutant(
        "the parts of the prefix are left out",
        "triton_cascade",
        ("triton_decode", "for other in range(before + used)", "for other in range(used)"),
    ),
    Mutant(
        "a rest lies where the prefix does",
        "triton_cascade",
        ("triton_decode", "(place + before + part) * heads", "(place + part) * heads"),
    ),
    Mutant(
        "all members of a tile ask as the first",
        "triton_cascade",
        ("triton_cascade", "tl.load(member_ptr + first + row // grouped,", "tl.load(member_ptr + first + row * 0,"),
    ),
    Mutant(
        "the second tile has the first one's members",
        "triton_cascade",
        ("shared_prefixes", "(first, min(most, end - first), count)", "(start, min(most, end - first), count)"),
    ),
    Mutant(
        "a group reads the table of the batch's first sequence",
        "triton_cascade",
        ("triton_cascade", "leader = tl.load(member_ptr + first)", "leader = tl.load(member_ptr)"),
    ),
    Mutant(
        "slopes of a prefix begin at the first member",
        "triton_cascade",
        ("triton_cascade", "tl.load(lens_ptr + sequence, mask", "tl.load(lens_ptr + sequence * 0, mask"),
    ),
]


def play(package: ModuleType, module: str) -> None:
    """Groups of several tiles, with everything on."""
    torch.manual_seed(SEED)
    decode = sys.modules[f"{package.__name__}.{module}"].cascade_decode
    build = sys.modules[f"{package.__name__}.attention_batch"].AttentionBatch.build
    case = make_case(Shape(kv_heads=1, grouped=6, has_sinks=True, has_slopes=True, **WIDE), LENGTHS, spread=2.0)
    batch = build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes(*groups(16))
    options = {name: value for name, value in case.options.items() if name != "window"}
    checks.assert_close(decode(case.q, *case.pool(NAN)[1:], batch, **options), case.expected(), checks.TOLERANCE)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    play(changed(), mutant.module)
    with pytest.raises((AssertionError, IndexError, RuntimeError)) as caught:
        play(changed(mutant.change), mutant.module)
    print(f"{mutant.name}: {caught.type.__name__}: {caught.value}")


def test_the_groups_of_these_tests_share_what_they_say() -> None:
    case = make_case(Shape(**WIDE), LENGTHS)
    for (start, end), positions in zip(pairwise(STARTS), POSITIONS, strict=True):
        own = case.tables[MEMBERS[start:end], : positions // 16]
        assert torch.equal(own, own[:1].expand_as(own))

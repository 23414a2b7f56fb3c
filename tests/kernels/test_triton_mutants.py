"""The checks of the Triton kernels can fail: each fault planted in a copy of them is caught by the case that is made for it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from blocktable.kernels import AttentionBatch, block_moves
from tests.kernels import checks
from tests.kernels.implementations import Change, Implementation, changed
from tests.kernels.paged_case import Length, Shape

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tests.kernels.interpreter").mend()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Check = Callable[[Implementation], None]


def attends(*lengths: Length, unseen: float = float("nan"), **changes: object) -> Check:
    """Attention over positions, with `unseen` where nobody looks."""

    def check(kernels: Implementation) -> None:
        torch.manual_seed(0)
        shape = Shape(**{"key_width": 32, "value_width": 32, "kv_heads": 1, "grouped": 2, **changes})  # type: ignore[arg-type]
        case = checks.make_case(shape, list(lengths), spread=2.0)
        checks.assert_close(case.run(kernels, *case.pool(unseen)[1:]), case.expected(), checks.TOLERANCE)

    return check


def stores(kernels: Implementation) -> None:
    """Of the pool, only the slots that are named change."""
    checks.check_only_written_slots_change(kernels, Shape(block_size=7, kv_heads=3))


def stores_far_apart(kernels: Implementation) -> None:
    """Heads whose offsets are more than 32 bits."""
    checks.stored_far_apart(kernels, checks.FAR, 16)


def copies(kernels: Implementation) -> None:
    """Copied blocks are whole, and in their place."""
    pool = torch.rand(6, 5000)
    expected, pairs = pool.clone(), torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    block_moves.copy_blocks(expected, pairs)
    sys.modules[f"{kernels.package.__name__}.triton_blocks"].copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)


def decodes(kernels: Implementation) -> None:
    """Two launches with the same memory over contexts of three parts."""
    torch.manual_seed(0)
    module = sys.modules[f"{kernels.package.__name__}.triton_decode"]
    shape = Shape(kv_heads=1, grouped=4, key_width=32, value_width=32, has_sinks=True)
    case = checks.make_case(shape, [Length(1, 1100)], spread=2.0)
    caches = case.pool(float("nan"))[1:]
    batch = kernels.build(case.tables, case.query_starts, case.seq_lens, 16)
    scratch = module.DecodeScratch()
    for _ in range(2):
        out = module.paged_decode(case.q, *caches, batch, scratch=scratch, **case.options)
        checks.assert_close(out, case.expected(), checks.TOLERANCE)


@dataclass(frozen=True)
class Mutant:
    """A fault, and the check that must see it."""

    name: str
    check: Check
    change: Change


CHUNK, LONE = Length(5, 20), Length(1, 20)
SEES = "(at[None, :] <= position[:, None])"
MUTANTS = [
    Mutant(
        "the next position is seen",
        attends(CHUNK, unseen=0.0),
        ("triton_tiles", SEES, SEES.replace("position", "1 + position")),
    ),
    Mutant("the own position is hidden", attends(CHUNK), ("triton_tiles", SEES, SEES.replace("<=", "<"))),
    Mutant(
        "a window is one longer",
        attends(CHUNK, unseen=0.0, window=4),
        ("triton_tiles", "(at[None, :] > position[:, None] - window)", "(at[None, :] >= position[:, None] - window)"),
    ),
    Mutant(
        "rows behind the last one are loaded",
        attends(LONE),
        ("triton_tiles", "is_column = (at >= lowest) & (at < end)", "is_column = (at >= lowest) & (at < end + 9)"),
    ),
    Mutant(
        "rows before the window are loaded",
        attends(LONE, window=3),
        ("triton_tiles", "is_column = (at >= lowest) & (at < end)", "is_column = at < end"),
    ),
    Mutant(
        "the pages of a tile are those of the tile before",
        attends(Length(1, 70)),
        ("triton_tiles", "later = at + TILE\n", "later = at\n"),
    ),
    Mutant(
        "a tile does not correct what came before",
        attends(Length(1, 70), grouped=7),
        ("triton_tiles", "sums = sums * correction[:, None] +", "sums = sums +"),
    ),
    Mutant(
        "query heads are dealt to the KV heads in turn",
        attends(LONE, kv_heads=2),
        (
            "triton_attention",
            "head = kv_head * grouped + row % grouped",
            "head = kv_head + row % grouped * tl.num_programs(1)",
        ),
    ),
    Mutant(
        "sinks are left out", attends(LONE, has_sinks=True), ("triton_attention", "        if HAS_SINKS:", "        if False:")
    ),
    Mutant(
        "the cap is not multiplied back",
        attends(LONE, softcap=0.7),
        ("triton_tiles", "scores = softcap * (1.0 - 2.0", "scores = 1.0 * (1.0 - 2.0"),
    ),
    Mutant(
        "values are read with the keys' strides",
        attends(LONE, key_width=48),
        ("triton_tiles", "v_rows = page * v_block + slot * v_slot", "v_rows = k_rows"),
    ),
    Mutant(
        "slopes begin at the first position",
        attends(CHUNK, has_slopes=True, has_sinks=True),
        (
            "triton_tiles",
            "(at[None, :] - position[:, None]).to(tl.float32)",
            "(at[None, :] - 0 * position[:, None]).to(tl.float32)",
        ),
    ),
    Mutant(
        "another sequence's queries are answered",
        attends(CHUNK, LONE),
        ("triton_attention", "// queries + middle <= block", "// queries + middle < block"),
    ),
    Mutant("the counter is not set back", decodes, ("triton_decode", "tl.store(counter, 0)", "pass")),
    Mutant(
        "parts are joined without weights",
        decodes,
        ("triton_decode", "weight = tl.exp2(top - new)", "weight = top - top + 1.0"),
    ),
    Mutant(
        "the last part is left out",
        decodes,
        ("triton_decode", "for other in range(before + used)", "for other in range(before + used - 1)"),
    ),
    Mutant(
        "offsets of rows are 32-bit",
        checks.check_products_above_32_bits,
        ("triton_tiles", "page = pages.to(tl.int64)", "page = pages.to(tl.int32)"),
    ),
    Mutant(
        "offsets of slots are 32-bit",
        checks.check_products_above_32_bits,
        ("triton_store", "block = slot // block_size", "block = (slot // block_size).to(tl.int32)"),
    ),
    Mutant(
        "offsets of stored heads are 32-bit",
        stores_far_apart,
        ("triton_store", "tl.arange(0, HEADS)).to(tl.int64)", "tl.arange(0, HEADS))"),
    ),
    Mutant(
        "ids of blocks are 16-bit",
        checks.check_ids_above_65535,
        ("triton_tiles", "page = pages.to(tl.int64)", "page = pages.to(tl.int16).to(tl.int64)"),
    ),
    Mutant("a slot of -1 is written", stores, ("triton_store", "if slot >= 0:", "if slot >= -1:")),
    Mutant(
        "heads past the last are written", stores, ("triton_store", "(head < heads)[:, None] &", "(head <= heads)[:, None] &")
    ),
    Mutant(
        "offsets are those of the block", stores, ("triton_store", "offset = slot % block_size", "offset = slot // block_size")
    ),
    Mutant(
        "the last piece of a block is left", copies, ("triton_blocks", "mask = at < size", "mask = at < size // PIECE * PIECE")
    ),
    Mutant(
        "source and target change places",
        copies,
        ("triton_blocks", "_run(pool, pool, pairs, pairs[:, 1:], 2", "_run(pool, pool, pairs[:, 1:], pairs, 2"),
    ),
]


def implementation(*changes: Change) -> Implementation:
    package = changed(*changes)
    store, attention = (sys.modules[f"{package.__name__}.triton_{name}"] for name in ("store", "attention"))
    build = sys.modules[f"{package.__name__}.attention_batch"].AttentionBatch.build
    return Implementation("changed", store.store_kv, attention.paged_attention, build, package)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    mutant.check(implementation())
    with pytest.raises((AssertionError, IndexError, RuntimeError)) as caught:
        mutant.check(implementation(mutant.change))
    print(f"{mutant.name}: {caught.type.__name__}: {caught.value}")


def test_the_batch_of_a_copy_is_its_own() -> None:
    """So that a mutant runs on nothing of the original."""
    assert implementation().build.__self__ is not AttentionBatch

"""The Triton kernels in Triton's interpreter: each gives what its twin gives, whatever nobody sees, in any order of programs.

Cases cover every pair of dtype, head size, block size, grouping and feature at least once; their list is printed.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktable.kernels import AttentionBatch, KernelInputError, ShapeError, block_moves, quantised
from blocktable.kernels.launch_table import TABLE, TARGETS, attention_launch, target_of
from tests.conftest import SEED
from tests.kernels import checks
from tests.kernels.implementations import Implementation
from tests.kernels.paged_case import Case, Length, Shape, empty_pool, make_case
from tests.kernels.triton_cases import CASES, DECODES, FACTORS, LENGTHS, TOLERANCE, case_of

triton = pytest.importorskip("triton", reason="Triton is not installed")
interpreter = pytest.importorskip("tests.kernels.interpreter")
interpreter.mend()

from blocktable.kernels import (  # noqa: E402 - after the interpreter is chosen
    triton_attention,
    triton_blocks,
    triton_cascade,
    triton_decode,
    triton_rope,
    triton_store,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are masked afterwards

TRITON = Implementation(
    "triton",
    triton_store.store_kv,
    triton_attention.paged_attention,
    AttentionBatch.build,
    triton_attention,  # type: ignore[arg-type]
)
NAN = float("nan")


def run(case: Case, unseen: float = NAN) -> Tensor:
    return case.run(TRITON, *case.pool(unseen)[1:])


def decode(case: Case) -> Tensor:
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, case.shape.block_size)
    return triton_decode.paged_decode(case.q, *case.pool(NAN)[1:], batch, **case.options)


def cascade(case: Case) -> Tensor:
    """Two sequences that share all blocks but their last one."""
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, case.shape.block_size)
    batch = batch.with_prefixes([0, 1], [0, 2], [case.tables.shape[1] - 1])
    options = {name: value for name, value in case.options.items() if name != "window"}
    return triton_cascade.cascade_decode(case.q, *case.pool(NAN)[1:], batch, **options)


def test_every_two_values_of_two_factors_meet_in_some_case(tell: Callable[[str], None]) -> None:
    def meet(cases: list[dict[str, Any]]) -> bool:
        pairs = [(a, x, b, y) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])]
        return all(any(one[a] == x and one[b] == y for one in cases) for a, x, b, y in pairs)

    assert meet(CASES)
    assert not meet(CASES[:-1]), "the control: none is there for nothing"
    for number, one in enumerate(CASES):
        tell(f"Triton case {number}: " + ", ".join(f"{name} {value}" for name, value in one.items()))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_paged_attention_is_attention_over_positions(number: int) -> None:
    print(f"{number}: {CASES[number]}")
    case = case_of(CASES[number], SEED + number)
    with interpreter.shuffled_programs(number):
        checks.assert_close(run(case), case.expected(), TOLERANCE[case.shape.dtype])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_paged_decode_is_attention_over_positions(number: int) -> None:
    print(f"{number}: {CASES[number]}")
    case = case_of(CASES[number], SEED + number, DECODES)
    with interpreter.shuffled_programs(number):
        checks.assert_close(decode(case), case.expected(), TOLERANCE[case.shape.dtype])


@pytest.mark.parametrize("block_size", [7, 16])
def test_sequences_that_fill_their_tables_are_right(block_size: int) -> None:
    """The last row of the last column is the last position, of a prompt that came at once, a chunk and single queries."""
    shape, full = Shape(block_size=block_size, kv_heads=1, key_width=32, value_width=32), 4 * block_size
    for attend, lengths in (
        (run, [Length(full, full), Length(5, full), Length(1, full)]),
        (decode, [Length(1, full), Length(1, full, shares=full), Length(1, 3)]),
        (cascade, [Length(1, full), Length(1, full, shares=full - block_size)]),
    ):
        case = make_case(shape, lengths)
        case.tables = case.tables[:, :4].contiguous()
        checks.assert_close(attend(case), case.expected(), checks.TOLERANCE)


@pytest.mark.parametrize("lengths", [[], [Length(0, 0)], [Length(0, 20), Length(0, 3)]], ids=str)
def test_a_batch_without_queries_has_no_answers(lengths: list[Length]) -> None:
    case = make_case(Shape(key_width=32, value_width=32, has_sinks=True), lengths)
    for attend in (run, decode):
        assert attend(case).shape == (0, 4, 32)
    pool, k_cache, v_cache = case.pool(NAN)
    before = pool.clone()
    none = torch.empty(0, 2, 32)
    triton_store.store_kv(none, none, k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    triton_blocks.copy_blocks(pool, torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("query_len", [1, 2, 16, 17, 33])
def test_contexts_across_the_edges_of_tiles_are_right(query_len: int) -> None:
    lengths = [Length(query_len, query_len + before) for before in (0, 15, 16, 17)]
    case = make_case(Shape(kv_heads=1, grouped=1, key_width=32, value_width=32), lengths)
    checks.assert_close(run(case), case.expected(), checks.TOLERANCE)


def test_keys_and_values_of_different_widths_are_right() -> None:
    case = make_case(Shape(key_width=48, value_width=33), LENGTHS)
    checks.assert_close(run(case), case.expected(), checks.TOLERANCE)


@pytest.mark.parametrize("unseen", [NAN, float("inf"), 3e38])
def test_rows_that_nobody_sees_never_matter(unseen: float) -> None:
    case = make_case(Shape(block_size=7, window=6, key_width=32, value_width=32), LENGTHS)
    assert torch.equal(run(case, unseen), run(case, 0.0))


def test_offsets_and_ids_of_more_than_32_and_16_bits_are_exact() -> None:
    checks.check_ids_above_65535(TRITON)
    checks.check_offsets_above_32_bits(TRITON)
    checks.check_products_above_32_bits(TRITON)


@pytest.mark.parametrize(("steps", "told"), [*zip(checks.FAR_STEPS, ("q has stride .* 1", "k_cache has stride .* 2"))])
def test_rows_too_far_apart_to_count_in_32_bits_are_stored_and_not_attended(steps: tuple[int, int], told: str) -> None:
    case, k_cache, v_cache = checks.stored_far_apart(TRITON, *steps)
    with pytest.raises(KernelInputError, match=f"{told}: must be at most 1073741823, for 3 there"):
        case.run(TRITON, k_cache, v_cache)


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_store_changes_the_slots_it_names_and_no_other_byte(block_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        checks.check_only_written_slots_change(TRITON, Shape(block_size=block_size, key_width=6, dtype=dtype, spare=5))


def test_what_was_stored_is_what_is_attended() -> None:
    checks.check_what_was_stored_is_attended(TRITON, Shape(block_size=7, value_width=5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_one_byte_a_number_is_stored_and_attended_as_by_the_twins(dtype: torch.dtype) -> None:
    torch.manual_seed(SEED)
    shape = Shape(block_size=7, key_width=32, value_width=32)
    case = make_case(shape, [Length(4, 20), Length(1, 9)])
    rows = [(index, position) for index, length in enumerate(case.lengths) for position in range(length.seq_len)]
    slots = torch.tensor([block * 7 + offset for block, offset in (case.slot(*row) for row in rows)] + [-1])
    k = torch.cat([*case.keys, torch.zeros(1, 2, 32)])
    v = torch.cat([*case.values, torch.zeros(1, 2, 32)])
    k[3, 1] = 0  # a row of zeros
    v[4, 1] = torch.eye(32)[0] * 2e-43  # a row whose scale would be none
    stored = []
    for module in (quantised, triton_store):
        caches = [torch.zeros(case.num_blocks, 2, 7, 32).to(dtype) for _ in range(2)]
        scales = [torch.full((case.num_blocks, 2, 7), NAN) for _ in range(2)]
        module.store_kv_quantised(k, v, *caches, *scales, slots)
        stored.append([*caches, *scales])
    for ours, twin in zip(stored[1], stored[0]):
        if ours.dtype == torch.float32:
            assert torch.equal(ours.isnan(), twin.isnan()), "scales of other slots are untouched"
            torch.testing.assert_close(ours, twin, rtol=1e-6, atol=0, equal_nan=True)
        else:
            # A quotient on the edge between two numbers may fall to either side.
            differ = ours.view(torch.uint8) != twin.view(torch.uint8)
            assert differ.float().mean() < 1e-3
    caches, scales = stored[0][:2], stored[0][2:]
    back = caches[0].float() * scales[0].unsqueeze(-1)
    blocks, offsets = slots[:-1] // 7, slots[:-1] % 7
    worst = (back[blocks, :, offsets] - k[:-1]).abs() / k[:-1].abs().amax(-1, keepdim=True).clamp_min(1e-9)
    assert worst.max() <= (1 / 254 if dtype == torch.int8 else 1 / 16) * 1.0001
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 7)
    options = {**case.options, "k_scales": scales[0], "v_scales": scales[1]}
    twin = quantised.paged_attention_quantised(case.q, *caches, batch, **options)
    ours = triton_attention.paged_attention(case.q, *caches, batch, **options)
    checks.assert_close(ours, twin.double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_blocks_are_moved_as_by_the_twins(dtype: torch.dtype) -> None:
    pool = (100 * torch.rand(9, 5000)).to(dtype)[:, :4500]
    pairs = torch.tensor([[3, 1], [3, 8], [0, 2]], dtype=torch.int32)
    blocks = torch.tensor([4, 0, 8], dtype=torch.int32)
    with interpreter.shuffled_programs(1):
        pools = [pool.clone() for _ in range(2)]
        for module, own in zip((block_moves, triton_blocks), pools):
            module.copy_blocks(own, pairs)
        assert torch.equal(*pools)
        assert not torch.equal(pools[0], pool)
        outs = [torch.zeros(3, 4500, dtype=dtype) for _ in range(2)]
        for module, out in zip((block_moves, triton_blocks), outs):
            module.gather_blocks(pool, blocks, out)
        assert torch.equal(*outs)
        for module, own in zip((block_moves, triton_blocks), pools):
            module.scatter_blocks(outs[0], blocks, own)
        assert torch.equal(*pools)
        assert torch.equal(pools[0][blocks.long()], pool[blocks.long()])


def test_what_cannot_be_right_is_refused() -> None:
    case = make_case(Shape(key_width=32, value_width=32), LENGTHS)
    _, k_cache, v_cache = case.pool(0.0)
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16)
    attend = triton_attention.paged_attention
    with pytest.raises(ShapeError, match="k_cache has Dk=32 in dimension 3: must be 31"):
        attend(case.q[..., :31], k_cache, v_cache, batch, scale=1.0)
    num_tokens = len(case.q)
    with pytest.raises(KernelInputError, match=f"q has T={num_tokens - 1}: must be {num_tokens}"):
        attend(case.q[:-1], k_cache, v_cache, batch, scale=1.0)
    with pytest.raises(KernelInputError, match=r"k_cache has dtype torch.float32: must be torch.float16"):
        attend(case.q.half(), k_cache, v_cache, batch, scale=1.0)
    with pytest.raises(KernelInputError, match="both be given"):
        attend(case.q, k_cache, v_cache, batch, scale=1.0, k_scales=k_cache[..., 0].contiguous())
    with pytest.raises(KernelInputError, match="Dk=257: must be at most 256"):
        attention_launch("sm_90", torch.float16, 257, is_decode=True)
    with pytest.raises(KernelInputError, match="target sm_70 is not in the launch table"):
        attention_launch("sm_70", torch.float16, 64, is_decode=True)
    with pytest.raises(KernelInputError, match="q has dtype torch.float64"):
        attention_launch("sm_90", torch.float64, 64, is_decode=True)
    with pytest.raises(KernelInputError, match=r"pairs holds ids from 1 to 9: must be 0 to 8"):
        triton_blocks.copy_blocks(torch.zeros(9, 4), torch.tensor([[1, 9]], dtype=torch.int32))
    pool, k_pool, v_pool = empty_pool(Shape(key_width=8), 5, 0.0)
    with pytest.raises(KernelInputError, match="slots holds 80: must be below 80"):
        triton_store.store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), k_pool, v_pool, torch.tensor([80]))
    assert not pool.any()


@pytest.mark.parametrize(
    "attend", [triton_attention.paged_attention, triton_decode.paged_decode, triton_cascade.cascade_decode]
)
@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_of_heads_with_gaps_are_refused(name: str, attend: Any) -> None:
    """Kernels read them one after the other."""
    case = make_case(Shape(key_width=32, value_width=32), [Length(1, 40), Length(1, 33, shares=32)])
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16).with_prefixes([0, 1], [0, 2], [2])
    gaps = torch.ones(case.shape.query_heads, 2)[:, 0]
    with pytest.raises(KernelInputError, match=f"{name} has stride 2 in its last dimension: must be 1"):
        attend(case.q, *case.pool(0.0)[1:], batch, scale=1.0, **{name: gaps})


def test_slots_with_gaps_are_refused() -> None:
    pool, k_cache, v_cache = empty_pool(Shape(key_width=8), 5, 0.0)
    rows, slots = torch.ones(2, 2, 8), torch.tensor([16, 0, 17, 0])[::2]
    for store in (triton_store.store_kv, partial(triton_rope.rope_store_kv, rows, cos=rows[:, 0], sin=rows[:, 0])):
        with pytest.raises(KernelInputError, match="slots has stride 2 in its last dimension: must be 1"):
            store(rows, rows, k_cache=k_cache, v_cache=v_cache, slots=slots)
    assert not pool.any()


def test_the_launch_table_is_whole_and_bounded_and_says_where_each_row_comes_from() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert set(TABLE) == set(product(TARGETS, dtypes, (32, 64, 128, 256)))
    assert 2 * sum(target != "interpreter" for target, *_ in TABLE) <= 100
    for (target, dtype, size), entry in TABLE.items():
        assert entry.source
        assert attention_launch(target, dtype, size, is_decode=False) == (size, entry.prefill)
        assert attention_launch(target, dtype, size - 1, is_decode=True) == (size, entry.decode)
    assert attention_launch("sm_90", torch.float16, 80, is_decode=True)[0] == 128
    assert target_of(torch.zeros(1)) == "interpreter"


@pytest.mark.parametrize("changes", [{}, {"window": 700, "has_sinks": True}, {"softcap": 2.0, "has_sinks": True}], ids=str)
def test_a_long_context_is_cut_and_joined_in_one_launch(changes: dict[str, object]) -> None:
    """Twice with the same memory, in shuffled orders: the counters have come back to 0; the neighbours are whole."""
    lengths = [Length(1, 1100), Length(1, 512), Length(0, 4), Length(1, 3), Length(1, 513)]
    shape = Shape(kv_heads=2, grouped=3, key_width=32, value_width=32, **changes)  # type: ignore[arg-type]
    case = make_case(shape, lengths, spread=2.0)
    caches = case.pool(NAN)[1:]
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16)
    scratch = triton_decode.DecodeScratch()
    for seed in (1, 2):
        with interpreter.shuffled_programs(seed):
            out = triton_decode.paged_decode(case.q, *caches, batch, scratch=scratch, **case.options)
        checks.assert_close(out, case.expected(), checks.TOLERANCE)
    assert scratch._counters is not None
    assert not scratch._counters.any()


def test_a_decode_of_chunks_is_refused() -> None:
    case = make_case(Shape(key_width=32, value_width=32), LENGTHS)
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16)
    with pytest.raises(KernelInputError, match="more than one query: must have at most one each"):
        triton_decode.paged_decode(case.q, *case.pool(0.0)[1:], batch, scale=1.0)

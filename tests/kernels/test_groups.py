"""Groups hold every query once, waste little, keep their memory bounded, and are made once a step."""

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from blocktable.kernels import row_group, scratch, sequence_groups
from blocktable.kernels.attention_batch import AttentionBatch
from blocktable.kernels.causal_band import CausalBand
from blocktable.kernels.row_group import Geometry, RowGroup
from blocktable.kernels.row_view import RowSteps
from blocktable.kernels.scratch import Scratch
from blocktable.kernels.sequence_groups import Member, group_members
from tests.kernels.implementations import REFERENCE, Implementation
from tests.kernels.paged_case import Length, Shape, make_case


def geometry(*, fused: bool, window: int = 0, query_heads: int = 8, kv_heads: int = 2) -> Geometry:
    steps = RowSteps(64, 16, 1)
    return Geometry(query_heads, kv_heads, 64, 64, steps, steps, window, fused, False, in_place=True, dtype=torch.float32)


def batch_of(lengths: list[tuple[int, int]], block_size: int = 16) -> AttentionBatch:
    """Sequences of (query_len, seq_len), all over one table."""
    columns = max(-(-seq_len // block_size) for _, seq_len in lengths)
    tables = torch.arange(columns, dtype=torch.int32).expand(len(lengths), -1)
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0)
    return AttentionBatch.build(tables, starts, torch.tensor([seq_len for _, seq_len in lengths]), block_size)


@st.composite
def members(draw: st.DrawFn) -> list[Member]:
    start, found = 0, []
    for row in range(draw(st.integers(1, 25))):
        query_len = draw(st.one_of(st.just(1), st.integers(1, 300)))
        seq_len = query_len + draw(st.integers(0, 4000))
        first = draw(st.integers(0, seq_len - query_len))
        found.append(Member(row, start, query_len, seq_len, first))
        start += query_len
    return found


@given(members(), st.integers(1, 20_000))
def test_groups_hold_everybody_once_and_waste_little(found: list[Member], max_rows: int) -> None:
    groups = group_members(found, max_rows)
    assert sorted(member for group in groups for member in group) == sorted(found)
    masks = 0
    for group in groups:
        assert group == sorted(group, key=lambda m: m.query_start)
        assert len({member.query_len == 1 for member in group}) == 1
        rows = len(group) * max(member.reach for member in group)
        padded = rows * max(member.query_len for member in group)
        real = sum(member.query_len * member.reach for member in group)
        assert len(group) == 1 or rows <= max_rows
        assert padded <= 1.25 * real + 1024
        masks += padded if len(group) > 1 and group[0].query_len > 1 else 0
    assert masks <= sequence_groups.MASK_PAIRS


def test_equal_sequences_make_one_group() -> None:
    """What a benchmark's batch looks like: one product for 32 decodes, one for 32 prompts."""
    decodes = batch_of([(1, 160)] * 32).groups(geometry(fused=True, query_heads=9, kv_heads=3))
    assert [(group.count, len(group.tiles), group.tiles[0].mask) for group in decodes] == [(32, 1, None)]
    assert isinstance(decodes[0].tiles[0].queries, slice), "q is viewed, not copied"
    prompts = batch_of([(128, 128)] * 32).groups(geometry(fused=True, query_heads=9, kv_heads=3))
    assert [(group.count, len(group.tiles)) for group in prompts] == [(32, 1)]


def test_decodes_of_all_lengths_make_few_groups() -> None:
    rng = random.Random(3)
    lengths = [(1, rng.randrange(1, 2048)) for _ in range(256)]
    assert len(batch_of(lengths).groups(geometry(fused=True, kv_heads=1))) <= 24


@pytest.mark.parametrize("fused", [True, False])
def test_long_chunks_do_not_take_memory_of_queries_times_positions(fused: bool) -> None:
    """3 chunks of 1,500 queries over 20,000 positions: 90 million pairs, 8 heads; one tile and the band stay bounded."""
    groups = batch_of([(1500, 20_000)] * 3).groups(geometry(fused=fused))
    assert [group.count for group in groups] == [1, 1, 1]
    masks: dict[int, int] = {}
    for tile in (tile for group in groups for tile in group.tiles):
        assert tile.mask is not None
        written = tile.mask.numel() if fused else 8 * tile.mask.numel()
        assert written <= row_group.SCORE_ELEMENTS
        masks[tile.mask.untyped_storage().data_ptr()] = tile.mask.untyped_storage().nbytes()
    assert len(masks) == 1, "all tiles view one band"
    assert sum(masks.values()) <= 4 * (row_group.SCORE_ELEMENTS + row_group.TILE_QUERIES**2)


def test_tiles_skip_what_none_of_their_queries_sees() -> None:
    (full,) = batch_of([(1000, 1000)]).groups(geometry(fused=True))
    assert [(tile.first_column, tile.end_column) for tile in full.tiles] == [(0, 256), (0, 512), (0, 768), (0, 1000)]
    (windowed,) = batch_of([(1000, 3000)]).groups(geometry(fused=True, window=100))
    assert windowed.reach == 1099, "the first query sees 99 positions before the chunk"
    assert [(tile.first_column, tile.end_column) for tile in windowed.tiles] == [(0, 355), (256, 611), (512, 867), (768, 1099)]


def test_a_windowed_decode_gathers_the_window_alone() -> None:
    groups = batch_of([(1, 5000), (1, 400), (1, 30)]).groups(geometry(fused=True, window=128))
    assert sorted((group.count, group.reach) for group in groups) == [(3, 128)] or sum(g.count * g.reach for g in groups) <= 384


def test_the_numbers_are_made_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Geometry] = []

    def counted(members: list[Member], tables: torch.Tensor, size: int, of: Geometry, band: CausalBand | None) -> RowGroup:
        made.append(of)
        return row_group.build_group(members, tables, size, of, band)

    monkeypatch.setattr("blocktable.kernels.attention_batch.build_group", counted)
    case = make_case(Shape(), [Length(1, 30)] * 3)
    _, k_cache, v_cache = case.pool(0.0)
    batch = REFERENCE.build(case.tables, case.query_starts, case.seq_lens, 16)
    for window in (0, 8) * 5:
        REFERENCE.paged_attention(case.q, k_cache, v_cache, batch, scale=1.0, window=window)
    assert [of.window for of in made] == [0, 8]
    REFERENCE.paged_attention(case.q, k_cache, v_cache, batch, scale=1.0, window=30)
    assert len(made) == 2, "a window that reaches everything is no window"


def test_scratch_is_the_same_memory_again_and_never_grows_past_its_bound() -> None:
    kept, like = Scratch(), torch.empty(0)
    first = kept.take("keys", 10, 8, like)
    assert kept.take("keys", 5, 8, like).data_ptr() == first.data_ptr()
    assert kept.take("values", 5, 8, like).data_ptr() != first.data_ptr()
    rows = scratch.KEPT_ELEMENTS // 8 + 1
    assert kept.take("keys", rows, 8, like).shape == (rows, 8)
    assert kept.take("keys", 10, 8, like).data_ptr() == first.data_ptr(), "the large one was given back"


def test_scratch_made_in_inference_mode_serves_outside_of_it(kernels: Implementation) -> None:
    case, shared = make_case(Shape(), [Length(1, 30), Length(4, 9)]), kernels.package.__dict__["scratch"].Scratch()
    _, k_cache, v_cache = case.pool(0.0)
    answers = []
    for inference in (True, False):
        with torch.inference_mode(mode=inference):
            batch = kernels.build(case.tables, case.query_starts, case.seq_lens, 16, shared)
            answers.append(kernels.paged_attention(case.q, k_cache, v_cache, batch, **case.options))
    assert torch.equal(*answers)

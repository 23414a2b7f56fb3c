"""Random small batches, in every mixture: paged attention is attention over positions, whatever else the pool holds."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from tests.conftest import SEED
from tests.kernels.checks import TOLERANCE, assert_close
from tests.kernels.implementations import IMPLEMENTATIONS
from tests.kernels.paged_case import Length, Shape, make_case


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        block_size=draw(st.integers(1, 20)),
        kv_heads=draw(st.integers(1, 3)),
        grouped=draw(st.integers(1, 3)),
        key_width=draw(st.integers(1, 9)),
        value_width=draw(st.integers(1, 9)),
        window=draw(st.one_of(st.just(0), st.integers(1, 30))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        spare=draw(st.sampled_from([0, 5])),
        has_sinks=draw(st.sampled_from([False, False, True])),
        has_slopes=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def lengths(draw: st.DrawFn) -> list[Length]:
    found: list[Length] = []
    for _ in range(draw(st.integers(1, 6))):
        query_len = draw(st.one_of(st.just(1), st.integers(0, 8)))
        seq_len = query_len + draw(st.integers(0, 40))
        sharable = min(seq_len, found[-1].seq_len) if found else 0
        found.append(Length(query_len, seq_len, draw(st.integers(0, sharable))))
    return found


@given(shapes(), lengths(), st.sampled_from([0.0, float("nan"), float("inf"), 1e4]), st.integers(0, 2**20))
def test_paged_attention_is_attention_over_positions(shape: Shape, batch: list[Length], unseen: float, seed: int) -> None:
    torch.manual_seed(SEED + seed)
    case = make_case(shape, batch, spread=2.0)
    expected = case.expected()
    for kernels in IMPLEMENTATIONS:
        assert_close(case.run(kernels, *case.pool(unseen)[1:]), expected, TOLERANCE)

"""Paged attention equals attention over positions, for every block size, geometry and mixture of chunks and decodes."""

import pytest
import torch

from tests.kernels import checks
from tests.kernels.implementations import Implementation
from tests.kernels.paged_case import Length, Shape, make_case


@pytest.mark.parametrize("name", checks.SHAPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 32, 128])
def test_paged_attention_is_attention_over_positions(kernels: Implementation, block_size: int, name: str) -> None:
    shape = Shape(block_size=block_size, **checks.SHAPES[name])
    checks.check_equals_dense(kernels, shape, checks.mixture(block_size))


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("query_len", [1, 2, 3, 15, 16, 17, 33])
def test_a_chunk_of_any_length_at_any_place_is_right(kernels: Implementation, query_len: int, window: int) -> None:
    lengths = [Length(query_len, query_len + before) for before in (0, 1, 14, 15, 16, 17, 40)]
    checks.check_equals_dense(kernels, Shape(window=window, grouped=1, kv_heads=2), lengths)


def test_windows_are_right_at_every_step_of_decoding(kernels: Implementation) -> None:
    checks.check_window_while_decoding(kernels)


def test_many_decodes_of_very_different_lengths_are_right(kernels: Implementation) -> None:
    lengths = [Length(1, 1 + (37 * i) % 300) for i in range(40)]
    checks.check_equals_dense(kernels, Shape(kv_heads=1, grouped=2), lengths)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # One rounding of the answer, of magnitude below 4, and of what is weighted: some units of 2^-11 and 2^-8.
    [(torch.float16, 1e-3), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)],
    ids=str,
)
@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_other_dtypes_are_right_within_their_rounding(
    kernels: Implementation, dtype: torch.dtype, tolerance: float, name: str
) -> None:
    checks.check_equals_dense(kernels, Shape(dtype=dtype, **checks.SHAPES[name]), checks.mixture(16), tolerance)


@pytest.mark.parametrize("name", ["plain", "soft cap"])
def test_scores_are_summed_in_float32(kernels: Implementation, name: str) -> None:
    """Keys of 300 and -300 cancel to 1; summed in bfloat16, whose step at 300 * 300 is 512, they would not."""
    shape = Shape(dtype=torch.bfloat16, kv_heads=1, grouped=1, key_width=4, **checks.SHAPES[name])
    for query_len in (1, 3):
        case = make_case(shape, [Length(query_len, 6)])
        case.q[:] = torch.tensor([304.0, 1.0, 304.0, 1.0])
        case.keys[0][:, 0, 0], case.keys[0][:, 0, 2] = 304.0, -304.0
        checks.assert_close(case.run(kernels, *case.pool(0.0)[1:]), case.expected(), 1e-2)


def test_queries_may_be_laid_out_heads_first(kernels: Implementation) -> None:
    """A model hands over [heads, tokens, width], seen as [tokens, heads, width]."""
    case = make_case(Shape(), checks.mixture(16))
    expected = case.expected()
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.q.is_contiguous()
    checks.assert_close(case.run(kernels, *case.pool(0.0)[1:]), expected, checks.TOLERANCE)


@pytest.mark.parametrize("lengths", [[], [Length(0, 0)], [Length(0, 5), Length(0, 17)]], ids=["none", "empty", "idle"])
def test_nothing_to_attend_gives_nothing(kernels: Implementation, lengths: list[Length]) -> None:
    case = make_case(Shape(value_width=6), lengths)
    assert case.run(kernels, *case.pool(0.0)[1:]).shape == (0, 4, 6)


def test_one_batch_serves_layers_of_different_windows(kernels: Implementation) -> None:
    checks.check_layers_of_different_windows(kernels)

"""No row outside what a query sees can matter, and no store touches a slot that is not its own."""

import pytest
import torch

from tests.kernels import checks
from tests.kernels.implementations import Implementation
from tests.kernels.paged_case import Shape

KINDS = ["plain", "blocks at odd places", "many heads a KV head", "window 5", "wide keys", "all at once"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_rows_that_nobody_sees_never_matter(kernels: Implementation, block_size: int, name: str) -> None:
    checks.check_unseen_rows_never_matter(kernels, Shape(block_size=block_size, **checks.SHAPES[name]))


@pytest.mark.parametrize("name", KINDS)
def test_a_broken_row_spoils_only_those_who_see_it(kernels: Implementation, name: str) -> None:
    checks.check_a_broken_row_stays_its_owners(kernels, Shape(**checks.SHAPES[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_a_store_changes_the_slots_it_names_and_no_other_byte(
    kernels: Implementation, block_size: int, dtype: torch.dtype
) -> None:
    checks.check_only_written_slots_change(kernels, Shape(block_size=block_size, key_width=6, dtype=dtype, spare=5))


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_what_was_stored_is_what_is_attended(kernels: Implementation, block_size: int) -> None:
    checks.check_what_was_stored_is_attended(kernels, Shape(block_size=block_size, value_width=5))


def test_block_ids_above_65535_are_exact(kernels: Implementation) -> None:
    checks.check_ids_above_65535(kernels)


def test_offsets_above_32_bits_are_exact(kernels: Implementation) -> None:
    checks.check_offsets_above_32_bits(kernels)


def test_products_above_32_bits_are_exact(kernels: Implementation) -> None:
    checks.check_products_above_32_bits(kernels)
    checks.check_rows_far_apart(kernels)

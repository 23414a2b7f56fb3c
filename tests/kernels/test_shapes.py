"""Equal letters are equal sizes; a refusal names the tensor, the letter and both sizes."""

import pytest
import torch

from blocktable.kernels.shapes import ShapeError, bind


def test_letters_take_the_sizes_of_the_first_tensor_that_has_them() -> None:
    sizes = (
        bind("T H D", k=torch.empty(5, 2, 8)).bind("N H B D", k_cache=torch.empty(9, 2, 16, 8)).bind("T", slots=torch.empty(5))
    )
    assert sizes == {"T": 5, "H": 2, "D": 8, "N": 9, "B": 16}


def test_a_letter_with_a_number_is_that_much_more() -> None:
    assert bind("S+1", starts=torch.empty(4)).bind("S", lens=torch.empty(3))["S"] == 3
    with pytest.raises(ShapeError, match=r"starts has S\+1=3 in dimension 0: must be 4"):
        bind("S", lens=torch.empty(3)).bind("S+1", starts=torch.empty(3))
    with pytest.raises(ShapeError, match=r"starts has S\+1=0 in dimension 0: must be 1"):
        bind("S+1", starts=torch.empty(0))


def test_a_number_stands_for_itself() -> None:
    bind("C 4", copies=torch.empty(7, 4))
    with pytest.raises(ShapeError, match="copies has 4=3 in dimension 1: must be 4"):
        bind("C 4", copies=torch.empty(7, 3))


def test_a_letter_twice_in_one_tensor_is_one_size() -> None:
    bind("D D", square=torch.empty(3, 3))
    with pytest.raises(ShapeError, match="square has D=4 in dimension 1: must be 3"):
        bind("D D", square=torch.empty(3, 4))


def test_another_number_of_dimensions_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"q has shape \[1, 2\]: must be \[T, H, D\]"):
        bind("T H D", q=torch.empty(1, 2))

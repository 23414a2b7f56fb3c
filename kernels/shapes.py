"""Shapes of tensors, checked before a kernel runs: equal letters must be equal sizes.

Before: a launcher has its arguments. After: it reads the sizes by letter. Always: a refusal names the tensor, the letter
and both sizes, and nothing has been written when it is raised.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor


class KernelInputError(ValueError):
    """An argument of a kernel is not acceptable; the message names it, its value and the bound it breaks."""


class ShapeError(KernelInputError):
    """Two sizes that must be equal are not, or a tensor has another number of dimensions than it must have."""


class Sizes(dict[str, int]):
    """Letter to size. Made by `bind`; `bind` again adds tensors under the same letters."""

    def bind(self, letters: str, /, **tensors: Tensor) -> Sizes:
        """Read `letters` (one a dimension, such as ``"T H D"`` or ``"S+1"``) off every tensor; returns self.

        A new letter takes the size that is found, a known one must be equal to it, a number stands for itself.
        Raises `ShapeError`.
        """
        wanted = _parse(letters)
        for name, tensor in tensors.items():
            shape = tensor.shape
            if len(shape) != len(wanted):
                raise ShapeError(f"{name} has shape {list(shape)}: must be [{', '.join(letters.split())}]")
            for dimension, (letter, extra) in enumerate(wanted):
                self._match(name, letters, dimension, letter, extra, int(shape[dimension]))
        return self

    def _match(self, name: str, letters: str, dimension: int, letter: str, extra: int, found: int) -> None:
        expected = extra if not letter else self.setdefault(letter, found - extra) + extra
        if expected == found and found >= extra:
            return
        written = letters.split()[dimension]
        raise ShapeError(f"{name} has {written}={found} in dimension {dimension}: must be {max(expected, extra)}")


def bind(letters: str, /, **tensors: Tensor) -> Sizes:
    """Sizes of `tensors` by letter: ``bind("T H D", k=k).bind("N H B D", k_cache=k_cache)["B"]``."""
    return Sizes().bind(letters, **tensors)


@lru_cache(maxsize=256)
def _parse(letters: str) -> tuple[tuple[str, int], ...]:
    """``"S+1 D 3"`` as ((S, 1), (D, 0), ("", 3))."""
    parts = []
    for written in letters.split():
        letter, _, extra = written.partition("+")
        parts.append(("", int(letter)) if letter.isdigit() else (letter, int(extra or 0)))
    return tuple(parts)

"""A forward in front of a module's own, for one module and not for its class.

Before: `core_layer` and `rotating_attention` have found a module whose work they can do. After: the same module, of a class
made of the forward and its own class. Always: giving it back leaves the module as it was; a copy of a changed module is changed
too, and so is one that comes out of a pickle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


class Front(nn.Module):
    """Goes before the class of a module. What it needs lies in the module's `__dict__` under `KEY`."""

    KEY = ""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class of a changed module has no name of its own: it is made again where a copy is."""
        front, own = type(self).__bases__[:2]
        return _blank, (front, own), self.__dict__


def put_before(module: nn.Module, front: type[Front], given: Any) -> None:
    """Let `module` run the forward of `front`, which finds `given` under its key."""
    module.__dict__[front.KEY], module.__class__ = given, _class(front, type(module))  # type: ignore[arg-type]


def take_away(module: Front) -> None:
    """Let it run its own forward again."""
    del module.__dict__[module.KEY]
    module.__class__ = own_class(module)  # type: ignore[assignment]


def own_class(module: Front) -> type[nn.Module]:
    """The class that it had before."""
    own: type[nn.Module] = type(module).__bases__[1]
    return own


@cache
def _class(front: type[Front], own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (front, own), {"__module__": own.__module__})


def _blank(front: type[Front], own: type[nn.Module]) -> nn.Module:
    changed = _class(front, own)  # type: ignore[arg-type]
    return changed.__new__(changed)

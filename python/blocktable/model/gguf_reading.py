"""Reading a GGUF file once, where transformers reads it for the configuration, the weights and the tokenizer anew.

Before: `loader` opens a load of a GGUF source. After: the package `gguf` is as it was. Always: what is remembered is only
read, and is dropped at the end. Measured with SmolLM2-135M (98 MB; gguf 0.19, transformers 5.24, one AMD EPYC core): a load
takes 24.4 s of CPU time without this, 9.7 s with it; 8 s of the difference is one table of tensor names that is built for each
of the model's 397 modules, the rest two more walks over 49,152 tokens and their merges. What is walked is read as plain arrays
and whole strings: that alone took a load from 15.0 s to 6.0 s (one core of a Xeon, the same versions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import MissingExtraError

GGUF_NEEDS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""

_STRINGS = ([8], [9, 8])
"""What GGUF calls a string, and an array of them."""


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Inside, opening the same GGUF file again gives the reader of before, and a table of tensor names is built once.

    Hold `borrowed_libraries` around it. Raises `MissingExtraError` where a package is not installed.
    """
    for package in GGUF_NEEDS:
        if find_spec(package) is None:
            raise MissingExtraError("reading a GGUF file", "engine", package)
    import gguf
    from transformers import modeling_gguf_pytorch_utils as unpacking

    with (
        _replaced(gguf, "GGUFReader", lambda reader: lru_cache(maxsize=1)(_of_plain_arrays(reader))),
        _replaced(gguf, "get_tensor_name_map", lru_cache(maxsize=1)),
        _replaced(unpacking, "_gguf_parse_value", _with_whole_strings),
        # Its bar does not ask transformers whether bars are wanted.
        _replaced(unpacking, "tqdm", lambda _: _without_bar),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`module.name` is wrapped inside. A version that has no such name is left as it is."""
    original = getattr(module, name, None)
    if original is None:
        yield
        return
    setattr(module, name, wrap(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _without_bar(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items


def _of_plain_arrays(reader: type) -> type:
    """The reader, with plain arrays for views of the mapped file: a `memmap` takes longer to look up than all else together."""

    def keep(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    return type(reader.__name__, (reader,), {"__setattr__": keep})


def _with_whole_strings(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same values; a string is decoded as it lies, not number by number."""
    return lambda value, kinds: bytes(value).decode() if kinds in _STRINGS else parse(value, kinds)

"""Triton's interpreter made fit to judge kernels by, for tests alone.

Before: a test imports a Triton kernel with TRITON_INTERPRET=1. After: the kernel runs on CPU tensors. Always: what is mended
here is a fault of the interpreter and none of compiled kernels: it multiplies the bit patterns of bfloat16, cuts where it
should round to bfloat16, loses a carry when it rounds to float8, and (Triton 3.6) takes no loop bound from a tensor under
numpy 2.4 or newer. What it looks up anew for each program and each call stays looked up.
"""

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_NUMPY = (tl.float16, tl.float32, tl.float64)


@cache
def mend() -> None:
    """Mend the interpreter of this process, once."""
    builder = interpreter.InterpreterBuilder
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _rounding(getattr(builder, name)))
    builder.create_dot = _in_float32(builder.create_dot)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)


def _as_float32(handle: Any) -> Any:
    """The handle's numbers in float32, if numpy does not know their format."""
    kind = handle.dtype.scalar
    if kind not in _TORCH:
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return interpreter.TensorHandle(bits.view(_TORCH[kind]).float().numpy(), tl.float32)


def _rounding(original: Any) -> Any:
    def cast(self: Any, source: Any, to: Any, *rest: Any) -> Any:
        kind, wanted = source.dtype.scalar, to.scalar
        if wanted not in _TORCH or kind == wanted or kind not in (*_NUMPY, *_TORCH):
            return original(self, source, to, *rest)
        numbers = torch.from_numpy(np.ascontiguousarray(_as_float32(source).data)).float().to(_TORCH[wanted])
        bits = numbers.view(torch.int16).numpy().view(np.uint16) if numbers.itemsize == 2 else numbers.view(torch.uint8).numpy()
        return interpreter.TensorHandle(bits, wanted)

    return cast


def _in_float32(original: Any) -> Any:
    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _as_float32(a), _as_float32(b), *rest)

    return dot


def _with_index(original: Any) -> Any:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    return patch


@cache
def _builtins(package: Any) -> list[str]:
    """Names of what Triton builds in, first asked for while nothing is patched."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # a kernel that another one calls finds it patched
            interpreter._patch_attr(package, name, member, builder, scope)


def _by_scalar(original: Any) -> Any:
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = str(kind.scalar)
        if name not in known:
            known[name] = original(kind.scalar)
        return known[name]

    return np_dtype


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Every launch inside runs its programs in a random order: nothing may rest on another program's having run."""
    builder = interpreter.InterpreterBuilder
    set_dim, set_index, order = builder.set_grid_dim, builder.set_grid_idx, {}

    def dim(self: Any, *sizes: int) -> None:
        cells = list(np.ndindex(*sizes))
        order.clear()
        order.update(zip(cells, random.Random(seed).sample(cells, len(cells))))
        set_dim(self, *sizes)

    builder.set_grid_dim, builder.set_grid_idx = dim, lambda self, *cell: set_index(self, *order[cell])
    try:
        yield
    finally:
        builder.set_grid_dim, builder.set_grid_idx = set_dim, set_index

"""What a forward pass of one model reads beside its inputs: where its keys and values lie.

Before: `runner`, `trace` and `numeric_check` put a context into the model's slot for one forward. After: `attention_bridge`
finds it there, through a binding on the attention module that is running. Always: the slot belongs to one model and is empty
between forwards, also after an error; nothing of it lives in a module of Python, so models never see each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..kernels.attention_batch import AttentionBatch
from .attention_backend import AttentionBackend

if TYPE_CHECKING:
    from .._core import CpuLayer


class ForwardContext(Protocol):
    """Answers every call for attention of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Output [1, T, Hq, Dv] of layer `layer` for query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv].

        `options` is all else that the model passed, by transformers' names.
        """
        ...


class ContextSlot:
    """The place on a model where the context of the running forward lies; one forward at a time."""

    __slots__ = ("_current", "_lock")

    def __init__(self) -> None:
        self._current: ForwardContext | None = None
        self._lock = threading.Lock()

    @property
    def current(self) -> ForwardContext | None:
        """The context of the forward that is running; None between forwards."""
        return self._current

    @contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        """`context` is current inside. A second forward of the same model, from another thread, waits for its turn."""
        with self._lock:
            self._current = context
            try:
                yield
            finally:
                self._current = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextSlot:
        """A copied model gets a slot of its own, empty: a lock cannot be copied, and a running forward must not be."""
        return ContextSlot()

    def __reduce__(self) -> tuple[type[ContextSlot], tuple[()]]:
        return (ContextSlot, ())


@dataclass(frozen=True, slots=True, eq=False)
class GroupStep:
    """What one step reads and writes in one group of layers."""

    batch: AttentionBatch
    slots: Tensor
    """[T] int64, block * block size + offset, -1 = nowhere."""


class PagedForward:
    """One step's context: for each layer what its group attends to and writes, and its views of the KV memory."""

    __slots__ = ("_backend", "_layers", "_steps")

    def __init__(self, steps: Sequence[GroupStep], layers: Sequence[tuple[Tensor, Tensor]], backend: AttentionBackend) -> None:
        """In the order of `trace`, for each layer its group's step, and k_cache [N, Hkv, B, Dk] and v_cache [N, Hkv, B, Dv]."""
        self._steps = steps
        self._layers = layers
        self._backend = backend

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Write the step's keys and values, then attend: a row may be read in the step that writes it."""
        k_cache, v_cache = self._layers[layer]
        step = self._steps[layer]
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        if not q.dtype == k.dtype == v.dtype == k_cache.dtype:
            q, k, v = q.to(k_cache.dtype), k.to(k_cache.dtype), v.to(k_cache.dtype)
        self._backend.store_kv(k, v, k_cache, v_cache, step.slots)
        return self._read(layer, q, options).unsqueeze(0).to(query.dtype)

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor | None:
        """The same for q [T, Hq, Dk], k [T, Hkv, Dk] and v [T, Hkv, Dv] without positions, whose cosines and sines [T, R] are
        `angles`: [T, Hq, Dv]. None if the backend cannot rotate them; nothing is written then.
        """
        k_cache, v_cache = self._layers[layer]
        if self._backend.rope_store_kv is None or not q.dtype == k.dtype == v.dtype == k_cache.dtype:
            return None
        q = self._backend.rope_store_kv(q, k, v, *angles, k_cache, v_cache, self._steps[layer].slots)
        return self._read(layer, q, options)

    def run_layers(self, layers: Sequence[CpuLayer], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """The rows hidden [T, K] through whole layers, all of the model's: [T, K]. None if the backend knows no whole layers,
        or not with these caches; nothing is written then.
        """
        run = self._backend.run_layers
        if run is None or any(tensor.dtype != hidden.dtype for pages in self._layers for tensor in pages):
            return None
        numbers = {id(step): number for number, step in enumerate(dict.fromkeys(self._steps))}
        tables = [(*step.batch.integers(), step.slots) for step in dict.fromkeys(self._steps)]
        return run(layers, hidden, cos, sin, self._layers, tables, [numbers[id(step)] for step in self._steps])

    def _read(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention over what lies in the caches: [T, Hq, Dv]."""
        k_cache, v_cache = self._layers[layer]
        scaling = options["scaling"]
        return self._backend.paged_attention(
            q,
            k_cache,
            v_cache,
            self._steps[layer].batch,
            scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=options["sliding_window"] or 0,
            softcap=options["softcap"] or 0.0,
            sinks=options["s_aux"],
        )

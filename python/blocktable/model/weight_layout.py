"""How the weights of linear layers lie in memory on a CPU: as loaded, or transposed.

Before: `loader` has a float32 model on a CPU. After: the same model with the same values and shapes. Always: which way is
faster for the few rows of a decode depends on the processor and its BLAS, so it is timed on this machine with the model's own
weights, and turned over only for a clear gain.

nn.Linear keeps weights as [outputs, inputs]. Transposed means that [inputs, outputs] lies contiguous and the weight is a view
of it. SmolLM2-135M's linears at 32 rows: 140 ms as loaded and 70 ms transposed on two cores of a Xeon at 2.8 GHz with AVX-512;
119 and 116 ms on one core of an AMD EPYC with AVX2 (torch 2.15), where the output head takes 38 and 44 ms.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import InvalidInputError

LAYOUTS = ("auto", "as_loaded", "transposed")
ROWS = 32
"""Rows of the timed products: a decode batch."""
ROUNDS = 5
CLEAR_GAIN = 0.85
"""Transposing must take at most this share of the time; a smaller gain is noise, and is not worth other rounding."""
WORTH_TIMING_BYTES = 32 * 2**20
"""A smaller model stays as loaded: its weights lie in the cache anyway."""
TIMED_BYTES = 64 * 2**20
"""Of weights of the commonest shape, enough to leave most caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """What was done with the weights, and the times that decided it (CPU milliseconds of one thread; None = not timed)."""

    linears_transposed: bool
    head_transposed: bool
    linears_ms: tuple[float, float] | None
    """Of the timed linears: as loaded, transposed."""
    head_ms: tuple[float, float] | None
    extra_bytes: int
    """Of a second copy of the output head's weights, where it shares them with the embeddings."""

    def __str__(self) -> str:
        parts = []
        for what, transposed, times in (
            ("linears", self.linears_transposed, self.linears_ms),
            ("output head", self.head_transposed, self.head_ms),
        ):
            timed = "" if times is None else f" ({times[0]:.1f} ms as loaded, {times[1]:.1f} ms transposed)"
            parts.append(f"{what} {'transposed' if transposed else 'as loaded'}{timed}")
        return ", ".join(parts)


def lay_out_weights(model: PreTrainedModel, layout: str) -> LayoutChoice:
    """Choose and apply. `layout`: `auto` times both, `as_loaded` and `transposed` do as they say.

    Only plain float32 linears on a CPU are touched. Embeddings never are: a look-up in a transposed table reads a cache line
    for each number (of 32 rows: 130 us against 7). An output head that shares its weights with them gets a copy of its own
    if it is to be transposed.
    """
    if layout not in LAYOUTS:
        raise InvalidInputError("weight_layout", layout, f"must be one of {', '.join(LAYOUTS)}")
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if _is_plain(module) and module is not head]
    heads = [head] if _is_plain(head) else []
    linears_ms = _time_both(linears) if layout == "auto" else None
    head_ms = _time_both(heads) if layout == "auto" else None
    turn_linears = layout == "transposed" or _is_clear(linears_ms)
    turn_head = bool(heads) and (layout == "transposed" or _is_clear(head_ms))
    if turn_linears:
        _transpose(linears)
    return LayoutChoice(
        linears_transposed=turn_linears,
        head_transposed=turn_head,
        linears_ms=linears_ms,
        head_ms=head_ms,
        extra_bytes=_transpose_head(model, heads[0]) if turn_head else 0,
    )


def _is_plain(module: nn.Module | None) -> bool:
    """A linear of torch itself (no subclass that packs its weights) in float32 on a CPU."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _time_both(linears: Sequence[nn.Module]) -> tuple[float, float] | None:
    """Milliseconds of `ROWS` rows through weights of the shape that most numbers are in; None if the model is small."""
    weights = [module.weight.detach() for module in linears if isinstance(module.weight, Tensor)]
    if sum(weight.nbytes for weight in weights) < WORTH_TIMING_BYTES:
        return None
    elements: Counter[tuple[int, ...]] = Counter()
    for weight in weights:
        elements[tuple(weight.shape)] += weight.numel()
    shape = elements.most_common(1)[0][0]
    chosen = [weight for weight in weights if tuple(weight.shape) == shape]
    chosen = chosen[: max(1, TIMED_BYTES // chosen[0].nbytes)]
    turned = [_turned(weight) for weight in chosen]
    x = torch.ones(1, ROWS, shape[1])
    best = [float("inf"), float("inf")]
    with _one_thread(), torch.inference_mode():
        # In turn, the best of each, and CPU time: what else the machine does must not decide.
        for _ in range(ROUNDS):
            for way, group in enumerate((chosen, turned)):
                start = time.thread_time()
                for weight in group:
                    nn.functional.linear(x, weight)
                best[way] = min(best[way], 1e3 * (time.thread_time() - start))
    return best[0], best[1]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _is_clear(times: tuple[float, float] | None) -> bool:
    return times is not None and times[1] <= CLEAR_GAIN * times[0]


def _turned(weight: Tensor) -> Tensor:
    """The same [N, K] values over storage [K, N]."""
    return weight.t().contiguous().t()


def _transpose(linears: Sequence[nn.Module]) -> None:
    """In place: the parameter stays the same object, so what is tied stays tied."""
    for weight in {id(module.weight): module.weight for module in linears}.values():
        if isinstance(weight, nn.Parameter):
            weight.data = _turned(weight.data)


def _transpose_head(model: PreTrainedModel, head: nn.Module) -> int:
    """Transpose the output head; returns the bytes of the copy that this took, if it shares weights with the embeddings."""
    weight = head.weight
    if not isinstance(weight, nn.Parameter):
        return 0
    size: int = weight.nbytes
    if weight is not getattr(model.get_input_embeddings(), "weight", None):
        weight.data = _turned(weight.data)
        return 0
    head.weight = nn.Parameter(_turned(weight.data), requires_grad=False)
    return size

"""One forward pass over a packed row: T tokens of any number of sequences in, the logits of the rows asked for out.

Before: `runner` (a plan's arrays) or `numeric_check` made the inputs. After: the sampler, and who scores prompts. Always: the
model's slot holds the context during the pass and is empty after it, also when the model fails; no gradient is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from .attention_bridge import slot_of
from .forward_context import ForwardContext
from .trace import takes

PIECE_BYTES = 2**26
"""Of logits that lie in memory at once for those who score rows."""


class ScoredRows(Protocol):
    """Rows of a step whose logits somebody reads beside those that are sampled."""

    rows: NDArray[np.intp]
    """[R] of 0..T-1."""

    def take(self, first: int, logits: Tensor) -> None:
        """The logits [r, vocab] float32 of `rows` from `first` on."""


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """What one pass reads, on the model's device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, counted from the start of each sequence
    rows: Tensor  # [K] int64, rows 0..T-1 whose logits are wanted; K may be 0, a row may repeat
    context: ForwardContext


def packed_logits(
    model: PreTrainedModel, inputs: PackedInputs, *, keeps_rows: bool | None = None, scored: ScoredRows | None = None
) -> Tensor:
    """Logits [K, vocab] float32 of `inputs.rows`. Those of `scored` are given to it in pieces of `PIECE_BYTES`.

    `keeps_rows`: the model takes `logits_to_keep` and so scores only these rows; None = look at its signature.
    """
    if keeps_rows is None:
        keeps_rows = takes(model, "logits_to_keep")

    def run(**options: Any) -> Tensor:
        output = model(input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False, **options)
        logits: Tensor = output.logits[0]
        return logits

    with torch.inference_mode(), slot_of(model).holding(inputs.context):
        if scored is None:
            return (run(logits_to_keep=inputs.rows) if keeps_rows else run()[inputs.rows]).float()
        rows = torch.from_numpy(scored.rows).to(inputs.rows.device)
        if not keeps_rows:
            every = run()
            _give(scored, rows, every.shape[1], lambda piece: every[piece])
            return every[inputs.rows].float()
        with _computed_once(model):
            logits = run(logits_to_keep=inputs.rows).float()
            _give(scored, rows, logits.shape[1], lambda piece: run(logits_to_keep=piece))
        return logits


def _give(scored: ScoredRows, rows: Tensor, vocab_size: int, logits_of: Callable[[Tensor], Tensor]) -> None:
    size = max(1, PIECE_BYTES // (4 * vocab_size))
    for first in range(0, len(rows), size):
        scored.take(first, logits_of(rows[first : first + size]).float())


@contextmanager
def _computed_once(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers of the model run at its first pass, whose answer every later pass has too: only its head, and what it
    does behind it, runs again. A model that is no layers with a head around them runs as a whole each time."""
    body = model.base_model
    if body is model:
        yield
        return
    run, answers = body.forward, list[Any]()

    def once(*arguments: Any, **options: Any) -> Any:
        if not answers:
            answers.append(run(*arguments, **options))
        return answers[0]

    own = vars(body).get("forward")
    vars(body)["forward"] = once
    try:
        yield
    finally:
        if own is None:
            del vars(body)["forward"]
        else:
            vars(body)["forward"] = own

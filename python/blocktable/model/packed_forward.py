"""One forward pass over a packed row: T tokens of any number of sequences in, the logits of the rows asked for out.

Before: `runner` (a plan's arrays) or `numeric_check` made the inputs. After: the sampler. Always: the model's slot holds the
context during the pass and is empty after it, also when the model fails; no gradient is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention_bridge import slot_of
from .forward_context import ForwardContext
from .trace import takes


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """What one pass reads, on the model's device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, counted from the start of each sequence
    rows: Tensor  # [K] int64, rows 0..T-1 whose logits are wanted; K may be 0, a row may repeat
    context: ForwardContext


def packed_logits(model: PreTrainedModel, inputs: PackedInputs, *, keeps_rows: bool | None = None) -> Tensor:
    """Logits [K, vocab] float32 of `inputs.rows`.

    `keeps_rows`: the model takes `logits_to_keep` and so scores only these rows; None = look at its signature.
    """
    if keeps_rows is None:
        keeps_rows = takes(model, "logits_to_keep")
    options = {"logits_to_keep": inputs.rows} if keeps_rows else {}
    with torch.inference_mode(), slot_of(model).holding(inputs.context):
        output = model(input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False, **options)
        logits: Tensor = output.logits[0]
        return (logits if keeps_rows else logits[inputs.rows]).float()

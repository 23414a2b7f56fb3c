"""How long a sequence a model can be served with, and why not longer.

Before: `attachment` has a model. After: the engine refuses longer prompts. Always: up to this length the model computes the
same in any batch. Two kinds of models do not beyond a point: those whose attention is cut into chunks that only a mask tells,
and those whose rotary frequencies change for all rows once one row is far enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..errors import UnsupportedModelError

LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""What configurations call the longest sequence."""


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Tokens of a sequence at most, and what sets the limit."""

    tokens: int
    reason: str


def length_limit(config: PreTrainedConfig, name: str) -> LengthLimit:
    """The longest sequence that this model can be served with. Raises `UnsupportedModelError` if it does not say."""
    text = config.get_text_config(decoder=True)
    limits = list(_limits(text))
    if not limits:
        wanted = ", ".join(LENGTH_NAMES)
        raise UnsupportedModelError(name, f"its configuration does not say how long a sequence may be (none of {wanted})")
    return min(limits, key=lambda limit: limit.tokens)


def _limits(config: PreTrainedConfig) -> Iterator[LengthLimit]:
    for name in LENGTH_NAMES:
        if (tokens := _count(config, name)) is not None:
            yield LengthLimit(tokens, name)
            break
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        chunk = _count(config, "attention_chunk_size")
        if chunk is not None:
            yield LengthLimit(chunk, "attention_chunk_size: beyond it the model attends in chunks, which is not supported")
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or _count(config, "original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original:
            why = "beyond it the rotary frequencies of a whole batch change"
            yield LengthLimit(int(original), f"original_max_position_embeddings: {why}")


def _count(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """One set of parameters, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))

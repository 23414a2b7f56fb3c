"""The ids that end a text, from all places that name some.

Before: `loader` has a model's configurations and its tokenizer. After: the engine puts them into every request's stop ids.
Always: one set, worked out once; nothing else in the engine asks a configuration for an end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[int, ...]:
    """Ascending ids that the generation configuration, the configuration or the tokenizer calls an end of sequence.

    A chat model's end of turn often stands in only one of the three. Ids outside of the vocabulary are left out.
    """
    places = [model.generation_config, model.config, model.config.get_text_config(decoder=True), tokenizer]
    found = {token for place in places for token in _ids(getattr(place, "eos_token_id", None))}
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _ids(value: Any) -> Iterator[int]:
    """One id, several, or none."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _ids(item)

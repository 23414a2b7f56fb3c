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


def agree_on_end(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Give the tokenizer of a GGUF file the end token that the file names.

    transformers reads it right into the configuration; up to 5.17 the tokenizer it makes may take the begin token for it.
    """
    named = model.config.eos_token_id
    if isinstance(named, int) and tokenizer.eos_token_id != named:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(named)


def _ids(value: Any) -> Iterator[int]:
    """One id, several, or none."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _ids(item)

"""What a caller may ask, turned into token ids and checked, before anything is queued.

Before: `LLM.generate` and the CLI bring prompts in several shapes. After: `roster.py` submits a `Prompt`.
A `Prompt` that exists has at least one token, and every id is in the model's vocabulary. What depends on the pool and on
the length that the model allows is the core's to refuse (`Scheduler.submit`), so that one rule serves every door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInputError, UnknownOptionError
from ..retention import KvCacheRetentionConfig
from ..sampling.checks import num_bytes

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "kv_cache_retention_config")

MAX_SALT_BYTES = 1024
"""Of a salt's UTF-8: what the core takes."""


class Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the model's begin token if it uses one."""


class Renderer(Protocol):
    """The part of a tokenizer that conversations need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The messages as the model's chat template writes them; raises `InvalidInputError`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prompt. `text` is None when only ids were given."""

    text: str | None
    array: NDArray[np.int32]  # [T], 0 <= id < vocabulary: what the core reads
    token_ids: list[int]
    """The same ids, for the caller and for text."""
    cache_salt: str | None = None
    """Only prompts with the same salt share its cached blocks."""
    retention: Sequence[tuple[int, int | None, int, int | None]] = ()
    """What its blocks are worth once they are free, as `Scheduler.submit` takes it, which checks every bound."""

    @classmethod
    def of(cls, text: str | None, array: NDArray[np.int32]) -> Prompt:
        """The prompt of these ids."""
        return cls(text, array, array.tolist())

    def cached_as(self, field: str, cache_salt: Any, retention: Any) -> Prompt:
        """The same prompt with a salt and a `KvCacheRetentionConfig`, where they are not None. Raises `InvalidInputError`."""
        if cache_salt is not None:
            _check_salt(f"{field}.cache_salt", cache_salt)
        if retention is None:
            return replace(self, cache_salt=cache_salt)
        if not isinstance(retention, KvCacheRetentionConfig):
            bound = "must be a blocktable.retention.KvCacheRetentionConfig"
            raise InvalidInputError(f"{field}.kv_cache_retention_config", retention, bound)
        return replace(self, cache_salt=cache_salt, retention=retention.ranges(len(self.token_ids)))


def read_prompts(prompts: Any, *, encoder: Encoder | None, vocab_size: int) -> list[Prompt]:
    """The prompts of one call, in order: a text, a dictionary with `prompt` or `prompt_token_ids`, or a sequence of those.

    A dictionary may have a `cache_salt` and a `kv_cache_retention_config` too.

    Raises `InvalidInputError` naming the prompt (`prompts[3].prompt_token_ids`), the value and the bound; reads all of
    them or none.
    """
    if isinstance(prompts, str | Mapping):
        return [_read_prompt("prompts", prompts, encoder, vocab_size)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidInputError("prompts", prompts, "must be a text, a dictionary, or a sequence of those")
    return [_read_prompt(f"prompts[{i}]", prompt, encoder, vocab_size) for i, prompt in enumerate(prompts)]


def _check_salt(field: str, salt: Any) -> None:
    if not isinstance(salt, str) or not salt:
        raise InvalidInputError(field, salt, "must be a text that is not empty")
    size = num_bytes(field, salt)
    if size > MAX_SALT_BYTES:
        raise InvalidInputError(field, f"{size} bytes", f"must be at most {MAX_SALT_BYTES}")


def _read_prompt(field: str, prompt: Any, encoder: Encoder | None, vocab_size: int) -> Prompt:
    if isinstance(prompt, str):
        return _encode(field, prompt, encoder, vocab_size)
    if not isinstance(prompt, Mapping):
        hint = "must be a text or a dictionary; token ids go into {'prompt_token_ids': [...]}"
        raise InvalidInputError(field, prompt, hint)
    for key, value in prompt.items():
        if key not in PROMPT_KEYS:
            raise UnknownOptionError(f"{field}.{key}", value, [f"{field}.{known}" for known in PROMPT_KEYS])
    read = _read_dictionary(field, prompt, encoder, vocab_size)
    return read.cached_as(field, prompt.get("cache_salt"), prompt.get("kv_cache_retention_config"))


def _read_dictionary(field: str, prompt: Mapping[str, Any], encoder: Encoder | None, vocab_size: int) -> Prompt:
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidInputError(f"{field}.prompt", text, "must be a text")
    if "prompt_token_ids" in prompt:
        # Ids win where both are given; the text is only shown.
        return Prompt.of(text, read_token_ids(f"{field}.prompt_token_ids", prompt["prompt_token_ids"], vocab_size))
    if text is None:
        raise InvalidInputError(field, dict(prompt), "must have `prompt` or `prompt_token_ids`")
    return _encode(f"{field}.prompt", text, encoder, vocab_size)


def _encode(field: str, text: str, encoder: Encoder | None, vocab_size: int) -> Prompt:
    if not text:
        raise InvalidInputError(field, text, "must not be empty")
    if encoder is None:
        raise InvalidInputError(field, text, "this engine has no tokenizer: give prompt_token_ids")
    try:
        token_ids = encoder.encode(text)
    except UnicodeEncodeError as error:
        raise InvalidInputError(field, text, f"must be valid Unicode: {error.reason} at {error.start}") from None
    return Prompt.of(text, read_token_ids(field, token_ids, vocab_size))


def read_chats(
    messages: Any,
    *,
    renderer: Renderer | None,
    vocab_size: int,
    add_generation_prompt: bool = True,
    cache_salt: str | None = None,
    kv_cache_retention_config: KvCacheRetentionConfig | None = None,
) -> list[Prompt]:
    """The prompts of one conversation (a list of messages), or of a list of conversations; all with one salt and one retention.

    Raises `InvalidInputError`; special tokens come from the chat template alone.
    """
    if renderer is None:
        raise InvalidInputError("messages", messages, "this engine has no tokenizer: give prompt_token_ids to generate")
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidInputError("messages", messages, "must be a list of messages, or a list of conversations")
    if not messages:
        raise InvalidInputError("messages", messages, "must hold at least one message")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    prompts = []
    for place, conversation in enumerate(conversations):
        field = "messages" if conversation is messages else f"messages[{place}]"
        try:
            text = renderer.render_chat(conversation, add_generation_prompt=add_generation_prompt)
        except InvalidInputError as error:
            if len(conversations) > 1:
                error.add_note(f"in conversation {place}")
            raise
        try:
            token_ids = renderer.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise InvalidInputError(field, text, f"must be valid Unicode: {error.reason} at {error.start}") from None
        prompt = Prompt.of(text, read_token_ids(field, token_ids, vocab_size))
        prompts.append(prompt.cached_as("chat", cache_salt, kv_cache_retention_config))
    return prompts


def read_token_ids(field: str, token_ids: Any, vocab_size: int) -> NDArray[np.int32]:
    """[T] int32 of a sequence or array of whole numbers, each 0 <= id < `vocab_size`; at least one.

    Raises `InvalidInputError`; for an id out of range the field names its place.
    """
    if isinstance(token_ids, str | bytes | bytearray | Mapping) or not isinstance(token_ids, Sequence | np.ndarray):
        raise InvalidInputError(field, token_ids, "must be a sequence of token ids")
    try:
        given = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise InvalidInputError(field, token_ids, "must be a flat sequence of token ids") from None
    if given.ndim != 1:
        raise InvalidInputError(field, token_ids, "must be a flat sequence of token ids")
    if given.size == 0:
        raise InvalidInputError(field, token_ids, "must hold at least one token")
    if given.dtype.kind == "O":
        # Whole numbers too large for 64 bits, or a mixture: name the one that is wrong.
        given = np.array([_read_id(f"{field}[{i}]", token, vocab_size) for i, token in enumerate(given)], dtype=np.int64)
    if given.dtype.kind not in "iu":
        raise InvalidInputError(field, token_ids, "token ids must be whole numbers")
    outside = np.flatnonzero((given < 0) | (given >= vocab_size))
    if outside.size:
        place = int(outside[0])
        raise InvalidInputError(f"{field}[{place}]", int(given[place]), f"must be 0..{vocab_size - 1}, the model's vocabulary")
    return np.ascontiguousarray(given, dtype=np.int32)


def _read_id(field: str, token: Any, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise InvalidInputError(field, token, f"must be a whole number 0..{vocab_size - 1}, the model's vocabulary")
    return token

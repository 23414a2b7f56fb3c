"""How many tokens a request cost."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Found in the prefix cache, not computed."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all prompts and all answers of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """The usage of so many tokens."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
        )

"""What a request may ask of the prefix cache, with TensorRT-LLM's names: priorities and times to live for ranges of tokens.

Before: a caller. After: `Scheduler.submit(retention=config.ranges(num_prompt_tokens))`, which checks every bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PRIORITY = 35
"""Of what nobody asked anything for."""


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Tokens `token_start` to `token_end` (None = all that follow, outputs too), and what their blocks are worth."""

    token_start: int
    token_end: int | None
    priority: int
    """0 to 100; lower ones are evicted first."""
    duration_ms: int | None = None
    """Milliseconds without a hit after which the priority ends; None = never."""


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Ranges of the prompt, and what outputs are worth. Blocks before a range are worth at least as much as those in it."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int | None = None
    """Priority of the outputs; None = the default, or what an open range says."""
    decode_duration_ms: int | None = None

    def ranges(self, num_prompt_tokens: int) -> list[tuple[int, int | None, int, int | None]]:
        """The argument `retention` of `Scheduler.submit` for a prompt of that many tokens."""
        ranges = [(one.token_start, one.token_end, one.priority, one.duration_ms) for one in self.token_range_retention_configs]
        if self.decode_retention_priority is not None:
            ranges.append((num_prompt_tokens, None, self.decode_retention_priority, self.decode_duration_ms))
        return ranges

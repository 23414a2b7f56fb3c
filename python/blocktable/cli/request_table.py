"""The table of requests, and the same as JSON.

Before: `generate.py` has all finished outputs. After: a person, or a program. Always: a figure that does not exist (the time
to a first token that never came) is shown as a dash, and is null in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.outputs import RequestOutput
from ..engine.token_logprobs import Logprob

PROMPT_WIDTH = 40
COLUMNS = ("#", "prompt", "prompt tokens", "cached", "output", "finish", "TTFT ms", "tokens/s")
NOTE = "TTFT: from submit to the first token. tokens/s: output tokens over the time from submit to the last one."


def format_table(prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> str:
    """One line for each request, under a heading; text to the left, numbers to the right."""
    rows = [COLUMNS] + [_row(place, prompt, output) for place, (prompt, output) in enumerate(zip(prompts, outputs), start=1)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(_pad(row[i], widths[i], COLUMNS[i]) for i in range(len(COLUMNS))).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], NOTE])


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """One request as a flat JSON object."""
    answer, metrics = output.outputs[0], output.metrics
    ttft = None if metrics is None or metrics.ttft_s is None else round(metrics.ttft_s * 1000, 3)
    rate = None if metrics is None or metrics.tokens_per_s is None else round(metrics.tokens_per_s, 3)
    return {
        "request_id": output.request_id,
        "prompt": prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "ttft_ms": ttft,
        "tokens_per_s": rate,
        "cumulative_logprob": answer.cumulative_logprob,
        "logprobs": None if answer.logprobs is None else [_logprobs_as_json(told) for told in answer.logprobs],
    }


def _logprobs_as_json(told: dict[int, Logprob]) -> list[dict[str, Any]]:
    """Of one token: its own first, then the best ones."""
    return [
        {"token_id": token_id, "text": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
        for token_id, one in told.items()
    ]


def _row(place: int, prompt: str, output: RequestOutput) -> tuple[str, ...]:
    answer, metrics = output.outputs[0], output.metrics
    ttft = None if metrics is None else metrics.ttft_s
    rate = None if metrics is None else metrics.tokens_per_s
    return (
        str(place),
        _shorten(prompt),
        str(len(output.prompt_token_ids or ())),
        str(output.num_cached_tokens),
        str(len(answer.token_ids)),
        str(answer.finish_reason),
        "-" if ttft is None else f"{ttft * 1000:.0f}",
        "-" if rate is None else f"{rate:.1f}",
    )


def _shorten(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= PROMPT_WIDTH else line[: PROMPT_WIDTH - 1] + "…"


def _pad(text: str, width: int, column: str) -> str:
    return text.ljust(width) if column in ("prompt", "finish") else text.rjust(width)

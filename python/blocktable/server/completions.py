"""`POST /v1/completions`.

Before: `endpoint.py` has read the body. After: it sends the reply, or the events, that come from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from .errors import disagree
from .generation import Generation, Tally, check_together
from .logprobs import CompletionWriter, as_record
from .protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from .serving import Call, Serving
from .sse import CompletionEvents


async def complete(serving: Serving, call: Call, ask: CompletionRequest) -> CompletionReply | AsyncGenerator[bytes, None]:
    """All answers, or a stream of their events."""
    serving.check_takes()
    serving.model_name(ask.model)
    sampling = _sampling(ask)
    check_together(serving, ask, sampling)
    prompts = await serving.reader.prompts(ask.prompt, serving.limits.max_prompts)
    generation = Generation(serving, call, ask, prefix="cmpl", prompts=prompts, sampling=sampling)
    if ask.num_logprobs is not None:
        skips = ask.skip_special_tokens is not False
        each = [prompt for prompt in prompts for _ in range(generation.n)]
        generation.writer = CompletionWriter(await serving.reader.speller(), each, skip_special_tokens=skips)
    if ask.stream:
        return CompletionEvents(generation, includes_usage=ask.includes_usage, write_now=call.write_now).stream()
    await generation.to_the_end()
    n, scored = ask.n or 1, await generation.written_prompts()
    return CompletionReply(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(place, tally, scored[place // n]) for place, tally in enumerate(_told(generation, n))],
        usage=generation.usage,
    )


def _sampling(ask: CompletionRequest) -> dict[str, Any]:
    n, count = ask.n or 1, ask.num_answers
    if count < n:
        raise disagree("best_of", f"must be at least n, which is {n}")
    if count == n:
        return ask.sampling()
    if ask.stream:
        raise disagree("best_of", "is not streamed where it is more than n: which answers are best is known at their end")
    return {"logprobs": 0} | ask.sampling()


def _told(generation: Generation, n: int) -> list[Tally]:
    """The answers that are told: all, or the `n` best to each prompt, best first, of equal ones that of the earlier seed."""
    count, tallies = generation.n, generation.tallies
    if count == n:
        return tallies
    each = [tallies[first : first + count] for first in range(0, len(tallies), count)]
    return [tally for own in each for tally in sorted(own, key=lambda one: -one.mean_logprob)[:n]]


def _choice(place: int, tally: Tally, scored: bytes) -> CompletionChoice:
    return CompletionChoice(
        index=place,
        text=tally.text,
        logprobs=as_record(tally.logprobs),
        finish_reason=tally.finish_reason,
        stop_reason=tally.stop_reason,
        prompt_logprobs=as_record(scored),
    )

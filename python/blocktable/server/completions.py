"""`POST /v1/completions`.

Before: `endpoint.py` has read the body. After: it sends the reply, or the events, that come from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from .generation import Generation, Tally, check_together
from .logprobs import CompletionWriter, as_record
from .protocol.completions import CompletionChoice, CompletionReply, CompletionRequest
from .serving import Call, Serving
from .sse import CompletionEvents


async def complete(serving: Serving, call: Call, ask: CompletionRequest) -> CompletionReply | AsyncGenerator[bytes, None]:
    """All answers, or a stream of their events."""
    serving.check_takes()
    serving.model_name(ask.model)
    sampling = ask.sampling()
    check_together(serving, ask, sampling)
    prompts = await serving.reader.prompts(ask.prompt, serving.limits.max_prompts)
    generation = Generation(serving, call, ask, prefix="cmpl", prompts=prompts, sampling=sampling)
    if ask.num_logprobs is not None:
        skips = ask.skip_special_tokens is not False
        each = [prompt for prompt in prompts for _ in range(generation.n)]
        generation.writer = CompletionWriter(await serving.reader.speller(), each, skip_special_tokens=skips)
    if ask.stream:
        return CompletionEvents(generation, includes_usage=ask.includes_usage).stream()
    await generation.to_the_end()
    return CompletionReply(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(place, tally) for place, tally in enumerate(generation.tallies)],
        usage=generation.usage,
    )


def _choice(place: int, tally: Tally) -> CompletionChoice:
    return CompletionChoice(
        index=place,
        text=tally.text,
        logprobs=as_record(tally.logprobs),
        finish_reason=tally.finish_reason,
        stop_reason=tally.stop_reason,
    )

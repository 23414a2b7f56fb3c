"""`POST /v1/chat/completions`.

Before: `endpoint.py` has read the body. After: it sends the reply, or the events, that come from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from .errors import disagree
from .generation import Generation, Tally, check_together
from .logprobs import ChatWriter, as_record
from .protocol.chat import Answer, ChatChoice, ChatReply, ChatRequest
from .serving import Call, Serving
from .sse import ChatEvents
from .tool_events import ToolEvents
from .tools.answer import answer_of
from .tools.call_reader import CallReader
from .tools.tool_use import tool_use


async def chat(serving: Serving, call: Call, ask: ChatRequest) -> ChatReply | AsyncGenerator[bytes, None]:
    """All answers, or a stream of their events."""
    serving.check_takes()
    serving.model_name(ask.model)
    use = await tool_use(serving, ask)
    sampling = _sampling(ask) | use.sampling
    check_together(serving, ask, sampling)
    prompt = await serving.reader.chat(
        ask.messages,
        use.tools,
        add_generation_prompt=ask.add_generation_prompt is not False,
        options=ask.chat_template_kwargs or {},
    )
    generation = Generation(serving, call, ask, prefix="chatcmpl", prompts=[prompt], sampling=sampling)
    if ask.num_logprobs is not None:
        generation.writer = ChatWriter(await serving.reader.speller())
    make_reader = use.make_reader
    if ask.stream and make_reader is not None:
        readers = [make_reader() for _ in generation.tallies]
        return ToolEvents(generation, readers, includes_usage=ask.includes_usage).stream()
    if ask.stream:
        return ChatEvents(generation, includes_usage=ask.includes_usage, write_now=call.write_now).stream()
    await generation.to_the_end()
    if make_reader is None:
        choices = [_choice(place, tally) for place, tally in enumerate(generation.tallies)]
    else:
        size = sum(len(tally.text) for tally in generation.tallies)
        choices = await generation.beside(size, partial(_choices_with_calls, generation.tallies, make_reader))
    return ChatReply(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage,
        prompt_logprobs=as_record((await generation.written_prompts())[0]),
    )


def _sampling(ask: ChatRequest) -> dict[str, Any]:
    if ask.top_logprobs and not ask.logprobs:
        raise disagree("top_logprobs", "goes with logprobs=true only")
    given = ask.max_completion_tokens
    if given is not None and ask.max_tokens not in (None, given):
        raise disagree("max_completion_tokens", f"{given} is the same as max_tokens, which says {ask.max_tokens}")
    # None is as many as the model's length leaves.
    return {"max_tokens": None} | ask.sampling() | ({} if given is None else {"max_tokens": given})


def _choices_with_calls(tallies: Sequence[Tally], make_reader: Callable[[], CallReader]) -> list[ChatChoice]:
    return [_choice(place, tally, make_reader()) for place, tally in enumerate(tallies)]


def _choice(place: int, tally: Tally, reader: CallReader | None = None) -> ChatChoice:
    answer = Answer(content=tally.text) if reader is None else answer_of(tally.text, reader)
    return ChatChoice(
        index=place,
        message=answer,
        logprobs=as_record(tally.logprobs),
        finish_reason=tally.finish_reason if reader is None else reader.reason(tally.finish_reason),
        stop_reason=tally.stop_reason,
    )

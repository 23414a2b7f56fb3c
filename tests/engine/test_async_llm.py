"""Promise: `AsyncLLM` answers as `LLM` does, from any event loop and any thread; a reader gets all of its text whenever it
comes; bad input is refused to the one who brought it; nothing long is done on an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

from blocktable import (
    AsyncLLM,
    InvalidInputError,
    NeverFitsError,
    QueueFullError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    UnknownOptionError,
)
from blocktable.engine.mailbox import Mailbox

from .conftest import MakeAsync, MakeLLM
from .faults import turnstile
from .ways import check_empty

PROMPTS: list[Any] = ["hello", {"prompt_token_ids": list(range(40, 60))}, "hello there", {"prompt_token_ids": [7]}]
KINDS = list(RequestOutputKind)


def greedy(kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True, "output_kind": kind} | options))


async def read(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def whole(outputs: list[RequestOutput], kind: RequestOutputKind) -> tuple[str, list[int]]:
    """Text and tokens of an answer; the last output, and no other, has ended."""
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished
    if kind is RequestOutputKind.DELTA:
        answers = [output.outputs[0] for output in outputs]
        return "".join(answer.text for answer in answers), [token for answer in answers for token in answer.token_ids]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    return outputs[-1].outputs[0].text, list(outputs[-1].outputs[0].token_ids)


def settle(engine: AsyncLLM) -> None:
    """Nothing lives in the engine any more, a few steps after whoever had something there has gone; its books are in order."""
    for _ in range(5):
        if engine._thread.call(lambda: engine._engine.loop.is_settled).result(timeout=60):
            break
    check_empty(engine)
    assert engine._thread._tickets == {}


@pytest.fixture
def expected(make_llm: MakeLLM) -> list[tuple[str, list[int]]]:
    outputs = make_llm().generate(PROMPTS, greedy())
    return [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_llm(kind: RequestOutputKind, engine: AsyncLLM, expected: list[tuple[str, list[int]]]) -> None:
    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(engine.generate(prompt, greedy(kind))) for prompt in PROMPTS))

    answers = asyncio.run(main())
    assert [whole(outputs, kind) for outputs in answers] == expected
    assert all(outputs[-1].metrics is not None and outputs[-1].metrics.num_generation_tokens == 12 for outputs in answers)
    settle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_reads_without_an_event_loop(
    kind: RequestOutputKind, engine: AsyncLLM, expected: list[tuple[str, list[int]]]
) -> None:
    def ask(prompt: Any) -> tuple[str, list[int]]:
        return whole(list(engine.generate_blocking(prompt, greedy(kind))), kind)

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(ask, PROMPTS)) == expected
    settle(engine)


def test_several_event_loops_at_once(engine: AsyncLLM, expected: list[tuple[str, list[int]]]) -> None:
    """One after the other in a thread, and in several threads: nothing of the engine belongs to one of them."""

    def ask(place: int) -> tuple[str, list[int]]:
        async def main() -> tuple[str, list[int]]:
            return whole(await read(engine.generate(PROMPTS[place], greedy())), RequestOutputKind.CUMULATIVE)

        return asyncio.run(main())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, [0, 1, 2, 3] * 3)) == expected * 3
    settle(engine)


def test_a_chat(engine: AsyncLLM, make_llm: MakeLLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [expected] = make_llm().chat(messages, greedy())
    outputs = asyncio.run(read(engine.chat(messages, greedy())))
    assert (outputs[-1].prompt, outputs[-1].outputs[0].text) == (expected.prompt, expected.outputs[0].text)


def test_each_output_goes_on_from_the_one_before(engine: AsyncLLM) -> None:
    outputs = asyncio.run(read(engine.generate("hello", greedy(max_tokens=30))))
    answers = [output.outputs[0] for output in outputs]
    assert len(answers) > 1
    for before, after in pairwise(answers):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.token_ids is not before.token_ids, "an output is the reader's own"


def test_requests_are_called_as_their_callers_call_them(engine: AsyncLLM) -> None:
    async def main() -> None:
        with turnstile(engine) as stile:
            async with aclosing(engine.generate("a", greedy(), "mine")) as first:
                reading = asyncio.ensure_future(anext(first))
                await asyncio.to_thread(stile.let_in)
                with pytest.raises(InvalidInputError, match="request_id='mine'"):
                    await anext(engine.generate("b", greedy(), "mine"))
                stile.open()
                assert (await reading).request_id == "mine"
                assert (await read(first))[-1].request_id == "mine"
        # It has ended: the name is free again, also from within the same step of the event loop.
        assert (await read(engine.generate("c", greedy(), "mine")))[-1].request_id == "mine"
        unnamed = await asyncio.gather(*(read(engine.generate("d", greedy())) for _ in range(5)))
        assert len({outputs[-1].request_id for outputs in unnamed}) == 5

    asyncio.run(main())
    settle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_who_comes_late_finds_everything_merged_into_one_output(
    kind: RequestOutputKind, engine: AsyncLLM, expected: list[tuple[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow reader holds up nobody: its request and another one go on to their ends while it does not read at all."""

    async def main() -> list[RequestOutput]:
        async with aclosing(engine.generate(PROMPTS[0], greedy(kind))) as slow:
            outputs = [await anext(slow)]
            if kind is not RequestOutputKind.FINAL_ONLY:
                # Read on this event loop while the slow one sleeps.
                other = await read(engine.generate(PROMPTS[1], greedy(max_tokens=60)))
                assert len(other[-1].outputs[0].token_ids) == 60
                await asyncio.to_thread(settle, engine)
            return outputs + await read(slow)

    outputs = asyncio.run(main())
    assert whole(outputs, kind) == expected[0]
    assert len(outputs) <= 2, "what came while it slept is one output"
    settle(engine)


def test_outputs_that_are_not_merged_are_caught(engine: AsyncLLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: a mailbox that keeps the last output alone loses tokens."""
    put = Mailbox.put

    def forgetful(self: Mailbox, output: RequestOutput) -> bool:
        self._unread.clear()
        return put(self, output)

    monkeypatch.setattr(Mailbox, "put", forgetful)
    with pytest.raises(AssertionError):
        test_who_comes_late_finds_everything_merged_into_one_output(RequestOutputKind.DELTA, engine, expected, monkeypatch)
    monkeypatch.undo()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": ""}, InvalidInputError, "prompt"),
    ({"prompt": ["a", "b"]}, InvalidInputError, "must be one prompt"),
    ({"prompt": {"prompt_token_ids": [999999]}}, InvalidInputError, "vocabulary"),
    ({"prompt": {"prompt_token_ids": [1] * 5000}}, InvalidInputError, "256"),
    ({"prompt": {"prompt_tokens": [1]}}, UnknownOptionError, "prompt_token_ids"),
    ({"prompt": {"prompt_token_ids": [1] * 200}}, NeverFitsError, "blocks"),
    ({"sampling_params": 3}, InvalidInputError, "sampling_params"),
    ({"request_id": ""}, InvalidInputError, "request_id"),
    ({"request_id": 7}, InvalidInputError, "request_id"),
    ({"tenant": ""}, InvalidInputError, "tenant"),
    ({"tenant": "x" * 257}, InvalidInputError, "tenant"),
]


@pytest.mark.parametrize("given, error, match", REFUSED)
def test_bad_input_is_refused_to_the_one_who_brought_it(
    given: dict[str, Any], error: type[Exception], match: str, make_async: MakeAsync
) -> None:
    engine = make_async(num_blocks=16)

    async def main() -> None:
        beside = asyncio.ensure_future(read(engine.generate("hello", greedy())))
        with pytest.raises(error, match=match):
            await anext(engine.generate(**({"prompt": "a"} | given)))
        with pytest.raises(error, match=match):
            await asyncio.to_thread(next, engine.generate_blocking(**({"prompt": "a"} | given)))
        assert len((await beside)[-1].outputs[0].token_ids) == 12

    asyncio.run(main())
    settle(engine)


def test_a_full_queue_refuses(make_async: MakeAsync) -> None:
    engine = make_async(max_num_seqs=1, max_waiting=2)

    async def main() -> None:
        with turnstile(engine) as stile:
            first = asyncio.ensure_future(read(engine.generate("a", greedy())))
            await asyncio.to_thread(stile.let_in)
            others = [asyncio.ensure_future(read(engine.generate("b", greedy()))) for _ in range(5)]
            await asyncio.sleep(0)
            stile.open()
            ends = await asyncio.gather(first, *others, return_exceptions=True)
        assert [type(end) for end in ends] == [list] * 3 + [QueueFullError] * 3

    asyncio.run(main())
    settle(engine)


def test_tenants_share_no_prefix(engine: AsyncLLM) -> None:
    """The tenant is the domain of the keys: the same prompt is found again by the same tenant only."""
    prompt = {"prompt_token_ids": list(range(40, 80))}

    async def cached(tenant: str | None) -> int | None:
        return (await read(engine.generate(prompt, greedy(), tenant=tenant)))[-1].num_cached_tokens

    async def main() -> list[int | None]:
        return [await cached(tenant) for tenant in ("a", "a", "b", None, None, "b")]

    found = asyncio.run(main())
    assert [count == 0 for count in found] == [True, False, True, True, False, False]


def test_long_prompts_are_read_beside_the_event_loop(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text is encoded: short ones where they come, long ones and chats on a thread for that."""
    tokenizer = engine._engine.tokenizer
    assert tokenizer is not None
    encode: Callable[..., list[int]] = tokenizer.encode
    places: list[str] = []

    def watched(text: str, **options: Any) -> list[int]:
        places.append(threading.current_thread().name.split("_")[0])
        return encode(text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **options: watched(text, **options))

    async def main() -> None:
        await read(engine.generate("short", greedy()))
        with pytest.raises(InvalidInputError):
            await read(engine.generate("long " * 400, greedy()))
        await read(engine.chat([{"role": "user", "content": "short"}], greedy()))

    asyncio.run(main())
    assert places == [threading.current_thread().name, "blocktable-prompts", "blocktable-prompts"]


def test_what_an_operator_asks(engine: AsyncLLM) -> None:
    async def main() -> None:
        await engine.check_health()
        tokenizer = await engine.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
        await read(engine.generate({"prompt_token_ids": list(range(40, 80))}, greedy()))
        assert await engine.reset_prefix_cache() > 0
        assert await engine.reset_prefix_cache() == 0

    asyncio.run(main())
    assert (engine.is_running, engine.is_stopped, engine.errored, engine.dead_error) == (True, False, False, None)
    assert engine.kv_report().steps > 0
    assert engine.config.block_size == 8


def test_a_request_is_explained_by_the_id_that_its_caller_gave(engine: AsyncLLM) -> None:
    async def main() -> None:
        async with aclosing(engine.generate("a", greedy(), "mine")) as stream:
            await anext(stream)
            assert engine.explain("mine")["place"] in ("running", "ended")
            await read(stream)
        assert engine.explain("mine")["place"] == "ended"
        with pytest.raises(InvalidInputError, match="request_id='yours'"):
            engine.explain("yours")

    asyncio.run(main())


def test_a_step_that_hangs_shows_in_stalled_s(engine: AsyncLLM) -> None:
    settle(engine)
    with turnstile(engine) as stile, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(lambda: list(engine.generate_blocking("a", greedy(max_tokens=2))))
        stile.let_in()
        first = engine.stalled_s
        assert engine.stalled_s > first > 0.0
        stile.open()
        reading.result(timeout=60)
    while engine.stalled_s:
        pass


def test_without_a_tokenizer(make_async: MakeAsync) -> None:
    engine = make_async(tokenizer=None)

    async def main() -> None:
        with pytest.raises(InvalidInputError, match="tokenizer"):
            await engine.get_tokenizer()
        outputs = await read(engine.generate({"prompt_token_ids": [1, 2]}, greedy()))
        assert (outputs[-1].outputs[0].text, len(outputs[-1].outputs[0].token_ids)) == ("", 12)

    asyncio.run(main())

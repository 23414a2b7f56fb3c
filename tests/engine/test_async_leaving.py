"""Promise: whoever leaves, however and whenever, has its request ended within one step: no token of it is computed afterwards,
no block stays, nobody else notices."""

import asyncio
import gc
import random
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from blocktable import AsyncLLM, RequestOutput, RequestOutputKind
from blocktable.engine.orders import Orders
from blocktable.engine.step_thread import StepThread

from .conftest import MakeAsync, MakeLLM
from .faults import Turnstile, turnstile
from .test_async_llm import greedy, read, settle
from .ways import check_empty

LONG = {"prompt_token_ids": list(range(40, 140))}
SHORT = {"prompt_token_ids": list(range(7, 12))}
BESIDE = {"prompt_token_ids": list(range(100, 120))}

Stream = AsyncGenerator[RequestOutput, None]


async def closing(stream: Stream, reading: asyncio.Future[Any], engine: AsyncLLM) -> None:
    """As `break` in an `aclosing`; a generator that is being read can be closed only after its reading was cancelled."""
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()


async def cancelling(stream: Stream, reading: asyncio.Future[Any], engine: AsyncLLM) -> None:
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def timing_out(stream: Stream, reading: asyncio.Future[Any], engine: AsyncLLM) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reading, 0.0)


async def aborting(stream: Stream, reading: asyncio.Future[Any], engine: AsyncLLM) -> None:
    engine.abort("left")


LEAVE: list[Callable[[Stream, asyncio.Future[Any], AsyncLLM], Awaitable[None]]] = [closing, cancelling, timing_out, aborting]


async def passes(stile: Turnstile, count: int) -> None:
    """Let `count` passes go by; the next one is under way then."""
    for _ in range(count):
        stile.let_through()
        await asyncio.to_thread(stile.let_in)


STATES = {
    # What runs beside it takes all rows: it waits.
    "waiting": {"max_num_seqs": 1},
    # 100 tokens in chunks of 16: it is in the middle of its prompt.
    "prefill": {"max_num_batched_tokens": 16},
    "first token under way": {},
    "decode": {},
    # Two that outgrow a small pool: the younger one loses its blocks after some steps.
    "preempted": {"num_blocks": 18, "enable_prefix_caching": False},
}


async def reach(state: str, engine: AsyncLLM, stile: Turnstile) -> None:
    """From the pass in which it came to be known on to the state, with a step under way."""
    if state in ("waiting", "first token under way"):
        return
    if state == "preempted":
        for _ in range(60):
            if engine.scheduler.stats()["preemptions"]:
                return
            await passes(stile, 1)
        raise AssertionError("nobody was preempted")
    await passes(stile, {"prefill": 2, "decode": 3}[state])


async def leave_in_state(
    engine: AsyncLLM, state: str, leave: Callable[..., Awaitable[None]], kind: RequestOutputKind
) -> list[int]:
    """One runs, another comes and is left in `state`, in the middle of a step; returns what the first one said to its end."""
    with turnstile(engine) as stile:
        beside = asyncio.ensure_future(read(engine.generate(BESIDE, greedy(max_tokens=30))))
        await asyncio.to_thread(stile.let_in)
        stream = engine.generate(LONG if state != "decode" else SHORT, greedy(kind, max_tokens=100), "left")
        seen: list[RequestOutput] = []

        async def read_on() -> None:
            seen.extend([output async for output in stream])

        reading = asyncio.ensure_future(read_on())
        await asyncio.sleep(0)  # it is submitted
        await passes(stile, 1)
        await reach(state, engine, stile)
        running = engine.scheduler.num_running
        assert running == (1 if state in ("waiting", "preempted") else 2), "the state was not reached"
        await leave(stream, reading, engine)
        # The step under way ends; what it brings for the one that left is dropped, and no later one plans it.
        stile.let_through()
        await asyncio.to_thread(stile.let_in)
        assert engine.scheduler.num_running + engine.scheduler.num_waiting == 1, "it was not ended within one step"
        assert len(stile.plans[-1]) == 1
        stile.open()
        outputs = await beside
        if leave is aborting:
            await reading
            assert seen[-1].outputs[0].finish_reason == "abort"
            assert [output.finished for output in seen].count(True) == 1
    assert outputs[-1].outputs[0].finish_reason == "length"
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("state", STATES)
def test_who_leaves_is_ended_within_one_step(
    state: str, leave: Callable[..., Awaitable[None]], make_async: MakeAsync, make_llm: MakeLLM
) -> None:
    engine = make_async(**STATES[state])
    kind = RequestOutputKind.FINAL_ONLY if state == "prefill" else RequestOutputKind.DELTA
    answer = asyncio.run(leave_in_state(engine, state, leave, kind))
    [cold] = make_llm(num_blocks=64).generate(BESIDE, greedy(max_tokens=30))
    assert answer == list(cold.outputs[0].token_ids), "who stayed noticed"
    settle(engine)


def test_leaving_before_the_engine_has_seen_it(engine: AsyncLLM) -> None:
    """Submitted and left while a step is under way: both orders are carried out in their order, and nothing of it runs."""

    async def main() -> None:
        with turnstile(engine) as stile:
            beside = asyncio.ensure_future(read(engine.generate(BESIDE, greedy())))
            await asyncio.to_thread(stile.let_in)
            reading = asyncio.ensure_future(anext(engine.generate(LONG, greedy())))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            stile.open()
            await beside
            assert all(len(rows) == 1 for rows in stile.plans)

    asyncio.run(main())
    settle(engine)
    assert engine.scheduler.stats()["submitted"] == 2


def test_leaving_after_the_end_changes_nothing(engine: AsyncLLM) -> None:
    async def main() -> None:
        async with aclosing(engine.generate(SHORT, greedy(), "a")) as stream:
            async for output in stream:
                if output.finished:
                    break
        engine.abort(["a", "never was"])

    asyncio.run(main())
    settle(engine)
    assert engine.scheduler.stats()["aborted"] == 0


def test_no_token_comes_after_an_abort_in_the_last_step(engine: AsyncLLM) -> None:
    """The step that would have ended it is under way when it is aborted: it is aborted, and its last token is not told."""

    async def main() -> list[RequestOutput]:
        with turnstile(engine) as stile:
            reading = asyncio.ensure_future(read(engine.generate(SHORT, greedy(RequestOutputKind.DELTA, max_tokens=3), "a")))
            await asyncio.to_thread(stile.let_in)
            await passes(stile, 2)
            engine.abort("a")
            stile.open()
            return await reading

    outputs = asyncio.run(main())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 2
    settle(engine)
    assert (engine.scheduler.stats()["finished"], engine.scheduler.stats()["aborted"]) == (0, 1)


def test_a_generator_that_is_only_forgotten(engine: AsyncLLM) -> None:
    """A loop that was closed closes no generators; a plain thread just drops its iterator."""
    event_loop = asyncio.new_event_loop()
    stream = engine.generate(SHORT, greedy(max_tokens=200))
    event_loop.run_until_complete(anext(stream))
    event_loop.close()
    del stream
    blocking = engine.generate_blocking(SHORT, greedy(max_tokens=200))
    next(blocking)
    del blocking
    gc.collect()
    settle(engine)
    assert engine.scheduler.stats()["aborted"] == 2


def test_an_exception_in_the_reader(engine: AsyncLLM) -> None:
    async def main() -> None:
        async with aclosing(engine.generate(SHORT, greedy(max_tokens=200))) as stream:
            async for _ in stream:
                raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(main())
    settle(engine)
    assert engine.scheduler.stats()["aborted"] == 1


def test_a_storm_of_disconnects(make_async: MakeAsync, rng: random.Random, pytestconfig: pytest.Config) -> None:
    """Streams that are left after 0 to 20 outputs, in every way: nothing is left of them, and what comes after is right."""
    engine = make_async(max_num_seqs=32, max_num_batched_tokens=256, num_blocks=128, max_waiting=100_000)
    count = 2000 if pytestconfig.getoption("--soak") else 150

    async def client(number: int) -> None:
        length, outputs, way = rng.randrange(1, 60), rng.randrange(0, 21), rng.randrange(3)
        prompt = {"prompt_token_ids": [rng.randrange(250) for _ in range(length)]}
        stream = engine.generate(prompt, greedy(rng.choice(list(RequestOutputKind)), max_tokens=40), str(number))

        async def read_some() -> None:
            async with aclosing(stream):
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen == outputs:
                        return

        task = asyncio.ensure_future(read_some())
        if way == 1:
            await asyncio.sleep(0)
            task.cancel()
        elif way == 2:
            await asyncio.sleep(rng.random() / 50)
            engine.abort(str(number))
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        for begin in range(0, count, 50):
            await asyncio.gather(*(client(number) for number in range(begin, begin + 50)))
        assert len((await read(engine.generate(SHORT, greedy())))[-1].outputs[0].token_ids) == 12

    asyncio.run(main())
    settle(engine)


def test_64_threads_submit_and_abort(make_async: MakeAsync, rng: random.Random) -> None:
    """Every request ends in exactly one way, told to the one who asked; every answer that is whole is the right one."""
    engine = make_async(max_num_seqs=16, max_num_batched_tokens=128, num_blocks=64)
    prompts = [{"prompt_token_ids": [place + 1] * (3 + place)} for place in range(8)]
    right = [list(list(engine.generate_blocking(prompt, greedy(max_tokens=8)))[-1].outputs[0].token_ids) for prompt in prompts]
    plans = [[(rng.randrange(8), rng.randrange(6), rng.randrange(64)) for _ in range(3)] for _ in range(64)]
    ends: list[str] = []

    def client(number: int) -> None:
        for turn, (place, reads, other) in enumerate(plans[number]):
            name = f"{number}:{turn}"
            outputs = []
            for output in engine.generate_blocking(prompts[place], greedy(max_tokens=8), name):
                outputs.append(output)
                if len(outputs) == reads:
                    engine.abort(f"{other}:{turn}")
                    if other % 2:
                        break
            assert all(output.request_id == name for output in outputs)
            finished = [output for output in outputs if output.finished]
            assert len(finished) <= 1
            if not finished:
                ends.append("left")
            else:
                reason = str(finished[0].outputs[0].finish_reason)
                assert reason in ("length", "abort")
                if reason == "length":
                    assert list(finished[0].outputs[0].token_ids) == right[place]
                ends.append(reason)

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(client, range(64)))
    assert len(ends) == 64 * 3
    assert set(ends) >= {"left", "length"}
    settle(engine)


_carry_out_all = Orders.carry_out_all

PLANTED: dict[str, tuple[type, str, Callable[..., Any], Callable[..., None]]] = {
    "a request that goes on when it is left": (
        StepThread,
        "abort",
        lambda self, ticket: None,
        lambda engine: _leave_one(engine),
    ),
    "an abort that ends everybody": (
        StepThread,
        "_abort",
        lambda self, ticket: [self._loop.abort(other.number) for other in list(self._tickets.values())],
        lambda engine: asyncio.run(leave_in_state(engine, "decode", closing, RequestOutputKind.DELTA)),
    ),
    "results before aborts": (
        Orders,
        "carry_out_all",
        lambda self: None if _behind_the_model() else _carry_out_all(self),
        lambda engine: test_no_token_comes_after_an_abort_in_the_last_step(engine),
    ),
}


def _behind_the_model() -> bool:
    """Whether the orders are to be carried out before a commit and not before a plan."""
    return sys._getframe(2).f_code.co_name == "_finish"


def _leave_one(engine: AsyncLLM) -> None:
    with turnstile(engine) as stile:
        blocking = engine.generate_blocking(SHORT, greedy(max_tokens=200))
        thread = threading.Thread(target=next, args=(blocking,))
        thread.start()
        stile.let_in()
        stile.let_through()
        thread.join()
        blocking.close()
        stile.let_in()
        stile.let_through()
        stile.let_in()  # a model that nobody needs any more is never called again
        raise AssertionError("it was computed for after it had been left")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, check = PLANTED[fault]
    monkeypatch.setattr(Turnstile, "PATIENCE_S", 2.0)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, TimeoutError)):
        check(engine)
    monkeypatch.undo()
    engine.shutdown()
    check_empty(engine)

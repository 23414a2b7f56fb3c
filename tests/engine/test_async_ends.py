"""Promise: whatever becomes of the engine, everybody who waits is told, once, and nothing hangs: when it dies, when it is shut
down in the middle, when the process forks or ends without a word. Idle, its thread sleeps."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blocktable import AsyncLLM, EngineDeadError, RequestOutput, ShutDownError
from blocktable.engine.step_loop import StepLoop
from blocktable.engine.step_thread import StepThread

from .conftest import MakeAsync
from .faults import faulty_model, interrupted_after, raising, turnstile
from .test_async_llm import greedy, read, settle
from .ways import check_empty

SHORT = {"prompt_token_ids": list(range(7, 12))}
ROOT = Path(__file__).resolve().parents[2]


async def answer(engine: AsyncLLM, **options: Any) -> RequestOutput:
    return (await read(engine.generate(SHORT, greedy(**options))))[-1]


async def deaths(engine: AsyncLLM, at: int = 3) -> list[Any]:
    """What those get who wait, on this event loop and on a thread, while the core breaks at its `at`-th plan."""
    with interrupted_after(engine, "plan", at, RuntimeError("broken core")):
        return await asyncio.gather(
            *(answer(engine, max_tokens=100) for _ in range(12)),
            *(asyncio.to_thread(lambda: list(engine.generate_blocking(SHORT, greedy(max_tokens=100)))) for _ in range(2)),
            asyncio.wrap_future(engine._thread.call(lambda: None)),
            return_exceptions=True,
        )


def test_the_death_of_the_engine_is_told_to_everybody(engine: AsyncLLM) -> None:
    """Those that run, those that wait (8 rows, 14 requests), and those that come afterwards; with the cause."""

    async def main() -> None:
        ends = await deaths(engine)
        assert [type(end) for end in ends[:-1]] == [EngineDeadError] * 14
        assert len({id(end) for end in ends[:-1]}) == 14, "each has its own"
        assert all("broken core" in str(end) and isinstance(end.__cause__, RuntimeError) for end in ends[:-1])
        with pytest.raises(EngineDeadError, match="broken core"):
            await answer(engine)
        with pytest.raises(EngineDeadError):
            await asyncio.to_thread(next, engine.generate_blocking(SHORT, greedy()))
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()

    asyncio.run(main())
    assert (engine.errored, engine.is_running, engine.is_stopped) == (True, False, True)
    assert isinstance(engine.dead_error, EngineDeadError)
    engine.abort("anybody")
    assert engine.shutdown(timeout_s=60)
    check_empty(engine)
    assert engine._thread._tickets == {}


def test_the_death_of_the_engine_in_the_model(engine: AsyncLLM) -> None:
    """A model's exceptions are survived; what is none, such as `SystemExit`, is a death."""

    async def main() -> None:
        with faulty_model(engine, raising(SystemExit(3)), {4}):
            ends = await asyncio.gather(*(answer(engine, max_tokens=50) for _ in range(4)), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDeadError] * 4

    asyncio.run(main())
    assert engine.shutdown(timeout_s=60)
    check_empty(engine)


def test_a_model_that_fails_now_and_then_is_survived(engine: AsyncLLM) -> None:
    async def main() -> None:
        with faulty_model(engine, raising(RuntimeError("now and then")), {1, 3}):
            ends = await asyncio.gather(*(answer(engine) for _ in range(4)))
        assert [end.outputs[0].finish_reason for end in ends] == ["length"] * 4
        with faulty_model(engine, raising(RuntimeError("always"))):
            [end] = await read(engine.generate(SHORT, greedy()))
        assert end.outputs[0].finish_reason == "error"
        await engine.check_health()

    asyncio.run(main())
    settle(engine)


def test_a_shutdown_in_the_middle(make_async: MakeAsync) -> None:
    """Who ran and who waited in line are aborted; whose order had not been carried out is refused; who comes later too."""
    engine = make_async(max_num_seqs=2)

    async def main() -> None:
        with turnstile(engine) as stile:
            early = [asyncio.ensure_future(answer(engine, max_tokens=100)) for _ in range(4)]
            await asyncio.sleep(0)
            await asyncio.to_thread(stile.let_in)
            engine._thread.stop()  # it stands before the orders that come now
            assert not engine.is_running
            with pytest.raises(ShutDownError):
                await answer(engine)
            stile.open()
            ends = await asyncio.gather(*early)
            assert [end.outputs[0].finish_reason for end in ends] == ["abort"] * 4
        assert await asyncio.to_thread(engine.shutdown)
        with pytest.raises(ShutDownError):
            await answer(engine)
        with pytest.raises(ShutDownError):
            await engine.check_health()
        with pytest.raises(ShutDownError):
            await asyncio.to_thread(next, engine.generate_blocking(SHORT, greedy()))

    asyncio.run(main())
    assert (engine.errored, engine.dead_error, engine.is_running) == (False, None, False)
    assert engine.shutdown(), "the second time it does nothing"
    check_empty(engine)


@pytest.mark.parametrize("is_dead", [False, True], ids=["shut down", "dead"])
def test_who_submits_while_the_engine_ends_is_told(is_dead: bool, make_async: MakeAsync) -> None:
    """Threads that go on submitting: each of their requests ends, in one of the ways that there are."""
    engine = make_async(max_waiting=100)
    ends: list[str] = []

    def client(number: int) -> None:
        for _ in range(200):
            try:
                outputs = list(engine.generate_blocking(SHORT, greedy(max_tokens=3)))
            except (EngineDeadError, ShutDownError) as error:
                ends.append(type(error).__name__)
                return
            assert [output.finished for output in outputs].count(True) == 1
            ends.append(str(outputs[-1].outputs[0].finish_reason))

    with ThreadPoolExecutor(16) as threads:
        clients = [threads.submit(client, number) for number in range(16)]
        while len(ends) < 20:
            time.sleep(0.001)
        if is_dead:
            engine._thread.call(lambda: None).result(timeout=60)
            engine._engine.loop.post(lambda: sys.exit(1))
        else:
            engine.shutdown()
        for one in clients:
            one.result(timeout=120)
    assert set(ends) <= {"length", "abort", "EngineDeadError" if is_dead else "ShutDownError"}
    assert engine.shutdown(timeout_s=60)
    check_empty(engine)


def test_clients_that_nobody_tells_are_caught(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: an engine that dies silently leaves its clients waiting."""
    monkeypatch.setattr(StepThread, "_tell_all", lambda self: None)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(deaths(engine), 2.0)
        monkeypatch.undo()
        engine._thread._tell_all()  # so that the threads of `to_thread` can end

    asyncio.run(main())


def test_a_shutdown_through_the_context_manager(make_async: MakeAsync) -> None:
    async def main() -> None:
        async with make_async() as engine:
            running = asyncio.ensure_future(answer(engine, max_tokens=200))
            await asyncio.sleep(0)
        assert (await running).outputs[0].finish_reason == "abort"
        assert not engine._thread.native_thread.is_alive()

    asyncio.run(main())
    with make_async() as second:
        assert second.is_running
    assert not second.is_running


def test_an_engine_that_is_dropped_ends(tiny_model: Any, one_torch_thread: None) -> None:
    """Nobody can ask it anything any more: its thread ends, and the model that was lent is free again."""
    engine = AsyncLLM(tiny_model, num_blocks=16, block_size=8, self_check=False)
    thread, gone = engine._thread, weakref.ref(engine)
    stream = engine.generate_blocking(SHORT, greedy(max_tokens=100))
    next(stream)
    del engine
    assert gone() is not None, "its stream is still read"
    del stream
    gc.collect()
    assert gone() is None
    assert thread.join(timeout_s=60)
    assert "_blocktable_engines" not in tiny_model.__dict__


def still_clock(thread: threading.Thread, patience: int = 200) -> bool:
    """Whether the thread comes to rest: its CPU clock stands still over a while in which a busy one would have run."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    rest = 0
    last = time.clock_gettime_ns(clock)
    for _ in range(patience):
        time.sleep(0.01)
        now = time.clock_gettime_ns(clock)
        rest = rest + 1 if now == last else 0
        last = now
        if rest == 30:
            return True
    return False


def test_an_idle_thread_uses_no_cpu(engine: AsyncLLM) -> None:
    assert still_clock(engine._thread.native_thread), "before the first request"
    asyncio.run(answer(engine))
    assert still_clock(engine._thread.native_thread), "after the last one"
    # Asleep, it is woken by the next one.
    asyncio.run(answer(engine))


def test_a_thread_that_looks_around_all_the_time_is_caught(make_async: MakeAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    wait: Callable[..., None] = StepLoop.wait
    monkeypatch.setattr(StepLoop, "wait", lambda self, timeout_s=None: wait(self, 0.001))
    engine = make_async()
    assert not still_clock(engine._thread.native_thread, 60)
    monkeypatch.undo()


SCRIPT = """
import asyncio, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, sys.argv[1])
import torch
from blocktable import AsyncLLM, EngineDeadError, SamplingParams
from tests.engine.tiny_llama import make_model
model = make_model()
engine = AsyncLLM(model, num_blocks=64, block_size=8, self_check=False)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompt = {"prompt_token_ids": [1, 2, 3]}

async def main():
    return [output async for output in engine.generate(prompt, params)][-1]

print("tokens", len(asyncio.run(main()).outputs[0].token_ids))
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        next(engine.generate_blocking(prompt, params))
    except EngineDeadError as error:
        print("child", error)
    try:
        asyncio.run(engine.check_health())
    except EngineDeadError:
        print("child told")
    sys.exit(7)  # with all that the end of a process does
print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("parent", len(asyncio.run(main()).outputs[0].token_ids))
# Not before the fork: a child of a torch with more threads than CPUs crashes at its end, with us or without.
torch.set_num_threads(4)
engine = AsyncLLM(model, num_blocks=64, block_size=8, self_check=False)
print("threads", torch.get_num_threads(), engine._thread.call(torch.get_num_threads).result())
print("again", len(asyncio.run(main()).outputs[0].token_ids))
left = engine.generate_blocking(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
next(left)
print("running", engine.scheduler.num_running)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs affinity and fork")
def test_one_cpu_a_fork_and_an_end_without_a_word() -> None:
    """A process of its own, pinned to one CPU: it answers, with one thread; a child of a fork is refused, and ends as it wants;
    the parent goes on, and its end in the middle of a request, without a shutdown, is an end."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(ROOT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "tokens 8",
        "child the engine is dead: it was made before a fork, in the parent process: make a new one",
        "child told",
        "fork 7",
        "parent 8",
        "threads 1 1",
        "again 8",
        "running 1",
    ]

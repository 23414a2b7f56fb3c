"""Promise: a thousand streams at once are exact, and cost the scheduler little; random clients, faults and stops for as long
as one likes leave no block, no request and no memory behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from blocktable.errors import BlocktableError
from blocktable.server.engine_client import EngineRequest
from blocktable.server.request_watch import WatchedClient
from blocktable.server.supervisor import Supervisor

from .counting_engine import answer_to
from .processes import Launch, read, request, tokens

STREAMS = 1000
TOKENS = 40
SOAK_S = float(os.environ.get("BLOCKTABLE_SOAK_S", "1800"))
PATIENCE_S = 120
"""The machine may have something else to do for a minute."""


def test_a_thousand_streams_are_exact(launch: Launch, tell: Callable[[str], None]) -> None:
    """Beside the same cadence without streams. What the scheduler's calls took is told, not judged: the machine is shared."""

    async def load(streams: bool) -> dict[str, Any]:
        supervisor = Supervisor(
            launch(num_blocks=16_000, max_num_seqs=1024, max_num_batched_tokens=4096, fake_step_ms=25.0, overlap_depth=2)
        )
        await supervisor.start()
        try:
            asked = [request([place % 200], TOKENS, f"r{place}", is_streamed=streams) for place in range(STREAMS)]
            begun = time.process_time()
            answers = await asyncio.gather(*(read(supervisor, one) for one in asked))
            cpu_us = (time.process_time() - begun) / STREAMS / TOKENS * 1e6
            for one, pieces in zip(asked, answers):
                assert tokens(pieces) == answer_to(one.prompt_token_ids, TOKENS)
                assert len(pieces) > 1 or not streams
            snapshot = await supervisor.snapshot()
            assert snapshot["stats"]["finished"] == STREAMS
            return snapshot | {"server_us": cpu_us}
        finally:
            await supervisor.close()

    async def main() -> None:
        without, with_streams = await load(streams=False), await load(streams=True)
        tell(
            f"{STREAMS} streams: plan and commit p50 {with_streams['scheduler_cpu_us']['50.0']:.0f} us of CPU, without streams "
            f"{without['scheduler_cpu_us']['50.0']:.0f} us; the server {with_streams['server_us']:.1f} us a token"
        )

    asyncio.run(asyncio.wait_for(main(), 280))


class Crowd:
    """Random clients of one engine for a while: good ones, bad ones, ones that leave; and somebody who stops the process."""

    def __init__(self, supervisor: Supervisor, rng: random.Random) -> None:
        self.client = WatchedClient(supervisor)
        self._supervisor = supervisor
        self._rng = rng
        self.ends: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Come and go."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stop_and_continue(end))
            for number in range(60):
                group.create_task(self._clients(number, end))

    async def _clients(self, number: int, end: float) -> None:
        count = 0
        while time.monotonic() < end:
            count += 1
            await self._one(f"c{number}-{count}")
            await asyncio.sleep(self._rng.expovariate(20))

    async def _one(self, name: str) -> None:
        rng = self._rng
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 7, 40, 300]))]
        wanted = rng.choice([1, 5, 60, 200])
        asked = request(prompt, wanted, name, tenant=rng.choice([None, "a", "b", "c"]), is_streamed=rng.random() < 0.8)
        match rng.randrange(6):
            case 0:
                await self._leaves(asked, rng.randrange(8))
            case 1:
                await self._is_refused(EngineRequest(request_id=name, prompt_token_ids=[9999], sampling={}))
            case 2:
                hurried = request(prompt, wanted, name, deadline_s=rng.choice([0.001, 0.1]))
                self.ends[(await read(self.client, hurried))[-1].finish_reason or "none"] += 1
            case _:
                pieces = await read(self.client, asked)
                assert tokens(pieces) == answer_to(prompt, wanted)
                self.ends[pieces[-1].finish_reason or "none"] += 1

    async def _leaves(self, asked: EngineRequest, after: int) -> None:
        async with aclosing(self.client.generate(asked)) as pieces:
            async for _ in pieces:
                after -= 1
                if after < 0:
                    break
        self.ends["left"] += 1

    async def _is_refused(self, asked: EngineRequest) -> None:
        with pytest.raises(BlocktableError):
            await read(self.client, asked)
        self.ends["refused"] += 1

    async def _stop_and_continue(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            process = self._supervisor.process_id
            assert process is not None
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            os.kill(process, signal.SIGCONT)


async def settled(supervisor: Supervisor) -> dict[str, Any]:
    """The snapshot once nothing runs."""
    while True:
        snapshot = await supervisor.snapshot()
        if snapshot["stats"]["running"] + snapshot["stats"]["waiting"] + snapshot["stats"]["used_blocks"] == 0:
            return snapshot
        await asyncio.sleep(0.05)


async def stand_a_crowd(launch: Launch, rng: random.Random, seconds: float, tell: Callable[[str], None]) -> None:
    supervisor = Supervisor(launch(num_blocks=1500, max_num_seqs=32, policy="fair", overlap_depth=2))
    await supervisor.start()
    try:
        crowd = Crowd(supervisor, rng)
        await crowd.run(min(seconds / 3, 60))
        before = await asyncio.wait_for(settled(supervisor), PATIENCE_S)
        await crowd.run(seconds)
        after = await asyncio.wait_for(settled(supervisor), PATIENCE_S)
        stats = after["stats"]
        ended = stats["finished"] + stats["aborted"] + stats["queue_expired"]
        assert stats["submitted"] == ended, "every request that was taken in ended once"
        assert stats["free_blocks"] == stats["num_blocks"] - 1
        assert supervisor.num_deaths == 0
        assert crowd.client.figures.num_open == crowd.client.figures.num_faults == 0
        assert {"left", "refused", "length", "abort"} <= set(crowd.ends), "all kinds of clients came"
        grown = (after["resident_bytes"] - before["resident_bytes"]) / 2**20
        assert grown < 64, "memory is flat"
        tell(f"{stats['submitted']} requests in {seconds:g} s, {stats['preemptions']} preemptions, {grown:.1f} MiB more")
    finally:
        await supervisor.close()


@pytest.mark.skipif(sys.platform != "linux", reason="signals of POSIX, /proc of Linux")
def test_a_crowd_for_seconds_leaves_nothing(launch: Launch, rng: random.Random, tell: Callable[[str], None]) -> None:
    asyncio.run(asyncio.wait_for(stand_a_crowd(launch, rng, 9.0, tell), 250))


@pytest.mark.slow
@pytest.mark.timeout(int(2 * SOAK_S) + 300)
def test_a_crowd_for_half_an_hour_leaves_nothing(launch: Launch, rng: random.Random, tell: Callable[[str], None]) -> None:
    """`BLOCKTABLE_SOAK_S` changes how long."""
    asyncio.run(stand_a_crowd(launch, rng, SOAK_S, tell))

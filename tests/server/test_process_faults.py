"""Promise: whatever happens to a process, clients are told within seconds, health says so, nothing is left behind, and the
service is back by itself where that was chosen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocktable.errors import BlocktableError, EngineDeadError, InvalidInputError
from blocktable.server import supervisor as supervisor_module
from blocktable.server.engine_client import EngineState
from blocktable.server.health import is_moving
from blocktable.server.process_client import EngineLaunch, ProcessClient
from blocktable.server.supervisor import Restarts, Supervisor

from .counting_engine import answer_to
from .processes import Launch, is_gone, read, request, tokens

PATIENCE_S = 200
"""For a test with processes of its own, on a busy machine."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")


async def until(holds: object, timeout_s: float = 60) -> None:
    """Wait until `holds()`."""
    assert callable(holds)
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


def test_a_killed_engine_amid_200_streams_is_told_to_all_and_is_back_by_itself(launch: Launch) -> None:
    async def main() -> None:
        supervisor = Supervisor(launch(), Restarts(pause_s=0.05))
        await supervisor.start()
        try:
            first = supervisor.process_id
            assert first is not None
            asked = [request([place % 200], 3000, f"r{place}") for place in range(200)]
            running = [asyncio.create_task(read(supervisor, one)) for one in asked]
            await until(lambda: supervisor.progress.num_running == 200)
            question = asyncio.create_task(supervisor.explain("r0"))
            await asyncio.sleep(0)
            os.kill(first, signal.SIGKILL)
            ends = await asyncio.gather(*running, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDeadError] * 200
            assert all("signal 9" in str(end) for end in ends)
            assert isinstance((await asyncio.gather(question, return_exceptions=True))[0], dict | EngineDeadError)
            assert supervisor.state in (EngineState.DEAD, EngineState.STARTING)
            with pytest.raises(EngineDeadError):
                await read(supervisor, request([1], 5, "meanwhile"))
            await until(lambda: supervisor.state is EngineState.READY, PATIENCE_S)
            assert tokens(await read(supervisor, request([1], 5, "after"))) == answer_to([1], 5)
            assert supervisor.num_deaths == 1
            assert is_gone(first)
        finally:
            await supervisor.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_stopped_engine_shows_and_recovers(launch: Launch) -> None:
    """SIGSTOP: nothing is heard, nothing moves, the server answers all the same. SIGCONT: every answer is whole."""

    async def main() -> None:
        client = await ProcessClient.start(launch())
        try:
            await client.ready
            os.kill(client.process_id, signal.SIGSTOP)
            await until(lambda: client.progress.heard_s > 1)
            assert client.progress.still_s == 0, "nothing is to be done"
            assert not is_moving(client, stall_s=1)
            running = [asyncio.create_task(read(client, request([place], 100, f"r{place}"))) for place in range(20)]
            await until(lambda: client.progress.still_s > 0.5)
            os.kill(client.process_id, signal.SIGCONT)
            for place, pieces in enumerate(await asyncio.gather(*running)):
                assert tokens(pieces) == answer_to([place], 100)
            await until(lambda: is_moving(client, stall_s=1) and client.progress.still_s == 0)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_step_that_hangs_shows_although_the_process_is_heard_and_can_be_looked_at(launch: Launch) -> None:
    async def main() -> None:
        client = await ProcessClient.start(launch(fake_hang_at=3))
        try:
            await client.ready
            await until(lambda: is_moving(client, stall_s=0.5))
            hung = asyncio.create_task(read(client, request([1], 10, "hung")))
            await until(lambda: client.progress.still_s > 0.5)
            await until(lambda: client.progress.heard_s < 0.2)
            assert not is_moving(client, stall_s=0.5)
            told = await client.stall()
            assert [one["request_id"] for one in told["waiting"]] == ["hung"]
            assert any("counting_engine.py" in line for line in told["stack"]), "it says where the step hangs"
            assert (await client.snapshot())["stats"]["running"] == 1
            assert await client.drain(0.1) is False
            client.kill()
            with pytest.raises(EngineDeadError):
                await hung
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


SERVER = """
import asyncio, json, sys
from blocktable.server.process_client import EngineLaunch, ProcessClient

async def main():
    client = await ProcessClient.start(EngineLaunch(**json.loads(sys.argv[1])))
    print(client.process_id, flush=True)
    if sys.argv[2] == "ready":
        await client.ready
    print("now", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize(("builder", "when"), [("build", "ready"), ("build_orphan", "ready"), ("build_slowly", "building")])
def test_a_killed_server_leaves_no_engine(launch: Launch, builder: str, when: str) -> None:
    """By the system's doing; by the end of the socket alone; while the engine is still being built."""
    import json
    from dataclasses import asdict

    told = json.dumps(asdict(launch(builder)))
    server = subprocess.Popen([sys.executable, "-c", SERVER, told, when], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        assert server.stdout.readline() == "now\n"
        assert not is_gone(engine)
        server.kill()
        server.wait()
        end = time.monotonic() + PATIENCE_S / 2  # what is not ended stays for ever
        while not is_gone(engine):
            assert time.monotonic() < end, "the engine outlives its server"
            time.sleep(0.01)
    finally:
        server.kill()
        server.communicate()


def test_the_check_for_orphans_can_fail() -> None:
    """A planted fault: a process that neither the system nor a socket ends is seen."""
    line = [
        sys.executable,
        "-c",
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)",
    ]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    orphan = int(done.stdout)
    try:
        assert not is_gone(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_an_engine_that_dies_again_and_again_is_given_up(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop fails by itself at the first step: the cause is told, each pause is longer, and the cap holds."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds < 0.5:
            pauses.append(seconds)
        await sleep(0 if seconds < 0.5 else seconds)

    monkeypatch.setattr(supervisor_module.asyncio, "sleep", noted)

    async def main() -> None:
        supervisor = Supervisor(launch(fake_die_after=1), Restarts(at_most=2, pause_s=0.1))
        await supervisor.start()
        try:
            for death in range(1, 4):
                while supervisor.state is not EngineState.READY:
                    await sleep(0.01)
                with pytest.raises(EngineDeadError, match="planted: the loop itself fails"):
                    await read(supervisor, request([1], 50, f"r{death}"))
                while supervisor.num_deaths < death:
                    await sleep(0.01)
            dead = await asyncio.wait_for(supervisor.gave_up(), PATIENCE_S / 2)
            assert "planted" in str(dead)
            assert supervisor.state is EngineState.DEAD
            assert pauses == [0.0, 0.1]
        finally:
            await supervisor.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(("num_recent", "pause"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, None)])
def test_pauses_double_up_to_the_cap(num_recent: int, pause: float | None) -> None:
    assert Restarts().pause_before(num_recent) == pause
    assert Restarts(at_most=0).pause_before(0) is None
    assert Restarts(at_most=100).pause_before(50) == 30.0


def test_what_cannot_be_built_says_why(launch: Launch, tmp_path: Path) -> None:
    async def ends_of(launch: EngineLaunch) -> BlocktableError:
        supervisor = Supervisor(launch)
        try:
            with pytest.raises(BlocktableError) as caught:
                await supervisor.start()
            return caught.value
        finally:
            await supervisor.close()

    async def main() -> None:
        badly, bad_option = await asyncio.gather(ends_of(launch("build_badly")), ends_of(launch(max_num_seqs=0)))
        assert isinstance(badly, EngineDeadError)
        assert "exit code 7" in str(badly)
        assert isinstance(bad_option, InvalidInputError)
        assert bad_option.field == "max_num_seqs"

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

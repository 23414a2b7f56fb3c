"""Owns the launches of fake engines and the long-lived engine process of these tests.

The engines' processes are real; the model is `counting_engine.py`'s, which takes milliseconds and says the next number.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from blocktable.bench.counting_engine import write_tokenizer
from blocktable.server.engine_client import EngineClient, EngineRequest, Piece
from blocktable.server.process_client import EngineLaunch
from blocktable.server.request_watch import WatchedClient
from blocktable.server.supervisor import Restarts, Supervisor

HERE = Path(__file__).resolve().parent
SMALL = {"num_blocks": 16000, "block_size": 8, "max_num_seqs": 256, "max_model_len": 4096}

T = TypeVar("T")
Launch = Callable[..., EngineLaunch]


@pytest.fixture(scope="session")
def fake_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the fake engine reads: a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("fake")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def launch(fake_dir: Path) -> Iterator[Launch]:
    """Makes launches of a fake engine; keywords are options of the engine, and of the fake where they begin with `fake_`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([before] if before else [])])

    def make(builder: str = "build", **options: Any) -> EngineLaunch:
        return EngineLaunch(
            model=str(fake_dir), options=SMALL | options, builder=f"counting_engine:{builder}", beat_s=0.05, log_level="warning"
        )

    yield make
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class Served:
    """An engine's process with an event loop of its own on a thread, for many tests: starting one takes seconds."""

    def __init__(self, launch: EngineLaunch) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.supervisor = self.run(self._start(launch))
        self.client = WatchedClient(self.supervisor)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    async def _start(self, launch: EngineLaunch) -> Supervisor:
        supervisor = Supervisor(launch, Restarts(pause_s=0.05))
        await supervisor.start()
        return supervisor

    def close(self) -> None:
        """End the process."""
        self.run(self.supervisor.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def served(launch: Launch) -> Iterator[Served]:
    """One engine for all tests that leave it as it was."""
    one = Served(launch())
    yield one
    one.close()


def request(prompt: list[int], count: int, name: str, **more: Any) -> EngineRequest:
    """A greedy request for `count` tokens."""
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling={"max_tokens": count, "temperature": 0.0}, **more)


async def read(client: EngineClient, asked: EngineRequest) -> list[Piece]:
    """All pieces of one answer."""
    return [piece async for piece in client.generate(asked)]


def tokens(pieces: list[Piece]) -> list[int]:
    """What they hold together."""
    return [token for piece in pieces for token in piece.token_ids]


def is_gone(process_id: int) -> bool:
    """Whether a process has ended, its parent aside."""
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

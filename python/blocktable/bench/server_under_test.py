"""Servers that `serve.py` measures, each a process of its own: ours, ours over the engine that counts, a peer's.

Before: somebody says which. After: an address for clients and the number of the first process. Always: what was started here is
ended here, with all that it started.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import URLError

from ..errors import ModelLoadError
from .process_cpu import ServerCpu, cpu_of
from .stream_client import get

START_S = 600
"""Seconds that a server gets to be ready: some compile their model."""

STOP_S = 60

KILL = 9

VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
"""GiB, and CPUs. By itself it takes nearly all memory, and leaves one CPU to others: of two the model would get one."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    name: str
    url: str
    process_id: int
    admin_url: str | None = None

    def cpu(self) -> ServerCpu:
        """Seconds so far."""
        return cpu_of(self.process_id)


@contextmanager
def blocktable_server(model: str, options: Mapping[str, Any]) -> Iterator[Server]:
    """`blocktable serve`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    line = [sys.executable, "-m", "blocktable", "serve", model, "--port=0", "--admin-port=0", "--log-level=warning", *flags]
    with _started(line) as started:
        yield _told(started)


@contextmanager
def counting_server(folder: Path, options: Mapping[str, Any]) -> Iterator[Server]:
    """The same over the engine that counts."""
    line = [sys.executable, "-m", "blocktable.bench.counting_server", str(folder), json.dumps(dict(options))]
    with _started(line) as started:
        yield _told(started)


@contextmanager
def vllm_server(python: str, model: str, dtype: str, flags: Sequence[str]) -> Iterator[Server]:
    """vLLM's, by the Python that has it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype, "--port", str(port), *flags]
    with _started([*line, "--host", "127.0.0.1", "--disable-uvicorn-access-log"], VLLM_SETTINGS) as started:
        url = f"http://127.0.0.1:{port}"
        started.wait_for(lambda: _answers(f"{url}/health"))
        yield Server("vllm", url, started.process.pid)


class _Started:
    """A process and what it said."""

    def __init__(self, line: Sequence[str], log: Path, settings: Mapping[str, str]) -> None:
        self.line, self.log = line, log
        with log.open("wb") as file:
            environment = {**settings, **os.environ, "HF_HUB_OFFLINE": "1"}
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def wait_for(self, is_so: Any) -> None:
        """Raises `ModelLoadError` if it ends before, or if it takes too long."""
        end = time.monotonic() + START_S
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > end:
                raise ModelLoadError(" ".join(self.line[:6]), self.log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)

    def end(self) -> None:
        """SIGTERM, and what is left then is killed."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, KILL)
        self.process.wait()


@contextmanager
def _started(line: Sequence[str], settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[_Started]:
    """`settings` for its environment, where that does not say them already."""
    with tempfile.TemporaryDirectory() as folder:
        started = _Started(line, Path(folder) / "log", settings)
        try:
            yield started
        finally:
            started.end()


def _told(started: _Started) -> Server:
    """Where ours serves, as its report of the start says."""

    def urls() -> dict[str, str]:
        text = started.log.read_text(errors="replace")
        return dict(re.findall(r"(serves|admin) at +(\S+)\s", text)) if re.search(r"ready after .*\n", text) else {}

    started.wait_for(lambda: len(urls()) == 2)  # the report may be read while it is written
    told = urls()
    return Server("blocktable", told["serves"], started.process.pid, told["admin"])


def _answers(url: str) -> bool:
    try:
        get(url)
    except (URLError, OSError):
        return False
    return True

"""Promise: `blocktable serve` answers from the first moment to the last: it drains on the first signal, ends on the second,
tells clients what happened to the engine, and goes on without a disk for its logs."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from blocktable.errors import EndpointError
from blocktable.server import server_process
from blocktable.server.metrics import SERIES

from .processes import HERE, SMALL, Launch, is_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")

PATIENCE_S = 120


class Command:
    """`blocktable serve` on free ports. Its log goes to a file, unless told otherwise."""

    def __init__(self, model: Path, folder: Path, flags: list[str], faults: dict[str, Any], log: Path | None) -> None:
        self.log = folder / "log" if log is None else log
        small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        line = [sys.executable, str(HERE / "serve_script.py"), json.dumps(faults), "serve", str(model)]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*line, *small, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def engine(self) -> psutil.Process:
        """The newest process of an engine."""
        return psutil.Process(self.process.pid).children()[-1]


@contextmanager
def serving(model: Path, folder: Path, *flags: str, log: Path | None = None, **faults: Any) -> Iterator[Command]:
    command = Command(model, folder, list(flags), faults, log)
    try:
        yield command
    finally:
        engines = psutil.Process(command.process.pid).children() if command.process.poll() is None else []
        command.process.kill()
        command.process.wait()
        assert_gone(engines)


def assert_gone(engines: list[psutil.Process]) -> None:
    """Soon: what is not ended stays for ever. Nobody may be there to bury them: a zombie is gone."""
    end = time.monotonic() + PATIENCE_S / 2
    while not all(is_gone(engine.pid) for engine in engines):
        assert time.monotonic() < end, "an engine outlives its server"
        time.sleep(0.01)


def ports() -> tuple[int, int]:
    """Two that are free."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.05)


async def status(client: httpx.AsyncClient, path: str) -> int:
    try:
        return (await client.get(path)).status_code
    except httpx.TransportError:
        return 0


def body(place: int, count: int) -> dict[str, Any]:
    return {
        "prompt": [place % 100],
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(
    client: httpx.AsyncClient, place: int, count: int, begun: asyncio.Event | None = None
) -> tuple[str, int, list[str]]:
    """(text, completion tokens by its usage, messages of errors) of one streamed completion. `begun` is set when its head has
    come: from then on an error is an event of it, before that it is a status of its own."""
    text, counted, errors = "", 0, []
    async with client.stream("POST", "/v1/completions", json=body(place, count)) as answer:
        assert answer.status_code == 200, await answer.aread()
        if begun is not None:
            begun.set()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                errors.append(told["error"]["message"])
                continue
            text += "".join(choice["text"] for choice in told["choices"])
            counted = (told.get("usage") or {}).get("completion_tokens", counted)
    return text, counted, errors


def clients(port: int) -> httpx.AsyncClient:
    # httpx may close a connection that has rested for so long while it hands it to somebody: then that one fails.
    limits = httpx.Limits(max_connections=500, keepalive_expiry=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits)


def test_it_serves_with_a_full_disk_and_tells_200_clients_of_the_death_of_the_engine(
    fake_dir: Path, launch: Launch, tmp_path: Path
) -> None:
    port, admin_port = ports()

    async def main(command: Command) -> None:
        async with clients(port) as client, clients(admin_port) as admin:
            await until(lambda: _is(client, "/livez", 200))
            if await status(client, "/readyz") == 503:  # it may be quick
                early = await client.post("/v1/completions", json=body(1, 1))
                assert early.status_code in (200, 503)
                assert early.status_code == 200 or "retry-after" in early.headers
            await until(lambda: _is(client, "/readyz", 200))
            whole, counted, errors = await stream(client, 7, 50)
            assert (counted, errors) == (50, [])
            again = await client.post("/v1/completions", json=body(7, 50) | {"stream": False, "stream_options": None})
            assert again.json()["choices"][0]["text"] == whole

            begun = [asyncio.Event() for _ in range(200)]
            running = [asyncio.create_task(stream(client, place, 4000, one)) for place, one in enumerate(begun)]
            await asyncio.wait_for(asyncio.gather(*(one.wait() for one in begun)), PATIENCE_S)
            # One more, whose first word cannot come.
            engine = command.engine
            engine.suspend()
            late = asyncio.create_task(client.post("/v1/completions", json=body(1, 5)))
            await until(lambda: _are_open(admin, 201))
            engine.kill()
            ends = await asyncio.gather(*running)
            assert all(len(errors) == 1 and "signal 9" in errors[0] for _, _, errors in ends)
            refused = await late
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
            assert "signal 9" in refused.json()["error"]["message"]
            await until(lambda: _is(client, "/readyz", 200))
            assert (await stream(client, 7, 50))[0] == whole
            text = (await admin.get("/metrics")).text
            for series in SERIES:
                assert series.name in text, series.name
            assert 'finished_reason="engine_dead",model_name' in text
            lost = [line for line in text.splitlines() if line.startswith("blocktable:log_lines_lost_total")]
            assert sum(float(line.split()[-1]) for line in lost) > 0, "the disk is full"
            assert (await admin.post("/reset_prefix_cache")).status_code == 200
            assert (await admin.get("/debug/stall")).json()["state"] == "ready"
            assert (await admin.get("/debug/explain/nobody")).status_code == 404
            assert (await client.get("/metrics")).status_code == 404, "nothing of the admin's on the clients' port"
            assert (await client.get("/debug/stall")).status_code == 404

    # The streams are longer than any machine takes to begin them all, and their blocks suffice for that.
    flags = [f"--port={port}", f"--admin-port={admin_port}", "--num-blocks=120000"]
    with serving(fake_dir, tmp_path, *flags, log=Path("/dev/full"), fake_step_ms=50.0) as command:
        asyncio.run(asyncio.wait_for(main(command), 2 * PATIENCE_S))


def test_the_first_signal_drains_and_the_log_tells_of_it(fake_dir: Path, launch: Launch, tmp_path: Path) -> None:
    port, admin_port = ports()

    async def main(command: Command) -> None:
        async with clients(port) as client:
            await until(lambda: _is(client, "/readyz", 200))
            running = [asyncio.create_task(stream(client, place, 400)) for place in range(20)]
            await until(lambda: _runs(client, 20))
            command.send(signal.SIGTERM)
            await until(lambda: _is(client, "/readyz", 503))
            assert await status(client, "/livez") == 200
            refused = await client.post("/v1/completions", json=body(1, 5))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            for _, counted, errors in await asyncio.gather(*running):
                assert (counted, errors) == (400, [])

    flags = [f"--port={port}", f"--admin-port={admin_port}"]
    with serving(fake_dir, tmp_path, *flags, fake_step_ms=10.0) as command:
        asyncio.run(asyncio.wait_for(main(command), 2 * PATIENCE_S))
        assert command.process.wait(timeout=PATIENCE_S) == 0
        lines = command.log.read_text().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    events = [line["event"] for line in told if "event" in line]
    assert events[:3] == ["engine.starting", "engine.ready", "server.started"]
    assert [event for event in events if event.startswith("server.d")] == ["server.drain_begun", "server.drain_ended"]
    assert events[-1] == "server.stopped"
    ended = [line for line in told if line.get("event") == "request.ended"]
    assert [(line["how"], line["output_tokens"]) for line in ended].count(("length", 400)) == 20
    assert all(line["request_id"] and "prompt_token_ids" not in line for line in ended)
    assert "Traceback" not in "\n".join(lines)


def test_after_the_patience_the_rest_is_aborted_and_a_second_signal_ends_at_once(
    fake_dir: Path, launch: Launch, tmp_path: Path
) -> None:
    port, admin_port = ports()
    flags = [f"--port={port}", f"--admin-port={admin_port}"]

    async def begin(command: Command) -> None:
        async with clients(port) as client:
            await until(lambda: _is(client, "/readyz", 200))
            begun = asyncio.Event()
            running = asyncio.create_task(stream(client, 1, 4000, begun))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            command.send(signal.SIGTERM)
            if "--drain-timeout-s=0.5" in command.process.args:  # type: ignore[operator]
                _, counted, errors = await running
                assert counted < 4000
                assert errors
                assert "shutting down" in errors[0]
                return
            await until(lambda: _is(client, "/readyz", 503))
            engine = command.engine
            command.send(signal.SIGTERM)
            assert await asyncio.to_thread(command.process.wait, PATIENCE_S / 2) == 128 + signal.SIGTERM
            assert_gone([engine])
            await asyncio.gather(running, return_exceptions=True)

    with serving(fake_dir, tmp_path, *flags, "--drain-timeout-s=0.5", fake_step_ms=10.0) as command:
        asyncio.run(asyncio.wait_for(begin(command), PATIENCE_S))
        assert command.process.wait(timeout=PATIENCE_S) == 0
    with serving(fake_dir, tmp_path, *flags, fake_step_ms=10.0) as command:
        asyncio.run(asyncio.wait_for(begin(command), PATIENCE_S))


def test_what_cannot_be_served_is_one_line_and_exit_code_2(fake_dir: Path, launch: Launch, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            f"--port={taken.getsockname()[1]}": "in use",
            "--host=0.0.0.0": "API keys",
            "--max-num-seqs=0": "max_num_seqs=0",
            "--api-key-file=/nowhere": "cannot be read",
            "--config=/nowhere": "cannot be read",
        }
        for flag, match in cases.items():
            line = [sys.executable, "-m", "blocktable", "serve", str(fake_dir), "--admin-port=0", flag]
            done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            assert done.returncode == 2, (flag, done.stderr)
            assert match in done.stderr.splitlines()[-1], done.stderr
            assert "Traceback" not in done.stderr


def test_a_mistyped_path_is_told_before_an_engine_is_started() -> None:
    line = [sys.executable, "-m", "blocktable", "serve", "/nowhere", "--port=0", "--admin-port=0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "no such directory" in done.stderr
    assert "engine.starting" not in done.stderr


@pytest.mark.parametrize("is_ignored", [False, True], ids=["drains", "is ignored by nohup"])
def test_without_keys_a_terminal_that_is_closed(is_ignored: bool, fake_dir: Path, launch: Launch, tmp_path: Path) -> None:
    port, admin_port = ports()

    async def main(command: Command) -> None:
        async with clients(port) as client:
            await until(lambda: _is(client, "/readyz", 200))
            begun = asyncio.Event()
            running = asyncio.create_task(stream(client, 1, 200, begun))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            command.send(signal.SIGHUP)
            assert (await running)[1:] == (200, [])
            if is_ignored:
                assert await status(client, "/readyz") == 200
                command.send(signal.SIGTERM)

    with ExitStack() as stack:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        try:
            flags = [f"--port={port}", f"--admin-port={admin_port}"]
            command = stack.enter_context(serving(fake_dir, tmp_path, *flags, fake_step_ms=10.0))
        finally:
            signal.signal(signal.SIGHUP, before)
        asyncio.run(asyncio.wait_for(main(command), PATIENCE_S))
        assert command.process.wait(timeout=PATIENCE_S) == 0


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """Processes that are started meanwhile begin with so many, and may ask for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_opens_as_many_files_as_it_may(fake_dir: Path, launch: Launch, tmp_path: Path) -> None:
    """Shells begin with 1,024, which as many idle clients use up."""
    port, admin_port = ports()

    async def main() -> None:
        async with clients(port) as client:
            await until(lambda: _is(client, "/readyz", 200))
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(150)]
            assert (await stream(client, 1, 5))[1:] == (5, [])
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()

    with ExitStack() as stack:
        with few_files(100):
            stack.enter_context(serving(fake_dir, tmp_path, f"--port={port}", f"--admin-port={admin_port}"))
        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_two_servers_that_start_at_once_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_shared() -> bool:
        with server_process._bound("127.0.0.1", 0) as first:
            try:
                with server_process._bound("127.0.0.1", first.getsockname()[1]):
                    return True
            except EndpointError:
                return False

    assert not is_shared()
    monkeypatch.setattr(socket.socket, "listen", lambda *_: None)
    assert is_shared(), "planted: an address is had before anybody listens"


@pytest.mark.parametrize(
    "planted_s, is_kept", [(None, True), (0.2, False)], ids=["as it is", "planted: no longer than clients"]
)
def test_a_connection_rests_longer_than_clients_keep_theirs(
    planted_s: float | None, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a request would meet its end now and then. httpx keeps one for 5 s."""
    if planted_s is not None:
        monkeypatch.setattr(server_process, "KEEP_ALIVE_S", planted_s)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> bytes:
        config = server_process._config(answer)
        config.lifespan = "off"
        server = server_process._QuietServer(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            try:
                return await asyncio.wait_for(reader.read(1), 5.5)
            except TimeoutError:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                return await reader.readuntil(b"\r\n\r\n")
            finally:
                writer.close()
                server.should_exit = True
                await serving

    assert (asyncio.run(main()) != b"") is is_kept


async def _is(client: httpx.AsyncClient, path: str, expected: int) -> bool:
    return await status(client, path) == expected


async def _runs(client: httpx.AsyncClient, count: int) -> bool:
    told: dict[str, Any] = (await client.get("/healthz/progress")).json()
    return bool(told["num_running"] == count)


async def _are_open(admin: httpx.AsyncClient, count: int) -> bool:
    text = (await admin.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith("blocktable:open_requests{")]
    return float(line.split()[-1]) == count

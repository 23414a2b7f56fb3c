"""Promise: random clients of the whole server over HTTP, good ones, bad ones, hurried ones, ones that leave at any byte, with
the engine and the server stopped now and then and no disk for the logs, leave no block, no request, no connection and no memory
behind; every answer ends in one way, and so does every request in the books."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from blocktable.server.tenants import new_key

from .processes import Launch
from .test_metrics import values
from .test_serve_command import PATIENCE_S, Command, clients, ports, serving, status, until

SOAK_S = float(os.environ.get("BLOCKTABLE_SOAK_S", "1800"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")

NUM_CLIENTS = 40
PATH = "/v1/completions"

BAD: list[tuple[Any, int]] = [
    (b"{", 400),
    (b"[]", 400),
    ({"prompt": []}, 400),
    ({"prompt": [10**6]}, 400),
    ({"prompt": "x", "max_tokens": 0}, 400),
    ({"prompt": "x", "no_such_field": 1}, 400),
    ({"prompt": "x", "logprobs": 21}, 400),
    ({"prompt": "x", "logit_bias": {"AI": 1}}, 400),
    ({"prompt": [1] * 9000}, 400),
    ({"prompt": "x", "n": 10**6}, 400),
]

CHOICE = ["yes", "no, never", "perhaps"]


class HttpCrowd:
    """Clients of two tenants for a while."""

    def __init__(self, command: Command, port: int, keys: list[str], rng: random.Random) -> None:
        self._command = command
        self._port = port
        self._keys = keys
        self._rng = rng
        self._texts: dict[tuple[int, int], str] = {}
        self.ends: Counter[str] = Counter()
        """Answers by how they ended, and refusals, of requests."""

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stop_and_continue(lambda: self._command.engine, end))
            group.create_task(self._stop_and_continue(lambda: psutil.Process(self._command.process.pid), end))
            for _ in range(NUM_CLIENTS):
                group.create_task(self._come_and_go(end))

    async def _come_and_go(self, end: float) -> None:
        # With a connection of its own, which never rests so long that the server closes it while the client sends.
        async with clients(self._port) as client:
            while time.monotonic() < end:
                match self._rng.randrange(12):
                    case 0 | 1:
                        await self._is_refused(client)
                    case 2 | 3 | 4 | 5:
                        await self._leaves()
                    case 6:
                        await self._chooses(client)
                    case _:
                        await self._reads(client)
                await asyncio.sleep(self._rng.expovariate(10))

    def _ask(self) -> tuple[tuple[int, int], dict[str, Any], dict[str, str]]:
        """(what decides the text, body, headers)"""
        rng = self._rng
        kind = (rng.randrange(50), rng.choice([1, 5, 60, 200]))
        body: dict[str, Any] = {"prompt": [7] * rng.choice([1, 40, 300]) + [kind[0]], "max_tokens": kind[1], "temperature": 0}
        if rng.random() < 0.8:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if rng.random() < 0.2:
            body |= {"deadline_s": rng.choice([0.001, 0.1, 1.0])}
        if rng.random() < 0.1:
            body |= {"logprobs": 2}
        return kind, body | {"n": rng.choice([1, 1, 3])}, {"authorization": f"Bearer {rng.choice(self._keys)}"}

    async def _reads(self, client: httpx.AsyncClient) -> None:
        kind, body, headers = self._ask()
        answer = await client.post(PATH, json=body, headers=headers)
        if answer.status_code == 429:
            self.ends["full"] += 1
            return
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line]
        if "stream" in body:
            assert lines[-1] == "data: [DONE]", lines[-1]
        told = [json.loads(line.removeprefix("data: ")) for line in (lines[:-1] if "stream" in body else lines)]
        texts, ends = [""] * body["n"], Counter[int]()
        for choice in (choice for one in told for choice in one["choices"]):
            texts[choice["index"]] += choice["text"]
            if (reason := choice["finish_reason"]) is not None:
                ends[choice["index"]] += 1
                assert reason == "length" or (reason == "abort" and "deadline_s" in body), choice
        assert ends == dict.fromkeys(range(body["n"]), 1), "each answer ends once"
        whole = self._texts.get(kind)
        if told[-1]["usage"]["completion_tokens"] == kind[1] * body["n"]:
            assert set(texts) == {self._texts.setdefault(kind, texts[0])}
            self.ends["read"] += body["n"]
        else:
            assert "deadline_s" in body
            assert whole is None or all(whole.startswith(text) for text in texts)
            self.ends["hurried"] += body["n"]

    async def _chooses(self, client: httpx.AsyncClient) -> None:
        """A text with a shape."""
        _, body, headers = self._ask()
        shaped = {"prompt": body["prompt"], "max_tokens": 60, "structured_outputs": {"choice": CHOICE}}
        answer = await client.post(PATH, json=shaped, headers=headers)
        if answer.status_code == 429:
            self.ends["full"] += 1
            return
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["text"] in CHOICE
        assert choice["finish_reason"] == "stop"
        self.ends["chosen"] += 1

    async def _leaves(self) -> None:
        """In the middle of the request, or of the answer, or of nothing."""
        _, body, headers = self._ask()
        content = json.dumps(body).encode()
        head = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(content)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        whole = "\r\n".join([*head, "", ""]).encode() + content
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        sent = whole if self._rng.random() < 0.7 else whole[: self._rng.randrange(len(whole))]
        writer.write(sent)
        if sent is whole and self._rng.random() < 0.7:
            await reader.read(self._rng.randrange(1, 3000))
        writer.close()
        self.ends["left"] += body["n"]

    async def _is_refused(self, client: httpx.AsyncClient) -> None:
        body, expected = self._rng.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = self._keys[0] if self._rng.random() < 0.8 else "nobody's"
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        answer = await client.post(PATH, content=content, headers=headers)
        assert answer.status_code == (expected if key != "nobody's" else 401), answer.text
        assert answer.json()["error"]["message"]
        self.ends["refused"] += 1

    async def _stop_and_continue(self, process: Callable[[], psutil.Process], end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            process().send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            process().send_signal(signal.SIGCONT)


async def settled(admin: httpx.AsyncClient, patience_s: float) -> dict[str, float]:
    """Series with their sums, once nothing runs."""
    found: dict[str, float] = {}

    async def is_settled() -> bool:
        told = values((await admin.get("/metrics")).content)
        found.update({name: sum(of.values()) for name, of in told.items()})
        kinds = {json.loads(labels)["kind"]: value for labels, value in told.get("blocktable:kv_blocks", {}).items()}
        found["free"], found["all"] = kinds.get("free", 0.0), kinds.get("all", -1.0)
        for labels, value in told.get("vllm:request_success", {}).items():
            found[f"ended by {json.loads(labels)['finished_reason']}"] = value
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "blocktable:open_requests")
        return all(found.get(name) == 0 for name in busy) and found["free"] == found["all"] - 1

    await until(is_settled, patience_s)
    return found


async def check_books(admin: httpx.AsyncClient, ends: Counter[str], found: dict[str, float]) -> None:
    """Every request ended in one way: by the core's books, and by the server's beside the clients' own."""
    stats = (await admin.get("/dashboard/state")).json()["stats"]
    [num_answers] = re.findall(r"^vllm:request_params_n_sum{.*} (.*)$", (await admin.get("/metrics")).text, re.MULTILINE)
    # Each answer has an end in both books; who leaves at once may not have come there.
    assert stats["submitted"] <= stats["finished"] + stats["aborted"] + stats["queue_expired"] <= float(num_answers), stats
    # Of those that leave nobody knows how far they came.
    answered = sum(found.get(f"ended by {how}", 0) for how in ("length", "stop", "abort"))
    mine = ends["read"] + ends["hurried"] + ends["chosen"]
    assert mine <= answered <= mine + ends["left"], (ends, answered)
    refused = ends["refused"] + ends["full"]
    assert refused <= found["blocktable:requests_refused"] <= refused + ends["left"], (
        ends,
        found["blocktable:requests_refused"],
    )
    assert found.get("ended by left", 0) <= ends["left"]
    known = {"length", "stop", "abort", "left", "QueueFullError", "InvalidInputError"}
    assert {name for name in found if name.startswith("ended by ")} <= {f"ended by {how}" for how in known}


async def watch(command: Command, every_s: float, seen: list[tuple[float, ...]]) -> None:
    """Memory of the server and of the engine in MiB, now and then, until it is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        seen.append(tuple(round(one.memory_info().rss / 2**20, 1) for one in processes(command)))


def processes(command: Command) -> tuple[psutil.Process, psutil.Process]:
    """The server's and the engine's."""
    return psutil.Process(command.process.pid), command.engine


def num_descriptors(command: Command) -> int:
    """That both have open."""
    return sum(one.num_fds() for one in processes(command))


def stand_a_crowd(
    folder: Path,
    fake_dir: Path,
    rng: random.Random,
    seconds: float,
    tell: Callable[[str], None],
    patience_s: float = PATIENCE_S,
    **faults: Any,
) -> None:
    keys, lines = zip(*(new_key(tenant) for tenant in ("a", "b")))
    (folder / "keys").write_text("\n".join(lines))
    port, admin_port = ports()
    seen: list[tuple[float, ...]] = []

    async def main(command: Command) -> None:
        async with clients(port) as client, clients(admin_port) as admin:
            await until(lambda: _is_ready(client))
            crowd = HttpCrowd(command, port, list(keys), rng)
            await crowd.run(min(seconds / 3, 60))
            before, open_before = await settled(admin, patience_s), num_descriptors(command)
            watching = asyncio.create_task(watch(command, seconds / 10, seen))
            await crowd.run(seconds)
            watching.cancel()
            after = await settled(admin, patience_s)
            await until(lambda: _are_closed(command, open_before), patience_s)
            await check_books(admin, crowd.ends, after)
        assert set(KINDS) <= set(crowd.ends)
        assert after["blocktable:engine_deaths"] == 0
        assert after["blocktable:log_lines_lost"] > before["blocktable:log_lines_lost"], "there is no disk for the log"
        grown = {name: (after[series] - before[series]) / 2**20 for name, series in RESIDENT.items()}
        assert max(grown.values()) < 64, f"memory is flat: {grown}"
        tell(
            f"over HTTP for {seconds:g} s: {dict(crowd.ends)}; more MiB: { ({name: round(n, 1) for name, n in grown.items()}) }"
            f"; MiB of server and engine meanwhile: {seen}"
        )

    flags = [f"--port={port}", f"--admin-port={admin_port}", f"--api-key-file={folder / 'keys'}", "--num-blocks=2500"]
    flags += ["--max-num-seqs=32", "--policy=fair", "--overlap-depth=2", "--pin-budget=100"]
    # The machine may have something else to do for a minute.
    flags += ["--body-timeout-s=300", "--write-timeout-s=300"]
    with serving(fake_dir, folder, *flags, log=Path("/dev/full"), **faults) as command:
        asyncio.run(asyncio.wait_for(main(command), 2 * seconds + 240))


RESIDENT = {"server": "blocktable:server_resident_bytes", "engine": "blocktable:engine_resident_bytes"}
KINDS = ("read", "hurried", "chosen", "left", "refused")


async def _are_closed(command: Command, open_before: int) -> bool:
    """The connections of all that left."""
    return num_descriptors(command) < open_before + 8


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return await status(client, "/readyz") == 200


def test_a_crowd_for_seconds_leaves_nothing(
    fake_dir: Path, launch: Launch, tmp_path: Path, rng: random.Random, tell: Callable[[str], None]
) -> None:
    stand_a_crowd(tmp_path, fake_dir, rng, 6.0, tell)


def test_blocks_that_are_kept_when_a_client_leaves_are_caught(
    fake_dir: Path, launch: Launch, tmp_path: Path, rng: random.Random, tell: Callable[[str], None]
) -> None:
    with pytest.raises(AssertionError, match="it did not come"):
        stand_a_crowd(tmp_path, fake_dir, rng, 6.0, tell, patience_s=5.0, fake_leaks=True)


def test_memory_that_is_kept_of_each_request_is_caught(
    fake_dir: Path, launch: Launch, tmp_path: Path, rng: random.Random, tell: Callable[[str], None]
) -> None:
    with pytest.raises(AssertionError, match="memory is flat"):
        stand_a_crowd(tmp_path, fake_dir, rng, 6.0, tell, fake_hoards=True)


def test_a_request_that_ends_twice_in_the_books_is_caught() -> None:
    """So is one that no client knows of."""
    stats = {"submitted": 5, "finished": 4, "aborted": 1, "queue_expired": 0}
    ends, found = (
        Counter(read=4, left=1, refused=2),
        {"ended by length": 4.0, "ended by left": 1.0, "blocktable:requests_refused": 2.0},
    )

    def check(ends: Counter[str], found: dict[str, float], **changes: int) -> None:
        async def main() -> None:
            def answer(request: httpx.Request) -> httpx.Response:
                if request.url.path == "/metrics":
                    return httpx.Response(200, text='vllm:request_params_n_sum{model_name="fake"} 5.0\n')
                return httpx.Response(200, json={"stats": stats | changes})

            transport = httpx.MockTransport(answer)
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
                await check_books(admin, ends, found)

        asyncio.run(main())

    check(ends, found)
    for changes in ({"finished": 5}, {"aborted": 0}):
        with pytest.raises(AssertionError):
            check(ends, found, **changes)
    for name, value in (
        ("ended by length", 6.0),
        ("ended by left", 2.0),
        ("blocktable:requests_refused", 1.0),
        ("ended by KeyError", 1.0),
    ):
        with pytest.raises(AssertionError):
            check(ends, found | {name: value})


@pytest.mark.slow
@pytest.mark.timeout(int(2 * SOAK_S) + 300)
def test_a_crowd_for_half_an_hour_leaves_nothing(
    fake_dir: Path, launch: Launch, tmp_path: Path, rng: random.Random, tell: Callable[[str], None]
) -> None:
    """`BLOCKTABLE_SOAK_S` changes how long."""
    stand_a_crowd(tmp_path, fake_dir, rng, SOAK_S, tell)

"""Owns a real server for tests: uvicorn on a free port of this machine, on a thread of its own.

Before: a test has an engine client, and keys or none. After: any HTTP client. Always: what the server logs as a fault of its
own fails the test that caused it.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn

from blocktable.server import http_protocol, reply
from blocktable.server.app import make_app
from blocktable.server.engine_client import EngineClient
from blocktable.server.limits import Limits
from blocktable.server.refusals import Refusals
from blocktable.server.serving import Serving
from blocktable.server.tenants import Tenants

PATIENCE_S = 120.0


class Faults(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Live:
    """A server that runs. `faults` has what it logged as errors; a test that expects some clears it."""

    def __init__(self, app: Any, limits: Limits, refusals: Refusals) -> None:
        self.app = app
        self.faults = Faults()
        self._clients: list[httpx.Client] = []
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        reply.let_go_of_slow_readers(self._socket, limits.write_timeout_s)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        http = http_protocol.counting_protocol(refusals, limits.body_timeout_s)
        config = uvicorn.Config(app, loop="asyncio", http=http, ws="none", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="test-server")

    def start(self) -> None:
        for name in ("uvicorn.error", "blocktable.server"):
            logging.getLogger(name).addHandler(self.faults)
        self._thread.start()
        with httpx.Client() as client:
            for _ in range(1000):
                try:
                    client.get(self.url + "/nowhere")
                    return
                except httpx.ConnectError:
                    threading.Event().wait(0.01)
        raise TimeoutError("the server did not start")

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"
        for name in ("uvicorn.error", "blocktable.server"):
            logging.getLogger(name).removeHandler(self.faults)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    @property
    def num_connections(self) -> int:
        """That are open."""
        return len(self._server.server_state.connections)

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._clients.append(
            httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False, **options)
        )
        return self._clients[-1]

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, http_client=self.client())


@contextmanager
def live(
    engine: EngineClient,
    tenants: Tenants | None = None,
    *,
    limits: Limits | None = None,
    names: tuple[str, ...] = ("tiny",),
    wrap: Callable[[Any], Any] = lambda app: app,
    refusals: Refusals | None = None,
    **tools: Any,
) -> Iterator[Live]:
    """A server over this engine, ended afterwards; it fails if the server logged a fault. `tools`: see `Serving.of`."""
    serving = Serving.of(engine, limits, names, refusals, **tools)
    app = make_app(serving, tenants or Tenants())
    server = Live(wrap(app), limits or Limits(), serving.refusals)
    server.start()
    try:
        yield server
    finally:
        server.stop()
    assert not [record.getMessage() for record in server.faults.records]


def events(body: str) -> list[Any]:
    """What a stream's events hold, `[DONE]` as it is."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def open_request(
    server: Live, path: str, body: Any, key: str | None = None, length: int | None = None, more: Sequence[str] = ()
) -> socket.socket:
    """A connection on which a request was sent and nothing has been read yet. `length`: how long the body says that it is;
    `more`: lines of its head."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    head += [f"Content-Length: {length or len(content)}"]
    head += [] if key is None else [f"Authorization: Bearer {key}"]
    head += more
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), PATIENCE_S)
    connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
    return connection


def wait_until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Raises `TimeoutError` if it does not come to be so."""
    for _ in range(int(patience_s * 200)):
        if is_so():
            return
        threading.Event().wait(0.005)
    raise TimeoutError(what)

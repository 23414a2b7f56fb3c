"""A serving process from its first socket to its last answer: listens, has the engine built, serves, drains, ends.

Before: `blocktable serve` has options and answers signals. After: the clients' app behind one port, `admin.py` behind
another, `supervisor.py` behind both. Always: ports are had before a model is loaded; health is answered from the first
moment to the last; the engine's process is over when `run` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

import uvicorn
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import EndpointError, EngineDeadError
from .admin import make_admin_app
from .engine_client import EngineClient
from .health import health_routes
from .http_protocol import counting_protocol
from .logs import Event, LineWriter, tell
from .metrics import Metrics
from .options import ServeOptions
from .process_client import EngineLaunch
from .refusals import Refusals
from .reply import let_go_of_slow_readers
from .request_watch import WatchedClient
from .start_report import concurrency, start_report
from .supervisor import Restarts, Supervisor
from .tracing import make_tracing

logger = logging.getLogger("blocktable.server")

GRACE_S = 5
"""Seconds that answers get to reach their clients when everything has ended."""

KEEP_ALIVE_S = 75
"""Seconds that a connection may rest between two requests: longer than clients and proxies keep theirs (5 to 60), so that none
sends a request into a connection that is being closed."""

BACKLOG = 4096
"""Connections that wait to be taken."""

MakeApp = Callable[[EngineClient, Sequence[Route], Refusals], ASGIApp]
"""Makes the clients' app, which asks that engine, answers those routes of health, and notes there whom it refuses. The engine
may not be ready yet."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one: a streamed token costs less on it."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


class ServerProcess:
    """Made and run on an event loop, once."""

    def __init__(
        self, options: ServeOptions, make_app: MakeApp, *, logs: LineWriter | None = None, launch: EngineLaunch | None = None
    ) -> None:
        self._options = options
        self._launch = _launch(options) if launch is None else launch
        restarts = Restarts(at_most=options.engine_restart)
        self._supervisor = Supervisor(self._launch, restarts, stall_s=options.stall_s)
        name, endpoint = options.served_model_name or options.model, options.otlp_traces_endpoint
        self._tracing = None if endpoint is None else make_tracing(endpoint, name)
        self._client = WatchedClient(self._supervisor, logs_prompts=options.log_prompts, tracing=self._tracing)
        refusals = self._refusals = Refusals()
        self._app = make_app(self._client, health_routes(self._client, stall_s=options.stall_s), refusals)
        self._metrics = Metrics(
            self._client,
            self._client.figures,
            num_deaths=lambda: self._supervisor.num_deaths,
            lost_log_lines=lambda: 0 if logs is None else logs.lost,
            model_name=name,
            refusals=refusals,
        )
        self._asked_to_end = asyncio.Event()

    @property
    def engine_process_id(self) -> int | None:
        """Of the engine's process, the newest."""
        return self._supervisor.process_id

    def end(self) -> None:
        """Drain, then have `run` return. Before the engine was ready: at once."""
        self._asked_to_end.set()

    async def run(self, say: Callable[[str], None]) -> EngineDeadError | None:
        """Serve until `end`, or until the engine died for good: then of what. `say` gets the start-up report.

        Raises `EndpointError`, or what building the engine raised; nothing listens then.
        """
        options, begun = self._options, time.monotonic()
        with _bound(options.host, options.port) as clients, _bound(options.admin_host, options.admin_port) as operators:
            admin = make_admin_app(self._client, self._metrics, stall_s=options.stall_s)
            head_s = options.limits.body_timeout_s
            configs = (
                _config(self._app, counting_protocol(self._refusals, head_s)),
                _config(admin, counting_protocol(Refusals(), head_s)),  # none of the clients' refusals
            )
            servers = [_QuietServer(config) for config in configs]
            let_go_of_slow_readers(clients, options.limits.write_timeout_s)
            tasks = [asyncio.create_task(server.serve([at])) for server, at in zip(servers, (clients, operators))]
            try:
                if not await self._is_started():
                    return None
                self._tell_start(say, begun, _url(clients), _url(operators))
                return await self._until_the_end()
            finally:
                for server in servers:
                    server.should_exit = True
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._supervisor.close()
                if self._tracing is not None:
                    await asyncio.to_thread(self._tracing.close)
                tell(logger, Event.SERVER_STOPPED, "everything is over")

    async def _is_started(self) -> bool:
        """Whether the engine was built before somebody asked to end."""
        building = asyncio.create_task(self._build())
        asked = asyncio.create_task(self._asked())
        try:
            await asyncio.wait([building, asked], return_when=asyncio.FIRST_COMPLETED)
            if not building.done():
                return False
            await building
            return True
        finally:
            building.cancel()
            asked.cancel()
            await asyncio.gather(building, asked, return_exceptions=True)

    async def _build(self) -> None:
        await self._supervisor.start()

    async def _asked(self) -> None:
        await self._asked_to_end.wait()

    async def _until_the_end(self) -> EngineDeadError | None:
        asked = asyncio.create_task(self._asked_to_end.wait())
        died = asyncio.create_task(self._supervisor.gave_up())
        await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            asked.cancel()
            return died.result()
        died.cancel()
        num_open = self._client.figures.num_open
        tell(logger, Event.DRAIN_BEGUN, f"{num_open} requests are open", num_open=num_open)
        is_drained = await self._client.drain(self._options.drain_timeout_s)
        tell(logger, Event.DRAIN_ENDED, "all ended" if is_drained else "the rest were aborted", is_drained=is_drained)
        return None

    def _tell_start(self, say: Callable[[str], None], begun: float, serves_at: str, admin_at: str) -> None:
        info, elapsed_s = self._supervisor.info, round(time.monotonic() - begun, 3)
        say(start_report(info, {"serves at": serves_at, "admin at": admin_at, "ready after": f"{elapsed_s:.1f} s"}))
        tell(
            logger,
            Event.SERVER_STARTED,
            f"ready after {elapsed_s} s",
            elapsed_s=elapsed_s,
            model=info.model,
            dtype=info.dtype,
            num_blocks=info.num_blocks,
            kv_bytes=info.num_blocks * info.bytes_per_block,
            concurrency=concurrency(info),
            serves_at=serves_at,
            admin_at=admin_at,
        )


class _QuietServer(uvicorn.Server):
    """Leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, http: type[asyncio.Protocol] | Literal["auto"] = "auto") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _launch(options: ServeOptions) -> EngineLaunch:
    given = dict(options.engine_options)
    return EngineLaunch(
        model=options.model,
        tokenizer=given.pop("tokenizer", None),
        options=given,
        log_level=options.log_level,
        log_is_json=options.log_format == "json",
    )


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at the address, as nobody else does. Raises `EndpointError`."""
    with contextlib.ExitStack() as held:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = held.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            # Until one listens, the system gives an address to several.
            bound.listen(BACKLOG)
        except OSError as error:
            raise EndpointError(f"{host}:{port}", error.strerror or str(error)) from None
        yield bound


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

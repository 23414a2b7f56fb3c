"""`blocktable serve`: what an operator runs in production.

Before: `command.py` has parsed the flags. After: `server/server_process.py`. Always: SIGTERM (or Ctrl-C) drains, the second
one ends the process now, SIGHUP has the file of keys read again (without one it drains too), and no process is left behind.
Exit codes: 0 asked to end, 1 the engine died for good, 2 bad input, 128 + signal at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import MissingExtraError
from ..model.small_model import resolve_shorthand
from ..model.source import resolve_source
from ..open_files import open_as_many_as_allowed

if TYPE_CHECKING:
    from ..server.logs import LineWriter
    from ..server.options import ServeOptions
    from ..server.serve_app import ServeApp

logger = logging.getLogger("blocktable.server")

DESCRIPTION = """\
Serve a model over OpenAI's API. Every option may also stand in the environment (BLOCKTABLE_MAX_NUM_SEQS=64) or in a TOML file
(--config FILE, max_num_seqs = 64); flags go before the environment, that before the file.
"""

EPILOG = """\
examples:
  blocktable serve smollm2                              the small model, on http://127.0.0.1:8000
  blocktable serve ./my-model --port 9000 --max-num-seqs 64 --num-blocks 20000
  blocktable serve --config /etc/blocktable.toml

SIGTERM lets running requests finish (--drain-timeout-s); a second one ends the process at once. SIGHUP reads the keys again.
exit codes: 0 asked to end, 1 the engine died for good, 2 bad input, 128 + signal ended at once
"""

NEEDS = ("starlette", "uvicorn", "msgspec", "prometheus_client")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every option."""
    from ..server import options

    options.add_options(parser)


def run(given: argparse.Namespace) -> int:
    """Serve until a signal or the end of the engine; returns the exit code."""
    check_extra()
    from ..server.logs import write_logs
    from ..server.options import read_options, unknown_variables
    from ..server.serve_app import ServeApp
    from ..server.server_process import loop_factory

    options = read_options(vars(given), os.environ)
    name = options.served_model_name or options.model
    options = replace(options, model=resolve_shorthand(options.model), served_model_name=name)
    resolve_source(options.model)  # a mistyped path is told now, and not by the engine's process
    app = ServeApp(options)
    open_as_many_as_allowed()
    logs = write_logs(options.log_level, is_json=options.log_format == "json")
    for line in unknown_variables(os.environ):
        logger.warning(line)
    if not options.log_requests:
        logging.getLogger("blocktable.requests").setLevel("WARNING")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(options, app, logs))
    finally:
        logs.end()


def check_extra() -> None:
    """Raises `MissingExtraError` naming the extra."""
    for module in NEEDS:
        if find_spec(module) is None:
            raise MissingExtraError("blocktable serve", "server", module)


def _say(text: str) -> None:
    """On standard error, if anybody can hear it: a full disk is no reason not to serve."""
    with suppress(OSError):
        # In one piece: the log writes to the same place, from a thread of its own.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


async def _serve(options: ServeOptions, app: ServeApp, logs: LineWriter) -> int:
    from ..server.server_process import ServerProcess

    server = ServerProcess(options, app, logs=logs)
    loop = asyncio.get_running_loop()
    seen = 0

    def on_signal(number: int) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            # The engine ends with this process: see `engine_process.end_with`.
            os._exit(128 + number)
        server.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if options.api_key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, app.read_keys)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a terminal that is closed, and no `nohup`
        loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP)
    try:
        died = await server.run(_say)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
    return 0 if died is None else 1

"""`blocktable serve` over the engine that counts: `python -m blocktable.bench.counting_server FOLDER OPTIONS`, OPTIONS in JSON.

Before: `serve.py` starts it as a process of its own. After: the same server as an operator's, over `counting_engine.py`.
Always: it says where it serves as `blocktable serve` does, and ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

from .counting_engine import OWN, split


def main(folder: str, options: Mapping[str, Any]) -> None:
    """Serve until SIGTERM."""
    from ..server.server_process import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(folder, options))


async def _serve(folder: str, options: Mapping[str, Any]) -> None:
    from ..server.options import read_options
    from ..server.process_client import EngineLaunch
    from ..server.serve_app import ServeApp
    from ..server.server_process import ServerProcess

    own, real = split(options, OWN)
    given = read_options({"model": folder, "port": 0, "admin_port": 0, "log_level": "warning", **real}, {})
    launch = EngineLaunch(
        model=folder,
        options={**given.engine_options, **{OWN + name: value for name, value in own.items()}},
        builder="blocktable.bench.counting_engine:build",
        log_level="warning",
    )
    server = ServerProcess(given, ServeApp(given), launch=launch)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
    await server.run(lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

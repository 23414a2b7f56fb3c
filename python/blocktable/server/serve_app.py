"""The clients' app of `blocktable serve`: keys, limits and names as the options say.

Before: `cli/serve.py` has options. After: `app.py`'s routes, asked for by `server_process.py`. Always: what the operator gave
is refused before anything is started.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from starlette.routing import Route
from starlette.types import ASGIApp

from .app import make_app
from .engine_client import EngineClient
from .options import ServeOptions
from .serving import Serving
from .tenants import Tenants


def make_serve_app(options: ServeOptions) -> Callable[[EngineClient, Sequence[Route]], ASGIApp]:
    """Makes the app over an engine. Raises `InvalidInputError` for a file of keys that cannot be used, or a host that needs
    one."""
    tenants = Tenants() if options.api_key_file is None else Tenants.from_file(options.api_key_file)
    tenants.check_host(options.host)
    names = () if options.served_model_name is None else (options.served_model_name,)

    def make(engine: EngineClient, health: Sequence[Route]) -> ASGIApp:
        serving = Serving.of(engine, options.limits, names)
        return make_app(serving, tenants, health=health, when_prepared=_settle_memory)

    return make


def _settle_memory() -> None:
    """What reading the tokenizer made stays: it is looked through by no collection any more."""
    gc.collect()
    gc.freeze()

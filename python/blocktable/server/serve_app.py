"""The clients' app of `blocktable serve`: keys, limits and names as the options say.

Before: `cli/serve.py` has options. After: `app.py`'s routes, asked for by `server_process.py`. Always: what the operator gave
is refused before anything is started; a file of keys that is read again and is bad changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import InvalidInputError
from .app import make_app
from .engine_client import EngineClient
from .garbage import settle_memory
from .logs import Event, tell
from .options import ServeOptions
from .refusals import Refusals
from .serving import Serving
from .tenants import Tenants

logger = logging.getLogger("blocktable.server")


class ServeApp:
    """Makes the app over an engine. Raises `InvalidInputError` for a file of keys that cannot be used, or a host that needs
    one."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._tenants = Tenants() if options.api_key_file is None else Tenants.from_file(options.api_key_file)
        self._tenants.check_host(options.host)

    def __call__(self, engine: EngineClient, health: Sequence[Route], refusals: Refusals) -> ASGIApp:
        """See `server_process.MakeApp`."""
        options = self._options
        name = options.served_model_name
        serving = Serving.of(
            engine,
            options.limits,
            () if name is None else (name,),
            refusals,
            tool_call_parser=options.tool_call_parser,
            has_auto_tool_choice=options.enable_auto_tool_choice,
        )
        return make_app(serving, self._tenants, health=health, when_prepared=settle_memory)

    def read_keys(self) -> None:
        """The file of keys may be another: from the next request on it counts. Nobody who is served is dropped. Never waits: a
        file may hang, as one on a disk that is far away, or a pipe."""
        path = self._options.api_key_file
        if path is not None:  # or there are none
            threading.Thread(target=self._read_keys, args=(path,), name="blocktable-keys", daemon=True).start()

    def _read_keys(self, path: str) -> None:
        try:
            num_keys = self._tenants.read_again(path)
        except InvalidInputError as error:
            tell(logger, Event.KEYS_REFUSED, f"the keys are as they were: {error}", level=logging.ERROR)
        else:
            tell(logger, Event.KEYS_READ, f"{num_keys} keys", num_keys=num_keys)

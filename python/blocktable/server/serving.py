"""What every route has: the engine, who reads prompts, the names of the model, the limits.

Before: `app.py` makes one. After: the routes. Always: nothing here belongs to a single request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.cpu_budget import usable_cpus
from .chunk_writer import WriteNow, write_nothing
from .engine_client import EngineClient, EngineState
from .errors import RETRY_ELSEWHERE_S, ApiError, unavailable
from .limits import Limits
from .protocol.models import Model
from .reader import Reader
from .refusals import Refusals

MAX_READERS = 4
"""Threads that read long prompts, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request beside its body: whose it is, and what stands in its path."""

    tenant: str | None
    path: dict[str, str]
    trace_headers: dict[str, str] = field(default_factory=dict)
    """Of W3C's trace context: the span of the client that this request is a part of."""
    write_now: WriteNow = write_nothing
    """Writes events of a stream where nothing has to be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One engine as it is served."""

    engine: EngineClient
    reader: Reader
    limits: Limits
    names: Sequence[str] = ()
    """Names that clients may call the model; empty = what the model itself is called."""
    tool_call_parser: str | None = None
    """How the model writes calls, one of `FORMATS`; None = as its chat template shows."""
    has_auto_tool_choice: bool = True
    """The model may choose whether it calls."""
    refusals: Refusals = field(default_factory=Refusals)
    started_s: int = field(default_factory=lambda: int(time.time()))  # since 1970

    @classmethod
    def of(
        cls,
        engine: EngineClient,
        limits: Limits | None = None,
        names: Sequence[str] = (),
        refusals: Refusals | None = None,
        *,
        tool_call_parser: str | None = None,
        has_auto_tool_choice: bool = True,
    ) -> Serving:
        """With a reader of its own, which `close` ends."""
        reader = Reader(engine, max(1, min(usable_cpus() - 1, MAX_READERS)))
        noted = Refusals() if refusals is None else refusals
        return cls(
            engine=engine,
            reader=reader,
            limits=limits or Limits(),
            names=names,
            tool_call_parser=tool_call_parser,
            has_auto_tool_choice=has_auto_tool_choice,
            refusals=noted,
        )

    def close(self) -> None:
        """End what was begun here; the engine is its owner's to end."""
        self.reader.close()

    @property
    def models(self) -> list[Model]:
        """Under each of its names. Raises `EngineDeadError` before the engine was ready."""
        info = self.engine.info
        names = self.names or (info.model,)
        return [Model(id=name, created=self.started_s, root=info.model, max_model_len=info.max_model_len) for name in names]

    def model_name(self, asked: str | None) -> str:
        """The name that an answer bears. Raises `ApiError` (404) for one that is not served."""
        models = self.models
        if asked is None:
            return models[0].id
        if all(asked != model.id for model in models):
            known = ", ".join(model.id for model in models)
            shown = asked if len(asked) <= 100 else asked[:100] + "…"
            raise ApiError(404, f"the model {shown!r} is not served here, but {known}", param="model", code="model_not_found")
        return asked

    def check_takes(self) -> None:
        """Raises `ApiError` (503) while no request for text is taken in."""
        match self.engine.state:
            case EngineState.READY:
                return
            case EngineState.STARTING:
                raise unavailable("the engine is starting", "engine_starting", retry_after_s=RETRY_ELSEWHERE_S)
            case EngineState.DRAINING:
                raise unavailable("the server is shutting down", "draining", retry_after_s=RETRY_ELSEWHERE_S)
            case EngineState.DEAD:
                raise unavailable("the engine is dead", "engine_dead")

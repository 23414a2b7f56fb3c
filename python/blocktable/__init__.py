"""blocktable: paged KV memory and scheduling in Rust, and an LLM engine around them.

The names of the core and the exceptions work with numpy alone. `LLM`, `SamplingParams`, `RequestOutput` and what else the
engine offers are loaded on first use; without its dependencies that raises `MissingExtraError`, which names the extra.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._core import BlockHasher, BlockPool, BlockTable, Commit, Plan, PrefixCache, Scheduler, __version__
from .errors import (
    AuditError,
    BeingWrittenError,
    BlocktableError,
    EndpointError,
    ForeignTableError,
    InvalidInputError,
    MissingExtraError,
    ModelLoadError,
    NeverFitsError,
    NoFreeRowError,
    NoSuchBlockError,
    NotHeldError,
    NotRunningError,
    OutOfBlocksError,
    PinBudgetError,
    QueueFullError,
    ReleasedError,
    StalledError,
    StepInFlightError,
    UnknownOptionError,
    UnknownRequestError,
    UnsupportedModelError,
    WrongStepError,
)

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.llm import LLM
    from .engine.outputs import CompletionOutput, RequestOutput
    from .engine.report import KVReport
    from .sampling.params import SamplingParams

__all__ = [
    "LLM",
    "AuditError",
    "BeingWrittenError",
    "BlockHasher",
    "BlockPool",
    "BlockTable",
    "BlocktableError",
    "Commit",
    "CompletionOutput",
    "EndpointError",
    "EngineConfig",
    "ForeignTableError",
    "InvalidInputError",
    "KVReport",
    "MissingExtraError",
    "ModelLoadError",
    "NeverFitsError",
    "NoFreeRowError",
    "NoSuchBlockError",
    "NotHeldError",
    "NotRunningError",
    "OutOfBlocksError",
    "PinBudgetError",
    "Plan",
    "PrefixCache",
    "QueueFullError",
    "ReleasedError",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "StalledError",
    "StepInFlightError",
    "UnknownOptionError",
    "UnknownRequestError",
    "UnsupportedModelError",
    "WrongStepError",
    "__version__",
]

_LATER = {
    "LLM": ".engine.llm",
    "CompletionOutput": ".engine.outputs",
    "EngineConfig": ".engine.config",
    "KVReport": ".engine.report",
    "RequestOutput": ".engine.outputs",
    "SamplingParams": ".sampling.params",
}
"""Names loaded on first use, and where they live. Only `LLM` needs the extra `engine`."""

_ENGINE_NEEDS = ("torch", "transformers", "tokenizers")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LLM":
        _need_engine_extra("blocktable.LLM")
    value = getattr(import_module(_LATER[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _need_engine_extra(what: str) -> None:
    for module in _ENGINE_NEEDS:
        if find_spec(module) is None:
            raise MissingExtraError(what, "engine", module)

"""blocktable: paged KV memory and scheduling in Rust, and an LLM engine around them.

The names of the core and the exceptions work with numpy alone. `LLM`, `SamplingParams`, `RequestOutput` and what else the
engine offers are loaded on first use; without its dependencies that raises `MissingExtraError`, which names the extra.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._core import BlockHasher, BlockPool, BlockRef, BlockTable, Commit, Plan, PrefixCache, Scheduler, __version__
from .errors import (
    AuditError,
    BeingWrittenError,
    BlocktableError,
    EndpointError,
    EngineDeadError,
    ForeignTableError,
    FrameError,
    InvalidGrammarError,
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
    ShutDownError,
    StalledError,
    StepInFlightError,
    UnknownOptionError,
    UnknownRequestError,
    UnsupportedModelError,
    WrongStepError,
)
from .openmp import load_torch

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.config import EngineConfig
    from .engine.llm import LLM
    from .engine.outputs import CompletionOutput, RequestOutput
    from .engine.report import KVReport
    from .engine.token_logprobs import Logprob
    from .sampling.params import RequestOutputKind, SamplingParams
    from .sampling.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "AuditError",
    "BeingWrittenError",
    "BlockHasher",
    "BlockPool",
    "BlockRef",
    "BlockTable",
    "BlocktableError",
    "Commit",
    "CompletionOutput",
    "EndpointError",
    "EngineConfig",
    "EngineDeadError",
    "ForeignTableError",
    "FrameError",
    "InvalidGrammarError",
    "InvalidInputError",
    "KVReport",
    "Logprob",
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
    "RequestOutputKind",
    "SamplingParams",
    "Scheduler",
    "ShutDownError",
    "StalledError",
    "StepInFlightError",
    "StructuredOutputsParams",
    "UnknownOptionError",
    "UnknownRequestError",
    "UnsupportedModelError",
    "WrongStepError",
    "__version__",
]

_LATER = {
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "CompletionOutput": ".engine.outputs",
    "EngineConfig": ".engine.config",
    "KVReport": ".engine.report",
    "Logprob": ".engine.token_logprobs",
    "RequestOutput": ".engine.outputs",
    "RequestOutputKind": ".sampling.params",
    "SamplingParams": ".sampling.params",
    "StructuredOutputsParams": ".sampling.structured",
}
"""Names loaded on first use, and where they live."""

_NEED_ENGINE = ("LLM", "AsyncLLM")

_ENGINE_NEEDS = ("torch", "transformers", "tokenizers")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEED_ENGINE:
        _need_engine_extra(f"blocktable.{name}")
        load_torch()
    value = getattr(import_module(_LATER[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _need_engine_extra(what: str) -> None:
    for module in _ENGINE_NEEDS:
        if find_spec(module) is None:
            raise MissingExtraError(what, "engine", module)

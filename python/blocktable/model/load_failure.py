"""Why a load failed, in one plain sentence.

Before: transformers, safetensors, gguf or torch raised something while reading files. After: a typed error goes to the user.
Always: the libraries' own traceback stays in the debug log, and out of the message.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import is_offline_mode

from ..errors import BlocktableError, ModelLoadError, UnsupportedModelError
from .source import ModelSource, SourceKind

logger = logging.getLogger("blocktable.model")

LONGEST = 300
"""Characters of a library's own message that are passed on."""

_HUB_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (hub_errors.GatedRepoError, "the repository is gated: ask for access on the hub and log in"),
    (hub_errors.RevisionNotFoundError, "the repository has no such revision"),
    (hub_errors.RepositoryNotFoundError, "no such directory here, and no such repository on the hub (or it is private)"),
)


def load_failure(source: ModelSource, part: str, error: BaseException) -> BlocktableError:
    """The typed error to raise in place of `error`, which came up while `part` of `source` was read."""
    logger.debug("reading %s of %s failed", part, source.text, exc_info=error)
    if isinstance(error, BlocktableError):
        return error
    if source.kind is SourceKind.HUB and (reason := _hub_reason(error)) is not None:
        return ModelLoadError(source.text, reason)
    said = _in_one_line(error)
    if "AutoModelForCausalLM" in said:
        return UnsupportedModelError(source.text, "it is not a causal language model that transformers knows")
    return ModelLoadError(source.text, _reason(source, part, error, said))


def _reason(source: ModelSource, part: str, error: BaseException, said: str) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory while reading {part}: {said}"
    if isinstance(error, pickle.UnpicklingError):  # torch's own text asks to switch its protection off
        return f"{part} could not be read: the file is broken, or holds more than tensors"
    if source.kind is SourceKind.GGUF:
        return f"{part} could not be read, the file may be cut or of a kind that transformers cannot read: {said}"
    return f"{part} could not be read: {said}"


def _hub_reason(error: BaseException) -> str | None:
    not_had = "is switched off (HF_HUB_OFFLINE)" if is_offline_mode() else "was not possible"
    for cause in _causes(error):
        for kind, reason in _HUB_REASONS:
            if isinstance(cause, kind):
                return reason
        if isinstance(cause, hub_errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
            return f"no such directory here, not in the hub's local cache, and asking the hub {not_had}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _in_one_line(error: BaseException) -> str:
    """The library's message in one line, cut where it gets long; its type where it says nothing."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        said = f"no entry {said}"
    return said if len(said) <= LONGEST else said[: LONGEST - 3] + "..."

"""Where a model comes from: what the text `model` means.

Before: the user's text. After: `checkpoint` reads the files. Always: nothing is read but the names of files and the first
bytes of a GGUF file, so a mistyped path is told before torch or transformers are even imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import InvalidInputError, ModelLoadError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
GGUF_MAGIC = b"GGUF"


class SourceKind(Enum):
    """The three forms that a model's files come in."""

    DIRECTORY = "directory"
    GGUF = "GGUF file"
    HUB = "hub id"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model's place: a local directory, one GGUF file, or a repository on the Hugging Face hub."""

    text: str
    """What the user wrote; names the model in every message."""
    kind: SourceKind
    location: str
    """The directory (for GGUF: the one that holds the file), or the hub id."""
    gguf_file: str | None = None
    """Name of the GGUF file inside `location`; None for the other kinds."""

    def file(self, name: str) -> Path:
        """The path of one of the files of a local source."""
        return Path(self.location) / name


def resolve_source(model: str) -> ModelSource:
    """What `model` means: a path that ends in .gguf is a GGUF file, an existing directory is one, `org/name` a hub id.

    Raises `ModelLoadError` for paths that do not exist, are empty or of another kind; `InvalidInputError` for no text.
    """
    if not isinstance(model, str) or not model.strip():
        raise InvalidInputError("model", model, "must be a directory, a path that ends in .gguf, or a hub id such as org/name")
    path = Path(os.path.expanduser(model))  # unlike Path's own, leaves an unknown ~user as it is
    if path.suffix.lower() == ".gguf":
        return _gguf_source(model, path)
    if path.is_dir():
        return _directory_source(model, path)
    if path.is_file():
        raise ModelLoadError(model, "is a file, but not a GGUF file (name ending in .gguf): give the directory that it is in")
    if not HUB_ID.fullmatch(model):
        raise ModelLoadError(model, "no such directory")
    return ModelSource(model, SourceKind.HUB, model)


def _gguf_source(model: str, path: Path) -> ModelSource:
    if path.is_dir():
        raise ModelLoadError(model, "is a directory, though its name ends in .gguf")
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except FileNotFoundError:
        raise ModelLoadError(model, "no such file") from None
    except OSError as error:
        raise ModelLoadError(model, f"cannot be read: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ModelLoadError(model, f"is no GGUF file: it begins with {magic!r} in place of {GGUF_MAGIC!r}")
    return ModelSource(model, SourceKind.GGUF, str(path.absolute().parent), path.name)


def _directory_source(model: str, path: Path) -> ModelSource:
    try:
        is_empty = next(path.iterdir(), None) is None
    except OSError as error:
        raise ModelLoadError(model, f"cannot be read: {error.strerror}") from None
    if is_empty:
        raise ModelLoadError(model, "the directory is empty")
    return ModelSource(model, SourceKind.DIRECTORY, str(path.absolute()))

"""The models that are served, and this server's version."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When the server started, seconds since 1970."""
    owned_by: Literal["blocktable"] = "blocktable"
    root: str
    """What the model itself is called."""
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(msgspec.Struct, frozen=True):
    """Of blocktable."""

    version: str

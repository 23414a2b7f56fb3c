"""`/v1/embeddings`: in the document, and refused, until the engine serves it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from .completions import Prompts
from .not_served import Off
from .usage import Usage


class EmbeddingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Texts or token ids to embed."""

    OFF: ClassVar[Off] = {}

    model: str | None = None
    input: Annotated[str, Meta(min_length=1)] | Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float]


class EmbeddingReply(msgspec.Struct, frozen=True, kw_only=True):
    """Of all inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage

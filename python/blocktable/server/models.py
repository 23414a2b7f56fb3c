"""`GET /v1/models`, `GET /v1/models/{id}` and `GET /version`.

Before: `endpoint.py` has a request without a body. After: it sends the reply.
"""

from __future__ import annotations

from .._core import __version__
from .protocol.models import Model, ModelList, Version
from .serving import Call, Serving


async def models(serving: Serving, call: Call, ask: None) -> ModelList:
    """The model under each of its names."""
    return ModelList(data=serving.models)


async def model(serving: Serving, call: Call, ask: None) -> Model:
    """The model under the name in the path."""
    name = serving.model_name(call.path["id"])
    return next(one for one in serving.models if one.id == name)


async def version(serving: Serving, call: Call, ask: None) -> Version:
    """Of blocktable."""
    return Version(version=__version__)

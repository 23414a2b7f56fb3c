"""The HTTP side as one ASGI application: the table of routes, the guard in front of it, errors of the routing itself.

Before: `blocktable serve`, or a test, has an engine client. After: uvicorn runs it. Always: every route of the table and
every path that is none is behind the guard; the only open ones are the health routes that the caller brings. A path of the
table that has no parameter is found in a dictionary: going through Starlette costs a chat a twentieth of its CPU time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .chat import chat
from .completions import complete
from .endpoint import Endpoint
from .errors import ApiError
from .guard import Guard
from .models import model, models, version
from .openapi import document
from .operation import Operation
from .protocol.chat import ChatReply, ChatRequest
from .protocol.completions import CompletionReply, CompletionRequest
from .protocol.embeddings import EmbeddingReply, EmbeddingRequest
from .protocol.models import Model, ModelList, Version
from .protocol.tokens import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from .serving import Serving
from .tenants import Tenants
from .tokens import detokenize, embed, tokenize

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue prompts.",
        handler=complete,
        body=CompletionRequest,
        reply=CompletionReply,
        makes_text=True,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Continue a conversation.",
        handler=chat,
        body=ChatRequest,
        reply=ChatReply,
        makes_text=True,
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        summary="Embed texts. Not served yet: refused.",
        handler=embed,
        body=EmbeddingRequest,
        reply=EmbeddingReply,
    ),
    Operation(method="GET", path="/v1/models", summary="The names of the model.", handler=models, reply=ModelList),
    Operation(method="GET", path="/v1/models/{id:path}", summary="One name of the model.", handler=model, reply=Model),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Token ids of a text or a conversation.",
        handler=tokenize,
        body=TokenizeRequest,
        reply=TokenizeReply,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="The text of token ids.",
        handler=detokenize,
        body=DetokenizeRequest,
        reply=DetokenizeReply,
    ),
    Operation(method="GET", path="/version", summary="The version of blocktable.", handler=version, reply=Version),
)


def make_app(
    serving: Serving,
    tenants: Tenants,
    *,
    health: Sequence[Route] = (),
    when_prepared: Callable[[], object] = lambda: None,
) -> Starlette:
    """The application. `health`: routes that answer without a key, from memory. `when_prepared` is called when all that is read
    at the start has been read.

    Whoever listens for it has to ask `Tenants.check_host` first. It closes `serving` when it ends, and not the engine.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        preparing = asyncio.ensure_future(_prepare(serving, when_prepared))
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            serving.close()

    endpoints = {(one.method, one.path): Endpoint(one, serving) for one in OPERATIONS}
    routes = [Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()]

    async def openapi(request: Request) -> Response:
        return Response(msgspec.json.encode(document(OPERATIONS, serving)), media_type="application/json")

    async def routing_error(request: Request, error: Exception) -> Response:
        """No such path, or another method, in the shape of every error."""
        if not isinstance(error, HTTPException):
            raise error
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"[:300], code="no_such_route")
        serving.refusals.note(told)
        headers = dict(error.headers or {})
        return Response(msgspec.json.encode(told.reply), told.status, headers, media_type="application/json")

    routes.append(Route("/openapi.json", openapi))
    app = _App(
        routes=[*routes, *health],
        exception_handlers={HTTPException: routing_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a path is right or wrong
    app.endpoints = endpoints
    app.front = Guard(app.find, tenants=tenants, open_paths=[route.path for route in health], refusals=serving.refusals)
    return app


class _App(Starlette):
    """Starlette's, behind a guard, for what is not found at once."""

    front: ASGIApp
    """What every request meets first."""
    endpoints: Mapping[tuple[str, str], Endpoint]
    """By method and path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def find(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the guard lets through."""
        endpoint = self.endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)


async def _prepare(serving: Serving, when_prepared: Callable[[], object]) -> None:
    await serving.reader.prepare()
    when_prepared()

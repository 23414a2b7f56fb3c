"""The door in front of all routes: who has no key gets nowhere, also not to learn which routes there are.

Before: uvicorn has the head of a request. After: `endpoint.py` finds the tenant in the scope. Always: only the paths that
were named open are reached without a key; a tenant comes from the key and from nothing else. Without any keys, only clients
of this machine that call it by a loopback name are served: a page in a browser that found a way here does not.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .refusals import Refusals
from .reply import send_error
from .tenants import Tenants, is_loopback

TENANT = "blocktable.tenant"
"""Where the scope holds it."""


class Guard:
    """Lets requests with a known key through to `app`, and all to the open paths."""

    def __init__(self, app: ASGIApp, tenants: Tenants, open_paths: Collection[str], refusals: Refusals | None = None) -> None:
        self._app = app
        self._refusals = Refusals() if refusals is None else refusals
        self._tenants = tenants
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            try:
                if scope["path"] not in self._open_paths:
                    scope[TENANT] = self._tenant(scope)
            except ApiError as error:
                self._refusals.note(error)
                await send_error(send, error)
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        _check_once(scope, b"host", b"authorization")
        headers = dict(scope["headers"])
        if self._tenants.is_open:
            _check_local(scope, headers.get(b"host", b"").decode("latin-1"))
            return None
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        tenant = self._tenants.tenant_of(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            said = "no API key was given: send `Authorization: Bearer KEY`" if not key else "the API key is not known"
            headers_out = {"www-authenticate": "Bearer"}
            raise ApiError(401, said, kind="authentication_error", code="invalid_api_key", headers=headers_out)
        return tenant


class AdminGuard:
    """The door of the admin port, which has no keys: of pages in a browser on that machine only its own find a way in."""

    def __init__(self, app: ASGIApp, open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                _check_page(scope)
            except ApiError as error:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


def _check_once(scope: Scope, *names: bytes) -> None:
    """Of two, somebody in front of us may have looked at the other one."""
    given = [name for name, _ in scope["headers"]]
    for name in names:
        if given.count(name) > 1:
            raise ApiError(400, f"the header {name.decode()} was given {given.count(name)} times", code="ambiguous_header")


def _check_page(scope: Scope) -> None:
    _check_once(scope, b"host", b"origin")
    headers = dict(scope["headers"])
    host, server = headers.get(b"host", b"").decode("latin-1"), scope.get("server")
    if server is not None and is_loopback(server[0]):
        _check_name(host)
    # What a browser says of the page that orders something.
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        raise _not_local("pages of elsewhere get nothing")


def _check_local(scope: Scope, host: str) -> None:
    client = scope.get("client")
    # A Unix socket has no client address.
    if client is not None and client[0] and not is_loopback(client[0]):
        raise _not_local("it serves its own machine only")
    _check_name(host)


def _check_name(host: str) -> None:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if not is_loopback(name.strip("[]").lower()):
        raise _not_local(f"call it localhost, not {name[:100]}")


def _not_local(message: str) -> ApiError:
    return ApiError(403, f"there are no API keys here: {message}", kind="permission_error", code="not_local")

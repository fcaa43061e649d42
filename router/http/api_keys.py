"""API keys: middleware that refuses requests without a valid one. Runs on the router's event loop."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import Unauthorized
from router.http.request_headers import api_key
from router.http.responses import error_response

OPEN_PATHS = ("/health", "/ready")
"""Load balancers have no key."""


class KeyGuard:
    """ASGI middleware: if keys are configured, all paths need one except those of `OPEN_PATHS`. `count` gets each refusal's
    status.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], count: Callable[[int], None]) -> None:
        self._app = app
        self._count = count
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = api_key(scope)
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]  # as received
        if any(matches):
            await self._app(scope, receive, send)
        else:
            refusal = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
            self._count(refusal.http_status)
            await error_response(refusal, scope, [(b"www-authenticate", b"Bearer")])(scope, receive, send)

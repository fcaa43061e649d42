"""Middleware that refuses requests without a valid API key, or beyond the key's limits. Router's event loop."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.base.errors import KvRelayError, Unauthorized
from router.http.client import Client, has_client, note_client, when_over
from router.http.key_limits import ApiKeys, KeyUse
from router.http.request_headers import api_key
from router.http.responses import error_response

OPEN_PATHS = ("/health", "/ready", "/ping")
"""Load balancers have no key."""
_OPEN = frozenset(path.encode() for path in OPEN_PATHS)


class KeyGuard:
    """ASGI middleware: if there are keys, all paths need one except those of `OPEN_PATHS`, compared as they were sent, and
    requests whose client the dashboard has admitted. `count` gets each refusal.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, count: Callable[[KvRelayError], None]) -> None:
        self._app = app
        self._count = count
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = not self._keys or scope.get("raw_path") in _OPEN or has_client(scope)
        if scope["type"] != "http" or is_open:
            await self._app(scope, receive, send)
            return
        use = self._keys.find(api_key(scope).encode("latin-1"))  # as received
        if use is None:
            refusal = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
            await self._refuse(refusal, scope, receive, send, [(b"www-authenticate", b"Bearer")])
            return
        note_client(scope, Client(use.name, use.key_class.highest_priority))
        if use.is_limited and scope["method"] == "POST":
            await self._limited(use, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _limited(self, use: KeyUse, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            use.begin()
        except KvRelayError as refusal:
            await self._refuse(refusal, scope, receive, send, use.headers())
            return

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *use.headers()]
            await send(message)

        try:
            await self._app(scope, receive, with_limits)
        finally:
            when_over(scope, use.end)

    async def _refuse(
        self, refusal: KvRelayError, scope: Scope, receive: Receive, send: Send, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._count(refusal)
        await error_response(refusal, scope, headers)(scope, receive, send)

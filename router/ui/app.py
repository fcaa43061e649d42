"""The dashboard's ASGI application: static pages and their JSON, mounted at `/ui`. Router process, event loop.

It is served on the public port while no API keys are set, and on the admin port. Pages carry no data and need no token.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.base.errors import KvRelayError, NotFound
from router.http.client import client_of, note_client
from router.ui.access import Access

PATH = "/ui"
CHAT_PATH = "/v1/chat/completions"
_STATIC = Path(__file__).parent / "static"
_POLICY = b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)

Endpoint = Callable[[Request], Awaitable[Response]]


def dashboard(
    access: Access,
    routes: Sequence[BaseRoute],
    chat: Callable[[], ASGIApp],
    on_call: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application. `routes` answer below `/ui/api` to callers that `access` admits.

    `chat()` returns the application that answers `CHAT_PATH`. `on_call()` is called for each admitted call: a page is open.
    """
    return Starlette(
        routes=[
            Route("/api/chat", _Chat(access, chat, on_call), methods=["POST"]),
            Mount("/api", routes=list(routes), middleware=[Middleware(_ApiGuard, access=access, on_call=on_call)]),
            Mount("/", StaticFiles(directory=_STATIC, html=True)),
        ],
        middleware=[Middleware(_SecurityHeaders)],
        exception_handlers={KvRelayError: _on_error, HTTPException: _on_http_error},
    )


def json_response(content: Any, status: int = 200) -> Response:
    """`content` as JSON that no cache keeps."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")
    return Response(data, status, {"cache-control": "no-store"}, "application/json")


class _Chat:
    """ASGI application: the router's own chat endpoint for callers that `access` admits.

    They need no API key and are distinguished by their address, like the API's clients without keys.
    """

    def __init__(self, access: Access, endpoint: Callable[[], ASGIApp], on_call: Callable[[], None]) -> None:
        self._access = access
        self._endpoint = endpoint
        self._on_call = on_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access.check_chat(scope)
        self._on_call()
        asked = {**scope, "path": CHAT_PATH, "raw_path": CHAT_PATH.encode(), "root_path": "", "query_string": b""}
        note_client(asked, client_of(scope))
        await self._endpoint()(asked, receive, send)


class _SecurityHeaders:
    """ASGI middleware: adds the headers that keep other sites' code and frames away from the pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *_HEADERS]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-cache"))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, with_headers)


class _ApiGuard:
    """ASGI middleware: asks `access` about each call, and tells `on_call`."""

    def __init__(self, app: ASGIApp, access: Access, on_call: Callable[[], None]) -> None:
        self._app = app
        self._access = access
        self._on_call = on_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access.check(scope)
        self._on_call()
        await self._app(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvRelayError)
    return json_response({"error": {"code": error.code, "message": error.message}}, error.http_status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = NotFound(f"{error.detail}: {request.method} {request.url.path[:200]}")
    known.http_status = error.status_code
    return await _on_error(request, known)

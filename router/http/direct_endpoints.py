"""Calls the endpoints of completions and embeddings directly, without FastAPI's routing and middleware; all other paths use FastAPI.

Router process, event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import KvRelayError

log = logging.getLogger(__name__)

HOT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
Endpoint = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]


class DirectEndpoints:
    """ASGI application that answers exactly as `app`. `guard` wraps the direct path, which skips `app`'s middleware."""

    def __init__(self, app: FastAPI, guard: Callable[[ASGIApp], ASGIApp]) -> None:
        self._app = app
        routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path in HOT_PATHS]
        self._endpoints = {route.path: cast("Endpoint", route.endpoint) for route in routes}
        self._on_error = cast("OnError", app.exception_handlers[Exception])
        self._guarded = guard(self._call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            # Clients join a base URL that ends with a slash and a path that begins with one.
            path, raw_path = scope["path"].lstrip("/"), scope["raw_path"].lstrip(b"/")
            scope = {**scope, "path": f"/{path}", "raw_path": b"/" + raw_path}
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints:
            await self._guarded(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._endpoints[scope["path"]](request)
        except Exception as error:
            if not isinstance(error, KvRelayError | ClientDisconnect):
                log.exception("%s failed", scope["path"])
            response = await self._on_error(request, error)
        await response(scope, receive, send)

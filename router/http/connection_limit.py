"""Refuses requests while too many connections are open, in the shape of the API that is asked. Router's event loop.

uvicorn has such a limit, too, and answers with plain text, of which clients show nothing but the status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import Unavailable
from router.http.responses import error_response

log = logging.getLogger(__name__)


class ConnectionLimit:
    """`app` behind the limit. Set `connections` to the server's open ones."""

    def __init__(self, app: ASGIApp, most: int, on_error: Callable[[int], None]) -> None:
        """`on_error`: called with the status of each refusal."""
        self.connections: Collection[object] = ()
        self._app = app
        self._most = most
        self._on_error = on_error
        self._is_full = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        full = len(self.connections) > self._most
        if full and not self._is_full:
            log.warning("refusing requests: more than %d connections are open", self._most)
        self._is_full = full
        if not full:
            await self._app(scope, receive, send)
            return
        error = Unavailable("this router has too many open connections; try again shortly")
        self._on_error(error.http_status)
        await error_response(error, scope, [(b"connection", b"close")])(scope, receive, send)

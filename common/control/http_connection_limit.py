"""Refuses HTTP requests while too many connections are open, in the error format of the API. Runs on the service's event loop.

uvicorn has such a limit, too, but answers with plain text, and clients then show only the status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)


class ConnectionLimit:
    """Passes requests to `app` within the limit. Set `connections` to the server's open connections."""

    def __init__(self, app: ASGIApp, most: int, refusal: Callable[[Scope], ASGIApp]) -> None:
        """`refusal` makes the answer to a request beyond the limit."""
        self.connections: Collection[object] = ()
        self._app = app
        self._most = most
        self._refusal = refusal
        self._is_full = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        full = len(self.connections) > self._most
        if full and not self._is_full:
            log.warning("refusing requests: more than %d connections are open", self._most)
        self._is_full = full
        await (self._refusal(scope) if full else self._app)(scope, receive, send)

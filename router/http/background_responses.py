"""Responses that are computed while no client waits: `background: true`, and their end by `/cancel`. Router's event loop.

The stored response tells the status: `in_progress`, then the answer, `failed` or `cancelled`. A client may ask any router; the
one that computes the answer looks every few seconds whether another one has written `cancelled`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.responses import Response

from common.base.errors import BadRequest, KvRelayError, Overloaded
from common.control.http_connection import DISCONNECTS, DisconnectListener
from router.http.client import count_tokens, go_on, used_tokens
from router.http.json_body import Json
from router.http.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

_MAX_RUNNING = 256
_LOOK_S = 2.0
"""Seconds between two looks for a cancellation by another router."""
_CANCELLED_WITHIN_S = 5.0
"""Time for a cancelled response to end."""

Serve = Callable[[Request], Awaitable[Response]]
"""Answers a request whole; what the client would get is in the store then."""


class BackgroundResponses:
    """The background responses that this router computes."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[DisconnectListener, asyncio.Task[None]]] = {}

    async def start(
        self, request: Request, tenant: str, store: ResponseStore, entry: StoredResponse, run: Serve
    ) -> Json:
        """Store a response that has begun, and go on with `run` behind this call. Returns: that response.

        Raises: Overloaded, Unavailable if it cannot be stored.
        """
        if len(self._running) >= _MAX_RUNNING:
            raise Overloaded(f"{_MAX_RUNNING} responses are computed in the background")
        response_id = entry.response["id"]
        await store.put(tenant, entry)
        await store.get(tenant, response_id)  # fails where it was not stored
        client = DisconnectListener()
        inner = Request({**request.scope, DISCONNECTS: client})
        task = asyncio.create_task(self._run(inner, tenant, store, entry, run))
        self._running[tenant, response_id] = client, task
        count_tokens(request.scope, lambda: used_tokens(inner.scope))
        go_on(request.scope, task)
        return entry.response

    async def _run(
        self, request: Request, tenant: str, store: ResponseStore, entry: StoredResponse, run: Serve
    ) -> None:
        response_id = entry.response["id"]
        client: DisconnectListener = request.scope[DISCONNECTS]
        watch = asyncio.create_task(self._watch(client, tenant, store, response_id))
        try:
            answer = await run(request)
            if client.gone:
                await store.put(tenant, _ended(entry, "cancelled"))
            elif answer.status_code >= 400:
                await store.put(tenant, _ended(entry, "failed", bytes(answer.body).decode(errors="replace")))
        except KvRelayError as error:
            await store.put(tenant, _ended(entry, "failed", error.message))
        except Exception:
            log.exception("%s failed", response_id)
            await store.put(tenant, _ended(entry, "failed", "the router failed"))
        finally:
            watch.cancel()
            del self._running[tenant, response_id]

    async def _watch(self, client: DisconnectListener, tenant: str, store: ResponseStore, response_id: str) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                found = await store.get(tenant, response_id)
            except KvRelayError:  # it is deleted, or Redis is away
                continue
            if found.response.get("status") == "cancelled":
                client.leave()
                return

    async def cancel(self, tenant: str, store: ResponseStore, response_id: str) -> Json:
        """End a response, wherever it is computed; one that has ended stays as it is. Returns: the response.

        Raises: NotFound, Unavailable; BadRequest if it is not computed in the background.
        """
        found = await store.get(tenant, response_id)
        if not found.response.get("background"):
            raise BadRequest("only responses with background=true can be cancelled", param="response_id")
        if found.response.get("status") != "in_progress":
            return found.response
        running = self._running.get((tenant, response_id))
        if running is None:
            await store.put(tenant, _ended(found, "cancelled"))
        else:
            client, task = running
            client.leave()
            await asyncio.wait([task], timeout=_CANCELLED_WITHIN_S)
        return (await store.get(tenant, response_id)).response


def _ended(entry: StoredResponse, status: str, message: str = "") -> StoredResponse:
    """The response that has ended without an answer."""
    error = {"code": "server_error", "message": message} if message else None
    return entry._replace(response={**entry.response, "status": status, "error": error})

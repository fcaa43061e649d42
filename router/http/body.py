"""Reads request bodies: content type, size limit, time limit. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from common.base.errors import KvRelayError, Overloaded, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from router.http.body_work import BodyWork
from router.http.client import client_of
from router.http.hosts import from_other_site
from router.http.openai.checks import shorten
from router.http.request_headers import header
from router.http.turns import FEW_BYTES
from router.requests.deadlines import Deadlines

_DRAIN_BYTES = 64 * 2**20
"""Most bytes of a too large body that are read and discarded before the router stops reading."""
_MOST_DIGITS = 18
"""Digits of a declared length that are converted."""
_SIMPLE = ("", "application/x-www-form-urlencoded", "text/plain")
"""Content types of HTTP clients for a body without an explicit type: Python's requests and Go, curl, fetch."""


def body_deadlines(timeout_s: float) -> Deadlines[asyncio.Task[Any]]:
    """The deadlines that `read_body` needs: each cancels a task that still waits for its body."""
    return Deadlines(timeout_s, lambda task: task.cancel())


async def read_body(request: Request, limit: int, deadlines: Deadlines[asyncio.Task[Any]], work: BodyWork) -> bytes:
    """The body of a request whose content type is JSON, not compressed. What the headers refuse is refused before the body is
    read; the connection discards it. A body that turns out too large is read and discarded up to `_DRAIN_BYTES`.

    Raises: UnsupportedMediaType, PayloadTooLarge, RequestTimeout, Overloaded.
    """
    kind = header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not _is_plain_call_of_ollama(request, kind):
        raise UnsupportedMediaType("the body must be sent with Content-Type: application/json")
    if (coding := header(request.scope, b"content-encoding").lower()) not in ("", "identity"):
        raise UnsupportedMediaType(f"the body must be sent as it is, without Content-Encoding: {shorten(coding)[1:-1]}")
    declared = header(request.scope, b"content-length")
    if declared.isdigit() and (len(declared) > _MOST_DIGITS or int(declared) > limit):
        raise _too_large(limit)
    refused: KvRelayError | None = None
    size = held = 0
    client = client_of(request.scope).name
    parts: list[bytes] = []
    task = asyncio.current_task()
    assert task is not None
    deadlines.add(task)
    try:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > limit and refused is None:
                refused = _too_large(limit)
            if refused is None and size > FEW_BYTES:
                try:
                    work.hold(client, size - held)
                    held = size
                except Overloaded as error:
                    refused = error
            if refused is None:
                parts.append(part)
            else:
                parts.clear()
                if size > _DRAIN_BYTES:
                    break
    except asyncio.CancelledError:
        if task in deadlines or task.uncancel():
            raise  # cancelled for another reason
        refused = refused or RequestTimeout(f"the body did not arrive within {deadlines.timeout_s:g} s")
    finally:
        deadlines.remove(task)
        work.let_go(client, held)
    if refused is not None:
        raise refused
    return b"".join(parts)


def _is_plain_call_of_ollama(request: Request, kind: str) -> bool:
    """Whether a call looks like those of ollama's documents, `curl URL/api/chat -d '{...}'`, for which ollama needs no type. A
    page of another site cannot make one: its browser says where it comes from."""
    path: str = request.scope["path"]
    is_page = header(request.scope, b"origin") or from_other_site(request.scope)
    return kind in _SIMPLE and path.startswith("/api/") and not is_page


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit} bytes that this server accepts")

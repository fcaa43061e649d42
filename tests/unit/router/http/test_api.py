"""Whose share of the cluster a request takes, and how long a client may leave its answer unread."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request

from router.http.api import Services, _origin, body_deadlines
from router.http.openai_types import CompletionRequest
from router.service import bind

SERVICES = Services(
    dispatcher=cast("Any", None),
    catalog=cast("Any", None),
    metrics=cast("Any", None),
    degraded=str,
    max_body_bytes=1,
    bodies=body_deadlines(1.0),
    api_keys=("key", "other"),
)


def tenant(authorization: str, services: Services = SERVICES, user: str | None = None) -> str:
    request = Request({"type": "http", "headers": [(b"authorization", authorization.encode())]})
    return _origin(request, services, CompletionRequest(model="m", prompt=["a"], user=user)).tenant


def test_a_key_is_one_tenant_however_its_header_is_spelled() -> None:
    spellings = ["Bearer key", "bearer key", "bEARER  key", "BEARER \t key "]
    assert len({tenant(spelling) for spelling in spellings}) == 1
    assert tenant("Bearer key") != tenant("Bearer other")
    assert "key" not in tenant("Bearer key")


def test_without_keys_the_user_is_the_tenant() -> None:
    assert tenant("Bearer key", replace(SERVICES, api_keys=()), "me") == "me"


def test_the_kernel_drops_a_client_that_never_reads() -> None:
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000

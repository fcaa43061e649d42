"""Which Host headers a router without API keys answers, and which it takes for a local caller's."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from router.http.hosts import HostGuard, from_other_site, host_name
from router.ui.access import is_local

ANSWERED = [
    "127.0.0.1:8000",
    "127.0.0.1",
    "10.1.2.3:80",
    "[::1]:8000",
    "[fe80::1]",
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
]
REFUSED = [
    "evil.example",
    "evil.example:8000",
    "evil@127.0.0.1",
    "evil:x@127.0.0.1:8000",
    "127.0.0.1@evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "127.0.0.1:8000/x",
    "127.0.0.1 evil.example",
    "127.0.0.1\\@evil.example",
    "[evil.example]",
    "127.0.0.1:99999999",
    "127.1",
    "router",
]


def status(host: str | None, *names: str, keys: object = (), path: bytes = b"/v1/models") -> int:
    found: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path.decode(), "raw_path": path, "headers": headers}
    guard = HostGuard(PlainTextResponse("served"), cast("Any", keys), names, lambda _: None)
    asyncio.run(guard(scope, cast("Any", None), send))
    return found[-1]


@pytest.mark.parametrize("host", [*ANSWERED, socket.gethostname(), None])
def test_addresses_and_own_names_are_answered(host: str | None) -> None:
    assert status(host) == 200


@pytest.mark.parametrize("host", REFUSED)
def test_other_names_are_refused_until_they_are_allowed_or_keys_are_set(host: str) -> None:
    assert status(host) == 403
    assert status(host, keys=("a key",)) == 200, "with keys nothing changes"
    assert status(host, "*") == 200
    for path in (b"/health", b"/ready", b"/ping", b"//health"):
        assert status(host, path=path) == 200


def test_allowed_names_are_answered_on_any_port() -> None:
    for host in ("router", "Router:8000", "router."):
        assert status(host, "router", "other") == 200
    assert status("evil.router", "router") == 403


@pytest.mark.parametrize("host", [*ANSWERED, *REFUSED])
def test_only_a_caller_that_addresses_this_host_is_local(host: str) -> None:
    scope = {"type": "http", "headers": [(b"host", host.encode())], "client": ("127.0.0.1", 1)}
    loopback = host_name(host) in ("127.0.0.1", "::1", "localhost")
    assert is_local(scope) == loopback
    assert loopback == (host in ANSWERED and "1.2.3" not in host and "fe80" not in host)


@pytest.mark.parametrize(
    ("site", "other"),
    [(None, False), ("none", False), ("same-origin", False), ("same-site", True), ("cross-site", True)],
)
def test_browsers_say_when_a_page_of_another_site_asks(site: str | None, other: bool) -> None:
    headers = [] if site is None else [(b"sec-fetch-site", site.encode())]
    assert from_other_site({"type": "http", "headers": headers}) == other

"""Which requests need a key, and what those of a key get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.http.api_keys import KeyGuard
from router.http.client import client_of
from router.http.key_limits import ApiKeys


def ask(guard: KeyGuard, path: bytes = b"/v1/x", key: bytes = b"", method: str = "POST", **more: Any) -> Message:
    """The start of the response."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer " + key)]
    scope = {"type": "http", "method": method, "raw_path": path, "path": "/health", "headers": headers, **more}
    asyncio.run(guard(scope, None, send))  # pyright: ignore[reportArgumentType]
    return sent[0]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b""})


def guarded(tmp_path: Path, limits: str = "") -> KeyGuard:
    file = tmp_path / "keys.toml"
    file.write_text(f'[classes.a]\n{limits}\n[keys]\n"the-key" = "a"')
    return KeyGuard(app, ApiKeys((), file), lambda _: None)


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/ping"])
def test_load_balancers_need_no_key(path: bytes, tmp_path: Path) -> None:
    assert ask(guarded(tmp_path), path)["status"] == 200


@pytest.mark.parametrize(
    "path",
    [
        b"/%68ealth",
        b"/health/",
        b"//health",
        b"/Health",
        b"/health/../v1/models",
        b"/health%00",
        b"/",
        b"/ui",
        b"/metrics",
    ],
)
@pytest.mark.parametrize("key", [b"", b"the-ke", b"the-key2", b"THE-KEY"])
def test_everything_else_needs_one_whatever_the_path_would_be_decoded(path: bytes, key: bytes, tmp_path: Path) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert ask(guarded(tmp_path), path, key, method)["status"] == 401


@pytest.mark.parametrize("key", ["clé-à", "Å"])
def test_a_key_may_end_with_bytes_that_are_spaces_in_latin_1(key: str) -> None:
    guard = KeyGuard(app, ApiKeys((key,)), lambda _: None)
    assert ask(guard, key=key.encode())["status"] == 200
    assert ask(guard, headers=[(b"x-api-key", b" " + key.encode() + b" ")])["status"] == 200


def test_a_scope_without_a_raw_path_is_refused(tmp_path: Path) -> None:
    assert ask(guarded(tmp_path), raw_path=None)["status"] == 401


def test_above_its_limits_a_key_gets_429_with_the_time_to_wait(tmp_path: Path) -> None:
    guard = guarded(tmp_path, "requests_per_minute = 1")
    first, second = ask(guard, key=b"the-key"), ask(guard, key=b"the-key")
    assert first["status"] == 200
    assert dict(first["headers"])[b"x-ratelimit-remaining-requests"] == b"0"
    assert second["status"] == 429
    headers = dict(second["headers"])
    assert int(headers[b"retry-after"]) == 60
    assert headers[b"x-ratelimit-limit-requests"] == b"1"
    assert headers[b"x-request-id"].startswith(b"req_")
    assert ask(guard, key=b"the-key", method="GET")["status"] == 200, "reading costs nothing"


def test_a_request_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    file = tmp_path / "keys.toml"
    file.write_text('[classes.a]\nconcurrency = 1\n[keys]\n"the-key" = "a"')
    guard = KeyGuard(failing, ApiKeys((), file), lambda _: None)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            ask(guard, key=b"the-key")


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"), ("/run/unix", "/run/unix")],
)
def test_without_a_key_a_client_is_its_address_or_network(address: str, name: str) -> None:
    assert client_of({"type": "http", "client": (address, 4711)}).name == name

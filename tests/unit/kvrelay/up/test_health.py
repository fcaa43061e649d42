"""What `kvrelay up` makes of a router's health, and which services answer its probes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.certificates import made

from common.base.errors import ConfigError
from kvrelay.up import health as probes
from kvrelay.up.health import HealthProbe, redis_answers, router_answers


def sees(monkeypatch: pytest.MonkeyPatch, health: dict[str, Any] | None) -> bool:
    async def answer(self: HealthProbe, url: str) -> dict[str, Any] | None:
        return health

    monkeypatch.setattr(HealthProbe, "health", answer)
    return asyncio.run(HealthProbe().sees("http://a", {"prefill": 1, "decode": 1, "pooling": 0}))


def test_the_start_waits_for_nodes_and_for_their_model_and_ends_where_the_model_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not sees(monkeypatch, None)
    assert not sees(monkeypatch, {"status": "ok", "prefill": 1, "decode": 0, "pooling": 0, "refused": []})
    assert not sees(monkeypatch, {"status": "unavailable", "prefill": 1, "decode": 2, "pooling": 0})
    assert sees(monkeypatch, {"status": "ok", "prefill": 1, "decode": 2, "pooling": 0})
    assert sees(monkeypatch, {"status": "degraded", "prefill": 1, "decode": 1, "pooling": 0})
    with pytest.raises(ConfigError, match="no tokenizer"):
        sees(monkeypatch, {"prefill": 1, "decode": 1, "refused": ["the model 'm': no tokenizer.json in /m"]})


@pytest.mark.parametrize(
    ("answers", "scheme", "answer", "well"),
    [
        (router_answers, "http", b"HTTP/1.1 200 OK\r\n\r\n", True),
        (router_answers, "http", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", True),
        (router_answers, "https", b"HTTP/1.1 200 OK\r\n\r\n", True),
        (router_answers, "http", b"+PONG\r\n", False),
        (router_answers, "http", b"", False),
        (router_answers, "http", None, False),
        (redis_answers, "redis", b"+PONG\r\n", True),
        (redis_answers, "redis", b"-LOADING\r\n", False),
        (redis_answers, "redis", None, False),
    ],
)
def test_a_service_answers_a_probe_if_it_says_what_its_kind_says(
    monkeypatch: pytest.MonkeyPatch,
    answers: Callable[[str], Awaitable[bool]],
    scheme: str,
    answer: bytes | None,
    well: bool,
) -> None:
    """None: it accepts the connection and stays silent."""
    monkeypatch.setattr(probes, "_TIMEOUT_S", 0.2 if answer is None else 10.0)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(str(made() / "node" / "cert.pem"), str(made() / "node" / "key.pem"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is not None:
            writer.write(answer)
            writer.close()

    async def probe() -> bool:
        async with await asyncio.start_server(
            serve, "127.0.0.1", 0, ssl=secured if scheme == "https" else None
        ) as here:
            return await answers(f"{scheme}://127.0.0.1:{here.sockets[0].getsockname()[1]}")

    assert asyncio.run(probe()) is well


def test_a_service_that_does_not_listen_does_not_answer() -> None:
    assert not asyncio.run(router_answers("http://127.0.0.1:1"))

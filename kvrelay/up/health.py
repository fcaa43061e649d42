"""Health probes of Redis and the routers of `kvrelay up`. Runs on the supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from common.base.errors import ConfigError

_TIMEOUT_S = 2.0
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - recognized, not bound


def connect_host(host: str) -> str:
    """The host part of a URL that reaches a listener on `host` from this machine."""
    reachable = _EVERY_INTERFACE.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


async def redis_answers(url: str) -> bool:
    """Whether the Redis of `kvrelay up` is ready for commands."""
    return await _first_line(url, b"PING\r\n") == b"+PONG\r\n"


async def router_answers(url: str) -> bool:
    """Whether the router at `url` answers, well or not."""
    line = await _first_line(url, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return line.startswith(b"HTTP/")


async def _first_line(url: str, request: bytes) -> bytes:
    """The first line of the answer to `request`; empty if none came in time. A client library would take milliseconds more."""
    address = urlsplit(url)
    secured = _unchecked() if address.scheme == "https" else None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=secured)
            try:
                writer.write(request)
                return await reader.readline()
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return b""


def _unchecked() -> ssl.SSLContext:
    """A TLS context for services on loopback, where the names of their certificates do not apply."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class HealthProbe:
    """Asks routers for their health over HTTP."""

    def __init__(self) -> None:
        # No proxy from the environment: the routers are on loopback.
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=_unchecked())

    async def health(self, url: str) -> dict[str, Any] | None:
        """The router's report about itself and its nodes, usable or not; None if it does not answer."""
        try:
            body = (await self._client.get(f"{url}/health")).json()
        except (httpx.HTTPError, ValueError):
            return None
        return cast("dict[str, Any]", body) if isinstance(body, dict) else None

    async def sees(self, url: str, counts: Mapping[str, int]) -> bool:
        """Whether the router at `url` serves requests and sees at least `counts[role]` usable nodes of each role, by the names
        of roles in `/health`.

        Raises: ConfigError if it cannot use the files of their model.
        """
        health = await self.health(url) or {}
        refused = health.get("refused")
        if isinstance(refused, list) and refused:
            raise ConfigError(str(cast("list[object]", refused)[0]))
        serves = health.get("status") in ("ok", "degraded")
        return serves and all(_count(health.get(role)) >= count for role, count in counts.items())

    async def close(self) -> None:
        await self._client.aclose()


def _count(value: Any) -> int:
    return value if isinstance(value, int) else -1

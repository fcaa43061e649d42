"""Admin ports over TLS: `kvrelay admin` and routers send the token only to services of their own authority."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support.certificates import made

from common.base.errors import ConfigError
from common.control.admin_server import AdminRoute, AdminServer
from common.security.tls import Credentials
from kvrelay.admin.client import AdminClient, AdminUnreachable
from router.admin_http import admin_http


async def asked(shown: str, own: str | None) -> object:
    """What the admin port of a service with the certificate `shown` answers `kvrelay admin`."""
    server = AdminServer("0.0.0.0", 0, "token", Credentials(str(made() / shown)))
    server.start([AdminRoute("GET", "/status", lambda _: {"a": 1})])
    url = f"https://127.0.0.1:{server.port}"
    client = AdminClient(url, "token", tls_dir=None if own is None else str(made() / own))
    try:
        return await asyncio.to_thread(client.get, "/status")
    finally:
        await server.close()


@pytest.mark.parametrize("shown", ["node", "router"])
def test_kvrelay_admin_asks_a_service_of_its_authority(shown: str) -> None:
    assert asyncio.run(asked(shown, "admin")) == {"a": 1}


@pytest.mark.parametrize(
    ("shown", "own"),
    [("stranger", "admin"), ("revoked", "admin"), ("admin", "admin"), ("node", None), ("node", "stranger")],
)
def test_kvrelay_admin_asks_nobody_else(shown: str, own: str | None) -> None:
    with pytest.raises(AdminUnreachable):
        asyncio.run(asked(shown, own))


def test_certificates_that_cannot_be_read_are_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        AdminClient("https://127.0.0.1:1", "token", tls_dir="/no/such")


async def asked_by_router(shown: str) -> int:
    server = AdminServer("0.0.0.0", 0, "token", Credentials(str(made() / shown)))
    server.start([AdminRoute("GET", "/status", lambda _: {"a": 1})])
    try:
        async with admin_http("token", 5, str(made() / "router")) as http:
            return (await http.get(f"https://127.0.0.1:{server.port}/status")).status_code
    finally:
        await server.close()


def test_a_router_asks_nodes_only() -> None:
    assert asyncio.run(asked_by_router("node")) == 200
    for other in ("router", "stranger", "revoked"):
        with pytest.raises(httpx.ConnectError):
            asyncio.run(asked_by_router(other))


def test_an_admin_port_on_loopback_is_plain_http() -> None:
    async def url() -> str:
        server = AdminServer("127.0.0.1", 0, "token", Credentials(str(made() / "node")))
        await server.close()
        return server.url

    assert asyncio.run(url()).startswith("http://127.0.0.1:")

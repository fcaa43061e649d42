"""The HTTP server's limits: idle and unread connections, file descriptors."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from common.base.errors import ConfigError
from common.config.service_configs import RouterConfig
from common.security.names import CERTIFICATE, KEY
from router.http.https import https_certificate
from router.http.server import _add_root, bind, http_server
from router.router import Router
from tests.support.certificates import made


def test_idle_connections_outlive_those_of_load_balancers() -> None:
    """Seen at others: one request in thousands gets a 502, whenever it goes out on a connection as the server closes it."""

    async def idle_s() -> float:
        config = RouterConfig()
        router = Router(config)
        try:
            return http_server(router, config, None).config.timeout_keep_alive
        finally:
            router.close()

    assert asyncio.run(idle_s()) > 60


def test_connections_leave_descriptors_for_the_links() -> None:
    """In a shell that allows few, as many do: more are taken where the hard limit allows them, else fewer clients are."""
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
from router.http.https import https_certificate
from router.http.server import _most_connections
print(_most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""

    def most(hard: int) -> list[int]:
        command = [sys.executable, "-c", program, str(hard)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert (f"only {hard} file descriptors are allowed" in done.stderr) == (hard == 1000)
        return list(map(int, done.stdout.split()))

    assert most(10_000) == [10_000 - 4096, 10_000]
    assert most(1000) == [500, 1000]


def test_beyond_the_limit_of_connections_a_client_is_told_why_in_its_own_api(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.http.server._most_connections", lambda: 2)

    async def main() -> None:
        config = RouterConfig(allowed_origins="*")
        router = Router(config)
        server = http_server(router, config, None)
        with bind("127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            serving = asyncio.create_task(server.serve([listening]))
            async with httpx.AsyncClient(base_url=url) as http:
                idle = [await asyncio.open_connection("127.0.0.1", listening.getsockname()[1]) for _ in range(2)]
                while len(server.server_state.connections) < 2:
                    await asyncio.sleep(0.01)
                for _ in range(2):
                    refused = await http.post("/v1/chat/completions", json={}, headers={"origin": "http://page"})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
                    assert "too many open connections" in refused.json()["error"]["message"]
                    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
                    assert refused.headers["access-control-allow-origin"] == "*"
                other = await http.post("/v1/messages", json={})
                assert other.json()["error"]["type"] == "overloaded_error"
                idle[0][1].close()
                while len(server.server_state.connections) > 1:
                    await asyncio.sleep(0.01)
                assert (await http.get("/ping")).status_code != 503
                idle[1][1].close()
            server.stop()
            await serving
        router.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert caplog.text.count("refusing requests: more than 2 connections are open") == 1


def test_the_kernel_drops_a_client_that_never_reads() -> None:
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


@pytest.mark.parametrize(
    ("path", "status", "location"),
    [
        ("/health/?x=%2F", 307, "/health?x=%2F"),
        ("//health/", 307, "/health"),
        ("/v1/responses/a%3Fb/", 307, "/v1/responses/a%3Fb"),
        ("/nothing/", 404, None),
        ("/v1/models/", 200, None),
    ],
)
def test_redirects_do_not_name_a_scheme_which_a_proxy_may_have_changed(
    path: str, status: int, location: str | None
) -> None:
    async def ask() -> httpx.Response:
        config = RouterConfig()
        router = Router(config)
        try:
            app = http_server(router, config, None).config.app
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                return await http.get(f"http://localhost{path}")
        finally:
            router.close()

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers.get("location")) == (status, location)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"ssl_certfile": "/no/such.pem"}, "No such file"),
        ({"ssl_keyfile": "/no/such.pem"}, "needs --ssl-certfile"),
        ({"ssl_certfile": __file__}, "cannot be used: it and its key must be in PEM"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_at_start(files: dict[str, str], reason: str) -> None:
    config = RouterConfig(**files)
    with pytest.raises(ConfigError, match=reason):
        https_certificate(config.ssl_certfile, config.ssl_keyfile)


def test_a_key_that_does_not_fit_or_has_a_passphrase_is_refused_without_a_question(tmp_path: Path) -> None:
    """OpenSSL would ask the terminal for the passphrase, at a renewal with the event loop waiting for the answer."""
    certificate, key = made() / "router" / CERTIFICATE, made() / "router" / KEY
    with pytest.raises(ConfigError, match="the key is of another one"):
        https_certificate(str(certificate), str(made() / "node" / KEY))
    encrypted = tmp_path / "encrypted.pem"
    way = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    encrypted.write_bytes(serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(pem, pkcs8, way))
    with pytest.raises(ConfigError, match="the key without a passphrase"):
        https_certificate(str(certificate), str(encrypted))


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(("accept", "status"), [("text/html", 303), ("*/*", 200)])
@pytest.mark.parametrize("dashboard", [PlainTextResponse("dashboard"), None])
def test_a_browser_is_led_to_the_dashboard_and_others_see_a_server(
    dashboard: PlainTextResponse | None, method: str, accept: str, status: int
) -> None:
    app = FastAPI()
    _add_root(app, "", dashboard)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return (await http.request(method, "/", headers={"accept": accept})).status_code

    assert asyncio.run(ask()) == (200 if dashboard is None else status)

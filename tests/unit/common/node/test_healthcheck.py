"""The health probe says what is wrong in one line, and never hangs."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.certificates import made

from common.control.links import Identity, Server
from common.control.messages import Message, NodeLoad, Ping, Pong
from common.node import healthcheck
from common.node.healthcheck import http_complaint, main, node_complaint


async def ask(load: NodeLoad | None, **options: float) -> str | None:
    """Probe a control socket whose owner answers with `load`, or not at all."""

    def on_message(identity: Identity, message: Message) -> None:
        assert isinstance(message, Ping)
        assert message.lease_s == 0
        if load is not None:
            server.send(identity, Pong("decode-x", "i1", load))

    server = Server("127.0.0.1", 0, on_message)
    try:
        return await node_complaint(server.address, **options)
    finally:
        await server.close()


def test_a_node_whose_loop_turns_is_well() -> None:
    assert asyncio.run(ask(NodeLoad(kv_blocks_total=10, step_age_s=0.2))) is None


def test_a_node_of_a_pooling_model_is_well_without_kv() -> None:
    assert asyncio.run(ask(NodeLoad(step_age_s=0.2))) is None


def test_a_node_without_its_model_is_not_ready() -> None:
    assert "still loading" in str(asyncio.run(ask(NodeLoad())))


def test_a_stuck_loop_is_reported() -> None:
    assert "completed an iteration 61 s ago" in str(asyncio.run(ask(NodeLoad(kv_blocks_total=10, step_age_s=61.0))))


def test_silence_has_a_deadline() -> None:
    assert "did not answer within 0.2 s" in str(asyncio.run(ask(None, timeout_s=0.2)))


@pytest.fixture
def health() -> Iterator[tuple[str, list[int]]]:
    """A router's stand-in: (url, [the status that it answers])."""
    status = [200]
    with serving(status) as port:
        yield f"http://127.0.0.1:{port}/health", status


@contextlib.contextmanager
def serving(status: list[int], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve at the port that this yields, as a router would."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()
            self.wfile.write(b'{"status": "unavailable"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_router_is_well_when_it_can_serve(health: tuple[str, list[int]]) -> None:
    url, status = health
    assert http_complaint(url) is None
    status[0] = 503
    assert "answers 503" in str(http_complaint(url))
    assert "unavailable" in str(http_complaint(url))


def test_a_router_with_a_certificate_is_asked_over_https(
    health: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container with KVRELAY_SSL_CERTFILE was never healthy."""
    url, _ = health
    monkeypatch.setenv("KVRELAY_SSL_CERTFILE", "none")
    assert main([url]) == 0
    certificate, key = str(made() / "router" / "cert.pem"), str(made() / "router" / "key.pem")
    monkeypatch.setenv("KVRELAY_SSL_CERTFILE", certificate)
    assert main([url]) == 1
    assert url.replace("http:", "https:") in capsys.readouterr().out
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving([200], context) as port:
        assert main([f"http://127.0.0.1:{port}/health"]) == 0
        assert main([f"https://127.0.0.1:{port}/health"]) == 0


@pytest.mark.parametrize("arguments", [[], ["decode-0"], ["tcp://127.0.0.1:1", "more"]])
def test_wrong_usage_is_told_from_ill_health(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.parametrize("address", ["tcp://nonsense", "http://127.0.0.1:1/health", "http://127.0.0.1:8x/health"])
def test_an_address_where_nobody_is_gives_exit_code_1_and_one_line(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([address]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("unset", ["", "none"])
def test_a_folder_of_certificates_that_is_not_set_is_none(
    unset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compose files set variables without a value to the empty string: the node ran without TLS, and was never healthy."""
    monkeypatch.setenv("KVRELAY_TLS_DIR", unset)
    monkeypatch.setattr(healthcheck, "node_complaint", _well)
    assert main(["tcp://127.0.0.1:1"]) == 0
    assert capsys.readouterr().out == ""


async def _well(address: str, *, credentials: object) -> None:
    assert credentials is None


def test_the_probe_loads_neither_torch_nor_a_web_framework() -> None:
    code = "import common.node.healthcheck, sys; sys.exit(any(m in sys.modules for m in ('torch', 'fastapi', 'httpx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

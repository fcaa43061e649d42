"""The admin port: authorization, and responses to bad requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from common.base.errors import ConfigError, NotFound
from common.control import admin_server
from common.control.admin_server import MAX_BODY_BYTES, AdminRoute, AdminServer, Call

TOKEN = "tökén-of-this-testà"  # ends with a byte that `str` takes for a space


def _fail(call: Call) -> object:
    raise NotFound(f"no {call.path['name']}")


def _bug(call: Call) -> object:
    raise RuntimeError("secret detail")


ROUTES = [
    AdminRoute("GET", "/status", lambda call: {"query": dict(call.query)}),
    AdminRoute("POST", "/echo", lambda call: dict(call.body)),
    AdminRoute("GET", "/things/{name}", _fail),
    AdminRoute("GET", "/bug", _bug),
]


def play(scene: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        server = AdminServer("127.0.0.1", 0, TOKEN)
        server.start(ROUTES)
        try:
            async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=5) as client:
                await scene(client)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def bearer(token: str, scheme: str = "Bearer") -> dict[bytes, bytes]:
    return {b"authorization": f"{scheme} {token}".encode()}


def test_without_the_token_every_path_is_refused() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        wrong = [{}, bearer("x"), bearer(TOKEN + "x"), bearer(TOKEN[:-1]), bearer(TOKEN, "Basic"), bearer("ÿ")]
        for headers in wrong:
            for method, path in (("GET", "/status"), ("POST", "/echo"), ("GET", "/nowhere"), ("DELETE", "/status")):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401, (headers, path)
                assert answer.json() == {
                    "error": {"code": "invalid_api_key", "message": "the admin token is missing or wrong"}
                }

    play(scene)


def test_beyond_the_limit_of_connections_requests_are_refused_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_server, "_MAX_CONNECTIONS", 2)

    async def scene(client: httpx.AsyncClient) -> None:
        client.headers = httpx.Headers(bearer(TOKEN))
        port = client.base_url.port
        assert port is not None
        assert (await client.get("/status")).status_code == 200
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while (answer := await client.get("/status")).status_code == 200:
            await asyncio.sleep(0)  # the server has not accepted both yet
        assert (answer.status_code, answer.headers["connection"]) == (503, "close")
        assert answer.json()["error"]["message"] == "the admin port has more than 2 open connections"
        for _, writer in idle:
            writer.close()

    play(scene)


def test_with_the_token_routes_answer_and_errors_have_their_status() -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        client.headers = httpx.Headers(bearer(TOKEN))
        assert (await client.get("/status?limit=3")).json() == {"query": {"limit": "3"}}
        assert (await client.post("/echo", json={"a": [1]})).json() == {"a": [1]}
        assert (await client.post("/echo")).json() == {}
        assert (await client.post("/echo", content=rb'{"a": "\ud83d\ude00"}')).json() == {"a": "😀"}
        for method, path, content, status, words in (
            ("GET", "/nowhere", b"", 404, "/nowhere"),
            ("DELETE", "/status", b"", 405, "DELETE"),
            ("GET", "/things/box", b"", 404, "no box"),
            ("POST", "/echo", b"{", 400, "not JSON"),
            ("POST", "/echo", b"[" * 100_000, 400, "not JSON"),
            ("POST", "/echo", b"[1]", 400, "not a JSON object"),
            ("POST", "/echo", rb'{"a": ["\udCff"]}', 400, "not Unicode"),
            ("POST", "/echo", b'"' + b"a" * MAX_BODY_BYTES + b'"', 413, "larger than"),
            ("GET", "/bug", b"", 500, "internal error"),
        ):
            answer = await client.request(method, path, content=content)
            assert answer.status_code == status, (path, answer.text)
            assert words in answer.json()["error"]["message"]
            assert "secret detail" not in answer.text
        assert (await client.get("/status")).status_code == 200

    play(scene)


def test_an_order_whose_client_has_gone_is_not_carried_out() -> None:
    """As after SIGSTOP: request and end of the connection are there when the process goes on."""
    done: list[object] = []

    async def main() -> None:
        server = AdminServer("127.0.0.1", 0, "t")
        server.start([AdminRoute("POST", "/drain", lambda call: done.append(call) or {})])
        try:
            order = b"POST /drain HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t\r\ncontent-length: 2\r\n\r\n{}"
            for is_patient in (False, True):
                with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
                    client.sendall(order)
                    if is_patient:
                        answer = await asyncio.to_thread(client.recv, 100)
                        assert answer.startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.3)
                assert len(done) == is_patient
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_without_a_token_there_is_no_admin_port() -> None:
    with pytest.raises(ConfigError, match="token"):
        AdminServer("127.0.0.1", 0, "")


@pytest.mark.parametrize("token", ["hidden\n", " hidden", "hid\x7fden"])
def test_token_that_is_not_valid_in_a_header_is_refused_at_start_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="line end") as caught:
        AdminServer("127.0.0.1", 0, token)
    assert "hid" not in str(caught.value)


def test_taken_port_is_reported_in_one_sentence() -> None:
    async def main() -> None:
        first = AdminServer("127.0.0.1", 0, TOKEN)
        try:
            with pytest.raises(ConfigError, match="cannot listen on"):
                AdminServer("127.0.0.1", first.port, TOKEN)
        finally:
            await first.close()

    asyncio.run(main())

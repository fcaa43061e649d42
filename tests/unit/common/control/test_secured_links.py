"""Control links over mutual TLS."""

from __future__ import annotations

import asyncio

import pytest
from support.certificates import made

from common.control.links import Link, Server
from common.control.messages import Abort, AttemptKey, Message
from common.security.tls import Credentials


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def send_over(server_as: str, client_as: str | None, count: int = 3) -> tuple[list[Message], list[str]]:
    """What a server got of `count` messages, and why the link was lost, if it was."""
    received: list[Message] = []
    lost: list[str] = []
    server = Server("127.0.0.1", 0, lambda _, message: received.append(message), Credentials(str(made() / server_as)))
    credentials = None if client_as is None else Credentials(str(made() / client_as))
    link = Link(server.address, lambda _: None, lost.append, connect_timeout_s=0.5, credentials=credentials)
    for number in range(count):
        link.send(Abort(AttemptKey(str(number), 1)))
    async with asyncio.timeout(20):
        await until(lambda: len(received) == count or lost)
    link.close()
    await server.close()
    return received, lost


@pytest.mark.parametrize("client", ["router", "node"])
def test_messages_arrive_in_order(client: str) -> None:
    received, lost = asyncio.run(send_over("node", client))
    assert received == [Abort(AttemptKey(str(number), 1)) for number in range(3)]
    assert lost == []


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("node", None),
        ("node", "admin"),
        ("node", "stranger"),
        ("node", "expired"),
        ("router", "router"),
        ("stranger", "router"),
    ],
)
def test_nothing_is_heard_from_others(server: str, client: str | None) -> None:
    received, lost = asyncio.run(send_over(server, client))
    assert received == []
    assert len(lost) == 1
    if server == "stranger":
        assert "reached within 0.5 s: self-signed certificate in certificate chain" in lost[0]


def test_a_link_that_tries_for_ever_says_once_what_is_wrong_with_the_certificate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A router that could not connect again to a node whose certificate had expired said nothing at all."""

    async def main() -> None:
        server = Server("127.0.0.1", 0, lambda _, __: None, Credentials(str(made() / "expired")))
        link = Link(server.address, lambda _: None, lambda _: None, credentials=Credentials(str(made() / "router")))
        async with asyncio.timeout(20):
            await until(lambda: sum("refused a TLS" in line for line in caplog.messages) >= 3)
        link.close()
        await server.close()

    asyncio.run(main())
    said = [line for line in caplog.messages if line.startswith("cannot connect to")]
    assert len(said) == 1
    assert "certificate has expired" in said[0]


def test_only_the_loop_sends_over_tls() -> None:
    """Only the loop's thread may use the state of a TLS connection."""

    async def main() -> None:
        asked: list[bytes] = []
        credentials = Credentials(str(made() / "node"))
        server = Server("127.0.0.1", 0, lambda identity, _: asked.append(identity), credentials)
        link = Link(server.address, lambda _: None, lambda _: None, credentials=Credentials(str(made() / "router")))
        link.send(Abort(AttemptKey("a", 1)))
        async with asyncio.timeout(20):
            await until(lambda: asked)
        assert not server.send_directly(asked[0], Abort(AttemptKey("a", 1)))
        link.close()
        await server.close()

    asyncio.run(main())

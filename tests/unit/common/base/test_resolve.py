"""A resolver that hangs holds neither an event loop nor the threads that other work needs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.base.errors import PeerLost
from common.base.resolve import NameUnknown, is_own, resolve, resolve_now
from common.control.links import Link, Server
from common.control.messages import Abort, AttemptKey, Message
from kvtransfer.transports.zmq import _resolved

REAL = socket.getaddrinfo


class Resolver:
    """Hangs for the name `hangs`, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waiting = 0

    def __call__(self, host: Any, *args: Any, **options: Any) -> Any:
        if host == "hangs":
            self.waiting += 1
            self.over.wait(30)
            raise OSError("gave up")
        return REAL({"known": "127.0.0.1", "six": "::1"}.get(host, host), *args, **options)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("resolve-"):
            thread.join(10)


def test_a_name_that_is_known_is_resolved(resolver: Resolver) -> None:
    assert asyncio.run(resolve("known", 5)) == "127.0.0.1"
    assert resolve_now("known", 5) == "127.0.0.1"
    for address in ("10.0.0.1", "::1"):
        assert resolve_now(address, 0) == address
    with pytest.raises(NameUnknown, match=r"no\.such\.name\.invalid could not be resolved"):
        resolve_now("no.such.name.invalid", 20)


def test_a_name_that_has_addresses_of_ipv6_only_is_resolved_and_connected_to(resolver: Resolver) -> None:
    """On networks without IPv4 no node with a name as its --advertise-host was reached."""

    async def scene() -> None:
        received: list[Message] = []
        server = Server("::1", 0, lambda _, message: received.append(message))
        link = Link(server.address.replace("[::1]", "six"), lambda _: None, lambda _: None)
        link.send(Abort(AttemptKey("a", 1)))
        while not received:
            await asyncio.sleep(0.01)
        link.close()
        await server.close()

    assert resolve_now("six", 5) == "::1"
    assert _resolved("tcp://six:5") == "tcp://[::1]:5"
    asyncio.run(asyncio.wait_for(scene(), 10))


def test_many_attempts_at_a_name_that_hangs_take_one_thread_and_end_in_time(resolver: Resolver) -> None:
    async def scene() -> None:
        tries = [resolve("hangs", 0.05) for _ in range(50)]
        found = await asyncio.gather(*tries, return_exceptions=True)
        assert all(isinstance(each, NameUnknown) for each in found)
        assert await asyncio.to_thread(lambda: 7) == 7

    asyncio.run(asyncio.wait_for(scene(), 10))
    with pytest.raises(PeerLost, match="could not be resolved within"):
        _resolved("tcp://hangs:5")
    assert resolver.waiting == 1


def test_a_thread_that_cannot_start_fails_one_lookup_and_not_the_later_ones(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(NameUnknown, match="can't start new thread"):
            resolve_now("known", 5)
    assert resolve_now("known", 5) == "127.0.0.1"


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_link_to_a_name_that_hangs_is_lost_in_time_while_others_work(resolver: Resolver) -> None:
    async def scene() -> tuple[list[Message], list[str]]:
        received: list[Message] = []
        lost: list[str] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        hanging = Link("tcp://hangs:5", lambda _: None, lost.append, connect_timeout_s=0.2)
        working = Link(server.address.replace("127.0.0.1", "known"), lambda _: None, lost.append)
        working.send(Abort(AttemptKey("a", 1)))
        while not (received and lost):
            await asyncio.sleep(0.01)
        hanging.close()
        working.close()
        await server.close()
        return received, lost

    received, lost = asyncio.run(asyncio.wait_for(scene(), 10))
    assert received == [Abort(AttemptKey("a", 1))]
    assert len(lost) == 1
    assert "could not be reached within 0.2 s" in lost[0]


def test_a_link_whose_connecting_fails_unexpectedly_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> str:
        raise ZeroDivisionError("scripted")

    async def scene() -> None:
        monkeypatch.setattr("common.control.links.resolve", broken)
        lost: list[str] = []
        link = Link("tcp://name:1", lambda _: None, lost.append)
        while not link.closed:
            await asyncio.sleep(0.001)
        assert lost == ["cannot connect to tcp://name:1: scripted"]

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize(
    ("address", "own"), [("127.0.0.1", True), ("192.0.2.7", False), ("2001:db8::7", False), ("x", False)]
)
def test_an_address_of_another_host_is_told_from_our_own(address: str, own: bool) -> None:
    assert is_own(address) is own

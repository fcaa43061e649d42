"""A node that cannot open a link to its peer loses that peer's attempts, and nothing else."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from common.base.errors import Unavailable
from common.config.service_configs import DecodeConfig
from common.control import links
from common.control.messages import Abort, AttemptKey, PeerRef, TransferAbort
from common.node.events import PeerGone, ToPeer
from common.node.server import NodeServer

PEER = PeerRef("d", "inc-d", "tcp://127.0.0.1:9", [])


def test_peer_that_no_descriptor_is_left_for_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    async def events() -> list[Any]:
        shell, got = NodeServer(DecodeConfig(node_id="decode-x")), list[Any]()
        shell._engine = SimpleNamespace(post=got.append)  # type: ignore[assignment]
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", none_left)
        monkeypatch.setattr("common.node.server.SILENCE_S", 0.3)
        shell._deliver([ToPeer(PEER, Abort(AttemptKey("r", 1)))])
        async with asyncio.timeout(10):
            while not got:
                await asyncio.sleep(0.002)
        assert not shell._links
        return got

    [gone] = asyncio.run(events())
    assert isinstance(gone, PeerGone)
    assert gone.incarnation == PEER.incarnation


def test_transfer_given_up_in_the_turn_that_filled_the_link_is_told_over_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt has ended here: nobody else would tell the decode node before our lease there is over."""
    told = TransferAbort(AttemptKey("r", 1), "peer_lost", "why")
    real_send, full = links.Link._send, [True]

    def send(self: links.Link, messages: list[bytes]) -> None:
        if full:
            full.clear()
            raise Unavailable("full")
        real_send(self, messages)

    async def scene() -> None:
        got, events = list[Any](), list[Any]()
        server = links.Server("127.0.0.1", 0, lambda _, message: got.append(message))
        peer = PeerRef("d", "inc-d", server.address, [])
        shell = NodeServer(DecodeConfig(node_id="prefill-x"))
        shell._engine = SimpleNamespace(post=events.append)  # type: ignore[assignment]
        monkeypatch.setattr(links.Link, "_send", send)
        shell._deliver([ToPeer(peer, told)])
        async with asyncio.timeout(10):
            while told not in got:
                await asyncio.sleep(0.002)
        assert [event.incarnation for event in events] == [peer.incarnation]
        for link in shell._links.values():
            link.close()
        await server.close()

    asyncio.run(scene())

"""A node that cannot open a link to its peer loses that peer's attempts, and nothing else."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from common import rpc
from common.config import DecodeConfig
from common.errors import Unavailable
from common.node.outbox import PeerGone, ToPeer
from common.node.shell import NodeShell
from common.protocol import Abort, AttemptKey, PeerRef, TransferAbort

PEER = PeerRef("d", "inc-d", "tcp://127.0.0.1:9", [])


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, "too many open files")])
def test_peer_that_no_descriptor_is_left_for_is_gone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def none_left(kind: int) -> Any:
        raise error

    async def events() -> list[Any]:
        shell, got = NodeShell(DecodeConfig(), "decode-x"), list[Any]()
        shell._engine = SimpleNamespace(post=got.append)  # type: ignore[assignment]
        monkeypatch.setattr(rpc, "_open", none_left)
        shell._deliver([ToPeer(PEER, Abort(AttemptKey("r", 1)))])
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
    real_send, full = rpc._send, [True]

    def send(*args: Any) -> None:
        if full:
            full.clear()
            raise Unavailable("full")
        real_send(*args)

    async def scene() -> None:
        got, events = list[Any](), list[Any]()
        server = rpc.Server("127.0.0.1", 0, lambda _, message: got.append(message))
        peer = PeerRef("d", "inc-d", server.address, [])
        shell = NodeShell(DecodeConfig(), "prefill-x")
        shell._engine = SimpleNamespace(post=events.append)  # type: ignore[assignment]
        monkeypatch.setattr(rpc, "_send", send)
        shell._deliver([ToPeer(peer, told)])
        async with asyncio.timeout(10):
            while told not in got:
                await asyncio.sleep(0.002)
        assert [event.incarnation for event in events] == [peer.incarnation]
        for link in shell._links.values():
            link.close()
        await server.close()

    asyncio.run(scene())

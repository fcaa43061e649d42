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
from common.node.outbox import PeerGone, ToPeer
from common.node.shell import NodeShell
from common.protocol import Abort, AttemptKey, PeerRef

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

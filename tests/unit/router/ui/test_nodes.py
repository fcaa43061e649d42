"""What the dashboard asks of nodes, and of whom it asks nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.base.errors import Unavailable
from common.control.admin_server import AdminRoute, AdminServer, Call
from common.control.messages import ModelInfo, NodeRecord, PeerRef
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.nodes.node import Node
from router.ui.nodes import NodeControl

TOKEN = "a-token-of-enough-length"
LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 16, "float32"))


def test_a_node_is_not_asked_at_the_loopback_of_another_host() -> None:
    """Behind that port was another node of this router's host, which was drained in its place, or who got the token."""
    drained: list[str] = []

    def drain(call: Call) -> dict[str, Any]:
        drained.append("here")
        return {}

    async def main() -> None:
        here = AdminServer("127.0.0.1", 0, TOKEN)
        here.start([AdminRoute("POST", "/drain", drain)])
        control = NodeControl(cast("Any", None), TOKEN, None)

        def node(control_address: str, admin_address: str = here.url) -> Node:
            peer = PeerRef("d0", "i0", control_address, [])
            return Node(
                NodeRecord("decode", peer, ModelInfo("m", "", 1, 1), LAYOUT, 1, 0.0, admin_address=admin_address)
            )

        assert await control.ask(node("tcp://127.0.0.1:1"), "POST", "/drain") == {}
        with pytest.raises(Unavailable, match="d0: its admin port listens on the loopback of its host only"):
            await control.ask(node("tcp://192.0.2.7:1"), "POST", "/drain")
        with pytest.raises(Unavailable, match="d0: it has no admin port"):
            await control.ask(node("tcp://127.0.0.1:1", ""), "POST", "/drain")
        await here.close()

    asyncio.run(main())
    assert len(drained) == 1

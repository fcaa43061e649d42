"""When the supervisor takes a child for ready."""

from __future__ import annotations

import asyncio
import time

from common.config import UpConfig
from common.kv.layout import KVLayout
from common.protocol import ModelInfo, NodeRecord, PeerRef
from common.supervisor.pid_file import PidFile
from common.supervisor.plan import ChildSpec
from common.supervisor.up import Cluster


def test_record_of_a_process_before_ours_makes_no_child_ready() -> None:
    def record(incarnation: str, started_at: float) -> NodeRecord:
        peer = PeerRef("d0", incarnation, f"tcp://{incarnation}:1", [])
        layout = KVLayout("f" * 8, 2, 2, 16, "float32")
        return NodeRecord("decode", peer, ModelInfo("m", "/m", 100, 64), layout, 10, started_at)

    async def main() -> None:
        specs = [ChildSpec("decode-0", "decode", ("true",), node_id="d0")]
        cluster = Cluster(UpConfig(), specs, "redis://127.0.0.1:1", 1, PidFile(None))
        child = cluster._children[0]
        child.started_s = time.monotonic()
        cluster._on_nodes([record("dead", time.time() - 5.0)])
        assert not await cluster._is_usable(child)
        cluster._on_nodes([record("ours", time.time() + 0.5)])
        assert await cluster._is_usable(child)
        assert child.address == "tcp://ours:1"
        assert not await cluster._is_usable(child)  # after its restart the same record says nothing
        await cluster._probe.close()

    asyncio.run(main())

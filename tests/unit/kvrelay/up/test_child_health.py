"""When a child of `kvrelay up` counts as usable."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.control.messages import ModelInfo, NodeRecord, PeerRef
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from kvrelay.up.child import Child
from kvrelay.up.child_health import ChildHealth
from kvrelay.up.console import Console
from kvrelay.up.plan import ChildSpec


def record(incarnation: str, started_at: float) -> NodeRecord:
    peer = PeerRef("d0", incarnation, f"tcp://{incarnation}:1", [])
    layout = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))
    return NodeRecord("decode", peer, ModelInfo("m", "/m", 100, 64), layout, 10, started_at)


def test_record_of_a_process_before_ours_makes_no_child_ready() -> None:
    async def main() -> None:
        health = ChildHealth("redis://127.0.0.1:1", "c", None)
        child = Child(ChildSpec("decode-0", "decode", ("true",), node_id="d0"), Console([]))
        child.started_s, child.started_at = time.monotonic(), time.time()
        health._on_nodes([record("dead", time.time() - 5.0)])
        assert not await health.is_usable(child)
        health._on_nodes([record("ours", time.time() + 0.5)])
        assert await health.is_usable(child)
        assert child.address == "tcp://ours:1"
        assert not await health.is_usable(child)  # after its restart the same record says nothing
        await health.close()

    asyncio.run(main())


@pytest.mark.parametrize("before_it_registered", [False, True])
@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_leaves_a_node_ready(
    monkeypatch: pytest.MonkeyPatch, step_s: float, before_it_registered: bool
) -> None:
    """A forward step between a node's registration and the next probe had it killed after the start's timeout."""

    async def main() -> None:
        health = ChildHealth("redis://127.0.0.1:1", "c", None)
        child = Child(ChildSpec("decode-0", "decode", ("true",), node_id="d0"), Console([]))
        child.started_s, child.started_at = time.monotonic(), time.time()
        health._on_nodes([record("ours", time.time() + 0.5 + step_s * before_it_registered)])
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + step_s)
        assert await health.is_usable(child)
        await health.close()

    asyncio.run(main())

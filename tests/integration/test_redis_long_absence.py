"""Ten minutes without Redis, on a mock clock: what continues meanwhile, and what is rebuilt afterwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from support.mock_clock import MockClock
from support.ports import free_port
from support.redis_cluster_of_nodes import LEASE_S, ANode, ARouter, make_record, names, running, until
from support.redis_servers import ask, redis_server_with

from common.cluster.redis_keys import Keys

_STEP_S, _STEPS = 30.0, 20


def test_ten_minutes_without_redis_change_nothing_and_everything_is_published_again(
    tmp_path: Path, cluster: str
) -> None:
    port, clock = free_port(), MockClock(1000.0)
    url = f"redis://127.0.0.1:{port}/0"

    async def main() -> None:
        node, doomed = (ANode(url, cluster, make_record(name), clock=clock) for name in ("n0", "n1"))
        router = ARouter(url, cluster, clock=clock)
        node.stored(names(500))
        doomed.stored(names(20))
        (tmp_path / "before").mkdir()
        async with running(node, router):
            with redis_server_with(tmp_path / "before", port=port):
                doomed.start()

                def holds(of: ANode, count: int) -> bool:
                    clock.advance(0.01)  # nodes renew what they published
                    return router.holds(of.incarnation, names(count))

                await until(lambda: holds(node, 500))
                await until(lambda: holds(doomed, 20))
            await doomed.die()
            index = router.index
            for step in range(_STEPS):
                clock.advance(_STEP_S)
                node.stored(names(10, 1000 + 10 * step))
                node.removed(names(10, 10 * step))
                index.expect(node.incarnation, names(3, 5000 + step))
                assert index.match(names(3, 5000 + step))[node.incarnation] == 3, "its own decisions are known at once"
                await until(lambda: router.directory.degraded and router.subscriber.away)
                await asyncio.sleep(0)
            assert [record.peer.node_id for record in router.directory.records] == ["n0", "n1"]
            assert index.match(names(500))[node.incarnation] == 500, "as it was"
            assert index.match(names(20))[doomed.incarnation] == 20
            assert index.match(names(1, 5000)) == {}, "what was expected ten minutes ago is not"

            (tmp_path / "after").mkdir()
            with redis_server_with(tmp_path / "after", port=port):
                back_s = time.monotonic()
                left = names(300, 200) + names(200, 1000)
                await until(lambda: router.holds(node.incarnation, left))
                await until(lambda: not router.directory.degraded and not router.subscriber.away)
                assert time.monotonic() - back_s < 10
                keys = Keys(cluster)
                assert ask(port, "SCARD", keys.blocks(node.incarnation)) == 500
                assert ask(port, "EXISTS", keys.node("n0"), keys.fence("n0"), keys.load("n0")) == 3
                # A node that died meanwhile stays listed for one lease after Redis returns, and no longer.
                assert len(router.directory.records) == 2
                clock.advance(2 * LEASE_S)
                await until(lambda: [record.peer.node_id for record in router.directory.records] == ["n0"])
                await until(lambda: router.index.incarnations == [node.incarnation])

    asyncio.run(asyncio.wait_for(main(), 60))

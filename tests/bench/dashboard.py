"""What an open dashboard costs a router with 100 simulated nodes: `python -m bench.dashboard`, from the folder `tests`.

Prints the share of a core that one snapshot per second takes, with every node's load and relays changing, and the time of
`/metrics`.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from support.mock_clock import MockClock
from support.simulated_nodes import SimulatedNodes

from common.config.service_configs import RouterConfig
from router import gc_policy
from router.router import Router
from router.ui.snapshot import Snapshots

NODES, SECONDS = 100, 60


async def measure() -> tuple[list[float], list[float], int]:
    """CPU seconds of each snapshot and of each `/metrics`, and the size of the last snapshot in bytes."""
    config, clock = RouterConfig(), MockClock(100.0)
    router = Router(config)
    collector = asyncio.create_task(gc_policy.run(lambda: 1))  # garbage is collected as in a busy router
    await asyncio.sleep(0)
    try:
        nodes, snapshots = SimulatedNodes(router, NODES), Snapshots(router, None, clock)
        pages: list[float] = []
        scrapes: list[float] = []
        size = 0
        for _ in range(SECONDS):
            nodes.tick(50)
            clock.advance(1.0)
            began = time.process_time()
            size = len(snapshots.latest().body)
            pages.append(time.process_time() - began)
            began = time.process_time()
            router.metrics.render()
            scrapes.append(time.process_time() - began)
        return pages, scrapes, size
    finally:
        collector.cancel()
        router.close()


def main() -> None:
    """Print the figures."""
    pages, scrapes, size = asyncio.run(measure())
    print(
        f"{NODES} nodes: a snapshot of {size / 1000:.0f} kB each second takes {100 * statistics.mean(pages):.2f} % of a core"
    )
    print(f"/metrics: median {1000 * statistics.median(scrapes):.1f} ms, worst {1000 * max(scrapes):.1f} ms")


if __name__ == "__main__":
    main()

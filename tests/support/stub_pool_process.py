"""A stub node of an embedding model as a process, registered in Redis, for tests that kill it.

`python -m support.stub_pool_process REDIS_URL CLUSTER NODE_ID MODEL_FOLDER WIDTH STEP_S`; it prints a line for each part that
it gets, and takes `STEP_S` for each.
"""

from __future__ import annotations

import asyncio
import sys

from support.stub_node import StubNode

from common.cluster.membership import Registrar
from common.control.pooling import PoolRequest


async def run(redis_url: str, cluster: str, node_id: str, folder: str, width: str, step_s: str) -> None:
    """Run until killed."""
    node = StubNode("prefill", node_id, folder, task="embed", hidden_size=int(width), step_s=float(step_s))
    registrar = asyncio.create_task(Registrar(redis_url, cluster, node.record, lease_s=1.0).run())
    told = 0
    while not registrar.done():
        parts = sum(isinstance(each, PoolRequest) for each in node.received)
        if parts > told:
            told = parts
            print(parts, flush=True)
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))

"""Pooling over processes: a router that finds its nodes in Redis, and `kill -9` of one in the middle of a large call."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.redis_server import RedisServer
from support.tiny_encoders import WORDS, make_encoder

from common.config.service_configs import RouterConfig
from router.service import serve

TEXTS = [" ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 9)) for number in range(1000)]


async def start_node(redis: RedisServer, cluster: str, folder: Path) -> asyncio.subprocess.Process:
    options = {
        "--model": str(folder),
        "--redis-url": redis.url,
        "--cluster": cluster,
        "--threads": "1",
        "--lease-s": "5",
    }
    words = [word for option in options.items() for word in option]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "kvrelay", "prefill", *words, env=env)


async def until(http: httpx.AsyncClient, path: str, condition: Callable[[httpx.Response], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if condition(await http.get(path)):
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


def in_parts(metrics: httpx.Response) -> bool:
    """Whether both nodes have got parts of the call."""
    lines = metrics.text.splitlines()
    return any(
        line.startswith('kvrelay_attempts_total{mode="pooled"}') and float(line.split()[-1]) >= 2 for line in lines
    )


@pytest.mark.thorough
def test_kill_9_of_one_of_two_nodes_within_1000_inputs_costs_no_answer(
    tmp_path: Path, redis_server: RedisServer, cluster: str, free_port: int
) -> None:
    folder = make_encoder(tmp_path / "tiny-bert")

    async def main() -> None:
        config = RouterConfig(port=free_port, redis_url=redis_server.url, cluster=cluster, lease_s=5.0)
        service = asyncio.create_task(serve(config))
        nodes = [await start_node(redis_server, cluster, folder) for _ in range(2)]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=60) as http:
                await until(http, "/health", lambda health: health.json()["pooling"] == 2)
                nodes[0].send_signal(signal.SIGSTOP)  # it takes parts and answers none
                call = asyncio.create_task(http.post("/v1/embeddings", json={"input": TEXTS}))
                await until(http, "/metrics", in_parts)
                nodes[0].kill()
                answer = await call
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-kvrelay-attempt"] == "2"
                await until(http, "/health", lambda health: health.json()["pooling"] == 1)
                again = await http.post("/v1/embeddings", json={"input": TEXTS})
        finally:
            for node in nodes:
                if node.returncode is None:
                    node.kill()
                await node.wait()
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)
        found, expected = (np.array([each["embedding"] for each in one.json()["data"]]) for one in (answer, again))
        assert found.shape == (1000, 32)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert len({tuple(each) for each in np.round(found, 4).tolist()}) == len(set(TEXTS))

    asyncio.run(asyncio.wait_for(main(), 120))

"""Pooling over processes: a router that finds its nodes in Redis, and `kill -9` of one in the middle of a large call."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.paths import ROOT
from support.stub_node import make_model_folder
from support.stub_pooling import vector
from tokenizers import Tokenizer

from common.cluster.redis_server import RedisServer
from common.config.service_configs import RouterConfig
from router.service import serve

WIDTH = 16
TEXTS = [f"text {number} the quick brown fox" for number in range(1000)]


async def start_node(redis: RedisServer, cluster: str, name: str, folder: Path) -> asyncio.subprocess.Process:
    words = [redis.url, cluster, name, str(folder), str(WIDTH), "0.03"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "support.stub_pool_process", *words]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)


async def until_pooling(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await http.get("/health")).json()["pooling"] == count:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


@pytest.mark.thorough
def test_kill_9_of_one_of_two_nodes_within_1000_inputs_costs_no_answer(
    tmp_path: Path, redis_server: RedisServer, cluster: str, free_port: int
) -> None:
    folder = make_model_folder(tmp_path / "stub-model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def main() -> None:
        config = RouterConfig(port=free_port, redis_url=redis_server.url, cluster=cluster, lease_s=1.0)
        service = asyncio.create_task(serve(config))
        nodes = [await start_node(redis_server, cluster, f"e{number}", folder) for number in range(2)]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=60) as http:
                await until_pooling(http, 2)
                call = asyncio.create_task(http.post("/v1/embeddings", json={"input": TEXTS}))
                assert nodes[0].stdout is not None
                await nodes[0].stdout.readline()  # it has got a part
                nodes[0].kill()
                answer = await call
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-kvrelay-attempt"] == "2"
                found = np.array([each["embedding"] for each in answer.json()["data"]])
                await until_pooling(http, 1)
        finally:
            for node in nodes:
                if node.returncode is None:
                    node.kill()
                await node.communicate()
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)
        expected = np.stack([vector(tokenizer.encode(text).ids, WIDTH) for text in TEXTS])
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)

    asyncio.run(asyncio.wait_for(main(), 120))

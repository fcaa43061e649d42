"""Two routers over the same scripted nodes, neither special: no herding, and the end of one leaves the other's clients alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from support.stub_node import Stack, StubNode, make_model_folder, running_stack

from common.config.service_configs import RouterConfig

NODES = 4
BURST = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("two") / "model")


@contextlib.asynccontextmanager
async def second_router(config: RouterConfig, nodes: list[StubNode]) -> AsyncIterator[Stack]:
    """Another router over `nodes`, which the caller closes."""
    async with running_stack(config) as stack:
        stack.list_nodes(*nodes)
        await stack.usable(NODES, NODES)
        try:
            yield stack
        finally:
            stack.nodes = []


Scene = Callable[[Stack, contextlib.AsyncExitStack, RouterConfig, list[StubNode]], Awaitable[None]]


def play(folder: Path, scene: Scene, *, policy: str = "kv_aware", lease_s: float = 3.0) -> None:
    async def main() -> None:
        nodes = [StubNode("prefill", f"p{n}", str(folder)) for n in range(NODES)]
        nodes += [StubNode("decode", f"d{n}", str(folder)) for n in range(NODES)]
        config = RouterConfig(lease_s=lease_s, policy=policy, local_prefill_tokens=0)
        async with running_stack(config, *nodes) as first, contextlib.AsyncExitStack() as more:
            await scene(first, more, config, nodes)

    asyncio.run(asyncio.wait_for(main(), 100))


def requests_per_node(nodes: list[StubNode], role: str) -> list[int]:
    return [len(node.requests()) for node in nodes if node.role == role]


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("policy", ["kv_aware", "least_load"])
def test_a_burst_over_two_routers_does_not_herd(folder: Path, policy: str, shared_prefix: bool) -> None:
    async def scene(first: Stack, more: contextlib.AsyncExitStack, config: RouterConfig, nodes: list[StubNode]) -> None:
        second = await more.enter_async_context(second_router(config, nodes))
        for node in nodes:
            node.gate.clear()
        limits = httpx.Limits(max_connections=2 * BURST)
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits) as client:
            tasks = [
                asyncio.create_task(
                    client.post(
                        f"{(first, second)[number % 2].url}/v1/completions",
                        json={"prompt": ([7] * 64 if shared_prefix else []) + [10 + number] * 40, "max_tokens": 3},
                    )
                )
                for number in range(BURST)
            ]
            async with asyncio.timeout(30):
                while sum(requests_per_node(nodes, "decode")) < BURST:
                    await asyncio.sleep(0.01)
            for role in ("prefill", "decode"):
                counts = requests_per_node(nodes, role)
                assert max(counts) <= 1.3 * BURST / NODES, (role, counts)
            for node in nodes:
                node.gate.set()
            answers = await asyncio.gather(*tasks)
            assert {answer.status_code for answer in answers} == {200}

    play(folder, scene, policy=policy)


def test_the_end_of_one_router_leaves_the_other_ones_clients_alone(folder: Path) -> None:
    async def scene(first: Stack, more: contextlib.AsyncExitStack, config: RouterConfig, nodes: list[StubNode]) -> None:
        for node in nodes:
            node.step_s = 0.01
        body = {"prompt": [9] * 40, "max_tokens": 100, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            async with second_router(config, nodes) as second:
                ours = [asyncio.create_task(client.post(f"{first.url}/v1/completions", json=body)) for _ in range(8)]
                theirs = [asyncio.create_task(client.post(f"{second.url}/v1/completions", json=body)) for _ in range(8)]
                async with asyncio.timeout(20):
                    while sum(requests_per_node(nodes, "decode")) < 16:
                        await asyncio.sleep(0.005)
            answers = await asyncio.gather(*ours)
            lost = await asyncio.gather(*theirs, return_exceptions=True)
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * 8
        assert {answer.headers["x-kvrelay-attempt"] for answer in answers} == {"1"}
        assert all(isinstance(each, Exception) or each.status_code == 503 for each in lost)
        await first.settled()

    play(folder, scene)

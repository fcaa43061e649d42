"""A request goes only to nodes of its model, and only to those with its adapter: whatever is killed, loaded or unloaded."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.stub_node import Stack, StubNode, make_model_folder, running_stack

from common.base.hashing import root_hash
from common.config.service_configs import RouterConfig
from common.control.messages import Adapter
from router.requests.placement import HashChain

A, B = Adapter("x", "1" * 64), Adapter("y", "2" * 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class Cluster:
    """Nodes of the models `one` and `two`, some with adapters."""

    folder: Path

    def node(self, role: str, name: str, model: str, *adapters: Adapter) -> StubNode:
        return StubNode(role, name, str(self.folder), model_name=model, adapters=list(adapters))  # type: ignore[arg-type]


def check(nodes: list[StubNode], had: dict[str, set[Adapter]], models: dict[str, str]) -> int:
    """Every request received was for the node's model and for adapters that it had at some time. Returns their number."""
    count = 0
    for node in nodes:
        for message in node.requests():
            count += 1
            model, adapter = models[message.key.request_id], message.request.adapter
            assert model == node.model_name, (node.node_id, message)
            assert adapter is None or adapter in had[node.node_id], (node.node_id, adapter)
    return count


async def ask(http: httpx.AsyncClient, model: str, prompt: list[int]) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "cache_salt": ""}
    return await http.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 10), *(pytest.param(seed, 40, marks=pytest.mark.thorough) for seed in range(1, 5))]
)
def test_no_request_reaches_a_node_of_another_model_or_without_its_adapter(
    folder: Path, seed: int, rounds: int
) -> None:
    async def main() -> None:
        rng, make = random.Random(seed), Cluster(folder).node
        nodes = [
            make("prefill", "p1", "one", A),
            make("decode", "d1", "one", A),
            make("decode", "d2", "one"),
            make("prefill", "p2", "two"),
            make("decode", "d3", "two"),
        ]
        had = {node.node_id: set(node.adapters) for node in nodes}
        async with running_stack(RouterConfig(lease_s=1.0), *nodes) as stack:
            async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
                models: dict[str, str] = {}
                sent = 0
                for _ in range(rounds):
                    names = {"one": "one", "two": "two", "x": "one", "y": "one"}
                    for name in rng.choices(list(names), k=4):
                        answer = await ask(http, name, [rng.randrange(300) for _ in range(rng.randrange(1, 60))])
                        models[answer.headers["x-kvrelay-request-id"]] = names[name]
                        assert answer.status_code in (200, 404, 503), answer.text
                        sent += answer.status_code == 200
                    changed = rng.choice(nodes[:3])
                    changed.adapters = rng.choice([[A], [A, B], [B], []]) if changed.node_id != "d1" else [A]
                    if changed.node_id == "d2" and rng.random() < 0.5:
                        changed.adapters = [B]
                    had[changed.node_id] |= set(changed.adapters)
                    stack.list_nodes(*nodes)
            assert check(nodes, had, models) >= sent >= rounds
            await stack.settled()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_adapter_missing_at_a_node_is_found_at_another(folder: Path) -> None:
    async def main() -> None:
        make = Cluster(folder).node
        bad, good = make("decode", "d0", "one", A), make("decode", "d1", "one", A)
        bad.fail_with = ("adapter_missing", "this node does not have LoRA adapter 'x'")
        async with running_stack(RouterConfig(lease_s=1.0), bad, good) as stack:
            async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
                for _ in range(4):
                    answer = await ask(http, "x", [1, 2, 3])
                    assert (answer.status_code, answer.headers["x-kvrelay-decode-node"]) == (200, "d1")
                    assert answer.json()["model"] == "x"
                good.adapters = []
                stack.list_nodes(good)
                assert (await ask(http, "x", [1, 2, 3])).status_code == 404
            assert stack.router.dispatcher.breakers.times_opened == 0
            assert {request.request.adapter for request in good.requests()} == {A}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_root_of_an_adapter_is_where_it_was_read_from(folder: Path) -> None:
    async def main() -> None:
        node = Cluster(folder).node("decode", "d0", "one", A)
        node.adapter_paths = {A.name: "/adapters/a"}
        async with (
            running_stack(RouterConfig(lease_s=1.0), node) as stack,
            httpx.AsyncClient(base_url=stack.url) as http,
        ):
            card = (await http.get(f"/v1/models/{A.name}")).json()
            assert (card["root"], card["parent"]) == ("/adapters/a", "one")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_load_of_one_model_does_not_refuse_requests_for_another(folder: Path) -> None:
    async def main() -> None:
        make = Cluster(folder).node
        busy, idle = make("decode", "d0", "one"), make("decode", "d1", "two")
        busy.gate.clear()
        config = RouterConfig(lease_s=1.0, max_waiting=4)
        async with running_stack(config, busy, idle) as stack, httpx.AsyncClient(base_url=stack.url) as http:
            waiting = [asyncio.create_task(ask(http, "one", [1])) for _ in range(4)]
            await busy.until(lambda: len(busy.requests()) == 4)
            assert (await ask(http, "one", [1])).status_code == 429
            assert (await ask(http, "two", [1])).status_code == 200
            assert await _listed(stack, http) == [("one", None), ("two", None)]
            counted = (await http.get("/metrics")).text
            assert 'vllm:request_success_total{finished_reason="length",model_name="two"} 1.0' in counted
            busy.gate.set()
            assert {(await each).status_code for each in waiting} == {200}

    asyncio.run(asyncio.wait_for(main(), 60))


async def _listed(stack: Stack, http: httpx.AsyncClient) -> list[tuple[str, str | None]]:
    return [(card["id"], card["parent"]) for card in (await http.get("/v1/models")).json()["data"]]


def test_a_prefix_of_one_adapter_is_no_hit_for_another_nor_for_its_new_weights() -> None:
    tokens = list(range(64))
    chains = [HashChain("", lora_id) for lora_id in ("", A.lora_id, B.lora_id, Adapter("x", "3").lora_id)]
    first = [chain.hashes("f", tokens)[0] for chain in chains]
    assert len(set(first)) == 4
    assert HashChain("", A.lora_id).hashes("f", tokens)[0] == first[1]
    assert root_hash("f") != root_hash("f", lora_id=A.lora_id)

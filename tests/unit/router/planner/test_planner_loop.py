"""The planner of two routers with a real Redis: one plans, the other takes over; numbers set by hand win."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.redis_server import RedisServer

from common.cluster.redis_client import connect
from common.cluster.redis_keys import Keys
from common.config.service_configs import RouterConfig
from common.control.messages import NodeLoad
from router.planner.loop import PlannerLoop
from router.planner.sizing import Demand
from router.policy.costs import CostModel


def node(role: str, number: int) -> Any:
    model = SimpleNamespace(name="demo")
    record = SimpleNamespace(role=role, model=model, max_num_seqs=64)
    return SimpleNamespace(
        record=record, incarnation=f"{role}-{number}", load=NodeLoad(), usable=True, pools=False, last_pong_s=0.0
    )


def dispatcher(name: str) -> Any:
    """A router with two nodes of each role, and known costs."""
    models = {"prefill": CostModel(), "decode": CostModel()}
    models["prefill"].costs.prefills = models["decode"].costs.steps = 100
    known = [node(role, number) for role in ("prefill", "decode") for number in range(2)]
    return SimpleNamespace(
        nodes=SimpleNamespace(router_id=name, known=lambda: known),
        state=lambda _: SimpleNamespace(placer=SimpleNamespace(models=models)),
    )


def loop(redis_server: RedisServer, cluster: str, name: str, mode: str, demand: Demand) -> PlannerLoop:
    config = RouterConfig(redis_url=redis_server.url, cluster=cluster, planner=cast("Any", mode))
    planner = PlannerLoop(config, dispatcher(name), publish=lambda role, count: None)
    planner._meter = cast("Any", SimpleNamespace(add=lambda *_: None, demand=lambda _: demand))
    return planner


LONG_PROMPTS = Demand(600, 4000, 1)


@pytest.mark.parametrize(("mode", "prefill"), [("advise", 2), ("apply", 3)])
def test_one_router_plans_and_only_apply_changes_the_wanted_numbers(
    redis_server: RedisServer, cluster: str, mode: str, prefill: int
) -> None:
    async def scene() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        first, second = (loop(redis_server, cluster, name, mode, LONG_PROMPTS) for name in ("first", "second"))
        await client.set(keys.desired, '{"prefill": 2, "decode": 2}')
        for planner in (first, second):
            await planner.tick()
        assert first.shown()["this_router_plans"]
        assert not second.shown()["this_router_plans"]
        assert json.loads(await client.get(keys.desired) or b"")["prefill"] == prefill
        for planner in (first, second):
            assert planner.shown()["wants"] == {"prefill": 3, "decode": 1}
            assert "prefill nodes are short" in planner.shown()["why"]
        await cast("Any", client).hset(keys.planner, "until", 0)  # the first one is gone
        await client.set(keys.desired, '{"prefill": 5, "decode": 2}')
        await second.tick()
        assert second.shown()["this_router_plans"]
        assert "by hand" in second.shown()["why"]
        await first.tick()
        assert not first.shown()["this_router_plans"]
        for each in (client, first._client, second._client):
            await each.aclose()

    asyncio.run(scene())


def test_published_numbers_begin_with_the_usable_nodes_and_follow_the_plan_and_the_operator(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        first, second = (loop(redis_server, cluster, name, "publish", LONG_PROMPTS) for name in ("first", "second"))
        exported: dict[str, int] = {}
        second._publish = exported.__setitem__
        await first.tick()
        assert json.loads(await client.get(keys.desired) or b"") == {"prefill": 2, "decode": 2}
        for planner in (first, second, first, second):
            await planner.tick()
        assert exported == {"prefill": 3, "decode": 1}, "every router exports what the one that plans wants"
        await client.set(keys.desired, '{"prefill": 5, "decode": 2}')
        for planner in (first, second):
            await planner.tick()
        assert exported == {"prefill": 5, "decode": 2}
        for each in (client, first._client, second._client):
            await each.aclose()

    asyncio.run(scene())


def test_without_a_keeper_of_the_shape_and_with_damaged_data_it_advises(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        planner = loop(redis_server, cluster, "only", "apply", LONG_PROMPTS)
        await cast("Any", client).hset(keys.planner, mapping={"plan": "{broken", "until": "x"})
        await planner.tick()
        assert planner.shown()["wants"] == {"prefill": 3, "decode": 1}
        assert await client.get(keys.desired) is None
        cast("Any", planner)._dispatcher.nodes.known().append(node("decode", 2))
        await planner.tick()
        assert planner.shown()["wants"] == {"prefill": 4, "decode": 1}, "a node that comes is no number set by hand"
        for each in (client, planner._client):
            await each.aclose()

    asyncio.run(scene())

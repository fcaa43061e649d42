"""The right to change a node's role, and the wanted numbers of nodes after a change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.redis_server import RedisServer

from common.base.errors import BadRequest
from common.cluster.desired_state import read_desired, write_desired
from common.cluster.membership import Registrar
from common.cluster.redis_client import connect
from common.cluster.redis_keys import Keys
from common.cluster.runtime_changes import FlipLock, forget_changed_role, read_changed_role
from common.control.messages import ModelInfo, NodeRecord, PeerRef, Role
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec


def record(name: str, role: Role) -> NodeRecord:
    layout = KVLayout("f", KVSpec.uniform(2, 2, 16, "float32"))
    peer = PeerRef(name, f"of-{name}", "tcp://127.0.0.1:1", [])
    return NodeRecord(role, peer, ModelInfo("m", "/m", 100, 64), layout, 10, 1.0)


def play(redis_server: RedisServer, cluster: str, scene: Callable[[FlipLock, Any, Keys], Awaitable[None]]) -> None:
    """With two prefill nodes and a decode node registered."""

    async def main() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        lock = FlipLock(redis_server.url, cluster, None)
        nodes = [record("p0", "prefill"), record("p1", "prefill"), record("d0", "decode")]
        registrars = [Registrar(redis_server.url, cluster, node, lease_s=30.0, own_role="prefill") for node in nodes]
        tasks = [asyncio.create_task(registrar.run()) for registrar in registrars]
        try:
            for registrar in registrars:
                await registrar.registered.wait()
            await scene(lock, client, keys)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for registrar in registrars:
                await registrar.deregister()
            await lock.close()
            await client.aclose()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_transaction_at_a_time_and_never_the_last_node(redis_server: RedisServer, cluster: str) -> None:
    async def scene(lock: FlipLock, client: Any, keys: Keys) -> None:
        await lock.take("first", record("p0", "prefill"))
        await lock.take("first", record("p1", "prefill"))
        with pytest.raises(BadRequest, match="another node changes its role at this moment"):
            await lock.take("second", record("p1", "prefill"))
        await lock.release("second")
        assert await client.exists(keys.flip)
        await lock.release("first")
        with pytest.raises(BadRequest, match="d0 is the only decode node of m"):
            await lock.take("second", record("d0", "decode"))
        assert not await client.exists(keys.flip)

    play(redis_server, cluster, scene)


def test_the_wanted_numbers_follow_and_those_of_ray_forbid_it(redis_server: RedisServer, cluster: str) -> None:
    async def scene(lock: FlipLock, client: Any, keys: Keys) -> None:
        await lock.move_wanted(record("p0", "prefill"))
        assert await read_desired(client, keys) is None
        await write_desired(client, keys, {"prefill": 2, "decode": 1, "total": 3})
        await lock.move_wanted(record("p0", "prefill"))
        assert await read_desired(client, keys) == {"prefill": 1, "decode": 2, "total": 3}
        await write_desired(client, keys, {"prefill": 2, "decode": 1})
        with pytest.raises(BadRequest, match="as `kvrelay admin scale` says"):
            await lock.take("first", record("p0", "prefill"))

    play(redis_server, cluster, scene)


def test_a_changed_role_is_kept_for_the_next_process(redis_server: RedisServer, cluster: str) -> None:
    async def scene(lock: FlipLock, client: Any, keys: Keys) -> None:
        async def read(name: str) -> Role | None:
            return await read_changed_role(redis_server.url, cluster, name)

        assert [await read(name) for name in ("p0", "d0")] == [None, "decode"]
        await forget_changed_role(redis_server.url, cluster, "d0")
        assert await read("d0") is None

    play(redis_server, cluster, scene)

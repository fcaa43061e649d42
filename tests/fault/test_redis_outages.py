"""Redis loses its memory, stops answering, dies, is replaced: what is known stays known, and all is rebuilt within 10 s."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis
from support.redis_cluster_of_nodes import LEASE_S, ANode, ARouter, make_record, names, running, until
from support.redis_server import RedisServer
from support.redis_servers import ask, redis_server_with

from common.cluster.redis_keys import Keys

REBUILT_S = 10.0
KEYS = Keys("c")


def play(scene: Coroutine[Any, Any, None], timeout_s: float = 60) -> None:
    asyncio.run(asyncio.wait_for(scene, timeout_s))


class World:
    """Two nodes and two routers; the first node's blocks change now and then."""

    def __init__(self, url: str, *, answers: bool = False) -> None:
        """`answers`: the nodes answer the routers."""
        self.nodes = [ANode(url, "c", make_record(f"n{i}")) for i in range(2)]
        self.routers = [ARouter(url, "c", answers=lambda _: answers) for _ in range(2)]
        self.held = names(9000)
        self.nodes[0].stored(self.held)
        self.nodes[1].stored(names(10))

    def change(self) -> None:
        self.nodes[0].removed(self.held[-100:])
        self.held = self.held[:-100] + names(50, 50_000 + len(self.held))
        self.nodes[0].stored(self.held[-50:])

    def known(self) -> bool:
        first, second = (node.incarnation for node in self.nodes)
        return all(r.holds(first, self.held) and r.index.num_blocks(second) == 10 for r in self.routers)

    def in_redis(self, port: int) -> bool:
        """Whether Redis has all records and blocks."""
        with contextlib.suppress(redis.RedisError):
            nodes = all(ask(port, "EXISTS", KEYS.node(node.record.peer.node_id)) for node in self.nodes)
            return nodes and ask(port, "SCARD", KEYS.blocks(self.nodes[0].incarnation)) == len(self.held)
        return False

    def degraded(self) -> bool:
        return any(router.directory.degraded or router.subscriber.away for router in self.routers)

    async def rebuilt(self, port: int, returned_s: float) -> None:
        """All is as before, within the time, nobody was thought dead, and later changes come through."""
        await until(lambda: self.known() and self.in_redis(port) and not self.degraded(), REBUILT_S)
        assert time.monotonic() - returned_s < REBUILT_S
        self.change()
        await until(self.known, 20)
        for router in self.routers:
            assert len(router.directory.records) == 2


def test_flush_of_everything(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with RedisServer() as server:
            world = World(server.url)
            async with running(*world.nodes, *world.routers):
                await until(lambda: world.known() and world.in_redis(server.port))
                for _ in range(3):
                    ask(server.port, "FLUSHALL")
                    flushed_s = time.monotonic()
                    world.change()
                    await until(lambda: world.in_redis(server.port))
                    await world.rebuilt(server.port, flushed_s)

    play(scene())


@pytest.mark.parametrize("absence_s", [0.0, 4 * LEASE_S])
def test_death_and_an_empty_successor(absence_s: float) -> None:
    async def scene() -> None:
        with RedisServer() as server:
            world = World(server.url)
            async with running(*world.nodes, *world.routers):
                await until(world.known)
                server.kill()
                if absence_s:
                    await until(lambda: all(router.subscriber.away for router in world.routers))
                    assert world.known(), "what is known stays known"
                    gone_s = time.monotonic() + absence_s
                    world.change()
                    await until(lambda: time.monotonic() > gone_s)
                    assert all(len(router.directory.records) == 2 for router in world.routers)
                await asyncio.to_thread(server.restart)
                await world.rebuilt(server.port, time.monotonic())

    play(scene())


def test_pause_of_all_clients_longer_than_a_lease() -> None:
    async def scene() -> None:
        with RedisServer() as server:
            world = World(server.url)
            async with running(*world.nodes, *world.routers):
                await until(world.known)
                ask(server.port, "CLIENT", "PAUSE", 4000, "ALL")
                paused_s = time.monotonic()
                world.change()
                await until(world.degraded)
                assert all(len(router.directory.records) == 2 for router in world.routers)
                await until(lambda: time.monotonic() - paused_s > 4.0)
                await world.rebuilt(server.port, time.monotonic())

    play(scene())


def test_server_that_becomes_a_replica_takes_no_writes_until_it_leads_again(tmp_path: Path) -> None:
    async def scene() -> None:
        with redis_server_with(tmp_path) as port, redis_server_with(tmp_path) as other:
            world = World(f"redis://127.0.0.1:{port}/0")
            async with running(*world.nodes, *world.routers):
                await until(world.known)
                ask(port, "REPLICAOF", "127.0.0.1", other)
                await until(lambda: world.nodes[0].registrar.unavailable is not None)
                world.change()
                ask(port, "REPLICAOF", "NO", "ONE")
                await world.rebuilt(port, time.monotonic())

    play(scene())


def test_replica_that_lags_takes_over_the_address(tmp_path: Path) -> None:
    """The restored data is older than what was published: nodes detect it by the streams' numbers and the sets' sizes."""

    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            crash = stack.enter_context(contextlib.ExitStack())
            port = crash.enter_context(redis_server_with(tmp_path))
            replica = stack.enter_context(redis_server_with(tmp_path, f"replicaof 127.0.0.1 {port}"))
            world = World(f"redis://127.0.0.1:{port}/0")
            async with running(*world.nodes, *world.routers):
                await until(lambda: world.known() and world.in_redis(port))
                await until(lambda: world.in_redis(replica))
                ask(replica, "REPLICAOF", "NO", "ONE")  # from here on it misses what happens
                world.change()
                await until(world.known)
                crash.close()
                ask(replica, "CONFIG", "SET", "port", port)
                await world.rebuilt(port, time.monotonic())

    play(scene())


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_server_that_evicts_keys_takes_no_node_that_answers(tmp_path: Path, policy: str) -> None:
    async def scene() -> None:
        with redis_server_with(tmp_path, "maxmemory 3mb", f"maxmemory-policy {policy}") as port:
            world = World(f"redis://127.0.0.1:{port}/0", answers=True)
            directories = [router.directory for router in world.routers]
            async with running(*world.nodes, *world.routers):
                await until(world.known)
                until_s = time.monotonic() + 6 * LEASE_S
                lost = turn = 0
                while time.monotonic() < until_s:
                    turn += 1
                    with redis.Redis(port=port) as full:
                        for number in range(50):
                            full.set(f"other:{turn}:{number}", b"x" * 20_000)
                    lost += ask(port, "EXISTS", KEYS.nodes) == 0
                    await asyncio.sleep(0.01)
                    assert [len(directory.records) for directory in directories] == [2, 2]
                assert lost > 0, "the key was evicted at least once"
                assert {directory.evicts for directory in directories} == {policy}
                ask(port, "CONFIG", "SET", "maxmemory", "0")
                await world.rebuilt(port, time.monotonic())
                await world.nodes[1].stop()
                await until(lambda: [len(directory.records) for directory in directories] == [1, 1], LEASE_S)

    play(scene())

"""A node's admin port around a server whose engine does nothing: draining, and an engine that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import redis
from support.redis_server import RedisServer

import common.node.admin
from common.base.errors import RestartRequested
from common.cluster.membership import Directory
from common.config.service_configs import DecodeConfig
from common.control.links import Link
from common.control.messages import Message, ModelInfo, NodeLoad, NodeRecord, Ping, Pong
from common.kv.journal import BlockJournal
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.node.admin import NodeAdmin
from common.node.drain import Drain
from common.node.server import NodeServer


class Core:
    """Does nothing; `stuck` blocks the engine's thread."""

    def __init__(self) -> None:
        self.load = NodeLoad(kv_blocks_total=10)
        self.attempts: list[dict[str, Any]] = []
        self.turning = threading.Event()
        self.turning.set()

    def describe_attempts(self) -> list[dict[str, Any]]:
        return self.attempts

    def handle(self, event: Any) -> None:
        pass

    def step(self) -> bool:
        self.turning.wait(20)
        return False

    def on_time(self, now_s: float) -> None:
        pass

    has_deadlines = False
    rests_until_s = 0.0


class Bench:
    """A node, its admin port, and a link of a router to it."""

    def __init__(
        self,
        core: Core,
        admin: httpx.AsyncClient,
        link: Link,
        pongs: asyncio.Queue[Pong],
        url: str,
        node: asyncio.Task[None],
    ) -> None:
        self.core, self.admin, self.url, self._link, self._pongs = core, admin, url, link, pongs
        self.node = node

    async def ping(self) -> NodeLoad:
        """Renew the lease. Returns the load in the pong."""
        self._link.send(Ping("router", 30.0))
        async with asyncio.timeout(20):
            return (await self._pongs.get()).load


def play(redis_server: RedisServer, cluster: str, scene: Callable[[Bench], Awaitable[None]], **describe: Any) -> None:
    async def main() -> None:
        config = DecodeConfig(
            redis_url=redis_server.url, cluster=cluster, node_id="decode-x", admin_token="t", lease_s=3.0
        )
        server, core, ready = NodeServer(config), Core(), asyncio.Event()
        server.drain = Drain(0.0)  # these pings follow each other as fast as their pongs come
        await server.bind()
        record = NodeRecord(
            "decode",
            server.me,
            ModelInfo("m", "/m", 100, 64),
            KVLayout("f", KVSpec.uniform(2, 2, 16, "float32")),
            10,
            1.0,
        )
        routes = NodeAdmin(server, record, lambda: {"ranks": [], **describe}).routes()
        node = asyncio.create_task(server.run(core, record, BlockJournal(), ready.set, routes))
        seen: asyncio.Queue[list[NodeRecord]] = asyncio.Queue()
        directory = asyncio.create_task(Directory(redis_server.url, cluster, seen.put_nowait, poll_s=0.02).run())
        pongs: asyncio.Queue[Pong] = asyncio.Queue()

        def on_message(message: Message) -> None:
            assert isinstance(message, Pong)
            pongs.put_nowait(message)

        link = Link(server.me.control_address, on_message, print)
        try:
            async with asyncio.timeout(20):
                [listed] = await seen.get()
            headers = {"authorization": "Bearer t"}
            url = listed.admin_address
            async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as admin:
                await scene(Bench(core, admin, link, pongs, url, node))
        finally:
            core.turning.set()
            link.close()
            for task in (node, directory):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RestartRequested):
                    await task

    asyncio.run(asyncio.wait_for(main(), 60))


def test_drain_is_idle_once_nothing_runs_and_every_router_knows(redis_server: RedisServer, cluster: str) -> None:
    async def scene(bench: Bench) -> None:
        assert not (await bench.ping()).draining
        status = (await bench.admin.get("/status")).json()
        assert (status["node_id"], status["role"], status["redis"], status["engine"]) == (
            "decode-x",
            "decode",
            "ok",
            "ok",
        )
        assert (status["draining"], status["idle"]) == (False, False)
        [lease] = status["leases"]
        assert (lease["holder"], lease["knows_of_drain"]) == ("router", False)
        assert 20 < lease["ends_in_s"] <= 30

        status = (await bench.admin.post("/drain")).json()
        assert (status["draining"], status["idle"], status["leases_untold"]) == (True, False, 1)
        assert (await bench.ping()).draining
        assert not (await bench.admin.get("/status")).json()["idle"]
        bench.core.attempts = [{"attempt": "a#1", "state": "running", "age_s": 1.0}]
        assert (await bench.ping()).draining
        status = (await bench.admin.get("/status")).json()
        assert (status["idle"], status["leases_untold"], status["attempts"]) == (False, 0, bench.core.attempts)
        bench.core.attempts = []
        status = (await bench.admin.get("/status")).json()
        assert (status["idle"], status["leases"][0]["knows_of_drain"]) == (True, True)

        status = (await bench.admin.post("/undrain")).json()
        assert (status["draining"], status["idle"]) == (False, False)
        assert not (await bench.ping()).draining

    play(redis_server, cluster, scene)


def test_a_node_that_shall_restart_ends_when_it_is_idle_unless_it_is_undrained(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene(bench: Bench) -> None:
        bench.core.attempts = [{"attempt": "a#1", "state": "running", "age_s": 1.0}]
        assert (await bench.admin.post("/restart", json={"timeout_s": -1})).status_code == 400
        status = (await bench.admin.post("/restart", json={})).json()
        assert (status["draining"], status["restarting"], status["idle"]) == (True, True, False)
        await bench.admin.post("/undrain")
        async with asyncio.timeout(10):
            while (await bench.admin.get("/status")).json()["restarting"]:
                pass
        await bench.admin.post("/restart", json={})
        for _ in range(2):
            assert (await bench.ping()).draining
        assert not bench.node.done()
        bench.core.attempts = []
        async with asyncio.timeout(10):
            await asyncio.wait([bench.node])
        assert isinstance(bench.node.exception(), RestartRequested)

    play(redis_server, cluster, scene)


def test_a_restart_that_is_asked_for_again_takes_the_shorter_time(redis_server: RedisServer, cluster: str) -> None:
    """Otherwise an operator who allowed a restart 600 s could not shorten that later."""

    async def scene(bench: Bench) -> None:
        bench.core.attempts = [{"attempt": "a#1", "state": "running", "age_s": 1.0}]
        for timeout_s in (600, 0, 600):
            assert (await bench.admin.post("/restart", json={"timeout_s": timeout_s})).json()["restarting"]
        async with asyncio.timeout(10):
            await asyncio.wait([bench.node])
        assert isinstance(bench.node.exception(), RestartRequested)

    play(redis_server, cluster, scene)


def test_engine_that_stands_still_is_told_and_drain_does_not_call_it_idle(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.node.admin, "_ENGINE_ANSWERS_S", 0.2)

    async def scene(bench: Bench) -> None:
        bench.core.turning.clear()
        async with asyncio.timeout(10):
            while (status := (await bench.admin.post("/drain")).json())["attempts"] is not None:
                pass
        assert status["engine"].startswith("no answer")
        assert (status["draining"], status["idle"]) == (True, False)
        bench.core.turning.set()
        async with asyncio.timeout(10):
            while not (await bench.admin.get("/status")).json()["idle"]:
                await asyncio.sleep(0.02)

    play(redis_server, cluster, scene)


def test_a_full_redis_is_told_as_such(cluster: str) -> None:
    """It answers, so that nothing is wrong with its address, the network or a password."""
    with RedisServer() as server:

        async def scene(bench: Bench) -> None:
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", 1)
            async with asyncio.timeout(20):
                while (found := (await bench.admin.get("/status")).json()["redis"]) == "ok":
                    await asyncio.sleep(0.05)
            assert found == (
                "unavailable (command not allowed when used memory > 'maxmemory'): the node keeps serving and retrying"
            )

        play(server, cluster, scene)


def test_a_bug_in_the_status_costs_the_answer_and_not_the_node(redis_server: RedisServer, cluster: str) -> None:
    async def scene(bench: Bench) -> None:
        answer = await bench.admin.get("/status")
        assert answer.status_code == 200  # values that JSON cannot represent become text
        bench.core.describe_attempts = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        assert (await bench.admin.get("/status")).status_code == 500
        assert (await bench.ping()).kv_blocks_total == 10
        async with httpx.AsyncClient(trust_env=False) as stranger:
            assert (await stranger.get(bench.url + "/status")).status_code == 401

    play(redis_server, cluster, scene, odd=object())

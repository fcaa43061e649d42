"""Registration and discovery over a real Redis, through its outages."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import redis
from support.certificates import made
from support.mock_clock import MockClock
from support.redis_server import RedisServer
from support.steady import SteadyTime

from common.base.errors import ConfigError
from common.cluster import membership
from common.cluster.membership import Directory, Registrar
from common.cluster.records import EncodedRecord, Records
from common.cluster.redis_keys import Keys
from common.control.codec import encode
from common.control.messages import ModelInfo, NodeRecord, PeerRef
from common.control.versions import OLDEST_VERSION, OURS, PROTOCOL_VERSION
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec

LEASE_S = 0.6
POLL_S = 0.02


def a_record(node_id: str, *, started_at: float = 1.0) -> NodeRecord:
    peer = PeerRef(node_id, secrets.token_hex(4), "tcp://127.0.0.1:1", ["tcp://127.0.0.1:2"])
    layout = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))
    return NodeRecord("decode", peer, ModelInfo("m", "/m", 100, 64), layout, 10, started_at)


class View:
    """A running `Directory` and everything that it has reported."""

    def __init__(self, redis_url: str, cluster: str, grace_s: float) -> None:
        self.changes: list[list[NodeRecord]] = []
        self.directory = Directory(redis_url, cluster, self.changes.append, poll_s=POLL_S, grace_s=grace_s)

    @property
    def ids(self) -> list[str]:
        return [record.peer.node_id for record in self.directory.records]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(redis_url: str, cluster: str, grace_s: float = 3 * LEASE_S) -> AsyncIterator[View]:
    view = View(redis_url, cluster, grace_s)
    task = asyncio.create_task(view.directory.run())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def registered(
    redis_url: str, cluster: str, record: NodeRecord, lease_s: float = LEASE_S
) -> AsyncIterator[asyncio.Task[None]]:
    registrar = Registrar(redis_url, cluster, record, lease_s=lease_s)
    task = asyncio.create_task(registrar.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await registrar.deregister()


def test_node_is_seen_while_registered_and_gone_once_it_deregisters(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        record = a_record("d0")
        async with watching(redis_server.url, cluster) as view:
            async with registered(redis_server.url, cluster, record):
                await view.until(lambda: view.directory.records == [record])
                await asyncio.sleep(3 * LEASE_S)  # long enough that a lease not renewed would have run out
                assert view.changes == [[record]]
            with SteadyTime() as since_it_went:
                await view.until(lambda: view.directory.records == [])
                assert since_it_went.passed_s < LEASE_S / 2

    asyncio.run(main())


@pytest.mark.parametrize(("start_s", "factor"), [(60.0, 0.2), (0.001, 1.0)])
def test_nodes_are_looked_for_more_often_during_a_start(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch, start_s: float, factor: float
) -> None:
    """Without nodes, and for a while after the first: the others of a start follow."""
    periods: list[float] = []

    def recorded(period_s: float, now_s: float) -> float:
        periods.append(period_s)
        return period_s

    monkeypatch.setattr(membership, "_START_S", start_s)
    monkeypatch.setattr(membership, "until_next", recorded)

    async def main() -> None:
        async with watching(redis_server.url, cluster) as view:
            await view.until(lambda: len(periods) > 3)
            before = periods[0]
            async with registered(redis_server.url, cluster, a_record("d0")):
                await view.until(lambda: view.ids == ["d0"])
                seen = len(periods)
                await view.until(lambda: len(periods) > seen + 3)
            assert before == pytest.approx(0.2 * 0.02)
            # A registrar takes its periods from the same function.
            assert periods.count(factor * 0.02) >= 3

    asyncio.run(main())


def test_node_that_dies_silently_is_gone_after_its_lease(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        async with (
            watching(redis_server.url, cluster) as view,
            registered(redis_server.url, cluster, a_record("d0")) as t,
        ):
            await view.until(lambda: view.ids == ["d0"])
            t.cancel()
            await view.until(lambda: view.ids == [], timeout_s=3 * LEASE_S)

    asyncio.run(main())


def test_clusters_do_not_see_each_other(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        here, there = cluster, cluster + "-b"
        async with (
            watching(redis_server.url, there) as view,
            registered(redis_server.url, here, a_record("d0")),
            registered(redis_server.url, there, a_record("d1")),
        ):
            await view.until(lambda: view.ids == ["d1"])
            assert view.changes == [view.directory.records]

    asyncio.run(main())


def test_newer_incarnation_takes_the_id_and_the_older_one_ends(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        old, new = a_record("d0", started_at=1.0), a_record("d0", started_at=2.0)
        async with watching(redis_server.url, cluster) as view, registered(redis_server.url, cluster, old) as old_task:
            await view.until(lambda: view.directory.records == [old])
            async with registered(redis_server.url, cluster, new):
                await view.until(lambda: view.directory.records == [new])
                with pytest.raises(ConfigError, match="'d0' was taken by a node that started later"):
                    await asyncio.wait_for(old_task, 20)
                await asyncio.sleep(2 * LEASE_S)
                assert view.changes == [[old], [new]]

    asyncio.run(main())


def test_node_whose_clock_is_hours_ahead_does_not_remove_others(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        right, ahead = a_record("d0"), a_record("d1")
        async with watching(redis_server.url, cluster) as view, registered(redis_server.url, cluster, right):
            await view.until(lambda: view.ids == ["d0"])
            clock = time.time
            monkeypatch.setattr("common.cluster.membership.time.time", lambda: clock() + 7200)
            registrar = Registrar(redis_server.url, cluster, ahead, lease_s=60.0)
            task = asyncio.create_task(registrar.run())
            await registrar.registered.wait()
            monkeypatch.undo()
            await view.until(lambda: "d1" in view.ids)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert view.ids == ["d0", "d1"]
            await asyncio.sleep(2 * LEASE_S)
            assert all("d0" in [record.peer.node_id for record in change] for change in view.changes)
            await registrar.deregister()

    asyncio.run(main())


def test_nodes_with_a_lease_far_longer_than_the_routers_stay_in_view(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        async with watching(redis_server.url, cluster, grace_s=0.1) as view:
            registrar = Registrar(redis_server.url, cluster, replace(a_record("d0"), lease_s=3.0), lease_s=3.0)
            task = asyncio.create_task(registrar.run())
            await view.until(lambda: view.ids == ["d0"])
            await asyncio.sleep(0.9)  # shorter than the pause between two renewals
            assert len(view.changes) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await registrar.deregister()

    asyncio.run(main())


def test_late_deregistration_of_an_older_incarnation_does_not_remove_the_newer_one(
    redis_server: RedisServer, cluster: str
) -> None:
    async def main() -> None:
        old, new = a_record("d0", started_at=1.0), a_record("d0", started_at=2.0)
        async with watching(redis_server.url, cluster) as view, registered(redis_server.url, cluster, new):
            await view.until(lambda: view.directory.records == [new])
            await Registrar(redis_server.url, cluster, old, lease_s=LEASE_S).deregister()
            await asyncio.sleep(0.2)
            assert view.directory.records == [new]

    asyncio.run(main())


def test_exactly_one_of_two_incarnations_with_the_same_start_time_stays(
    redis_server: RedisServer, cluster: str
) -> None:
    async def main() -> None:
        first, second = a_record("d0"), a_record("d0")
        async with (
            registered(redis_server.url, cluster, first) as a,
            registered(redis_server.url, cluster, second) as b,
        ):
            done, _ = await asyncio.wait([a, b], timeout=5, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(2 * LEASE_S)
            assert len([task for task in (a, b) if task.done()]) == len(done) == 1

    asyncio.run(main())


def test_failed_renewals_are_retried_within_the_lease(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's connection breaks, those of the routers do not."""

    async def main() -> None:
        registrar = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=3.0)
        real_eval, failures = registrar._client.eval, 0

        async def eval_in_the_end(*args: Any) -> Any:
            nonlocal failures
            if failures < 3:
                failures += 1
                raise redis.ConnectionError("Connection closed by server")
            return await real_eval(*args)

        monkeypatch.setattr(registrar._client, "eval", eval_in_the_end)
        with SteadyTime() as since_the_first:
            task = asyncio.create_task(registrar.run())
            await asyncio.wait_for(registrar.registered.wait(), 10)
            assert since_the_first.passed_s < 1.5
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await registrar.deregister()

    asyncio.run(main())


def test_view_survives_a_crash_of_redis_and_the_nodes_register_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "common.cluster.membership")

    async def main() -> None:
        with RedisServer() as server:
            async with watching(server.url, "c") as view, registered(server.url, "c", a_record("d0")):
                await view.until(lambda: view.ids == ["d0"])
                await asyncio.to_thread(server.kill)
                await view.until(lambda: view.directory.degraded)
                await asyncio.sleep(2 * LEASE_S)
                assert view.ids == ["d0"]
                await asyncio.to_thread(server.restart)
                await view.until(lambda: not view.directory.degraded)
                with redis.Redis.from_url(server.url) as client:
                    await view.until(lambda: client.exists("kvrelay:{c}:node:d0") == 1)
                await asyncio.sleep(4 * LEASE_S)
                assert len(view.changes) == 1

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records]
    for beginning in ("Redis is unavailable (", "Redis is available again"):
        assert len([line for line in lines if line.startswith(beginning)]) == 2, lines  # one of each end


def test_a_node_that_vanished_is_told_from_one_that_ended_in_order(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        clock = MockClock()
        directory = Directory(redis_server.url, cluster, lambda _: None, grace_s=3.0, clock=clock)
        registrar = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=0.3)
        await registrar._renew()
        await directory.poll()
        assert (len(directory.records), directory.vanished) == (1, {})
        await asyncio.sleep(0.4)
        clock.advance(4.0)
        await directory.poll()
        assert (directory.records, directory.vanished) == ([], {"d0": 4.0})
        await registrar._renew()
        await registrar.deregister()
        await directory.poll()
        assert directory.vanished == {}
        await directory.close()

    asyncio.run(main())


def test_node_that_died_during_the_outage_is_dropped_after_the_grace(cluster: str) -> None:
    async def main() -> None:
        with RedisServer() as server:
            async with watching(server.url, cluster) as view, registered(server.url, cluster, a_record("d0")):
                async with registered(server.url, cluster, a_record("d1")) as dying:
                    await view.until(lambda: view.ids == ["d0", "d1"])
                    await asyncio.to_thread(server.kill)
                    dying.cancel()
                    await asyncio.to_thread(server.restart)
                    await view.until(lambda: view.ids == ["d0"])
                assert len(view.changes) <= 3

    asyncio.run(main())


def test_flushed_redis_removes_no_node(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        records = [a_record(f"d{i}") for i in range(3)]
        async with AsyncExitStack() as stack:
            view = await stack.enter_async_context(watching(redis_server.url, cluster, grace_s=20.0))
            for record in records:
                await stack.enter_async_context(registered(redis_server.url, cluster, record, lease_s=2.0))
            await view.until(lambda: view.directory.records == records)
            seen = len(view.changes)
            with redis.Redis.from_url(redis_server.url) as client:
                pattern = f"kvrelay:{{{cluster}}}:*"
                keys = set(client.keys(pattern))
                client.delete(*keys)
                await view.until(lambda: set(client.keys(pattern)) >= keys)  # all nodes have registered again
            await asyncio.sleep(10 * POLL_S)
            assert view.directory.records == records
            assert len(view.changes) == seen

    asyncio.run(main())


def test_redis_that_restarts_with_old_data_between_two_polls_removes_no_node(
    redis_server: RedisServer, cluster: str
) -> None:
    """Killed and restarted with its last snapshot: the same epoch, but only the ids of the nodes are left."""

    async def main() -> None:
        keys, ids = Keys(cluster), ["d0", "d1"]
        async with watching(redis_server.url, cluster) as view, AsyncExitStack() as nodes:
            for node_id in ids:
                await nodes.enter_async_context(registered(redis_server.url, cluster, a_record(node_id)))
            await view.until(lambda: view.ids == ids)
            seen = len(view.changes)
            with redis.Redis.from_url(redis_server.url) as client, client.pipeline() as at_once:
                for node_id in ids:
                    at_once.delete(keys.node(node_id), keys.fence(node_id), keys.load(node_id))
                    at_once.zincrby(keys.nodes, -60, node_id)
                at_once.execute()
                await view.until(lambda: client.exists(*map(keys.node, ids)) == 2)
            await asyncio.sleep(0.2)
            assert view.changes[seen:] == []
            assert view.ids == ids

    asyncio.run(main())


def test_redis_that_refuses_writes_removes_no_node_that_answers(cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    """Redis is full or cannot save: it answers reads, and records expire."""

    async def main() -> None:
        with RedisServer() as server:
            async with watching(server.url, cluster) as view, AsyncExitStack() as nodes:
                answering = {"d0", "d1"}
                view.directory._answers = lambda incarnation: any(
                    record.peer.incarnation == incarnation and record.peer.node_id in answering
                    for record in view.directory.records
                )
                for node_id in ("d0", "d1"):
                    await nodes.enter_async_context(registered(server.url, cluster, a_record(node_id)))
                await view.until(lambda: view.ids == ["d0", "d1"])
                with redis.Redis.from_url(server.url) as client:
                    client.config_set("maxmemory", 1)
                    keys = Keys(cluster)
                    await view.until(lambda: client.exists(keys.node("d0"), keys.node("d1")) == 0)
                    await asyncio.sleep(0.2)
                    assert view.ids == view.directory.unrenewed == ["d0", "d1"]
                    answering.discard("d1")
                    await view.until(lambda: view.ids == ["d0"])
                    assert "answering nodes again" not in caplog.text
                    client.config_set("maxmemory", 0)
                await view.until(lambda: (view.ids, view.directory.unrenewed) == (["d0", "d1"], []))

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert caplog.text.count("although these nodes still answer") == 1
    assert caplog.text.count("Redis has the records of all answering nodes again") == 1


def test_malformed_record_is_skipped_and_logged_once(
    redis_server: RedisServer, cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with redis.Redis.from_url(redis_server.url) as client:
            client.zadd(f"kvrelay:{{{cluster}}}:nodes", dict.fromkeys(("bad", "old", b"\xff"), time.time()))
            client.set(f"kvrelay:{{{cluster}}}:node:bad", b"\x00garbage")
            of_before = msgpack.packb([OLDEST_VERSION - 1, "NodeRecord", {}])
            client.set(f"kvrelay:{{{cluster}}}:node:old", of_before)
        async with watching(redis_server.url, cluster) as view, registered(redis_server.url, cluster, a_record("d0")):
            await view.until(lambda: view.ids == ["d0"])
            await asyncio.sleep(0.3)
            assert view.ids == ["d0"]
            assert f"theirs is {OLDEST_VERSION - 1}" in view.directory.refused["old"]
            assert set(view.directory.refused) == {"bad", "old"}

    asyncio.run(main())
    for name in ("bad", "old"):
        assert len([r for r in caplog.records if f"ignoring node '{name}'" in r.getMessage()]) == 1
    assert f"theirs is {OLDEST_VERSION - 1}, ours is {OURS}" in caplog.text


def test_a_record_has_a_newer_form_beside_the_one_that_the_version_before_reads(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers use the newer form if they can read it and the same process wrote it: an older one may come back under this id."""
    record = a_record("d0")
    other = replace(record, peer=replace(record.peer, incarnation="another"), kernels="of another")
    fuller = replace(record, kernels="newer")
    unreadable = b"\x93" + bytes([PROTOCOL_VERSION + 1]) + encode(fuller)[2:]
    forms = {"newer": encode(fuller), "": encode(other), None: unreadable}
    readable = encode(record, OLDEST_VERSION)

    async def main() -> None:
        key = f"kvrelay:{{{cluster}}}:newest:d0"
        for kernels, newest in forms.items():
            monkeypatch.setattr(Records, "encode", lambda *_, newest=newest: EncodedRecord(readable, newest))
            async with watching(redis_server.url, cluster) as view, registered(redis_server.url, cluster, record):
                await view.until(lambda: view.ids == ["d0"])
                assert view.directory.records[0].kernels == (kernels or "")
                with redis.Redis.from_url(redis_server.url) as client:
                    assert client.get(key) == newest
                    assert client.pttl(key) > 0
            with redis.Redis.from_url(redis_server.url) as client:
                assert not client.exists(key)

    asyncio.run(main())


def test_a_record_without_newer_fields_is_written_once_in_the_older_version() -> None:
    encoded = Records("c", None).encode(a_record("d0"))
    assert msgpack.unpackb(encoded.readable)[0] == OLDEST_VERSION
    assert encoded.newest == b""


WRONG_TYPES: dict[str, Callable[[redis.Redis, str], object]] = {
    "string": lambda client, key: client.set(key, "x"),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "set": lambda client, key: client.sadd(key, "x"),
    "zset": lambda client, key: client.zadd(key, {"x": 4e9}),
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
@pytest.mark.parametrize("name", ["node:d0", "fence:d0", "load:d0", "nodes", "epoch"])
def test_key_that_somebody_wrote_with_another_type_is_replaced(
    redis_server: RedisServer, cluster: str, name: str, kind: str
) -> None:
    async def main() -> None:
        key = Keys(cluster).prefix + name
        with redis.Redis.from_url(redis_server.url) as client:
            registrar = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=LEASE_S)
            await registrar._renew()
            written = client.type(key)
            client.delete(key)
            WRONG_TYPES[kind](client, key)
            await registrar._renew()
            assert client.type(key) == written
            assert 0 < cast(int, client.pttl(Keys(cluster).node("d0"))) <= 1000 * LEASE_S
            assert client.zrange(Keys(cluster).nodes, 0, -1) == [b"d0"]
            await registrar.deregister()

    asyncio.run(main())


def test_fence_that_belongs_to_no_node_ends_none(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        with redis.Redis.from_url(redis_server.url) as client:
            record = a_record("d0")
            registrar = Registrar(redis_server.url, cluster, record, lease_s=LEASE_S)
            await registrar._renew()
            client.hset(Keys(cluster).fence("d0"), mapping={"incarnation": "stranger", "started_at": 4e9})
            await registrar._renew()
            assert client.hget(Keys(cluster).fence("d0"), "incarnation") == record.peer.incarnation.encode()
            await registrar.deregister()

    asyncio.run(main())


def test_record_without_an_expiry_is_dropped_and_later_swept(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        keys = Keys(cluster)
        now = 0.0
        with redis.Redis.from_url(redis_server.url) as client:
            client.set(keys.node("ghost"), encode(a_record("ghost")))
            client.zadd(keys.nodes, {"ghost": time.time()})
            directory = Directory(redis_server.url, cluster, lambda _: None, grace_s=LEASE_S, clock=lambda: now)
            await directory.poll()
            assert [record.peer.node_id for record in directory.records] == ["ghost"]
            now = 2.1 * LEASE_S
            await directory.poll()
            assert directory.records == []
            await directory.close()
            registrar = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=LEASE_S)
            for score in (1.0, 4e9):
                client.set(keys.node("ghost"), b"")
                client.zadd(keys.nodes, {"ghost": score})
                await registrar._renew()
                assert client.exists(keys.node("ghost")) == 0
                assert client.zrange(keys.nodes, 0, -1) == [b"d0"]
            await registrar.deregister()

    asyncio.run(main())


def test_a_node_with_the_shortest_lease_is_seen_to_renew_its_record(redis_server: RedisServer, cluster: str) -> None:
    """Renewals were told apart by whole seconds: with a lease below half a second each node seemed to have stopped, every
    second, and routers said that Redis takes no writes."""

    async def main() -> None:
        clock, lease_s = MockClock(), 0.3
        directory = Directory(redis_server.url, cluster, lambda _: None, grace_s=lease_s, clock=clock)
        registrar = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=lease_s)
        for _ in range(4):
            await registrar._renew()
            await directory.poll()
            assert len(directory.records) == 1
            clock.advance(lease_s)
        await registrar.deregister()
        await directory.close()

    asyncio.run(main())


def test_damaged_record_removes_no_node_that_answers(redis_server: RedisServer, cluster: str) -> None:
    async def main() -> None:
        keys = Keys(cluster)
        with redis.Redis.from_url(redis_server.url) as client:
            record = a_record("d0")
            registrar = Registrar(redis_server.url, cluster, record, lease_s=LEASE_S)
            await registrar._renew()
            answers = lambda incarnation: incarnation == record.peer.incarnation  # noqa: E731
            directory = Directory(redis_server.url, cluster, lambda _: None, answers=answers)
            await directory.poll()
            client.set(keys.node("d0"), b"\x00garbage")
            await directory.poll()
            assert directory.records == [record]
            await directory.close()
            await registrar.deregister()

    asyncio.run(main())


def test_node_started_before_redis_registers_once_redis_is_up(free_port: int) -> None:
    async def main() -> None:
        url = f"redis://127.0.0.1:{free_port}/0"
        async with registered(url, "c", a_record("d0")), watching(url, "c") as view:
            await view.until(lambda: view.directory.degraded)
            with RedisServer(port=free_port):
                await view.until(lambda: view.ids == ["d0"])

    asyncio.run(main())


def test_cancellation_that_the_redis_client_swallows_still_ends_the_loops(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(self: object) -> tuple[None, dict[str, bytes]]:
        # What asyncio.wait_for of Python 3.11 does when its wait is over in the moment of the cancellation.
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return None, {}

    monkeypatch.setattr(Directory, "_fetch", swallow)
    monkeypatch.setattr(Registrar, "_renew", swallow)

    async def main() -> None:
        loops = [
            Directory(redis_server.url, cluster, lambda records: None).run(),
            Registrar(redis_server.url, cluster, a_record("d0"), lease_s=LEASE_S).run(),
        ]
        for loop in loops:
            task = asyncio.create_task(loop)
            await asyncio.sleep(0)
            task.cancel()
            _, pending = await asyncio.wait([task], timeout=5)
            assert not pending

    asyncio.run(main())


def test_with_certificates_only_what_a_node_signed_is_a_node(redis_server: RedisServer, cluster: str) -> None:
    keys = made()

    async def main() -> None:
        directory = Directory(redis_server.url, cluster, lambda _: None, tls_dir=str(keys / "router"))
        registrars = {
            name: Registrar(
                redis_server.url, cluster, a_record(name), lease_s=60.0, tls_dir=folder and str(keys / folder)
            )
            for name, folder in (("d0", "node"), ("d1", None), ("d2", "router"), ("d3", "stranger"), ("d4", "expired"))
        }
        try:
            for registrar in registrars.values():
                await registrar._renew()
            await directory.poll()
            assert [record.peer.node_id for record in directory.records] == ["d0"]
        finally:
            await directory.close()
            for registrar in registrars.values():
                await registrar.deregister()

    asyncio.run(main())


def test_a_node_whose_certificate_is_being_replaced_stays_registered(
    redis_server: RedisServer, cluster: str, tmp_path: Path
) -> None:
    """With its earlier signature, until the new files are whole."""
    folder = tmp_path / "node"
    shutil.copytree(made() / "node", folder)

    async def main() -> None:
        node = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=60.0, tls_dir=str(folder))
        directory = Directory(redis_server.url, cluster, lambda _: None, tls_dir=str(made() / "router"))
        await node._renew()
        whole = (folder / "key.pem").read_bytes()
        for content in (whole[:40], whole):
            (folder / "key.pem").write_bytes(content)
            await node._renew()
            await directory.poll()
            assert [record.peer.node_id for record in directory.records] == ["d0"]
        await directory.close()
        await node.deregister()

    asyncio.run(main())


def test_a_refused_node_is_found_once_the_routers_folder_is_mended(
    redis_server: RedisServer, cluster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, clock = tmp_path / "router", MockClock()
    shutil.copytree(made() / "router", folder)
    whole = (folder / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes(whole[:40])

    async def main() -> None:
        node = Registrar(redis_server.url, cluster, a_record("d0"), lease_s=60.0, tls_dir=str(made() / "node"))
        directory = Directory(redis_server.url, cluster, lambda _: None, grace_s=60.0, clock=clock, tls_dir=str(folder))
        await node._renew()
        for _ in range(3):
            await directory.poll()
            clock.advance(4.0)
        assert directory.records == []
        (folder / "ca.pem").write_bytes(whole)
        await directory.poll()
        assert [record.peer.node_id for record in directory.records] == ["d0"]
        await directory.close()
        await node.deregister()

    asyncio.run(main())
    assert caplog.text.count("ignoring node 'd0'") == 1


def test_a_signed_node_outlives_forged_and_replayed_records_but_not_a_later_node(
    redis_server: RedisServer, cluster: str
) -> None:
    folder, node_keys = str(made() / "node"), Keys(cluster)

    async def main() -> None:
        old, node, later = (
            Registrar(redis_server.url, cluster, a_record("d0", started_at=at), lease_s=60.0, tls_dir=folder)
            for at in (1.0, 2.0, 3.0)
        )
        client = redis.Redis.from_url(redis_server.url)
        await old._renew()
        stranger = a_record("d0", started_at=9.0)
        attacks = [
            (stranger.peer.incarnation, encode(stranger)),
            (old._record.peer.incarnation, cast("bytes", client.get(node_keys.node("d0")))),
        ]
        for incarnation, record in attacks:
            await node._renew()
            client.hset(node_keys.fence("d0"), mapping={"incarnation": incarnation, "started_at": "99.0"})
            client.set(node_keys.node("d0"), record)
            await node._renew()
            await node._renew()
            assert client.hget(node_keys.fence("d0"), "incarnation") == node._record.peer.incarnation.encode()
        client.close()
        await later._renew()
        with pytest.raises(ConfigError, match="started later"):
            await node._renew()
        for registrar in (old, node, later):
            await registrar.deregister()

    asyncio.run(main())

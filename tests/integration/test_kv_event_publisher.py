"""KV events: from a node's journal through a real Redis into the index of every router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from support.redis_cluster_of_nodes import LEASE_S, ANode, ARouter, make_record, names, running, until
from support.redis_server import RedisServer
from support.steady import SteadyTime

from common.cluster.kv_event_publisher import STREAM_LENGTH
from common.cluster.membership import Registrar
from common.cluster.redis_keys import Keys
from common.control.messages import NodeLoad


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 60))


def test_two_routers_know_within_a_second_what_nodes_store_and_remove(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        url = redis_server.url
        nodes = [ANode(url, cluster, make_record(f"n{i}")) for i in range(3)]
        routers = [ARouter(url, cluster) for _ in range(2)]
        nodes[0].stored(names(5000))  # before any router subscribes: arrives by snapshot or as a reset
        async with running(*nodes, *routers):
            await until(lambda: all(r.holds(nodes[0].incarnation, names(5000)) for r in routers))
            for turn in range(5):
                left = names(4900 - 100 * turn, 100 * (turn + 1)) + names(40 * (turn + 1), 10_000)
                count = 40 * (turn + 1)
                with SteadyTime() as since_the_change:
                    for node in nodes:
                        node.stored(names(40, 10_000 + 40 * turn))
                    nodes[0].removed(names(100, 100 * turn))
                    await until(lambda left=left: all(r.holds(nodes[0].incarnation, left) for r in routers))
                    await until(lambda n=count: all(r.index.num_blocks(nodes[2].incarnation) == n for r in routers))
                    assert since_the_change.passed_s < 1.0
            late = ARouter(url, cluster)
            async with running(late):
                await until(lambda: late.holds(nodes[0].incarnation, left))
                await until(lambda: late.subscriber.snapshots == 3)

    play(scene())


def test_dead_node_leaves_the_index_within_its_lease_and_a_new_incarnation_starts_empty(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        lease_s = 1.5
        first = ANode(redis_server.url, cluster, make_record("n0", started_at=1.0), lease_s)
        router = ARouter(redis_server.url, cluster, lease_s)
        first.stored(names(100))
        async with running(router):
            first.start()
            await until(lambda: router.holds(first.incarnation, names(100)))
            await first.die()
            with SteadyTime() as since_its_death:
                await until(lambda: router.index.match(names(100)) == {})
                assert since_its_death.passed_s <= lease_s + 0.1
            second = ANode(redis_server.url, cluster, make_record("n0", started_at=2.0), lease_s)
            second.stored(names(3))
            async with running(second):
                await until(lambda: router.index.match(names(100)) == {second.incarnation: 3})
                third = ANode(redis_server.url, cluster, make_record("n0", started_at=3.0), lease_s)
                third.stored(names(2))
                async with running(third):  # restarted under the same name before the lease is over
                    await until(lambda: router.index.match(names(100)) == {third.incarnation: 2})
                    assert router.index.num_blocks(second.incarnation) == 0

    play(scene())


def test_late_writer_of_a_replaced_incarnation_changes_nothing(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        old = ANode(redis_server.url, cluster, make_record("n0", started_at=1.0))
        new = ANode(redis_server.url, cluster, make_record("n0", started_at=2.0))
        old.stored(names(10))
        keys = Keys(cluster)
        with redis.Redis.from_url(redis_server.url) as client:
            async with running(old):
                await until(lambda: client.scard(keys.blocks(old.incarnation)) == 10)
                async with running(new):
                    await until(lambda: client.hget(keys.fence("n0"), "incarnation") == new.incarnation.encode())
                    entries = client.xlen(keys.events(old.incarnation))
                    old.stored(names(10, 100))
                    await until(lambda: client.exists(keys.events(old.incarnation)) == 0)  # nobody renews it
                    assert entries <= 2
                    assert client.exists(keys.blocks(old.incarnation)) == 0
                    assert client.exists(keys.blocks(new.incarnation)) == 0

    play(scene())


def test_reader_that_fell_behind_the_stream_takes_a_snapshot(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        node = ANode(redis_server.url, cluster, make_record("n0"))
        router = ARouter(redis_server.url, cluster)
        node.stored(names(10))
        with redis.Redis.from_url(redis_server.url) as client:
            async with running(node, router):
                await until(lambda: router.holds(node.incarnation, names(10)))
                stream = router.subscriber._streams[node.incarnation]
                node.stored(names(10, 10))
                await until(lambda: router.holds(node.incarnation, names(20)))
                assert stream.last is not None
                stream.last -= 1  # as if the last entry had been missed, and then trimmed away
                client.xtrim(Keys(cluster).events(node.incarnation), maxlen=1)
                client.delete(Keys(cluster).events(node.incarnation))
                await until(lambda: router.subscriber.gaps >= 1)
                await until(lambda: router.holds(node.incarnation, names(20)))
                assert client.xlen(Keys(cluster).events(node.incarnation)) <= STREAM_LENGTH

    play(scene())


def test_node_that_is_listed_during_the_snapshot_of_another(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        first, second = (ANode(redis_server.url, cluster, make_record(f"n{i}")) for i in range(2))
        router = ARouter(redis_server.url, cluster)
        first.stored(names(100))
        second.stored(names(50))
        subscriber = router.subscriber
        real_sscan = subscriber._client.sscan

        async def sscan_meanwhile(*args: Any, **options: Any) -> Any:
            subscriber.set_nodes([first.record, second.record])
            return await real_sscan(*args, **options)

        monkeypatch.setattr(subscriber._client, "sscan", sscan_meanwhile)
        with redis.Redis.from_url(redis_server.url) as client:
            async with running(first, second):
                for node, count in ((first, 100), (second, 50)):
                    key = Keys(cluster).blocks(node.incarnation)
                    await until(lambda key=key, count=count: client.scard(key) == count)
                subscriber.set_nodes([first.record])
                following = asyncio.create_task(subscriber.run())
                try:
                    await until(lambda: router.holds(first.incarnation, names(100)))
                    await until(lambda: router.holds(second.incarnation, names(50)))
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
        assert "Redis is unavailable" not in caplog.text

    play(scene())


def test_set_that_redis_lost_in_part_is_published_again(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        node = ANode(redis_server.url, cluster, make_record("n0"))
        node.stored(names(9000))
        key = Keys(cluster).blocks(node.incarnation)
        with redis.Redis.from_url(redis_server.url) as client:
            async with running(node):
                await until(lambda: client.scard(key) == 9000)
                client.srem(key, *names(50))
                await until(lambda: client.scard(key) == 9000)

    play(scene())


def test_keys_that_somebody_wrote_with_another_type_are_published_again(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        node, router = ANode(redis_server.url, cluster, make_record("n0")), ARouter(redis_server.url, cluster)
        keys = Keys(cluster)
        with redis.Redis.from_url(redis_server.url) as client:
            async with running(node, router):
                for count, key in enumerate((keys.blocks(node.incarnation), keys.events(node.incarnation)), 1):
                    node.stored(names(10, 10 * count))
                    await until(lambda count=count: router.index.num_blocks(node.incarnation) == 10 * count)
                    client.set(key, "x")
                    await until(lambda key=key: client.type(key) in (b"set", b"stream"))
                    await until(lambda count=count: client.scard(keys.blocks(node.incarnation)) == 10 * count)
                node.stored(names(10, 100))
                await until(lambda: router.index.num_blocks(node.incarnation) == 30)

    play(scene())


def test_node_that_dies_while_redis_holds_part_of_its_set_leaves_nothing_for_good(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        node = ANode(redis_server.url, cluster, make_record("n0"))
        key = Keys(cluster).blocks(node.incarnation)
        node.stored(names(100))
        with redis.Redis.from_url(redis_server.url) as client:
            await node.registrar._renew()
            await node.publisher._round()
            assert node.publisher._up_to_date
            client.delete(key)  # as by eviction
            node.stored(names(10, 100))
            await node.publisher._round()
            assert not node.publisher._up_to_date
            assert client.scard(key) == 10
            assert client.pttl(key) > 0
        await node.publisher._client.aclose()
        await node.registrar.deregister()

    play(scene())


@asynccontextmanager
async def a_hundred_known(server: RedisServer, cluster: str) -> AsyncIterator[tuple[ANode, ARouter, redis.Redis]]:
    """A node whose hundred blocks a router knows, and a client of their Redis."""
    node, router = ANode(server.url, cluster, make_record("n0")), ARouter(server.url, cluster)
    node.stored(names(100))
    with redis.Redis.from_url(server.url) as client:
        async with running(node, router):
            await until(lambda: router.holds(node.incarnation, names(100)))
            yield node, router, client


def test_entry_whose_answer_was_lost_does_not_hide_the_next_reset(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is killed between an entry and its answer, and comes back empty: routers have read that entry, the node does
    not know that it was stored, and no entry reports the blocks that it removes meanwhile."""

    async def scene() -> None:
        away = False
        async with a_hundred_known(redis_server, cluster) as (node, router, client):
            keys, real_eval = Keys(cluster), node.publisher._client.eval

            async def eval_and_lose_the_answer(*args: Any) -> Any:
                nonlocal away
                if not away:
                    await real_eval(*args)
                away = True
                raise redis.ConnectionError("Connection closed by server")

            with monkeypatch.context() as patched:
                patched.setattr(node.publisher._client, "eval", eval_and_lose_the_answer)
                node.stored(names(10, 100))
                await until(lambda: router.holds(node.incarnation, names(110)))
                node.removed(names(30, 80))
                client.delete(keys.events(node.incarnation), keys.blocks(node.incarnation))
            await until(lambda: router.holds(node.incarnation, names(80)))

    play(scene())


@pytest.mark.parametrize("times", [1, 2])
def test_resets_whose_answers_were_lost_do_not_hide_what_is_published_after_them(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """No answer arrives for a while, then Redis loses its memory. A client of a Redis Cluster tries each command twice, and
    abandoned commands may be executed late and in any order, so Redis had more entries than the node had errors."""

    async def scene() -> None:
        given_up: list[tuple[Any, ...]] = []

        async def eval_late(*args: Any) -> Any:
            given_up.append(args)
            raise redis.TimeoutError("Timeout reading")

        async with a_hundred_known(redis_server, cluster) as (node, router, client):
            keys, real_eval = Keys(cluster), node.publisher._client.eval
            with monkeypatch.context() as patched:
                patched.setattr(node.publisher._client, "eval", eval_late)
                node.stored(names(10, 100))
                await until(lambda: len(given_up) >= 5)
                for args in reversed(given_up):
                    for _ in range(times):
                        await real_eval(*args)
                newest = int(client.xrevrange(keys.events(node.incarnation), count=1)[0][0].partition(b"-")[0])
                await until(lambda: router.subscriber._streams[node.incarnation].last == newest)
                client.delete(keys.events(node.incarnation), keys.blocks(node.incarnation))
            await until(lambda: router.holds(node.incarnation, names(110)))
            for turn in range(5):
                node.stored(names(1, 110 + turn))
                await until(lambda count=111 + turn: router.holds(node.incarnation, names(count)))

    play(scene())


def test_load_is_beside_the_record_and_both_are_gone_after_an_orderly_end(
    redis_server: RedisServer, cluster: str
) -> None:
    async def scene() -> None:
        node = ANode(redis_server.url, cluster, make_record("n0"))
        node.load = NodeLoad(running=3, waiting=2, queued_tokens=77, kv_blocks_used=5, kv_blocks_total=10)
        node.stored(names(3))
        keys = Keys(cluster)
        with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
            async with running(node):
                await until(lambda: client.exists(keys.load("n0")))
                said = client.hgetall(keys.load("n0"))
                assert (said["score"], said["queued_tokens"], said["kv_blocks_used"]) == ("11", "77", "5")
                assert said["incarnation"] == node.incarnation
                await until(lambda: client.exists(keys.blocks(node.incarnation)))
                for key in client.scan_iter(match=f"kvrelay:{{{cluster}}}:*"):
                    if key not in (keys.nodes, keys.epoch):
                        assert 0 < client.pttl(key) <= LEASE_S * 1000, key
            # For a lease, an empty record says that the node has left.
            assert set(client.scan_iter(match=f"kvrelay:{{{cluster}}}:*")) == {keys.epoch, keys.node("n0")}
            assert client.get(keys.node("n0")) == ""

    play(scene())


def test_node_whose_blocks_never_come_is_told_aloud(
    redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.index.kv_event_subscriber.SILENCE_S", 0.3)
    monkeypatch.setattr("router.index.kv_event_subscriber._CHECK_S", 0.1)

    async def scene() -> None:
        node = ANode(redis_server.url, cluster, make_record("n0"))
        mute = Registrar(redis_server.url, cluster, make_record("n1"), lease_s=LEASE_S)  # publishes nothing
        router = ARouter(redis_server.url, cluster)
        node.stored(names(4))
        async with running(node, router):
            renewal = asyncio.create_task(mute.run())
            try:
                await until(lambda: len(router.subscriber._streams) == 2)
                silent = next(i for i in router.subscriber._streams if i != node.incarnation)
                router.loads = {i: NodeLoad(kv_blocks_cached=4) for i in router.subscriber._streams}
                await until(lambda: router.subscriber.silent == [silent])
                assert [r for r in caplog.records if "none of them ever reached" in r.getMessage()]
                router.loads[silent] = NodeLoad()
                await until(lambda: router.subscriber.silent == [])
            finally:
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)
                await mute.deregister()

    play(scene())

"""Failures known from other systems (docs/records/known-failures.md), in the prefix index."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.mock_clock import MockClock

from common.base.hashing import hash_blocks, root_hash
from common.control.messages import ModelInfo, NodeLoad, NodeRecord, PeerRef
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.index.kv_event_subscriber import SILENCE_S, KvEventSubscriber, NodeStream
from router.index.metrics import IndexCollector
from router.index.prefix_index import PrefixIndex


def chain(first: int, blocks: int = 8, salt: str = "") -> list[bytes]:
    """The block hashes of some prompt."""
    return hash_blocks(root_hash("model", cache_salt=salt), list(range(first, first + 16 * blocks)))


def test_nothing_of_a_dead_incarnation_is_ever_found_again() -> None:
    """A node that restarts under its name is another incarnation; a late message of the old one changes nothing."""
    clock = MockClock()
    index = PrefixIndex(clock=clock)
    index.stored("node-a/1", chain(0))
    index.stored("node-b/1", chain(0, 3))
    index.expect("node-a/1", chain(0, 12))
    index.drop("node-a/1")
    assert index.match(chain(0, 12)) == {"node-b/1": 3}
    index.stored("node-a/2", chain(500))
    index.removed("node-a/1", chain(0))
    assert index.match(chain(0)) == {"node-b/1": 3}
    assert index.match(chain(500)) == {"node-a/2": 8}


def test_the_index_has_a_bound_and_keeps_what_is_new() -> None:
    index = PrefixIndex(1000, clock=MockClock())
    for prompt in range(400):
        index.stored("a", chain(10_000 * prompt))
        assert len(index) <= 1000
    assert index.match(chain(10_000 * 399)) == {"a": 8}
    assert index.match(chain(0)) == {}


def test_a_node_whose_blocks_never_reach_the_index_is_told_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """By a metric and in the log. That blocks do arrive is seen with real nodes in every cell of the fault matrix."""
    clock, index = MockClock(), PrefixIndex(clock=MockClock())
    loads = {"a": NodeLoad(kv_blocks_cached=4), "empty": NodeLoad()}
    subscriber = KvEventSubscriber("redis://127.0.0.1:1/0", "c", index, loads=lambda: loads, clock=clock)
    layout, model = KVLayout("model", KVSpec.uniform(1, 1, 8, "float32")), ModelInfo("m", "/m", 100, 100)
    subscriber.set_nodes(
        NodeRecord("prefill", PeerRef(f"node-{name}", name, "tcp://x", []), model, layout, 100, 0.0) for name in loads
    )
    for _ in range(3):
        clock.advance(SILENCE_S * 0.6)
        subscriber._check_silence()
    assert subscriber.silent == ["a"]
    assert "node node-a holds 4 cached blocks, but none of them ever reached the prefix index" in caplog.text
    samples = {sample.name: sample.value for m in IndexCollector(index, subscriber).collect() for sample in m.samples}
    assert samples["kvrelay_index_nodes_silent"] == 1
    index.stored("a", chain(0))
    clock.advance(SILENCE_S * 0.6)
    with caplog.at_level(logging.INFO):
        subscriber._check_silence()
    assert subscriber.silent == []
    assert "node node-a is silent no longer" in caplog.text


def test_one_tenants_blocks_are_not_anothers_hits() -> None:
    index = PrefixIndex(clock=MockClock())
    index.stored("a", chain(0, salt="tenant"))
    assert index.match(chain(0, salt="other")) == index.match(chain(0)) == {}
    assert index.match(chain(0, salt="tenant")) == {"a": 8}


@pytest.mark.parametrize("at", [b"soon", b"9" * 400, b"9" * 5000])
def test_a_malformed_stream_entry_is_that_nodes_trouble_alone(at: bytes) -> None:
    async def main() -> None:
        index = PrefixIndex()
        subscriber = KvEventSubscriber("redis://127.0.0.1:1", "test", index)
        stream = subscriber._streams["a"] = NodeStream("a", "node-a", last=0)
        entries = [(b"1-0", {b"at": at, b"stored": b"short"}), (b"2-0", {b"stored": b"".join(chain(0))})]
        await subscriber._apply(stream, entries)
        assert (stream.last, index.match(chain(0))) == (2, {"a": 8})
        more = chain(0, 12)
        entries = [
            (b"3-0", {b"tier": b"device", b"stored": b"".join(more[8:10])}),
            (b"4-0", {b"tier": b"tape", b"stored": b"".join(more[10:])}),
        ]
        await subscriber._apply(stream, entries)
        assert (stream.last, index.match(more)) == (4, {"a": 10})
        assert index.num_blocks("a") == 10
        await subscriber._client.aclose()

    asyncio.run(main())


def test_without_redis_the_index_is_kept_tidy_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a router expects of its nodes makes new sets of holders for as long as the outage lasts."""
    monkeypatch.setattr("router.index.prefix_index._FEW_MASKS", 64)
    monkeypatch.setattr("router.index.kv_event_subscriber._RETRY_S", 0.001)
    clock = MockClock()
    index = PrefixIndex(clock=clock)
    for number in range(1, 500):
        index.expect("n0", chain(16 * number, 1), *(f"n{bit}" for bit in range(9) if number >> bit & 1))
    assert len(index._numbers) > 200
    clock.advance(60.0)
    index.match(chain(0))  # by now nothing of that is believed any more
    subscriber = KvEventSubscriber("redis://127.0.0.1:1/0", "c", index, clock=clock)

    async def main() -> None:
        following = asyncio.create_task(subscriber.run())
        async with asyncio.timeout(10):
            while len(index._numbers) > 64:
                await asyncio.sleep(0.005)
        assert subscriber.away
        following.cancel()
        await asyncio.wait([following])

    asyncio.run(main())

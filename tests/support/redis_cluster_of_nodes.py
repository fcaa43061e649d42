"""The Redis side of nodes and routers, without engine and HTTP: registration, publishing, subscription."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from common.base.clock import Clock, monotonic
from common.cluster.kv_event_publisher import KvEventPublisher
from common.cluster.membership import LEASE_IN_REDIS, Directory, Registrar
from common.control.messages import ModelInfo, NodeLoad, NodeRecord, PeerRef
from common.kv.journal import BlockJournal
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.index.kv_event_subscriber import KvEventSubscriber
from router.index.prefix_index import PrefixIndex

LEASE_S = 0.6


def make_record(node_id: str, *, started_at: float = 1.0) -> NodeRecord:
    """A new incarnation's record."""
    peer = PeerRef(node_id, secrets.token_hex(8), "tcp://127.0.0.1:1", ["tcp://127.0.0.1:2"])
    layout = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))
    return NodeRecord("decode", peer, ModelInfo("m", "/m", 100, 64), layout, 10, started_at)


def names(count: int, first: int = 0) -> list[bytes]:
    """Unique block hashes."""
    return [hashlib.blake2b(str(i).encode(), digest_size=16).digest() for i in range(first, first + count)]


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for `condition`. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ANode:
    """The Redis side of a node, with a block journal but no pool."""

    def __init__(
        self, url: str, cluster: str, record: NodeRecord, lease_s: float = LEASE_S, clock: Clock = monotonic
    ) -> None:
        self.record = record
        self.journal = BlockJournal()
        self.load = NodeLoad()
        self.registrar = Registrar(url, cluster, record, lease_s=lease_s, load=lambda: self.load)
        self.publisher = KvEventPublisher(url, cluster, record.peer, self.journal, lease_s=lease_s, clock=clock)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def incarnation(self) -> str:
        return self.record.peer.incarnation

    def stored(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self.journal.stored(block)

    def removed(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self.journal.removed(block)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.registrar.run()), asyncio.create_task(self.publisher.run())]

    async def die(self) -> None:
        """End without deregistering, like a killed node."""
        await _end(self._tasks)
        self._tasks = []

    async def stop(self) -> None:
        """End and deregister."""
        await self.die()
        await self.registrar.deregister()


class ARouter:
    """The Redis side of a router."""

    def __init__(
        self,
        url: str,
        cluster: str,
        lease_s: float = LEASE_S,
        clock: Clock = monotonic,
        answers: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`answers`: whether the node of an incarnation answers this router."""
        self.index = PrefixIndex(1_000_000, clock=clock)
        self.loads: dict[str, NodeLoad] = {}
        self.subscriber = KvEventSubscriber(url, cluster, self.index, loads=lambda: self.loads, clock=clock)
        poll_s = lease_s * (1 - LEASE_IN_REDIS)
        self.directory = Directory(
            url, cluster, self.subscriber.set_nodes, poll_s, grace_s=lease_s, answers=answers, clock=clock
        )
        self._tasks: list[asyncio.Task[None]] = []

    def holds(self, incarnation: str, blocks: list[bytes]) -> bool:
        """Whether the index contains exactly these blocks of the incarnation."""
        return self.index.num_blocks(incarnation) == len(blocks) == self.index.match(blocks).get(incarnation, 0)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.directory.run()), asyncio.create_task(self.subscriber.run())]

    async def stop(self) -> None:
        await _end(self._tasks)


@asynccontextmanager
async def running(*parts: ANode | ARouter) -> AsyncIterator[None]:
    """Run nodes and routers until the block ends."""
    for part in parts:
        part.start()
    try:
        yield
    finally:
        for part in parts:
            await part.stop()

"""Keeps the prefix index equal to what the nodes publish in Redis: a snapshot of each node, then its stream.

Runs on the router's event loop. The entries of a node's stream are numbered without gaps; after a gap a new snapshot is
read. While Redis is unavailable the index stays as it is. `common.cluster.kv_event_publisher` is the other end, docs/redis.md
has the keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from common.base.clock import Clock, monotonic, until_next
from common.base.sentences import counted
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short
from common.cluster.redis_keys import Keys
from common.control.messages import NodeLoad, NodeRecord
from router.index.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

PERIOD_S = 0.02
"""Pause between two reads, so that one answer contains the entries of many nodes."""
_BLOCK_S = 1.0
"""A read waits at most about this long for entries, which must be shorter than the socket timeout of the Redis client."""
_READ_ENTRIES = 64
_SCAN_BLOCKS = 2000
_RETRY_S = 0.2
SILENCE_S = 10.0
"""A node that holds blocks while the index has none of them for this long counts as silent."""
_CHECK_S = 1.0
_MOST_DIGITS = 18
"""Digits of a time that are converted."""


@dataclass
class NodeStream:
    """One incarnation's stream."""

    incarnation: str
    node_id: str
    last: int | None = None
    """Number of the newest entry applied; None: a snapshot is needed."""
    unseen_since_s: float | None = None
    """Since when the node has reported cached blocks while the index has none of them."""
    silent: bool = False


class KvEventSubscriber:
    """Feeds `index`. `loads()` returns the load that each node reports, by incarnation."""

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        index: PrefixIndex,
        *,
        loads: Callable[[], dict[str, NodeLoad]] = dict,
        clock: Clock = monotonic,
    ) -> None:
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._index = index
        self._loads = loads
        self._clock = clock
        self._streams: dict[str, NodeStream] = {}
        self._reading: asyncio.Future[Any] | None = None
        """The read that waits for entries."""
        self._checked_s = clock()
        self.away = False
        """Redis did not answer the last read."""
        self.entries = self.blocks = self.gaps = self.snapshots = 0
        """Stream entries, block events, gaps and snapshots so far."""
        self.lag_s = 0.0
        """Age of the last applied entry: its timestamp against this machine's clock."""

    @property
    def behind(self) -> list[str]:
        """Incarnations whose blocks the index does not fully know at the moment."""
        return [stream.incarnation for stream in self._streams.values() if stream.last is None]

    @property
    def silent(self) -> list[str]:
        """Incarnations that hold blocks which never reached the index."""
        return [stream.incarnation for stream in self._streams.values() if stream.silent]

    def set_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Read the streams of these incarnations and no others; blocks of all others are dropped at once."""
        wanted = {record.peer.incarnation: record.peer.node_id for record in records}
        for incarnation in self._streams.keys() - wanted.keys():
            del self._streams[incarnation]
        for incarnation in set(self._index.incarnations) - wanted.keys():
            self._index.drop(incarnation)
        listed = wanted.keys() - self._streams.keys()
        self._streams |= {incarnation: NodeStream(incarnation, wanted[incarnation]) for incarnation in listed}
        if listed and self._reading is not None:
            self._reading.cancel()  # their snapshots are read first

    async def run(self) -> None:
        """Read until cancelled, through any outage of Redis."""
        try:
            while True:
                try:
                    found = await self._round()
                except UNREACHABLE as error:
                    if not self.away:
                        log.warning("Redis is unavailable (%s); the prefix index stays as it is", short(error))
                    self.away = True
                    await forget_connections(self._client)
                    await asyncio.sleep(_RETRY_S)
                else:
                    self.away = False
                    if found:
                        await asyncio.sleep(PERIOD_S)
                honour_cancellation()
                while self._index.tidy():  # also without Redis: the router still adds expected blocks
                    await asyncio.sleep(0)
                self._check_silence()
        finally:
            await self._client.aclose()

    async def _round(self) -> bool:
        """Read once. Returns whether there were entries."""
        for stream in [f for f in self._streams.values() if f.last is None]:
            await self._snapshot(stream)
        # Nodes listed during these snapshots get their own in the next round.
        streams = {self._keys.events(f.incarnation): f for f in self._streams.values() if f.last is not None}
        if not streams:
            await self._client.get(self._keys.epoch)  # finds out whether Redis answers
            await self._unless_nodes_are_listed(lambda: asyncio.sleep(until_next(_BLOCK_S, monotonic())))
            return False
        block_ms = round(1000 * until_next(_BLOCK_S, monotonic()))
        after = {key: f"{stream.last}-0" for key, stream in streams.items()}
        answer = await self._unless_nodes_are_listed(
            lambda: self._client.xread(after, count=_READ_ENTRIES, block=block_ms)
        )
        for key, entries in _entries_by_stream(answer):
            await self._apply(streams[key.decode()], entries)
        return bool(answer)

    async def _unless_nodes_are_listed(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `read`; None as soon as new nodes are listed."""

        async def begin() -> Any:  # a task that is cancelled before it runs would leave a coroutine of `read` unawaited
            return await read()

        self._reading = asyncio.ensure_future(begin())
        try:
            return await self._reading
        except asyncio.CancelledError:
            honour_cancellation()
            return None
        finally:
            self._reading = None

    def _is_current(self, stream: NodeStream) -> bool:
        return self._streams.get(stream.incarnation) is stream

    # -- a snapshot

    async def _snapshot(self, stream: NodeStream) -> None:
        """Read the stream's last number, then the set: entries that arrive in between are applied again, which is harmless."""
        incarnation = stream.incarnation
        newest: Any = await self._client.xrevrange(self._keys.events(incarnation), count=1)
        pieces: list[list[bytes]] = []
        cursor = 0
        while newest:
            cursor, members = await self._client.sscan(self._keys.blocks(incarnation), cursor, count=_SCAN_BLOCKS)
            pieces.append(list(members))
            if int(cursor) == 0:
                break
        if not self._is_current(stream):
            return
        self._index.replace(incarnation, b"")
        for piece in pieces:
            self._store(stream, b"".join(piece), b"")
            await asyncio.sleep(0)
            if not self._is_current(stream):
                self._index.drop(incarnation)
                return
        stream.last = _number(newest[0][0]) if newest else 0
        self.snapshots += 1

    # -- the stream

    async def _apply(self, stream: NodeStream, entries: list[Any]) -> None:
        for entry_id, fields in entries:
            if not self._is_current(stream) or stream.last is None:
                return
            number = _number(entry_id)
            if number != stream.last + 1:
                self.gaps += 1
                stream.last = None
                return
            if fields.get(b"kind") == b"reset":
                self._index.replace(stream.incarnation, b"")
            stream.last = number
            self.entries += 1
            at: bytes = fields.get(b"at", b"")
            is_time = at.isdigit() and len(at) <= _MOST_DIGITS
            if is_time:  # one writer's malformed entry must not stop the reading of all streams
                self.lag_s = max(0.0, time.time() - int(at) / 1000)
            if fields.get(b"tier", b"device") != b"device":
                log.error("node %s published blocks of an unknown tier", stream.node_id)
            elif self._store(stream, fields.get(b"stored", b""), fields.get(b"removed", b"")):
                await asyncio.sleep(0)

    def _store(self, stream: NodeStream, stored: bytes, removed: bytes) -> int:
        """Store and remove the blocks of one entry. Returns their number."""
        try:
            self._index.removed(stream.incarnation, removed)
            self._index.stored(stream.incarnation, stored)
        except ValueError as error:
            log.error("node %s published malformed block hashes: %s", stream.node_id, error)
        count = (len(stored) + len(removed)) // 16
        self.blocks += count
        return count

    # -- silent nodes

    def _check_silence(self) -> None:
        """Warn if a node's blocks never arrive: prefix routing would be off without anybody noticing."""
        now = self._clock()
        if now - self._checked_s < _CHECK_S:
            return
        self._checked_s = now
        loads = self._loads()
        for stream in self._streams.values():
            load = loads.get(stream.incarnation)
            if self.away or load is None or load.kv_blocks_cached == 0 or self._index.num_blocks(stream.incarnation):
                if stream.silent and load is not None and not self.away:
                    log.info(
                        "node %s is silent no longer: the prefix index has its blocks, or it caches none",
                        stream.node_id,
                    )
                stream.unseen_since_s, stream.silent = None, False
                continue
            stream.unseen_since_s = stream.unseen_since_s or now
            if now - stream.unseen_since_s > SILENCE_S and not stream.silent:
                stream.silent = True
                log.warning(
                    "node %s holds %s, but none of them ever reached the prefix index: "
                    "prompts are routed to it as if it held nothing. Do router and node name the same Redis and cluster?",
                    stream.node_id,
                    counted(load.kv_blocks_cached, "cached block"),
                )
                stream.last = None


def _entries_by_stream(answer: Any) -> Iterable[tuple[bytes, list[Any]]]:
    """The answer of XREAD: a map in RESP3, a list in RESP2."""
    return answer.items() if hasattr(answer, "items") else answer or ()


def _number(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])

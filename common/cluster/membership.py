"""Who is in the cluster and how loaded: nodes keep records in Redis under a lease, routers read them all.

docs/redis.md has the keys. Runs on the asyncio loop of its process. Redis may go away at any time: a `Registrar` keeps
trying, a `Directory` keeps its last view.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError, ProtocolError
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short
from common.cluster.redis_keys import Keys
from common.control.messages import NodeLoad, NodeRecord, decode, encode

log = logging.getLogger(__name__)

_FORGET_ID_S = 3600.0
"""A node id not renewed for so long leaves the index; its record is gone long before."""
_RETRY_S = 0.2
LEASE_IN_REDIS = 5 / 6
"""Share of the lease after which a record expires; with the time between two looks of a router it makes a whole one."""

# KEYS: fence, node, load, nodes, epoch. ARGV: incarnation, its start, lease in ms, record, node id, seconds until an id
# is forgotten, a new epoch, then field and value of the load in turn. Answers 1, or the record of a newer holder.
_RENEW = """
local holder = redis.call('HMGET', KEYS[1], 'incarnation', 'started_at')
if holder[1] and holder[1] ~= ARGV[1] then
  local theirs, mine = tonumber(holder[2]) or 0, tonumber(ARGV[2])
  -- Incarnations break the tie, so that of two exactly one goes.
  if theirs > mine or (theirs == mine and holder[1] > ARGV[1]) then
    return redis.call('GET', KEYS[2]) or ''
  end
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'started_at', ARGV[2])
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[3], unpack(ARGV, 8))
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
-- Redis' clock: by their own, a node whose clock is an hour ahead would have all others forgotten.
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[4], now, ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now - tonumber(ARGV[6]))
redis.call('SET', KEYS[5], ARGV[7], 'NX')
return 1
"""

# KEYS: fence, node, load, nodes, blocks, events. ARGV: incarnation, node id.
_DEREGISTER = """
redis.call('DEL', KEYS[5], KEYS[6])
if redis.call('HGET', KEYS[1], 'incarnation') == ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('ZREM', KEYS[4], ARGV[2])
end
return 1
"""


def load_fields(load: NodeLoad, incarnation: str, now: float) -> dict[str, str | float]:
    """What the key `load:<node_id>` says; `score` is the classic one of data-parallel routing."""
    return {
        "incarnation": incarnation,
        "at": now,
        "score": load.waiting * 4 + load.running,
        "waiting": load.waiting,
        "running": load.running,
        "queued_tokens": load.queued_tokens,
        "kv_blocks_used": load.kv_blocks_used,
        "kv_blocks_cached": load.kv_blocks_cached,
        "kv_blocks_total": load.kv_blocks_total,
    }


class Registrar:
    """Keeps one node registered, with its load.

    Of two live incarnations with the same node id the one that started last holds it; the other's `run` raises.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        record: NodeRecord,
        *,
        lease_s: float,
        load: Callable[[], NodeLoad] = NodeLoad,
    ) -> None:
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._record = record
        self._encoded = encode(record)
        self._lease_s = lease_s
        self._load = load
        self._reachable = True
        self.registered = asyncio.Event()
        """Set once the record has been written for the first time."""

    async def run(self) -> None:
        """Register and renew, for ever; through any outage of Redis.

        Raises: ConfigError when a newer incarnation took this node id; the node must end.
        """
        while True:
            wait_s = self._lease_s / 3
            try:
                await self._renew()
            except UNREACHABLE as error:
                self._note(reachable=False, why=short(error))
                await forget_connections(self._client)
                wait_s = min(wait_s, _RETRY_S)  # routers whose connections are whole see the lease run out
            else:
                self._note(reachable=True)
                self.registered.set()
            honour_cancellation()
            await asyncio.sleep(wait_s)

    @property
    def reachable(self) -> bool:
        """Redis answered last time."""
        return self._reachable

    async def deregister(self) -> None:
        """Take all keys of this incarnation away, if Redis can be reached, and close the connection.

        Call it after `run` was cancelled.
        """
        peer, keys = self._record.peer, self._keys
        names = [*self._own_keys(), keys.nodes, keys.blocks(peer.incarnation), keys.events(peer.incarnation)]
        try:
            await self._client.eval(_DEREGISTER, len(names), *names, peer.incarnation, peer.node_id)
        except UNREACHABLE as error:
            log.warning("could not deregister; the lease will end it: %s", short(error))
        finally:
            await self._client.aclose()

    async def _renew(self) -> None:
        peer = self._record.peer
        names = [*self._own_keys(), self._keys.nodes, self._keys.epoch]
        load = load_fields(self._load(), peer.incarnation, time.time())
        answer = await self._client.eval(
            _RENEW,
            len(names),
            *names,
            peer.incarnation,
            repr(self._record.started_at),
            max(1, round(self._lease_s * LEASE_IN_REDIS * 1000)),
            self._encoded,
            peer.node_id,
            _FORGET_ID_S,
            secrets.token_hex(8),
            *(part for pair in load.items() for part in pair),
        )
        if answer != 1:
            holder = _decode_record(answer)
            raise ConfigError(
                f"node id {peer.node_id!r} was taken by a node that started later, at "
                f"{holder.peer.control_address if holder else 'an unknown address'}; give this one another --node-id, "
                "or check the clocks"
            )

    def _own_keys(self) -> list[str]:
        node_id = self._record.peer.node_id
        return [self._keys.fence(node_id), self._keys.node(node_id), self._keys.load(node_id)]

    def _note(self, *, reachable: bool, why: str = "") -> None:
        if reachable and not self._reachable:
            log.info("Redis is back; node %s is registered again", self._record.peer.node_id)
        if not reachable and self._reachable:
            log.warning("Redis is away (%s); node %s keeps serving and trying", why, self._record.peer.node_id)
        self._reachable = reachable


class Directory:
    """The present view of the cluster's nodes.

    `on_change(records)` runs on the loop with all nodes, by node id, whenever they differ from the last call.
    While Redis is away the view stays as it was. When Redis comes back, or has lost its memory or the newest part of it,
    nodes that are missing from it keep their place for `grace_s`, in which the live ones register again. A node that did
    not end in order keeps its place for as long as its incarnation `answers`: Redis may take no writes.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        on_change: Callable[[list[NodeRecord]], None],
        poll_s: float = 0.5,
        *,
        grace_s: float = 3.0,
        answers: Callable[[str], bool] = lambda _: False,
        clock: Clock = monotonic,
    ) -> None:
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._on_change = on_change
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._answers = answers
        self._clock = clock
        self._records: dict[str, NodeRecord] = {}
        self._parsed: dict[str, tuple[bytes, NodeRecord | None]] = {}
        self._grace_until = float("-inf")
        self._epoch: bytes | None = None
        self._renewals: dict[str, float] = {}
        """By node id: its last renewal by Redis' clock."""
        self.degraded = False
        """Redis did not answer last time."""
        self.unrenewed: list[str] = []
        """Nodes whose records in Redis have ended, and who answer."""

    @property
    def records(self) -> list[NodeRecord]:
        """The nodes as `on_change` last reported them."""
        return [self._records[node_id] for node_id in sorted(self._records)]

    async def run(self) -> None:
        """Poll for ever."""
        try:
            while True:
                try:
                    epoch, renewals, answer = await self._fetch()
                except UNREACHABLE as error:
                    self._lost(short(error))
                    await forget_connections(self._client)
                else:
                    self._update(epoch, renewals, answer)
                honour_cancellation()
                await asyncio.sleep(self._poll_s)
        finally:
            await self._client.aclose()

    async def _fetch(self) -> tuple[bytes | None, dict[str, float], dict[str, bytes]]:
        client: Any = self._client
        members: list[tuple[bytes, float]] = await client.zrange(self._keys.nodes, 0, -1, withscores=True)
        renewals = {member.decode("utf-8", "replace"): score for member, score in members}
        ids = list(renewals)
        keys = [self._keys.epoch, *(self._keys.node(node_id) for node_id in ids)]
        values: list[bytes | None] = await client.mget(keys)
        epoch = values.pop(0)
        found = {node_id: value for node_id, value in zip(ids, values, strict=True) if value is not None}
        return epoch, renewals, found

    def _lost(self, why: str) -> None:
        if not self.degraded:
            log.warning("Redis is away (%s); going on with the %d nodes known", why, len(self._records))
        self.degraded = True

    def _update(self, epoch: bytes | None, renewals: dict[str, float], answer: dict[str, bytes]) -> None:
        now = self._clock()
        if self.degraded:
            log.info("Redis is back")
            self.degraded = False
            self._grace_until = now + self._grace_s
        elif epoch != self._epoch and self._epoch is not None:
            log.warning("Redis lost its memory; waiting for the nodes to register again")
            self._grace_until = now + self._grace_s
        elif any(renewed < self._renewals.get(node_id, renewed) for node_id, renewed in renewals.items()):
            # It came back between two looks, with an older state, in which the records of all nodes may have ended.
            log.warning("Redis lost what was newest in its memory; waiting for the nodes to register again")
            self._grace_until = now + self._grace_s
        self._epoch, self._renewals = epoch, renewals
        view = {node_id: record for node_id, raw in answer.items() if (record := self._parse(node_id, raw)) is not None}
        self._parsed = {node_id: self._parsed[node_id] for node_id in answer}
        if now < self._grace_until:
            view = {**self._records, **view}
        gone = renewals.keys() & self._records.keys() - answer.keys() - view.keys()
        unrenewed = sorted(node_id for node_id in gone if self._answers(self._records[node_id].peer.incarnation))
        view |= {node_id: self._records[node_id] for node_id in unrenewed}
        if unrenewed and not self.unrenewed:
            log.warning("the records of %s in Redis have ended, although they answer", ", ".join(unrenewed))
        self.unrenewed = unrenewed
        if view != self._records:
            self._records = view
            self._on_change(self.records)

    def _parse(self, node_id: str, raw: bytes) -> NodeRecord | None:
        known = self._parsed.get(node_id)
        if known is not None and known[0] == raw:
            return known[1]
        record = _decode_record(raw)
        if record is None or record.peer.node_id != node_id:
            log.error("ignoring node %r: its record in Redis is malformed", node_id)
            record = None
        self._parsed[node_id] = (raw, record)
        return record


def _decode_record(raw: bytes | str | None) -> NodeRecord | None:
    if not isinstance(raw, bytes):
        return None
    try:
        message = decode(raw)
    except (ProtocolError, ConfigError) as error:
        log.warning("malformed node record: %s", error)
        return None
    return message if isinstance(message, NodeRecord) else None

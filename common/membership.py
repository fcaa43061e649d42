"""Who is in the cluster: nodes keep a `NodeRecord` in Redis under a lease, routers read them all.

    kvrelay:<cluster>:node:<node_id>    encoded NodeRecord, expires unless renewed
    kvrelay:<cluster>:nodes             sorted set of node ids, scored by their last renewal; what to look up
    kvrelay:<cluster>:epoch             random; another one (or none) means that Redis lost its memory

Runs on the asyncio loop of its process. Redis may go away at any time: a `Registrar` keeps trying, a
`Directory` keeps its last view. Every Redis error is mapped or handled here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, WatchError

from common.clock import Clock, monotonic
from common.errors import ConfigError, ProtocolError
from common.protocol import NodeRecord, decode, encode

log = logging.getLogger(__name__)

_SOCKET_TIMEOUT_S = 2.0
_CHECK_TIMEOUT_S = 4.0
_FORGET_ID_S = 3600.0
"""A node id not renewed for so long leaves the index; its record is gone long before."""
_UNREACHABLE = (RedisError, OSError, TimeoutError)


def connect(redis_url: str) -> redis.asyncio.Redis:
    """A client whose every operation fails within seconds when Redis is away, without retries of its own.

    Raises: ConfigError for a malformed URL.
    """
    try:
        return redis.asyncio.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            redis_url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"the Redis URL {without_password(redis_url)} is malformed: {error}") from error


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(redis_url)
    if "@" not in parts.netloc:
        return redis_url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


async def check_redis(redis_url: str) -> None:
    """Return if Redis answers.

    Raises: ConfigError with one sentence, within about 5 s, if it does not.
    """
    client = connect(redis_url)
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            await _ping(client)
    except TimeoutError:
        raise ConfigError(f"cannot reach Redis at {without_password(redis_url)}: no answer") from None
    except (RedisError, OSError) as error:
        raise ConfigError(f"cannot reach Redis at {without_password(redis_url)}: {_short(error)}") from error
    finally:
        await client.aclose()


async def _ping(client: redis.asyncio.Redis) -> None:
    answer: Any = client.ping()  # pyright: ignore[reportUnknownMemberType]
    await answer


def _honour_cancellation() -> None:
    """End a loop whose cancellation was swallowed below.

    The Redis client waits with `asyncio.wait_for`, which before Python 3.12 may lose a cancellation that comes
    in the very moment in which the wait is over.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _short(error: BaseException) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return str(error).rstrip(".") or type(error).__name__


def _node_key(cluster: str, node_id: str) -> str:
    return f"kvrelay:{cluster}:node:{node_id}"


def _index_key(cluster: str) -> str:
    return f"kvrelay:{cluster}:nodes"


def _epoch_key(cluster: str) -> str:
    return f"kvrelay:{cluster}:epoch"


class Registrar:
    """Keeps one node registered.

    Of two live incarnations with the same node id the one that started last holds it; the other's `run` raises.
    """

    def __init__(self, redis_url: str, cluster: str, record: NodeRecord, *, lease_s: float) -> None:
        self._client = connect(redis_url)
        self._cluster = cluster
        self._record = record
        self._encoded = encode(record)
        self._lease_s = lease_s
        self._reachable = True
        self.registered = asyncio.Event()
        """Set once the record has been written for the first time."""

    async def run(self) -> None:
        """Register and renew, for ever; through any outage of Redis.

        Raises: ConfigError when a newer incarnation took this node id; the node must end.
        """
        while True:
            try:
                await self._renew()
            except _UNREACHABLE as error:
                self._note(reachable=False, why=_short(error))
            else:
                self._note(reachable=True)
                self.registered.set()
            _honour_cancellation()
            await asyncio.sleep(self._lease_s / 3)

    @property
    def reachable(self) -> bool:
        """Redis answered last time."""
        return self._reachable

    async def deregister(self) -> None:
        """Take the record away, if it is still ours and Redis can be reached, and close the connection.

        Call it after `run` was cancelled.
        """
        try:
            await self._remove()
        except _UNREACHABLE as error:
            log.warning("could not deregister; the lease will end it: %s", _short(error))
        finally:
            await self._client.aclose()

    async def _renew(self) -> None:
        key, index = self._keys()
        async with self._client.pipeline(transaction=True) as pipe:
            while True:
                await pipe.watch(key)
                self._check_holder(_decode_record(await pipe.get(key)))
                pipe.multi()
                now = time.time()
                pipe.set(key, self._encoded, px=max(1, round(self._lease_s * 1000)))
                pipe.zadd(index, {self._record.peer.node_id: now})
                pipe.zremrangebyscore(index, "-inf", now - _FORGET_ID_S)
                pipe.set(_epoch_key(self._cluster), secrets.token_hex(8), nx=True)
                try:
                    await pipe.execute()
                    return
                except WatchError:
                    continue

    async def _remove(self) -> None:
        key, index = self._keys()
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            holder = _decode_record(await pipe.get(key))
            if holder is None or holder.peer.incarnation != self._record.peer.incarnation:
                return
            pipe.multi()
            pipe.delete(key)
            pipe.zrem(index, self._record.peer.node_id)
            try:
                await pipe.execute()
            except WatchError:
                log.info("node id %s was taken over while deregistering", self._record.peer.node_id)

    def _keys(self) -> tuple[str, str]:
        return _node_key(self._cluster, self._record.peer.node_id), _index_key(self._cluster)

    def _check_holder(self, holder: NodeRecord | None) -> None:
        mine, theirs = self._record, holder
        if theirs is None or theirs.peer.incarnation == mine.peer.incarnation:
            return
        # Incarnations break the tie, so that of two exactly one goes.
        if (theirs.started_at, theirs.peer.incarnation) > (mine.started_at, mine.peer.incarnation):
            raise ConfigError(
                f"node id {mine.peer.node_id!r} was taken by a node that started later, at "
                f"{theirs.peer.control_address}; give this one another --node-id, or check the clocks"
            )

    def _note(self, *, reachable: bool, why: str = "") -> None:
        if reachable and not self._reachable:
            log.info("Redis is back; node %s is registered again", self._record.peer.node_id)
        if not reachable and self._reachable:
            log.warning("Redis is away (%s); node %s keeps serving and trying", why, self._record.peer.node_id)
        self._reachable = reachable


class Directory:
    """The present view of the cluster's nodes.

    `on_change(records)` runs on the loop with all nodes, by node id, whenever they differ from the last call.
    While Redis is away the view stays as it was. When Redis comes back, or has lost its memory, nodes that are
    missing from it keep their place for `grace_s`, in which the live ones register again.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        on_change: Callable[[list[NodeRecord]], None],
        poll_s: float = 0.5,
        *,
        grace_s: float = 3.0,
        clock: Clock = monotonic,
    ) -> None:
        self._client = connect(redis_url)
        self._cluster = cluster
        self._on_change = on_change
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._clock = clock
        self._records: dict[str, NodeRecord] = {}
        self._parsed: dict[str, tuple[bytes, NodeRecord | None]] = {}
        self._grace_until = float("-inf")
        self._epoch: bytes | None = None
        self.degraded = False
        """Redis did not answer last time."""

    @property
    def records(self) -> list[NodeRecord]:
        """The nodes as `on_change` last reported them."""
        return [self._records[node_id] for node_id in sorted(self._records)]

    async def run(self) -> None:
        """Poll for ever."""
        try:
            while True:
                try:
                    epoch, answer = await self._fetch()
                except _UNREACHABLE as error:
                    self._lost(_short(error))
                else:
                    self._update(epoch, answer)
                _honour_cancellation()
                await asyncio.sleep(self._poll_s)
        finally:
            await self._client.aclose()

    async def _fetch(self) -> tuple[bytes | None, dict[str, bytes]]:
        client: Any = self._client  # its annotations cover every option of every command at once
        members: list[bytes] = await client.zrange(_index_key(self._cluster), 0, -1)
        ids = [member.decode("utf-8", "replace") for member in members]
        keys = [_epoch_key(self._cluster), *(_node_key(self._cluster, node_id) for node_id in ids)]
        values: list[bytes | None] = await client.mget(keys)
        epoch = values.pop(0)
        return epoch, {node_id: value for node_id, value in zip(ids, values, strict=True) if value is not None}

    def _lost(self, why: str) -> None:
        if not self.degraded:
            log.warning("Redis is away (%s); going on with the %d nodes known", why, len(self._records))
        self.degraded = True

    def _update(self, epoch: bytes | None, answer: dict[str, bytes]) -> None:
        now = self._clock()
        if self.degraded:
            log.info("Redis is back")
            self.degraded = False
            self._grace_until = now + self._grace_s
        elif epoch != self._epoch and self._epoch is not None:
            log.warning("Redis lost its memory; waiting for the nodes to register again")
            self._grace_until = now + self._grace_s
        self._epoch = epoch
        view = {node_id: record for node_id, raw in answer.items() if (record := self._parse(node_id, raw)) is not None}
        self._parsed = {node_id: self._parsed[node_id] for node_id in answer}
        if now < self._grace_until:
            view = {**self._records, **view}
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

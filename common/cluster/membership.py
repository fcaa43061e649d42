"""Cluster membership and load: nodes write records to Redis under a lease, and routers read all records.

docs/redis.md describes the keys. Runs on the asyncio loop of its process. Redis may become unavailable at any time; then a
`Registrar` keeps trying, and a `Directory` keeps its last view.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from redis.exceptions import ResponseError

from common.base.clock import Clock, monotonic, until_next
from common.base.errors import ConfigError, Unavailable
from common.cluster.desired_state import Counts, change_desired
from common.cluster.records import CheckedRecords, EncodedRecord, LoadedAdapters, Records
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short, tolerated
from common.cluster.redis_keys import Keys
from common.cluster.redis_scripts import DEREGISTER, READ, RENEW
from common.config.option_groups import MembershipOptions
from common.control.messages import Adapter, NodeLoad, NodeRecord, Role

log = logging.getLogger(__name__)

_FORGET_ID_S = 3600.0
"""A node id that is not renewed for this long is removed from the index; its record expires long before."""
_KEEP = b"keep"
_KEEP_S = 86_400
"""How long a node's changed role, and the list of the adapters loaded into it, outlive the node."""
_RETRY_S = 0.2
_AT_A_START, _START_S = 0.2, 5.0
"""Factor of the poll interval while no node is known, and how long it applies after the first node: the start of a cluster
waits for these polls."""
_POLICY_S = 60.0
"""How often routers ask what Redis does when its memory is full."""
_WHEN_IDLE = 2.0
"""Factor of the poll interval while nothing happens."""
LEASE_IN_REDIS = 5 / 6
"""Fraction of the lease after which a record expires. The router's poll interval takes the rest, unless all nodes are idle."""


def load_fields(load: NodeLoad, incarnation: str, now: float) -> dict[str, str | float]:
    """Content of the key `load:<node_id>`; `score` is the usual score of data-parallel routing."""
    shown = ("waiting", "running", "queued_tokens", "kv_blocks_used", "kv_blocks_cached", "kv_blocks_total")
    score = load.waiting * 4 + load.running
    return {"incarnation": incarnation, "at": now, "score": score, **{name: getattr(load, name) for name in shown}}


class Registrar:
    """Keeps one node registered, with its load.

    If two live incarnations have the same node id, the later one keeps it, and the `run` of the other raises.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        record: NodeRecord,
        *,
        lease_s: float,
        load: Callable[[], NodeLoad] = NodeLoad,
        loaded: LoadedAdapters | None = None,
        tls_dir: str | None = None,
        own_role: Role | None = None,
    ) -> None:
        """loaded: None if it is unknown; then the list in Redis stays. own_role: the role of the node's command, None if it is
        that of the record."""
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._record = record
        self._loaded = loaded
        self._changed_role = "" if own_role in (None, record.role) else record.role
        self._outdated = False
        """Whether the encoded record is stale."""
        self._records = Records(cluster, tls_dir)
        self._encode()
        self._lease_s = lease_s
        self._load = load
        self.unavailable: str | None = None
        """Why the last renewal in Redis failed; None if it succeeded."""
        self._changed = asyncio.Event()
        self.registered = asyncio.Event()
        """Set when the record is first written."""

    async def run(self) -> None:
        """Register and renew until cancelled, through any outage of Redis.

        Raises: ConfigError if a newer incarnation has taken this node id; the node must end.
        """
        while True:
            wait_s = until_next(self._lease_s / 3, monotonic())
            try:
                await self._renew()
            except UNREACHABLE as error:
                self._note(short(error))
                await forget_connections(self._client)
                wait_s = min(wait_s, _RETRY_S)  # routers that still reach Redis see the lease expire
            else:
                self._note(None)
                self.registered.set()
            honour_cancellation()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()

    def update(self, adapters: Sequence[Adapter], paths: Mapping[str, str], loaded: LoadedAdapters | None) -> None:
        """Register the LoRA adapters that the node now serves, and where each was read from, by name. `loaded`: those that
        were loaded while the node ran."""
        self._record = replace(self._record, adapters=list(adapters), adapter_paths=dict(paths))
        self._loaded = loaded
        self._outdated = True
        self._changed.set()

    def _encode(self) -> None:
        self._encoded = self._records.encode(self._record)
        self._encoded_loaded = _KEEP if self._loaded is None else self._records.encode_loaded(self._loaded)
        self._outdated = False

    async def deregister(self, next_role: Role | None = None) -> None:
        """Delete the keys of this incarnation if Redis is reachable, and close the connection. Cancel `run` first.

        next_role: of the node's next process; None: as this one's."""
        peer, keys = self._record.peer, self._keys
        names = [*self._own_keys(), keys.nodes, keys.blocks(peer.incarnation), keys.events(peer.incarnation)]
        lease_ms = max(1, round(1000 * self._lease_s))
        try:
            with tolerated(log, "could not deregister, the record expires with its lease"):
                await self._client.eval(DEREGISTER, len(names), *names, peer.incarnation, peer.node_id, lease_ms)
                if next_role is not None:
                    await self._client.set(keys.role(peer.node_id), next_role, ex=_KEEP_S)
        finally:
            await self._client.aclose()

    async def _renew(self) -> None:
        peer = self._record.peer
        keys = self._keys
        names = [*self._own_keys(), keys.nodes, keys.epoch, keys.adapters(peer.node_id), keys.role(peer.node_id)]
        if self._outdated or self._records.must_sign_again:
            try:
                self._encode()
            except ConfigError as error:  # the certificate's files are being replaced; the old signature is still valid
                log.warning("the record is not signed with the new certificate yet: %s", error.message)
        load = load_fields(self._load(), peer.incarnation, time.time())
        answer = await self._client.eval(
            RENEW,
            len(names),
            *names,
            peer.incarnation,
            repr(self._record.started_at),
            max(1, round(self._lease_s * LEASE_IN_REDIS * 1000)),
            self._encoded.readable,
            peer.node_id,
            _FORGET_ID_S,
            secrets.token_hex(8),
            self._encoded_loaded,
            1000 * _KEEP_S,
            self._encoded.newest,
            self._changed_role,
            *(part for pair in load.items() for part in pair),
        )
        if answer != 1:
            holder = self._records.decode(answer)
            started_at = self._record.started_at
            if self._records.signed and (holder is None or holder.started_at < started_at):
                # The record has no signature, or the fence belongs to another one: somebody wants to end this node.
                log.warning("removed a record of node id %r that no node has signed", peer.node_id)
                await self._client.delete(*self._own_keys())
                self._changed.set()
                return
            raise ConfigError(
                f"node id {peer.node_id!r} was taken by a node that started later, at "
                f"{holder.peer.control_address if holder else 'an unknown address'}; give this one another --node-id, "
                "or check the clocks"
            )

    def _own_keys(self) -> list[str]:
        node_id = self._record.peer.node_id
        return [
            self._keys.fence(node_id),
            self._keys.node(node_id),
            self._keys.load(node_id),
            self._keys.newest(node_id),
        ]

    def _note(self, unavailable: str | None) -> None:
        node_id, before, self.unavailable = self._record.peer.node_id, self.unavailable, unavailable
        if unavailable is None and before is not None:
            log.info("Redis is available again; node %s is registered", node_id)
        if unavailable is not None and before is None:
            log.warning("Redis is unavailable (%s); node %s keeps serving and retrying", unavailable, node_id)


def evicting_policy(memory: Mapping[str, Any]) -> str:
    """The policy by which Redis evicts keys, from its `INFO memory`, of a Redis Cluster by server; empty if it evicts none."""
    for each in memory.values():
        if isinstance(each, Mapping) and (found := evicting_policy(cast("Mapping[str, Any]", each))):
            return found
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    return "" if policy == "noeviction" or not memory.get("maxmemory") else policy


class Directory:
    """The current view of the cluster's nodes.

    `on_change(records)` runs on the loop with all nodes, ordered by node id, whenever they differ from the last call.
    While Redis is unavailable, the view does not change. After an outage, or after Redis lost all or its newest data,
    missing nodes stay in the view for `grace_s`, during which live nodes register again. A node that did not deregister
    stays as long as its incarnation `answers`, because Redis may refuse writes, or evict keys.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        on_change: Callable[[list[NodeRecord]], None],
        poll_s: float = 0.5,
        *,
        grace_s: float = MembershipOptions.lease_s,
        answers: Callable[[str], bool] = lambda _: False,
        idle: Callable[[], bool] = lambda: False,
        clock: Clock = monotonic,
        tls_dir: str | None = None,
    ) -> None:
        """idle: whether polls may be twice as far apart."""
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._checked = CheckedRecords(Records(cluster, tls_dir), clock)
        self._on_change = on_change
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._answers = answers
        self._idle = idle
        self._clock = clock
        self._records: dict[str, NodeRecord] = {}
        self._grace_until = float("-inf")
        self._epoch: bytes | None = None
        self._renewals: dict[str, float] = {}
        """Node id -> time of its last renewal, by the clock of Redis."""
        self._progress: dict[str, tuple[float, float]] = {}
        """Node id -> that time, and the time of this process's clock when it was first read."""
        self.degraded = False
        """Whether Redis failed to answer the last poll."""
        self.polled = asyncio.Event()
        """Set after the first poll, even if Redis did not answer it."""
        self.unrenewed: list[str] = []
        """Nodes that still answer although their records in Redis have expired, were evicted or are damaged."""
        self.evicts = ""
        """Redis's policy for a full memory if it evicts keys; empty if it does not, or that is not known."""
        self._policy_read_s = float("-inf")

    @property
    def records(self) -> list[NodeRecord]:
        """The nodes as `on_change` last reported them."""
        return [self._records[node_id] for node_id in sorted(self._records)]

    @property
    def refused(self) -> dict[str, str]:
        """Node id -> why its record is not used."""
        return self._checked.refused

    @property
    def vanished(self) -> dict[str, float]:
        """Nodes that do not renew their registration and did not deregister, with the seconds since their last renewal was
        read. Redis forgets an id after an hour."""
        now = self._clock()
        ages = {
            node_id: now - seen_s for node_id, (_, seen_s) in self._progress.items() if node_id not in self._records
        }
        return {node_id: age_s for node_id, age_s in ages.items() if age_s > self._grace_s}

    async def scale(self, changes: Mapping[str, object]) -> Counts:
        """Change how many nodes of some roles the cluster wants. Returns all counts. Raises: NotFound, BadRequest, Unavailable."""
        try:
            return await change_desired(self._client, self._keys, changes)
        except UNREACHABLE as error:
            raise Unavailable(f"Redis is away: {short(error)}") from error

    async def run(self) -> None:
        """Poll until cancelled."""
        start_until_s = float("-inf")
        try:
            while True:
                await self.poll()
                now_s = monotonic()
                if not self._records:
                    start_until_s = now_s + _START_S
                factor = _AT_A_START if now_s < start_until_s else _WHEN_IDLE if self._idle() else 1.0
                period_s = self._poll_s * factor
                await asyncio.sleep(until_next(period_s, now_s))
        finally:
            await self.close()

    async def poll(self) -> None:
        """Read the records once and report a change."""
        try:
            epoch, renewals, answer, left = await self._fetch()
            await self._read_policy()
        except UNREACHABLE as error:
            if not self.degraded:
                log.warning("Redis is unavailable (%s); nodes that stay known: %d", short(error), len(self._records))
            self.degraded = True
            await forget_connections(self._client)
        else:
            self._update(epoch, renewals, answer, left)
        self.polled.set()
        honour_cancellation()

    async def close(self) -> None:
        """Close the connection to Redis."""
        await self._client.aclose()

    async def _read_policy(self) -> None:
        """Learn now and then what Redis does when its memory is full. Without the right to ask it stays unknown."""
        if self._clock() - self._policy_read_s < _POLICY_S:
            return
        self._policy_read_s = self._clock()
        evicts, before = "", self.evicts
        with suppress(ResponseError):
            evicts = evicting_policy(await self._client.info("memory"))
        self.evicts = evicts
        if evicts and not before:
            log.warning(
                "Redis evicts keys when its memory is full (%s); set its maxmemory-policy to noeviction", evicts
            )

    async def _fetch(self) -> tuple[bytes | None, dict[str, float], dict[str, EncodedRecord], set[str]]:
        """The epoch, the renewals, the records, and the known nodes that have deregistered."""
        keys = self._keys
        prefixes = keys.node(""), keys.newest("")
        epoch, members, *values = await self._client.eval(READ, 2, keys.epoch, keys.nodes, *prefixes)
        ids = [member.decode("utf-8", "replace") for member in members[::2]]
        renewals = dict(zip(ids, map(float, members[1::2]), strict=True))
        found_records = zip(ids, *values, strict=True)
        records = {i: EncodedRecord(raw, newest or b"") for i, raw, newest in found_records if raw is not None}
        missing = list(self._records.keys() - renewals.keys())
        found: list[bytes | None] = await self._client.mget(list(map(keys.node, missing))) if missing else []
        return epoch, renewals, records, {each for each, raw in zip(missing, found, strict=True) if raw == b""}

    def _update(
        self, epoch: bytes | None, renewals: dict[str, float], answer: dict[str, EncodedRecord], left: set[str]
    ) -> None:
        now = self._clock()
        if self.degraded:
            log.info("Redis is available again")
            self.degraded = False
            self._grace_until = now + self._grace_s
        elif epoch != self._epoch and self._epoch is not None:
            log.warning("Redis lost its data; waiting for the nodes to register again")
            self._grace_until = now + self._grace_s
        elif any(renewed < self._renewals.get(node_id, renewed) for node_id, renewed in renewals.items()):
            # Redis restarted between two polls with older data, in which the records of all nodes may have expired.
            log.warning("Redis lost its newest data; waiting for the nodes to register again")
            self._grace_until = now + self._grace_s
        self._epoch, self._renewals = epoch, renewals
        self._progress = {
            node_id: known if (known := self._progress.get(node_id)) and known[0] == renewed else (renewed, now)
            for node_id, renewed in renewals.items()
        }
        read, since = self._checked.read(answer), self._progress
        # Leave out old records, which somebody wrote without an expiry.
        view = {i: record for i, record in read.items() if now - since[i][1] <= 2 * max(self._grace_s, record.lease_s)}
        if now < self._grace_until:
            view = {**self._records, **view}
        gone = self._records.keys() - view.keys() - left
        unrenewed = sorted(node_id for node_id in gone if self._answers(self._records[node_id].peer.incarnation))
        view |= {node_id: self._records[node_id] for node_id in unrenewed}
        if unrenewed and not self.unrenewed:
            log.warning(
                "the records of %s in Redis have expired, were evicted or are damaged, although these nodes still answer",
                ", ".join(unrenewed),
            )
        if self.unrenewed and not unrenewed:
            log.info("Redis has the records of all answering nodes again")
        self.unrenewed = unrenewed
        if view != self._records:
            self._records = view
            self._on_change(self.records)

"""The transport ends of two nodes over real storages, for the tests of `kvtransfer`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.kv_words import plane_words, word_of

from common.base.clock import Clock, monotonic
from common.base.hashing import hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    DestinationReleased,
    GrantOrder,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec, LayerGroup
from common.kv.storage import KVStorage

DEADLINE_S = 20.0
PATTERN = 0xA5


def layout(
    *, tp: int = 1, pp: tuple[int, ...] = (), heads: int = 2, dtype: str = "bfloat16", layers: int = 4
) -> KVLayout:
    return KVLayout("model", KVSpec.uniform(layers, heads, 8, dtype, block_size=4), tp_size=tp, pp_layers=pp)


class Recorder:
    """Collects one end's events from any thread, without `Opened`."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, event: Any) -> None:
        if isinstance(event, Opened):
            return
        with self._changed:
            self.events.append(event)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def of(self, key: AttemptKey, kind: type | tuple[type, ...]) -> list[Any]:
        return [e for e in list(self.events) if e.key == key and isinstance(e, kind)]

    def wait(self, key: AttemptKey, kind: type | tuple[type, ...]) -> Any:
        """The first event of that kind about `key`; fails after the deadline."""
        with self._changed:
            ok = self._changed.wait_for(lambda: self.of(key, kind), DEADLINE_S)
            assert ok, f"no {kind} of {key} within {DEADLINE_S} s; got {self.events}"
        return self.of(key, kind)[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has no event; fails after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.001)


@dataclass
class Rank:
    """One rank of either node."""

    end: Any
    storage: KVStorage
    recorder: Recorder


@dataclass
class Cluster:
    """A prefill node and a decode node. `transport` has `sender(...)` and `receiver(...)` factories."""

    transport: Any
    src_layout: KVLayout
    dst_layout: KVLayout
    num_blocks: int = 32
    clock: Clock = monotonic
    senders: list[Rank] = field(default_factory=list)
    receivers: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank, shard in enumerate(self.dst_layout.shards()):
            storage, recorder = KVStorage(self.dst_layout, shard, self.num_blocks), Recorder()
            end = self.transport.receiver(storage, self.dst_layout, rank, recorder, self.clock)
            self.receivers.append(Rank(end, storage, recorder))
        for rank, shard in enumerate(self.src_layout.shards()):
            storage, recorder = KVStorage(self.src_layout, shard, self.num_blocks), Recorder()
            end = self.transport.sender(storage, self.src_layout, rank, recorder, self.clock)
            self.senders.append(Rank(end, storage, recorder))

    @property
    def dst(self) -> PeerRef:
        return PeerRef("decode", "dst-1", "", [r.end.address for r in self.receivers])

    def close(self) -> None:
        for rank in [*self.senders, *self.receivers]:
            rank.end.close()

    def transfer(
        self,
        request: str = "r",
        *,
        attempt: int = 1,
        tokens: int = 14,
        held: int = 0,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> Transfer:
        return Transfer(self, AttemptKey(request, attempt), tokens, held, seed, timeout_s)


class Transfer:
    """One attempt between the two nodes of a cluster, with its true KV."""

    def __init__(self, cluster: Cluster, key: AttemptKey, tokens: int, held: int, seed: int, timeout_s: float) -> None:
        self.cluster, self.key, self.held, self.timeout_s = cluster, key, held, timeout_s
        self.tokens = tokens
        rng = np.random.default_rng(seed)
        src = cluster.src_layout
        self.total = -(-tokens // src.spec.block_size)
        self.hashes = hash_blocks(
            root_hash(src.fingerprint),
            [seed + i for i in range(tokens)],
            block_size=src.spec.block_size,
            include_partial=True,
        )
        ids = rng.permutation(cluster.num_blocks)
        self.src_blocks: list[int] = ids[: self.total].tolist()
        self.dst_blocks: list[int] = rng.permutation(cluster.num_blocks)[: self.total].tolist()
        self.planes = [self._draw(rng, group) for group in src.spec.groups]
        """For each group and plane the true KV: [layers, blocks of the sequence, heads, block_size, width]."""

    def _draw(self, rng: np.random.Generator, group: LayerGroup) -> list[np.ndarray]:
        word = word_of(group)
        shape = len(group.layers), self.total, group.num_heads, self.cluster.src_layout.spec.block_size
        high = 2 ** (8 * word.itemsize) - 1
        return [rng.integers(1, high, (*shape, plane.width), dtype=word) for plane in group.planes]

    @property
    def truth(self) -> np.ndarray:
        """[layers, planes, blocks of the sequence, heads, block_size, width] of the only group."""
        [planes] = self.planes
        return np.stack(planes, axis=1)

    def compute(self) -> None:
        """Write the true KV into the source blocks of every sending rank."""
        for rank, shard in zip(self.cluster.senders, self.cluster.src_layout.shards(), strict=True):
            for part in shard.parts:
                for plane, truth in zip(plane_words(rank.storage, part.group), self.planes[part.group], strict=True):
                    plane[:, self.src_blocks] = truth[part.layer_lo : part.layer_hi, :, part.head_lo : part.head_hi]

    def open_receivers(self, *, src_incarnation: str = "src-1", hashes: list[bytes] | None = None) -> None:
        src = PeerRef("prefill", src_incarnation, "", [])
        for rank in self.cluster.receivers:
            plan = TransferPlan(self.key, [self.dst_blocks], [self.held], hashes or self.hashes, self.timeout_s)
            rank.end.apply(OpenDestinationOrder(plan, src, self.cluster.src_layout))

    def open_senders(self) -> None:
        for rank in self.cluster.senders:
            rank.end.apply(OpenSourceOrder(TransferPlan(self.key, [self.src_blocks], [0], self.hashes, self.timeout_s)))

    def grant(self, dst: PeerRef | None = None) -> None:
        to, blocks = dst or self.cluster.dst, [pack_ids(self.dst_blocks)]
        for rank in self.cluster.senders:
            rank.end.apply(GrantOrder(Grant(self.key, to, self.cluster.dst_layout, [self.held], blocks)))

    def final(self, num_blocks: int | None = None, layers: range | None = None) -> None:
        """Every sending rank's `layers` (its own numbering; all of them by default) are final."""
        for rank in self.cluster.senders:
            for layer in layers or range(rank.storage.shard.num_layers):
                rank.end.blocks_final(self.key, layer, self.total if num_blocks is None else num_blocks)

    def hand_over(self, num_blocks: int | None = None) -> None:
        """Open every end, grant, and release the computed blocks (`num_blocks` of them) for sending."""
        self.open_receivers()
        self.open_senders()
        self.grant()
        self.final(num_blocks)

    def run(self) -> None:
        """The whole relay, checked at the end."""
        self.compute()
        self.hand_over()
        self.check_received()

    def check_received(self) -> None:
        """Wait for success at every rank; check the number of bytes and the content of every block."""
        received = 0
        for rank in self.cluster.receivers:
            event = rank.recorder.wait(self.key, (Received, ReceiveFailed))
            assert isinstance(event, Received), event
            received += event.bytes_received
            rank.recorder.wait(self.key, DestinationReleased)
        sent = 0
        for rank in self.cluster.senders:
            released = rank.recorder.wait(self.key, SourceReleased)
            assert released.error is None, released
            sent += released.bytes_sent
        dst = self.cluster.dst_layout
        per_block = sum(dst.shard_bytes_per_block(shard) for shard in dst.shards())
        assert sent == received == per_block * (self.total - self.held)
        self.check_content()

    def check_content(self) -> None:
        for rank, shard in zip(self.cluster.receivers, self.cluster.dst_layout.shards(), strict=True):
            for part in shard.parts:
                for plane, truth in zip(plane_words(rank.storage, part.group), self.planes[part.group], strict=True):
                    want = truth[part.layer_lo : part.layer_hi, self.held :, part.head_lo : part.head_hi]
                    np.testing.assert_array_equal(plane[:, self.dst_blocks[self.held :]], want)

    def poison_destination(self) -> None:
        for rank in self.cluster.receivers:
            rank.storage.host_bytes[:] = PATTERN

    def check_destination_untouched(self) -> None:
        for rank in self.cluster.receivers:
            assert (rank.storage.host_bytes == PATTERN).all()

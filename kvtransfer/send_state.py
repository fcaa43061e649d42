"""One attempt that a rank sends: what may be sent, and what was sent. Pure: no I/O, no clock.

    grant and final blocks in any order -> batches to send, each (destination, group, layer, block) once

Counts what is being copied right now (`in_use_bytes`), so that its owner releases no block during a copy, also for transports
whose copies outlive the call that started them. Driven by the I/O thread of one rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from common.base.errors import TransferError
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import OpenSourceOrder, TransferPlan
from common.kv.rank_layout import GroupPart, KVLayout, check_compatible
from common.kv.stripes import Stripe
from kvtransfer.resharding import reshard
from kvtransfer.wire import KVSlice, SliceHeader, check_first_blocks, checked_block_ids

_KEEP_BACK, _MAX_KEEP_BACK_S = 0.25, 5.0
"""Maximum part of a transfer's timeout, and maximum time, that ready slices wait for more to send with them. The receiver does
not know of waiting slices, so its timeout, which may be shorter, keeps running."""


@dataclass(frozen=True)
class Batch:
    """Slices to read and send to one destination rank in one message. None of them will be offered again."""

    plan: TransferPlan
    dst_rank: int
    slices: list[KVSlice]
    size_bytes: int
    blocks: np.ndarray = field(compare=False)
    """[block tables, blocks]: this rank's blocks that `slices` counts."""

    @property
    def key(self) -> AttemptKey:
        """The attempt's key. It may be open again when the ack of an older batch arrives."""
        return self.plan.key


class SendState:
    """One attempt at one sending rank.

    Invariant: `take` gives each slice once, and only when it is granted, final and wanted by the destination.
    Raises: TransferError if the plan contradicts itself.
    """

    def __init__(self, order: OpenSourceOrder, layout: KVLayout, rank: int, num_blocks: int) -> None:
        self.plan = plan = order.plan
        self._blocks = checked_block_ids(plan.blocks, plan.block_hashes, layout.pool_blocks(num_blocks))
        """[block tables, blocks], in the node's pool"""
        check_first_blocks(plan.first_blocks, self._blocks, [0] * layout.spec.num_tables)
        self.deadline: float | None = None
        """Time at which to give up unless there is progress; None before the grant."""
        self.bytes_sent = 0
        self.in_use_bytes = 0
        self.unacknowledged = 0
        """Messages sent that the other end has not acknowledged."""
        self._dropped = False
        self._layout = layout
        self._rank = rank
        shard = layout.rank_shard(rank)
        self._layer_lo = shard.layer_lo
        self._final = [order.final_blocks] * shard.num_layers
        self._routes: dict[int, _Route] | None = None
        """By destination rank."""

    @property
    def granted(self) -> bool:
        return self._routes is not None

    @property
    def destinations(self) -> list[int]:
        """Ranks of the destination node that get KV from this rank; empty before the grant."""
        return list(self._routes or ())

    @property
    def complete(self) -> bool:
        """Granted, nothing is left to read or to send, and the other end has acknowledged all of it. Without the acks,
        only the receiver's deadline would notice what a broken connection lost."""
        if self._routes is None or self.in_use_bytes or self.unacknowledged or self._dropped:
            return False
        return not any(r.unsent_bytes for r in self._routes.values())

    def grant(self, grant: Grant, now: float) -> None:
        """Learn which ranks want which pieces. A second grant changes nothing.

        Raises: HandshakeRefused if the layouts are incompatible, TransferError if the grant contradicts the transfer.
        """
        if self.granted:
            return
        check_compatible(self._layout, grant.layout)
        total = self._blocks.shape[1]
        if [len(table) for table in grant.block_ids] != [total] * len(self._blocks):
            raise TransferError(
                f"{grant.key}: a grant of {[*map(len, grant.block_ids)]} blocks for an offer of {total}"
            )
        check_first_blocks(grant.first_blocks, self._blocks, self.plan.first_blocks)
        addresses, ranks = grant.dst.data_addresses, grant.layout.world_size
        if not len(addresses) == len(set(addresses)) == ranks:
            raise TransferError(
                f"{grant.key}: {len(addresses)} data addresses for {ranks} ranks, {len(set(addresses))} of them different"
            )
        spec, unit_bytes = self._layout.spec, self._layout.spec.unit_bytes
        routes: dict[int, _Route] = {}
        homes = self._layout.home_of(self._blocks), grant.layout.home_of(grant.block_ids)
        for piece in reshard(self._layout, grant.layout, *homes):
            if piece.src_rank == self._rank:
                part, count = piece.part, piece.stripe.count
                group = spec.groups[part.group]
                layers, first = group.layers[part.layer_lo : part.layer_hi], grant.first_blocks[group.table]
                final = [count(max(first, self._final[layer - self._layer_lo])) for layer in layers]
                if piece.dst_rank not in routes:
                    routes[piece.dst_rank] = _Route(
                        now, piece.stripe, self._blocks[:, piece.stripe.indices] // self._layout.num_replicas
                    )
                unit = part.num_heads * unit_bytes[part.group]
                route = routes[piece.dst_rank]
                route.pieces.append(_PieceProgress(part, layers, final, count(first), count(total), unit))
        self._routes = routes
        self.progress(now)

    def progress(self, now: float) -> None:
        """Something moved: restart the deadline."""
        if self.granted:
            self.deadline = now + self.plan.timeout_s

    def blocks_final(self, layer: int, num_blocks: int, now: float) -> None:
        """Layer `layer`, counted from this rank's first, is final in blocks [0, `num_blocks`).

        Raises: TransferError if there is no such layer or block.
        """
        if not 0 <= layer < len(self._final) or num_blocks > self._blocks.shape[1]:
            raise TransferError(
                f"{self.plan.key}: layer {layer} final in {num_blocks} blocks, but the transfer has "
                f"{len(self._final)} layers of {self._blocks.shape[1]} blocks"
            )
        if num_blocks <= self._final[layer]:
            return
        self._final[layer] = num_blocks
        self.progress(now)
        for route in (self._routes or {}).values():
            route.blocks_final(layer + self._layer_lo, num_blocks)

    def overdue(self, now: float) -> list[int]:
        """Destination ranks for which something has been ready but held back for too long."""
        return [rank for rank, route in (self._routes or {}).items() if route.ready_bytes and self._late(route, now)]

    def overdue_next(self, now: float) -> float:
        """When slices that are held back now become overdue; infinity if none are."""
        held = (route for route in (self._routes or {}).values() if route.ready_bytes and not self._late(route, now))
        return min((route.taken_s + self._keep_back_s for route in held), default=math.inf)

    @property
    def _keep_back_s(self) -> float:
        return min(_KEEP_BACK * self.plan.timeout_s, _MAX_KEEP_BACK_S)

    def _late(self, route: _Route, now: float) -> bool:
        return now - route.taken_s >= self._keep_back_s

    def take(self, dst_rank: int, *, max_bytes: int, min_bytes: int = 1, now: float) -> Batch | None:
        """The next slices for `dst_rank`, at most `max_bytes` of them, or None.

        Gives fewer than `min_bytes` only when nothing more will follow, or when they are overdue. `max_bytes` is at
        least the size of one block in one layer.
        """
        route = (self._routes or {}).get(dst_rank)
        if route is None or not route.ready_bytes:
            return None
        if route.ready_bytes < min(min_bytes, route.unsent_bytes) and not self._late(route, now):
            return None
        route.taken_s = now
        slices, size_bytes = route.take(max_bytes)
        self.in_use_bytes += size_bytes
        return Batch(self.plan, dst_rank, slices, size_bytes, route.blocks)

    def sent(self, batch: Batch, now: float) -> None:
        """`batch` was given to the wire: its source is no longer read. Its ack is still to come."""
        self.progress(now)
        self.unacknowledged += 1
        self.in_use_bytes -= batch.size_bytes
        self.bytes_sent += batch.size_bytes

    def acknowledged(self, now: float) -> None:
        """The other end has acknowledged one of the messages that were sent."""
        self.progress(now)
        self.unacknowledged -= 1

    def drop(self, size_bytes: int) -> None:
        """`size_bytes` that were in use are no longer read and did not reach the other end: this never completes."""
        self._dropped = self._dropped or size_bytes > 0
        self.in_use_bytes -= size_bytes

    def header(self, batch: Batch, src_incarnation: str, dst_incarnation: str, sequence: int) -> SliceHeader:
        """The header that goes with `batch`; its hashes are those of the smallest run of blocks that covers all slices."""
        lo, hi = min(s.block_lo for s in batch.slices), max(s.block_hi for s in batch.slices)
        stripe = (self._routes or {})[batch.dst_rank].stripe
        return SliceHeader(
            key=batch.key,
            src_incarnation=src_incarnation,
            dst_incarnation=dst_incarnation,
            src_rank=self._rank,
            dst_rank=batch.dst_rank,
            sequence=sequence,
            slices=batch.slices,
            first_block=lo,
            block_hashes=b"".join(self.plan.block_hashes[stripe.indices][lo:hi]),
        )


class _Route:
    """Progress towards one destination rank: one piece for each layer group that it wants from this rank.

    Its blocks are those that both ranks hold, counted without the others.
    """

    def __init__(self, now: float, stripe: Stripe, blocks: np.ndarray) -> None:
        """`blocks`: [block tables, blocks of `stripe`] on this rank."""
        self.stripe = stripe
        self.blocks = blocks
        self.taken_s = now
        """Time of the last `take`, at first of the grant."""
        self.pieces: list[_PieceProgress] = []

    @property
    def ready_bytes(self) -> int:
        return sum(piece.ready_bytes for piece in self.pieces)

    @property
    def unsent_bytes(self) -> int:
        return sum(piece.unsent_bytes for piece in self.pieces)

    def blocks_final(self, layer: int, num_blocks: int) -> None:
        for piece in self.pieces:
            piece.blocks_final(layer, self.stripe.count(num_blocks))

    def take(self, max_bytes: int) -> tuple[list[KVSlice], int]:
        slices: list[KVSlice] = []
        left = max_bytes
        for piece in self.pieces:
            more, size_bytes = piece.take(left)
            slices += more
            left -= size_bytes
        assert slices, "a message must be able to carry one block of one layer"
        return slices, max_bytes - left


class _PieceProgress:
    """Progress of one piece. For each layer `final` and `sent` count leading blocks; [sent, final) is ready."""

    def __init__(
        self, part: GroupPart, layers: tuple[int, ...], final: list[int], first: int, total: int, unit_bytes: int
    ) -> None:
        """`layers`: the model's numbers of the part's layers. `first`: the first block to send. `unit_bytes`: bytes of
        one block in one layer."""
        self._part = part
        self._layers = layers
        self._unit_bytes = unit_bytes
        self._sent = [first] * len(layers)
        self._final = final
        self.ready_bytes = (sum(final) - first * len(layers)) * unit_bytes
        self.unsent_bytes = (total - first) * len(layers) * unit_bytes

    def blocks_final(self, layer: int, num_blocks: int) -> None:
        i = bisect_left(self._layers, layer)
        if i < len(self._layers) and self._layers[i] == layer and num_blocks > self._final[i]:
            self.ready_bytes += (num_blocks - self._final[i]) * self._unit_bytes
            self._final[i] = num_blocks

    def take(self, max_bytes: int) -> tuple[list[KVSlice], int]:
        slices: list[KVSlice] = []
        part, room = self._part, max_bytes // self._unit_bytes
        taken, layer = 0, 0
        while layer < len(self._sent) and room > taken:
            lo, hi = self._sent[layer], self._final[layer]
            if lo == hi:
                layer += 1
                continue
            end = layer + 1
            while end < len(self._sent) and self._sent[end] == lo and self._final[end] == hi:
                end += 1
            # Whole layers while they fit, then as many blocks of the next layer as fit.
            layers = min(end - layer, (room - taken) // (hi - lo))
            if not layers:
                layers, hi = 1, lo + room - taken
            self._sent[layer : layer + layers] = [hi] * layers
            first = part.layer_lo + layer
            slices.append(KVSlice(part.group, first, first + layers, part.head_lo, part.head_hi, lo, hi))
            taken += layers * (hi - lo)
            layer += layers
        self.ready_bytes -= taken * self._unit_bytes
        self.unsent_bytes -= taken * self._unit_bytes
        return slices, taken * self._unit_bytes

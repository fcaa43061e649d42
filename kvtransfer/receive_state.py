"""One attempt that a rank receives: every slice is checked here, and what is missing is counted. Pure.

    headers in any order -> claims to write, each (group, layer, head, block) once

Counts what is being copied right now (`in_use_bytes`), so that its owner releases no block during a copy, also for transports
whose copies outlive the call that started them. Driven by the I/O thread of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.base.errors import CorruptSlice
from common.base.hashing import HASH_BYTES
from common.control.messages import AttemptKey
from common.engine.kv_transfer import OpenDestinationOrder
from common.kv.rank_layout import KVLayout, check_compatible
from common.kv.stripes import Stripe
from kvtransfer.wire import KVSlice, SliceHeader, check_first_blocks, checked_block_ids


@dataclass(frozen=True)
class Claim:
    """Verified slices to write. Until `placed`, the transport may write the destination blocks."""

    key: AttemptKey
    slices: list[KVSlice]
    size_bytes: int
    blocks: np.ndarray = field(compare=False)
    """[block tables, blocks]: this rank's blocks that `slices` counts."""


@dataclass(frozen=True)
class _Shared:
    """The blocks that one source rank and this rank hold both."""

    stripe: Stripe
    blocks: np.ndarray
    """[block tables, blocks] on this rank."""
    hashes: bytes


class ReceiveState:
    """One attempt at one receiving rank.

    Invariant: `missing` counts the (group, layer, head, block) cells of this rank's shard from `first_blocks` on that no
    claim has covered; a cell is claimed at most once.
    Raises: HandshakeRefused if the layouts are incompatible, TransferError if the plan contradicts itself.
    """

    def __init__(self, order: OpenDestinationOrder, layout: KVLayout, rank: int, num_blocks: int, now: float) -> None:
        check_compatible(order.src_layout, layout)
        self.plan = plan = order.plan
        self.src_incarnation = order.src.incarnation
        self._blocks = checked_block_ids(plan.blocks, plan.block_hashes, layout.pool_blocks(num_blocks))
        """[block tables, blocks], in the node's pool"""
        self._src_layout = order.src_layout
        self._shared: dict[int, _Shared | None] = {}
        """By source rank."""
        spec, shard = layout.spec, layout.rank_shard(rank)
        self._num_replicas = layout.num_replicas
        self._positions = layout.positions(shard, layout.home_of(self._blocks))
        """Which of the sequence's blocks this rank holds; None: it holds none."""
        check_first_blocks(plan.first_blocks, self._blocks, [0] * spec.num_tables)
        self.deadline: float | None = None
        """Time at which to give up unless there is progress; None before the first slice, and always on a stage of a
        pipeline: nothing comes there while the sender computes the layers of the other stages."""
        self.bytes_received = 0
        self.in_use_bytes = 0
        self.layers: dict[int, float] = {}
        """Layer -> seconds from the opening to its latest slice, with a timeline."""
        self._opened_s = now
        self._timeline = order.timeline
        self._is_stage = layout.pp_size > 1
        self._groups = spec.groups
        self._unit_bytes = spec.unit_bytes
        self._parts = layout.relayed_parts(order.src_layout, shard)
        self._total = self._blocks.shape[1]
        self._first = [plan.first_blocks[group.table] for group in spec.groups]
        """For each group, the first block that will come."""
        self._covered = [
            np.zeros((part.num_layers, part.num_heads, self._total - first), dtype=np.bool_)
            for part, first in zip(self._parts, self._first, strict=True)
        ]
        """For each group, the cells that were claimed. Those of blocks that other ranks hold stay unclaimed."""
        own = self._positions
        self.missing = sum(
            part.num_layers * part.num_heads * (own.count(self._total) - own.count(first))
            for part, first in zip(self._parts, self._first, strict=True)
            if own is not None
        )

    @property
    def complete(self) -> bool:
        """Every cell was claimed and placed."""
        return not self.missing and not self.in_use_bytes

    def claim(self, header: SliceHeader, payload_bytes: int) -> Claim:
        """Check a message against the transfer and mark its slices as covered.

        Raises: CorruptSlice if its hashes, size or place are wrong or a slice came before; the transfer has then
        failed for good, and what was marked stays marked.
        """
        key = self.plan.key
        at = header.first_block * HASH_BYTES
        shared = self._shared_with(header.src_rank)
        if shared is None:
            raise CorruptSlice(f"{key}: rank {header.src_rank} of the sender holds no block of this rank")
        if header.block_hashes != shared.hashes[at : at + len(header.block_hashes)]:
            raise CorruptSlice(f"{key}: block hashes from block {header.first_block} on differ from the offer's")
        size_bytes = sum(piece.size_bytes(self._unit_bytes) for piece in header.slices)
        if size_bytes != payload_bytes:
            raise CorruptSlice(f"{key}: {payload_bytes} bytes for slices of {size_bytes}")
        for piece in header.slices:
            self._cover(piece, shared.stripe)
        self.in_use_bytes += size_bytes
        return Claim(key, header.slices, size_bytes, shared.blocks)

    def _shared_with(self, src_rank: int) -> _Shared | None:
        if src_rank not in self._shared:
            src = self._src_layout
            held = src.positions(src.rank_shard(src_rank), None) if src_rank < src.world_size else None
            stripe = held and self._positions and held.overlap(self._positions)
            self._shared[src_rank] = stripe and _Shared(
                stripe,
                self._blocks[:, stripe.indices] // self._num_replicas,
                b"".join(self.plan.block_hashes[stripe.indices]),
            )
        return self._shared[src_rank]

    def placed(self, claim: Claim, now: float) -> None:
        """`claim` is written; restart the deadline."""
        self.deadline = None if self._is_stage else now + self.plan.timeout_s
        self.in_use_bytes -= claim.size_bytes
        self.bytes_received += claim.size_bytes
        if self._timeline:
            for piece in claim.slices:
                layers = self._groups[piece.group].layers[piece.layer_lo : piece.layer_hi]
                self.layers.update(dict.fromkeys(layers, now - self._opened_s))

    def progressed(self, now: float) -> None:
        """A slice from the same node is written: this attempt may wait behind that one."""
        if self.deadline is not None:
            self.deadline = now + self.plan.timeout_s

    def _cover(self, piece: KVSlice, stripe: Stripe) -> None:
        part = self._parts[piece.group] if piece.group < len(self._parts) else None
        first = self._first[piece.group] if part is not None else 0
        lowest, end = stripe.count(first), stripe.count(self._total)
        if part is None or not part.contains(piece.part) or not lowest <= piece.block_lo < piece.block_hi <= end:
            raise CorruptSlice(f"{self.plan.key}: {piece} is not wanted here ({part}, blocks from {first} on)")
        lo, hi = (stripe.first + stripe.step * block - first for block in (piece.block_lo, piece.block_hi))
        cells = self._covered[piece.group][
            piece.layer_lo - part.layer_lo : piece.layer_hi - part.layer_lo,
            piece.head_lo - part.head_lo : piece.head_hi - part.head_lo,
            lo : hi : stripe.step,
        ]
        if cells.any():
            raise CorruptSlice(f"{self.plan.key}: {piece} came before")
        cells[...] = True
        self.missing -= cells.size

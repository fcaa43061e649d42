"""Attention of one context-parallel rank: to its stripe of each sequence's blocks, joined with the other ranks' results.

Every rank of the group attends with all rows. It appends those of its own blocks to its cache and attends to what it holds: a
*partial* result, with the logarithm of the sum of its exponentiated scores. The ranks exchange these and join them in the same
order: each rank all rows, so that all go on with the same numbers, or its own where rows are shared out
(`AttentionMetadata.row_bounds`). A row may see nothing of a stripe; its partial result is then zero and its log-sum minus infinity.

    Source: merging of partial softmaxes as in FlashAttention (arXiv 2205.14135), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.sdpa import PagedCache
from common.kv.rank_layout import blocks_for
from common.kv.storage import GroupStorage
from common.kv.stripes import Stripe
from common.parallel.mesh import Mesh

_ALIGNED_TOKENS = 128
"""The blocks of an entry begin at a multiple of this number of tokens, the size of the native kernels' partitions, so that a row's
result does not depend on the rows beside it."""
_MAX_SCORES = 2**24
"""Maximum scores at once: rows times query heads times context."""


@dataclass(frozen=True)
class StripeEntry:
    """One entry of a batch, in one stripe. Its tokens are counted within `blocks`."""

    row_lo: int
    row_hi: int
    blocks: list[int]
    """Blocks on this rank that some row sees; empty if none does."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    """[rows]: row i attends to tokens [starts[i], ends[i]), perhaps none. Neither end is before that of row i - 1."""


@dataclass(frozen=True)
class StripeBatch:
    """One rank's part of a step's batch."""

    entries: list[StripeEntry]
    num_decode_rows: int
    """The first entries have one row each."""
    slots: Tensor
    """[T] int64 on the cache's device, -1 for rows whose KV another rank keeps."""


def stripe_of_batch(metadata: AttentionMetadata, stripe: Stripe, shape: AttentionShape) -> StripeBatch:
    """The part of `metadata`, whose blocks are those of the node's pool, that a rank with `stripe` computes."""
    size = shape.block_size
    firsts = [0, *accumulate(metadata.query_lens)]
    # For each row, how many tokens it sees in all stripes together, those before its window included.
    seen = np.concatenate(
        [np.arange(c - n + 1, c + 1) for n, c in zip(metadata.query_lens, metadata.context_lens, strict=True)]
    )
    ends = count_tokens(seen, stripe, size)
    starts = np.zeros_like(ends)
    if shape.window is not None:
        starts = count_tokens(np.maximum(seen - shape.window, 0), stripe, size)
    entries: list[StripeEntry] = []
    for lo, hi, table in zip(firsts[:-1], firsts[1:], metadata.block_tables, strict=True):
        first = int(starts[lo]) // _ALIGNED_TOKENS * _ALIGNED_TOKENS // size
        end = blocks_for(int(ends[hi - 1]), size)
        own = table[stripe.first + first * stripe.step : stripe.first + end * stripe.step : stripe.step]
        blocks = [stripe.local(block) for block in own]
        assert len(blocks) == max(0, end - first), "a block table is too short for its context"
        entries.append(StripeEntry(lo, hi, blocks, starts[lo:hi] - first * size, ends[lo:hi] - first * size))
    slots = metadata.slot_mapping
    block = slots // size
    own_slots = torch.where(block % stripe.step == stripe.first, block // stripe.step * size + slots % size, -1)
    return StripeBatch(entries, metadata.num_decode_rows, own_slots)


def count_tokens(num_tokens: NDArray[np.int64], stripe: Stripe, block_size: int) -> NDArray[np.int64]:
    """How many of the first `num_tokens` tokens are in blocks of the stripe, for each number."""
    full, rest = np.divmod(num_tokens, block_size)
    blocks = np.maximum((full - stripe.first + stripe.step - 1) // stripe.step, 0)
    return blocks * block_size + np.where(full % stripe.step == stripe.first, rest, 0)


class PartialAttention(Protocol):
    """Attention to one stripe, without sinks. `forward_stripe` calls belong to the latest `plan_stripe`."""

    def plan_stripe(self, batch: StripeBatch) -> None: ...

    def forward_stripe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append the rows of own blocks, then attend.

        q: [T, q_heads, head_dim]; k, v: [T, kv_heads, head_dim]. Returns [T, q_heads, value_dim + 1] float32: results, and
        after them the log-sum of each row and head; zeros and minus infinity where a row sees nothing.
        """
        ...

    def join(self, parts: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention to all stripes: [T, q_heads, value_dim] of the shape's dtype.

        parts: [stripes, T, q_heads, value_dim + 1], what each rank's `forward_stripe` returned. sinks: as in `join_partials`.
        """
        ...


MakePartial = Callable[[GroupStorage, AttentionShape], PartialAttention]
"""A `PartialAttention` of a shape over a rank's memory."""


class TorchPartialAttention:
    """`PartialAttention` on gathered blocks, on any device."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape) -> None:
        self._shape = shape
        self._cache = PagedCache(kv, shape)
        self._device = kv.device
        self._scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self._batch = StripeBatch([], 0, torch.empty(0, dtype=torch.int64))
        self._own_rows = self._own_slots = torch.empty(0, dtype=torch.int64)

    def plan_stripe(self, batch: StripeBatch) -> None:
        self._batch = batch
        self._own_rows = torch.nonzero(batch.slots >= 0).flatten()
        self._own_slots = batch.slots[self._own_rows]

    def join(self, parts: Tensor, sinks: Tensor | None) -> Tensor:
        return join_partials(parts[..., :-1], parts[..., -1], sinks).to(self._shape.dtype)

    def forward_stripe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._own_rows.numel():
            self._cache.append(layer, k[self._own_rows], v[self._own_rows], self._own_slots)
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        log_sums = torch.full(q.shape[:2], -torch.inf, device=q.device)
        entries, num_decodes = self._batch.entries, self._batch.num_decode_rows
        decodes = [entry for entry in entries[:num_decodes] if entry.blocks]
        longest = max((len(entry.blocks) for entry in decodes), default=1)
        at_once = max(1, _MAX_SCORES // (longest * self._shape.block_size * self._shape.num_q_heads))
        for lo in range(0, len(decodes), at_once):
            self._attend_together(layer, decodes[lo : lo + at_once], q, out, log_sums)
        for entry in entries[num_decodes:]:
            if entry.blocks:
                self._attend_prompt(layer, entry, q, out, log_sums)
        return torch.cat((out[..., : self._shape.value_dim], log_sums[..., None]), 2)

    def _attend_together(
        self, layer: int, entries: list[StripeEntry], q: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """Entries of one row each."""
        longest = max(len(entry.blocks) for entry in entries)
        blocks = [entry.blocks + entry.blocks[-1:] * (longest - len(entry.blocks)) for entry in entries]
        bounds = np.array([(entry.starts[0], entry.ends[0]) for entry in entries])
        rows = torch.tensor([entry.row_lo for entry in entries], device=self._device)
        gathered = self._cache.gather(layer, torch.tensor(blocks, device=self._device), torch.float32)
        found = self._attend(layer, q[rows, None], gathered, bounds[:, None])
        out[rows], log_sums[rows] = found[0].squeeze(1), found[1].squeeze(1)

    def _attend_prompt(self, layer: int, entry: StripeEntry, q: Tensor, out: Tensor, log_sums: Tensor) -> None:
        blocks = torch.tensor([entry.blocks], device=self._device)
        gathered = self._cache.gather(layer, blocks, torch.float32)
        at_once = max(16, _MAX_SCORES // (gathered.size(3) * self._shape.num_q_heads))
        bounds = np.stack((entry.starts, entry.ends), 1)
        for lo in range(entry.row_lo, entry.row_hi, at_once):
            hi = min(lo + at_once, entry.row_hi)
            found = self._attend(layer, q[None, lo:hi], gathered, bounds[None, lo - entry.row_lo : hi - entry.row_lo])
            out[lo:hi], log_sums[lo:hi] = found[0][0], found[1][0]

    def _attend(self, layer: int, q: Tensor, gathered: Tensor, bounds: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """q: [B, rows, q_heads, head_dim]; gathered: [planes, B, kv_heads, tokens, head_dim]; bounds: [B, rows, 2]."""
        shape, scales = self._shape, self._cache.scales[layer]
        places = torch.arange(gathered.size(3), device=self._device)
        starts, ends = torch.from_numpy(bounds).to(self._device).unbind(2)
        seen = (places >= starts[..., None]) & (places < ends[..., None])  # [B, rows, tokens]
        # A reused block may hold anything in slots that no row sees, and NaN or infinity times zero is NaN.
        values = gathered[-1].masked_fill(~seen.any(1)[:, None, :, None], 0.0)
        rows = q.float().unflatten(2, (shape.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, kv, group, rows, dim]
        scores = rows @ gathered[0].unsqueeze(2).transpose(-2, -1)
        scores.mul_(self._scale * scales[0])
        if shape.soft_cap is not None:
            scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        attended = (weights @ values.unsqueeze(2)).mul_(scales[-1]).div_(total.clamp_min(1e-30))
        log_sums = (top + total.log()).squeeze(-1)
        return attended.permute(0, 3, 1, 2, 4).flatten(2, 3), log_sums.permute(0, 3, 1, 2).flatten(2)


def join_partials(results: Tensor, log_sums: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention to all stripes, from the partial results of each.

    results: [stripes, T, heads, head_dim]; log_sums: [stripes, T, heads], minus infinity where the row sees nothing of the
    stripe. sinks: [heads], scores that join every row's softmax without a value. Returns [T, heads, head_dim].
    """
    everything = log_sums if sinks is None else torch.cat([log_sums, sinks.expand(1, *log_sums.shape[1:])])
    # Minus infinity minus itself would be NaN, for a row that sees nothing anywhere.
    top = everything.amax(0).clamp_min(torch.finfo(torch.float32).min)
    total = (everything - top).exp_().sum(0)
    weights = (log_sums - top).exp_().div_(total.clamp_min(1e-30))
    return (results * weights[..., None]).sum(0)


class StripedAttention:
    """`AttentionBackend` of one rank of a context-parallel group."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape, mesh: Mesh, make: MakePartial) -> None:
        self._made_of = kv, shape, mesh, make
        self._mesh = mesh
        self._shape = shape
        self._stripe = Stripe(mesh.place.cp_rank, mesh.place.cp_size)
        self._partial = make(kv, replace(shape, sinks=()))
        self._bounds: tuple[int, ...] = ()
        """`AttentionMetadata.row_bounds` of the planned step."""

    def plan(self, metadata: AttentionMetadata) -> None:
        self._bounds = metadata.row_bounds
        self._partial.plan_stripe(stripe_of_batch(metadata, self._stripe, self._shape))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The rows are the same on all ranks of the group, or each rank's own if the step has `row_bounds`."""
        if self._bounds:
            every = self._gather(q, k, v)
            parts = self._mesh.exchange_rows(self._partial.forward_stripe(layer, *every), self._bounds)
        else:
            parts = self._mesh.gather_stripes(self._partial.forward_stripe(layer, q, k, v))
        return self._partial.join(parts, self._shape.sinks[layer] if self._shape.sinks else None).to(q.dtype)

    def _gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all rows of the step, from those of each rank's own rows."""
        sides = (q, k) if v is k else (q, k, v)
        rows = self._mesh.gather_rows(torch.cat(sides, 1), self._bounds)
        q, k, *values = rows.split([side.size(1) for side in sides], 1)
        return q, k, values[0] if values else k

    def for_graph(self, rows: int) -> StripedAttention:
        """A separate backend: decode steps of context-parallel ranks are not captured."""
        return StripedAttention(*self._made_of)

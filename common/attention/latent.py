"""Latent attention over one plane of KV, on any device. Runs on a rank's engine thread.

Each token has one row [latent, rotated key] in the cache, from which every head could make its own key and value. Two ways
lead to the same result (DeepSeek-V2, arXiv 2405.04434, section 2.1):

- expanded: make keys and values of all heads, for every token of the context, then attend as usual;
- absorbed: apply the matrix that makes keys to the queries instead, attend to the latents themselves, which are both key
  and value of a single KV head, and apply the matrix that makes values to what comes out.

Expanding costs more for each token of the context, absorbing more for each pair of query and token: prompts expand, decode
rows absorb. Absorbed attention is multi-query attention, which the usual backends compute over one plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape, PlannedPrompt
from common.kernels.float8 import narrow, widen, words_of
from common.kernels.native.linear import NativeLinear
from common.kv.rank_layout import blocks_for
from common.kv.storage import GroupStorage

_MAX_SCORES = {"cpu": 2**21, "cuda": 2**26}
"""Maximum scores per query block: rows times heads times context."""
_FEWEST_ROWS = 16
_MAX_EXPANDED = 2**26
"""Maximum numbers of expanded keys and values; a single head's may exceed it."""


@dataclass(frozen=True)
class LatentShape(AttentionShape):
    """A latent attention on one rank. `num_kv_heads` is 1, and `head_dim` the width of a cached row."""

    latent_dim: int = 0
    """Width of the latent, the first part of a row; the rest is the rotated key."""
    nope_dim: int = 0
    """Features of a query that are not rotated, its first ones."""
    v_head_dim: int = 0
    kind: str = "latent"

    @property
    def value_dim(self) -> int:
        """Width of a head's result: the latent, without the rotated key."""
        return self.latent_dim

    @property
    def q_head_dim(self) -> int:
        """Features of a query."""
        return self.nope_dim + self.head_dim - self.latent_dim


def is_expanded(shape: LatentShape, rows: int, context_len: int) -> bool:
    """Whether multiplying is less work for these rows of a prompt, the last of their context, with expanded keys and values."""
    up = shape.latent_dim * (shape.nope_dim + shape.v_head_dim)
    absorbed = rows * up + rows * context_len * 2 * shape.head_dim
    return context_len * up + rows * context_len * (shape.q_head_dim + shape.v_head_dim) < absorbed


class LatentMatrices:
    """What takes a rank's queries to latents, and latents to keys and values."""

    def __init__(self, up: Tensor, nope_dim: int) -> None:
        """up: [heads/tp, nope_dim + v_head_dim, latent_dim], of one dtype for all steps."""
        self.up = up
        self.nope_dim = nope_dim

    def absorb(self, q: Tensor) -> Tensor:
        """q: [T, heads/tp, nope_dim + rope_dim]. Returns [T, heads/tp, latent_dim + rope_dim]."""
        heads_first = q[..., : self.nope_dim].transpose(0, 1).to(self.up.dtype)
        over_latents = torch.bmm(heads_first, self.up[:, : self.nope_dim]).transpose(0, 1).to(q.dtype)
        return torch.cat((over_latents, q[..., self.nope_dim :]), 2)

    def values(self, attended: Tensor) -> Tensor:
        """attended: [T, heads/tp, latent_dim]. Returns [T, heads/tp, v_head_dim]."""
        heads_first = attended.transpose(0, 1).to(self.up.dtype)
        return torch.bmm(heads_first, self.up[:, self.nope_dim :].transpose(1, 2)).transpose(0, 1).to(attended.dtype)


class NativeLatentMatrices(LatentMatrices):
    """The same with products of decode rows in the native CPU kernels: of few rows, PyTorch's take as long as all attention."""

    def __init__(self, up: Tensor, nope_dim: int, to_latents: NativeLinear, to_values: NativeLinear) -> None:
        """to_latents: [heads/tp * latent_dim, nope_dim]; to_values: [heads/tp * v_head_dim, latent_dim]."""
        super().__init__(up, nope_dim)
        self._to_latents, self._to_values = to_latents, to_values

    def absorb(self, q: Tensor) -> Tensor:
        latent_dim = self.up.size(2)
        out = q.new_empty(q.size(0), q.size(1), latent_dim + q.size(2) - self.nope_dim)
        out[..., latent_dim:] = q[..., self.nope_dim :]
        self._to_latents.multiply_heads(q[..., : self.nope_dim], out[..., :latent_dim])
        return out

    def values(self, attended: Tensor) -> Tensor:
        out = attended.new_empty(attended.size(0), attended.size(1), self.up.size(1) - self.nope_dim)
        self._to_values.multiply_heads(attended, out)
        return out


def append_rows(kv: GroupStorage, layer: int, slots: Tensor, rows: Tensor) -> None:
    """Write a step's rows to a layer, counted from this rank's first. slots: [T] int64; rows: [T, 1, width]."""
    (plane,), (scale,) = kv.planes.values(), kv.scales[layer]
    by_slot = words_of(plane[layer]).flatten(0, 2)
    by_slot.index_copy_(0, slots, words_of(narrow(rows[:, 0], plane.dtype, scale)))


class LatentBackend:
    """`AttentionBackend` of latents."""

    def __init__(
        self, kv: GroupStorage, shape: LatentShape, absorbed: AttentionBackend, *, expands: bool = True
    ) -> None:
        """`absorbed`: multi-query attention over the same memory, whose keys are its values too. `expands`: prompts may be
        expanded."""
        self.absorbed = absorbed
        self._expands = expands
        self._shape = shape
        self._kv = kv
        (self._plane,) = kv.planes.values()
        self._slots = torch.empty(0, dtype=torch.int64)
        self._prompts: list[PlannedPrompt] = []
        """Those that are expanded, with blocks [num_blocks] int64."""
        self._absorbed_rows: Tensor | None = None
        """[rows] of the batch that are not in `_prompts`, if some are."""

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping
        self._prompts, absorbed, rows = [], [], []
        if not self._expands:
            return self.absorbed.plan(metadata)
        row = 0
        entries = zip(metadata.query_lens, metadata.context_lens, metadata.block_tables, strict=True)
        for index, (query_len, context_len, table) in enumerate(entries):
            if index >= metadata.num_decode_rows and is_expanded(self._shape, query_len, context_len):
                blocks = table[: blocks_for(context_len, self._shape.block_size)]
                placed = torch.tensor(blocks, device=self._plane.device)
                self._prompts.append(PlannedPrompt(row, row + query_len, context_len, placed))
            else:
                absorbed.append(index)
                rows += range(row, row + query_len)
            row += query_len
        if not self._prompts:
            return self.absorbed.plan(metadata)
        self._absorbed_rows = torch.tensor(rows, device=self._plane.device) if rows else None
        if self._absorbed_rows is not None:
            lens, contexts, tables = (
                [values[index] for index in absorbed]
                for values in (metadata.query_lens, metadata.context_lens, metadata.block_tables)
            )
            slots = self._slots[self._absorbed_rows]
            self.absorbed.plan(AttentionMetadata(lens, contexts, tables, slots, metadata.num_decode_rows))
        return None

    def forward(self, layer: int, q: Tensor, row: Tensor, matrices: LatentMatrices) -> Tensor:
        """q: [T, heads/tp, nope_dim + rope_dim], row: [T, 1, latent_dim + rope_dim], rope applied. Returns [T, heads/tp, v_head_dim],
        q's dtype."""
        if not self._prompts:
            return self._attend_absorbed(layer, q, row, matrices)
        append_rows(self._kv, layer, self._slots, row)
        out = q.new_empty(q.size(0), q.size(1), self._shape.v_head_dim)
        if self._absorbed_rows is not None:
            rows = self._absorbed_rows
            out[rows] = self._attend_absorbed(layer, q[rows], row[rows], matrices)
        for prompt in self._prompts:
            rows = slice(prompt.row_lo, prompt.row_hi)
            out[rows] = self._attend_expanded(layer, prompt, q[rows], matrices.up)
        return out

    def for_graph(self, rows: int) -> LatentBackend:
        return LatentBackend(self._kv, self._shape, self.absorbed.for_graph(rows), expands=self._expands)

    def _attend_absorbed(self, layer: int, q: Tensor, row: Tensor, matrices: LatentMatrices) -> Tensor:
        attended = self.absorbed.forward(layer, matrices.absorb(q), row, row)
        return matrices.values(attended[..., : self._shape.latent_dim])

    def _attend_expanded(self, layer: int, prompt: PlannedPrompt, q: Tensor, up: Tensor) -> Tensor:
        """q: [C, heads, q_head_dim], the last C positions of the context. Returns [C, heads, v_head_dim]."""
        shape = self._shape
        (scale,) = self._kv.scales[layer]
        dtype = torch.float32 if q.device.type == "cpu" else q.dtype
        blocks = words_of(self._plane[layer]).index_select(0, prompt.blocks).view(self._plane.dtype)
        cached = widen(blocks.flatten(0, 2)[: prompt.context_len]).mul_(scale)
        latents, key = cached.to(up.dtype).split((shape.latent_dim, shape.head_dim - shape.latent_dim), 1)
        key = key.to(dtype)
        parts: list[Tensor] = []
        at_once = max(1, _MAX_EXPANDED // (prompt.context_len * (shape.q_head_dim + shape.v_head_dim)))
        for own_up, rows in zip(up.split(at_once), q.to(dtype).transpose(0, 1).split(at_once), strict=True):
            made = F.linear(latents, own_up.flatten(0, 1)).view(prompt.context_len, len(rows), -1).transpose(0, 1)
            keys, values = made.to(dtype).split((shape.nope_dim, shape.v_head_dim), 2)
            keys = torch.cat((keys, key.expand(len(rows), -1, -1)), 2)
            parts.append(_attend_causally(rows, keys, values, shape.scale))
        return torch.cat(parts).transpose(0, 1)


def _attend_causally(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """q: [heads, rows, dim], the last rows of the context; keys, values: [heads, tokens, dim]. Some rows at a time, so that
    their scores stay small; none reads keys after its last row."""
    heads, rows, _ = q.shape
    context_len = keys.size(1)
    block = max(_FEWEST_ROWS, _MAX_SCORES.get(q.device.type, 2**26) // (heads * context_len))
    parts: list[Tensor] = []
    for lo in range(0, rows, block):
        hi = min(rows, lo + block)
        seen = context_len - rows + hi
        mask = torch.ones(hi - lo, seen, dtype=torch.bool, device=q.device).tril_(seen - (hi - lo))
        attended = F.scaled_dot_product_attention(q[:, lo:hi], keys[:, :seen], values[:, :seen], mask, scale=scale)
        parts.append(attended)
    return torch.cat(parts, 1)

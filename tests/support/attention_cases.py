"""Batches with known K and V in scattered blocks, for every attention backend, on any device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.attention.latent import LatentMatrices, LatentShape
from common.base.device import CPU
from common.kernels.float8 import narrow, widen, words_of
from common.kv.rank_layout import KVLayout, blocks_for
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import GroupStorage, KVStorage

MakeBackend = Callable[[GroupStorage, AttentionShape], AttentionBackend]

NUM_BLOCKS = 160
LAYERS = 2
BLOCK_SIZE = 16

LENS: dict[str, list[tuple[int, int]]] = {
    "a single token": [(1, 1)],
    "decode over block borders": [(1, 15), (1, 16), (1, 17), (1, 100)],
    "decode with one long context": [(1, 900), (1, 3), (1, 40), (1, 500)],
    "whole prompts": [(2, 2), (16, 16), (33, 33)],
    "chunks after a cached context": [(5, 21), (16, 48), (40, 300)],
    "decode and chunks interleaved": [(1, 30), (20, 20), (1, 600), (7, 100), (1, 5)],
}
"""(rows, context length) of each sequence."""


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence, row by row, head by head: row r attends to the first `first + r + 1` keys, of which it sees the last
    `window`. All float64."""
    group = q.size(1) // keys.size(1)
    out = torch.empty(q.shape, dtype=torch.float64)
    q, keys, values = q.double(), keys.double(), values.double()
    scale = 1 / math.sqrt(q.size(2)) if scale is None else scale
    for row in range(q.size(0)):
        for head in range(q.size(1)):
            end = first + row + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            k, v = (side[seen, head // group] for side in (keys, values))
            scores = k @ q[row, head] * scale
            capped = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
            if sinks is not None:
                capped = torch.cat([capped, sinks[head : head + 1].double()])
            out[row, head] = capped.softmax(0)[: len(v)] @ v
    return out


class Case:
    """Sequences with known K and V in scattered blocks of a cache that is otherwise full of garbage."""

    def __init__(
        self,
        make_backend: MakeBackend,
        shape: tuple[int, int, int],
        lens: list[tuple[int, int]],
        dtype: str,
        scales: tuple[tuple[float, float], ...] = (),
        query_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        **scores: Any,
    ) -> None:
        """shape: query heads, KV heads, head size; dtype: of the cache; scores: fields of `AttentionShape`."""
        q_heads, kv_heads, dim = shape
        attention = AttentionShape(q_heads, kv_heads, dim, query_dtype, BLOCK_SIZE, **scores)
        self._fill(make_backend, KVSpec.uniform(LAYERS, kv_heads, dim, dtype), attention, lens, scales, device)
        self.scores = scores
        generator = torch.Generator().manual_seed(len(lens))
        self.kv = [self.kept(torch.randn(2, c, kv_heads, dim, generator=generator)) for _, c in lens]
        self.q = [torch.randn(n, q_heads, dim, generator=generator).to(query_dtype) for n, _ in lens]

    def _fill(
        self,
        make_backend: Callable[[GroupStorage, Any], AttentionBackend],
        spec: KVSpec,
        shape: AttentionShape,
        lens: list[tuple[int, int]],
        scales: tuple[tuple[float, ...], ...],
        device: torch.device,
    ) -> None:
        """Make the cache, a backend of `shape` over it, and block tables for `lens`."""
        layout = KVLayout("f", spec)
        self.storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS, str(device), scales=[scales])
        [self.cache] = self.storage.groups
        self.cache.stacked.copy_(torch.full((), min(1e4, torch.finfo(self.cache.dtype).max)))
        self.block_size = layout.spec.block_size
        self.device = device
        self.backend = make_backend(self.cache, shape)
        free = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(free)
        self.lens = lens
        # One block more than needed, as a scheduler that allocates ahead would give.
        self.tables = [[free.pop() for _ in range(blocks_for(context) + 1)] for _, context in lens]

    def kept(self, kv: Tensor) -> Tensor:
        """What the cache's dtype keeps of the planes of the last layer, where its scales put them. kv: [planes, T, ...]."""
        sides = [
            widen(narrow(x * scale, self.cache.dtype, scale)) * scale
            for x, scale in zip(kv, self.cache.scales[-1], strict=True)
        ]
        return torch.stack(sides)

    def slots(self, i: int, lo: int, hi: int) -> list[int]:
        return [self.tables[i][p // self.block_size] * self.block_size + p % self.block_size for p in range(lo, hi)]

    def stored(self, layer: int) -> Tensor:
        """[planes, num_blocks * block_size, kv_heads, head_dim]: a copy of the layer in host memory, slot by slot."""
        return self.cache.stacked[layer].cpu().transpose(2, 3).flatten(1, 2)

    def put(self, layer: int) -> None:
        """Put what was computed before the step into the cache."""
        dtype = self.cache.dtype
        pages = words_of(self.cache.stacked[layer]).transpose(2, 3)
        for i, (n, context) in enumerate(self.lens):
            before = torch.tensor(self.slots(i, 0, context - n), dtype=torch.int64, device=self.device)
            where = (before // self.block_size, before % self.block_size)
            for side, x, scale in zip(pages, self.kv[i], self.cache.scales[layer], strict=True):
                side.index_put_(where, words_of(narrow(x[: context - n], dtype, scale)).to(self.device))

    def free_behind_windows(self) -> None:
        """Name another sequence's block, which is full of NaN, in place of each block that no row of the step sees."""
        other = next(block for block in range(NUM_BLOCKS) if not any(block in table for table in self.tables))
        words_of(self.cache.stacked)[:, :, other] = words_of(torch.full((), math.nan).to(self.cache.dtype))
        for table, (n, context) in zip(self.tables, self.lens, strict=True):
            freed = max(0, context - n + 1 - self.scores["window"]) // self.block_size
            table[:freed] = [other] * freed

    def metadata(self) -> AttentionMetadata:
        slots = [slot for i, (n, context) in enumerate(self.lens) for slot in self.slots(i, context - n, context)]
        lens = [n for n, _ in self.lens]
        num_decode_rows = next((i for i, n in enumerate(lens) if n != 1), len(lens))
        return AttentionMetadata(
            lens, [c for _, c in self.lens], self.tables, torch.tensor(slots, device=self.device), num_decode_rows
        )

    def rows(self) -> tuple[Any, ...]:
        """q, k and v of the step, as a model gives them: parts of one tensor."""
        k, v = (torch.cat([kv[j, c - n :] for kv, (n, c) in zip(self.kv, self.lens, strict=True)]) for j in (0, 1))
        q = torch.cat(self.q)
        qkv = torch.cat((q, k.to(q.dtype), v.to(q.dtype)), 1).to(self.device)
        heads = (q.size(1), k.size(1), v.size(1))
        return qkv.split(heads, 1)

    def split(self, out: Tensor) -> list[Tensor]:
        return list(out.cpu().split([n for n, _ in self.lens]))

    def run(self, layer: int) -> list[Tensor]:
        """Put what was computed before into the cache, then run the step. One result per sequence."""
        self.put(layer)
        self.backend.plan(self.metadata())
        return self.split(self.backend.forward(layer, *self.rows()))

    def expected(self, i: int) -> Tensor:
        """Expected results of the last layer."""
        n, context = self.lens[i]
        scores = {**self.scores, "sinks": self.scores["sinks"][-1] if "sinks" in self.scores else None}
        return reference(self.q[i], self.kv[i][0], self.kv[i][1], context - n, **scores)


LATENT_DIM, ROPE_DIM, NOPE_DIM, V_DIM = 32, 16, 24, 20


class LatentCase(Case):
    """Sequences with known latents and rotated keys in such a cache, and the matrix that makes keys and values of latents."""

    def __init__(
        self,
        make_backend: Callable[[GroupStorage, Any], AttentionBackend],
        lens: list[tuple[int, int]],
        dtype: str,
        *,
        heads: int = 4,
        latent_dim: int = LATENT_DIM,
        rope_dim: int = ROPE_DIM,
        scales: tuple[tuple[float], ...] = (),
        query_dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        """`dtype`: of the cache."""
        width = latent_dim + rope_dim
        self.shape = LatentShape(
            *(heads, 1, width, query_dtype, BLOCK_SIZE),
            scale=0.3,
            latent_dim=latent_dim,
            nope_dim=NOPE_DIM,
            v_head_dim=V_DIM,
        )
        spec = KVSpec((LayerGroup(tuple(range(LAYERS)), (KVPlane("latent", width),), 1, dtype),))
        self._fill(make_backend, spec, self.shape, lens, scales, device)
        generator = torch.Generator().manual_seed(len(lens))
        self.kv = [self.kept(torch.randn(1, c, 1, width, generator=generator)) for _, c in lens]
        self.q = [torch.randn(n, heads, NOPE_DIM + rope_dim, generator=generator).to(query_dtype) for n, _ in lens]
        drawn = torch.randn(heads, NOPE_DIM + V_DIM, latent_dim, generator=generator)
        self.up = (drawn / latent_dim**0.5).to(query_dtype).to(device)

    def rows(self) -> tuple[Any, ...]:
        """q and the new rows of the step, and the matrices."""
        row = torch.cat([kv[0, c - n :] for kv, (n, c) in zip(self.kv, self.lens, strict=True)])
        q = torch.cat(self.q)
        return q.to(self.device), row.to(q.dtype).to(self.device), LatentMatrices(self.up, NOPE_DIM)

    def expected(self, i: int) -> Tensor:
        """Expected results of the last layer: keys and values of all heads, made of latents."""
        n, context = self.lens[i]
        latents, key = self.kv[i][0, :, 0].double().split((self.shape.latent_dim, self.q[i].size(2) - NOPE_DIM), 1)
        made = torch.einsum("tl,hdl->thd", latents, self.up.cpu().double())
        keys = torch.cat((made[..., :NOPE_DIM], key[:, None].expand(-1, made.size(1), -1)), 2)
        values = made[..., NOPE_DIM:]
        padded = torch.nn.functional.pad(values, (0, keys.size(2) - values.size(2)))
        return reference(self.q[i], keys, padded, context - n, scale=self.shape.scale)[..., :V_DIM]

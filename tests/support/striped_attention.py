"""A whole context-parallel group as one attention backend: each rank's partial results, joined, over one memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.striped import MakePartial, stripe_of_batch
from common.kv.storage import GroupStorage
from common.kv.stripes import Stripe


class AttentionInStripes:
    """`AttentionBackend` of `stripes` ranks. They share `kv`, where each may only use its own blocks."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape, stripes: int, make: MakePartial) -> None:
        self._made_of = kv, shape, stripes, make
        self._shape = shape
        self._ranks = [(Stripe(i, stripes), make(kv, replace(shape, sinks=()))) for i in range(stripes)]

    def plan(self, metadata: AttentionMetadata) -> None:
        size, count = self._shape.block_size, len(self._ranks)
        tables = [[block * count + i % count for i, block in enumerate(table)] for table in metadata.block_tables]
        lens = zip(metadata.query_lens, metadata.context_lens, strict=True)
        positions = torch.tensor([p for n, context in lens for p in range(context - n, context)])
        slots = metadata.slot_mapping
        owners = (positions // size % count).to(slots.device)
        in_pool = (slots // size * count + owners) * size + slots % size
        for stripe, partial in self._ranks:
            moved = replace(metadata, block_tables=tables, slot_mapping=in_pool)
            partial.plan_stripe(stripe_of_batch(moved, stripe, self._shape))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = torch.stack([partial.forward_stripe(layer, q, k, v) for _, partial in self._ranks])
        return self._ranks[0][1].join(parts, self._shape.sinks[layer] if self._shape.sinks else None)

    def for_graph(self, rows: int) -> AttentionInStripes:
        return AttentionInStripes(*self._made_of)

"""Attention alone, of the 0.5B shape, over KV that does not fit the processor's cache. A worker process."""

from __future__ import annotations

import random
import time

import torch

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.native import NativeAttention
from common.base.device import configure_torch
from common.kernels.native.build import build_library
from common.kernels.native.find import find_native
from common.kv.rank_layout import KVLayout, blocks_for
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

Q_HEADS, KV_HEADS, DIM, LAYERS = 14, 2, 64, 24
_COMPILE_S = 300.0


class AttentionSteps:
    """Steps of `LAYERS` layers; each call measures the best of some, in seconds."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: of the cache."""
        configure_torch(None)
        build_library(_COMPILE_S)
        self._num_blocks = num_tokens // 16
        self._rng = random.Random(1)

    def decode(self, *, native: bool, cache: str, batch: int, context: int, repeats: int) -> float:
        """One row of each of `batch` sequences of `context` tokens."""
        return self._best(native, cache, [1] * batch, [context] * batch, repeats)

    def prefill(self, *, native: bool, cache: str, tokens: int, repeats: int) -> float:
        """One whole prompt."""
        return self._best(native, cache, [tokens], [tokens], repeats)

    def _best(self, native: bool, cache: str, rows: list[int], contexts: list[int], repeats: int) -> float:
        backend, size = self._backend(native, cache), 16
        blocks = self._rng.sample(range(self._num_blocks), sum(map(blocks_for, contexts)))
        tables = [[blocks.pop() for _ in range(blocks_for(context))] for context in contexts]
        slots = [
            table[position // size] * size + position % size
            for count, context, table in zip(rows, contexts, tables, strict=True)
            for position in range(context - count, context)
        ]
        decodes = len(rows) if max(rows) == 1 else 0
        metadata = AttentionMetadata(rows, contexts, tables, torch.tensor(slots), decodes)
        dtype = torch.float32 if cache == "float32" else torch.bfloat16
        q, k, v = (torch.randn(sum(rows), heads, DIM).to(dtype) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        took: list[float] = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            backend.plan(metadata)
            for layer in range(LAYERS):
                backend.forward(layer, q, k, v)
            took.append(time.perf_counter() - started)
        return min(took[1:])

    def _backend(self, native: bool, cache: str) -> AttentionBackend:
        layout = KVLayout("f", KVSpec.uniform(LAYERS, KV_HEADS, DIM, cache))
        storage = KVStorage(layout, layout.shard(0, 0), self._num_blocks)
        storage.data.zero_()
        dtype = torch.float32 if cache == "float32" else torch.bfloat16
        shape = AttentionShape(Q_HEADS, KV_HEADS, DIM, dtype, 16)
        if not native:
            return CpuAttention(storage.groups[0], shape)
        library = find_native()
        if library is None:
            raise RuntimeError("there are no native kernels on this machine")
        return NativeAttention(storage.groups[0], shape, library)

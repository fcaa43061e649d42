"""What every attention backend must do. A new backend joins by one line in `BACKENDS`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.attention.cpu import CpuAttention
from common.kv.float8 import narrow, widen, words_of
from common.kv.layout import KVLayout, blocks_for
from common.kv.storage import KVStorage

NUM_BLOCKS = 160
LAYERS = 2

BACKENDS: dict[str, Callable[[KVStorage, AttentionShape], AttentionBackend]] = {"cpu": CpuAttention}
SHAPES = {"1:1": (4, 4, 16), "2:1": (4, 2, 32), "7:1": (14, 2, 64), "one kv head": (3, 1, 8)}


def reference(q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """One sequence, row by row, head by head: row r attends to the first `first + r + 1` keys. All float64."""
    group = q.size(1) // keys.size(1)
    out = torch.empty(q.shape, dtype=torch.float64)
    q, keys, values = q.double(), keys.double(), values.double()
    for row in range(q.size(0)):
        for head in range(q.size(1)):
            k, v = (side[: first + row + 1, head // group] for side in (keys, values))
            out[row, head] = (k @ q[row, head] / math.sqrt(q.size(2))).softmax(0) @ v
    return out


class Case:
    """Sequences with known K and V in scattered blocks of a cache that is otherwise full of garbage."""

    def __init__(
        self,
        backend: str,
        shape: tuple[int, int, int],
        lens: list[tuple[int, int]],
        dtype: str,
        scales: tuple[tuple[float, float], ...] = (),
    ) -> None:
        q_heads, kv_heads, dim = shape
        generator = torch.Generator().manual_seed(len(lens))
        layout = KVLayout("f", LAYERS, kv_heads, dim, dtype)
        self.storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS, scales=scales)
        self.storage.data.fill_(min(1e4, torch.finfo(self.storage.data.dtype).max))
        self.block_size = layout.block_size
        self.backend = BACKENDS[backend](
            self.storage, AttentionShape(q_heads, kv_heads, dim, torch.float32, layout.block_size)
        )
        free = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(free)
        self.lens = lens
        # One block more than needed, as a scheduler that allocates ahead would give.
        self.tables = [[free.pop() for _ in range(blocks_for(context) + 1)] for _, context in lens]
        self.kv = [self.kept(torch.randn(2, c, kv_heads, dim, generator=generator)) for _, c in lens]
        self.q = [torch.randn(n, q_heads, dim, generator=generator) for n, _ in lens]

    def kept(self, kv: Tensor) -> Tensor:
        """What the cache's dtype keeps of K and V of the last layer, where its scales put them. kv: [2, T, ...]."""
        sides = [
            widen(narrow(x * scale, self.storage.data.dtype, scale)) * scale
            for x, scale in zip(kv, self.storage.scales[-1], strict=True)
        ]
        return torch.stack(sides)

    def slots(self, i: int, lo: int, hi: int) -> list[int]:
        return [self.tables[i][p // self.block_size] * self.block_size + p % self.block_size for p in range(lo, hi)]

    def stored(self, layer: int) -> Tensor:
        """[2, num_blocks * block_size, kv_heads, head_dim]: a copy of the layer, slot by slot."""
        return self.storage.data[layer].transpose(2, 3).flatten(1, 2)

    def run(self, layer: int) -> list[Tensor]:
        """Put what was computed before into the cache, then run the step. One result per sequence."""
        slot_mapping: list[int] = []
        pages = words_of(self.storage.data[layer]).transpose(2, 3)
        for i, (n, context) in enumerate(self.lens):
            before = torch.tensor(self.slots(i, 0, context - n), dtype=torch.int64)
            place = before // self.block_size, before % self.block_size
            for page, x, scale in zip(pages, self.kv[i], self.storage.scales[layer], strict=True):
                page[place] = words_of(narrow(x[: context - n], self.storage.data.dtype, scale))
            slot_mapping += self.slots(i, context - n, context)
        self.backend.plan(
            AttentionMetadata(
                [n for n, _ in self.lens], [c for _, c in self.lens], self.tables, torch.tensor(slot_mapping)
            )
        )
        k, v = (torch.cat([kv[j, c - n :] for kv, (n, c) in zip(self.kv, self.lens, strict=True)]) for j in (0, 1))
        out = self.backend.forward(layer, torch.cat(self.q), k, v)
        return list(out.split([n for n, _ in self.lens]))

    def expected(self, i: int) -> Tensor:
        n, context = self.lens[i]
        return reference(self.q[i], self.kv[i][0], self.kv[i][1], context - n)


LENS: dict[str, list[tuple[int, int]]] = {
    "a single token": [(1, 1)],
    "decode over block borders": [(1, 15), (1, 16), (1, 17), (1, 100)],
    "decode with one long context": [(1, 900), (1, 3), (1, 40), (1, 500)],
    "whole prompts": [(2, 2), (16, 16), (33, 33)],
    "chunks after a cached context": [(5, 21), (16, 48), (40, 300)],
    "decode and chunks interleaved": [(1, 30), (20, 20), (1, 600), (7, 100), (1, 5)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_attends_causally_over_pages(backend: str, shape: tuple[int, int, int], lens: list[tuple[int, int]]) -> None:
    case = Case(backend, shape, lens, "float32")
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_chunk_after_context_crosses_query_blocks(backend: str) -> None:
    case = Case(backend, (14, 2, 16), [(150, 700), (300, 300)], "float32")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_cache_costs_no_more_than_the_rounding_of_k_and_v(backend: str) -> None:
    case = Case(backend, (4, 2, 32), [(1, 40), (20, 60)], "bfloat16")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_only_the_slots_of_the_step_in_its_layer(backend: str) -> None:
    case = Case(backend, (4, 2, 16), [(1, 20), (9, 30)], "float32")
    case.run(layer=1)
    written = (case.stored(1)[0] != 1e4).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(case.slots(0, 0, 20) + case.slots(1, 0, 30))
    assert (case.storage.data[0] == 1e4).all()
    for i, (_, context) in enumerate(case.lens):
        assert torch.equal(case.stored(1)[:, case.slots(i, 0, context)], case.kv[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_with_broken_values_leaves_its_neighbours_alone(backend: str) -> None:
    case = Case(backend, (4, 2, 16), [(1, 20), (1, 300), (8, 24)], "float32")
    case.kv[0].fill_(math.nan)
    out = case.run(layer=0)
    assert out[0].isnan().all()
    for i in (1, 2):
        torch.testing.assert_close(out[i].double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_has_the_dtype_of_the_queries(backend: str) -> None:
    case = Case(backend, (4, 2, 16), [(1, 20), (8, 24)], "bfloat16")
    case.q = [q.bfloat16() for q in case.q]
    assert {out.dtype for out in case.run(layer=0)} == {torch.bfloat16}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_cache_costs_no_more_than_the_rounding_of_k_and_v(backend: str) -> None:
    case = Case(backend, (4, 2, 32), [(1, 40), (20, 60), (1, 300)], "float8_e4m3")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_cache_multiplies_what_it_holds_by_the_layers_scales(backend: str) -> None:
    """K and V far outside of e4m3's range come back through scales that bring them into it."""
    scales = ((1.0, 1.0), (8.0, 64.0))
    case = Case(backend, (4, 2, 32), [(1, 40), (20, 60), (1, 300)], "float8_e4m3", scales=scales)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-3, rtol=1e-5)

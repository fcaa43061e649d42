"""Native paged attention against float64, over random shapes, in every variant. Blocks hold NaN past each context,
and so do blocks wholly before the windows of a step's rows."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.native_variants import DISTINCT, VARIANTS, native
from torch import Tensor

from common.kernels.float8 import E4M3, narrow, widen, words_of
from common.kernels.native.library import DTYPES, BatchStruct, CacheStruct, NativeLibrary
from common.kv.rank_layout import blocks_for

ROW_DTYPES = [torch.float32, torch.bfloat16]
CACHE_DTYPES = [torch.float32, torch.bfloat16, E4M3]
HEAD_DIMS = [2, 6, 8, 16, 32, 40, 64, 80, 128, 256, 512]
BEFORE = [0, 0, 1, 15, 100, 126, 127, 128, 300]


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 7
    dim: int = 64
    block_size: int = 16
    rows: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    scales: tuple[float, float] = (1.0, 1.0)
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


@dataclass
class Sequence:
    """q: [T, q_heads, dim]; kv: [2, T, kv_heads, dim]. Its first `before` tokens are in the cache already."""

    q: Tensor
    kv: Tensor
    before: int

    def cut(self, first: int, end: int) -> Sequence:
        """Its rows [first, end) as a chunk."""
        return Sequence(self.q[:end], self.kv[:, :end], first)


def sequence(shape: Shape, length: int, before: int = 0) -> Sequence:
    q = torch.randn(length, shape.kv_heads * shape.group, shape.dim).to(shape.rows)
    return Sequence(q, torch.randn(2, length, shape.kv_heads, shape.dim).to(shape.rows), before)


@dataclass
class Step:
    """One batch over blocks at random places."""

    shape: Shape
    sequences: list[Sequence]
    data: Tensor = field(init=False)
    """[2, num_blocks, kv_heads, block_size, dim]"""
    slots: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape, size = self.shape, self.shape.block_size
        counts = [blocks_for(len(seq.q), size) for seq in self.sequences]
        self.blocks = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
        self.data = torch.full((2, sum(counts) + 3, shape.kv_heads, size, shape.dim), math.nan).to(shape.cache)
        self.slots = []
        for seq, blocks in zip(self.sequences, self.blocks, strict=True):
            slots = (blocks[:, None] * size + torch.arange(size)).flatten()[: len(seq.q)]
            self.slots.append(slots)
            for plane in (0, 1):
                stored = narrow(seq.kv[plane, : seq.before], shape.cache, shape.scales[plane])
                at = slots[: seq.before]
                words_of(self.data)[plane, at // size, :, at % size] = words_of(stored)
            if shape.window:
                freed = max(0, seq.before + 1 - shape.window) // size
                words_of(self.data)[:, blocks[:freed]] = words_of(torch.full((), math.nan).to(shape.cache))

    def run(self, library: NativeLibrary) -> list[Tensor]:
        """Each sequence's rows, without those before."""
        shape, sequences = self.shape, self.sequences
        rows = [seq.before for seq in sequences]
        q = torch.cat([seq.q[seq.before :] for seq in sequences])
        k, v = torch.cat([seq.kv[:, seq.before :] for seq in sequences], 1).contiguous()
        counts = [len(seq.q) - seq.before for seq in sequences]
        int32 = [
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([len(seq.q) for seq in sequences], np.int32),
            np.cumsum([0, *map(len, self.blocks)], dtype=np.int32),
            torch.cat(self.blocks).int().numpy(),
        ]
        slots = torch.cat([slots[first:] for slots, first in zip(self.slots, rows, strict=True)])
        batch = BatchStruct(len(sequences), len(q), *(array.ctypes.data for array in int32), slots.data_ptr())
        cache = CacheStruct(
            *(plane.data_ptr() for plane in self.data),
            DTYPES[shape.cache],
            *(shape.kv_heads, shape.dim, shape.block_size, *shape.scales, shape.window, shape.soft_cap),
            self.sinks.data_ptr() if shape.sinks else None,
        )
        out = torch.empty_like(q)
        pointers = [number for x in (q, k, v) for number in (x.data_ptr(), x.stride(0))]
        structs = (ctypes.addressof(cache), ctypes.addressof(batch), q.size(1), shape.dim**-0.5, DTYPES[q.dtype])
        library.attention_forward(library.team, *structs, *pointers, out.data_ptr())
        return list(out.split(counts))

    def stored(self, index: int) -> Tensor:
        """[2, T, kv_heads, dim] float64: what the cache holds of a sequence."""
        slots, size = self.slots[index], self.shape.block_size
        planes = [widen(plane) * scale for plane, scale in zip(self.data, self.shape.scales, strict=True)]
        return torch.stack([plane[slots // size, :, slots % size].double() for plane in planes])

    def expected(self, index: int) -> Tensor:
        seq = self.sequences[index]
        keys, values = (side.repeat_interleave(self.shape.group, 1) for side in self.stored(index))
        scores = torch.einsum("qhd,thd->hqt", seq.q[seq.before :].double(), keys) * self.shape.dim**-0.5
        if self.shape.soft_cap:
            scores = self.shape.soft_cap * (scores / self.shape.soft_cap).tanh()
        positions = torch.arange(len(seq.q))
        hidden = positions > positions[seq.before :, None]
        if self.shape.window:
            hidden |= positions <= positions[seq.before :, None] - self.shape.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqt,thd->qhd", weights, values.nan_to_num())  # NaN: in blocks before the windows


def random_step(rng: random.Random, rows: torch.dtype, cache: torch.dtype) -> Step:
    shape = Shape(
        rng.choice([1, 2, 3]),
        rng.choice([1, 1, 2, 7, 13]),
        rng.choice(HEAD_DIMS),
        rng.choice([16, 16, 1, 5, 32]),
        rows,
        cache,
        (0.5, 2.0) if cache == E4M3 else (1.0, 1.0),
        rng.choice([0, 0, 1, 2, 15, 16, 33, 100, 127, 128, 129, 250]),
        rng.choice([0.0, 0.0, 1.0, 30.0]),
    )
    sequences: list[Sequence] = []
    for _ in range(rng.randint(1, 5)):
        before = rng.choice(BEFORE)
        sequences.append(sequence(shape, before + rng.choice([1, 1, 2, rng.randint(1, 70)]), before))
    return Step(shape, sequences)


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("rows", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
def test_equals_float64_and_does_not_depend_on_the_number_of_threads(
    variant: str, rows: torch.dtype, cache: torch.dtype
) -> None:
    rng = random.Random(f"{rows} {cache}")
    torch.manual_seed(1)
    tolerance = 1e-5 if rows == torch.float32 else 2e-2
    for _ in range(24):
        step = random_step(rng, rows, cache)
        one, two, four = (step.run(native(variant, threads)) for threads in (1, 2, 4))
        for i, out in enumerate(one):
            assert torch.equal(out, two[i])
            assert torch.equal(out, four[i])
            expected = step.expected(i)
            assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1), step.shape


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("rows", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40, 200])
def test_a_row_depends_on_its_own_context_only(
    variant: str, rows: torch.dtype, cache: torch.dtype, window: int
) -> None:
    """Whole, in chunks, one by one, beside others: a prompt's rows are the same numbers."""
    torch.manual_seed(2)
    shape = Shape(group=3, rows=rows, cache=cache, window=window, soft_cap=2.0 if window else 0.0)
    library = native(variant)
    prompt = sequence(shape, 400)
    [whole] = Step(shape, [prompt]).run(library)
    cuts = [0, 1, 30, 127, 128, 257, 399, 400]
    chunks = [prompt.cut(*cut) for cut in pairwise(cuts)]
    alone = [Step(shape, [chunk]).run(library)[0] for chunk in chunks]
    assert torch.equal(torch.cat(alone), whole)
    others = [sequence(shape, 70), sequence(shape, 800, 799), sequence(shape, 3, 2)]
    for chunk, expected in zip(chunks, alone, strict=True):
        beside = Step(shape, [others[0], chunk, *others[1:]]).run(library)[1]
        assert torch.equal(beside, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_scores_do_not_overflow(variant: str) -> None:
    torch.manual_seed(3)
    shape = Shape()
    large = sequence(shape, 200, 60)
    large.q *= 60
    step = Step(shape, [large])
    [out] = step.run(native(variant))
    torch.testing.assert_close(out.double(), step.expected(0), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_that_are_not_finite_stay_in_their_sequence(variant: str) -> None:
    torch.manual_seed(4)
    shape = Shape()
    sequences = [sequence(shape, 150, 149), sequence(shape, 150, 149), sequence(shape, 20)]
    expected = Step(shape, sequences).run(native(variant))
    sequences[0].kv[:, 40] = math.nan
    found = Step(shape, sequences).run(native(variant))
    assert found[0].isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 300.0])
def test_the_cache_holds_the_bits_that_pytorch_rounds_to(variant: str, cache: torch.dtype, scale: float) -> None:
    scales = (scale, 1 / scale) if cache == E4M3 else (1.0, 1.0)
    shape = Shape(1, 1, 512, cache=cache, scales=scales)
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    between = torch.randn(2, 2**15) * torch.tensor([[1.0], [100.0]])
    numbers = torch.cat([every_bf16, between.flatten()]).view(2, -1, 1, 512)
    seq = Sequence(torch.zeros(numbers.size(1), 1, 512), numbers, 0)
    step = Step(shape, [seq])
    step.run(native(variant))
    slots = step.slots[0]
    for plane in (0, 1):
        found = words_of(step.data)[plane, slots // 16, :, slots % 16]
        expected = narrow(numbers[plane], cache, scales[plane])
        wide = widen(expected)
        # bfloat16 instructions take subnormal numbers as zero.
        is_compared = ~wide.isnan() & (numbers[plane].abs() >= torch.finfo(torch.float32).tiny)
        assert torch.equal(found[is_compared], words_of(expected)[is_compared])
        assert widen(found)[wide.isnan()].isnan().all() if cache != E4M3 else (found[wide.isnan()] & 127 == 127).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", ROW_DTYPES, ids=str)
def test_every_float8_number_is_read_as_pytorch_reads_it(variant: str, rows: torch.dtype) -> None:
    shape = Shape(1, 1, 256, rows=rows, cache=E4M3)
    step = Step(shape, [Sequence(torch.zeros(2, 1, 256).to(rows), torch.zeros(2, 2, 1, 256).to(rows), before=1)])
    codes = torch.arange(256, dtype=torch.uint8)
    block, offset = divmod(int(step.slots[0][0]), shape.block_size)
    words_of(step.data)[1, block, 0, offset] = codes
    [out] = step.run(native(variant))
    expected = codes.view(E4M3).float() / 2  # the other token's value is zero, and both have the same score
    torch.testing.assert_close(out.float()[0, 0], expected, rtol=0, atol=0, equal_nan=True)

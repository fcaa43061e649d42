"""The attention backends of a GPU, against the fixtures of the CPU's conformance suite and recorded as CUDA graphs."""

from __future__ import annotations

import importlib
import math
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from support.attention_cases import LENS, Case, MakeBackend
from torch.nn import functional as F

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.choose import choose_attention
from common.attention.flashinfer import FlashInferAttention
from common.attention.sdpa import SdpaAttention
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

GPU = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute, of results of about 1: K and V are rounded alike on both sides, queries, probabilities and results here."""
# Each pair of a dtype and a head size is a module that may have to be compiled: FP8 and float16 keep to heads of 64.
SHAPES = {"1:1": (4, 4, 64), "4:1": (8, 2, 128), "7:1": (14, 2, 64), "8:1": (8, 1, 128)}
SCORES: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "soft cap": {"soft_cap": 2.0},
    "window and soft cap": {"window": 40, "soft_cap": 2.0, "scale": 0.2},
}


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    return importlib.import_module("flashinfer")


@pytest.fixture(params=["flashinfer", "sdpa"])
def make_backend(request: pytest.FixtureRequest, flashinfer: ModuleType) -> MakeBackend:
    return partial(FlashInferAttention, flashinfer=flashinfer) if request.param == "flashinfer" else SdpaAttention


def check(case: Case, layer: int, atol: float) -> None:
    for i, out in enumerate(case.run(layer)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=atol, rtol=atol)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_attends_causally_over_pages(
    make_backend: MakeBackend, shape: tuple[int, int, int], lens: list[tuple[int, int]]
) -> None:
    case = Case(make_backend, shape, lens, "bfloat16", query_dtype=torch.bfloat16, device=GPU)
    check(case, 1, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_windows_and_soft_caps(make_backend: MakeBackend, lens: list[tuple[int, int]], scores: dict[str, Any]) -> None:
    """A block that lies before the windows of all rows is not read: the case fills such blocks with NaN."""
    case = Case(make_backend, (14, 2, 64), lens, "bfloat16", (), torch.bfloat16, GPU, **scores)
    if "window" in scores:
        case.free_behind_windows()
    check(case, 1, TOLERANCE[torch.bfloat16])


def test_attends_in_float16(make_backend: MakeBackend) -> None:
    lens = LENS["decode and chunks interleaved"]
    case = Case(make_backend, (14, 2, 64), lens, "float16", query_dtype=torch.float16, device=GPU)
    check(case, 1, TOLERANCE[torch.float16])


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_gathered_blocks_in_float32_are_exact(lens: list[tuple[int, int]]) -> None:
    check(Case(SdpaAttention, (14, 2, 16), lens, "float32", device=GPU), 1, TOLERANCE[torch.float32])


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("scales", [(), ((1.0, 1.0), (0.5, 2.0))], ids=["no scales", "scales"])
def test_fp8_cache_is_read_through_its_scales(
    make_backend: MakeBackend, lens: list[tuple[int, int]], scales: tuple[tuple[float, float], ...]
) -> None:
    case = Case(make_backend, (14, 2, 64), lens, "float8_e4m3", scales, torch.bfloat16, GPU)
    check(case, 1, 2 * TOLERANCE[torch.bfloat16])


def test_writes_only_the_slots_of_the_step_in_its_layer(make_backend: MakeBackend) -> None:
    case = Case(make_backend, (4, 2, 64), [(1, 20), (9, 30)], "bfloat16", (), torch.bfloat16, GPU)
    case.run(layer=1)
    garbage = case.storage.groups[0].stacked[0, 0, 0, 0, 0, 0].item()
    written = (case.stored(1)[0] != garbage).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(case.slots(0, 0, 20) + case.slots(1, 0, 30))
    assert (case.storage.groups[0].stacked[0] == garbage).all()
    for i, (_, context) in enumerate(case.lens):
        assert torch.equal(case.stored(1)[:, case.slots(i, 0, context)].float(), case.kv[i])


def test_a_sequence_with_broken_values_leaves_its_neighbours_alone(make_backend: MakeBackend) -> None:
    case = Case(make_backend, (4, 2, 64), [(1, 20), (1, 300), (8, 24)], "bfloat16", (), torch.bfloat16, GPU)
    case.kv[0].fill_(math.nan)
    out = case.run(layer=0)
    assert out[0].isnan().all()
    for i in (1, 2):
        torch.testing.assert_close(out[i].double(), case.expected(i), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_a_recorded_step_replays_what_was_planned_and_equals_itself_launched(
    make_backend: MakeBackend, dtype: str
) -> None:
    case = Case(make_backend, (14, 2, 64), [(1, 40), (1, 3), (1, 700)], dtype, (), torch.bfloat16, GPU)
    backend = case.backend = case.backend.for_graph(3)
    whole, static = case.kv, [part.contiguous() for part in case.rows()]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    recorded = torch.empty(0)
    for step, contexts in enumerate(([40, 3, 700], [33, 2, 17], [16, 1, 656])):
        case.lens = [(1, context) for context in contexts]
        case.kv = [kv[:, :context] for kv, context in zip(whole, contexts, strict=True)]
        case.put(1)
        backend.plan(case.metadata())
        for part, new in zip(static, case.rows(), strict=True):
            part.copy_(new)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            launched = backend.forward(1, *static)
        stream.synchronize()
        if step == 0:
            with torch.cuda.graph(graph, stream=stream):
                recorded = backend.forward(1, *static)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, launched)
        for i, out in enumerate(case.split(recorded)):
            torch.testing.assert_close(out.double(), case.expected(i), atol=6e-2, rtol=6e-2)


def test_long_prompts_in_chunks_agree_with_attention_over_the_whole(make_backend: MakeBackend) -> None:
    """8k tokens in chunks of 3,000, beside a row that decodes."""
    q_heads, kv_heads, dim, length, chunk = 8, 2, 128, 8000, 3000
    layout = KVLayout("f", KVSpec.uniform(1, kv_heads, dim, "bfloat16"))
    storage = KVStorage(layout, layout.shard(0, 0), 600, "cuda")
    backend = make_backend(
        storage.groups[0], AttentionShape(q_heads, kv_heads, dim, torch.bfloat16, layout.spec.block_size)
    )
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(1 + length, heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    table = torch.randperm(599, generator=torch.Generator().manual_seed(2)).add_(1).tolist()
    parts: list[torch.Tensor] = []
    for lo in range(1, 1 + length, chunk):
        hi = min(lo + chunk, 1 + length)
        slots = [table[(p - 1) // 16] * 16 + (p - 1) % 16 for p in range(lo, hi)]
        slot_mapping = torch.tensor([0, *slots], device="cuda")
        backend.plan(AttentionMetadata([1, hi - lo], [1, hi - 1], [[0], table], slot_mapping))
        rows = [torch.cat((x[:1], x[lo:hi])) for x in (q, k, v)]
        out = backend.forward(0, *rows)
        torch.testing.assert_close(out[0], v[0].repeat_interleave(q_heads // kv_heads, 0), atol=1e-2, rtol=1e-2)
        parts.append(out[1:])
    whole = [x[1:].transpose(0, 1).float() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(parts).transpose(0, 1).float(), expected, atol=3e-2, rtol=3e-2)


def test_a_gpu_with_flashinfer_uses_it(flashinfer: ModuleType) -> None:
    layout = KVLayout("f", KVSpec.uniform(1, 2, 64, "bfloat16"))
    storage = KVStorage(layout, layout.shard(0, 0), 4, "cuda")
    assert isinstance(choose_attention(storage, [AttentionShape(4, 2, 64, torch.bfloat16, 16)]), FlashInferAttention)

"""What every attention backend must do. Add a new backend by one line in `BACKENDS`."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_flashinfer
from support.attention_cases import LENS, Case, MakeBackend
from support.native_variants import VARIANTS, native
from support.striped_attention import AttentionInStripes

from common.attention import sdpa
from common.attention.base import AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.flashinfer import FlashInferAttention
from common.attention.native import NativeAttention, NativePartialAttention
from common.attention.sdpa import SdpaAttention
from common.attention.striped import TorchPartialAttention
from common.kernels.flashinfer_kernels import HEAD_DIMS
from common.kv.rank_layout import blocks_for


def _native(variant: str, kv: Any, shape: AttentionShape) -> NativeAttention:
    return NativeAttention(kv, shape, native(variant))


def _native_stripes(stripes: int, variant: str, kv: Any, shape: AttentionShape) -> AttentionInStripes:
    return AttentionInStripes(kv, shape, stripes, partial(NativePartialAttention, native=native(variant)))


NATIVE_STRIPES = [(4, VARIANTS[0]), *((2, variant) for variant in VARIANTS)]
BACKENDS: dict[str, MakeBackend] = {
    "cpu": CpuAttention,
    "sdpa": SdpaAttention,
    "flashinfer": partial(FlashInferAttention, flashinfer=fake_flashinfer),
    **{variant: partial(_native, variant) for variant in VARIANTS},
    **{f"{n} stripes": partial(AttentionInStripes, stripes=n, make=TorchPartialAttention) for n in (1, 2, 4)},
    **{f"{n} native stripes, {variant}": partial(_native_stripes, n, variant) for n, variant in NATIVE_STRIPES},
}
"""All on a CPU, flashinfer as a stand-in of plain operations; tests/gpu tests the real one."""
SHAPES = {"1:1": (4, 4, 16), "2:1": (4, 2, 32), "7:1": (14, 2, 64), "one kv head": (3, 1, 8)}


def make_case(backend: str, shape: tuple[int, int, int], *args: Any, **kwargs: Any) -> Case:
    q_heads, kv_heads, dim = shape
    if backend == "flashinfer":
        dim = max(dim, HEAD_DIMS[0])
    return Case(BACKENDS[backend], (q_heads, kv_heads, dim), *args, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_attends_causally_over_blocks(backend: str, shape: tuple[int, int, int], lens: list[tuple[int, int]]) -> None:
    case = make_case(backend, shape, lens, "float32")
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_take_the_models_own_scale(backend: str) -> None:
    case = make_case(backend, (4, 2, 32), LENS["decode and chunks interleaved"], "float32", scale=0.4)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 16, 17, 100, 1000])
def test_rows_see_no_more_than_their_window_and_blocks_behind_it_are_not_read(backend: str, window: int) -> None:
    lens = [(1, 30), (1, 600), (1, 5), (1, 128), (40, 300), (33, 33), (7, 100)]
    case = make_case(backend, (4, 2, 16), lens, "float32", window=window, scale=0.4)
    case.put(1)
    case.free_behind_windows()
    case.backend.plan(case.metadata())
    for i, out in enumerate(case.split(case.backend.forward(1, *case.rows()))):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_scores_are_capped(backend: str, soft_cap: float, window: int | None) -> None:
    lens = LENS["decode and chunks interleaved"]
    case = make_case(backend, (4, 2, 32), lens, "float32", scale=1.5, soft_cap=soft_cap, window=window)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flashinfer"])
@pytest.mark.parametrize("more", [{}, {"window": 20}, {"soft_cap": 3.0}], ids=str)
def test_sinks_join_the_softmax_of_their_heads(backend: str, more: dict[str, Any]) -> None:
    heads, kv_heads, dim = SHAPES["7:1"]
    sinks = tuple(torch.linspace(-3.0, 8.0, heads) + layer for layer in range(2))
    lens = LENS["decode and chunks interleaved"]
    case = make_case(backend, (heads, kv_heads, dim), lens, "float32", sinks=sinks, **more)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flashinfer"])
@pytest.mark.parametrize("sink", [-1e4, 1e4, -math.inf])
def test_sinks_far_from_the_scores_leave_finite_results(backend: str, sink: float) -> None:
    case = make_case(backend, (4, 2, 32), LENS["whole prompts"], "float32", sinks=(torch.full((4,), sink),) * 2)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_and_caps_over_an_fp8_cache(backend: str) -> None:
    scales = ((1.0, 1.0), (8.0, 64.0))
    lens = [(1, 40), (20, 60), (1, 300)]
    case = make_case(backend, (4, 2, 32), lens, "float8_e4m3", scales=scales, window=24, soft_cap=3.0)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [30, 200])
def test_windows_of_a_large_chunk_begin_in_several_query_blocks(backend: str, window: int) -> None:
    case = make_case(backend, (14, 2, 16), [(150, 700), (300, 300)], "float32", window=window)
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_chunk_after_context_crosses_query_blocks(backend: str) -> None:
    case = make_case(backend, (14, 2, 16), [(150, 700), (300, 300)], "float32")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_cache_costs_no_more_than_the_rounding_of_k_and_v(backend: str) -> None:
    case = make_case(backend, (4, 2, 32), [(1, 40), (20, 60)], "bfloat16")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_only_the_slots_of_the_step_in_its_layer(backend: str) -> None:
    case = make_case(backend, (4, 2, 16), [(1, 20), (9, 30)], "float32")
    case.run(layer=1)
    written = (case.stored(1)[0] != 1e4).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(case.slots(0, 0, 20) + case.slots(1, 0, 30))
    assert (case.storage.groups[0].stacked[0] == 1e4).all()
    for i, (_, context) in enumerate(case.lens):
        assert torch.equal(case.stored(1)[:, case.slots(i, 0, context)], case.kv[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_with_broken_values_leaves_its_neighbours_alone(backend: str) -> None:
    case = make_case(backend, (4, 2, 16), [(1, 20), (1, 300), (8, 24)], "float32")
    case.kv[0].fill_(math.nan)
    out = case.run(layer=0)
    assert out[0].isnan().all()
    for i in (1, 2):
        torch.testing.assert_close(out[i].double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [math.nan, math.inf])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_broken_values_that_a_sequence_left_in_its_blocks_do_not_touch_the_next_one_there(
    backend: str, left: float, lens: list[tuple[int, int]]
) -> None:
    case = make_case(backend, (4, 2, 16), lens, "float32")
    case.storage.groups[0].stacked.fill_(left)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_has_the_dtype_of_the_queries(backend: str) -> None:
    case = make_case(backend, (4, 2, 16), [(1, 20), (8, 24)], "bfloat16", query_dtype=torch.bfloat16)
    assert {out.dtype for out in case.run(layer=0)} == {torch.bfloat16}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_cache_costs_no_more_than_the_rounding_of_k_and_v(backend: str) -> None:
    case = make_case(backend, (4, 2, 32), [(1, 40), (20, 60), (1, 300)], "float8_e4m3")
    for i, out in enumerate(case.run(layer=0)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_cache_multiplies_what_it_holds_by_the_layers_scales(backend: str) -> None:
    """K and V far outside of e4m3's range come back through scales that bring them into it."""
    scales = ((1.0, 1.0), (8.0, 64.0))
    case = make_case(backend, (4, 2, 32), [(1, 40), (20, 60), (1, 300)], "float8_e4m3", scales=scales)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap"), [("float32", None, None), ("float8_e4m3", None, None), ("float32", 20, 2.0)]
)
def test_a_backend_for_graphs_reads_each_step_from_the_same_memory(
    backend: str, dtype: str, window: int | None, soft_cap: float | None
) -> None:
    scales = ((1.0, 1.0), (0.5, 2.0)) if dtype == "float8_e4m3" else ()
    lens = [(1, 40), (1, 3), (1, 300)]
    case = make_case(backend, (14, 2, 64), lens, dtype, scales=scales, window=window, soft_cap=soft_cap)
    planned = case.backend.for_graph(3)
    # A replayed graph runs no Python of later plans: it sees only what they wrote to memory.
    captured = copy.copy(planned)
    case.backend = SimpleNamespace(plan=planned.plan, forward=captured.forward)  # pyright: ignore[reportAttributeAccessIssue]
    whole = case.kv
    for contexts in ([40, 3, 300], [33, 2, 17], [16, 1, 256]):
        case.lens = [(1, context) for context in contexts]
        case.kv = [kv[:, :context] for kv, context in zip(whole, contexts, strict=True)]
        for i, out in enumerate(case.run(layer=1)):
            torch.testing.assert_close(out.double(), case.expected(i), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows_at_once", "sizes"), [(3.5, [3, 3, 1]), (0.5, [1] * 7)])
def test_decode_rows_are_gathered_some_at_a_time(
    rows_at_once: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = [(1, 40), (1, 3), (1, 300), (1, 16), (1, 17), (1, 90), (1, 1)]
    case = make_case("sdpa", (4, 2, 16), lens, "float32")
    seen: list[int] = []
    gather = sdpa.PagedCache.gather

    def watched(cache: sdpa.PagedCache, layer: int, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.append(len(wanted))
        return gather(cache, layer, wanted, dtype)

    monkeypatch.setattr(sdpa.PagedCache, "gather", watched)
    of_one = 2 * blocks_for(300) * case.block_size * 2 * 16
    monkeypatch.setattr(sdpa, "_MAX_GATHERED", int(rows_at_once * of_one))
    for backend in (case.backend, case.backend.for_graph(len(lens))):
        case.backend = backend
        for i, out in enumerate(case.run(layer=1)):
            torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)
        assert seen[: len(sizes)] == sizes
    assert len(seen) == len(sizes) + len(lens), "a captured step gathers the longest context for every row"


def test_smaller_graph_backends_do_not_disturb_larger_ones() -> None:
    case = make_case("flashinfer", (4, 2, 64), [(1, 40), (1, 30)], "float32")
    both, one = case.backend.for_graph(2), case.backend.for_graph(1)
    for backend, count in ((both, 2), (one, 1), (both, 2)):
        case.backend = backend
        part = copy.copy(case)
        part.lens, part.kv, part.q = case.lens[:count], case.kv[:count], case.q[:count]
        part.tables = case.tables[:count]
        for i, out in enumerate(part.run(layer=0)):
            torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)

"""What every backend of latent attention must do, and that its two ways agree."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_flashinfer
from support.attention_cases import LENS, NOPE_DIM, ROPE_DIM, V_DIM, LatentCase
from support.native_variants import DISTINCT, VARIANTS, native
from support.striped_attention import AttentionInStripes

from common.attention import latent
from common.attention.base import AttentionBackend
from common.attention.choose import worth_capturing
from common.attention.cpu import CpuAttention
from common.attention.flashinfer_latent import FlashInferLatent, unsupported_reason
from common.attention.latent import LatentBackend, LatentMatrices, LatentShape, NativeLatentMatrices, is_expanded
from common.attention.native import NativeAttention, NativePartialAttention
from common.attention.sdpa import SdpaAttention
from common.attention.striped import TorchPartialAttention
from common.kernels.native.linear import NativeLinear, pack_float

USUAL: dict[str, Any] = {
    "cpu": CpuAttention,
    "sdpa": SdpaAttention,
    **{variant: lambda kv, shape, variant=variant: NativeAttention(kv, shape, native(variant)) for variant in VARIANTS},
}


def _over(usual: Any, kv: Any, shape: LatentShape) -> AttentionBackend:
    return LatentBackend(kv, shape, usual(kv, shape))


def _in_stripes(make: Any, kv: Any, shape: LatentShape) -> AttentionBackend:
    return LatentBackend(kv, shape, AttentionInStripes(kv, shape, 2, make), expands=False)


def _native_partial(kv: Any, shape: LatentShape) -> NativePartialAttention:
    return NativePartialAttention(kv, shape, native(VARIANTS[0]))


BACKENDS: dict[str, Any] = {
    **{name: partial(_over, usual) for name, usual in USUAL.items()},
    "stripes": partial(_in_stripes, TorchPartialAttention),
    "native stripes": partial(_in_stripes, _native_partial),
}


def _flashinfer(kv: Any, shape: LatentShape) -> AttentionBackend:
    return LatentBackend(kv, shape, FlashInferLatent(kv, shape, fake_flashinfer))  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=[None, True, False], ids=["by work", "expanded", "absorbed"])
def expands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rows of prompts are computed."""
    if request.param is not None:
        monkeypatch.setattr(latent, "is_expanded", lambda shape, rows, context_len: request.param)


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_attends_causally_over_blocks(backend: str, lens: list[tuple[int, int]]) -> None:
    case = LatentCase(BACKENDS[backend], lens, "float32")
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("numbers", "products"), [(1, 4), (2 * 300 * (NOPE_DIM + ROPE_DIM + V_DIM), 2), (2**26, 1)])
def test_a_long_context_is_expanded_for_some_heads_at_a_time(
    monkeypatch: pytest.MonkeyPatch, numbers: int, products: int
) -> None:
    monkeypatch.setattr(latent, "_MAX_EXPANDED", numbers)
    made: list[int] = []
    linear = torch.nn.functional.linear

    def counted(*args: torch.Tensor) -> torch.Tensor:
        made.append(len(args[1]))
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    case = LatentCase(BACKENDS["cpu"], [(200, 300)], "float32")
    (out,) = case.run(layer=1)
    torch.testing.assert_close(out.double(), case.expected(0), atol=1e-5, rtol=1e-5)
    assert made == [4 // products * (NOPE_DIM + V_DIM)] * products


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 16, 20])
def test_any_number_of_heads_reads_the_rows_of_a_published_width(backend: str, heads: int) -> None:
    lens = [(1, 40), (1, 300), (20, 60), (3, 200)]
    case = LatentCase(BACKENDS[backend], lens, "float32", heads=heads, latent_dim=512, rope_dim=64)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "scales"), [("bfloat16", ()), ("float8_e4m3", ()), ("float8_e4m3", ((2.0,), (0.5,)))]
)
def test_a_narrow_cache_costs_no_more_than_the_rounding_of_its_rows(backend: str, dtype: str, scales: Any) -> None:
    case = LatentCase(BACKENDS[backend], [(1, 40), (1, 300), (40, 60), (3, 200)], dtype, scales=scales)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_only_the_slots_of_the_step_in_its_layer(backend: str) -> None:
    case = LatentCase(BACKENDS[backend], [(1, 20), (20, 30)], "float32")
    case.run(layer=1)
    written = (case.stored(1)[0] != 1e4).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(case.slots(0, 0, 20) + case.slots(1, 0, 30))
    assert (case.cache.stacked[0] == 1e4).all()
    for i, (_, context) in enumerate(case.lens):
        assert torch.equal(case.stored(1)[:, case.slots(i, 0, context)], case.kv[i])


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [math.nan, math.inf])
def test_broken_values_that_a_sequence_left_in_its_blocks_do_not_touch_the_next_one_there(
    backend: str, left: float
) -> None:
    case = LatentCase(BACKENDS[backend], LENS["decode and chunks interleaved"], "float32")
    case.cache.stacked.fill_(left)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("backend", BACKENDS)
def test_result_has_the_dtype_of_the_queries(backend: str) -> None:
    case = LatentCase(BACKENDS[backend], [(1, 20), (24, 24)], "bfloat16", query_dtype=torch.bfloat16)
    for i, out in enumerate(case.run(layer=0)):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), case.expected(i), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("backend", [*(name for name in BACKENDS if name != "cpu"), "flashinfer"])
def test_a_backend_for_graphs_reads_each_step_from_the_same_memory(backend: str) -> None:
    make = BACKENDS.get(backend, _flashinfer)
    case = LatentCase(make, [(1, 40), (1, 3), (1, 300)], "float32", latent_dim=512, rope_dim=64)
    planned = case.backend.for_graph(3)
    captured = copy.copy(planned)  # A replayed graph runs no Python of later plans.
    case.backend = SimpleNamespace(plan=planned.plan, forward=captured.forward)  # pyright: ignore[reportAttributeAccessIssue]
    whole = case.kv
    for contexts in ([40, 3, 300], [33, 2, 17], [16, 1, 256]):
        case.lens = [(1, context) for context in contexts]
        case.kv = [kv[:, :context] for kv, context in zip(whole, contexts, strict=True)]
        for i, out in enumerate(case.run(layer=1)):
            torch.testing.assert_close(out.double(), case.expected(i), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("expands")
@pytest.mark.parametrize("lens", [LENS["decode with one long context"], LENS["decode and chunks interleaved"]], ids=str)
def test_flashinfer_attends_causally_over_blocks(lens: list[tuple[int, int]]) -> None:
    """By a stand-in of plain operations."""
    case = LatentCase(_flashinfer, lens, "float32", latent_dim=512, rope_dim=64)
    for i, out in enumerate(case.run(layer=1)):
        torch.testing.assert_close(out.double(), case.expected(i), atol=1e-5, rtol=1e-5)


def test_flashinfer_takes_16_bit_latents_of_published_widths_only() -> None:
    published = LatentShape(16, 1, 576, torch.bfloat16, 16, latent_dim=512, nope_dim=128, v_head_dim=128)
    assert not unsupported_reason(published, torch.bfloat16)
    assert "no latents of torch.float8_e4m3fn" in unsupported_reason(published, torch.float8_e4m3fn)
    assert "torch.float32" in unsupported_reason(replace(published, dtype=torch.float32), torch.float32)
    assert "(256, 320)" in unsupported_reason(replace(published, latent_dim=256), torch.bfloat16)


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_products_take_queries_to_latents_and_latents_to_values(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q, attended = torch.randn(5, 3, 24 + 16).to(dtype), torch.randn(5, 3, 64 + 16).to(dtype)[..., :64]
    up = (torch.randn(3, 24 + 32, 64) / 8).to(dtype)
    packed = (up[:, :24].transpose(1, 2).flatten(0, 1), up[:, 24:].flatten(0, 1))
    layers = (NativeLinear(native(variant), pack_float(each, is_paired=False), None) for each in packed)
    plain, ours = LatentMatrices(up, 24), NativeLatentMatrices(up, 24, *layers)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours.absorb(q), plain.absorb(q), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.values(attended), plain.values(attended), atol=tolerance, rtol=tolerance)


def test_prompts_are_expanded_and_few_rows_of_a_long_context_are_not() -> None:
    """DeepSeek's shape: making a token's keys and values costs a head as much as 170 pairs of query and token save."""
    shape = LatentShape(16, 1, 576, torch.float32, 16, latent_dim=512, nope_dim=128, v_head_dim=128)
    assert all(is_expanded(shape, rows, rows) for rows in (2, 17, 4096))
    assert [is_expanded(shape, rows, 4096) for rows in (1, 100, 200, 2048)] == [False, False, True, True]


def test_steps_are_captured_where_the_absorbed_part_is_worth_it() -> None:
    case = LatentCase(BACKENDS["sdpa"], [(1, 4)], "float32")
    assert worth_capturing(case.backend, 2048)
    assert not worth_capturing(case.backend, 100_000)

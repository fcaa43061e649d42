"""A whole mixture in one call of the native kernels against its parts: `route`, the experts, the shared experts."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.native_variants import DISTINCT, native

from common.kernels.native.library import SILU_GATE, ExpertsStruct, GateStruct, LinearStruct, NativeLibrary
from common.kernels.native.linear import NativeLinear, pack_float
from common.model.description import RouterDescription
from common.model.mixture.experts import NativeExperts, NativeMixture
from common.model.mixture.routing import route

HIDDEN, INNER, EXPERTS = 72, 40, 16
ROUTERS = {
    "softmax": RouterDescription(EXPERTS, 4),
    "normalized": RouterDescription(EXPERTS, 5, normalizes=True, scaling=1.7),
    "of chosen": RouterDescription(EXPERTS, 3, "softmax_of_chosen", has_bias=True),
    "biased groups": RouterDescription(
        EXPERTS, 4, "sigmoid", normalizes=True, scaling=2.5, has_selection_bias=True, num_groups=4, groups_kept=2
    ),
    "groups by the best": RouterDescription(EXPERTS, 3, num_groups=8, groups_kept=3, group_score_of=1),
    "all": RouterDescription(2, 2, "sigmoid"),
}


class _Experts(NativeExperts):
    """Random experts, without a model around them."""

    def __init__(self, library: NativeLibrary, linears: list[tuple[NativeLinear, NativeLinear]], top_k: int) -> None:
        self.native, self.slots, self._top_k = library, None, top_k
        self._linears = linears
        self._structs = [(LinearStruct * len(linears))(*(pair[i].struct for pair in linears)) for i in range(2)]
        self.struct = ExpertsStruct(*map(ctypes.addressof, self._structs), gate=GateStruct(SILU_GATE))
        self.struct.num_experts, self.struct.hidden, self.struct.inner = len(linears), HIDDEN, INNER


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_gives_what_its_parts_give_in_any_batch(variant: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    router, library = ROUTERS[name], native(variant)

    def linear(out: int, inputs: int, kind: torch.dtype = dtype, *, is_paired: bool = False) -> NativeLinear:
        weight = (torch.randn(out, inputs) / inputs**0.5).to(kind)
        return NativeLinear(library, pack_float(weight, is_paired=is_paired), torch.randn(out) / 9)

    def mlp(inner: int) -> tuple[NativeLinear, NativeLinear]:
        return linear(2 * inner, HIDDEN, is_paired=True), linear(HIDDEN, inner)

    logits, shared = linear(router.num_experts, HIDDEN, torch.float32), mlp(56) if "groups" in name else None
    experts = _Experts(library, [mlp(INNER) for _ in range(router.num_experts)], router.top_k)
    bias = torch.randn(EXPERTS) / 3 if router.has_selection_bias else None
    mixture = NativeMixture(library, router, logits, bias, experts, shared)
    x = torch.randn(70, HIDDEN).to(dtype)
    expected = experts.forward(x, route(logits.forward(x.float()), router, bias))
    if shared is not None:
        gate, up = shared[0].forward(x).float().chunk(2, 1)
        expected += shared[1].forward((gate * gate.sigmoid() * up).to(dtype)).float()
    whole = mixture.forward(x)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(mixture.forward(x[17:18]), whole[17:18])

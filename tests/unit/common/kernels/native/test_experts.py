"""The grouped products of experts against single products in float64, in every variant and format of weights."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.native_variants import DISTINCT, native
from torch import Tensor

from common.kernels.native.library import (
    CLAMPED_GATE,
    DTYPES,
    SILU_GATE,
    ChoiceStruct,
    ExpertsStruct,
    GateStruct,
    LinearStruct,
)
from common.kernels.native.linear import NativeLinear, PackedWeight, pack_float, pack_int4, pack_int8

HIDDEN, INNER, EXPERTS, TOP_K = 136, 72, 14, 3
FIRST, OWN = 2, 10
"""This rank has experts 2 to 11 of 14: many rows share out whole experts among the threads, few rows the outputs of each."""
ALPHA, LIMIT = 1.7, 2.5


def _pack(weight: Tensor, form: str, *, is_paired: bool) -> tuple[PackedWeight, Tensor]:
    """The packed layer, and what it multiplies by, float64."""
    if form == "float":
        return pack_float(weight, is_paired=is_paired), weight.double()
    out, inputs = weight.shape
    if form == "int8":
        codes, scale = (weight.float() * 40).round().clamp(-127, 127).to(torch.int8), torch.rand(out) / 20 + 0.01
        return pack_int8(codes, scale, is_paired=is_paired), codes.double() * scale[:, None].double()
    codes = (weight.float() * 3 + 8).round().clamp(0, 15).to(torch.uint8)
    scale, zero = torch.rand(out, inputs // 8) / 3 + 0.01, torch.full((out, inputs // 8), 8.0)
    wide = (codes.view(out, -1, 8).double() - 8) * scale[..., None].double()
    return pack_int4(codes, scale, zero, is_paired=is_paired), wide.view(out, inputs)


class _Mixture:
    def __init__(self, variant: str, form: str, dtype: torch.dtype, gate: int) -> None:
        torch.manual_seed(5)
        self.native, self.gate = native(variant), gate
        self.layers: list[tuple[NativeLinear, NativeLinear]] = []
        self.wide: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for _ in range(OWN):
            up, down = torch.randn(2 * INNER, HIDDEN).to(dtype), torch.randn(HIDDEN, INNER).to(dtype)
            (one, wide_up), (two, wide_down) = _pack(up, form, is_paired=True), _pack(down, form, is_paired=False)
            biases = torch.randn(2 * INNER), torch.randn(HIDDEN)
            self.layers.append((NativeLinear(self.native, one, biases[0]), NativeLinear(self.native, two, biases[1])))
            self.wide.append((wide_up, biases[0].double(), wide_down, biases[1].double()))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        up, down = ((LinearStruct * OWN)(*(pair[i].struct for pair in self.layers)) for i in range(2))
        gate = GateStruct(self.gate, ALPHA, LIMIT)
        own = ExpertsStruct(ctypes.addressof(up), ctypes.addressof(down), gate=gate)
        own.first, own.num_experts, own.hidden, own.inner = FIRST, OWN, HIDDEN, INNER
        choice = ChoiceStruct(experts.data_ptr(), weights.data_ptr(), len(x), TOP_K)
        addresses = ctypes.addressof(own), ctypes.addressof(choice)
        self.native.experts_forward(self.native.team, *addresses, x.data_ptr(), DTYPES[x.dtype], out.data_ptr())
        return out

    def expected(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] float64."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for i, (up, up_bias, down, down_bias) in enumerate(self.wide):
            gate, above = (x.double() @ up.t() + up_bias).chunk(2, -1)
            if self.gate == CLAMPED_GATE:
                gate, above = gate.clamp(max=LIMIT), above.clamp(-LIMIT, LIMIT) + 1
            inner = gate * (gate * (ALPHA if self.gate == CLAMPED_GATE else 1.0)).sigmoid() * above
            weight = (weights.double() * (experts == FIRST + i)).sum(1, keepdim=True)
            out += weight * (inner @ down.t() + down_bias)
        return out


def _choice(rows: int) -> tuple[Tensor, Tensor]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
    return experts, torch.rand(rows, TOP_K)


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize(
    ("form", "gate"), [("float", SILU_GATE), ("float", CLAMPED_GATE), ("int8", SILU_GATE), ("int4", CLAMPED_GATE)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_float64_products_and_a_row_does_not_depend_on_others(
    variant: str, form: str, dtype: torch.dtype, gate: int
) -> None:
    mixture = _Mixture(variant, form, dtype, gate)
    x = (torch.randn(100, HIDDEN) / 4).to(dtype)
    experts, weights = _choice(len(x))
    experts[0] = torch.tensor([0, 13, 1])  # all on other ranks
    whole, expected = mixture.forward(x, experts, weights), mixture.expected(x, experts, weights)
    error = (whole.double() - expected).abs().max() / expected.abs().max()
    # Rows and inner features are rounded to bfloat16, or to int8.
    assert error < (0.03 if form == "int8" or dtype == torch.bfloat16 else 1e-5)
    assert not whole[0].any()
    for lo, hi in [(1, 2), (7, 12), (40, 90)]:
        part = mixture.forward(x[lo:hi].contiguous(), experts[lo:hi].contiguous(), weights[lo:hi].contiguous())
        assert torch.equal(part, whole[lo:hi])


def test_more_rows_than_scratch_memory_takes_at_once() -> None:
    mixture = _Mixture("portable", "float", torch.float32, SILU_GATE)
    x = torch.randn(1500, HIDDEN) / 4
    experts, weights = _choice(len(x))
    whole = mixture.forward(x, experts, weights)
    assert torch.equal(whole[1400:], mixture.forward(x[1400:].contiguous(), experts[1400:], weights[1400:]))
    assert (whole.double() - mixture.expected(x, experts, weights)).abs().max() < 1e-3

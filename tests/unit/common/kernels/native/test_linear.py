"""Native linear layers against float64 products, in every variant, format and shape that matters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.native_variants import DISTINCT, EMULATED, VARIANTS, native
from torch import Tensor

from common.kernels.native.linear import NativeLinear, PackedWeight, pack_float, pack_fp4, pack_int4, pack_int8
from common.model.formats.mxfp4 import E2M1

SHAPES = [(2, 16), (40, 40), (64, 32), (96, 8), (160, 200), (1152, 896), (1640, 24)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 25, 48, 70, 97]
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Made:
    packed: Callable[[bool], PackedWeight]
    """By whether it is paired."""
    wide: Tensor
    """[out, in] float64, what the codes mean."""
    rounded: Callable[[Tensor, str], Tensor] = lambda x, variant: x.double()
    """What a variant's layer multiplies in place of x, float64."""


def make_float(out: int, inputs: int, dtype: torch.dtype) -> Made:
    weight = torch.randn(out, inputs).to(dtype)
    return Made(lambda is_paired: pack_float(weight, is_paired=is_paired), weight.double())


def make_int8(out: int, inputs: int, dtype: torch.dtype) -> Made:
    codes, scale = torch.randint(-127, 128, (out, inputs), dtype=torch.int8), torch.rand(out) + 0.1
    wide = codes.double() * scale[:, None].double()
    return Made(
        lambda is_paired: pack_int8(codes, scale, is_paired=is_paired), wide, lambda x, variant: rounded_rows(x)
    )


def make_int4(out: int, inputs: int, dtype: torch.dtype) -> Made:
    codes = torch.randint(0, 16, (out, inputs), dtype=torch.uint8)
    groups = inputs // math.gcd(inputs, 32)
    scale, zero = torch.rand(out, groups) + 0.1, torch.rand(out, groups) * 15
    wide = (codes.view(out, groups, -1).double() - zero[..., None].double()) * scale[..., None].double()
    return Made(
        lambda is_paired: pack_int4(codes, scale, zero, is_paired=is_paired),
        wide.view(out, inputs),
        lambda x, variant: rounded_groups(x, variant, inputs // groups),
    )


def make_fp4(out: int, inputs: int, dtype: torch.dtype) -> Made:
    codes = torch.randint(0, 16, (out, inputs), dtype=torch.uint8)
    groups = inputs // math.gcd(inputs, 32)
    scale = torch.ldexp(torch.ones(out, groups), torch.randint(-3, 3, (out, groups)))
    wide = E2M1[codes.int()].view(out, groups, -1).double() * scale[..., None].double()
    return Made(lambda is_paired: pack_fp4(codes, scale, is_paired=is_paired), wide.view(out, inputs))


MAKERS = {"float": make_float, "int8": make_int8, "int4": make_int4, "fp4": make_fp4}


def rounded_rows(x: Tensor, top: int = 127) -> Tensor:
    """`x` in whole steps of a scale, the largest number `top` steps: what int8 layers multiply in its place. float64."""
    scale = (x.float().abs().amax(-1, keepdim=True) / top).clamp_(min=1e-20)
    return (x.float() / scale).round().double() * scale.double()


def rounded_groups(x: Tensor, variant: str, group: int) -> Tensor:
    """What int4 layers multiply in place of `x`, float64."""
    if x.dtype == torch.float32 or variant not in ("avx2", "avx512", "amx", "amx_emulated"):
        return x.double()
    return rounded_rows(x.unflatten(1, (-1, group)), min(2**15 - 1, (2**31 - 1) // 15 // group)).flatten(1)


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("is_paired", [False, True])
def test_products_equal_float64_ones(variant: str, dtype: torch.dtype, name: str, is_paired: bool) -> None:
    torch.manual_seed(len(name))
    library = native(variant)
    odd = [(130, 257)] if name == "float" else []
    for out, inputs in SHAPES + odd:
        made, bias = MAKERS[name](out, inputs, dtype), torch.randn(out)
        layer = NativeLinear(library, made.packed(is_paired), bias)
        most = torch.randn(max(ROWS), inputs).to(dtype)
        results = made.rounded(most, variant) @ made.wide.t() + bias.double()
        for rows in ROWS[:: 2 if variant == EMULATED else 1]:
            x, expected = most[:rows], results[:rows]
            error = (layer.forward(x, torch.float32).double() - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, (out, inputs, rows)
            narrow = layer.forward(x)
            assert narrow.dtype == dtype
            assert (narrow.double() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_result_does_not_depend_on_the_other_rows_or_the_threads(
    variant: str, dtype: torch.dtype, name: str
) -> None:
    torch.manual_seed(1)
    made = MAKERS[name](1152, 896, dtype)
    x = torch.randn(200, 896).to(dtype)
    two, one = (NativeLinear(native(variant, threads), made.packed(False), None) for threads in (2, 1))
    whole = two.forward(x)
    assert torch.equal(one.forward(x), whole)
    for lo, hi in [(0, 1), (37, 38), (5, 7), (10, 13), (3, 7), (30, 36), (41, 48), (20, 33), (12, 60), (5, 125)]:
        assert torch.equal(two.forward(x[lo:hi]), whole[lo:hi])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("group", [8, 128, 14336])
def test_int4_loses_less_than_rows_rounded_to_bfloat16_in_groups_of_any_size(
    variant: str, rows: int, group: int
) -> None:
    torch.manual_seed(2)
    codes, scale = torch.randint(0, 16, (32, 14336), dtype=torch.uint8), torch.rand(32, 14336 // group) + 0.1
    codes[0], codes[1] = 15, 0
    zero = torch.randint(0, 16, scale.shape).float()
    wide = (codes.view(32, -1, group).double() - zero[..., None].double()) * scale[..., None].double()
    layer = NativeLinear(native(variant), pack_int4(codes, scale, zero), None)
    # Equal inputs of some size let all roundings of a sum go in one direction.
    levels = torch.tensor([[1e4], [1.0078125], [1.3515625], [1.7109375]])
    x = torch.randn(len(levels) + rows, 14336)
    x[: len(levels)] = levels
    x[-1, ::14] *= 1000  # as outliers in a model's hidden states
    x = x.bfloat16()
    expected, terms = x.double() @ wide.flatten(1).t(), x.double().abs() @ wide.flatten(1).abs().t()
    one_rounding = 2**-9 * (x.double().square() @ wide.flatten(1).square().t()).sqrt()  # of each input to bfloat16
    alone = torch.cat([layer.forward(row[None], torch.float32) for row in x])
    for found in (layer.forward(x, torch.float32), alone):
        assert ((found.double() - expected).abs() < one_rounding + 1e-6 * terms).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite_stay_so_and_leave_the_others_alone(
    variant: str, name: str, dtype: torch.dtype
) -> None:
    made = MAKERS[name](64, 64, dtype)
    layer = NativeLinear(native(variant), made.packed(False), None)
    x = torch.randn(4, 64).to(dtype)
    expected = layer.forward(x)
    x[1, 3], x[2, 5] = math.nan, math.inf
    found = layer.forward(x)
    assert not found[1].isfinite().any()
    assert not found[2].isfinite().all()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_may_be_parts_of_a_wider_tensor(variant: str) -> None:
    made = make_float(96, 64, torch.bfloat16)
    layer = NativeLinear(native(variant), made.packed(False), None)
    wide = torch.randn(5, 192).bfloat16()
    assert torch.equal(layer.forward(wide[:, 64:128]), layer.forward(wide[:, 64:128].contiguous()))
    assert torch.equal(layer.forward(wide[:, 0:128:2]), layer.forward(wide[:, 0:128:2].contiguous()))


@pytest.mark.parametrize("name", ["float", "int8"])
def test_emulated_tiles_give_what_matrix_units_give(name: str) -> None:
    torch.manual_seed(5)
    made = MAKERS[name](160, 968, torch.bfloat16)
    x = torch.randn(70, 968).bfloat16()
    found = [NativeLinear(native(variant), made.packed(False), None).forward(x) for variant in ("amx_emulated", "amx")]
    assert torch.equal(*found)

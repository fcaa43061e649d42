"""Weights in groups: their values, parts and stacks, and products by them."""

from __future__ import annotations

import pytest
import torch

from common.base.errors import ConfigError
from common.kernels.torch_kernels import TORCH
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.groupwise import (
    GroupLinear,
    GroupWeight,
    make_group_linear,
    quantize_int4,
    stack_groups,
)
from common.model.precision import Precision
from common.model.tensor_files import Part


def drawn(out: int, columns: int, group: int, bits: int = 4, seed: int = 0) -> GroupWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, columns), dtype=torch.uint8, generator=generator)
    scale, zero = (torch.rand(out, columns // group, generator=generator) for _ in range(2))
    return GroupWeight(codes, scale / 8, zero * 2**bits, bits)


def test_a_weight_is_its_scale_times_the_code_less_the_zero() -> None:
    weight = drawn(3, 16, 8)
    assert weight.group == 8
    wide = weight.dequantized()
    for row, column in ((0, 0), (1, 7), (2, 8), (2, 15)):
        at = row, column // 8
        expected = weight.scale[at] * (float(weight.codes[row, column]) - weight.zero[at])
        torch.testing.assert_close(wide[row, column], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@torch.inference_mode()
def test_a_product_is_that_of_the_dequantized_weights(bits: int, dtype: torch.dtype) -> None:
    weight = drawn(40, 96, 32, bits)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(5, 96, generator=generator).to(dtype), torch.randn(40, generator=generator).to(dtype)
    expected = x @ weight.dequantized(dtype).t() + bias
    target = LinearTarget(Precision(dtype, dtype, dtype), TORCH)
    for linear in (GroupLinear(weight, bias), make_group_linear(weight, bias, target)):
        found = linear.forward(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=1e-4 if dtype == torch.float32 else 0.5, rtol=1e-2)


def test_four_bit_codes_are_kept_two_in_a_byte() -> None:
    weight = drawn(6, 64, 16)
    linear = GroupLinear(weight, None)
    assert torch.equal(linear.weight.codes, weight.codes)
    assert linear._codes.numel() == weight.codes.numel() // 2


@pytest.mark.parametrize(
    ("part", "group"),
    [(None, 32), (Part(0, 3, 11), 32), (Part(1, 32, 96), 32), (Part(1, 48, 96), 16), (Part(1, 0, 72), 8)],
)
def test_a_part_has_its_own_codes_and_groups_split_at_its_ends(part: Part | None, group: int) -> None:
    whole = drawn(12, 96, 32)
    cut = whole.cut(StoredTensor("a.weight", (12, 96), part))
    expected = whole.dequantized() if part is None else whole.dequantized().narrow(part.dim, part.lo, part.hi - part.lo)
    assert torch.equal(cut.dequantized(), expected)
    assert cut.group == group


def test_a_part_that_ends_within_eight_inputs_is_refused_by_name() -> None:
    stored = StoredTensor("model.layers.0.mlp.down_proj.weight", (12, 96), Part(1, 0, 12))
    with pytest.raises(
        ConfigError,
        match=r"tensor model\.layers\.0\.mlp\.down_proj\.weight cannot be split over 8 tensor-parallel ranks",
    ) as caught:
        drawn(12, 96, 32).cut(stored)
    assert "\n" not in caught.value.message


def test_stacked_rows_keep_their_groups() -> None:
    first, second = drawn(4, 32, 16), drawn(8, 32, 16, seed=1)
    stacked = stack_groups([first, second])
    assert stacked is not None
    assert torch.equal(stacked.dequantized(), torch.cat([first.dequantized(), second.dequantized()]))
    assert stack_groups([first, drawn(4, 32, 8)]) is None
    assert stack_groups([first, drawn(4, 32, 16, bits=8)]) is None


def test_quantized_weights_err_less_than_rounding_over_the_whole_range() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = quantize_int4(weight, 64)
    assert int(found.codes.max()) <= 15
    groups = weight.view(64, 4, 64)
    lo, hi = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (hi - lo) / 15
    plain = (((groups - lo) / step).round() * step + lo).view(64, 256)
    error, plain_error = ((each - weight).norm() / weight.norm() for each in (found.dequantized(), plain))
    assert error < plain_error < 0.1


def test_groups_of_equal_weights_are_kept_as_they_are() -> None:
    weight = torch.full((2, 64), -0.25)
    weight[1] = 0
    torch.testing.assert_close(quantize_int4(weight, 64).dequantized(), weight, atol=1e-6, rtol=1e-3)

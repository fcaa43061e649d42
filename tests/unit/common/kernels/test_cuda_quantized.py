"""The order of 4 bit codes for a GPU's kernels. tests/gpu tests the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.kernels.cuda_quantized import Int4Weight, find_quantized_kernels


def dequantized(weight: Int4Weight) -> Tensor:
    """As a kernel does it, word by word."""
    words = weight.words.view(weight.num_out, -1, 4, 4).transpose(2, 3) if weight.is_tiled else weight.words
    words = words.reshape(weight.num_out, -1)
    codes = torch.stack([(words >> (index // 2 * 4 + index % 2 * 16)) & 15 for index in range(8)], 2).flatten(1)
    scale, shift = weight.factors.float().repeat_interleave(weight.group, 1).unbind(2)
    return (codes - 8) * scale + shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_in", "group", "is_tiled"),
    [(256, 32, True), (256, 64, True), (256, 128, True), (384, 384, True), (256, 16, False), (96, 32, False)],
)
def test_packed_weights_are_the_given_ones(num_in: int, group: int, is_tiled: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (5, num_in), generator=generator, dtype=torch.uint8)
    scale, zero = (torch.rand(5, num_in // group, generator=generator) for _ in range(2))
    zero = (zero * 15).round()
    expected = (codes - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    weight = Int4Weight.pack(codes, scale, zero, dtype)
    assert (weight.num_out, weight.num_in, weight.group) == (5, num_in, group)
    assert weight.is_tiled == is_tiled
    assert weight.words.numel() * 8 == codes.numel()
    torch.testing.assert_close(dequantized(weight), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.07)
    assert [weight.can_multiply(rows) for rows in (1, 64, 65)] == [is_tiled and dtype != torch.float32] * 2 + [False]


def test_a_cpu_has_no_such_kernels() -> None:
    assert find_quantized_kernels(torch.device("cpu")) is None

"""Products of int8 weights and int8 activations: exact integers, and within what 8 bits keep of the numbers."""

from __future__ import annotations

import pytest
import torch

from common.model.formats.int8 import CHUNK_WEIGHTS, Int8Linear, Int8Weight, quantize_int8, stack_int8
from common.model.tensor_files import Part


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns", "out"), [(1, 64, 48), (2, 7, 5), (17, 4864, 33), (70, 113, 129)])
@torch.inference_mode()
def test_a_product_is_that_of_the_rounded_numbers(rows: int, columns: int, out: int) -> None:
    """In float64 nothing more is rounded; 4,864 products of up to 127 * 127 exceed what float32 adds up exactly."""
    weight, bias, x = quantize_int8(numbers(out, columns)), numbers(out, seed=1), numbers(rows, columns, seed=2)
    scale = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scale).round().double() @ weight.codes.double().t()
    expected = sums * scale.double() * weight.scale.double() + bias.double()
    found = Int8Linear(weight, bias).forward(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_error_is_within_what_eight_bits_keep(dtype: torch.dtype) -> None:
    weight, x = numbers(96, 512), numbers(9, 512, seed=1).to(dtype)
    found = Int8Linear(quantize_int8(weight), None).forward(x)
    assert found.dtype == dtype
    expected = x.float() @ weight.t()
    assert (found.float() - expected).norm() / expected.norm() < 0.015


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    linear, x = Int8Linear(quantize_int8(numbers(40, 72)), None), numbers(6, 72, seed=1)
    x[3] *= 1e4
    assert torch.equal(linear.forward(x)[1], linear.forward(x[1:2])[0])


@torch.inference_mode()
def test_rows_of_zeros_give_zeros() -> None:
    weight = numbers(8, 16)
    weight[3] = 0
    linear = Int8Linear(quantize_int8(weight), torch.ones(8))
    assert torch.equal(linear.forward(torch.zeros(2, 16)), torch.ones(2, 8))
    assert float(linear.forward(numbers(1, 16))[0, 3]) == 1


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = numbers(24, 56).bfloat16()
    found = quantize_int8(weight)
    assert int(found.codes.abs().max()) == 127
    assert bool(((found.dequantized() - weight.float()).abs() <= found.scale[:, None] * 0.501).all())


def test_a_matrix_of_many_chunks_is_quantized_as_its_rows_are() -> None:
    weight = numbers(2 * (CHUNK_WEIGHTS // 2**14) + 5, 2**14).bfloat16()
    found, rows = quantize_int8(weight), [quantize_int8(row[None]) for row in weight]
    assert torch.equal(found.codes, torch.cat([row.codes for row in rows]))
    assert torch.equal(found.scale, torch.cat([row.scale for row in rows]))


def test_parts_and_stacks_keep_each_rows_scale() -> None:
    whole = quantize_int8(numbers(12, 20))
    assert torch.equal(whole.cut(Part(1, 5, 16)).dequantized(), whole.dequantized()[:, 5:16])
    again = stack_int8([whole.cut(Part(0, 0, 7)), whole.cut(Part(0, 7, 12))])
    assert isinstance(again, Int8Weight)
    assert torch.equal(again.dequantized(), whole.dequantized())

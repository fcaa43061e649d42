"""Linear layers on quantized weights on a GPU, by kernels of our own, against the layers made of PyTorch's operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.kernels.cuda_quantized import Int4Weight, QuantizedKernels, find_quantized_kernels
from common.kernels.float8 import E4M3, E4M3_MAX
from common.model.formats.float8 import CudaFp8Linear, Fp8Weight
from common.model.formats.groupwise import CudaInt4Linear, GroupWeight
from common.model.formats.int8 import CudaInt8Linear, Int8Linear, Int8Weight, quantize_int8

GPU = torch.device("cuda", 0)
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 300)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@pytest.fixture(scope="module")
def kernels() -> QuantizedKernels:
    found = find_quantized_kernels(GPU)
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(GPU, dtype)


def random_groups(num_out: int, num_in: int, group: int) -> GroupWeight:
    generator = torch.Generator(GPU).manual_seed(num_out)
    codes = torch.randint(0, 16, (num_out, num_in), generator=generator, device=GPU, dtype=torch.uint8)
    scale = torch.rand(num_out, num_in // group, generator=generator, device=GPU).add_(0.1).mul_(0.1)
    zero = torch.rand(num_out, num_in // group, generator=generator, device=GPU).mul_(15)
    return GroupWeight(codes, scale, zero, 4)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, steps: float = 4) -> None:
    """`steps`: of the dtype's rounding, of each result and of results of usual size."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    step = steps * ROUNDING[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=step, atol=step * float(expected.double().std()))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("num_out", "num_in", "group"),
    [
        *((16, 128, 32), (896, 896, 64), (40, 2048, 128), (7, 4864, 128), (64, 1280, 256), (4096, 4096, 4096)),
        *((24, 96, 8), (64, 320, 64), (33, 256, 16)),
    ],
)
def test_groups_are_multiplied(
    kernels: QuantizedKernels, num_out: int, num_in: int, group: int, dtype: torch.dtype
) -> None:
    """The last three are not in tiles: their weights are dequantized first."""
    weight, bias = random_groups(num_out, num_in, group), random(num_out)
    packed = Int4Weight.pack(weight.codes, weight.scale, weight.zero, dtype)
    wide = kernels.dequantize(packed)
    # Scales and shifts are rounded to the dtype, each of the size of a code's step at most eight times, and the weight.
    step = float(weight.scale.max())
    torch.testing.assert_close(wide.float(), weight.dequantized(), rtol=0, atol=(32 * ROUNDING[dtype] + 1e-5) * step)
    for own_bias in (None, bias):
        linear = CudaInt4Linear(weight, own_bias, kernels, dtype)
        for num_rows in ROWS:
            x = random(num_rows, num_in, dtype=dtype)
            exact = x.double() @ wide.double().t()
            exact = exact if own_bias is None else exact + own_bias.to(dtype).double()
            # Float32 sums of many products differ by more than the rounding of one.
            close(linear.forward(x), exact, dtype, steps=32 if dtype == torch.float32 else 4)


def test_rows_that_are_no_numbers_leave_the_others_alone(kernels: QuantizedKernels) -> None:
    for linear in (
        CudaInt4Linear(random_groups(64, 256, 64), None, kernels, torch.bfloat16),
        CudaInt8Linear(quantize_int8(random(64, 256)), None, kernels),
        CudaFp8Linear(Fp8Weight(random(64, 256).to(E4M3), random(64, 1).abs(), is_blocked=False), None, kernels),
    ):
        x = random(12, 256, dtype=torch.bfloat16)
        before = linear.forward(x)
        x[5, 100] = math.nan
        found = linear.forward(x)
        assert found[5].isnan().all()
        others = [row for row in range(12) if row != 5]
        assert torch.equal(found[others], before[others])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("num_rows", "num_in"), [(1, 256), (9, 896), (5, 100), (3, 14336)])
def test_rows_are_quantized_as_on_a_cpu(
    kernels: QuantizedKernels, num_rows: int, num_in: int, dtype: torch.dtype
) -> None:
    x = random(num_rows + 1, num_in, dtype=dtype)
    x[num_rows] = 0
    wide = x.cpu().float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.maximum(largest / torch.full_like(largest, 127), torch.full_like(largest, 1e-20))
    codes, found = kernels.quantize_int8(x, num_rows + 4, num_in + 8)
    assert torch.equal(found.cpu(), scale.flatten())
    assert torch.equal(codes.cpu()[: num_rows + 1, :num_in], (wide / scale).round().to(torch.int8))
    assert not codes[num_rows + 1 :].any()
    assert not codes[:, num_in:].any()
    scale = torch.maximum(largest / torch.full_like(largest, E4M3_MAX), torch.full_like(largest, 1e-12))
    codes, found = kernels.quantize_e4m3(x)
    assert torch.equal(found.cpu(), scale.flatten())
    assert torch.equal(codes.cpu().float(), (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float())
    if num_in % 128 == 0:
        codes, found = kernels.quantize_e4m3_blocks(x, num_rows + 3)
        assert not codes[num_rows + 1 :].float().any()
        pieces = wide.view(num_rows + 1, -1, 128)
        largest = pieces.abs().amax(2, keepdim=True)
        scale = torch.maximum(largest / torch.full_like(largest, E4M3_MAX), torch.full_like(largest, 1e-12))
        assert torch.equal(found.cpu()[: num_rows + 1], scale[..., 0])
        expected = (pieces / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float().view(wide.shape)
        assert torch.equal(codes.cpu()[: num_rows + 1].float(), expected)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 256), (1152, 896), (13, 100)])
def test_int8_layers_compute_what_their_reference_does(
    kernels: QuantizedKernels, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    weight, bias = quantize_int8(random(num_out, num_in)), random(num_out)
    on_cpu = Int8Weight(weight.codes.cpu(), weight.scale.cpu())
    for own_bias in (None, bias):
        ours = CudaInt8Linear(weight, own_bias, kernels)
        reference = Int8Linear(on_cpu, None if own_bias is None else own_bias.cpu())
        for num_rows in ROWS:
            x = random(num_rows, num_in, dtype=dtype)
            close(ours.forward(x).cpu(), reference.forward(x.cpu()), dtype)
            close(ours.forward(x, torch.float32).cpu(), reference.forward(x.cpu(), torch.float32), torch.float32)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize(("num_out", "num_in"), [(256, 384), (4096, 1024)])
def test_fp8_layers_compute_what_they_should(
    kernels: QuantizedKernels, num_out: int, num_in: int, is_blocked: bool
) -> None:
    """Matrix units add e4m3 products with 14 bits or so; the weights' own rounding is no error here."""
    scale = random(num_out // 128, num_in // 128) if is_blocked else random(num_out, 1)
    weight = Fp8Weight(random(num_out, num_in).to(E4M3), scale.abs() + 0.1, is_blocked)
    bias = random(num_out, dtype=torch.bfloat16)
    for own_bias in (None, bias):
        ours = CudaFp8Linear(weight, own_bias, kernels)
        for num_rows in (*ROWS, 256, 257):
            x = random(num_rows, num_in, dtype=torch.bfloat16)
            x[0] = 0
            if is_blocked:
                codes, scales = kernels.quantize_e4m3_blocks(x, num_rows)
                rounded = codes.double() * scales.double().repeat_interleave(128, 1)
            else:
                codes, scales = kernels.quantize_e4m3(x)
                rounded = codes.double() * scales.double()[:, None]
            exact = rounded @ weight.dequantized().double().t()
            exact = exact if own_bias is None else exact + own_bias.double()
            close(ours.forward(x), exact, torch.bfloat16)


def test_rows_may_begin_anywhere(kernels: QuantizedKernels) -> None:
    """Also where no vector of a kernel may."""
    for linear in (
        CudaInt4Linear(random_groups(64, 256, 64), None, kernels, torch.bfloat16),
        CudaInt8Linear(quantize_int8(random(64, 256)), None, kernels),
        CudaFp8Linear(Fp8Weight(random(64, 256).to(E4M3), random(64, 1).abs(), is_blocked=False), None, kernels),
    ):
        wide = random(3, 257, dtype=torch.bfloat16)
        for rows in (1, 3):
            assert torch.equal(linear.forward(wide[:rows, 1:]), linear.forward(wide[:rows, 1:].clone()))


def test_products_can_be_captured(kernels: QuantizedKernels) -> None:
    linears = (
        CudaInt4Linear(random_groups(64, 256, 64), None, kernels, torch.bfloat16),
        CudaInt8Linear(quantize_int8(random(64, 256)), None, kernels),
        CudaFp8Linear(Fp8Weight(random(64, 256).to(E4M3), random(64, 1).abs(), is_blocked=False), None, kernels),
    )
    x = random(3, 256, dtype=torch.bfloat16)
    expected = [linear.forward(x) for linear in linears]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = [linear.forward(x) for linear in linears]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))

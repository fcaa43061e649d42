"""Weights stored as floating-point numbers, and the layer that multiplies by them, packed once on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from common.base.errors import ConfigError
from common.kernels.base import Kernels
from common.kernels.float8 import E4M3
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, pack_float
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.precision import Precision, can_pack
from common.model.tensor_files import Part, TensorFiles

_PACK_ROWS_HINT = 16
"""Rows to pack for: oneDNN's format for 16 measured well from 1 to 512."""
_PACK_MIN_WEIGHTS = 2**17
"""For smaller matrices a oneDNN call's overhead (30-50 us) outweighs the gain of packing."""


def read_floating(tensors: TensorFiles, name: str, shape: tuple[int, ...] | None, part: Part | None = None) -> Tensor:
    """Read a tensor: `TensorFiles.read`. Raises: ConfigError also for numbers that need the scales of a format."""
    tensor = tensors.read(name, shape, part)
    if tensor.dtype == E4M3:
        raise ConfigError(
            f"{tensors.file_of(name)}: tensor {name} is FP8, but config.json has no quantization_config for it"
        )
    if not tensor.is_floating_point():
        raise ConfigError(
            f"{tensors.file_of(name)}: tensor {name} is {tensor.dtype}, which no supported weight format stores"
        )
    return tensor


class FloatFormat:
    """`LinearFormat` of all tensors that are in no other."""

    def __init__(self, tensors: TensorFiles) -> None:
        self._tensors = tensors

    def holds(self, name: str) -> bool:
        return True

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        tensor = read_floating(self._tensors, stored.name, stored.shape, stored.part)
        # A clone, because a tensor from safetensors may be a view of the mapped file.
        return tensor.to(dtype) if tensor.dtype != dtype else tensor.clone()

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> None:
        return None


class FloatLinear:
    """y = x W^T + b. Keeps one copy of W per dtype of `precision.packs`, on a CPU prepacked by oneDNN where it can."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        self._weights: dict[torch.dtype, tuple[Tensor, Tensor | None, bool]] = {}
        for dtype in precision.packs:
            pack = weight.device.type == "cpu" and weight.numel() >= _PACK_MIN_WEIGHTS and can_pack(dtype)
            own = weight.to(dtype)
            kept = torch.ops.mkldnn._reorder_linear_weight(own, _PACK_ROWS_HINT) if pack else own
            self._weights[dtype] = (kept, None if bias is None else bias.to(dtype), pack)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        weight, bias, packed = self._weights[x.dtype]
        if packed:
            y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        else:
            y = F.linear(x, weight, bias)
        return y if dtype is None else y.to(dtype)

    @property
    def is_groupable(self) -> bool:
        """Whether W is kept in bfloat16 alone, with rows and columns of whole 16 bytes."""
        if len(self._weights) > 1:
            return False
        [(weight, _, packed)] = self._weights.values()
        return not packed and weight.dtype == torch.bfloat16 and all(size % 8 == 0 for size in weight.shape)


def stack(linears: Sequence[FloatLinear]) -> tuple[Tensor, Tensor | None]:
    """Stack the weights, [N, out, in], and biases, [N, out], of layers of one dtype and size. The layers' own become views of them,
    so that there is one copy."""
    [dtype] = linears[0]._weights
    weights = torch.stack([each._weights[dtype][0] for each in linears])
    found = [bias for each in linears if (bias := each._weights[dtype][1]) is not None]
    biases = torch.stack(found) if found else None
    for number, each in enumerate(linears):
        each._weights[dtype] = (weights[number], None if biases is None else biases[number], False)
    return weights, biases


def float_linear(
    weight: Tensor, bias: Tensor | None, precision: Precision, kernels: Kernels, *, is_paired: bool = False
) -> FloatLinear | NativeLinear:
    """The layer that multiplies by floating-point weights ([out, in], bias [out]) by the library of `kernels`.

    `is_paired`: gate and up layer of a gated MLP, merged.
    """
    if isinstance(kernels, NativeKernels):
        return NativeLinear(kernels.native, pack_float(weight.to(precision.wide), is_paired=is_paired), bias)
    return FloatLinear(weight, bias, precision)

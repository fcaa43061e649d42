"""Reads int8 weights with a scale for each output or tensor, as compressed-tensors stores them ("int-quantized").

Used by a rank's main thread while it loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.int8 import Int8Weight, make_int8_linear, stack_int8
from common.model.formats.quantization import Int8Quantization
from common.model.tensor_files import TensorFiles


class Int8Format:
    """`LinearFormat` of matrices in int8; activations are quantized by `Int8Linear`'s rule, whatever the checkpoint says."""

    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: Int8Quantization) -> None:
        self._tensors = tensors
        self._device = device

    def holds(self, name: str) -> bool:
        return self._tensors.dtype(name) == "I8"

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        return self._weight(stored).dequantized().to(dtype)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear:
        return make_int8_linear(stack_int8([self._weight(stored) for stored in stacked]), bias, target)

    def _weight(self, stored: StoredTensor) -> Int8Weight:
        codes = self._tensors.read(stored.name, stored.shape, stored.part).to(self._device, copy=True)
        name = f"{stored.name}_scale"
        scale = self._tensors.read(name).to(self._device, torch.float32).flatten()
        if scale.numel() not in (1, stored.shape[0]):
            raise ConfigError(
                f"{self._tensors.file_of(name)}: tensor {name} has {scale.numel()} numbers, not one for the matrix or "
                f"each of its {stored.shape[0]} rows"
            )
        scale = scale.expand(stored.shape[0])
        part = stored.part
        return Int8Weight(codes, (scale if part is None or part.dim else scale[part.lo : part.hi]).contiguous())

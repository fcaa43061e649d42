"""Where weights come from: safetensors files, or a seed. Used by a rank's main thread while it loads.

A rank that holds a slice of a tensor asks for that `Part`; only its bytes are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.base.device import CPU
from common.base.errors import ConfigError
from common.kernels.float8 import E4M3
from common.model.files import read_header, weight_files
from common.model.formats.float8 import Fp8Weight, dequantise
from common.model.formats.quantization import Quantization

_DUMMY_STD = 0.02


@dataclass(frozen=True)
class Part:
    """The half-open range [lo, hi) of a tensor along `dim`."""

    dim: int
    lo: int
    hi: int


class WeightSource(Protocol):
    """Named tensors of a whole model."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """The tensor `name`, whose whole shape must be `shape`, or the part of it; contiguous and owned by the caller.

        Raises: ConfigError naming file and tensor if it is missing, unreadable or of another shape.
        """
        ...

    def read_fp8(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Fp8Weight | None:
        """As `read`, of a matrix that is stored in e4m3, as it is stored; None if it is not, or if its blocks are cut."""
        ...

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        """The one number in the first tensor of these names that is there."""
        ...


class CheckpointWeights:
    """The safetensors files of one directory, opened lazily; a tensor's bytes are read when asked for.

    Weights in e4m3 are widened on `device`, times their scales.
    """

    def __init__(self, path: Path, quantization: Quantization | None = None, device: torch.device = CPU) -> None:
        self._path = path
        self._quantization = quantization
        self._device = device
        self._file_of: dict[str, Path] = {}
        for file in weight_files(path):
            for name in read_header(file).spans:
                self._file_of[name] = file
        self._open: dict[Path, safe_open] = {}

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        tensor = self._stored(name, shape, part)
        if tensor.dtype == E4M3:
            scale, block = self._scale(name, shape)
            lo, dim = (0, 0) if part is None else (part.lo, part.dim)
            start = (0, lo) if dim else (lo, 0)
            return dequantise(tensor.to(self._device), scale, block, start).to(dtype)
        # A clone, because safetensors' tensor may be a view of the mapped file.
        return tensor.to(dtype) if tensor.dtype != dtype else tensor.clone()

    def read_fp8(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Fp8Weight | None:
        """As `read`, of a matrix that is stored in e4m3, as it is stored; None if it is not, or if its blocks are cut."""
        tensor = self._stored(name, shape, part)
        if tensor.dtype != E4M3:
            return None
        scale, block = self._scale(name, shape)
        values = tensor.to(self._device, copy=True)
        cut = slice(None) if part is None else slice(part.lo, part.hi)
        if scale.size(1) == 1:
            each_row = scale.expand(shape[0], 1) if len(scale) == 1 else scale
            own = each_row[cut] if part is not None and part.dim == 0 else each_row
            return Fp8Weight(values, own.contiguous(), is_blocked=False)
        if block != (128, 128) or (part is not None and (part.lo % 128 or part.hi % 128)):
            return None
        if part is not None:
            scale = scale.narrow(part.dim, part.lo // 128, (part.hi - part.lo) // 128)
        return Fp8Weight(values, scale.contiguous(), is_blocked=True)

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        """The one number in the first tensor of these names that is there."""
        name = next((name for name in names if name in self._file_of), None)
        if name is None:
            return default
        value = self._slice(name, None)
        if value.numel() != 1:
            raise ConfigError(f"{self._file_of[name]}: tensor {name} has {value.numel()} numbers instead of one")
        return float(value.float())

    def _stored(self, name: str, shape: tuple[int, ...], part: Part | None) -> Tensor:
        """The tensor or the part of it as the file has it."""
        tensor = self._slice(name, shape, part)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{self._file_of[name]}: tensor {name} is {tensor.dtype}; of quantized weights only FP8 is supported"
            )
        return tensor

    def _slice(self, name: str, shape: tuple[int, ...] | None, part: Part | None = None) -> Tensor:
        """`shape` None takes the tensor of whatever shape."""
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._path}: no safetensors file holds the tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            stored = self._open[file].get_slice(name)
            found = tuple(stored.get_shape())
            if shape is not None and found != shape:
                raise ConfigError(f"{file}: tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
            index = [slice(None)] * len(found)
            if part is not None:
                index[part.dim] = slice(part.lo, part.hi)
            return stored[tuple(index)] if index else self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error

    def _scale(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, int]]:
        """The scales of an e4m3 matrix, [rows, columns] of blocks, float32 on the device, and a block's size."""
        file = self._file_of[name]
        if self._quantization is None:
            raise ConfigError(f"{file}: tensor {name} is FP8, but config.json has no quantization_config")
        names = [f"{name}_scale", f"{name}_scale_inv"]
        found = next((scale for scale in names if scale in self._file_of), None)
        if found is None or len(shape) != 2:
            raise ConfigError(f"{file}: tensor {name} is FP8, and no safetensors file holds its scale {names[0]}")
        scale = self._slice(found, None).to(self._device, torch.float32)
        rows, columns = shape
        if scale.numel() == 1:
            return scale.reshape(1, 1), shape
        if scale.numel() == rows and scale.size(0) == rows:
            return scale.reshape(rows, 1), (1, columns)
        block = self._quantization.block
        if block is None or tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
            raise ConfigError(
                f"{file}: tensor {found} has shape {list(scale.shape)}, which fits neither the matrix {list(shape)}, "
                f"its rows nor its blocks of {block}"
            )
        return scale, block


class DummyWeights:
    """Random weights from a seed: equal in every process on one kind of device, for any order of reads and any part.

    They are drawn on `device`, a card being a hundred times faster at it. Matrices are normal with deviation 0.02, as
    Hugging Face initialises them, norm weights one, biases zero.
    """

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self._seed = seed
        self._device = device

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        if name.endswith("bias"):
            tensor = torch.zeros(shape, device=self._device)
        elif len(shape) == 1:
            tensor = torch.ones(shape, device=self._device)
        else:
            digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
            tensor = torch.empty(shape, device=self._device).normal_(0.0, _DUMMY_STD, generator=generator)
        if part is not None:
            tensor = tensor.narrow(part.dim, part.lo, part.hi - part.lo).contiguous()
        return tensor.to(dtype)

    def read_fp8(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Fp8Weight | None:
        """None: what is drawn is not FP8."""
        return None

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        """The default: no scales are drawn."""
        return default

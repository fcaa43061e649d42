"""Where weights come from: safetensors files, or a seed. Used by a rank's main thread while it loads.

A rank that holds a slice of a tensor asks for that `Part`; only its bytes are read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.device import CPU
from common.errors import ConfigError
from common.model.files import read_header, weight_files

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


class CheckpointWeights:
    """The safetensors files of one directory, opened lazily; a tensor's bytes are read when asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of: dict[str, Path] = {}
        for file in weight_files(path):
            for name in read_header(file).spans:
                self._file_of[name] = file
        self._open: dict[Path, safe_open] = {}

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._path}: no safetensors file holds the tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            stored = self._open[file].get_slice(name)
            found = tuple(stored.get_shape())
            if found != shape:
                raise ConfigError(f"{file}: tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
            index = [slice(None)] * len(shape)
            if part is not None:
                index[part.dim] = slice(part.lo, part.hi)
            tensor = stored[tuple(index)]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error
        if not tensor.is_floating_point():
            raise ConfigError(f"{file}: tensor {name} is {tensor.dtype}; quantized weights are not supported")
        # A clone, because safetensors' tensor may be a view of the mapped file.
        return tensor.to(dtype) if tensor.dtype != dtype else tensor.clone()


class DummyWeights:
    """Random weights from a seed: equal in every process on one kind of device, for any order of reads and any part.

    They are drawn on `device`, a card being a hundred times faster at it. Matrices are normal with deviation 0.02, as Hugging Face initialises them, norm weights one, biases zero.
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

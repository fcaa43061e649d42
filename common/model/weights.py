"""Where weights come from: a checkpoint's files, or a seed. Used by a rank's main thread while it loads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.base.device import CPU
from common.base.errors import ConfigError
from common.model.formats.base import Linear, LinearFormat, LinearTarget, StoredTensor
from common.model.formats.floating import FloatFormat
from common.model.formats.mxfp4 import Mxfp4Format
from common.model.formats.quantization import Quantization
from common.model.formats.registry import FORMATS
from common.model.tensor_files import Beginnings, Part, TensorFiles

_DUMMY_STD = 0.02


class WeightSource(Protocol):
    """Named tensors of a whole model. The methods other than `read` have defaults, for a source that stores nothing."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        return False

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """The tensor `name`, whose whole shape must be `shape`, or the part of it; contiguous and owned by the caller.

        Raises: ConfigError naming file and tensor if it is missing, unreadable or of another shape.
        """
        ...

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part) -> Tensor | None:
        """The tensor as a contiguous view of the mapped file, which must not be written; None if it cannot be one."""
        return None

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """A layer on the weights in their stored format: `LinearFormat.linear`."""
        return None

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        """The single value of the first of these tensors that exists."""
        return default

    def tied(self, embedding: str, lm_head: str) -> str | None:
        """The name of the tensor that is both, where config.json says that they are tied. As in transformers, the one that is
        stored; None: both are, and differ."""
        return embedding


class CheckpointWeights(WeightSource):
    """The weight files of one directory, each tensor in the format that holds it."""

    def __init__(
        self,
        path: Path,
        quantization: Quantization | None = None,
        device: torch.device = CPU,
        other_beginnings: Beginnings = (),
    ) -> None:
        """`other_beginnings`: see `TensorFiles`."""
        self._tensors = TensorFiles(path, other_beginnings)
        self._formats: list[LinearFormat] = (
            [] if quantization is None else [FORMATS[type(quantization)](self._tensors, device, quantization)]
        )
        self._formats.append(FloatFormat(self._tensors))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        return self._format_of(name).read(StoredTensor(name, shape, part), dtype)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part) -> Tensor | None:
        """None for what is stored in another dtype."""
        if not isinstance(self._format_of(name), FloatFormat):
            return None
        stored = self._tensors.view(name, shape, part)
        return stored if stored.dtype == dtype and stored.is_contiguous() else None

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """None also if the tensors are of several formats, or experts in a format that does not know stacked tensors."""
        formats = [self._format_of(stored.name) for stored in stacked]
        if stacked[0].place is not None and not isinstance(formats[0], Mxfp4Format):
            return None
        return formats[0].linear(stacked, bias, target) if all(each is formats[0] for each in formats) else None

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        name = next((name for name in names if name in self._tensors), None)
        if name is None:
            return default
        value = self._tensors.read(name)
        if value.numel() != 1:
            file = self._tensors.file_of(name)
            raise ConfigError(f"{file}: tensor {name} has {value.numel()} numbers instead of one")
        return float(value.float())

    def tied(self, embedding: str, lm_head: str) -> str | None:
        return self._tensors.tied(embedding, lm_head)

    def _format_of(self, name: str) -> LinearFormat:
        return next(each for each in self._formats if each.holds(name))


class DummyWeights(WeightSource):
    """Random weights from a seed: equal in every process on one kind of device, for any order of reads and any part.

    They are drawn on `device`: a GPU draws a hundred times faster. Matrices are normal with deviation 0.02, as
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

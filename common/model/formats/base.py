"""The interface of a weight format of linear layers: it reads a rank's part and makes a layer that multiplies by it.

The contract's test: tests/unit/common/model/formats/test_registry.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.kernels.base import Kernels
from common.model.precision import Precision
from common.model.tensor_files import Part


@dataclass(frozen=True)
class ExpertPlace:
    """Where one expert's gate, up or down layer lies in a stacked tensor, [experts, outputs, inputs]."""

    experts: int
    expert: int
    outputs: int
    rows: range
    """Its outputs among those of the tensor."""

    @property
    def part(self) -> Part:
        """The expert's part of the tensor."""
        return Part(0, self.expert, self.expert + 1)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, or this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor; a linear layer's weight is [out, in]."""
    part: Part | None = None
    place: ExpertPlace | None = None
    """Where the matrix lies if `name` is that of a stacked tensor."""

    @property
    def splits_inputs(self) -> bool:
        """Whether other ranks hold other inputs of this linear layer's weight."""
        return self.part is not None and self.part.dim == 1 and self.part.hi - self.part.lo < self.shape[1]


@dataclass(frozen=True)
class LinearTarget:
    """What a layer is made for."""

    precision: Precision
    """Activations are of a dtype in its `packs`."""
    kernels: Kernels
    is_paired: bool = False
    """Whether it is the gate and up layer of a gated MLP, merged."""


class Linear(Protocol):
    """y = x W^T + b on one rank's part of W. Runs on a rank's engine thread, under inference mode."""

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x: [T, in], of the dtype that `Precision.for_rows` gives for T. Returns a fresh [T, out] of `dtype`, by default
        the same."""
        ...


class LinearFormat(Protocol):
    """One way of storing weights, in one checkpoint, for layers on one device. Used while a rank loads."""

    def holds(self, name: str) -> bool:
        """Whether the tensor `name` is stored in this format; formats are chosen tensor by tensor."""
        ...

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """The tensor, or the part of it, as floating-point numbers; contiguous and owned by the caller.

        Raises: ConfigError naming file and tensor.
        """
        ...

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """One layer that multiplies by these weights, stacked, in their stored format.

        None if that is impossible or not faster: then they are read, and multiplied as floating-point numbers.
        bias: [out], of `target.precision.weight`.
        """
        ...

"""Experts whose weights a checkpoint stores in tensors of all experts. Used by a rank's main thread while it loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.model.build import Build
from common.model.description import MixtureDescription
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.mxfp4 import BLOCKS
from common.model.tensor_files import Part
from common.model.weights import WeightSource


@dataclass(frozen=True)
class _Place:
    """Where one expert's gate, up or down layer lies."""

    tensor: str
    experts: int
    expert: int
    rows: slice
    """Its outputs among those of the tensor."""
    outputs: int
    """Of the tensor."""


class _StackedExperts:
    """`WeightSource` that has modules for each expert, of one that has tensors of all experts."""

    def __init__(self, weights: WeightSource, prefix: str, mixture: MixtureDescription, hidden: int) -> None:
        self._weights = weights
        self._is_transposed = mixture.expert_names.is_transposed
        self._places: dict[str, _Place] = {}
        names, inner, experts = mixture.expert_names, mixture.inner_size, mixture.router.num_experts
        gate = up = slice(0, inner)
        merged = inner
        if names.stacked_gate == names.stacked_up:
            merged = 2 * inner
            gate, up = slice(0, inner), slice(inner, None)
            if names.is_interleaved:
                gate, up = slice(0, None, 2), slice(1, None, 2)
        for expert in range(experts):
            for module, tensor, rows, outputs in (
                (names.gate, names.stacked_gate, gate, merged),
                (names.up, names.stacked_up, up, merged),
                (names.down, names.stacked_down, slice(0, hidden), hidden),
            ):
                place = _Place(prefix + tensor, experts, expert, rows, outputs)
                self._places[prefix + module.format(expert=expert)] = place

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        module, _, kind = name.rpartition(".")
        place = self._places.get(module)
        if place is None:
            return self._weights.read(name, shape, dtype, part)
        own = Part(0, place.expert, place.expert + 1)
        if kind == "bias":
            whole = self._weights.read(f"{place.tensor}_bias", (place.experts, place.outputs), dtype, own)[0]
        else:
            sides = (shape[1], place.outputs) if self._is_transposed else (place.outputs, shape[1])
            whole = self._weights.read(place.tensor, (place.experts, *sides), dtype, own)[0]
            whole = whole.t() if self._is_transposed else whole
        rows = whole[place.rows]
        return (rows if part is None else rows.narrow(part.dim, part.lo, part.hi - part.lo)).contiguous()

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part) -> Tensor | None:
        """None for experts."""
        return None if name.rpartition(".")[0] in self._places else self._weights.view(name, shape, dtype, part)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """None: experts are read, and multiplied as floating-point numbers."""
        return None

    def read_scalar(self, names: Sequence[str], default: float) -> float:
        return self._weights.read_scalar(names, default)

    def tied(self, embedding: str, lm_head: str) -> str | None:
        return self._weights.tied(embedding, lm_head)

    def __contains__(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._places or name in self._weights


def unstacked(build: Build, prefix: str, mixture: MixtureDescription) -> Build:
    """`build`, whose weights have modules for each expert, however the checkpoint stores them. `prefix`: the layer's name
    and a dot."""
    stacked = prefix + mixture.expert_names.stacked_down
    if stacked + BLOCKS in build.weights:  # in which inputs are the last dimension
        mixture = replace(mixture, expert_names=replace(mixture.expert_names, is_transposed=False))
    elif stacked not in build.weights:
        return build
    return replace(build, weights=_StackedExperts(build.weights, prefix, mixture, build.config.hidden_size))

"""Experts whose weights a checkpoint stores in tensors of all experts. Used by a rank's main thread while it loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.model.build import Build
from common.model.description import MixtureDescription
from common.model.formats.base import ExpertPlace, Linear, LinearTarget, StoredTensor
from common.model.formats.mxfp4 import BLOCKS
from common.model.tensor_files import Part
from common.model.weights import WeightSource


class _StackedExperts(WeightSource):
    """Weights of each expert as a module, from a source that has tensors of all experts."""

    def __init__(self, weights: WeightSource, prefix: str, mixture: MixtureDescription, hidden: int) -> None:
        self._weights = weights
        self._is_transposed = mixture.expert_names.is_transposed
        self._places: dict[str, tuple[str, ExpertPlace]] = {}
        names, inner, experts = mixture.expert_names, mixture.inner_size, mixture.router.num_experts
        gate = up = range(inner)
        merged = inner
        if names.stacked_gate == names.stacked_up:
            merged = 2 * inner
            gate, up = range(inner), range(inner, merged)
            if names.is_interleaved:
                gate, up = range(0, merged, 2), range(1, merged, 2)
        for expert in range(experts):
            for module, tensor, rows, outputs in (
                (names.gate, names.stacked_gate, gate, merged),
                (names.up, names.stacked_up, up, merged),
                (names.down, names.stacked_down, range(hidden), hidden),
            ):
                place = ExpertPlace(experts, expert, outputs, rows)
                self._places[prefix + module.format(expert=expert)] = prefix + tensor, place

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        module, _, kind = name.rpartition(".")
        tensor, place = self._places[module]
        if kind == "bias":
            biases = f"{tensor.removesuffix('.weight')}.bias" if tensor.endswith(".weight") else f"{tensor}_bias"
            whole = self._weights.read(biases, (place.experts, place.outputs), dtype, place.part)[0]
        else:
            sides = (shape[1], place.outputs) if self._is_transposed else (place.outputs, shape[1])
            whole = self._weights.read(tensor, (place.experts, *sides), dtype, place.part)[0]
            whole = whole.t() if self._is_transposed else whole
        rows = whole[place.rows.start : place.rows.stop : place.rows.step]
        return (rows if part is None else rows.narrow(part.dim, part.lo, part.hi - part.lo)).contiguous()

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """A layer of one expert, which lies whole on this rank, if the tensors' own format can multiply."""
        found = [self._places[stored.name.removesuffix(".weight")] for stored in stacked]
        own = [
            replace(stored, name=tensor, place=place) for stored, (tensor, place) in zip(stacked, found, strict=True)
        ]
        return self._weights.linear(own, bias, target)


def unstacked(build: Build, prefix: str, mixture: MixtureDescription) -> Build:
    """`build` for the experts of the layer whose name and a dot are `prefix`: its weights have modules for each expert, however
    the checkpoint stores them."""
    names = mixture.expert_names
    is_packed = prefix + names.stacked_down + BLOCKS in build.weights
    if not is_packed and prefix + names.stacked_down not in build.weights:
        return build
    if is_packed:  # inputs are the last dimension
        mixture = replace(mixture, expert_names=replace(names, is_transposed=False))
    source = _StackedExperts(build.weights, prefix, mixture, build.config.hidden_size)
    return replace(build, weights=source)

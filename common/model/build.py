"""What building the parts of one rank's model needs, and reading exactly this rank's share of each weight.

Used by a rank's main thread while it loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.device import CPU
from common.kernels.base import Kernels
from common.kernels.torch_kernels import TORCH
from common.model.config import ModelConfig
from common.model.linear import Linear
from common.model.precision import Precision
from common.model.weights import Part, WeightSource
from common.parallel.mesh import SOLO, Mesh
from common.parallel.split import HeadRange, even_range, head_range, vocab_range, vocab_rows


@dataclass(frozen=True)
class Share:
    """This rank's features [lo, hi) of `size`."""

    size: int
    lo: int
    hi: int

    @property
    def count(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Build:
    """Shapes, where weights come from, in which dtypes and where to keep them, and which part of the model is this rank's.

    Every weight goes to `device` as soon as it is read: host memory holds one tensor at a time.
    """

    config: ModelConfig
    weights: WeightSource
    precision: Precision
    mesh: Mesh = SOLO
    pp_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty means one stage."""
    device: torch.device = CPU
    kernels: Kernels = TORCH

    @property
    def heads(self) -> HeadRange:
        return head_range(self.config, self.mesh.place.tp_rank, self.mesh.place.tp_size)

    @property
    def inner(self) -> Share:
        """This rank's features of the MLP's inner layer."""
        size = self.config.intermediate_size
        return Share(size, *even_range(size, self.mesh.place.tp_size, self.mesh.place.tp_rank))

    @property
    def layers(self) -> range:
        """The model's layers that are this rank's."""
        pp_layers = self.pp_layers or (self.config.num_layers,)
        first = sum(pp_layers[: self.mesh.place.pp_rank])
        return range(first, first + pp_layers[self.mesh.place.pp_rank])

    def read(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        return self.weights.read(name, shape, self.precision.weight, part).to(self.device)

    def column_linear(self, names: list[str], shares: list[Share], in_features: int, *, bias: bool) -> Linear:
        """This rank's output features of several named layers, one after the other, as one layer."""
        parts = list(zip(names, shares, strict=True))
        rows = sum(share.count for share in shares)
        weight = torch.empty(rows, in_features, dtype=self.precision.weight, device=self.device)
        biases = torch.empty(rows, dtype=self.precision.weight, device=self.device) if bias else None
        at = 0
        for name, share in parts:
            part, place = Part(0, share.lo, share.hi), slice(at, at + share.count)
            weight[place] = self.read(f"{name}.weight", share.size, in_features, part=part)
            if biases is not None:
                biases[place] = self.read(f"{name}.bias", share.size, part=part)
            at += share.count
        return Linear(weight, biases, self.precision)

    def row_linear(self, name: str, share: Share, out_features: int, *, bias: bool) -> Linear:
        """A layer over this rank's input features; the sum of its outputs over the stage's ranks is the whole layer's."""
        part = Part(1, share.lo, share.hi)
        weight = self.read(f"{name}.weight", out_features, share.size, part=part)
        # On one rank only, because the outputs are summed.
        has_bias = bias and self.mesh.place.tp_rank == 0
        return Linear(weight, self.read(f"{name}.bias", out_features) if has_bias else None, self.precision)

    def vocabulary(self, name: str) -> Tensor:
        """This rank's rows of a [vocab, hidden] matrix, padded with zeros to as many as every rank has."""
        config, place = self.config, self.mesh.place
        lo, hi = vocab_range(config.vocab_size, place.tp_size, place.tp_rank)
        own = self.read(name, config.vocab_size, config.hidden_size, part=Part(0, lo, hi))
        rows = vocab_rows(config.vocab_size, place.tp_size)
        if hi - lo == rows:
            return own
        padded = own.new_zeros(rows, config.hidden_size)
        padded[: hi - lo] = own
        return padded

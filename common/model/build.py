"""What building the parts of one rank's model needs, and reading exactly this rank's share of each weight.

Used by a rank's main thread while it loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.base.device import CPU
from common.kernels.base import Kernels
from common.kernels.torch_kernels import TORCH
from common.model.config import ModelConfig
from common.model.formats.float8 import Fp8Linear, Fp8Weight, can_multiply, join
from common.model.formats.linear import Linear
from common.model.precision import Precision
from common.model.sharding import HeadRange, even_range, head_range, vocab_range, vocab_rows
from common.model.weights import Part, WeightSource
from common.parallel.mesh import SOLO, Mesh

AnyLinear = Linear | Fp8Linear


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
    keeps_fp8: bool = False
    """Whether weights that are stored in e4m3 stay so and are multiplied so; else they are widened."""

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

    def column_linear(self, names: list[str], shares: list[Share], in_features: int, *, bias: bool) -> AnyLinear:
        """This rank's output features of several named layers, one after the other, as one layer."""
        parts = [(name, share, Part(0, share.lo, share.hi)) for name, share in zip(names, shares, strict=True)]
        biases = [self.read(f"{name}.bias", share.size, part=part) for name, share, part in parts if bias]
        whole_bias = torch.cat(biases) if bias else None
        stored = [(f"{name}.weight", (share.size, in_features), part) for name, share, part in parts]
        fp8 = self._read_fp8(stored)
        if fp8 is not None:
            return Fp8Linear(fp8, whole_bias)
        rows = sum(share.count for share in shares)
        weight = torch.empty(rows, in_features, dtype=self.precision.weight, device=self.device)
        at = 0
        for name, shape, part in stored:
            weight[at : at + part.hi - part.lo] = self.read(name, *shape, part=part)
            at += part.hi - part.lo
        return Linear(weight, whole_bias, self.precision)

    def row_linear(self, name: str, share: Share, out_features: int, *, bias: bool) -> AnyLinear:
        """A layer over this rank's input features; the sum of its outputs over the stage's ranks is the whole layer's."""
        part = Part(1, share.lo, share.hi)
        # On one rank only, because the outputs are summed.
        has_bias = bias and self.mesh.place.tp_rank == 0
        own_bias = self.read(f"{name}.bias", out_features) if has_bias else None
        fp8 = self._read_fp8([(f"{name}.weight", (out_features, share.size), part)])
        if fp8 is not None:
            return Fp8Linear(fp8, own_bias)
        return Linear(self.read(f"{name}.weight", out_features, share.size, part=part), own_bias, self.precision)

    def _read_fp8(self, stored: list[tuple[str, tuple[int, int], Part]]) -> Fp8Weight | None:
        """These parts of matrices one below the other, as they are stored; None if they shall be read and widened."""
        if not self.keeps_fp8:
            return None
        found: list[Fp8Weight] = []
        for name, shape, part in stored:
            weight = self.weights.read_fp8(name, shape, part)
            if weight is None or not can_multiply(self.device, blocked=weight.is_blocked):
                return None
            found.append(weight)
        return join(found)

    def kv_scales(self, attention: str) -> tuple[float, float]:
        """Those of K and of V that the checkpoint gives one layer's attention for an FP8 cache; 1 where it gives none."""
        if self.config.quantization is None:
            return 1.0, 1.0
        k, v = (
            self.weights.read_scalar(
                [f"{attention}.{side}_scale", f"{attention}.{side}_proj.{side}_scale", f"{attention}.kv_scale"], 1.0
            )
            for side in "kv"
        )
        return k, v

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

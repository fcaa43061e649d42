"""One layer of a decoder-only model, from its description. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from common.attention.base import AttentionBackend
from common.kernels.base import Rotation
from common.model.attention import make_attention
from common.model.build import Build
from common.model.mlp import make_mlp
from common.model.norms import NoNorm, Norm, make_norm

_Output = Callable[[Tensor], Tensor]
"""The last part of attention or of the MLP: returns a fresh tensor, to be added to hidden states."""


class ForwardContext(NamedTuple):
    """What all layers of one step share."""

    rotations: Sequence[Rotation]
    """One for each different rotary embedding among this rank's layers."""
    backend: AttentionBackend
    on_layer: Callable[[int], None] | None = None
    """Called with a layer's index as soon as its KV is final."""


class DecoderLayer:
    """Attention and MLP, each added to its input, with norms where `LayerDescription.norm_at` says."""

    def __init__(self, build: Build, number: int, index: int, rotation: int = 0) -> None:
        """`number` counts from the model's first layer, `index` from this rank's. `rotation`: which of
        `ForwardContext.rotations` is the layer's."""
        layer, names = build.config.layers[number], build.names
        whole, build = build, build.for_own_rows
        prefix = f"{names.layer.format(number=number)}."
        self.description = layer
        self.index = index
        self.rotation = rotation
        self.attention = make_attention(build, prefix, layer.attention)
        self.mlp = make_mlp(whole, prefix, layer.mlp)
        self._project: _Output = self.attention.project
        self._mlp_forward: _Output = self.mlp.forward
        self.input_norm: Norm = NoNorm()
        self.mlp_norm: Norm = NoNorm()
        if layer.norm_at in ("input", "both"):
            self.input_norm = make_norm(build, prefix + names.input_norm, layer.norm)
            self.mlp_norm = make_norm(build, prefix + names.mlp_norm, layer.norm)
        if layer.norm_at in ("output", "both"):
            self._project = _normed(self._project, make_norm(build, prefix + names.attention_output_norm, layer.norm))
            self._mlp_forward = _normed(self._mlp_forward, make_norm(build, prefix + names.mlp_output_norm, layer.norm))
        if layer.residual_multiplier != 1.0:
            self._project = _multiplied(self._project, layer.residual_multiplier)
            self._mlp_forward = _multiplied(self._mlp_forward, layer.residual_multiplier)
        self.kv_scales = build.kv_scales(prefix + names.attention, layer.attention.planes)
        """KV scale of each plane, for an FP8 cache."""

    def forward(self, x: Tensor, delta: Tensor | None, context: ForwardContext) -> Tensor:
        """x: [T, hidden], changed in place. `delta` is still to be added to it, so that an addition and the norm after
        it can be one kernel. Returns the next `delta`."""
        normed = self.input_norm.forward(x, delta)
        attended = self.attention.attend(normed, self.index, context.rotations[self.rotation], context.backend)
        if context.on_layer is not None:
            context.on_layer(self.index)
        return self._mlp_forward(self.mlp_norm.forward(x, self._project(attended)))


def _normed(output: _Output, norm: Norm) -> _Output:
    return lambda x: norm.forward(output(x))


def _multiplied(output: _Output, factor: float) -> _Output:
    return lambda x: output(x).mul_(factor)

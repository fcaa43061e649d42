"""One layer of a decoder-only model, from its description. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.attention.base import AttentionBackend
from common.kernels.base import Rotation
from common.model.build import Build
from common.model.layers import MLPS, Attention, implementation, make_norm


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: Build, number: int, index: int) -> None:
        """`number` counts from the model's first layer, `index` from this rank's."""
        layer, names = build.config.layers[number], build.names
        prefix = f"{names.layer.format(number=number)}."
        self.index = index
        self.attention = Attention(build, prefix, layer.attention)
        self.mlp = implementation("MLP", layer.mlp.kind, MLPS)(build, prefix, layer.mlp)
        self.input_norm, self.mlp_norm = (
            make_norm(build, prefix + name, layer.norm) for name in (names.input_norm, names.mlp_norm)
        )
        self.kv_scales = build.kv_scales(prefix + names.attention)
        """(K, V), for an FP8 cache."""

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rotation,
        backend: AttentionBackend,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """x: [T, hidden], changed in place. `delta` is what is still to be added to it, so that an addition and the
        norm after it can be one kernel. Returns what is to be added next."""
        attended = self.attention.attend(self.input_norm.forward(x, delta), self.index, rope, backend)
        if on_layer is not None:
            on_layer(self.index)
        return self.mlp.forward(self.mlp_norm.forward(x, self.attention.project(attended)))

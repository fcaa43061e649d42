"""The MLPs of layers. They run on a rank's engine thread, under inference mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.model.activations import activate_and_mul, activation
from common.model.build import Build
from common.model.description import MixtureDescription, MlpDescription, implementation
from common.model.mixture.exchange import spread_experts
from common.model.mixture.experts import NativeMixture, make_experts, native_mixture
from common.model.mixture.routing import route


class DenseMlp:
    """down(activation(gate(x)) * up(x)), gate and up merged; of the kind "plain", down(activation(up(x)))."""

    def __init__(self, build: Build, prefix: str, mlp: MlpDescription) -> None:
        hidden, names, inner, is_gated = build.config.hidden_size, build.names, build.inner(mlp), mlp.kind == "gated"
        merged = [prefix + name for name in ((names.gate, names.up) if is_gated else (names.up,))]
        self.up = build.column_linear(merged, [inner] * len(merged), hidden, bias=mlp.bias, is_paired=is_gated)
        """The up projection; in a gated MLP merged with the gate, which comes first."""
        self.down = build.row_linear(prefix + names.down, inner, hidden, bias=mlp.bias)
        self._activate = activate_and_mul(mlp.activation, build.kernels) if is_gated else activation(mlp.activation)
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], fresh: this rank's inner features, then an all-reduce."""
        return self._mesh.all_reduce(self.own_part(x))

    def own_part(self, x: Tensor) -> Tensor:
        """[T, hidden], fresh: what this rank's inner features give."""
        return self.down.forward(self._activate(self.up.forward(x)))


class MixtureMlp:
    """A few experts for each token, chosen by a router, and experts that all tokens share.

    Each rank holds a range of the experts, whole (`common.model.mixture.exchange`), and its share of the inner features of the
    shared ones, or with data-parallel attention all of them.
    """

    def __init__(self, build: Build, prefix: str, mixture: MixtureDescription) -> None:
        names, router = mixture.expert_names, mixture.router
        self._router = router
        whole, build = build, build.for_own_rows
        self._logits = build.router_linear(prefix + names.router, router.num_experts, bias=router.has_bias)
        self._selection_bias: Tensor | None = None
        if router.has_selection_bias:
            bias = build.weights.read(prefix + names.selection_bias, (router.num_experts,), torch.float32)
            self._selection_bias = bias.to(build.device)
        experts = make_experts(whole, prefix, mixture)
        self.experts = spread_experts(experts, whole, router)
        shared = replace(build, config=replace(build.config, weight_names=mixture.shared_names(build.names)))
        self.shared = None if mixture.shared is None else DenseMlp(shared, prefix, mixture.shared)
        self.native: NativeMixture | None = None
        """All of it in one call, if the native kernels have its parts and all ranks have the same rows."""
        has_silu = mixture.shared is None or mixture.shared.activation == "silu"
        if has_silu and not whole.mesh.place.is_data_parallel:
            own = None if self.shared is None else (self.shared.up, self.shared.down)
            self.native = native_mixture(router, self._logits, self._selection_bias, experts, own)
        self._mesh = whole.mesh

    def forward(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self._mesh.all_reduce(self.native.forward(x))
        routing = route(self._logits.forward(x.float()), self._router, self._selection_bias)
        return self.experts.forward(x, routing, None if self.shared is None else self.shared.own_part(x))


Mlp = DenseMlp | MixtureMlp
MLPS: dict[str, Callable[[Build, str, Any], Mlp]] = {
    "gated": DenseMlp,
    "plain": DenseMlp,
    MixtureDescription.kind: MixtureMlp,
}
"""By the description's `kind`. Each takes the layer's name and a dot, and the description."""


def make_mlp(build: Build, prefix: str, mlp: MlpDescription | MixtureDescription) -> Mlp:
    """The MLP of the layer whose name and a dot are `prefix`."""
    if not isinstance(mlp, MixtureDescription):
        build = build.for_own_rows
    return implementation("MLP", mlp.kind, MLPS)(build, prefix, mlp)

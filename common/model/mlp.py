"""MLPs and their activations. They run on a rank's engine thread, under inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from common.kernels.base import Kernels
from common.model.build import Build
from common.model.description import MlpDescription, implementation

_gelu_tanh = partial(F.gelu, approximate="tanh")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By the names in `description.ACTIVATIONS`."""


def _activate_and_mul(activation: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """What makes activation(gate) * up, [T, inner], of [T, 2 * inner]."""
    function = implementation("activation", activation, _FUNCTIONS)
    if activation == "silu":
        return kernels.silu_and_mul

    def activate_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate).mul_(up)

    return activate_and_mul


class Mlp(Protocol):
    """The MLP of one layer: this rank's inner features, then an all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], fresh."""
        ...


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up merged."""

    def __init__(self, build: Build, prefix: str, mlp: MlpDescription) -> None:
        """`prefix`: the layer's name and a dot."""
        hidden, names, inner = build.config.hidden_size, build.names, build.inner(mlp)
        merged = [prefix + name for name in (names.gate, names.up)]
        self.gate_up = build.column_linear(merged, [inner, inner], hidden, bias=mlp.bias, is_paired=True)
        self.down = build.row_linear(prefix + names.down, inner, hidden, bias=mlp.bias)
        self._activate_and_mul = _activate_and_mul(mlp.activation, build.kernels)
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._mesh.all_reduce(self.down.forward(self._activate_and_mul(self.gate_up.forward(x))))


class PlainMlp:
    """down(activation(up(x)))."""

    def __init__(self, build: Build, prefix: str, mlp: MlpDescription) -> None:
        """`prefix`: the layer's name and a dot."""
        hidden, names, inner = build.config.hidden_size, build.names, build.inner(mlp)
        self.up = build.column_linear([prefix + names.up], [inner], hidden, bias=mlp.bias)
        self.down = build.row_linear(prefix + names.down, inner, hidden, bias=mlp.bias)
        self._activate = implementation("activation", mlp.activation, _FUNCTIONS)
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._mesh.all_reduce(self.down.forward(self._activate(self.up.forward(x))))


MLPS: dict[str, Callable[[Build, str, MlpDescription], Mlp]] = {"gated": GatedMlp, "plain": PlainMlp}
"""By `MlpDescription.kind`. Each takes the layer's name and a dot, and the description."""


def make_mlp(build: Build, prefix: str, mlp: MlpDescription) -> Mlp:
    """The MLP of the layer whose name and a dot are `prefix`."""
    return implementation("MLP", mlp.kind, MLPS)(build, prefix, mlp)

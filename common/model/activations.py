"""Activations of MLPs. They run on a rank's engine thread, under inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from common.kernels.base import Kernels
from common.model.description import ClampedGate, implementation

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


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name. Raises: ConfigError."""
    return implementation("activation", name, _FUNCTIONS)


def activate_and_mul(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """What makes activation(gate) * up, [T, inner], of [T, 2 * inner]."""
    function = activation(name)
    if name == "silu":
        return kernels.silu_and_mul

    def of_gate_and_up(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate).mul_(up)

    return of_gate_and_up


def clamped_gate(clamp: ClampedGate) -> Callable[[Tensor], Tensor]:
    """`ClampedGate` of [T, 2 * inner], gate then up: [T, inner]."""

    def of_gate_and_up(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=clamp.limit)
        return (gate * clamp.alpha).sigmoid_().mul_(gate).mul_(up.clamp(-clamp.limit, clamp.limit).add_(1))

    return of_gate_and_up

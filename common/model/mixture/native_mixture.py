"""A mixture as one call into the native kernels: router, experts and shared experts. Runs on a rank's engine thread, under
inference mode."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.kernels.native.library import DTYPES, SCORES, LinearStruct, MixtureStruct, NativeLibrary, RouterStruct
from common.kernels.native.linear import NativeLinear
from common.model.description import RouterDescription
from common.model.formats.base import Linear
from common.model.mixture.experts import NativeExperts


class NativeMixture:
    """A mixture of which the native kernels have every part."""

    def __init__(
        self,
        native: NativeLibrary,
        router: RouterDescription,
        logits: NativeLinear,
        selection_bias: Tensor | None,
        experts: NativeExperts,
        shared: tuple[NativeLinear, NativeLinear] | None,
    ) -> None:
        """selection_bias: [experts] float32; shared: gate and up, merged, and down."""
        self._kept = logits, selection_bias, experts, shared  # the memory that `_struct` points to
        self._native = native
        gate_up, down = (LinearStruct(), LinearStruct()) if shared is None else (shared[0].struct, shared[1].struct)
        own = RouterStruct(logits.struct, None if selection_bias is None else selection_bias.data_ptr())
        own.scores, own.num_experts, own.top_k = SCORES[router.scores], router.num_experts, router.top_k
        own.normalizes, own.scaling = router.normalizes, router.scaling
        own.num_groups, own.groups_kept = router.num_groups, router.groups_kept
        own.group_score_of = router.group_score_of
        self._struct = MixtureStruct(own, experts.struct, gate_up, down)
        self.address = ctypes.addressof(self._struct)
        """Address of the struct kv_mixture."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the mixture's output. x: [T, hidden]. Returns a fresh [T, hidden] of its dtype."""
        x, native = x.contiguous(), self._native
        out = torch.empty_like(x)
        native.mixture_forward(native.team, self.address, x.data_ptr(), DTYPES[x.dtype], x.size(0), out.data_ptr())
        return out


def native_mixture(
    router: RouterDescription,
    logits: Linear,
    selection_bias: Tensor | None,
    experts: object,
    shared: tuple[Linear, Linear] | None,
) -> NativeMixture | None:
    """The mixture of these parts; None if one of them is not of the native kernels, or may be changed by adapters."""
    if not isinstance(experts, NativeExperts) or not isinstance(logits, NativeLinear):
        return None
    if shared is None:
        return NativeMixture(experts.native, router, logits, selection_bias, experts, None)
    gate_up, down = shared
    if not isinstance(gate_up, NativeLinear) or not isinstance(down, NativeLinear):
        return None
    return NativeMixture(experts.native, router, logits, selection_bias, experts, (gate_up, down))

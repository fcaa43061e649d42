"""The experts of a mixture on one rank, and a whole mixture as one call into the native kernels. They run on a rank's engine
thread, under inference mode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.kernels.native.kernels import NativeKernels
from common.kernels.native.library import (
    CLAMPED_GATE,
    DTYPES,
    SCORES,
    SILU_GATE,
    ChoiceStruct,
    ExpertsStruct,
    GateStruct,
    LinearStruct,
    MixtureStruct,
    NativeLibrary,
    RouterStruct,
)
from common.kernels.native.linear import NativeLinear
from common.model.activations import activate_and_mul, clamped_gate
from common.model.build import Build, OwnLinear
from common.model.description import MixtureDescription, RouterDescription
from common.model.formats.base import Linear
from common.model.mixture.grouped import GroupedExperts, can_group
from common.model.mixture.placement import Placement
from common.model.mixture.routing import Routing
from common.model.mixture.slots import ExpertSlots
from common.model.mixture.stacked import unstacked


class ExpertLoop:
    """This rank's experts of one layer, one after the other, each with the rows of its tokens, on linear layers of any kind."""

    def __init__(self, build: Build, prefix: str, mixture: MixtureDescription) -> None:
        """`prefix`: the layer's name and a dot."""
        place, router = build.mesh.place, mixture.router
        placement = Placement.initial(router.num_experts, place.tp_size, build.redundant_experts or 0)
        self.slots: ExpertSlots | None = None
        """Where the layer's experts are; None if they never move, and are in their order."""
        if build.redundant_experts is not None:
            self.slots = ExpertSlots(placement, place.tp_rank, build.device)
            build = replace(build, packed=None)  # what is shared with other processes must not change
        self.choice = None if place.is_data_parallel else self.slots
        """Chooses the slot of each expert in `forward`; None if experts never move, or if `forward` gets slots."""
        self.first = placement.range_of(place.tp_rank).start
        self._num_slots, self._top_k = len(placement.slots), router.top_k
        build = unstacked(build, prefix, mixture)
        names, inner, hidden, bias = mixture.expert_names, mixture.inner_size, build.config.hidden_size, mixture.bias
        layers: list[OwnLinear] = []
        for expert in placement.by_rank()[place.tp_rank]:
            gate, up, down = (prefix + name.format(expert=expert) for name in (names.gate, names.up, names.down))
            layers += [OwnLinear((gate, up), inner, hidden, is_paired=True), OwnLinear((down,), hidden, inner)]
        linears = build.own_linears(layers, bias=bias)
        self.gate_ups, self.downs = linears[::2], linears[1::2]
        if self.slots is not None:
            self.slots.linears = list(zip(self.gate_ups, self.downs, strict=True))
        activate = activate_and_mul(mixture.activation, build.kernels)
        self.activate = activate if mixture.clamp is None else clamped_gate(mixture.clamp)
        self._dtype_for = build.precision.for_rows

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x: [T, hidden]. Returns a fresh [T, hidden] float32: the weighted sum of the outputs of each token's experts that
        are on this rank. With data-parallel attention `routing` has slots in place of experts."""
        chosen = (routing.experts if self.choice is None else self.choice.choose(routing)).flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self._num_slots).tolist()
        at = sum(counts[: self.first])
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = routing.weights.flatten()
        for slot, (gate_up, down) in enumerate(zip(self.gate_ups, self.downs, strict=True), self.first):
            count = counts[slot]
            if not count:
                continue
            picks = order[at : at + count]
            at += count
            rows = picks // self._top_k
            own = x.index_select(0, rows).to(self._dtype_for(count))
            y = down.forward(self.activate(gate_up.forward(own)), torch.float32)
            out.index_add_(0, rows, y.mul_(weights.index_select(0, picks)[:, None]))
        return out


class NativeExperts:
    """`ExpertLoop` in one call of the native kernels, which read the weights of chosen experts only."""

    def __init__(self, loop: ExpertLoop, mixture: MixtureDescription, hidden: int, native: NativeLibrary) -> None:
        """loop: on layers of the native kernels."""
        self._loop = loop  # keeps the memory that the structs point to
        self.slots = loop.slots
        self.native = native
        self._structs = [_structs(linears) for linears in (loop.gate_ups, loop.downs)]
        clamp = mixture.clamp
        gate = GateStruct(SILU_GATE) if clamp is None else GateStruct(CLAMPED_GATE, clamp.alpha, clamp.limit)
        gate_up, down = (ctypes.addressof(each) for each in self._structs)
        self.struct = ExpertsStruct(gate_up, down)
        self.struct.first, self.struct.num_experts = loop.first, len(loop.downs)
        self.struct.hidden, self.struct.inner, self.struct.gate = hidden, mixture.inner_size, gate
        if (choice := loop.choice) is not None:
            self.struct.slots, self.struct.slot_stride = choice.table.data_ptr(), choice.table.size(1)
            self.struct.replicas, self.struct.counts = choice.replicas.data_ptr(), choice.counts.data_ptr()
        self._top_k = mixture.router.top_k

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        x, experts, weights = x.contiguous(), routing.experts.contiguous(), routing.weights.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        choice = ChoiceStruct(experts.data_ptr(), weights.data_ptr(), x.size(0), self._top_k)
        native, own, chosen = self.native, ctypes.addressof(self.struct), ctypes.addressof(choice)
        native.experts_forward(native.team, own, chosen, x.data_ptr(), DTYPES[x.dtype], out.data_ptr())
        return out


def _structs(linears: Sequence[Linear]) -> ctypes.Array[LinearStruct]:
    return (LinearStruct * len(linears))(*(linear.struct for linear in linears if isinstance(linear, NativeLinear)))


Experts = ExpertLoop | NativeExperts | GroupedExperts


def make_experts(build: Build, prefix: str, mixture: MixtureDescription) -> Experts:
    """This rank's experts of the layer whose name and a dot are `prefix`."""
    loop, kernels = ExpertLoop(build, prefix, mixture), build.kernels
    is_gate_known = mixture.clamp is not None or mixture.activation == "silu"
    are_native = all(isinstance(linear, NativeLinear) for linear in (*loop.gate_ups, *loop.downs))
    if isinstance(kernels, NativeKernels) and is_gate_known and are_native:
        return NativeExperts(loop, mixture, build.config.hidden_size, kernels.native)
    gate_ups, downs = loop.gate_ups, loop.downs
    if can_group(gate_ups, build.device) and can_group(downs, build.device):
        return GroupedExperts(loop.first, gate_ups, downs, loop.activate, loop.slots, loop.choice)
    return loop


class NativeMixture:
    """A mixture that the native kernels have every part of: router, experts and shared experts."""

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
    experts: Experts,
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

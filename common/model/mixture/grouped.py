"""The experts of a mixture on a GPU, as one product over all of them. Its sizes stay on the GPU, so that steps can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from common.model.formats.base import Linear
from common.model.formats.floating import FloatLinear, stack
from common.model.mixture.routing import Routing
from common.model.mixture.slots import ExpertSlots

_HOPPER = (9, 0)
"""First compute capability on which PyTorch's product of groups does not wait for the host."""


class GroupedExperts:
    """`ExpertLoop` by PyTorch's product of groups of rows, which lie one after the other.

    Every pick of the step has a row, those of experts on other ranks behind all groups, so that shapes depend on nothing but
    the number of tokens.
    """

    def __init__(
        self,
        first: int,
        gate_ups: Sequence[FloatLinear],
        downs: Sequence[FloatLinear],
        activate: Callable[[Tensor], Tensor],
        slots: ExpertSlots | None = None,
        choice: ExpertSlots | None = None,
    ) -> None:
        """The layers of this rank's experts, from expert or slot `first` on, all of one dtype. activate: [N, 2 inner] ->
        [N, inner]. `slots`, `choice`: as `ExpertLoop` has them."""
        self.slots = slots
        self._choice = choice
        self._gate_up, self._gate_up_bias = stack(gate_ups)
        self._down, self._down_bias = stack(downs)
        self._first, self._activate = first, activate

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        num_tokens, top_k = routing.experts.shape
        num_experts = len(self._gate_up)
        chosen = routing.experts if self._choice is None else self._choice.choose(routing).long()
        local = chosen.flatten() - self._first
        group = torch.where((local >= 0) & (local < num_experts), local, num_experts)
        order = group.argsort(stable=True)
        group = group.index_select(0, order)
        sizes = torch.zeros(num_experts + 1, dtype=torch.int32, device=x.device)
        sizes.scatter_add_(0, group, torch.ones_like(group, dtype=torch.int32))
        ends = sizes[:num_experts].cumsum(0, dtype=torch.int32)
        expert = group.clamp(max=num_experts - 1)
        rows = x.index_select(0, order // top_k).to(self._gate_up.dtype)
        inner = self._activate(_product(rows, self._gate_up, self._gate_up_bias, ends, expert))
        y = _product(inner, self._down, self._down_bias, ends, expert).float()
        weights = routing.weights.flatten().index_select(0, order)[:, None]
        # Rows behind the groups are not computed: their content is undefined.
        y = torch.where((group < num_experts)[:, None], y * weights, 0.0)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return y.index_select(0, place).view(num_tokens, top_k, -1).sum(1)


def _product(rows: Tensor, weights: Tensor, bias: Tensor | None, ends: Tensor, expert: Tensor) -> Tensor:
    """rows: [N, in], those of expert i before `ends[i]`; weights: [E, out, in]; expert: [N]. Returns [N, out]."""
    y = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return y if bias is None else y + bias.index_select(0, expert)


def can_group(linears: Sequence[Linear], device: torch.device) -> TypeGuard[Sequence[FloatLinear]]:
    """Whether experts with these layers run on the device as one product: bfloat16, rows of whole 16 bytes, from Hopper on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _HOPPER:
        return False
    return device.type != "cpu" and all(isinstance(each, FloatLinear) and each.is_groupable for each in linears)

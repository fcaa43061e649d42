"""Experts as one product of groups, as a GPU computes them, against one expert after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from common.base.device import CPU
from common.model.activations import clamped_gate
from common.model.description import ClampedGate
from common.model.formats.floating import FloatLinear
from common.model.mixture.grouped import GroupedExperts, can_group
from common.model.mixture.moving import tensors_of
from common.model.mixture.placement import Placement
from common.model.mixture.routing import Routing
from common.model.mixture.slots import ExpertSlots
from common.model.precision import Precision

HIDDEN, INNER, EXPERTS, TOP_K = 32, 16, 8, 3
BFLOAT16 = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
META = torch.device("meta")


def linears(count: int, outputs: int, inputs: int, *, has_bias: bool, device: torch.device = CPU) -> list[FloatLinear]:
    draw = torch.Generator().manual_seed(outputs)
    weights = [torch.randn(outputs, inputs, generator=draw).bfloat16().to(device) for _ in range(count)]
    return [FloatLinear(w, w[:, 0].clone() if has_bias else None, BFLOAT16) for w in weights]


def one_by_one(
    gate_ups: list[FloatLinear], downs: list[FloatLinear], first: int, x: Tensor, routing: Routing
) -> Tensor:
    out = torch.zeros(x.shape)
    for row in range(len(x)):
        for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row], strict=True):
            if first <= expert < first + len(downs):
                inner = clamped_gate(ClampedGate(1.7, 7.0))(gate_ups[expert - first].forward(x[row : row + 1]))
                out[row] += weight * downs[expert - first].forward(inner)[0].float()
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, EXPERTS), (2, 3)])
@pytest.mark.parametrize("rows", [1, 7, 40])
@torch.inference_mode()
def test_one_product_of_groups_is_the_sum_over_experts(rows: int, first: int, count: int, *, has_bias: bool) -> None:
    gate_ups = linears(count, 2 * INNER, HIDDEN, has_bias=has_bias)
    downs = linears(count, HIDDEN, INNER, has_bias=has_bias)
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=draw).bfloat16()
    scores = torch.rand(rows, EXPERTS, generator=draw)
    scores[:, 4] = 0.0  # nobody's expert
    weights, experts = scores.topk(TOP_K)
    routing = Routing(experts, weights)
    expected = one_by_one(gate_ups, downs, first, x, routing)
    grouped = GroupedExperts(first, gate_ups, downs, clamped_gate(ClampedGate(1.7, 7.0)))
    # A bias is added to a sum that is bfloat16 already.
    assert (grouped.forward(x, routing) - expected).abs().max() <= 0.01 * expected.abs().max()
    assert torch.equal(one_by_one(gate_ups, downs, first, x, routing), expected), "the layers are views of the stack"


def test_which_experts_run_as_one_product() -> None:
    kept = linears(2, HIDDEN, INNER, has_bias=False, device=META)
    assert can_group(kept, META)
    assert not can_group(kept, CPU)
    assert not can_group(linears(2, HIDDEN, 20, has_bias=False, device=META), META), "rows of 40 bytes"


@torch.inference_mode()
def test_experts_that_move_between_two_ranks_take_their_rows_along() -> None:
    all_ups, all_downs = (
        linears(EXPERTS, 2 * INNER, HIDDEN, has_bias=True),
        linears(EXPERTS, HIDDEN, INNER, has_bias=True),
    )
    placement = Placement.initial(EXPERTS, 2, 2)
    ranks = [ExpertSlots(placement, rank, CPU) for rank in range(2)]
    parts: list[GroupedExperts] = []
    for slots, experts in zip(ranks, placement.by_rank(), strict=True):
        ups, downs = ([copy.deepcopy(each[expert]) for expert in experts] for each in (all_ups, all_downs))
        slots.linears = list(zip(ups, downs, strict=True))
        parts.append(GroupedExperts(slots.own.start, ups, downs, clamped_gate(ClampedGate(1.7, 7.0)), slots, slots))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, HIDDEN, generator=draw).bfloat16()
    weights, experts = torch.rand(40, EXPERTS, generator=draw).topk(TOP_K)
    routing = Routing(experts, weights)
    expected = one_by_one(all_ups, all_downs, 0, x, routing)
    for counts in ([1.0] * EXPERTS, [100.0, *[1.0] * 7], [*[1.0] * 7, 100.0]):
        new = ranks[0].placement.balanced(counts)
        for slots, held in zip(ranks, new.by_rank(), strict=True):
            for target, expert in zip(slots.linears, held, strict=True):
                for to, tensor in zip(
                    tensors_of(target), tensors_of((all_ups[expert], all_downs[expert])), strict=True
                ):
                    to.copy_(tensor)
            slots.place(new)
        found = parts[0].forward(x, routing) + parts[1].forward(x, routing)
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
    assert ranks[0].counts.tolist() == experts.flatten().bincount(minlength=EXPERTS).tolist()

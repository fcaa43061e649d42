"""How many nodes of each role a demand needs, from measured costs and the latency objectives. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from router.policy.costs import Costs
from router.requests.admission import Objectives

COLD = 20
"""Samples below which a cost counts as unknown: the first ones of a cluster contain compilation and page faults."""
_BUSY, _LEAST_BUSY = 0.8, 0.5
"""Highest share of its time that a prefill node should compute, and the lowest one that a short objective leads to."""
_TAIL = 2.3
"""The 90th percentile of a waiting time over its mean."""
_TPOT_SHARE = 0.9
"""Share of the objective that a step may take on average."""
_DECODE_BUSY = 0.85
"""Share of its slots that a decode node should use on average."""


class NodeCounts(NamedTuple):
    """Nodes by role."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"prefill {self.prefill}, decode {self.decode}"


class Need(NamedTuple):
    """Nodes by role, with fractions."""

    prefill: float
    decode: float

    def ratios(self, counts: NodeCounts) -> tuple[float, float]:
        """Need over nodes, by role."""
        return _ratio(self.prefill, counts.prefill), _ratio(self.decode, counts.decode)

    def pressure(self, counts: NodeCounts) -> float:
        """The highest ratio; above 1 the objectives are at risk."""
        return max(self.ratios(counts))


def _ratio(need: float, count: int) -> float:
    return need / count if count else (math.inf if need else 0.0)


@dataclass(frozen=True)
class Demand:
    """What clients ask for, on average over the last `span_s` seconds."""

    span_s: float = 0.0
    prompt_tokens_s: float = 0.0
    """Prompt tokens to compute per second: those that no node has cached."""
    generated_tokens_s: float = 0.0
    """Tokens to generate per second."""


@dataclass(frozen=True)
class RoleCosts:
    """What nodes were measured to cost."""

    prefill: Costs
    decode: Costs
    slots: float
    """Sequences that a decode node can run at once, by its options and its KV memory."""


def need(demand: Demand, costs: RoleCosts, objectives: Objectives) -> Need:
    """Nodes that serve the demand inside the objectives. Without a demand, none; with one, costs must have been measured."""
    return Need(_prefill(demand, costs, objectives.ttft_s), _decode(demand, costs, objectives.tpot_s))


def unknown_costs(demand: Demand, costs: RoleCosts) -> str:
    """Which cost the demand needs and has too few samples; empty if there is none."""
    if demand.prompt_tokens_s and costs.prefill.prefills < COLD:
        return f"prefill has {costs.prefill.prefills} of {COLD} samples"
    if demand.generated_tokens_s and costs.decode.steps < COLD:
        return f"decode has {costs.decode.steps} of {COLD} samples"
    return ""


def _prefill(demand: Demand, costs: RoleCosts, ttft_s: float) -> float:
    """Busy seconds per second, over the share of time that leaves waits short enough for the objective."""
    work = demand.prompt_tokens_s * costs.prefill.queued_token_s
    answers_s = demand.generated_tokens_s / max(1.0, costs.decode.output_tokens)
    busy = _BUSY
    if work and ttft_s and answers_s:
        prompt_s = work / answers_s
        # M/D/1: the mean wait at utilisation u is u / (1 - u) / 2 of the time of one prompt.
        waits = 2 * max(0.0, ttft_s - prompt_s) / (_TAIL * prompt_s)
        busy = min(_BUSY, max(_LEAST_BUSY, waits / (1 + waits)))
    return work / busy


def _decode(demand: Demand, costs: RoleCosts, tpot_s: float) -> float:
    """Tokens per second over those of one node with the largest batch whose steps meet the objective."""
    base_s, seq_s = costs.decode.step_base_s, costs.decode.step_seq_s
    batch = max(1.0, costs.slots)
    if tpot_s and seq_s:
        batch = max(1.0, min(batch, (tpot_s * _TPOT_SHARE - base_s) / seq_s))
    step_s = max(1e-6, base_s + seq_s * batch)
    return demand.generated_tokens_s * step_s / batch / _DECODE_BUSY

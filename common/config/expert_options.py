"""Options of nodes for the experts of a mixture. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.fields import option


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How the experts of a mixture are placed on tensor-parallel ranks."""

    rebalance_experts: float | None = option(
        None,
        "Move experts among tensor-parallel ranks while they serve: those of a layer where the rank with most load has more than "
        "this many times the mean, such as 1.1; by default they never move.",
        "Model",
        low=1,
        high=1000,
    )
    redundant_experts: int = option(
        0,
        "Slots of each layer for second copies of its most loaded experts, over all ranks of a stage together; needs "
        "--rebalance-experts.",
        "Model",
        low=0,
        high=10_000,
    )

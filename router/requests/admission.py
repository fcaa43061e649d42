"""Whether another request should go to the nodes now, and whether it would meet the latency objectives. Pure.

Once a node has enough queued work, sending more makes no request faster, and requests that wait at a node can no longer be
reordered. So while every node of a role has enough, requests wait in the router (`router.requests.admission_queue`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.base.errors import Overloaded
from router.policy import Decision, Fleet
from router.policy.costs import Costs
from router.policy.fleet import FEW, Figures
from router.requests.fair_queue import TokensAhead

USEFUL_QUEUE_S = 1.0
"""A prefill node with this much queued work has enough. It must be longer than the interval of its load reports."""
_SPARE = 1.25
"""A node has enough requests when it has this multiple of those it can run at once."""


@dataclass(frozen=True)
class Objectives:
    """The latencies that clients are promised, in seconds; 0 means none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def shown(self) -> dict[str, float | None]:
        """As operators see them."""
        return {"ttft_s": self.ttft_s or None, "tpot_s": self.tpot_s or None}

    def check(self, decision: Decision, prefill: Fleet, decode: Fleet, ahead_s: float) -> None:
        """Refuse early a request that would probably miss an objective. `ahead_s`: its wait in this router.

        A node without any work is always used, whatever the estimate: waiting would not help, and using it corrects a
        wrong estimate. No request is refused before costs were measured.
        Raises: Overloaded with the reason.
        """
        if not (self.ttft_s or self.tpot_s):
            return
        ttft_s, tpot_s = decision.ttft_s + ahead_s, decision.tpot_s
        source = decision.prefill
        decodes = decode.node(decision.decode.incarnation).requests > 0
        waits = decodes if source is None else prefill.node(source.incarnation).requests > 0
        if 0 < self.ttft_s < ttft_s and (waits or ahead_s > 0) and max(prefill.costs.prefills, decode.costs.prefills):
            raise Overloaded(
                f"the first token would take about {ttft_s:.1f} s, longer than the objective of {self.ttft_s:g} s; "
                "try again later",
                retry_after_s=ttft_s - self.ttft_s,
            )
        if 0 < self.tpot_s < tpot_s and decodes and decode.costs.steps:
            raise Overloaded(
                f"each token would take about {tpot_s:.3f} s, longer than the objective of {self.tpot_s:g} s; "
                "try again later",
                retry_after_s=decode.costs.output_tokens * (tpot_s - self.tpot_s),
            )


def crowded(prefill: Fleet, decode: Fleet, *, within_share: bool = False) -> str:
    """Why another request must wait: every node of a role has enough. Empty if it need not wait.

    `within_share`: its tenant has less than its share of the decode nodes' slots, so that they make room for it.
    """
    if decode.incarnations and not within_share and _all(_running, decode):
        return "every decode node has more requests than it can run"
    if prefill.incarnations and _all(_computing, prefill):
        queue_s = float(prefill.columns.slow_backlog.min()) * prefill.costs.queued_token_s
        return f"every prefill node has work for {queue_s:.1f} s"
    return ""


def _running(at: Figures[Any], costs: Costs) -> Any:
    """Whether a decode node (or each node of a fleet) has enough requests."""
    return at.requests >= at.capacity * _SPARE


def _computing(at: Figures[Any], costs: Costs) -> Any:
    """Whether a prefill node (or each node of a fleet) has enough work."""
    queued = (at.slow_backlog * costs.queued_token_s >= USEFUL_QUEUE_S) & (at.requests >= 2)
    return queued | (at.requests >= at.capacity * _SPARE)


def _all(full: Callable[[Figures[Any], Costs], Any], fleet: Fleet) -> bool:
    """Whether `full` holds for every node. The first nodes are tested one by one: nearly always one of them is not full."""
    for at in fleet.nodes[:FEW]:
        if not full(at, fleet.costs):
            return False
    return len(fleet.incarnations) <= FEW or bool(full(fleet.columns, fleet.costs).all())


def wait_s(ahead: TokensAhead, prefill: Fleet, decode: Fleet) -> float:
    """How long the nodes are busy with queued requests.

    Prefill nodes compute the prompts while decode nodes write the answers; without prefill nodes, decode nodes do one after
    the other. Answers count once the time of a decode step was measured. Until decode nodes have computed prompts, those are
    estimated at the prefill nodes' pace.
    """
    computing = prefill if len(prefill) or not decode.costs.prefills else decode
    prompts_s = ahead.of_prompts * computing.costs.queued_token_s / max(1, len(prefill) or len(decode))
    answers_s = 0.0
    if ahead.of_answers and decode.costs.steps and len(decode):
        costs, at = decode.costs, decode.columns
        steps_s = (costs.step_base_s + costs.step_seq_s * at.capacity) * at.step_slowness
        answers_s = ahead.of_answers / float((at.capacity / steps_s).sum())
    return max(prompts_s, answers_s) if len(prefill) else prompts_s + answers_s

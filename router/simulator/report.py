"""The figures of a run: hit rate, latencies, goodput, imbalance. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from router.simulator.node import SimulatedNode
from router.simulator.request import SimRequest

_SHARES = (0.5, 0.9, 0.99)


@dataclass
class Ledger:
    """Everything counted during a run. Invariant, once closed: arrived = finished + refused."""

    arrived_count: int = 0
    refusals: Counter[str] = field(default_factory=Counter[str])
    """By reason."""
    blocks: int = 0
    """Prompt blocks of placed requests that reached their first token."""
    hit_blocks: int = 0
    """The part of `blocks` that the node which computed the prompt had cached."""
    sent_bytes: float = 0.0
    local: int = 0
    """Local prefills."""
    output_tokens: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    """One entry per request, in the order in which requests ended; so are `tpot_s` and `arrival_s`."""
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    arrived_s: float = 0.0
    """Arrival of the last request."""
    ended_s: float = 0.0
    """End of the last request that was served."""
    prefill_busy_s: list[float] = field(default_factory=list[float])
    """Seconds that each prefill node computed."""
    prefill_prompts: list[int] = field(default_factory=list[int])
    decode_sequences: list[int] = field(default_factory=list[int])

    def arrived(self, request: SimRequest) -> None:
        """A request arrived."""
        self.arrived_count += 1
        self.arrived_s = request.arrival_s

    def refuse(self, request: SimRequest, reason: str) -> None:
        """A request was refused."""
        self.refusals[reason] += 1

    def first_token(self, request: SimRequest) -> None:
        """A request's prompt is computed."""
        self.blocks += len(request.hashes)
        self.hit_blocks += request.hit_blocks
        self.local += request.prefill_node is None

    def finish(self, request: SimRequest) -> None:
        """A request's answer is complete."""
        self.ended_s = max(self.ended_s, request.finished_s)
        self.output_tokens += request.output_tokens
        self.sent_bytes += request.sent_bytes
        self.arrival_s.append(request.arrival_s)
        self.ttft_s.append(request.ttft_s)
        self.tpot_s.append(request.tpot_s)

    def good_arrivals(self, slo_ttft_s: float, slo_tpot_s: float) -> npt.NDArray[np.float64]:
        """When the requests arrived that met both objectives."""
        good = (np.asarray(self.ttft_s) <= slo_ttft_s) & (np.asarray(self.tpot_s) <= slo_tpot_s)
        return np.asarray(self.arrival_s)[good]

    def close(self, nodes: Sequence[SimulatedNode]) -> None:
        """The run is over: take the nodes' counts."""
        prefill = [node for node in nodes if node.role == "prefill"]
        self.prefill_busy_s = [node.busy_s for node in prefill]
        self.prefill_prompts = [node.requests for node in prefill]
        self.decode_sequences = [node.requests for node in nodes if node.role == "decode"]


def summary(ledger: Ledger, *, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """The figures of a run as plain data; times in seconds, shares from 0 to 1."""
    ttft, tpot = np.asarray(ledger.ttft_s), np.asarray(ledger.tpot_s)
    good = len(ledger.good_arrivals(slo_ttft_s, slo_tpot_s))
    span_s = max(ledger.ended_s, ledger.arrived_s) or math.inf
    return {
        "requests": ledger.arrived_count,
        "finished": len(ttft),
        "refused": dict(ledger.refusals),
        "duration_s": ledger.ended_s,
        "request_rate": ledger.arrived_count / span_s,
        "hit_rate": ledger.hit_blocks / max(1, ledger.blocks),
        "ttft_s": spread(ttft),
        "tpot_s": spread(tpot),
        "goodput": good / max(1, ledger.arrived_count),
        "good_rate": good / span_s,
        "slo": {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s},
        "output_token_rate": ledger.output_tokens / span_s,
        "local_prefills": ledger.local,
        "relayed_bytes": ledger.sent_bytes,
        "prefill_imbalance": imbalance(ledger.prefill_busy_s),
        "prefill_prompt_imbalance": imbalance(ledger.prefill_prompts),
        "decode_imbalance": imbalance(ledger.decode_sequences),
        "prefill_utilisation": sum(ledger.prefill_busy_s) / (span_s * max(1, len(ledger.prefill_busy_s))),
    }


def spread(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and percentiles; None for each if there are no values."""
    names = ["mean", *(f"p{share * 100:.0f}" for share in _SHARES)]
    if not len(values):
        return dict.fromkeys(names)
    return dict(zip(names, [float(values.mean()), *np.quantile(values, _SHARES).tolist()], strict=True))


def imbalance(work: Sequence[float]) -> float | None:
    """The busiest node's work over the mean; None if no node worked."""
    total = sum(work)
    return max(work) * len(work) / total if total else None

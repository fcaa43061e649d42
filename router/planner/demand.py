"""What clients ask for per second, from the counters in nodes' load reports. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.control.messages import NodeLoad, Role
from router.planner.sizing import Demand

WINDOW_S = 240.0
"""Long enough that bursts of real traffic are over before they count, short enough to follow a load that turns (docs/planner.md)."""
_MOST_BEHIND = 2.0
_MEMORY_MATTERS = 0.5
"""Share of KV blocks in use above which memory, not `max_num_seqs`, may limit the batch."""


class Sample(NamedTuple):
    """The load report of one node."""

    role: Role
    incarnation: str
    load: NodeLoad


class _Totals(NamedTuple):
    """Sums over all nodes that were ever seen, at one moment."""

    at_s: float
    prompt_tokens: float
    generated_tokens: float
    queued_tokens: float
    waiting: float
    """Sequences that wait at decode nodes."""


class DemandMeter:
    """Rates over the last `WINDOW_S`. What a node did before it was first seen does not count."""

    def __init__(self) -> None:
        self._last: dict[str, NodeLoad] = {}
        self._prompt_tokens = self._generated_tokens = 0.0
        self._history: deque[_Totals] = deque()

    def add(self, now_s: float, samples: Iterable[Sample]) -> None:
        """Enter the latest report of every node that there is."""
        queued = waiting = 0.0
        seen: dict[str, NodeLoad] = {}
        for role, incarnation, load in samples:
            before = self._last.get(incarnation, load)
            self._prompt_tokens += max(0, load.prompt_tokens - before.prompt_tokens)
            self._generated_tokens += max(0, load.generated_tokens - before.generated_tokens)
            queued += load.queued_tokens
            waiting += load.waiting if role == "decode" else 0
            seen[incarnation] = load
        self._last = seen
        self._history.append(_Totals(now_s, self._prompt_tokens, self._generated_tokens, queued, waiting))
        while self._history[-1].at_s - self._history[0].at_s > WINDOW_S:
            self._history.popleft()

    def demand(self, output_tokens: float) -> Demand:
        """Rates of arrival: what was computed, and by how much the queues grew. `output_tokens`: usual length of an answer."""
        if len(self._history) < 2 or not math.isfinite(output_tokens):
            return Demand()
        first, last = self._history[0], self._history[-1]
        span_s = last.at_s - first.at_s
        if span_s <= 0:
            return Demand()
        computed = last.prompt_tokens - first.prompt_tokens
        arrived = max(0.0, computed + last.queued_tokens - first.queued_tokens)
        # Prompts that wait for a prefill node will ask for answers too.
        behind = min(_MOST_BEHIND, arrived / computed) if arrived > computed > 0 else 1.0
        begun = max(0.0, last.waiting - first.waiting) * output_tokens
        generated = (last.generated_tokens - first.generated_tokens) * behind + begun
        return Demand(span_s, arrived / span_s, generated / span_s)


def decode_slots(loads: Sequence[NodeLoad], max_num_seqs: float) -> float:
    """Sequences that a decode node can run at once, on average: `max_num_seqs`, or fewer if their KV fills the memory."""
    used, total = sum(load.kv_blocks_used for load in loads), sum(load.kv_blocks_total for load in loads)
    running = sum(load.running for load in loads)
    if not running or used <= total * _MEMORY_MATTERS:
        return max_num_seqs
    return min(max_num_seqs, running * total / used / len(loads))

"""What the router saw in the last hour: its counters every ten seconds, and the latest changes. Pure.

`DashboardRoutes.run` feeds it. Pages draw the differences of the counters, so that a chart does not begin with the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TICK_S = 1.0
EVERY_S = 10.0
POINTS, CHANGES = 360, 100


class NodeView(NamedTuple):
    """What is compared of a node."""

    node_id: str
    state: str


class History:
    """The counters of the last hour, and the latest changes."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._changes: deque[dict[str, Any]] = deque(maxlen=CHANGES)
        self._nodes: dict[str, NodeView] | None = None
        self._facts: dict[str, str] = {}

    @property
    def due_s(self) -> float:
        """Unix time of the next point."""
        return self._points[-1]["time"] + EVERY_S if self._points else 0.0

    def add(self, time_s: float, totals: Mapping[str, Any]) -> None:
        """Keep the counters at a Unix time."""
        self._points.append({"time": time_s, "totals": totals})

    def compare(self, time_s: float, nodes: Mapping[str, NodeView], facts: Mapping[str, str]) -> None:
        """Note what differs from the last call. `nodes`: by incarnation; `facts`: other things by name, such as Redis' state."""
        if self._nodes is not None:
            for what in (*_node_changes(self._nodes, nodes), *_fact_changes(self._facts, facts)):
                self._changes.append({"time": time_s, "what": what})
        self._nodes, self._facts = dict(nodes), dict(facts)

    def shown(self, last: int = POINTS) -> dict[str, Sequence[Any]]:
        """The `last` points, the oldest first, and the changes, the latest first."""
        return {"points": list(self._points)[-last:], "changes": list(reversed(self._changes))}


def _node_changes(before: Mapping[str, NodeView], now: Mapping[str, NodeView]) -> list[str]:
    gone = {view.node_id for incarnation, view in before.items() if incarnation not in now}
    come = {view.node_id for incarnation, view in now.items() if incarnation not in before}
    found = [f"{name} was restarted" for name in sorted(gone & come)]
    found += [f"{name} is gone" for name in sorted(gone - come)]
    found += [f"{name} has joined" for name in sorted(come - gone)]
    for incarnation, view in now.items():
        earlier = before.get(incarnation)
        if earlier is not None and earlier.state != view.state:
            found.append(f"{view.node_id} is {view.state}, was {earlier.state}")
    return found


def _fact_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {now.get(name) or 'none'}, was {before.get(name) or 'none'}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]

"""Virtual time: a heap of what happens next. Pure; runs on the caller's thread."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Handler = Callable[[Any], None]


class Events:
    """Handlers called in order of their time; equal times in order of scheduling, so that runs repeat exactly."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._scheduled = 0

    def at(self, when_s: float, handler: Handler, subject: Any = None) -> None:
        """Call `handler(subject)` when the clock reads `when_s`; at once if that is past."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._scheduled, handler, subject))

    def after(self, delay_s: float, handler: Handler, subject: Any = None) -> None:
        """Call `handler(subject)` after `delay_s`."""
        self.at(self.now_s + delay_s, handler, subject)

    def run(self) -> None:
        """Run until no event is left."""
        heap = self._heap
        while heap:
            self.now_s, _, handler, subject = heapq.heappop(heap)
            handler(subject)

"""Deadlines that lie equally long after their beginnings: one timer for all of them. Router process, event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class Deadlines(Generic[_Key]):
    """Calls `late(key)`, which must not raise, `timeout_s` after `add(key)`, unless `remove(key)` came first."""

    def __init__(self, timeout_s: float, late: Callable[[_Key], None]) -> None:
        self.timeout_s = timeout_s
        self._late = late
        self._due_s: dict[_Key, float] = {}
        """In the order in which they come up."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs out when the first one of some time ago comes up, which may be gone by then."""

    def __contains__(self, key: _Key) -> bool:
        return key in self._due_s

    def add(self, key: _Key) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._due_s[key] = due_s = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._look)

    def remove(self, key: _Key) -> None:
        """It is over in time; or it was late, and knows."""
        self._due_s.pop(key, None)

    def close(self) -> None:
        """Nothing is late any more."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._due_s:
            key, due_s = next(iter(self._due_s.items()))
            if due_s > loop.time():
                self._timer = loop.call_at(due_s, self._look)
                return
            del self._due_s[key]
            self._late(key)
        self._timer = None

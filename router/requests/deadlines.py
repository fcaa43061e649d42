"""Deadlines of equal length, with one timer for all of them. Router process, event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class Deadlines(Generic[_Key]):
    """Calls `late(key)`, which must not raise, `timeout_s` after `add(key)` unless `remove(key)` came first."""

    def __init__(self, timeout_s: float, late: Callable[[_Key], object]) -> None:
        self.timeout_s = timeout_s
        self._late = late
        self._due_s: dict[_Key, float] = {}
        """Due time by key, in order of due time."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires when the deadline is due that was first when the timer was set; that deadline may be removed by then."""

    def __contains__(self, key: _Key) -> bool:
        return key in self._due_s

    def add(self, key: _Key) -> None:
        """Start a deadline."""
        loop = asyncio.get_running_loop()
        self._due_s[key] = due_s = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._look)

    def remove(self, key: _Key) -> None:
        """End a deadline; a key that is not here, or was late, is ignored."""
        self._due_s.pop(key, None)

    def close(self) -> None:
        """Remove all deadlines."""
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

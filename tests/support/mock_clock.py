"""A clock that jumps, so that no test sleeps."""

from __future__ import annotations


class MockClock:
    """A clock that advances only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

"""Durations and sizes of an engine's steps, for the estimates and metrics of routers. Engine thread."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from common.control.node_reports import STEP_TOKENS

_GAIN = 0.1


@dataclass
class StepTimer:
    """Times steps; several may be in flight.

    `prompt_busy_s`: seconds of steps that computed prompts, overlapping ones counted once. `step_s`: mean duration of
    recent steps that decoded, which is the time per token of their streams; 0 before the first. With `depth` 2 a step
    begins behind another one, and its time counts from the end of that.
    """

    depth: int = 1

    prompt_busy_s: float = 0.0
    step_s: float = 0.0
    by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """Steps by their tokens: one number for each range between the bounds `STEP_TOKENS`."""
    tokens: int = 0
    _started: dict[int, float] = field(default_factory=dict[int, float])
    _last_end_s: float = 0.0

    def begin(self, step_id: int, now_s: float) -> None:
        """A step is sent to the ranks."""
        self._started[step_id] = now_s

    def end(self, step_id: int, now_s: float, *, decodes: bool, prompts: bool, tokens: int) -> float:
        """The step's output is in. `decodes`, `prompts`: whether it had sequences that decoded, and chunks of
        prompts; `tokens`: rows that it computed. Returns the seconds that it took."""
        self.by_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self.tokens += tokens
        started_s = self._started.pop(step_id, now_s)
        if prompts:
            self.prompt_busy_s += now_s - max(started_s, self._last_end_s)
        took_s = now_s - (started_s if self.depth == 1 else max(started_s, self._last_end_s))
        if decodes:
            gain = _GAIN if self.step_s else 1.0
            self.step_s += gain * (took_s - self.step_s)
        self._last_end_s = now_s
        return took_s

    def age_s(self, now_s: float) -> float:
        """How long steps have been in flight without one of them ending; 0 while there are none."""
        return now_s - max(min(self._started.values()), self._last_end_s) if self._started else 0.0

    def drop(self, step_id: int) -> None:
        """The step failed."""
        self._started.pop(step_id, None)

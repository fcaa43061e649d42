"""Whether and when a child that died is started again. A pure state machine per child: events in, decision out."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STEADY_S = 10.0
"""A child that was ready for so long before it died is not in a crash loop."""


@dataclass(frozen=True)
class RestartAfter:
    """Start it again, so many seconds from now."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """It never worked, so it never will: stop everything and exit with `exit_code`."""

    exit_code: int


class RestartPolicy:
    """What one child's deaths lead to.

    A child that was never ready has a mistake in its configuration: starting it again would only hide that.
    One that worked is started again for ever: at once after a steady time, else with a delay that doubles.
    """

    def __init__(self) -> None:
        self.was_ever_ready = False
        self._ready_since_s: float | None = None
        self._quick_deaths = 0

    def ready(self, now_s: float) -> None:
        """The present process of this child has become usable."""
        self.was_ever_ready = True
        self._ready_since_s = now_s

    def died(self, now_s: float, return_code: int) -> RestartAfter | GiveUp:
        """`return_code` as `Popen` has it: negative for a signal."""
        if not self.was_ever_ready:
            return GiveUp(exit_code(return_code))
        steady = self._ready_since_s is not None and now_s - self._ready_since_s >= _STEADY_S
        self._ready_since_s = None
        self._quick_deaths = 0 if steady else self._quick_deaths + 1
        if self._quick_deaths <= 1:
            # The first death is an accident; clients wait for this node.
            return RestartAfter(0.0)
        return RestartAfter(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self._quick_deaths - 2, 16)))


def exit_code(return_code: int) -> int:
    """A process's end as a shell would report it; never 0, for this is about a death that was not asked for."""
    if return_code < 0:
        return 128 - return_code
    return return_code or 1


def describe_exit(return_code: int) -> str:
    """`exit code 3` or `signal 9`."""
    return f"signal {-return_code}" if return_code < 0 else f"exit code {return_code}"

"""Decides whether and when a dead child is restarted. A pure state machine per child: events in, decision out."""

from __future__ import annotations

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STEADY_S = 1.0
"""A child that was ready this long has served: its death is no failure to start, however often it is killed."""


class RestartPolicy:
    """Decides what follows the deaths of one child.

    A child that was never ready has a configuration mistake, which restarts would only hide. A child that was ready
    is always restarted: at once if it was ready for `_STEADY_S`, otherwise after a delay that doubles.
    """

    def __init__(self) -> None:
        self.was_ever_ready = False
        self._ready_since_s: float | None = None
        self._quick_deaths = 0

    def ready(self, now_s: float) -> None:
        """The current process of this child became usable."""
        self.was_ever_ready = True
        self._ready_since_s = now_s

    def died(self, now_s: float) -> float | None:
        """The process ended. Returns the delay in seconds after which to restart it; None if the child was never ready."""
        if not self.was_ever_ready:
            return None
        steady = self._ready_since_s is not None and now_s - self._ready_since_s >= _STEADY_S
        self._ready_since_s = None
        self._quick_deaths = 0 if steady else self._quick_deaths + 1
        if self._quick_deaths <= 1:
            # No delay after the first death: clients wait for this node.
            return 0.0
        return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self._quick_deaths - 2, 16))


def exit_code(return_code: int) -> int:
    """The exit code that a shell would report for a return code of `Popen`, which is negative for a signal. Never 0, since the
    death was unexpected."""
    if return_code < 0:
        return 128 - return_code
    return return_code or 1


def describe_exit(return_code: int) -> str:
    """`exit code 3` or `signal 9`."""
    return f"signal {-return_code}" if return_code < 0 else f"exit code {return_code}"

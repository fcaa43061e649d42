"""A circuit breaker per node: a node that fails repeatedly gets no new requests for a while. Pure; the clock is injected.

              `FAILURES` in a row              its time has passed
    CLOSED ------------------------> OPEN ------------------------> HALF_OPEN
       ^                               ^                               |
       |                               |  a failure (its time doubles) |
       |                               +-------------------------------+
       |                       `SUCCESSES` in a row                    |
       +---------------------------------------------------------------+

Each leg counts once: as a success when its first tokens arrive, as a failure when its node caused the attempt to end.
Failures at about the same time count as one, because a failed step or a broken link ends many attempts at once. A
half-open node gets one attempt per `PROBE_EVERY_S`. A node that is not admitted is still used if there is no other.

Runs on the router's event loop; a new incarnation of a node starts closed.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from common.base.clock import Clock, monotonic
from common.base.errors import AdapterMissing, ClientError, DeadlineExceeded, HandshakeRefused, KvRelayError, Overloaded

_NOT_OF_NODES = ClientError | Overloaded | HandshakeRefused | AdapterMissing

FAILURES, SUCCESSES = 3, 2
"""Consecutive failures that open a breaker, and consecutive successes that close a half-open one."""
_OPEN_S, MAX_OPEN_S = 5.0, 60.0
"""How long a breaker stays open at first, and at most."""
PROBE_EVERY_S = 1.0
"""Least time between two attempts at a half-open node."""
_BURST_S = 0.25
"""Failures within this time of the last counted one belong to the same event."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass
class BreakerView:
    """One node's breaker, for metrics and operators."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    """Consecutive failures."""
    opened: int = 0
    """Times that it opened since it was last closed."""
    reason: str = ""
    """Reason of the last failure."""


@dataclass
class _Breaker(BreakerView):
    successes: int = 0
    opened_s: float = 0.0
    failed_s: float = float("-inf")
    probed_s: float = float("-inf")


class Breakers:
    """The breakers of all nodes, by incarnation. Nodes without failures take no memory."""

    def __init__(self, *, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}
        self.times_opened = 0
        """Number of times that any node's breaker opened since the router started."""

    def failed(self, incarnation: str, error: KvRelayError) -> None:
        """This node caused an attempt to end. Errors in `_NOT_OF_NODES` and the request's own deadline do not count."""
        if isinstance(error, _NOT_OF_NODES) or error.code == DeadlineExceeded.code:  # a transfer's own deadline counts
            return
        breaker = self._breakers.setdefault(incarnation, _Breaker())
        now = self._clock()
        breaker.reason = error.message[:200]
        if now - breaker.failed_s < _BURST_S:
            return
        breaker.failed_s, breaker.successes = now, 0
        breaker.failures += 1
        half_open = self._state(breaker, now) is BreakerState.HALF_OPEN
        if half_open or (breaker.state is BreakerState.CLOSED and breaker.failures >= FAILURES):
            breaker.state, breaker.opened_s = BreakerState.OPEN, now
            breaker.opened += 1
            self.times_opened += 1

    def succeeded(self, incarnation: str) -> None:
        """An attempt got its first tokens from this node."""
        breaker = self._breakers.get(incarnation)
        if breaker is None:
            return
        if self._state(breaker, self._clock()) is BreakerState.CLOSED:
            del self._breakers[incarnation]
        elif breaker.state is BreakerState.HALF_OPEN:
            breaker.successes += 1
            if breaker.successes >= SUCCESSES:
                del self._breakers[incarnation]

    def chosen(self, incarnation: str) -> None:
        """An attempt goes to this node; a half-open node then gets no other attempt for `PROBE_EVERY_S`."""
        breaker = self._breakers.get(incarnation)
        if breaker is not None:
            breaker.probed_s = self._clock()

    def not_admitted(self) -> frozenset[str]:
        """The incarnations that should get no new requests now."""
        if not self._breakers:
            return frozenset()
        now = self._clock()
        return frozenset(name for name, breaker in self._breakers.items() if not self._admits(breaker, now))

    def keep(self, incarnations: Set[str]) -> None:
        """Forget all other nodes: they are gone."""
        for incarnation in self._breakers.keys() - incarnations:
            del self._breakers[incarnation]

    def view(self, incarnation: str) -> BreakerView:
        """The state of one node's breaker."""
        breaker = self._breakers.get(incarnation, _Breaker())
        state = self._state(breaker, self._clock())
        return BreakerView(state, breaker.failures, breaker.opened, breaker.reason)

    def _admits(self, breaker: _Breaker, now: float) -> bool:
        state = self._state(breaker, now)
        probes = state is BreakerState.HALF_OPEN and now - breaker.probed_s >= PROBE_EVERY_S
        return probes or state is BreakerState.CLOSED

    def _state(self, breaker: _Breaker, now: float) -> BreakerState:
        """The current state: an open breaker becomes half-open once its time has passed."""
        if breaker.state is BreakerState.OPEN:
            open_s = min(MAX_OPEN_S, _OPEN_S * 2 ** min(breaker.opened - 1, 16))
            if now - breaker.opened_s >= open_s:
                breaker.state, breaker.successes = BreakerState.HALF_OPEN, 0
                breaker.probed_s = float("-inf")
        return breaker.state

"""Which running sequences give their blocks to another one. Pure.

A sequence keeps its blocks until its steps in flight end, because they still write to them; until then it yields. Steps of
another micro-batch take longer to end.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.control.messages import AttemptKey
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState

Running = dict[AttemptKey, Sequence]
"""The running sequences by priority, then oldest first."""


def victim_of_growth(seq: Sequence, running: Running) -> Sequence:
    """The sequence whose blocks a running one gets, perhaps itself: the last one with blocks on the same data-parallel rank. In
    flight in another micro-batch, only one of a lower priority.
    """
    return next(
        other
        for other in reversed(running.values())
        if other.blocks.home == seq.blocks.home
        and (
            other.microbatch == seq.microbatch
            or not other.progress.in_flight
            or other.request.priority > seq.request.priority
        )
    )


def may_give_way(running: Running, microbatch: int, home: int | None) -> Iterator[Sequence]:
    """The sequences that may be preempted for one of another tenant, the last first: of `microbatch`, or not in flight. `home`: only
    those with blocks on this data-parallel rank."""
    for seq in reversed(running.values()):
        is_free = home in (None, seq.blocks.home) and (seq.microbatch == microbatch or not seq.progress.in_flight)
        if is_free and seq.state in (SequenceState.RUNNING, SequenceState.YIELDING) and not seq.relays:
            yield seq


class Yielding:
    """For each micro-batch the running sequences that yield to one of its sequences, until it is scheduled again."""

    def __init__(self, num_microbatches: int) -> None:
        self._to: list[set[Sequence]] = [set() for _ in range(num_microbatches)]

    def __contains__(self, seq: object) -> bool:
        return any(seq in each for each in self._to)

    def begin(self, seq: Sequence, microbatch: int) -> None:
        """Have a running sequence yield to `microbatch`."""
        if seq.state is SequenceState.RUNNING:
            seq.enter(SequenceState.YIELDING, f"to micro-batch {microbatch}")
        self._to[microbatch].add(seq)

    def end(self, microbatch: int) -> None:
        """Have the sequences that yielded to `microbatch` run again, unless they also yield to another one."""
        yielded, self._to[microbatch] = self._to[microbatch], set()
        for seq in yielded:
            if seq.state is SequenceState.YIELDING and seq not in self:
                seq.enter(SequenceState.RUNNING, f"micro-batch {microbatch} is scheduled")

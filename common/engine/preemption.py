"""Which running sequences give their blocks to another one. Pure.

A sequence in flight gives its blocks only when its steps are done, which still write to them; until then it yields. Steps of
another group take longer to come to an end.
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
    flight in another group, only one of a lower priority.
    """
    return next(
        other
        for other in reversed(running.values())
        if other.blocks.home == seq.blocks.home
        and (other.group == seq.group or not other.progress.in_flight or other.request.priority > seq.request.priority)
    )


def may_give_way(running: Running, group: int) -> Iterator[Sequence]:
    """The sequences that may be preempted for one of another tenant, the last first: of `group`, or not in flight."""
    for seq in reversed(running.values()):
        is_free = seq.group == group or not seq.progress.in_flight
        if is_free and seq.state in (SequenceState.RUNNING, SequenceState.YIELDING) and not seq.relays:
            yield seq


class Yielding:
    """By group of the running sequences, those that yield to a sequence of that group, until the group is scheduled again."""

    def __init__(self, num_groups: int) -> None:
        self._to: list[set[Sequence]] = [set() for _ in range(num_groups)]

    def __contains__(self, seq: object) -> bool:
        return any(seq in each for each in self._to)

    def begin(self, seq: Sequence, group: int) -> None:
        """A running sequence yields to `group`."""
        if seq.state is SequenceState.RUNNING:
            seq.enter(SequenceState.YIELDING, f"to group {group}")
        self._to[group].add(seq)

    def end(self, group: int) -> None:
        """The sequences that yielded to `group` run again, unless they also yield to another one."""
        yielded, self._to[group] = self._to[group], set()
        for seq in yielded:
            if seq.state is SequenceState.YIELDING and seq not in self:
                seq.enter(SequenceState.RUNNING, f"group {group} is scheduled")

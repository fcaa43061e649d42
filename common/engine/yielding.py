"""Sequences that get no rows until they can give their blocks away: their steps in flight still write to them. Pure."""

from __future__ import annotations

from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState


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

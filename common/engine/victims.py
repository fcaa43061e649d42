"""Which running sequences may be preempted for another one. Pure functions.

A sequence in flight gives its blocks only when its steps are done, and steps of another group take longer to come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.control.messages import AttemptKey
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState

Running = dict[AttemptKey, Sequence]
"""The running sequences by priority, then oldest first."""


def victim_of_growth(seq: Sequence, running: Running) -> Sequence:
    """The sequence whose blocks a running one gets, perhaps itself: the last one. In flight in another group, only one of a lower
    priority.
    """
    return next(
        other
        for other in reversed(running.values())
        if other.group == seq.group or not other.progress.in_flight or other.request.priority > seq.request.priority
    )


def may_give_way(running: Running, group: int) -> Iterator[Sequence]:
    """The sequences that may be preempted for one of another tenant, the last first: of `group`, or not in flight."""
    for seq in reversed(running.values()):
        is_free = seq.group == group or not seq.progress.in_flight
        if is_free and seq.state in (SequenceState.RUNNING, SequenceState.YIELDING) and not seq.relays:
            yield seq

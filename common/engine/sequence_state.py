"""The states of a sequence and the changes between them. Only its node and its scheduler change the state. Pure."""

from __future__ import annotations

from enum import StrEnum


class SequenceState(StrEnum):
    """What a sequence waits for, or what happens to it. Each value is also what operators read."""

    ACCEPTED = "accepted"
    """Not in the scheduler. A sequence whose KV another node sends waits here for the offer, and for room."""
    AWAITING_ADAPTER = "waiting for an adapter"
    AWAITING_GRAMMAR = "waiting for a grammar"
    WAITING = "waiting"
    """In the scheduler's queue for a sequence slot and blocks; it is new, or was preempted."""
    RESERVED = "waiting for remote KV"
    """It has blocks, which another node fills. Its grammar may arrive later than its KV."""
    RUNNING = "running"
    YIELDING = "yielding"
    """It gets no rows, and gives its blocks to another sequence once its steps in flight are done."""
    HELD = "held"
    """It has ended, and a transfer may still read its blocks: until `Scheduler.free`."""
    ENDING = "ending"
    """It has ended, and leaves with its blocks after the last of its steps in flight, which still write to them."""
    ENDED = "ended"
    """It holds nothing."""


_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.ACCEPTED: frozenset({_S.AWAITING_ADAPTER, _S.AWAITING_GRAMMAR, _S.WAITING, _S.RESERVED, _S.ENDED}),
    _S.AWAITING_ADAPTER: frozenset({_S.ACCEPTED, _S.ENDED}),
    # To AWAITING_ADAPTER if its adapter was evicted meanwhile; to RESERVED if KV is granted while the grammar compiles.
    _S.AWAITING_GRAMMAR: frozenset({_S.ACCEPTED, _S.AWAITING_ADAPTER, _S.RESERVED, _S.ENDED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.ENDED}),
    _S.RESERVED: frozenset({_S.RUNNING, _S.ENDED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.YIELDING, _S.HELD, _S.ENDING, _S.ENDED}),  # to WAITING: preempted
    _S.YIELDING: frozenset({_S.RUNNING, _S.WAITING, _S.HELD, _S.ENDING, _S.ENDED}),
    _S.HELD: frozenset({_S.ENDING, _S.ENDED}),
    _S.ENDING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}
"""The states that may follow each state. `Sequence.enter` looks them up."""

END_IGNORED = {
    _S.HELD: "it ended with its first token; only its transfer fails or is aborted now",
    _S.ENDING: "it was aborted while a step was in flight, and the step has failed since",
    _S.ENDED: "its step failed or it drew its last token, and its owner hears of it now",
}
"""The states in which `Scheduler.end` changes nothing, and why it is called then."""

"""Asserts that a scheduler's sequences are in the right containers and hold what they need. Pure; used by tests, and when idle."""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.kv_allocator import KVAllocator
from common.engine.preemption import Yielding
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState


def check_running(running: Iterable[Sequence], yielding: Yielding, allocator: KVAllocator) -> None:
    """running: with those that have ended and are in a step in flight."""
    for seq in running:
        ended = seq.state in (SequenceState.HELD, SequenceState.ENDING)
        runs = seq.state in (SequenceState.RUNNING, SequenceState.YIELDING)
        assert ended or runs, f"{seq.key} runs and is {seq.state}"
        assert seq.progress.in_flight or not ended, f"{seq.key} has ended, is in no step, and runs"
        assert (seq.state is not SequenceState.YIELDING) or seq in yielding, f"{seq.key} yields to no group"
        allocator.check_integrity(seq, next_row=seq.progress.num_computed)


def check_reserved(reserved: Iterable[Sequence], allocator: KVAllocator) -> None:
    for seq in reserved:
        assert seq.state is SequenceState.RESERVED, f"{seq.key} is reserved and is {seq.state}"
        allocator.check_integrity(seq, next_row=seq.num_tokens)


def check_waiting(waiting: Iterable[Sequence]) -> None:
    for seq in waiting:
        assert seq.state is SequenceState.WAITING, f"{seq.key} waits and is {seq.state}"
        assert not seq.blocks.tables, f"{seq.key} waits and holds blocks"

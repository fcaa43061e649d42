"""Changes of a sequence's state."""

from __future__ import annotations

import pytest

from common.base.errors import InvalidTransition
from common.base.hashing import root_hash
from common.base.variables import STRICT_STATES
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.sequence import Sequence
from common.engine.sequence_state import END_IGNORED, TRANSITIONS, SequenceState


def a_sequence() -> Sequence:
    request = EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=9))
    return Sequence(AttemptKey("r", 1), request, [1, 2, 3], root_hash("m"), 0.0)


def test_a_change_that_the_table_does_not_have_raises_with_the_story() -> None:
    seq = a_sequence()
    seq.enter(SequenceState.WAITING, "queued")
    with pytest.raises(
        InvalidTransition,
        match=r"waiting -> waiting for remote KV.*: waiting \(queued\); waiting for remote KV \(why\)",
    ):
        seq.enter(SequenceState.RESERVED, "why")


def test_in_production_it_is_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(STRICT_STATES)
    seq = a_sequence()
    seq.enter(SequenceState.YIELDING, "a bug")
    assert seq.state is SequenceState.YIELDING
    assert "accepted -> yielding" in caplog.text


def test_the_story_keeps_the_latest_changes() -> None:
    seq = a_sequence()
    seq.enter(SequenceState.WAITING, "queued")
    for number in range(100):
        seq.enter(SequenceState.RUNNING, f"admitted {number}")
        seq.enter(SequenceState.WAITING, "preempted")
    assert len(seq.story) == 16
    assert seq.story[-2] == (SequenceState.RUNNING, "admitted 99")


def test_every_state_can_end_and_only_the_last_one_stays() -> None:
    assert set(TRANSITIONS) == set(SequenceState)
    for state in SequenceState:
        reached, found = {state}, {state}
        while found := {after for each in found for after in TRANSITIONS[each]} - reached:
            reached |= found
        assert SequenceState.ENDED in reached, state
    assert [state for state, after in TRANSITIONS.items() if not after] == [SequenceState.ENDED]
    assert all(TRANSITIONS[state] <= set(END_IGNORED) for state in END_IGNORED), "nothing that has ended goes on"

"""Rests between a decode node's steps while prefill nodes compute on the same cores."""

from __future__ import annotations

import pytest
from support.fake_engine import generate
from support.node_pair import KEY, P_REF, PROMPT, ROUTER, Pair

from common.control.identities import pack_ids
from common.control.messages import Abort, AttemptKey, DecodeRequest, EngineRequest, SamplingParams
from common.engine.step import StepInput, StepOutput
from common.node.events import FromClient
from decode_node.node import Phase
from decode_node.pacing import rest_s

STEP_S = 0.01
LATER = AttemptKey("later", 1)


def one_runs(monkeypatch: pytest.MonkeyPatch, d_blocks: int) -> Pair:
    """One stream runs, with steps of `STEP_S`."""
    pair = Pair(shared_cores=True, d_blocks=d_blocks)
    execute = pair.d_runner.execute

    def slow(step: StepInput, on_layer: None = None) -> StepOutput:
        pair.clock.advance(STEP_S)
        return execute(step, on_layer)

    monkeypatch.setattr(pair.d_runner, "execute", slow)
    pair.request(max_tokens=20)
    while pair.d.attempts[KEY].phase is not Phase.ACTIVE:
        pair.run(1)
    return pair


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """One stream runs; the prompt of `LATER` is computed elsewhere."""
    pair = one_runs(monkeypatch, d_blocks=32)
    announce(pair, LATER)
    pair.step_decode()
    return pair


def announce(pair: Pair, key: AttemptKey) -> None:
    """The router's request of a stream whose prompt is computed elsewhere."""
    request = EngineRequest(pack_ids(PROMPT), SamplingParams(seed=0, max_tokens=5, temperature=0.0))
    pair.d.handle(FromClient(ROUTER, DecodeRequest(key, request, pack_ids(), P_REF, 600.0)))


def test_a_step_waits_for_the_end_of_the_rest(pair: Pair) -> None:
    assert pair.d.rests_until_s > pair.clock()
    steps = pair.d_runner.steps
    assert not pair.d.step()
    pair.clock.now_s = pair.d.rests_until_s
    assert pair.d.step()
    assert pair.d_runner.steps == steps + 1


def test_a_prompt_of_its_own_ends_the_rest(pair: Pair) -> None:
    assert pair.d.rests_until_s > pair.clock()
    request = EngineRequest(pack_ids(PROMPT), SamplingParams(seed=0, max_tokens=5, temperature=0.0))
    pair.d.handle(FromClient(ROUTER, DecodeRequest(AttemptKey("own", 1), request, pack_ids(), None, 600.0)))
    assert pair.d.step()


def test_nothing_rests_once_nobody_is_to_come(pair: Pair) -> None:
    pair.d.handle(FromClient(ROUTER, Abort(LATER)))
    pair.clock.now_s = pair.d.rests_until_s
    pair.run()
    assert pair.tokens() == generate(PROMPT, 20)
    assert pair.d.rests_until_s < pair.clock()


def test_nothing_rests_for_streams_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = one_runs(monkeypatch, d_blocks=4)
    pair.request(LATER, prompt=[1, *PROMPT])
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    assert pair.d.scheduler.next_reserved is pair.d.attempts[LATER].seq
    assert pair.d.rests_until_s > pair.clock(), "its prompt is computed, with room or without"
    while pair.d.attempts[LATER].first_token is None:
        pair.step_prefill()
        pair.to_decode()
    announce(pair, AttemptKey("behind", 1))
    pair.clock.now_s = pair.d.rests_until_s
    assert pair.d.step()
    assert pair.d.rests_until_s < pair.clock()


def test_nothing_rests_for_a_stream_that_has_ended_while_its_slices_may_still_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = one_runs(monkeypatch, d_blocks=32)
    pair.request(LATER, prompt=[1, *PROMPT])
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    assert pair.d.attempts[LATER].phase is Phase.RECEIVING
    assert pair.d.rests_until_s > pair.clock()
    monkeypatch.setattr(pair.wire.receiver, "abort", lambda _: None)  # a slice is being written
    pair.d.handle(FromClient(ROUTER, Abort(LATER)))
    assert pair.d.attempts[LATER].phase is Phase.DRAINING
    pair.clock.now_s = pair.d.rests_until_s
    assert pair.d.step()
    assert pair.d.rests_until_s < pair.clock()


@pytest.mark.parametrize(
    ("running", "coming", "low", "high"), [(8, 1, 0.0, 0.01), (8, 8, 0.01, 0.1), (1, 15, 0.1, 0.1)]
)
def test_the_fewer_run_the_longer_they_rest(running: int, coming: int, low: float, high: float) -> None:
    assert low <= rest_s(0.02, running, coming) <= high

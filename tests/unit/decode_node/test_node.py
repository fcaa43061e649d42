"""Single behaviours of the decode node's core beside a prefill node's, with a fake model and a fake wire.

Random interleavings are in tests/property/test_two_nodes.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fake_engine import generate
from support.node_pair import D_REF, KEY, LAYOUT, P_LINK, P_REF, PROMPT, ROUTER, Pair

from common.base.errors import TransferAborted
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Message,
    Offer,
    PrefillDone,
    PrefillRequest,
    SamplingParams,
    TransferAbort,
)
from common.engine.kv_transfer import DestinationReleased, ReceiveFailed
from common.engine.step import SampledToken, StepInput, StepOutput
from common.kv.spec import KVSpec
from common.node.events import ClientLost, FromClient, ToClient, ToPeer
from decode_node.node import Phase


def test_second_request_relays_only_the_blocks_that_the_decode_node_lacks() -> None:
    pair = Pair()
    pair.request()
    pair.run()
    assert pair.wire.blocks_moved == 3
    again = AttemptKey("r2", 1)
    pair.request(again, [*PROMPT, *range(500, 520)])
    pair.run()
    assert pair.wire.blocks_moved == 3 + 2, "two of four blocks are the decode node's already"
    assert pair.tokens(again) == generate([*PROMPT, *range(500, 520)], 5)
    pair.assert_whole()


def test_generated_blocks_are_cached_on_the_decode_node() -> None:
    pair = Pair()
    pair.request(max_tokens=30)
    pair.run()
    answer = generate(PROMPT, 30)
    follow_up = [*PROMPT, *answer, 7, 8, 9]
    pair.request(AttemptKey("r2", 1), follow_up)
    pair.run()
    # 40 + 30 tokens: 69 have KV, so 4 full blocks are held; the 5th is not.
    assert pair.wire.blocks_moved == 3 + 1
    assert pair.tokens(AttemptKey("r2", 1)) == generate(follow_up, 5)


def test_request_that_ends_with_its_first_token_never_touches_the_decode_batch() -> None:
    pair = Pair()
    pair.request(max_tokens=1)
    pair.run()
    assert pair.tokens() == generate(PROMPT, 1)
    assert pair.d_runner.steps == 0
    pair.assert_whole()


def test_offer_that_outruns_the_routers_message_waits_for_it() -> None:
    pair = Pair()
    params = SamplingParams(seed=0, max_tokens=3, temperature=0.0)
    pair.p.handle(
        FromClient(ROUTER, PrefillRequest(KEY, EngineRequest(pack_ids(PROMPT), params), pack_ids(), D_REF, 600.0))
    )
    pair.step_prefill()
    pair.to_decode()
    assert not pair.d.attempts
    pair.d.handle(
        FromClient(ROUTER, DecodeRequest(KEY, EngineRequest(pack_ids(PROMPT), params), pack_ids(), P_REF, 600.0))
    )
    pair.run()
    assert pair.tokens() == generate(PROMPT, 3)
    pair.assert_whole()


def test_offer_nobody_asked_for_is_refused_after_a_while_and_frees_the_prefill_node() -> None:
    pair = Pair()
    params = SamplingParams(seed=0, max_tokens=3, temperature=0.0)
    pair.p.handle(
        FromClient(ROUTER, PrefillRequest(KEY, EngineRequest(pack_ids(PROMPT), params), pack_ids(), D_REF, 600.0))
    )
    pair.step_prefill()
    pair.to_decode()
    pair.clock.advance(4.0)
    pair.d.on_time(pair.clock())
    assert [type(message) for message in pair.to_prefill()] == [TransferAbort]
    pair.assert_whole()


def test_grant_waits_for_room_and_the_prefill_node_goes_on_meanwhile() -> None:
    pair = Pair(d_blocks=8)
    pair.request(max_tokens=60)  # 7 blocks in the end
    second = AttemptKey("r2", 1)
    pair.request(second, list(range(100, 180)), max_tokens=20)  # 5 blocks of prompt
    for _ in range(12):
        pair.step_prefill()
        pair.to_decode()
        pair.step_decode()
        pair.to_prefill()
        while pair.wire.pump():
            pass
    assert pair.d.attempts[second].phase is Phase.DEFERRED
    assert pair.tokens(second) == generate(list(range(100, 180)), 1), "the first token did not wait for room"
    pair.run(200)
    assert pair.tokens() == generate(PROMPT, 60)
    assert pair.tokens(second) == generate(list(range(100, 180)), 20)
    pair.assert_whole()


@pytest.mark.parametrize("long_is_local", [False, True])
def test_a_long_prompt_gets_its_turn_however_many_short_ones_come_the_other_way(*, long_is_local: bool) -> None:
    """Short ones that always leave too little room for it: those that came later wait behind it."""
    pair = Pair(d_blocks=8, chunk=128)
    pair.p.max_accepted = pair.d.max_accepted = 100
    long = list(range(200, 300))  # 7 of the 8 blocks

    def request(name: str, prompt: list[int], *, local: bool) -> None:
        if not local:
            pair.request(AttemptKey(name, 1), prompt, 10)
            return
        params = SamplingParams(seed=0, max_tokens=10, temperature=0.0)
        asked = DecodeRequest(AttemptKey(name, 1), EngineRequest(pack_ids(prompt), params), pack_ids(), None, 600.0)
        pair.d.handle(FromClient(ROUTER, asked))

    for turn in range(100):
        if turn == 20:
            request("long", long, local=long_is_local)
        if turn % 5 == 0:
            request(f"short{turn}", list(range(turn, turn + 30)), local=not long_is_local)
        pair.clock.advance(0.01)
        pair.run(1)
    assert pair.tokens(AttemptKey("long", 1)) == generate(long, 10)
    pair.run(300)
    assert pair.tokens(AttemptKey("short95", 1)) == generate(list(range(95, 125)), 10)
    pair.assert_whole()


def test_request_that_can_never_fit_is_refused_at_once_with_the_sizes() -> None:
    pair = Pair(d_blocks=4)
    pair.request(max_tokens=100)
    pair.d.send_buffer.flush()
    [failure] = pair.heard(pair.d_out)
    assert isinstance(failure, AttemptFailed)
    assert "9 KV blocks" in failure.message
    assert "has 4" in failure.message


def test_duplicate_attempt_does_not_disturb_the_first() -> None:
    pair = Pair()
    pair.request()
    pair.request()
    pair.run()
    assert pair.tokens() == generate(PROMPT, 5)
    pair.assert_whole()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"spec": KVSpec.uniform(1, 1, 1, "bfloat16")},
            "dtype differs: prefill node has 'float32', decode node has 'bfloat16'",
        ),
        ({"fingerprint": "other"}, "fingerprint differs: prefill node has 'fake', decode node has 'other'"),
        (
            {"spec": KVSpec.uniform(1, 1, 1, "float32", block_size=32)},
            "block_size differs: prefill node has 16, decode node has 32",
        ),
        (
            {"spec": KVSpec.uniform(1, 1, 2, "float32")},
            "planes differs: prefill node has [('k', 1), ('v', 1)], decode node has [('k', 2), ('v', 2)]",
        ),
    ],
)
def test_incompatible_nodes_refuse_each_other_naming_both_values(changed: dict[str, object], named: str) -> None:
    pair = Pair(d_layout=replace(LAYOUT, **changed))  # type: ignore[arg-type]
    pair.request()
    pair.run()
    messages = [m.message for m in pair.heard(pair.d_out) if isinstance(m, AttemptFailed)]
    assert any(named in message for message in messages)
    pair.assert_whole()


def test_offer_of_another_incarnation_than_the_router_chose_is_refused() -> None:
    pair = Pair()
    pair.request()
    pair.step_prefill()
    [offer] = [o.message for o in pair.p_out if isinstance(o, ToPeer)]
    assert isinstance(offer, Offer)
    pair.d.handle(FromClient(P_LINK, replace(offer, src=replace(P_REF, incarnation="p0"))))
    pair.d.send_buffer.flush()
    [failure] = [m for m in pair.heard(pair.d_out) if isinstance(m, AttemptFailed)]
    assert failure.code == "peer_lost"


def test_silent_routers_attempts_end_on_both_legs_and_it_is_told() -> None:
    pair = Pair()
    pair.request(max_tokens=50)
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    pair.p.handle(ClientLost(ROUTER))
    pair.d.handle(ClientLost(ROUTER))
    pair.p.send_buffer.flush()
    pair.d.send_buffer.flush()
    for out in (pair.p_out, pair.d_out):  # it may have been held up only: silence would leave its client waiting
        assert [m.code for m in pair.heard(out) if isinstance(m, AttemptFailed)] == ["unavailable"]
    pair.assert_whole()


@pytest.mark.parametrize("phase", [Phase.DEFERRED, Phase.RECEIVING, Phase.ARRIVED])
def test_prefill_node_silent_past_its_lease_fails_what_still_waits_for_it(phase: Phase) -> None:
    """A cut link: every slice may have been handed to the wire, so that the prefill node itself misses nothing."""
    pair = Pair()
    if phase is Phase.DEFERRED:
        pair.d.scheduler.pool.allocate(pair.d.scheduler.pool.num_blocks)
    pair.request()
    for _ in range(3):
        pair.step_prefill()
    pair.to_decode(Offer)
    pair.step_decode()
    if phase is Phase.ARRIVED:
        pair.to_prefill()
        while pair.wire.pump():
            pass
    assert pair.d.attempts[KEY].phase is phase
    pair.d.handle(ClientLost(P_LINK))
    pair.d.send_buffer.flush()
    [failure] = [m for m in pair.heard(pair.d_out) if isinstance(m, AttemptFailed)]
    assert failure.code == "peer_lost"
    while pair.wire.pump():
        pass
    assert not pair.d.attempts


def test_prefill_node_lost_after_the_hand_over_changes_nothing() -> None:
    pair = Pair()
    pair.request(max_tokens=5)
    for _ in range(3):
        pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    pair.to_prefill()
    while pair.wire.pump():
        pass
    assert pair.d.attempts[KEY].phase is Phase.ACTIVE
    pair.d.handle(ClientLost(P_LINK))
    pair.run()
    assert pair.tokens() == generate(PROMPT, 5)
    pair.assert_whole()


@pytest.mark.parametrize("node", ["p_runner", "d_runner"])
def test_a_sequence_without_a_token_ends_alone(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt at which the model computes a NaN must not take those with it that run in the same steps."""
    pair = Pair()
    runner = getattr(pair, node)
    execute = runner.execute

    def poisoned(step: StepInput, *args: Any) -> StepOutput:
        output = execute(step, *args)
        drawn = [
            SampledToken(-1, error="nan") if step.token_ids[row] in bad else token
            for token, row in zip(
                output.sampled, (sum(step.query_lens[: s.seq_index + 1]) - 1 for s in step.samples), strict=True
            )
        ]
        return replace(output, sampled=drawn)

    other = AttemptKey("r2", 1)
    poison = [*PROMPT[:-1], 7]
    bad = {7} if node == "p_runner" else set(generate(poison, 3)[1:]) - set(generate(PROMPT, 5))
    assert bad
    monkeypatch.setattr(runner, "execute", poisoned)
    pair.request(KEY, poison)
    pair.request(other)
    pair.run()
    failures = {
        (m.key, m.code) for m in pair.heard(pair.p_out) + pair.heard(pair.d_out) if isinstance(m, AttemptFailed)
    }
    assert failures == {(KEY, "no_finite_logits")}
    assert pair.tokens(other) == generate(PROMPT, 5)
    pair.assert_whole()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("why", ["whole answer", "gave up", "lost", "never said"])
def test_blocks_taken_back_are_no_failure_before_the_prefill_node_says_why(
    why: str, monkeypatch: pytest.MonkeyPatch, *, released: bool
) -> None:
    """It takes lent blocks back as soon as the first token is the last; the news of that takes the slower way."""
    pair = Pair()
    pair.request(max_tokens=50)
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    assert pair.d.attempts[KEY].phase is Phase.RECEIVING
    if not released:
        monkeypatch.setattr(pair.wire.receiver, "abort", lambda key: None)
    pair.d.handle(ReceiveFailed(KEY, TransferAborted("its sender took the blocks back")))
    assert (pair.d.scheduler.pool.num_used == 0) == released
    pair.d.send_buffer.flush()
    assert not pair.heard(pair.d_out)
    if why == "whole answer":
        pair.d.handle(FromClient(P_LINK, PrefillDone(KEY, 1, "stop")))
    elif why == "gave up":
        pair.d.handle(FromClient(P_LINK, TransferAbort(KEY, "peer_lost", "")))
    elif why == "lost":
        pair.d.handle(ClientLost(P_LINK))
    else:
        pair.clock.advance(4.0)
        pair.d.on_time(pair.clock())
        pair.d.on_time(pair.clock())
    pair.d.send_buffer.flush()
    told = [m.code for m in pair.heard(pair.d_out) if isinstance(m, AttemptFailed)]
    assert told == {"lost": ["peer_lost"], "never said": ["transfer_aborted"]}.get(why, [])
    if not released:
        assert pair.d.scheduler.pool.num_used == 3, "a copy may still be under way"
        pair.d.handle(DestinationReleased(KEY))
    assert not pair.d.attempts
    assert pair.d.scheduler.pool.num_used == 0


@pytest.mark.parametrize("end", [Abort(KEY), PrefillDone(KEY, 1, "stop"), TransferAbort(KEY, "peer_lost", "")])
def test_a_transfer_that_was_given_up_does_not_fail_any_more(end: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ended the attempt ended it on both nodes: the receiver may miss blocks before it hears of the end."""
    pair = Pair()
    pair.request(max_tokens=50)
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    monkeypatch.setattr(pair.wire.receiver, "abort", lambda key: None)
    pair.d.handle(FromClient(P_LINK, end))
    pair.d.handle(ReceiveFailed(KEY, TransferAborted("its sender took the blocks back")))
    pair.d.handle(DestinationReleased(KEY))
    pair.d.on_time(pair.clock())
    assert pair.d.load.transfers_failed == 0
    assert not pair.d.attempts
    assert pair.d.scheduler.pool.num_used == 0


def test_later_attempt_continues_after_the_tokens_of_the_first() -> None:
    pair = Pair()
    answer = generate(PROMPT, 10)
    asked = EngineRequest(pack_ids(PROMPT), SamplingParams(seed=0, max_tokens=10, temperature=0.0))
    second = AttemptKey("r", 2)
    pair.d.handle(FromClient(ROUTER, DecodeRequest(second, asked, pack_ids(answer[:4]), P_REF, 600.0)))
    pair.p.handle(FromClient(ROUTER, PrefillRequest(second, asked, pack_ids(answer[:4]), D_REF, 600.0)))
    pair.run()
    assert pair.tokens(second) == answer[4:], "max_tokens counts over all attempts"
    pair.assert_whole()


def test_prefill_done_before_the_kv_waits_for_it() -> None:
    pair = Pair()
    pair.request(max_tokens=3)
    for _ in range(3):
        pair.step_prefill()
    assert [type(m) for m in pair.to_decode(PrefillDone)] == [PrefillDone]
    assert pair.d.attempts[KEY].phase is Phase.NO_OFFER
    pair.run()
    assert pair.tokens() == generate(PROMPT, 3)


def test_requests_time_out_silently_and_free_everything() -> None:
    pair = Pair()
    pair.request(max_tokens=100)
    pair.step_prefill()
    pair.to_decode()
    pair.step_decode()
    pair.clock.advance(601.0)
    pair.p.on_time(pair.clock())
    pair.d.on_time(pair.clock())
    pair.assert_whole()


def test_a_step_that_fails_on_the_decode_node_ends_its_attempts_once_and_bothers_no_prefill_node() -> None:
    pair = Pair()
    pair.request(max_tokens=30)
    for _ in range(10):
        if pair.d.attempts[KEY].phase is not Phase.ACTIVE:
            pair.run(rounds=1)
    pair.to_prefill()
    pair.d_runner.fail_next = RuntimeError("made to fail")
    pair.d.step()
    pair.d.send_buffer.flush()
    (told,) = pair.d_out
    assert isinstance(told, ToClient)
    assert (told.identity, told.message) == (
        ROUTER,
        AttemptFailed(KEY, "engine_error", "the step failed: made to fail"),
    )
    assert not pair.d.attempts
    pair.run()
    pair.assert_whole()

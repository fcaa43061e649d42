"""Single behaviours of the prefill node's core beside a decode node's, with a fake model and a fake wire.

Random interleavings are in tests/property/test_two_nodes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_engine import generate, scored_prompt
from support.node_pair import D_REF, KEY, LAYOUT, PROMPT, ROUTER, Pair

from common.base.errors import PeerLost, TransferAborted, TransferTimedOut
from common.control.identities import pack_ids
from common.control.messages import (
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Grant,
    Offer,
    SamplingParams,
    TokenBatch,
    TokenChunk,
    TransferAbort,
    TransferReceived,
)
from common.engine.kv_transfer import SourceReleased
from common.node.events import ClientLost, FromClient, FromPeer, PeerGone


def test_first_token_goes_to_the_router_though_no_grant_ever_came() -> None:
    pair = Pair()
    pair.request()
    for _ in range(3):
        pair.step_prefill()
    assert pair.tokens() == generate(PROMPT, 1)
    assert not pair.wire.grants


def test_offer_is_sent_before_the_first_step_computes() -> None:
    pair = Pair()
    pair.p_runner.fail_next = RuntimeError("the step must come after the offer")
    pair.request()
    pair.step_prefill()
    assert isinstance(pair.p_out[0].message, Offer)


def test_prompt_that_the_decode_node_holds_whole_is_still_computed_to_its_first_token() -> None:
    pair = Pair(chunk=16)
    prompt = list(range(48))
    params = SamplingParams(seed=0, max_tokens=3, temperature=0.0)
    pair.d.handle(
        FromClient(
            ROUTER,
            DecodeRequest(AttemptKey("local", 1), EngineRequest(pack_ids(prompt), params), pack_ids(), None, 600.0),
        )
    )
    pair.run()
    pair.request(prompt=prompt)
    pair.run()
    assert pair.wire.blocks_moved == 0
    assert pair.tokens() == generate(prompt, 5)
    pair.assert_whole()


def test_prefill_node_lets_go_of_what_the_decode_node_has_whole_whatever_became_of_the_acks() -> None:
    pair = Pair()
    pair.request()
    for _ in range(3):
        pair.step_prefill()
    assert KEY in pair.wire.outgoing
    pair.p.handle(FromPeer(D_REF.incarnation, TransferReceived(KEY, 1)))
    assert not pair.p.attempts
    assert pair.p.scheduler.pool.num_used == 0
    assert not [m for m in pair.heard(pair.p_out) if isinstance(m, AttemptFailed)]


@pytest.mark.parametrize("lost_after_the_token", [False, True])
def test_last_slice_may_be_in_before_the_first_token_is_drawn(*, lost_after_the_token: bool) -> None:
    """The last layer is relayed while the token is still being drawn: that it is in is said once, and holds then, too."""
    pair = Pair()
    pair.request()
    for _ in range(2):
        pair.step_prefill()
    pair.p.handle(FromPeer(D_REF.incarnation, TransferReceived(KEY, 1)))
    lost = SourceReleased(KEY, 1, PeerLost("no ack for 30 s"))
    if not lost_after_the_token:
        pair.p.handle(lost)
    pair.step_prefill()
    if lost_after_the_token:
        assert KEY not in pair.p.attempts, "no ack can fail what is done"
    pair.p.send_buffer.flush()
    assert pair.tokens() == generate(PROMPT, 1)
    assert not [m for m in pair.heard(pair.p_out) if isinstance(m, AttemptFailed)]
    assert not pair.p.attempts
    assert pair.p.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    "late",
    [
        PeerGone(D_REF.incarnation, "connection broke"),
        ClientLost(ROUTER),
        FromPeer(D_REF.incarnation, TransferAbort(KEY, "transfer_timed_out", "nothing moved")),
        SourceReleased(KEY, 0, TransferTimedOut("nothing moved")),
    ],
)
def test_answer_that_ended_with_its_first_token_cannot_fail_any_more(
    late: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may be under way when it ends: its blocks come back later, and whatever happens until then."""
    pair = Pair()
    monkeypatch.setattr(pair.wire.sender, "abort", lambda key: None)  # as long as the copy takes
    pair.request(max_tokens=1)
    for _ in range(3):
        pair.step_prefill()
    assert pair.tokens() == generate(PROMPT, 1)
    pair.p.handle(late)
    if not isinstance(late, SourceReleased):
        assert KEY in pair.p.attempts, "its blocks are still being read"
        pair.p.handle(SourceReleased(KEY, 0, TransferAborted("aborted")))
    pair.p.send_buffer.flush()
    assert not [m for m in pair.heard(pair.p_out) if isinstance(m, AttemptFailed)], "it has had its end"
    assert not pair.p.attempts
    assert pair.p.scheduler.pool.num_used == 0


def test_node_that_has_accepted_its_bound_answers_overloaded() -> None:
    pair = Pair()
    for number in range(5):
        pair.request(AttemptKey(f"r{number}", 1))
    pair.p.send_buffer.flush()
    failures = [message for message in pair.heard(pair.p_out) if isinstance(message, AttemptFailed)]
    assert [(failure.key.request_id, failure.code) for failure in failures] == [("r4", "overloaded")]


def test_grant_of_an_older_incarnation_is_ignored() -> None:
    pair = Pair()
    pair.request()
    pair.step_prefill()
    grant = Grant(KEY, replace(D_REF, incarnation="d0"), LAYOUT, [0], [pack_ids([0, 1, 2])])
    pair.p.handle(FromPeer("d0", grant))
    assert not pair.wire.grants


def test_prefill_node_does_not_ask_for_room_for_the_answer() -> None:
    pair = Pair(p_blocks=4)
    pair.request(max_tokens=100)
    pair.run(200)
    assert pair.tokens() == generate(PROMPT, 100)


def test_decode_nodes_death_fails_the_prefill_leg_with_a_retryable_code() -> None:
    pair = Pair()
    pair.request()
    pair.step_prefill()
    pair.p.handle(PeerGone(D_REF.incarnation, "connection broke"))
    pair.p.send_buffer.flush()
    [failure] = [m for m in pair.heard(pair.p_out) if isinstance(m, AttemptFailed)]
    assert failure.code == "peer_lost"
    assert pair.p.scheduler.pool.num_used == 0
    assert pair.wire.disconnected == [D_REF.incarnation], "its data connections are no better"


def test_one_failed_step_fails_its_requests_and_the_node_goes_on() -> None:
    pair = Pair()
    pair.p_runner.fail_next = RuntimeError("made to fail")
    pair.request()
    pair.run()
    assert [m.code for m in pair.heard(pair.p_out) if isinstance(m, AttemptFailed)] == ["engine_error"]
    again = AttemptKey("r2", 1)
    pair.request(again)
    pair.run()
    assert pair.tokens(again) == generate(PROMPT, 5)


def parts(pair: Pair, key: AttemptKey = KEY) -> list[TokenChunk]:
    """The chunks of the prefill node for an attempt."""
    batches = [m for m in pair.heard(pair.p_out) if isinstance(m, TokenBatch)]
    return [chunk for batch in batches for chunk in batch.chunks if chunk.key == key]


def test_prompt_logprobs_come_in_parts_before_the_first_token_from_the_prefill_node_alone() -> None:
    pair = Pair(chunk=16)
    pair.request(prompt_logprobs=1)
    pair.run()
    *scored, token = parts(pair)
    assert [chunk.start for chunk in scored] == [0, 16, 32]
    assert [each for chunk in scored for each in chunk.prompt_logprobs or []] == scored_prompt(PROMPT)
    assert token.token_ids == generate(PROMPT, 1)
    assert pair.tokens() == generate(PROMPT, 5)
    assert not [
        chunk
        for m in pair.heard(pair.d_out)
        if isinstance(m, TokenBatch)
        for chunk in m.chunks
        if chunk.prompt_logprobs
    ]
    pair.assert_whole()


def test_prompt_logprobs_are_computed_in_full_though_the_prefix_is_cached_and_kv_is_shared_as_usual() -> None:
    pair = Pair(chunk=64)
    pair.request()
    pair.run()
    moved = pair.wire.blocks_moved
    again = AttemptKey("r2", 1)
    pair.request(again, prompt_logprobs=0)
    pair.run()
    *scored, token = parts(pair, again)
    assert [each for chunk in scored for each in chunk.prompt_logprobs or []] == scored_prompt(PROMPT)
    assert token.stats is not None
    assert token.stats.cached_tokens == 0
    assert pair.wire.blocks_moved == moved + 1, "only the partial last block: the decode node holds the others"
    pair.assert_whole()


def test_a_prompt_of_one_token_has_no_log_probabilities() -> None:
    pair = Pair(chunk=64)
    pair.request(prompt=PROMPT[:1], prompt_logprobs=3)
    pair.run()
    assert [chunk.prompt_logprobs for chunk in parts(pair)] == [None]
    pair.assert_whole()

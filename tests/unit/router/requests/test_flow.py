"""A request's flow: the cases that one should be able to point at."""

from __future__ import annotations

from common.base.errors import HandshakeRefused, PeerLost, TransferError, Unavailable
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    PeerRef,
    PrefillRequest,
    PromptLogprobs,
    SamplingParams,
    TokenChunk,
)
from router.requests.flow import Flow
from router.requests.flow_events import (
    AwaitNode,
    BackOff,
    Choose,
    Chunk,
    Emit,
    EmitPrompt,
    Fail,
    Finish,
    Found,
    Instructions,
    LegFailed,
    NodeLost,
    NoNode,
    Ready,
    Release,
    Send,
)
from router.requests.placed_request import State

P = PeerRef("p", "inc-p", "tcp://p", [])
D = PeerRef("d", "inc-d", "tcp://d", [])
D2 = PeerRef("d2", "inc-d2", "tcp://d2", [])
FIRST = AttemptKey("r", 1)


def placed_flow(*, max_tokens: int = 5, relayed: bool = True, max_attempts: int = 3) -> Flow:
    flow = Flow(
        "r",
        EngineRequest(pack_ids([1, 2]), SamplingParams(seed=0, max_tokens=max_tokens)),
        max_attempts,
        jitter=lambda: 0.0,
    )
    flow.start()
    flow.handle(Found(P if relayed else None, D, 9.0))
    return flow


def say(peer: PeerRef, start: int, *ids: int, attempt: int = 1, end: bool = False) -> Chunk:
    chunk = TokenChunk(AttemptKey("r", attempt), start, list(ids), finish_reason="length" if end else None)
    return Chunk(peer.incarnation, chunk)


def tokens(instructions: Instructions) -> list[int]:
    return [token for each in instructions if isinstance(each, Emit) for token in each.token_ids]


def retry(blamed: str) -> Choose:
    """The second attempt."""
    return Choose(frozenset({blamed}), begun=True)


def aborted(instructions: Instructions) -> list[str]:
    return [each.peer.node_id for each in instructions if isinstance(each, Send) and isinstance(each.message, Abort)]


def test_both_legs_are_asked_at_once_each_told_of_the_other() -> None:
    flow = Flow("r", EngineRequest(pack_ids([1, 2]), SamplingParams(seed=0, max_tokens=5), "salt"))
    assert flow.start() == [Choose(frozenset(), is_new=True)]
    asked = [each.message for each in flow.handle(Found(P, D, 9.0)) if isinstance(each, Send)]
    assert asked == [
        DecodeRequest(FIRST, flow.request, pack_ids(), P, 9.0),
        PrefillRequest(FIRST, flow.request, pack_ids(), D, 9.0),
    ]


def test_decode_tokens_that_overtake_the_prefill_token_wait_for_it() -> None:
    flow = placed_flow()
    assert flow.handle(say(D, 1, 11, 12)) == []
    assert flow.handle(say(D, 3, 13)) == []
    instructions = flow.handle(say(P, 0, 10))
    assert tokens(instructions) == [10, 11, 12, 13]
    assert Release("inc-p", FIRST) in instructions
    assert flow.state is State.DECODE


def test_overtaking_tokens_that_end_the_request_end_it_with_the_prefill_token() -> None:
    flow = placed_flow(max_tokens=2)
    flow.handle(say(D, 1, 11, end=True))
    instructions = flow.handle(say(P, 0, 10))
    assert tokens(instructions) == [10, 11]
    assert instructions[-1] == Finish("length")
    assert aborted(instructions) == []


def test_tokens_kept_for_an_attempt_that_is_given_up_are_not_mistaken_for_the_next_ones() -> None:
    flow = placed_flow(max_tokens=2)
    flow.handle(say(D, 1, 99, end=True))
    flow.handle(NodeLost("inc-p", "gone"))
    other = PeerRef("p2", "inc-p2", "tcp://p2", [])
    flow.handle(Found(other, D, 9.0))
    assert tokens(flow.handle(say(other, 0, 10, attempt=2))) == [10]
    assert flow.handle(say(D, 1, 11, attempt=2, end=True))[-1] == Finish("length")


def test_first_token_that_ends_the_request_aborts_the_decode_leg() -> None:
    instructions = placed_flow(max_tokens=1).handle(say(P, 0, 10, end=True))
    assert aborted(instructions) == ["d"]
    assert instructions[-1] == Finish("length")


def test_prefill_node_lost_after_its_token_but_before_the_decode_nodes_means_a_new_attempt() -> None:
    flow = placed_flow()
    flow.handle(say(P, 0, 10))
    instructions = flow.handle(NodeLost("inc-p", "gone"))
    assert instructions[-1] == retry("inc-p")
    assert "d" in aborted(instructions)
    sent = flow.handle(Found(None, D, 9.0))
    assert isinstance(sent[1], Send)
    assert isinstance(sent[1].message, DecodeRequest)
    assert sent[1].message.token_ids == pack_ids([1, 2, 10])
    assert sent[1].message.request.prompt_ids == pack_ids([1, 2])


def test_prefill_node_lost_once_the_decode_node_speaks_does_not_matter() -> None:
    flow = placed_flow()
    flow.handle(say(P, 0, 10))
    flow.handle(say(D, 1, 11))
    assert flow.handle(NodeLost("inc-p", "gone")) == []
    assert flow.handle(LegFailed("inc-p", AttemptFailed(FIRST, "transfer_failed", "late"))) == []


def test_tokens_of_an_older_attempt_are_ignored() -> None:
    flow = placed_flow(relayed=False)
    flow.handle(say(D, 0, 10))
    flow.handle(NodeLost("inc-d", "cut"))
    flow.handle(Found(None, D2, 9.0))
    assert flow.handle(say(D, 1, 99)) == []
    assert flow.handle(say(D2, 1, 99, attempt=1)) == []
    assert tokens(flow.handle(say(D2, 1, 11, attempt=2))) == [11]


def test_hole_in_the_tokens_means_a_new_attempt() -> None:
    flow = placed_flow(relayed=False)
    flow.handle(say(D, 0, 10))
    instructions = flow.handle(say(D, 2, 12))
    assert tokens(instructions) == []
    assert aborted(instructions) == ["d"]
    assert isinstance(instructions[-1], Choose)


def test_failed_transfer_blames_the_prefill_node_even_if_the_decode_node_reports_it() -> None:
    flow = placed_flow()
    instructions = flow.handle(LegFailed("inc-d", AttemptFailed(FIRST, TransferError.code, "timeout")))
    assert aborted(instructions) == ["p"]
    assert instructions[-1] == retry("inc-p")


def test_lost_peer_is_blamed_on_the_peer_whoever_reports_it() -> None:
    for reporter, blamed in ((P, "inc-d"), (D, "inc-p")):
        lost = LegFailed(reporter.incarnation, AttemptFailed(FIRST, PeerLost.code, "gone"))
        assert placed_flow().handle(lost)[-1] == retry(blamed)


def test_error_that_cannot_pass_by_itself_is_not_tried_again() -> None:
    flow = placed_flow()
    instructions = flow.handle(LegFailed("inc-d", AttemptFailed(FIRST, HandshakeRefused.code, "dtype differs")))
    assert isinstance(instructions[-1], Fail)
    assert instructions[-1].error.message == "dtype differs"
    assert aborted(instructions) == ["p"]


def test_last_attempt_that_fails_ends_the_request_with_its_error() -> None:
    flow = placed_flow(max_attempts=1)
    instructions = flow.handle(NodeLost("inc-d", "gone"))
    assert isinstance(instructions[-1], Fail)
    assert instructions[-1].error.http_status == 503


def test_all_tokens_there_and_only_the_finish_lost_is_a_finish() -> None:
    flow = placed_flow(relayed=False, max_tokens=1)
    flow.handle(say(D, 0, 10))
    assert flow.handle(NodeLost("inc-d", "gone"))[-1] == Finish("length")


def scoring_flow() -> Flow:
    flow = Flow(
        "r",
        EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=5, prompt_logprobs=1)),
        jitter=lambda: 0.0,
    )
    flow.start()
    flow.handle(Found(P, D, 9.0))
    return flow


SCORES = [PromptLogprobs(-1.0, 1, [2], [-1.0]), PromptLogprobs(-2.0, 2, [2], [-1.0])]


def scored(start: int, *found: PromptLogprobs, attempt: int = 1) -> Chunk:
    return Chunk("inc-p", TokenChunk(AttemptKey("r", attempt), start, [], prompt_logprobs=list(found)))


def placed_again(flow: Flow, prefill: PeerRef, decode: PeerRef) -> list[int | None]:
    """The log-probabilities that its nodes are asked for, once a backoff has passed."""
    found = Found(prefill, decode, 9.0)
    if flow.state is State.PLACING:
        assert isinstance(flow.handle(found)[0], BackOff)
    assert isinstance(flow.handle(Ready())[0], Choose)
    sent = [each.message for each in flow.handle(found) if isinstance(each, Send)]
    return [each.request.sampling.prompt_logprobs for each in sent if isinstance(each, PrefillRequest | DecodeRequest)]


def test_prompt_logprobs_are_computed_again_until_they_are_complete() -> None:
    flow = scoring_flow()
    assert flow.handle(scored(0, SCORES[0])) == []
    flow.handle(NodeLost("inc-p", "gone"))
    assert placed_again(flow, P, D) == [1, 1]
    assert flow.handle(scored(0, *SCORES, attempt=2)) == [EmitPrompt(SCORES)]
    assert flow.handle(scored(0, *SCORES, attempt=2)) == [], "once"
    flow.handle(NodeLost("inc-d", "gone"))
    assert placed_again(flow, P, D2) == [None, None]
    assert tokens(flow.handle(say(P, 0, 10, attempt=3))) == [10]


def test_a_token_before_all_prompt_logprobs_means_a_new_attempt() -> None:
    flow = scoring_flow()
    flow.handle(scored(0, SCORES[0]))
    instructions = flow.handle(say(P, 0, 10))
    assert tokens(instructions) == []
    assert isinstance(instructions[-1], Choose)
    assert not flow.token_ids


def test_lost_prompt_logprobs_mean_a_new_attempt() -> None:
    instructions = scoring_flow().handle(scored(1, SCORES[1]))
    assert isinstance(instructions[-1], Choose)


def test_an_answer_that_fills_its_nodes_context_goes_on_at_a_larger_one() -> None:
    flow = placed_flow(max_tokens=5)
    flow.handle(say(P, 0, 7))
    moved = flow.handle(say(D, 1, 8, 9, end=True))
    assert tokens(moved) == [8, 9]
    assert moved[-1] == Choose(frozenset(), begun=True), "no node failed"
    asked = [each.message for each in flow.handle(Found(None, D2, 9.0)) if isinstance(each, Send)]
    assert asked == [DecodeRequest(AttemptKey("r", 2), flow.request, pack_ids([7, 8, 9]), None, 9.0)]
    assert flow.handle(say(D2, 3, 10, 11, attempt=2, end=True))[-1] == Finish("length")


def test_an_answer_that_fills_the_largest_context_ends_there() -> None:
    flow = placed_flow(max_tokens=5)
    flow.handle(say(P, 0, 7))
    flow.handle(say(D, 1, 8, end=True))
    assert flow.handle(NoNode(Unavailable("no decode node takes 4 tokens now"), 0.0, False)) == [Finish("length")]
    assert flow.state is State.DONE


def test_an_answer_that_moved_waits_for_a_node_like_any_other() -> None:
    """The larger node was lost: another attempt does not end the answer early."""
    flow = placed_flow(max_tokens=5, relayed=False)
    flow.handle(say(D, 0, 7, end=True))
    flow.handle(Found(None, D2, 9.0))
    assert isinstance(flow.handle(NodeLost("inc-d2", "gone"))[-1], Choose)
    (waits,) = flow.handle(NoNode(Unavailable("none"), 0.0, False))
    assert isinstance(waits, AwaitNode)

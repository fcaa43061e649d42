"""Failures known from other systems (docs/records/known-failures.md), inside the two nodes.

The real cores of a prefill and a decode node with a fake model and a fake wire; the test carries the messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import get_args, get_type_hints

from support.fake_engine import generate
from support.node_pair import D_REF, KEY, LAYOUT, P_LINK, P_REF, PROMPT, ROUTER, Pair

from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Grant,
    Message,
    NodeRecord,
    Offer,
    PeerRef,
    Ping,
    Pong,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
)
from common.engine.kv_transfer import DestinationReleased, SourceReleased
from common.node.events import FromClient, FromPeer, PeerGone
from decode_node.node import Phase


def started(pair: Pair) -> None:
    """The request is offered and granted, its first block was written."""
    pair.request()
    pair.step_prefill()
    pair.to_decode(Offer)
    pair.step_decode()
    pair.to_prefill()
    assert pair.wire.pump()


def held(release: Callable[[AttemptKey], None], aborted: list[AttemptKey]) -> Callable[[AttemptKey], None]:
    """An abort that only notes the key: a transport that is in the middle of a copy."""
    del release
    return aborted.append


def test_an_aborted_destination_is_not_reused_before_its_writer_has_stopped() -> None:
    pair, aborted = Pair(d_blocks=4), list[AttemptKey]()
    pair.wire.receiver.abort = held(pair.wire.receiver.abort, aborted)  # type: ignore[method-assign]
    started(pair)
    pair.d.handle(FromClient(ROUTER, Abort(KEY)))
    assert aborted == [KEY]
    assert pair.d.attempts[KEY].phase is Phase.DRAINING
    assert pair.d.scheduler.pool.num_used == 3
    other = list(range(500, 540))
    params = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
    pair.d.handle(
        FromClient(
            ROUTER, DecodeRequest(AttemptKey("r2", 1), EngineRequest(pack_ids(other), params), pack_ids(), None, 600.0)
        )
    )
    pair.step_decode()
    assert pair.d.scheduler.running == {}, "there is no room until the writer is done"
    del pair.wire.incoming[KEY]
    pair.d.handle(DestinationReleased(KEY))
    for _ in range(10):
        pair.step_decode()
    assert pair.tokens(AttemptKey("r2", 1)) == generate(other, 2)


def test_every_first_token_belongs_to_its_own_request_however_many_share_the_blocks() -> None:
    """There are no metadata slots to reuse: the first token travels in a message that carries its attempt's key."""
    pair = Pair(p_blocks=14, d_blocks=18)
    for wave in range(6):
        prompts = {
            AttemptKey(f"w{wave}-{n}", 1): list(range(200 * n + wave, 200 * n + wave + 20 + 9 * n)) for n in range(4)
        }
        for key, prompt in prompts.items():
            pair.request(key, prompt, max_tokens=4)
        pair.run(60)
        for key, prompt in prompts.items():
            assert pair.tokens(key) == generate(prompt, 4), key
        pair.assert_whole()


def test_whatever_travels_about_a_request_carries_the_key_that_the_router_made() -> None:
    """No table of a node is keyed by a number of its own, so none can collide."""
    without_request = {Ping, Pong, NodeRecord, TokenBatch}
    for kind in set(get_args(Message)) - without_request:
        types = get_type_hints(kind)
        if "key" not in types:
            assert not {"request_id", "attempt", "token_ids", "block_ids"} & set(types), kind
        else:
            assert types["key"] is AttemptKey, kind
    pair = Pair()
    # The same request id at both nodes twice over: two attempts, two sequences.
    for attempt in (1, 2):
        pair.request(AttemptKey("r", attempt))
    pair.run()
    for attempt in (1, 2):
        assert pair.tokens(AttemptKey("r", attempt)) == generate(PROMPT, 5)
    pair.assert_whole()


def test_the_next_attempt_is_taken_while_the_one_before_it_still_drains() -> None:
    pair, aborted = Pair(), list[AttemptKey]()
    release = pair.wire.receiver.abort
    pair.wire.receiver.abort = held(release, aborted)  # type: ignore[method-assign]
    started(pair)
    for node in (pair.p, pair.d):
        node.handle(FromClient(ROUTER, Abort(KEY)))
    again = AttemptKey("r", 2)
    pair.request(again)
    pair.run()
    assert pair.tokens(again) == generate(PROMPT, 5)
    assert not [m for m in pair.heard(pair.p_out) + pair.heard(pair.d_out) if isinstance(m, AttemptFailed)]
    release(KEY)
    pair.assert_whole()


def test_a_source_that_timed_out_is_kept_until_its_reader_has_stopped() -> None:
    pair, aborted = Pair(), list[AttemptKey]()
    pair.wire.sender.abort = held(pair.wire.sender.abort, aborted)  # type: ignore[method-assign]
    started(pair)
    pair.clock.advance(601.0)
    pair.p.on_time(pair.clock())
    assert aborted == [KEY]
    assert pair.p.scheduler.pool.num_used == 3, "the decode node may still read them"
    del pair.wire.outgoing[KEY]
    pair.p.handle(SourceReleased(KEY, 0, None))
    assert pair.p.scheduler.pool.num_used == 0


def test_the_prefill_leg_ends_with_the_decode_leg_and_pins_nothing() -> None:
    """By the router's abort; and by itself where router and decode node are both gone."""
    pair = Pair()
    started(pair)
    pair.p.handle(FromClient(ROUTER, Abort(KEY)))
    assert pair.p.scheduler.pool.num_used == 0
    assert not pair.p.attempts

    pair = Pair()
    started(pair)
    pair.p.handle(PeerGone(D_REF.incarnation, "cut"))
    assert pair.p.scheduler.pool.num_used == 0
    assert not pair.p.attempts


def test_a_prefill_node_that_restarted_is_somebody_else() -> None:
    pair = Pair()
    pair.request()
    pair.step_prefill()
    [offer] = [out.message for out in pair.p_out if isinstance(out.message, Offer)]
    reborn = dataclasses.replace(offer, src=PeerRef(P_REF.node_id, "p2", P_REF.control_address, []))
    pair.d.handle(FromClient(P_LINK, reborn))
    pair.d.send_buffer.flush()
    [failure] = [message for message in pair.heard(pair.d_out) if isinstance(message, AttemptFailed)]
    assert failure.code == "peer_lost"
    assert not pair.d.attempts
    # And a grant of a decode node that restarted is no grant.
    reborn_decode = PeerRef(D_REF.node_id, "d2", D_REF.control_address, [])
    pair.p.handle(FromPeer("d2", Grant(KEY, reborn_decode, LAYOUT, [0], [pack_ids([0, 1, 2])])))
    assert not pair.wire.grants


def test_a_request_that_comes_twice_runs_once() -> None:
    pair = Pair()
    pair.request()
    started_with = list(pair.p.attempts)
    pair.request()
    assert list(pair.p.attempts) == started_with == list(pair.d.attempts)
    pair.run()
    assert pair.tokens() == generate(PROMPT, 5)
    pair.assert_whole()


def test_decode_room_is_taken_as_it_is_needed_and_giving_it_back_costs_time_only() -> None:
    """Nothing is reserved for tokens that may never come: sequences run side by side that would not all fit in the
    end. When memory is out the youngest gives its blocks back and is computed again."""
    pair = Pair(p_blocks=40, d_blocks=16)
    keys = [AttemptKey(f"r{n}", 1) for n in range(4)]
    prompts = {key: list(range(100 * n, 100 * n + 32)) for n, key in enumerate(keys)}
    for key, prompt in prompts.items():
        pair.request(key, prompt, max_tokens=100)  # nine blocks each in the end, 36 together
    side_by_side = 0
    for _ in range(900):
        pair.run(1)
        side_by_side = max(side_by_side, len(pair.d.scheduler.running))
        if not pair.d.attempts:
            break
    assert side_by_side >= 3
    assert pair.d.scheduler.num_preemptions > 0
    for key, prompt in prompts.items():
        assert pair.tokens(key) == generate(prompt, 100)
    pair.assert_whole()


def test_a_step_that_fails_ends_its_own_requests_and_nothing_else() -> None:
    """The other half, a dead engine behind a good /health, is in test_peers_router.py."""
    pair = Pair()
    pair.p_runner.fail_next = RuntimeError("a bad request")
    pair.request()
    pair.step_prefill()
    failures = [message for message in pair.heard(pair.p_out) if isinstance(message, AttemptFailed)]
    assert [failure.key for failure in failures] == [KEY]
    pair.to_decode()
    pair.d.handle(FromClient(ROUTER, Abort(KEY)))
    after = AttemptKey("after", 1)
    pair.request(after)
    pair.run()
    assert pair.tokens(after) == generate(PROMPT, 5)
    pair.assert_whole()


def test_a_request_that_is_too_long_for_a_node_is_answered() -> None:
    """The client is told by the router already; a node says it too."""
    pair = Pair()
    pair.request(prompt=list(range(200)))
    for node in (pair.p, pair.d):
        node.send_buffer.flush()
    for out in (pair.p_out, pair.d_out):
        [failure] = [message for message in pair.heard(out) if isinstance(message, AttemptFailed)]
        assert "maximum context length" in failure.message
    pair.assert_whole()


def test_a_prefix_is_found_by_its_own_tenant_only() -> None:
    pair = Pair(p_blocks=64)
    params = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    cached: dict[str, int] = {}
    for name, salt in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("none", "")):
        request = PrefillRequest(
            AttemptKey(name, 1), EngineRequest(pack_ids(PROMPT), params, salt), pack_ids(), D_REF, 600.0
        )
        pair.p.handle(FromClient(ROUTER, request))
        for _ in range(6):
            pair.step_prefill()
            while pair.wire.pump():
                pass
        stats = [
            chunk.stats
            for message in pair.heard(pair.p_out)
            if isinstance(message, TokenBatch)
            for chunk in message.chunks
            if chunk.key.request_id == name
        ]
        assert stats[0] is not None
        cached[name] = stats[0].cached_tokens
    assert cached == {"a1": 0, "a2": 32, "b1": 0, "none": 0}


def test_what_is_said_to_be_relayed_was_relayed_and_not_computed_again() -> None:
    """Also with real nodes and to the byte: `test_relay_moves_exactly_the_bytes_that_the_layout_says`."""
    pair = Pair()
    pair.request(max_tokens=3)
    pair.run()
    assert pair.wire.blocks_moved == 3
    assert pair.d_runner.steps == 2, "the decode node computed nothing but its two tokens"
    [stats] = [
        chunk.stats
        for message in pair.heard(pair.d_out)
        if isinstance(message, TokenBatch)
        for chunk in message.chunks
        if chunk.stats is not None
    ]
    assert stats.relayed_bytes > 0

"""A request that nobody wants any more: both legs are freed within one step of either node, whenever it is given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

import pytest
from support.fake_engine import generate
from support.node_pair import PROMPT, Pair

from common.control.messages import Abort, AttemptKey, NodeLoad
from common.node.events import ClientLost, FromClient
from decode_node.node import Phase

GONE, STAYS = b"router-that-goes", b"router-that-stays"
UNWANTED = [AttemptKey("unwanted", 1), AttemptKey("unwanted-too", 1)]
WANTED = AttemptKey("wanted", 1)
OTHER_PROMPT = list(range(100, 137))
MOMENTS = 45
"""So many single moves: from queued over every chunk, grant, slice and token to the end."""


def moves(pair: Pair) -> list[Callable[[], object]]:
    """One round of everything that moves, as single moves."""
    return [pair.step_prefill, pair.to_decode, pair.step_decode, pair.to_prefill, pair.wire.pump]


def abort(pair: Pair) -> None:
    for key in UNWANTED:
        pair.p.handle(FromClient(GONE, Abort(key)))
        pair.d.handle(FromClient(GONE, Abort(key)))


def lease_ends(pair: Pair) -> None:
    pair.p.handle(ClientLost(GONE))
    pair.d.handle(ClientLost(GONE))


@pytest.mark.parametrize("give_up", [abort, lease_ends])
@pytest.mark.parametrize("blocks", [32, 7], ids=["room", "crowded"])
def test_given_up_at_any_moment_it_frees_both_nodes_within_a_step_and_disturbs_nobody(
    give_up: Callable[[Pair], None], blocks: int
) -> None:
    seen: set[Phase] = set()
    for moment in range(MOMENTS):
        pair = Pair(p_blocks=blocks, d_blocks=blocks, chunk=8)
        for key in UNWANTED:
            pair.request(key, PROMPT, 8, router=GONE)
        pair.request(WANTED, OTHER_PROMPT, 8, router=STAYS)
        for _ in range(moment // 5):
            for move in moves(pair):
                move()
        for move in moves(pair)[: moment % 5]:
            move()
        seen |= {attempt.phase for attempt in pair.d.attempts.values()}
        assert pair.d.has_deadlines == bool(pair.d.attempts or pair.d.early)
        give_up(pair)
        pair.step_prefill()
        pair.step_decode()
        for node in (pair.p, pair.d):
            assert set(node.attempts) <= {WANTED}, moment
            held = {block for attempt in node.attempts.values() for block in chain(*attempt.seq.blocks.tables)}
            assert node.scheduler.pool.num_used == len(held), f"blocks of the unwanted are still used at {moment}"
            node.scheduler.check_integrity()
        pair.run(60)
        assert pair.tokens(WANTED, STAYS) == generate(OTHER_PROMPT, 8), moment
        pair.assert_whole()
        assert [pair.wire.outgoing, pair.wire.incoming, pair.d.deferred] == [{}, {}, deque()]
        pair.clock.advance(4.0)  # an offer that was under way is forgotten when it is too late for its request
        pair.d.on_time(pair.clock())
        assert not pair.d.early
        assert [pair.p.has_deadlines, pair.d.has_deadlines] == [False, False]
        for load in (pair.p.load, pair.d.load):
            assert at_rest(load), load
    assert {Phase.NO_OFFER, Phase.RECEIVING, Phase.ACTIVE} <= seen


def at_rest(load: NodeLoad) -> bool:
    return (load.running, load.waiting, load.queued_tokens, load.kv_blocks_used) == (0, 0, 0, 0)

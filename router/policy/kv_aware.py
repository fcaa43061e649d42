"""`kv_aware`: score = estimated seconds, with coefficients that are learned online (`router.costs`).

    prefill:  queue + prefill(uncached tokens) + 12 * prefill(uncached tokens) / slowness
              queue   = slowness * (queued_token_s * backlog + base * requests)
              prefill = slowness * (base + token * uncached + context * uncached * mean tokens before them)
              (the transfer to the decode node is the same for all)
    decode:   transfer(bytes that it lacks) + answer * step(its requests and this one)
              + what is missing of the blocks for the whole sequence, and of a seat, in such answers
    relay:    queue + prefill + transfer; local: the decode node's queue + prefill. Each with what it costs others:
              those after it, as above, and a decode node's streams, one more than it has. The cheaper one is taken

The first sum is this request's time to first token; the second is what its work costs those that come after it: they
wait for it, and its blocks evict theirs. On the Mooncake conversation trace the hit rate goes from 86 % of what one
pooled cache would give to 96 % with it, and the mean time to first token does not change. Ties go to the node that was
given the least work of late, so that nodes' caches live equally long.

It is counted at the fleet's usual speed: a slow node that is idle must not look expensive beside a queue.

A hot prefix spills to a second holder as soon as queueing at the first costs more than computing it once again;
from then on both hold it. The formulas take whole columns and single nodes' numbers alike.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from router.costs import Costs
from router.policy.base import Fleet, FloatArray, Memory, Policy, Query

_OTHERS = 12.0
"""So many times more than in its own time to first token a request's work counts for those after it."""
_CROWD, _CROWD_SPARE = 1.1, 4.0
"""A node with more than so many times the mean requests (weighed by its slowness), and so many more, is passed over."""
_OVERLOADED_S = 100.0
_FEW = 4
"""Up to so many nodes are scored one by one."""
_NO_ROOM_S = 1000.0
"""A decode node without blocks for the prompt itself: the relay would wait for somebody's end."""

_Number = TypeVar("_Number", float, FloatArray)


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """Estimated seconds: of waiting and work on a prefill node, of relay and answer on a decode node."""
    if len(fleet) <= _FEW:
        return _score_few(fleet, query)
    held = fleet.hit_blocks(query.hits)
    if fleet.role == "decode":
        return _decode_s(fleet, query, held)
    tokens = np.maximum(query.num_tokens - held * query.block_size, 1.0)
    scores = _prefill_s(fleet.costs, tokens, query) * (fleet.slowness + _OTHERS)
    scores += _queue_s(fleet.costs, fleet.slow_backlog, fleet.slow_requests)
    return _pass_over_crowds(scores, fleet.slow_requests)


def _score_few(fleet: Fleet, query: Query) -> FloatArray:
    """The same one by one, which is quicker for a few: NumPy's calls cost more than its sums."""
    one = _decode_at if fleet.role == "decode" else _prefill_score_at
    scores = np.array([one(fleet, row, query) for row in range(len(fleet))])
    if len(scores) == 1:
        return scores
    return _pass_over_crowds(scores, fleet.step_requests if fleet.role == "decode" else fleet.slow_requests)


def _prefill_score_at(fleet: Fleet, row: int, query: Query) -> float:
    work_s = _prefill_s(fleet.costs, _uncached(fleet, row, query), query)
    return work_s * (fleet.slowness.item(row) + _OTHERS) + queue_at(fleet, row, fleet.costs)


def _decode_at(fleet: Fleet, row: int, query: Query) -> float:
    """As `_decode_s`, for one node and without the crowds."""
    answer_s = _answer_tokens(fleet.costs, query) * step_at(fleet, row)
    score_s = transfer_at(fleet, row, query) + answer_s
    spare, room = fleet.spare_seats.item(row), fleet.room.item(row)
    if spare < 0:
        score_s -= answer_s * spare / fleet.capacity.item(row)
    whole = -(-(query.num_tokens + query.max_new_tokens) // query.block_size)
    if room < whole:
        held = query.hits.get(fleet.incarnations[row], 0)
        score_s += answer_s * max(whole - held - room, 0.0) / fleet.total_blocks.item(row)
        if -(-query.num_tokens // query.block_size) - held > room:
            score_s += _NO_ROOM_S
    return score_s


def queue_at(fleet: Fleet, row: int, costs: Costs) -> float:
    """The wait for one node's backlog, in seconds."""
    return _queue_s(costs, fleet.slow_backlog.item(row), fleet.slow_requests.item(row))


def prefill_at(fleet: Fleet, row: int, query: Query, costs: Costs) -> float:
    """Prefill at one node without the wait, in seconds."""
    return fleet.slowness.item(row) * _prefill_s(costs, _uncached(fleet, row, query), query)


def transfer_at(fleet: Fleet, row: int, query: Query) -> float:
    """A relay of what one decode node lacks, in seconds."""
    missing = query.num_tokens - query.hits.get(fleet.incarnations[row], 0) * query.block_size
    return _transfer_s(fleet.costs, max(missing, 0.0) * fleet.token_bytes.item(row), fleet.link_slowness.item(row))


def step_at(fleet: Fleet, row: int) -> float:
    """Duration of one decode node's steps with one more request, in seconds."""
    costs = fleet.costs
    return fleet.step_slowness.item(row) * costs.step_base_s + fleet.step_seats.item(row) * costs.step_seq_s


def others_at(fleet: Fleet, row: int, query: Query, costs: Costs) -> float:
    """What this request's prefill at one node costs other requests, in seconds.

    Those that come after it; on a decode node its streams too, each of which waits for it, and one that comes meanwhile.
    """
    tokens = _uncached(fleet, row, query)
    lost_s = _OTHERS * _prefill_s(costs, tokens, query)
    if fleet.role == "decode":
        per_stream_s = prefill_at(fleet, row, query, costs) - fleet.slowness.item(row) * costs.prefill_base_s
        lost_s += per_stream_s * (fleet.requests.item(row) + 1.0)
    return lost_s


def _uncached(fleet: Fleet, row: int, query: Query) -> float:
    """Prompt tokens that one node has to compute; the last one always."""
    return max(query.num_tokens - query.hits.get(fleet.incarnations[row], 0) * query.block_size, 1.0)


def _pass_over_crowds(scores: FloatArray, load: FloatArray) -> FloatArray:
    """What keeps a crowd with one prefix from gathering on one node, however good its estimates look."""
    limit = float(np.add.reduce(load)) * (_CROWD / len(load)) + _CROWD_SPARE
    if load[load.argmax()] >= limit:
        scores += _OVERLOADED_S * (load >= limit)
    return scores


def _queue_s(costs: Costs, slow_backlog: _Number, slow_requests: _Number) -> _Number:
    return slow_backlog * costs.queued_token_s + slow_requests * costs.prefill_base_s


def _prefill_s(costs: Costs, tokens: _Number, query: Query) -> _Number:
    """On a node of the fleet's usual speed."""
    alone_s = costs.prefill_token_s + costs.prefill_context_s * query.num_tokens
    return tokens * (alone_s - costs.prefill_context_s / 2 * tokens) + costs.prefill_base_s


def _transfer_s(costs: Costs, size_bytes: _Number, slowness: _Number) -> _Number:
    return slowness * (costs.transfer_base_s + costs.transfer_byte_s * size_bytes)


def _answer_tokens(costs: Costs, query: Query) -> float:
    """Length of the answer to expect."""
    return min(costs.output_tokens, query.max_new_tokens) if query.max_new_tokens else costs.output_tokens


def _answers_s(costs: Costs, length: float, step_slowness: FloatArray, step_seats: FloatArray) -> FloatArray:
    return step_slowness * (length * costs.step_base_s) + step_seats * (length * costs.step_seq_s)


def _decode_s(fleet: Fleet, query: Query, held: FloatArray) -> FloatArray:
    """Relay and the whole answer at each node, in seconds."""
    costs, block = fleet.costs, query.block_size
    missing = np.maximum(query.num_tokens - held * block, 0.0)
    answer = _answers_s(costs, _answer_tokens(costs, query), fleet.step_slowness, fleet.step_seats)
    scores = _transfer_s(costs, missing * fleet.token_bytes, fleet.link_slowness)
    scores += answer
    scores = _pass_over_crowds(scores, fleet.step_requests)
    spare = fleet.spare_seats
    if spare[spare.argmin()] < 0:
        scores += answer * np.maximum(-spare, 0.0) / fleet.capacity
    whole, room = -(-(query.num_tokens + query.max_new_tokens) // block), fleet.room
    if room[room.argmin()] < whole:
        prompt = -(-query.num_tokens // block)
        lacking = np.maximum(whole - held - room, 0.0)
        scores += answer * lacking / fleet.total_blocks + _NO_ROOM_S * (prompt - held > room)
    return scores


POLICY = Policy("kv_aware", score, slack=0.01, tie="recent_s", estimates=True)

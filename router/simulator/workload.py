"""The requests of a run: a trace, overlaid copies of a trace, two traces whose shares turn, or synthetic ones. Pure.

The synthetic ones are conversations, or prompts of two kinds whose shares turn.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from common.base.hashing import HASH_BYTES, BlockHash
from router.simulator.request import SimRequest
from router.simulator.traces import TraceLine

_NAMES = 1 << (8 * HASH_BYTES)
_ODD = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""2^128 / golden ratio, odd, so that different numbers have different products modulo 2^128."""


def block_name(copy: int, hash_id: int) -> BlockHash:
    """The name of a block in one copy of the trace, different in each copy. Names are evenly distributed, as the index needs."""
    return (((copy & 0xFFFFFFFF) << 64 | hash_id) * _ODD & _NAMES - 1).to_bytes(HASH_BYTES, "little")


def from_trace(
    lines: Sequence[TraceLine], *, requests: int | None = None, rate_scale: float = 1.0, seed: int = 0
) -> Iterator[SimRequest]:
    """The first `requests` (default: all of the trace), arriving `rate_scale` times as fast, the first at 0.

    If that is more than the trace has, copies with their own block names are overlaid, each starting at another point of
    the trace: the rate grows with the number of copies, and the reuse within each stays the same.
    """
    wanted = len(lines) if requests is None else requests
    copies = -(-wanted // len(lines))
    span_s = lines[-1].arrival_s - lines[0].arrival_s + 1.0
    rng = random.Random(seed)
    starts = [0] + [rng.randrange(len(lines)) for _ in range(copies - 1)]
    for number, (arrival_s, copy, line) in enumerate(islice(_overlaid(lines, starts, span_s), wanted)):
        names = [block_name(copy, hash_id) for hash_id in line.hash_ids]
        yield SimRequest(number, arrival_s / rate_scale, line.input_tokens, line.output_tokens, names)


def _overlaid(
    lines: Sequence[TraceLine], starts: Sequence[int], span_s: float
) -> Iterator[tuple[float, int, TraceLine]]:
    """(arrival, copy, line) of copies of the trace that begin at these lines, by arrival."""
    streams = [_one_copy(lines, copy, start, span_s) for copy, start in enumerate(starts)]
    return heapq.merge(*streams, key=lambda item: item[:2])


def _one_copy(
    lines: Sequence[TraceLine], copy: int, start: int, span_s: float
) -> Iterator[tuple[float, int, TraceLine]]:
    """(arrival, copy, line) of the whole trace, starting at line `start` and wrapping around."""
    begin_s = lines[start].arrival_s
    for line in lines[start:]:
        yield line.arrival_s - begin_s, copy, line
    for line in lines[:start]:
        yield line.arrival_s + span_s - begin_s, copy, line


SHARES = 0.8, 0.2
"""Shares of the first of two kinds of requests, at the beginning of a period and in its middle."""


def share_of_first(now_s: float, period_s: float) -> float:
    """The share of the first kind, which turns with the period."""
    high, low = SHARES
    return (high + low) / 2 + (high - low) / 2 * math.cos(2 * math.pi * now_s / period_s)


def joined(
    pair: Sequence[Sequence[TraceLine]], *, requests: int, rates: Sequence[float], period_s: float, seed: int = 0
) -> Iterator[SimRequest]:
    """Requests of two traces whose shares turn. `rates`: requests per second of each.

    The first has 80 % of its rate at the beginning of a period and 20 % in its middle, the second the reverse. Copies of each
    trace are overlaid, begin again at their end under new block names, and are thinned by whole conversations: by the second
    block of a prompt, because many conversations begin with the same system prompt.
    """

    def present(kind: int, now_s: float) -> float:
        share = share_of_first(now_s, period_s)
        return rates[kind] * (1 - share if kind else share)

    streams = [
        _thinned(lines, rates[kind] * max(SHARES), lambda now_s, kind=kind: present(kind, now_s), seed * 2 + kind)
        for kind, lines in enumerate(pair)
    ]
    merged = heapq.merge(*streams, key=lambda item: item[0])
    for number, (arrival_s, names, line) in enumerate(islice(merged, requests)):
        yield SimRequest(number, arrival_s, line.input_tokens, line.output_tokens, names)


def _thinned(
    lines: Sequence[TraceLine], most: float, wanted: Callable[[float], float], seed: int
) -> Iterator[tuple[float, list[BlockHash], TraceLine]]:
    """(arrival, names of the blocks, line) without end: `wanted` requests per second at each time, at most `most`."""
    span_s = lines[-1].arrival_s - lines[0].arrival_s + 1.0
    copies = math.ceil(most * span_s / len(lines))
    own_rate = copies * len(lines) / span_s
    rng = random.Random(seed)
    starts = [rng.randrange(len(lines)) for _ in range(copies)]
    for turn in count():
        for arrival_s, copy, line in _overlaid(lines, starts, span_s):
            now_s = turn * span_s + arrival_s
            name = (seed << 24) + turn * copies + copy
            drawn = int.from_bytes(block_name(name, line.hash_ids[min(1, len(line.hash_ids) - 1)]), "little") / _NAMES
            if drawn < wanted(now_s) / own_rate:
                yield now_s, [block_name(name, hash_id) for hash_id in line.hash_ids], line


_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 50, 4
"""System prompts of synthetic conversations, and blocks of each. The k-th is chosen with a probability proportional to 1/k."""
_TURN_BLOCKS = 4
"""Mean blocks that a turn adds, the answer before it included."""
_TURN_OUTPUT_TOKENS = 200
"""Mean, exponentially distributed."""
_MORE_TURNS = 0.7
"""Share of requests that continue a conversation, if one is open."""


def synthetic(requests: int, rate: float, block_tokens: int, seed: int) -> Iterator[SimRequest]:
    """Conversations that share system prompts: each turn's prompt is the whole conversation so far and new text.

    `rate`: arrivals per second, Poisson. The same for the same seed.
    """
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(_SYSTEM_PROMPTS)]
    systems = [[block_name(-1 - group, i) for i in range(_SYSTEM_BLOCKS)] for group in range(_SYSTEM_PROMPTS)]
    open_talks: list[tuple[str, list[BlockHash]]] = []
    ids = count()
    now_s = 0.0
    for number in range(requests):
        now_s += rng.expovariate(rate)
        if open_talks and rng.random() < _MORE_TURNS:
            session, history = open_talks.pop(rng.randrange(len(open_talks)))
        else:
            session, history = f"talk-{number}", rng.choices(systems, weights)[0]
        added = 1 + int(rng.expovariate(1 / _TURN_BLOCKS))
        history = history + [block_name(0, next(ids)) for _ in range(added)]
        if len(history) * block_tokens < 100_000:
            open_talks.append((session, history))
        output = 1 + int(rng.expovariate(1 / _TURN_OUTPUT_TOKENS))
        tokens = len(history) * block_tokens - rng.randrange(block_tokens)
        yield SimRequest(number, now_s, tokens, output, history, session)


_PROMPT_TOKENS, _OUTPUT_TOKENS = (8192, 512), (64, 3000)
"""Two kinds of requests, whose shares turn: prompt lengths, and mean lengths of answers (exponentially distributed)."""


def turning(requests: int, rate: float, period_s: float, block_tokens: int, seed: int) -> Iterator[SimRequest]:
    """Long prompts with short answers and short prompts with long answers, whose shares turn from 80:20 to 20:80 and back.

    `rate`: arrivals per second, Poisson. No two prompts share a block.
    """
    rng = random.Random(seed)
    ids = count()
    now_s = 0.0
    for number in range(requests):
        now_s += rng.expovariate(rate)
        kind = int(rng.random() >= share_of_first(now_s, period_s))
        tokens = _PROMPT_TOKENS[kind]
        names = [block_name(0, next(ids)) for _ in range(-(-tokens // block_tokens))]
        output = 1 + int(rng.expovariate(1 / _OUTPUT_TOKENS[kind]))
        yield SimRequest(number, now_s, tokens, output, names)
